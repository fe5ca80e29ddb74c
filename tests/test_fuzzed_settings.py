"""Mutated settings of users end in our own errors, each within a second."""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from fastfold.data.queries.read import read_targets
from fastfold.data.targets import target_from_sequence
from fastfold.errors import FastFoldError
from fastfold.inference.restraints import read_restraints
from fastfold.products.design.results.filters import read_filters
from fastfold.products.design.tasks.protocols import hallucination
from fastfold.utils.command_line.config_file import expand_config

TARGET = target_from_sequence("MKTAYIAKQR:GSHM", "dimer")
ACTIONS = [
    argparse.Action(["--num-recycles"], "num_recycles", type=int),
    argparse.Action(["--weights"], "weights", nargs="*"),
    argparse.Action(["--complex"], "complex", nargs=0),
    argparse.Action([], "inputs", nargs="*"),
]

Read = Callable[[Path], object]


def read_query(path: Path) -> None:
    """Read the targets of a file, and raise its first error."""
    targets, errors = read_targets([path])
    for error in errors:
        raise error
    assert targets


CALLERS: dict[str, tuple[str, str, Read]] = {
    "config": (
        "c.yaml",
        "num-recycles: 3\nweights: [one, 2]\ncomplex: true\ninputs: a.fasta\n",
        lambda path: expand_config(["--config", str(path)], ACTIONS, help_command="fastfold --help"),
    ),
    "filters": (
        "f.json",
        '{"Average_pLDDT": {"threshold": 0.8, "higher": true}, "1_pTM": {"threshold": null}}',
        lambda path: read_filters(path, hallucination(10), networks=2, say=print),
    ),
    "restraints": (
        "r.yaml",
        "constraints:\n- contact: {token1: [A, 1], token2: [B, 2], max_distance: 8.0}\n"
        "- pocket: {binder: B, contacts: [[A, 3], [A, 4]]}\n",
        lambda path: read_restraints(path, TARGET),
    ),
    "table": (
        "r.csv",
        'chain1,residue1,chain2,residue2,max\n# links\nA,K2,B,"1",8\nA,1,A,9,7.5\n',
        lambda path: read_restraints(path, TARGET),
    ),
    "boltz": (
        "q.yaml",
        "version: 1\nsequences:\n- protein: {id: [A, B], sequence: MKTAYIAKQR, msa: empty}\n",
        read_query,
    ),
}
"""Name of a file, its content and its reader, by the setting."""

PIECES = (
    *"[]{},:-?&*!|>'\"%@`#=<~\t\n \r",
    *(
        "!!int ",
        "!!timestamp x",
        "*a",
        "&a ",
        "<<: ",
        "2001-99-99",
        "\x00",
        "1e999",
        "nan",
        "null",
        "true",
        "é",
    ),
)


def mutated(text: str, rng: random.Random) -> bytes:
    """Return a text with one to four changes, or a piece of it that is repeated, as bytes."""
    letters = list(text)
    for _ in range(rng.randint(1, 4)):
        begin = rng.randrange(len(letters) + 1)
        letters[begin : begin + rng.choice((0, 1, 1, 9))] = rng.choice(PIECES) * rng.choice((1, 1, 1, 400))
    return "".join(letters).encode() + rng.choice((b"", b"", b"", b"\xff", bytes([rng.randrange(256)])))


@pytest.mark.parametrize("caller", CALLERS)
@pytest.mark.parametrize("count", [200, pytest.param(10_000, marks=pytest.mark.slow)])
def test_mutated_settings_give_our_errors_alone(caller: str, count: int, tmp_path: Path) -> None:
    name, text, read = CALLERS[caller]
    path = tmp_path / name
    path.write_text(text)
    read(path)
    rng = random.Random(caller)
    refused = longest = 0
    for _ in range(count):
        path.write_bytes(mutated(text, rng))
        begin = time.process_time()
        try:
            read(path)
        except FastFoldError as error:
            longest = max(longest, len(str(error)))
            refused += 1
        except Exception as error:
            raise AssertionError(path.read_bytes()) from error
        assert time.process_time() - begin < 1, path.read_bytes()
    assert count / 4 < refused
    assert longest < 4000
