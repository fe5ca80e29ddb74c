"""Features that settings add to a target, and the order of residues."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from fastfold.data.features.assembly import CHAIN_GAP
from fastfold.data.features.pipeline import FeatureSampler
from fastfold.data.targets import Target
from fastfold.errors import ConfigError, InputError
from fastfold.protein.io.read import read_user_structure
from fastfold.protein.protein import chain_name
from fastfold.protein.structure import ChainStructure, Structure


def add_settings(
    sampler: FeatureSampler, target: Target, *, cyclic: bool | str, guess: np.ndarray | None
) -> None:
    """Add the features of some settings, in the residue order of the features; errors are those of :func:`ring_chains`.

    ``ring_length [N]`` for rings, ``initial_positions [N, 37, 3]`` (Å) for an initial guess, and ``residue_index [N]``
    of the whole proteins for parts of them.
    """
    order = input_order(sampler)
    added = {}
    if cyclic:
        lengths = [len(chain.sequence) for chain in target.chains]
        rings = ring_chains(target, cyclic)
        sizes = [length if number in rings else 0 for number, length in enumerate(lengths)]
        added["ring_length"] = np.repeat(sizes, lengths).astype(np.int32)
    if guess is not None:
        added["initial_positions"] = guess
    if target.is_cut:
        added["residue_index"] = _residue_index(sampler, target)
    for key, value in added.items():
        sampler.static[key] = np.empty_like(value)
        sampler.static[key][order] = value


def ring_chains(target: Target, cyclic: bool | str) -> set[int]:
    """Return the numbers of the chains that are rings: all, none, or those with names such as ``A,C``.

    A ConfigError names a chain that the target lacks.
    """
    names = [chain_name(number) for number in range(len(target.chains))]
    if isinstance(cyclic, bool):
        return set(range(len(names))) if cyclic else set()
    chosen = [name.strip() for name in cyclic.split(",")]
    if missing := [name for name in chosen if name not in names]:
        raise ConfigError(f"{target.name}: rings: no chain {missing[0]!r}, only {', '.join(names)}")
    return {names.index(name) for name in chosen}


def _residue_index(sampler: FeatureSampler, target: Target) -> np.ndarray:
    """Return ``[N]`` int32 residue numbers of whole proteins from 0, in the order of the input.

    Chains that are joined for a monomer network follow each other with its gap.
    """
    indices = [np.array(chain.numbers, np.int32) - 1 for chain in target.chains]
    if not sampler.is_multimer and target.is_complex:
        start = 0
        for number in sampler.chain_order:
            indices[number] = indices[number] - indices[number][0] + start
            start = int(indices[number][-1]) + 1 + CHAIN_GAP
    return np.concatenate(indices).astype(np.int32)


def initial_positions(path: Path | Structure, target: Target) -> np.ndarray:
    """Read the initial atom positions from a PDB or mmCIF file, or a structure that was read, in the target's order.

    Returns:
        ``[N, 37, 3]`` float32 in Å; zeros for missing atoms, as in AlphaFold's first pass.

    Raises:
        InputError: The file cannot be read, or its chains have other sequences.
    """
    chains = read_user_structure(path).chains
    wanted = [chain.sequence for chain in target.chains]
    if [chain.sequence for chain in chains] != wanted:
        raise InputError(
            "expected the target's chains in the initial guess, with equal sequences in the same order; "
            f"{_first_difference(chains, wanted)}",
            path=path.name if isinstance(path, Structure) else path,
            record=target.name,
        )
    positions = [chain.positions * chain.mask[..., None] for chain in chains]
    return np.concatenate(positions).astype(np.float32)


def _first_difference(chains: Sequence[ChainStructure], wanted: Sequence[str]) -> str:
    """Describe how the chains of a file differ from the target's sequences."""
    lengths = [len(chain) for chain in chains]
    if lengths != [len(sequence) for sequence in wanted]:
        found = ", ".join(f"{length} residues" for length in lengths)
        return f"its chains: {found}; the target's: {', '.join(f'{len(one)} residues' for one in wanted)}"
    chain, sequence = next(pair for pair in zip(chains, wanted, strict=True) if pair[0].sequence != pair[1])
    place = next(i for i, letter in enumerate(sequence) if chain.sequence[i] != letter)
    residue = f"{chain.residue_names[place]} {chain.author_numbers[place]}".strip() or f"residue {place + 1}"
    found = f"{residue} of its chain {chain.chain_id!r} is {chain.sequence[place]}"
    return f"{found}, where the target has {sequence[place]}"


def input_order(sampler: FeatureSampler) -> np.ndarray:
    """Return indices ``[N]`` that put the features' residues into the order of the input's chains."""
    if len(sampler.chain_order) == 1:
        return np.arange(sampler.num_residues)
    asym_id = sampler.static["asym_id"]
    place = {chain: k + 1 for k, chain in enumerate(sampler.chain_order)}
    return np.concatenate([np.flatnonzero(asym_id == place[chain]) for chain in sorted(place)])
