"""Record that ships with the package: a small fold by ``mini``, computed on FastFold's release machine.

It shows that an installation computes the tested results. Records of AlphaFold are larger and are in the repository
(``tests/oracles``).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from fastfold.evoformer.config import MINI
from fastfold.inference.verify.recorded_array import RecordedArray

RECORD = Path(__file__).with_name("mini_record.npz")  #: File of the record

SEQUENCE = "EDFKAVFGMTRSAFANLPLWKQQNLKKEKGLF"
"""Sequence of the record, most of the headpiece of villin: the fold of an invented sequence may change by rounding."""


def fold_record(device: str = "cpu", precision: str = "fp32") -> dict[str, np.ndarray]:
    """Fold the record's sequence by ``mini``, with a precision of the trunk.

    Returns:
        By name: positions in Å ``[N, 37, 3]``, pLDDT ``[N]``, aligned errors in Å ``[N, N]``, pTM, and the single
        ``[N, c_s]`` and pair ``[N, N, c_z]`` representations.
    """
    from fastfold.inference.api import load_model, predict

    model = load_model(MINI, device=device, precision=precision)
    found = predict(SEQUENCE, model, num_recycles=1, seed=0, save_representations=True)
    assert found.pae is not None
    assert found.representations is not None
    return {
        "representations/pair": found.representations["pair"],
        "representations/single": found.representations["single"],
        "structure_module/final_atom_positions": found.atom_positions,
        "confidence/plddt": found.plddt,
        "confidence/predicted_aligned_error": found.pae,
        "confidence/ptm": np.asarray(found.ptm),
    }


def compare_shipped(
    expected: dict[str, np.ndarray], device: str = "cpu", precision: str = "fp32"
) -> Iterator[RecordedArray]:
    """Yield each recorded array with that of this installation."""
    for name, ours in fold_record(device, precision).items():
        yield RecordedArray(name, ours, expected[name])
