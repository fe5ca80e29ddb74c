"""Fill ``.gpu`` with the packages that ``benchmarks/gpu/whole_folds.py`` needs on a machine without a package index.

Usage: python benchmarks/gpu/pack.py [--python 312] [--alphafold CHECKOUT] [--openfold CHECKOUT]

Wheels are unpacked into ``.gpu/site``, without their dependencies. Of AlphaFold's checkout the network is copied, of
OpenFold's the package. The folder is ignored by git; at most 64 MiB may travel.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
PACKED = REPOSITORY / ".gpu"
PACKAGES = ("ml_collections", "dm-haiku", "dm-tree", "immutabledict", "jmp", "tabulate")
"""A fold of a random network needs the first, DeepMind's program the others."""
_CHECKOUTS = {
    "alphafold": (
        "alphafold/__init__.py",
        "alphafold/model",
        "alphafold/model/tf/__init__.py",
        "alphafold/model/tf/shape_placeholders.py",
        "alphafold/common",
    ),
    "openfold": ("openfold",),
}
"""Parts of each program's checkout that travel; of AlphaFold's input pipeline only names, without TensorFlow."""
LIMIT_BYTES = 64 * 2**20


def main() -> None:
    """Fill the folder, and print its size; exit with a message if it is too large."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--python", default="312", help="version of Python on the machine")
    parser.add_argument("--alphafold", type=Path, help="checkout of github.com/google-deepmind/alphafold")
    parser.add_argument("--openfold", type=Path, help="checkout of github.com/aqlaboratory/openfold")
    options = parser.parse_args()
    shutil.rmtree(PACKED, ignore_errors=True)
    with tempfile.TemporaryDirectory() as folder:
        wanted = ["--python-version", options.python, "--platform", "manylinux_2_28_x86_64"]
        wanted += [
            "--platform",
            "manylinux2014_x86_64",
            "--only-binary",
            ":all:",
            "--no-deps",
            "--dest",
            folder,
        ]
        subprocess.run([sys.executable, "-m", "pip", "download", "--quiet", *wanted, *PACKAGES], check=True)
        for wheel in sorted(Path(folder).glob("*.whl")):
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(PACKED / "site")
    checkouts = {name: getattr(options, name) for name in _CHECKOUTS}
    for program, name in ((a, b) for a, names in _CHECKOUTS.items() if checkouts[a] for b in names):
        source, target = checkouts[program] / name, PACKED / program / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("*_test.py", "tf", "testdata"))
        elif source.is_file():
            shutil.copy(source, target)
        else:
            sys.exit(f"no {name} in {checkouts[program]}; give a whole checkout (--{program})")
    size = sum(path.stat().st_size for path in PACKED.rglob("*") if path.is_file())
    print(f"{PACKED}: {size / 2**20:.1f} MiB of at most {LIMIT_BYTES >> 20}")
    if size > LIMIT_BYTES:
        sys.exit("too large to travel")


if __name__ == "__main__":
    main()
