"""The network computes what the official program printed, output by output."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fastfold.inference.verify import verify
from tests.conftest import require_shared
from tests.helpers.networks import folder

CARRIED = ("synthetic_monomer", "synthetic_multimer")
ELSEWHERE = ("monomer_ptm", "monomer_deep_msa", pytest.param("multimer_homodimer", marks=pytest.mark.slow))


@pytest.mark.parametrize("name", [*CARRIED, *ELSEWHERE])
def test_every_output_of_the_official_run_is_reproduced(name: str) -> None:
    directory: Path = folder(name) if name in CARRIED else require_shared("oracles", name)
    found = list(verify(directory))
    recorded = {
        key if file == "outputs" else f"confidence/{key}"
        for file in ("outputs", "confidence")
        for key in np.load(directory / f"{file}.npz").files
    }
    assert {comparison.name for comparison in found} == recorded
    assert [comparison for comparison in found if not comparison.passed] == []


def test_a_changed_parameter_fails(tmp_path: Path) -> None:
    """The comparison can fail: one bias moved by 1% shows."""
    for path in folder("synthetic_monomer").iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    with np.load(tmp_path / "params.npz") as archive:
        params = {key: archive[key] for key in archive.files}
    key = "alphafold/alphafold_iteration/evoformer/single_activations//bias"
    params[key] = params[key] + 0.01
    np.savez(tmp_path / "params.npz", **params)
    assert any(not comparison.passed for comparison in verify(tmp_path))
