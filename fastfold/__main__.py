"""``python -m fastfold``: the same as the ``fastfold`` command."""

from fastfold.cli import console

if __name__ == "__main__":
    console()
