"""Small databases of made-up proteins: families of relatives among unrelated sequences."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

LETTERS = "ARNDCQEGHILKMFPSTWYV"
# Shares of the amino acids in proteins, in the order of the letters (rounded; their sum does not matter).
_SHARES = np.array([8, 5, 4, 5, 1, 4, 7, 7, 2, 6, 10, 6, 2, 4, 5, 7, 5, 1, 3, 7])


def random_protein(rng: np.random.Generator, length: int) -> str:
    """A sequence of amino acids as frequent as in proteins."""
    return "".join(rng.choice(list(LETTERS), length, p=_SHARES / _SHARES.sum()))


def relative(rng: np.random.Generator, sequence: str, share: float = 0.5) -> str:
    """A sequence with some residues changed, one piece left out and one put in."""
    letters = [str(rng.choice(list(LETTERS))) if rng.random() < share else letter for letter in sequence]
    start = int(rng.integers(5, len(letters) - 10))
    del letters[start : start + 3]
    place = int(rng.integers(5, len(letters) - 5))
    return "".join(letters[:place]) + random_protein(rng, 4) + "".join(letters[place:])


def made_up_database(
    queries: Mapping[str, str], *, relatives: int = 12, unrelated: int = 60, seed: int = 0
) -> str:
    """FASTA text of relatives of each query, called ``<name>_<number>``, among unrelated sequences.

    Args:
        queries: Sequences by name.
        relatives: How many each has.
        unrelated: How many there are of others.
        seed: Everything follows from it.
    """
    rng = np.random.default_rng(seed)
    records = [
        (f"{name}_{number}", relative(rng, sequence))
        for name, sequence in queries.items()
        for number in range(relatives)
    ]
    records += [(f"other_{n}", random_protein(rng, int(rng.integers(40, 160)))) for n in range(unrelated)]
    order = rng.permutation(len(records))
    return "".join(f">{records[i][0]} number {i}\n{records[i][1]}\n" for i in order)


def queries(number: int = 2, length: int = 60) -> dict[str, str]:
    """Sequences ``q0``, ``q1`` and so on."""
    rng = np.random.default_rng(7)
    return {f"q{i}": random_protein(rng, length) for i in range(number)}


def write_database(path: Path, sequences: Mapping[str, str], **options: int) -> Path:
    """Write :func:`made_up_database` to a file."""
    path.write_text(made_up_database(sequences, **options))
    return path
