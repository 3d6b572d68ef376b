"""The command line, ``tenure`` and ``python -m tenure``; and what stands for it in a notebook."""

from ._cell_magic import load_ipython_extension as load_ipython_extension
from ._cell_magic import unload_ipython_extension as unload_ipython_extension
from ._main import main as main
