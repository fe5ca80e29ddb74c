"""``python -m fastfold.cli``: the same as the ``fastfold`` command."""

import sys

from fastfold.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
