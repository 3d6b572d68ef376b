"""How much of an answer of ``sys.getrefcount`` is the asking: measured, as Pythons differ.

Up to Python 3.13 the argument is one reference more. From 3.14 on it borrows that of the variable
of the running function, if one is asked about. So nothing else is, here and elsewhere.
"""

import sys


def _measure() -> int:
    found = object()
    return sys.getrefcount(found)


OF_VARIABLE = _measure()
"""What it says of an object that the variable, which is asked about, alone holds."""
