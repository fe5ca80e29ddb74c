"""Chains to make training samples of: parts of a recorded chain, at places of their own."""

from __future__ import annotations

import numpy as np

from fastfold.data.training.sample import FEATURES
from fastfold.protein import residue_constants as rc
from fastfold.protein.structure import ChainStructure
from tests.helpers.networks import oracle_arrays


def chain_structure(
    start: int = 0,
    residues: int = 12,
    *,
    chain_id: str = "A",
    shift: tuple[float, float, float] = (0.0, 0.0, 0.0),
    first: int = 0,
) -> ChainStructure:
    """A part of the recorded chain, moved by ``shift`` (Å) and numbered from ``first``; a tenth is not resolved."""
    recorded = oracle_arrays("synthetic_monomer", "features")
    part = slice(start, start + residues)
    mask = recorded["all_atom_mask"][0][part].astype(np.float32)
    mask[3::10] = 0.0
    positions = recorded["all_atom_positions"][0][part] + np.asarray(shift)
    return ChainStructure(
        chain_id=chain_id,
        sequence="".join(rc.restypes[i] for i in recorded["aatype"][0][part]),
        positions=(positions * mask[..., None]).astype(np.float32),
        mask=mask,
        residue_index=np.arange(first, first + residues, dtype=np.int32),
        b_factors=np.full(mask.shape, 90.0, np.float32),
    )


def alignment_rows(sample: dict[str, np.ndarray]) -> np.ndarray:
    """``[S, n]`` all rows that the network sees in a sample's first iteration."""
    clusters, extra, mask = (
        sample[f"{FEATURES}{name}"][0] for name in ("true_msa", "extra_msa", "extra_msa_mask")
    )
    return np.concatenate([clusters, extra[mask.any(axis=1)]])


def ca_trace(chain: ChainStructure) -> ChainStructure:
    """The chain as a low-resolution structure has it: CA atoms alone."""
    mask = np.zeros_like(chain.mask)
    mask[:, rc.atom_order["CA"]] = chain.mask[:, rc.atom_order["CA"]]
    return ChainStructure(
        chain.chain_id,
        chain.sequence,
        chain.positions * mask[..., None],
        mask,
        chain.residue_index,
        chain.b_factors,
    )
