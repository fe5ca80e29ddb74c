"""Numbers of a mutant against those of the wild type, by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fastfold.products.mutate import table

SITES = np.array([1])


def fold(**changes: Any) -> table._MutantFold:
    values: dict[str, Any] = {
        "plddt": np.array([50.0, 60.0, 70.0]),
        "ptm": 0.5,
        "iptm": None,
        "pae": np.arange(9, dtype=np.float32).reshape(3, 3),
        "ca": np.zeros((3, 3)),
    }
    return table._MutantFold(**(values | changes))


def test_differences_are_mutant_minus_wild_type_over_all_residues_and_at_the_site() -> None:
    changed = np.array([[0, 6, 0], [3, 9, 0], [0, 3, 0]], np.float32)
    new = fold(plddt=np.array([53.0, 54.0, 76.0]), ptm=0.75, pae=fold().pae + changed)
    differences = table._difference(fold(), new, SITES)
    assert differences == pytest.approx(
        {
            "plddt": 61.0,
            "ptm": 0.75,
            "dplddt": (3 - 6 + 6) / 3,
            "dplddt_site": -6.0,
            "dptm": 0.25,
            "diptm": None,
            "dpae": 21 / 9,
            "dpae_site": ((3 + 9 + 0) / 3 + (6 + 9 + 3) / 3) / 2,
        }
    )
    assert "dpae" not in table._difference(fold(pae=None), new, SITES)
    assert table._difference(fold(iptm=0.25), fold(iptm=1.0), SITES)["diptm"] == 0.75
