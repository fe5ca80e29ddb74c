"""``python -m fastfold.cli``: run the ``fastfold`` command."""

import sys

from fastfold.cli.command import main

if __name__ == "__main__":
    sys.exit(main())
