"""What the documentation names is there: files, links, modules, functions, and variables of the environment."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import REPOSITORY

PAGES = sorted(
    [
        *REPOSITORY.glob("*.md"),
        *(REPOSITORY / "docs").glob("*.md"),
        REPOSITORY / "examples" / "README.md",
        REPOSITORY / "benchmarks" / "README.md",
    ]
)
NEW = re.compile("silu_gate|near_share|longest")  # what recipes of CONTRIBUTING.md add

each_page = pytest.mark.parametrize(
    "page", [pytest.param(page, id=str(page.relative_to(REPOSITORY))) for page in PAGES]
)


@each_page
def test_links_lead_somewhere(page: Path) -> None:
    """Files and folders beside the page; addresses on the web are not asked."""
    targets = re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8"))
    local = [target.partition("#")[0] for target in targets if "://" not in target]
    assert [target for target in local if target and not (page.parent / target).exists()] == []


@each_page
def test_paths_exist(page: Path) -> None:
    """Everything in backquotes that looks like a path of the repository; ``<...>`` stands for any name."""
    text = page.read_text(encoding="utf-8")
    paths = re.findall(r"`((?:fastfold|tests|docs|examples|benchmarks)/[^`\s]*)[^`]*`", text)
    patterns = {re.sub(r"<[^>]*>", "*", path).rstrip("/") for path in paths if not NEW.search(path)}
    assert sorted(pattern for pattern in patterns if not any(REPOSITORY.glob(pattern))) == []


@each_page
def test_names_exist(page: Path) -> None:
    """Every dotted name of the package is a module, or something in one."""
    names = set(re.findall(r"\bfastfold(?:\.[A-Za-z_]\w*)+", page.read_text(encoding="utf-8")))
    assert sorted(name for name in names if not NEW.search(name) and not _is_there(name)) == []


FOREIGN = {
    "alphafold2_multimer_v3 create_individual_features.py lddt_align msa_depth": "coming_from.md",
    "float32_matmul_precision": "environment_variables.md",
    "model_1_ptm_128_residues_pass": "export.md",
    "in_proj job_0 job_1": "folding.md",
    "ColwiseParallel RowwiseParallel context_parallel parallelize_module": "parallel.md",
    "P1_and_P3": "screening.md",
    "uniref30_2302_db_mapping": "search.md",
    "create_alignment_db.py": "training_data.md",
    "AveragedModel PeftModel from_pretrained merge_and_unload": "weights.md",
}
"""Names of other programs and of files that users have, by the page that mentions them."""
OF_OTHERS = {"fifteen_lines.md"}  # a table of other libraries' names


@each_page
def test_symbols_exist(page: Path) -> None:
    """Every backquoted name of a file, and every name with an underscore or of a class, occurs in the code."""
    if page.name in OF_OTHERS:
        return
    foreign = {name for names, where in FOREIGN.items() if where == page.name for name in names.split()}
    text = re.sub(r"^ *```.*?^ *```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    files, words = _code()
    unknown = set()
    for token in re.findall(r"`(\w+(?:\.\w+)*)(?:\([^`]*\))?`", text):
        if NEW.search(token):
            continue
        if token.endswith(".py"):
            unknown |= {token} - files
            continue
        names = {name for name in token.split(".") if "_" in name.strip("_") or re.search("[a-z][A-Z]", name)}
        unknown |= names - words
    assert unknown - foreign == set()
    assert foreign <= set(re.findall(r"[\w.]+", text)) | set(re.findall(r"\w+", text))


@cache
def _code() -> tuple[set[str], set[str]]:
    """Names of all files, and all words in those of the code."""
    paths = [
        path
        for name in ("fastfold", "tests", "examples", "benchmarks")
        for path in (REPOSITORY / name).rglob("*")
    ]
    endings = {".py", ".yaml", ".js", ".html", ".css", ".json", ".sh", ".toml", ".smk"}
    sources = [path for path in paths if path.suffix in endings] + [
        REPOSITORY / "pyproject.toml",
        REPOSITORY / "Makefile",
    ]
    words = {word for path in sources for word in re.findall(r"\w+", path.read_text(encoding="utf-8"))}
    return {path.name for path in paths}, words


@each_page
def test_numbered_lists_are_not_nested(page: Path) -> None:
    """A step that is indented belongs to the step before it; its own continuation has the indent of its text."""
    text = re.sub(r"^( *)```.*?^\1```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    lines = text.splitlines()
    assert [line for line in lines if re.match(r" +\d+\. ", line)] == []
    numbers = [int(found[1]) for line in lines if (found := re.match(r"(\d+)\. ", line))]
    assert all(later in (1, number + 1) for number, later in pairwise(numbers))


@pytest.mark.long
def test_python_blocks_are_typed(tmp_path: Path) -> None:
    """Blocks of a page are one program; names that the text gives are not checked."""
    programs = {}
    for page in PAGES:
        blocks = re.findall(
            r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE
        )
        if blocks and page.name != "CONTRIBUTING.md":  # whose recipes run
            programs[page.stem] = "\n".join(blocks)
    assert len(programs) > 15
    programs["wrong"] = 'import fastfold\n\nfastfold.predict("MK", "mini", num_recyles=0)\n'
    for name, text in programs.items():
        (tmp_path / f"page_{name}.py").write_text(text, encoding="utf-8")
    options = [
        "--check-untyped-defs",
        "--ignore-missing-imports",
        *(
            f"--disable-error-code={code}"
            for code in ("name-defined", "used-before-def", "has-type", "index")
        ),
        "--no-error-summary",
    ]
    done = subprocess.run(
        [sys.executable, "-m", "mypy", *options, *(f"page_{name}.py" for name in programs)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "MYPYPATH": str(REPOSITORY)},
    )
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("page_") and ": error: " in line]
    assert line.startswith('page_wrong.py:3: error: Unexpected keyword argument "num_recyles" for "predict"')
    assert not done.stderr


def test_the_reference_has_all_public_names_and_no_others() -> None:
    """Sphinx warns of a missing name, after minutes."""
    lines = (REPOSITORY / "docs" / "reference.rst").read_text(encoding="utf-8").splitlines()
    names = [line.strip() for line in lines if line.startswith("   fastfold.")]
    assert [name for name in names if not _is_there(name)] == []
    assert len(set(names)) == len(names)
    public = {f"fastfold.{name}" for name in importlib.import_module("fastfold").__all__}
    assert public - set(names) == {"fastfold.__version__"}


def _is_there(name: str) -> bool:
    try:
        _object(name)
    except (ImportError, AttributeError):
        return False
    return True


def _object(name: str) -> Any:
    """The module of a dotted name, or what a module calls so."""
    try:
        return importlib.import_module(name)
    except ImportError:
        owner, _, attribute = name.rpartition(".")
        if not owner:
            raise
        return getattr(_object(owner), attribute)


def test_every_variable_of_the_environment_is_documented() -> None:
    text = (REPOSITORY / "docs" / "environment_variables.md").read_text(encoding="utf-8")
    read = set()
    for path in (REPOSITORY / "fastfold").rglob("*.py"):
        code = path.read_text(encoding="utf-8")
        if "environ" not in code and "getenv" not in code:
            continue
        read |= set(
            re.findall(r"(?:environ(?:\.get|\.setdefault)?[\[(]|getenv\(|VARIABLE = )\"([A-Z_]+)\"", code)
        )
        read |= set(re.findall(r"\"([A-Z_]+)\" (?:not )?in os\.environ", code))
    assert {"FASTFOLD_KERNELS", "FASTFOLD_DEBUG", "WORLD_SIZE"} <= read
    assert {name for name in read if f"`{name}`" not in text} == set()


def test_the_page_on_security_names_tests_for_every_input() -> None:
    text = (REPOSITORY / "SECURITY.md").read_text(encoding="utf-8")
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    assert [len(row) for row in rows] == [3] * len(rows)
    assert len(rows) > 10
    for _, _, checks in rows[1:]:
        for path in re.findall(r"`([^`]+)`", checks):
            place = REPOSITORY / path
            files = [place] if place.suffix == ".py" else sorted(place.glob("**/test_*.py"))
            assert files, path
            assert all("def test_" in file.read_text(encoding="utf-8") for file in files[:1]), path
