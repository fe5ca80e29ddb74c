"""A prediction of the network that ships, relaxed: confidences stay, pLDDT is in the files."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import fastfold
from fastfold.data.queries.fasta import read_fasta
from fastfold.inference.relax import RelaxConfig, relax_prediction
from fastfold.protein.io.read import read_structure
from fastfold.protein.structure import structure_to_protein
from tests.conftest import REPOSITORY

CPU = RelaxConfig(platform="CPU", threads=1)


def predicted(sequence: str, recycles: int) -> fastfold.Prediction:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        model = fastfold.load_model("mini", device="cpu")
        return fastfold.predict(sequence, model, num_recycles=recycles, name="piece")
    finally:
        torch.set_num_threads(threads)


def sequence_of(name: str) -> str:
    records = read_fasta(REPOSITORY / "examples" / "proteins.fasta")
    return next(record.chains[0].sequence for record in records if record.name == name)


def test_a_prediction_s_relaxed_files_carry_its_confidences(tmp_path) -> None:
    prediction = predicted(sequence_of("1igd")[:16], 0)
    found = relax_prediction(prediction, RelaxConfig(platform="CPU", max_iterations=300))
    assert found.prediction is prediction
    assert found.record()["energy_after_kj_per_mol"] < found.record()["energy_before_kj_per_mol"]
    for name, text in (("x.pdb", found.to_pdb()), ("x.cif", found.to_mmcif())):
        path = tmp_path / name
        path.write_text(text)
        read = structure_to_protein(read_structure(path))
        assert read.sequences == prediction.sequences
        ca = read.b_factors[:, 1]
        np.testing.assert_allclose(ca, prediction.plddt, atol=0.006)
        assert " 1HB " not in text
        moved = (read.atom_positions - prediction.atom_positions)[prediction.atom_mask > 0]
        rmsd = float(np.sqrt((moved**2).sum(-1).mean()))
        assert found.record()["heavy_atom_rmsd_angstrom"] == pytest.approx(rmsd, abs=0.001)
    assert "Relaxation" in found.to_mmcif()
    assert "Structure prediction" in found.to_mmcif()
    assert "network mini, seed 0, 0 recycles" in found.to_mmcif()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["1igd", "1ctf", "1ail", "1tig", "1i2t"])
def test_predictions_of_the_examples_come_to_a_negative_energy(name: str) -> None:
    """What stays violated is not called relaxed."""
    found = relax_prediction(predicted(sequence_of(name), 3), CPU).result
    assert found.minimized, found.reason
    assert found.rounds <= 3
    assert (found.energy_after or 0) < 0, found.reason
    assert found.relaxed == (not found.violations), found.reason
    assert len(found.violations) <= len(found.violations_before)
