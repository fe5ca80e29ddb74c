"""Layouts of designed chains: new residues, and given ones whose types or atoms stay."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from fastfold.data.targets import Chain
from fastfold.errors import ConfigError
from fastfold.products.design.tasks.given import residue_places
from fastfold.products.design.tasks.task import PLACEHOLDER
from fastfold.protein import residue_constants as rc
from fastfold.protein.io.observed import ObservedChain

_NUMBERS = re.compile(r"(\d{1,5})(?:-(\d{1,5}))?", re.ASCII)
_MOST_DRAWS = 10_000
_LARGEST = 100_000


@dataclass(frozen=True)
class DesignedChain:
    """Chain of a design, ``L`` residues."""

    chain: Chain  #: Name, residue index, and types of the residues that stay
    rows: np.ndarray  #: Parameter row of each residue from 0, ``[L]``; -1 for residues that stay
    #: Given residues of the chain, without atoms where residues are new; None without given ones
    observed: ObservedChain | None = None
    #: Residues whose atoms are compared with the given ones, ``[L]`` bool
    is_kept: np.ndarray | None = None
    frame: int = 0  #: Number of the frame of the given atoms; 0 for that of a binder's given chains


def parse_range(text: str) -> tuple[int, int] | None:
    """Return the smallest and the largest number of ``60`` or ``60-100``; None for another text."""
    match = _NUMBERS.fullmatch(text)
    low, high = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
    return (low, high) if low <= high else None


def new_chain(name: str, length: int, *, repeats: int = 1) -> DesignedChain:
    """Return a chain of new residues, ``length`` in each of equal repeats."""
    chain = Chain(name, PLACEHOLDER * length * repeats)
    return DesignedChain(chain, np.tile(np.arange(length), repeats))


def given_chain(
    chain: Chain,
    observed: ObservedChain,
    keep: np.ndarray,
    *,
    compared: np.ndarray | None = None,
    repeats: int = 1,
) -> DesignedChain:
    """Return a given chain whose residues are designed but those of ``keep [K]``.

    Args:
        chain: The chain as a target's.
        observed: Its residues.
        keep: Places of residues whose type stays.
        compared: Places of residues whose atoms are compared; None for all.
        repeats: Equal parts of the chain.

    Raises:
        ConfigError: The chain cannot be divided into equal parts with the same kept places.
    """
    length = len(observed)
    stays = np.zeros(length, bool)
    stays[keep] = True
    unit, rest = divmod(length, repeats)
    if rest or (stays.reshape(repeats, -1) != stays[:unit]).any():
        raise ConfigError(
            f"chain {chain.id} of {length} residues has no {repeats} repeats with the same kept residues"
        )
    rows = np.full(unit, -1)
    rows[~stays[:unit]] = np.arange((~stays[:unit]).sum())
    letters = np.array(list(observed.sequence))
    letters[~stays] = PLACEHOLDER
    is_kept = np.ones(length, bool) if compared is None else np.isin(np.arange(length), compared)
    return DesignedChain(
        replace(chain, sequence="".join(letters), letters=""), np.tile(rows, repeats), observed, is_kept
    )


def read_contigs(
    text: str, chains: Sequence[ObservedChain], path: Path
) -> list[tuple[int, int] | np.ndarray]:
    """Read parts of a chain such as ``10-20/A16-36/5`` in their order, as RFdiffusion writes them.

    Returns:
        The smallest and largest number of new residues, or places ``[K]`` of residues in the joined chains.

    Raises:
        InputError: A residue is not in the file.
        ConfigError: A part has another form, or a residue comes twice.
    """
    parts: list[tuple[int, int] | np.ndarray] = []
    for word in text.strip("[]' ").split("/"):
        numbers = parse_range(word.strip())
        if not word.strip() or word.startswith("0 ") or (numbers is None and re.fullmatch(r"[\d\s-]+", word)):
            raise ConfigError(
                f"`contigs`: expected parts of one chain such as 10-20/A16-36/5, found {word.strip()!r} in {text!r}"
            )
        parts.append(residue_places(word, chains, path) if numbers is None else numbers)
    kept = [place for part in parts if isinstance(part, np.ndarray) for place in part.tolist()]
    if len(kept) != len(set(kept)):
        raise ConfigError(f"`contigs`: a residue comes twice in {text!r}")
    if len({type(part) for part in parts}) == 1:
        raise ConfigError(
            f"`contigs`: expected new residues and residues of the file such as 10-20/A16-36/5, found {text!r}"
        )
    return parts


def has_ranges(text: str) -> bool:
    """Return True if contigs or loops have a range of lengths, so that each seed draws one."""
    words = [
        word.rpartition("=")[2].strip() if "=" in word else word.strip() for word in re.split("[/,]", text)
    ]
    ranges = [parse_range(word) for word in words]
    return any(one is not None and one[0] < one[1] for one in ranges)


def draw_numbers(
    ranges: Sequence[tuple[int, int]], seed: int, *, fixed: int = 0, total: tuple[int, int] | None = None
) -> list[int]:
    """Draw a number from each range, both ends included, for a seed.

    ``total`` limits the sum of the numbers and ``fixed``. A ConfigError tells that no numbers have such a sum.
    """
    low, high = (0, _LARGEST) if total is None else total
    shortest, longest = (fixed + sum(one[end] for one in ranges) for end in (0, 1))
    rng = np.random.default_rng([seed, 2**20])
    for _ in range(_MOST_DRAWS if shortest <= high and longest >= low else 0):
        drawn = [int(rng.integers(first, last + 1)) for first, last in ranges]
        if low <= fixed + sum(drawn) <= high:
            return drawn
    raise ConfigError(f"`length`: expected a range that overlaps {shortest}-{longest}, found {low}-{high}")


def chain_of_parts(
    name: str, parts: Sequence[int | np.ndarray], chains: Sequence[ObservedChain], *, frame: int = 0
) -> DesignedChain:
    """Return a chain of parts in their order: numbers of new residues, and places in the joined chains that stay.

    The residue index of the network steps by one, but between neighbours of a given chain, whose gaps stay.
    """
    new = [np.full(part, -1) if isinstance(part, int) else part for part in parts]
    origin = np.concatenate(new).astype(np.int64)
    return _gathered(Chain(name, ""), origin, origin >= 0, chains, frame)


def chain_with_loops(
    chain: Chain, observed: ObservedChain, loops: Sequence[tuple[np.ndarray, int]], *, frame: int
) -> DesignedChain:
    """Return a given chain whose loops are designed; all other residues keep type and atoms.

    Args:
        chain: The chain as a target's.
        observed: Its residues.
        loops: Places of each loop's residues, and the number of residues that replace them.
        frame: Number of the frame of the given atoms.
    """
    parts: list[np.ndarray] = []
    start, is_same = 0, True
    kept: list[np.ndarray] = []
    for places, length in sorted(loops, key=lambda one: int(one[0][0])):
        parts += [np.arange(start, places[0]), places if len(places) == length else np.full(length, -1)]
        kept += [np.ones(int(places[0]) - start, bool), np.zeros(length, bool)]
        is_same &= len(places) == length
        start = int(places[-1]) + 1
    parts.append(np.arange(start, len(observed)))
    kept.append(np.ones(len(observed) - start, bool))
    made = _gathered(chain, np.concatenate(parts), np.concatenate(kept), [observed], frame)
    labels = replace(chain, sequence=made.chain.sequence, letters="")
    return replace(made, chain=labels) if is_same else made


def _gathered(
    chain: Chain, origin: np.ndarray, is_kept: np.ndarray, chains: Sequence[ObservedChain], frame: int
) -> DesignedChain:
    """Return a chain whose residues come from places ``origin [L]`` of joined chains, -1 for new ones."""
    number = np.repeat(np.arange(len(chains)), [len(one) for one in chains])
    index = np.concatenate([one.residue_index for one in chains])
    letters = np.array(list("".join(one.sequence for one in chains)))
    known = origin >= 0
    follows = known[1:] & known[:-1] & (np.diff(origin) == 1)
    follows &= number[origin[1:]] == number[origin[:-1]]
    steps = np.where(follows, index[origin[1:]] - index[origin[:-1]], 1)
    indices = np.cumsum([1, *steps]).astype(np.int32)
    kept_mask = is_kept[:, None]

    def gather(arrays: list[np.ndarray]) -> np.ndarray:
        values = np.concatenate(arrays)[origin]
        return np.where(kept_mask.reshape(-1, *([1] * (values.ndim - 1))), values, 0).astype(np.float32)

    observed = ObservedChain(
        chain_id=chain.id,
        sequence="".join(np.where(known, letters[origin], "X")),
        positions=gather([one.positions for one in chains]),
        mask=gather([one.mask for one in chains]),
        residue_index=indices,
        b_factors=np.zeros((len(origin), rc.atom_type_num), np.float32),
    )
    rows = np.full(len(origin), -1)
    rows[~is_kept] = np.arange((~is_kept).sum())
    sequence = "".join(np.where(is_kept, letters[origin], PLACEHOLDER))
    made = Chain(chain.id, sequence, indices=tuple(indices.tolist()))
    return DesignedChain(made, rows, observed, is_kept, frame)
