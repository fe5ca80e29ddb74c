"""``python -m fastfold``: the same as the ``fastfold`` command."""

import sys

from fastfold.cli import main

sys.exit(main())
