"""Make ``docs/licences.md``: the licence of each dependency of ``pyproject.toml``, as the package index has it.

    python docs/make_licences.py [--out docs/licences.md]

pip is asked for the newest release within each range, without installing it. It needs Python 3.11 or later.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tomllib
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

UNKNOWN = "unknown"
_LONGEST = 60  # letters; longer fields hold a licence's whole text
_PAGE = """\
# Licences of dependencies

```bash
make licences    # write this page: names of pyproject.toml, licences by the package index
make sbom        # list installed packages, with versions and licences: build/sbom.json (CycloneDX)
```

The newest release within the range of `pyproject.toml` states the licence; otherwise it is `{unknown}`. Packages that
these need in turn are in `build/sbom.json`. The last column names the extra (`pip install "fastfold[...]"`) that
installs a package; the others are always installed. Weights and databases have licences of their own: see
[Weights](weights.md) and [Databases](databases.md).

| package | licence | extra |
|---|---|---|
{rows}
"""


def dependencies(project: Mapping[str, Any]) -> dict[str, tuple[Requirement, list[str]]]:
    """Return each dependency and the extras that install it, none if it always is, by its name."""
    groups = [("", project["dependencies"]), *project["optional-dependencies"].items()]
    table: dict[str, tuple[Requirement, list[str]]] = {}
    for extra, lines in groups:
        for requirement in map(Requirement, lines):
            requirement.marker = None  # of other platforms too
            _, extras = table.setdefault(canonicalize_name(requirement.name), (requirement, []))
            if extra not in extras:
                extras.append(extra)
    return {
        name: (requirement, [] if "" in extras else extras)
        for name, (requirement, extras) in sorted(table.items())
    }


def license(metadata: Mapping[str, Any]) -> str:
    """Return the licence that a release states, from its expression, classifiers or short text; or ``unknown``."""
    if expression := metadata.get("license_expression"):
        return str(expression)
    names = [
        line.rpartition(" :: ")[2]
        for line in metadata.get("classifier", [])
        if line.startswith("License :: ") and line != "License :: OSI Approved"
    ]
    text = " ".join(str(metadata.get("license") or "").split())
    if names:
        return ", ".join(names)
    return text if 0 < len(text) <= _LONGEST else UNKNOWN


def release_metadata(requirement: Requirement) -> dict[str, Any]:
    """Return the metadata of the newest release that pip would install; empty if there is none."""
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed", "--no-deps"]
    done = subprocess.run([*pip, "--report", "-", str(requirement)], stdout=subprocess.PIPE, check=False)
    if done.returncode:
        return {}
    metadata: dict[str, Any] = json.loads(done.stdout)["install"][0]["metadata"]
    return metadata


def main() -> None:
    """Write the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    here = Path(__file__).parent
    parser.add_argument("--out", type=Path, default=here / "licences.md")
    options = parser.parse_args()
    project = tomllib.loads((here.parent / "pyproject.toml").read_text("utf-8"))["project"]
    rows = [
        f"| {name} | {license(release_metadata(requirement))} | {', '.join(extras)} |"
        for name, (requirement, extras) in dependencies(project).items()
    ]
    options.out.write_text(_PAGE.format(unknown=UNKNOWN, rows="\n".join(rows)), "utf-8")


if __name__ == "__main__":
    main()
