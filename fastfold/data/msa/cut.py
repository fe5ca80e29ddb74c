"""Alignments of whole proteins, cut to the parts that are folded."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fastfold.data.msa.msa import ChainMsas, Msa
from fastfold.data.targets import Target


def cut_alignments(target: Target, alignments: Sequence[ChainMsas]) -> list[ChainMsas]:
    """Cut alignments of a target's whole chains to the parts that it has.

    Returns:
        Own and paired alignments of each chain. Rows without a residue in the parts are left out, unless rows of
        several chains belong together by their number.
    """
    cut = []
    for chain, (own, paired) in zip(target.chains, alignments, strict=True):
        if chain.regions:
            columns = np.array(chain.numbers) - 1
            own = [_columns(msa, columns, keep_all=False) for msa in own]
            paired = [_columns(msa, columns, keep_all=msa.as_is) for msa in paired]
        cut.append((own, paired))
    return cut


def _columns(msa: Msa, columns: np.ndarray, *, keep_all: bool) -> Msa:
    """Return some columns of an alignment, and the rows that have a residue there or all."""
    rows = ["".join(row[column] for column in columns) for row in msa.sequences]
    kept = [i for i, row in enumerate(rows) if keep_all or i == 0 or row.strip("-")]
    return Msa(
        tuple(rows[i] for i in kept),
        np.asarray(msa.deletions)[kept][:, columns],
        tuple(msa.descriptions[i] for i in kept),
        msa.as_is,
    )
