"""A real InteractiveShell for tests, of a terminal or as a notebook's kernel names its cells."""

import builtins
import hashlib
import sys
from contextlib import contextmanager

import pytest
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output
from traitlets.config import Config


@contextmanager
def opened(*, of_notebook=False, extension=True):
    """A shell of this process, which may load the extension; it is gone with the block."""
    # a shell makes itself the main module
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "__main__", sys.modules["__main__"])
        # where an interactive Python has put its last value there, a shell leaves that alone
        patch.delattr(builtins, "_", raising=False)
        config = Config()
        config.HistoryManager.enabled = False
        shell = InteractiveShell.instance(config=config)
        if of_notebook:
            shell.compile.get_code_name = _name_of_kernel
        if extension:
            ran(shell, "%load_ext tenure")
        try:
            yield shell
        finally:
            shell.restore_sys_module_state()
            shell.user_ns.clear()  # the shell itself outlives the test
            InteractiveShell.clear_instance()


def fixture_of_shell(first_cell):
    """A fixture: a shell of a notebook, or of a terminal where `in_both` asks for both."""

    @pytest.fixture
    def shell(request):
        with opened(of_notebook=getattr(request, "param", "notebook") == "notebook") as shell:
            ran(shell, first_cell)
            yield shell

    return shell


in_both = pytest.mark.parametrize("shell", ["terminal", "notebook"], indirect=True)


def _name_of_kernel(raw_code, transformed_code, number):
    """As ipykernel does: a file that is written for a debugger alone, by the code's hash."""
    digest = hashlib.sha1(raw_code.encode(), usedforsecurity=False).hexdigest()
    return f"/tmp/ipykernel_4711/{int(digest[:8], 16)}.py"


def ran(shell, code):
    """Run a cell; its outputs, or its error."""
    with capture_output() as captured:
        result = shell.run_cell(code, store_history=True)
    result.raise_error()
    return captured
