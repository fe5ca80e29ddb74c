"""Plain language: words that hide what is meant, docstrings without a verb, and commit subjects without an area."""

from __future__ import annotations

import ast
import io
import re
import subprocess
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY
from tests.helpers.syntax_trees import package_trees, walk_statements

CHECKED = (
    "fastfold/cli",
    "fastfold/data",
    "fastfold/evoformer",
    "fastfold/inference",
    "fastfold/kernels",
    "fastfold/memory",
    "fastfold/parallel",
    "fastfold/products",
    "fastfold/protein",
    "fastfold/training",
    "fastfold/utils",
)
"""Folders in which nothing may be found."""

FIRST_COMMIT = "a5262ee1de"
"""The first one whose subject follows the rule."""

RIDDLES = {
    r"\bbeside\b": "next to, in addition to",
    r"\b(anew|likewise)\b": "again, also",
    r"\bnobody\b": "no caller, is not used",
    r"\b(elsewhere|by itself)\b": "the place, alone",
    r"\b(all the same|so many)\b": "anyway, a number",
    r"\b(lets? go of|became of|in the mean)\b": "release, result of, on average",
    r"\bwhat (a|an|the|is|was|it|they|follows|stays|goes|comes|came)\b": "the thing's name",
    r"\b(is|have) no\b(?! longer)": "is not a, or the thing that is missing",
    r"\bof which\b": "a new sentence",
    r"\b(stands? (in|beside|behind|before|for)|lies? (in|on|where))\b": "is in, precedes, means",
}
"""Words to avoid by a pattern, and words to use."""

EMPTY_NAMES = {"found", "given", "taken", "begun", "lane", "lanes"}
"""Identifiers that say how a value came, and not which value it is."""

BRITISH = re.compile(
    r"(?:final|initial|minim|maxim|normal|optim|organ|recogn|serial|summar|synchron|token|visual|quant|random|local|real"
    r"|standard|special|general|vector|penal|regular|material|parallel)is(?:e|ing|ation)|analyse(?!s)|behaviour"
    r"|(?:label|cancel|model|travel)led|cent(?:re|ring)(?!d?al)|colour|defence|favour|honour|neighbour|licence|grey",
    re.IGNORECASE,
)
"""Spellings that American English has otherwise; identifiers have none of them."""

FOREIGN_NAMES = {"Modeller"}
"""Names of other packages."""

SUBJECT = re.compile(r"[a-z][a-z0-9_/ ,.-]*: [A-Z][A-Za-z-]+ .+")
_ANY_RIDDLE = re.compile("|".join(RIDDLES), re.IGNORECASE)
_MAY_BE_NAMED = re.compile(
    rf"\b({'|'.join(EMPTY_NAMES)})\b(?! [a-z{{]| in )|for ({'|'.join(EMPTY_NAMES)}) in"
)
_NO_VERB = re.compile(
    r"(What|Where|Whose|Whether|Which|How|Of|Those|That|These|With|From|In|At|For|As|A|An|The|Its|This|Each|Some|All|"
    r"Any|Most|More|Than|To|It|One|Two|Every|Number|Rows|Shapes?|Names?|Places?)\b"
)
_NOUNS = {"property", "cached_property", "jit", "fixture", "setter"}


