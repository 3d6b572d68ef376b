"""``python -m tenure``."""

import sys

# The current folder is the program's: a file in it called json.py must not be ours.
_FIRST = [] if sys.flags.safe_path else sys.path[:1]
del sys.path[: len(_FIRST)]

from tenure._cli import import_early, main  # noqa: E402  # see above

import_early("".join(sys.argv[1:2]))
sys.path[:0] = _FIRST

if __name__ == "__main__":
    sys.exit(main())
