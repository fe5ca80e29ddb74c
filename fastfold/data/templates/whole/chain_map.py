"""User's map of a target's chains to those of structures, a CSV as of AlphaPulldown's multimeric templates."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from typing import NamedTuple

from fastfold.data.targets import Chain
from fastfold.data.templates.custom import CustomChain
from fastfold.errors import InputError
from fastfold.protein.io.read import structure_name
from fastfold.utils.text_files import PathLike, read_text_bytes, split_lines

_LIMIT = 1 << 24


class _Row(NamedTuple):
    line: int
    name: str
    file: str
    chain: str


class ChainMap:
    """Rows ``protein,file,chain of the file``, for copies of a protein one after the other.

    Raises:
        InputError: The file cannot be read, or a line has another number of fields.
    """

    def __init__(self, path: PathLike) -> None:
        self.path = path
        text = read_text_bytes(path, limit=_LIMIT).decode("utf-8-sig", "replace")
        self._rows: list[_Row] = []
        for line, fields in enumerate(csv.reader(split_lines(text)), start=1):
            fields = [field.strip() for field in fields]
            if not any(fields) or fields[0].startswith("#"):
                continue
            if len(fields) != 3 or not all(fields):
                raise InputError(
                    f"expected protein,file,chain such as 'P23726,3l4q.cif,C', found {','.join(fields)[:60]!r}",
                    path=path,
                    line=line,
                )
            self._rows.append(_Row(line, fields[0], structure_name(fields[1]), fields[2]))
        if not self._rows:
            raise InputError("has no rows; write protein,file,chain such as 'P23726,3l4q.cif,C'", path=path)

    def check(self, complexes: Sequence[Sequence[CustomChain]]) -> None:
        """Check that all files and their chains exist.

        Raises:
            InputError: A row names a file that was not given, or a chain that it lacks.
        """
        known = {chains[0].file: [one.chain_id for one in chains] for chains in complexes}
        for row in self._rows:
            if row.file not in known:
                raise self._error(row, f"{row.file} is not among --cross-chain-templates: {', '.join(known)}")
            if row.chain not in known[row.file]:
                chains = ", ".join(known[row.file])
                raise self._error(
                    row, f"{row.file} lacks a protein chain {row.chain}; its chains are {chains}"
                )

    def of_target(self, chains: Sequence[Chain]) -> dict[str, dict[int, str]]:
        """Return the chain of each structure by file and index of the target's chain.

        Raises:
            InputError: A row names none of the chains, or more rows of a file than copies name one.
        """
        found: dict[str, dict[int, str]] = {}
        for row in self._rows:
            named = [i for i, one in enumerate(chains) if one.record == row.name]
            named = named or [i for i, one in enumerate(chains) if one.id == row.name]
            if not named:
                names = ", ".join(f"{one.record or one.id}" for one in chains)
                raise self._error(row, f"{row.name} is not a chain of the target; its chains are {names}")
            here = found.setdefault(row.file, {})
            free = [i for i in named if i not in here]
            if not free:
                raise self._error(
                    row, f"{row.name} has {len(named)} chains, and this row of {row.file} is one more"
                )
            here[free[0]] = row.chain
        return found

    def _error(self, row: _Row, problem: str) -> InputError:
        return InputError(problem, path=self.path, line=row.line)
