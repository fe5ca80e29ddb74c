"""``python -m fastfold``: the same as the ``fastfold`` command."""

import sys

from fastfold.cli import main

if __name__ == "__main__":
    sys.exit(main())
