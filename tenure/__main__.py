"""``python -m tenure``."""

import os
import sys

# The current folder is the program's: a file in it called json.py must not be ours. The command
# tenure has its own folder here.
if not sys.flags.safe_path:
    sys.path[0] = os.path.dirname(sys.executable)

from tenure._cli import main  # see above

if __name__ == "__main__":
    sys.exit(main())