def _prose(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the comments and strings of a Python file, and every line of a document, with line numbers."""
    text = path.read_text("utf-8")
    if path.suffix == ".md":
        yield from enumerate(text.splitlines(), 1)
        return
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in (tokenize.COMMENT, tokenize.STRING):
            yield from enumerate(token.string.splitlines(), token.start[0])


def _riddles(path: Path) -> Iterator[str]:
    if not _ANY_RIDDLE.search(path.read_text("utf-8")):
        return
    for line, text in _prose(path):
        for pattern, better in RIDDLES.items():
            if found := re.search(pattern, text, re.IGNORECASE):
                yield f"{path.relative_to(REPOSITORY)}:{line}: {found[0]!r}; better: {better}"


def _summaries(path: Path, tree: ast.Module) -> Iterator[str]:
    for node in walk_statements(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        decorators = {ast.unparse(decorator).rpartition(".")[2] for decorator in node.decorator_list}
        summary = (ast.get_docstring(node) or "").split("\n\n")[0].replace("\n", " ")
        if summary and not decorators & _NOUNS and _NO_VERB.match(summary):
            yield f"{path.relative_to(REPOSITORY)}:{node.lineno}: begin with a verb: {summary[:80]!r}"


def _identifiers(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield the identifiers that a module defines or uses, with line numbers."""
    for node in ast.walk(tree):
        match node:
            case (
                ast.Name(id=str(name))
                | ast.arg(arg=str(name))
                | ast.keyword(arg=str(name))
                | ast.Attribute(attr=str(name))
                | ast.ClassDef(name=str(name))
                | ast.FunctionDef(name=str(name))
                | ast.AsyncFunctionDef(name=str(name))
                | ast.alias(name=str(name))
                | ast.ExceptHandler(name=str(name))
            ):
                yield getattr(node, "lineno", 0), name


def _british_names(path: Path, tree: ast.Module) -> Iterator[str]:
    if not BRITISH.search(path.read_text("utf-8")):
        return
    for line, name in _identifiers(tree):
        if BRITISH.search(name) and name not in FOREIGN_NAMES:
            yield f"{path.relative_to(REPOSITORY)}:{line}: spell {name!r} in American English"


def _empty_names(path: Path, tree: ast.Module) -> Iterator[str]:
    if not _MAY_BE_NAMED.search(path.read_text("utf-8")):
        return
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name) | ast.arg(arg=name) | ast.Attribute(attr=name) | ast.keyword(arg=name):
                if name in EMPTY_NAMES:
                    yield f"{path.relative_to(REPOSITORY)}:{getattr(node, 'lineno', 0)}: name the value, not {name!r}"
            case ast.FunctionDef(name=name) if name in EMPTY_NAMES:
                yield f"{path.relative_to(REPOSITORY)}:{node.lineno}: name the result, not {name!r}"


@pytest.mark.parametrize("folder", CHECKED)
def test_identifiers_say_which_value_they_hold(folder: str) -> None:
    trees = package_trees()
    names = [
        line
        for path, tree in trees.items()
        if str(path).startswith(f"{folder}/")
        for line in _empty_names(REPOSITORY / path, tree)
    ]
    assert names == [], "\n".join(names)


def test_identifiers_are_spelled_in_american_english() -> None:
    trees = package_trees()
    names = [line for path, tree in trees.items() for line in _british_names(REPOSITORY / path, tree)]
    names += [str(path) for path in trees if BRITISH.search(str(path))]
    assert names == [], "\n".join(names)


@pytest.mark.parametrize("folder", CHECKED)
def test_a_folder_speaks_plainly(folder: str) -> None:
    files = sorted((REPOSITORY / folder).rglob("*.py"))
    assert len(files) > 5
    trees = package_trees()
    found = [
        line
        for path in files
        for line in (*_riddles(path), *_summaries(path, trees[path.relative_to(REPOSITORY)]))
    ]
    assert found == [], "\n".join(found)


def test_every_kind_of_finding_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.test_language.REPOSITORY", tmp_path)
    path = tmp_path / "bad.py"
    path.write_text(
        'def f(x):\n    """What a network has beside heads."""\n    return x  # nobody asks\n\n'
        'def g(x):\n    """Return twice a number."""\n    beside = 2 * x\n    return beside\n'
    )
    assert [line.split(": ")[1] for line in _riddles(path)] == [
        "'beside'; better",
        "'What a'; better",
        "'nobody'; better",
    ]
    assert len(list(_summaries(path, ast.parse(path.read_text())))) == 1
    path.write_text(
        "from a import colour as b\nclass Optimiser: ...\ndef f(x, centre=1):\n    x.behaviour = 'grey'\n"
    )
    lines = _british_names(path, ast.parse(path.read_text()))
    assert [line.split("'")[1] for line in lines] == ["Optimiser", "colour", "centre", "behaviour"]
    path.write_text("def g(given):\n    return [found for found in given]  # found\n")
    assert (
        sorted(line[-7:-1] for line in _empty_names(path, ast.parse(path.read_text())))
        == ["'found"] * 2 + ["'given"] * 2
    )


def test_commit_subjects_name_an_area_and_begin_with_a_verb() -> None:
    git = ["git", "-C", str(REPOSITORY)]
    known = subprocess.run([*git, "cat-file", "-e", f"{FIRST_COMMIT}^{{commit}}"], capture_output=True)
    if known.returncode:
        pytest.skip("the history of this copy begins later, or there is none")
    log = subprocess.run(
        [*git, "log", "--no-merges", "--format=%s", f"{FIRST_COMMIT}^..HEAD"],
        capture_output=True,
        text=True,
        check=True,
    )
    subjects = log.stdout.splitlines()
    assert subjects
    wrong = [subject for subject in subjects if len(subject) > 72 or not SUBJECT.fullmatch(subject)]
    assert wrong == []
