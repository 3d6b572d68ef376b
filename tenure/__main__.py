"""``python -m tenure``."""

import sys

from tenure._cli import main

if __name__ == "__main__":
    sys.exit(main())
