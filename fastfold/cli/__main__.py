"""``python -m fastfold.cli``: the same as the ``fastfold`` command."""

import sys

from fastfold.cli.main import main

sys.exit(main())
