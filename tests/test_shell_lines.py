"""Shell lines of examples and documents quote what they put in: names may hold blanks, quotes and $()."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY

DOCUMENTS = sorted(
    {*REPOSITORY.glob("*.md"), *(REPOSITORY / "docs").rglob("*.md"), *(REPOSITORY / "examples").rglob("*.md")}
)
SNAKEFILE = REPOSITORY / "examples" / "snakemake" / "Snakefile"

_BLOCK = re.compile(r"^```(?:bash|sh|shell|console)\n(.*?)^```", re.MULTILINE | re.DOTALL)
_INLINE = re.compile(r"`((?:fastfold|sbatch|torchrun|docker|srun) [^`]+)`")
_VARIABLE = re.compile(r"\$(?:\w+|\{[^}]*\}|@|\*)")
_PLACE = re.compile(r"\{(input|output|wildcards)(?:\.\w+)?(:q)?\}")


def unquoted(line: str) -> Iterator[str]:
    """Yield the variables of a shell line outside double quotes; text in single quotes is a line of its own."""
    for inner in re.findall(r"(?<!\\)'([^']*)'", line):
        yield from unquoted(inner)
    rest = re.sub(r"'[^']*'", "''", line)
    for match in _VARIABLE.finditer(re.sub(r'"(?:\\.|[^"\\])*"', '""', rest)):
        if not re.match(r"\w+=\S*$", rest[: match.start()].rpartition(" ")[2] + match[0]):
            yield match[0]


def shell_lines(text: str) -> Iterator[str]:
    """Yield the lines in a document's shell blocks, joined where they continue, and its inline commands."""
    for block in _BLOCK.findall(text):
        for line in block.replace("\\\n", " ").splitlines():
            yield line.partition(" # ")[0]
    yield from _INLINE.findall(text)


def bare_places(text: str) -> list[str]:
    """Names of files that a Snakefile puts into shell lines without quotes."""
    shell = "\n".join(re.findall(r"^    shell:\n((?:        .*\n)+)", text, re.MULTILINE))
    return [match[0] for match in _PLACE.finditer(shell) if match[2] is None]


def test_findings_are_found() -> None:
    assert list(unquoted('a $b "$c" \'d $e "$f"\' ${g}')) == ["$e", "$b", "${g}"]
    assert list(unquoted("x=$y")) == []
    assert list(shell_lines("```bash\na \\\n$b  # $c\n```\n`fastfold $d` `$e`\n")) == [
        "a  $b ",
        "fastfold $d",
    ]
    assert bare_places('    shell:\n        "a {input} {input.x:q} {wildcards.n}"\n') == [
        "{input}",
        "{wildcards.n}",
    ]


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(Path(path).relative_to(REPOSITORY)))
def test_variables_of_documents_are_quoted(path: Path) -> None:
    assert [line for line in shell_lines(path.read_text("utf-8")) if list(unquoted(line))] == []


def test_file_names_of_the_workflow_are_quoted() -> None:
    text = SNAKEFILE.read_text("utf-8")
    assert "{input:q}" in text
    assert bare_places(text) == []
