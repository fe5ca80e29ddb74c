"""Agreement with given residues, checked by Biopython, and closure of rings."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from Bio.SVDSuperimposer import SVDSuperimposer

from fastfold.errors import InputError
from fastfold.evoformer.model import AlphaFold
from fastfold.inference.report.discover import find_predictions
from fastfold.products.design.agreement import given_agreement, given_figures, ring_gap
from fastfold.products.design.config import DesignConfig
from fastfold.products.design.evaluate import Evaluator
from fastfold.products.design.optimize import DesignState, first_state, optimize
from fastfold.products.design.results.design import Design
from fastfold.products.design.results.filters import Filter, read_filters
from fastfold.products.design.results.folds import fold_figures
from fastfold.products.design.results.table import design_rows
from fastfold.products.design.tasks.binders import binder
from fastfold.products.design.tasks.protocols import fixed_backbone, hallucination, partial
from fastfold.products.design.tasks.task import DesignTask
from fastfold.protein import residue_constants as rc
from fastfold.protein.io.read import read_structure
from tests.helpers.results import helix_prediction
from tests.products.design.test_filters import entry, write

CA = rc.atom_order["CA"]


def _superposed(points: np.ndarray, given: np.ndarray) -> float:
    program = SVDSuperimposer()
    program.set(given.astype(np.float64), points.astype(np.float64))
    program.run()
    return float(program.get_rms())


def _bent(backbone: Path) -> np.ndarray:
    """Atoms of the first chain of the file, bent and moved."""
    positions = read_structure(backbone).chains[0].positions.copy()
    at = np.arange(len(positions))[:, None, None]
    return positions + np.sin(0.8 * at + np.array([0.0, 1.0, 2.0])) * 1.5 + 20.0


def test_the_backbone_is_superposed_on_itself(backbone: Path) -> None:
    chain = read_structure(backbone).chains[0]
    task, positions = fixed_backbone(backbone, chain="A", keep="A2-4"), _bent(backbone)
    letters = "".join(
        letter if i < 9 else {"A": "G"}.get(letter, "A") for i, letter in enumerate(chain.sequence)
    )
    found = given_agreement(task, positions, letters)
    assert found["backbone_rmsd"] == pytest.approx(
        _superposed(positions[:, CA], chain.positions[:, CA]), rel=1e-5
    )
    assert found["backbone_rmsd"] > 0.5
    assert found["seqid"] == pytest.approx(9 / 14)
    same = given_agreement(task, chain.positions, chain.sequence)
    assert same == pytest.approx({"backbone_rmsd": 0.0, "seqid": 1.0}, abs=1e-4)


def test_the_motif_is_superposed_on_itself(backbone: Path) -> None:
    chain = read_structure(backbone).chains[0]
    task, positions = partial(backbone, "A3-6,A9", chain="A"), _bent(backbone)
    motif = [2, 3, 4, 5, 8]
    expected = _superposed(positions[motif, CA], chain.positions[motif, CA])
    found = given_agreement(task, positions, chain.sequence)
    assert found == {"motif_rmsd": pytest.approx(expected, rel=1e-5)}
    assert abs(expected - _superposed(positions[:, CA], chain.positions[:, CA])) > 0.05
    positions[0] += 100.0  # outside of the motif
    assert given_agreement(task, positions, chain.sequence) == found


def test_unresolved_and_unknown_residues_do_not_count(backbone: Path) -> None:
    chain = read_structure(backbone).chains[0]
    task, positions = fixed_backbone(backbone, chain="A", keep="A2"), _bent(backbone)
    assert task.reference is not None
    mask, aatype = task.reference.mask.clone(), task.reference.aatype.clone()
    mask[7, CA], aatype[7], positions[7] = 0.0, rc.restype_num, 500.0
    positions[1] = 0.0
    letters = chain.sequence[:1] + "X" + chain.sequence[2:]
    task = replace(task, reference=replace(task.reference, mask=mask, aatype=aatype))
    kept = [i for i in range(14) if i not in (1, 7)]
    found = given_agreement(task, positions, letters)
    expected = _superposed(positions[kept][:, CA], chain.positions[kept][:, CA])
    assert found["backbone_rmsd"] == pytest.approx(expected, rel=1e-5)
    assert found["seqid"] == pytest.approx(12 / 13)


def test_other_protocols_have_no_given_residues(backbone: Path) -> None:
    for task in (hallucination(12), binder(backbone, 10, chains=["A"])):
        assert given_figures(task) == ()
        assert given_agreement(task, np.zeros((len(task.source), 37, 3)), "A" * len(task.source)) == {}


def test_the_gap_of_a_ring_is_that_of_its_ends() -> None:
    task = hallucination(12, copies=2, cyclic=True)
    positions = np.zeros((24, 37, 3), np.float32)
    positions[11, rc.atom_order["C"]] = [1.33, 0, 0]
    positions[23, rc.atom_order["C"]] = [0, 3, 4]
    assert ring_gap(task, positions) == pytest.approx(5.0)
    positions[23] = 0.0
    assert ring_gap(task, positions) == pytest.approx(1.33)
    positions[:, rc.atom_order["N"]] = 1.0
    positions[0, rc.atom_order["N"]] = positions[12, rc.atom_order["N"]] = 0.0
    assert ring_gap(task, positions) == pytest.approx(1.33)
    assert ring_gap(hallucination(12), positions[:12]) is None


def test_only_the_designed_ring_of_a_binder_counts(backbone: Path) -> None:
    task = binder(backbone, 10, chains=["A"], cyclic=True)
    positions = np.zeros((24, 37, 3), np.float32)
    positions[13, rc.atom_order["C"]] = 50.0
    positions[23, rc.atom_order["C"]] = [2, 0, 0]
    assert ring_gap(task, positions) == pytest.approx(2.0)


def test_each_step_has_the_figures(monomer: AlphaFold, backbone: Path) -> None:
    config = DesignConfig(soft_steps=1, temperature_steps=0, hard_steps=1)
    for task, names in (
        (fixed_backbone(backbone, chain="A"), {"backbone_rmsd", "seqid"}),
        (partial(backbone, "A3-6", chain="A"), {"motif_rmsd"}),
    ):
        evaluator = Evaluator(task, [monomer], {"dgram_cce": 1.0})
        state = optimize(evaluator, config, 0, first_state(evaluator, config, 0))
        for row in state.log:
            assert names <= row.keys()
            assert not ({"backbone_rmsd", "motif_rmsd", "seqid"} - names) & row.keys()
        given = read_structure(backbone).chains[0].positions[:, CA]
        where = slice(2, 6) if "motif_rmsd" in names else slice(None)
        expected = _superposed(state.trace[-1][where], given[where])
        assert state.log[-1][min(names - {"seqid"})] == pytest.approx(expected, rel=1e-4)


def _design(task: DesignTask, sequence: str) -> Design:
    count = len(task.source)
    state = DesignState(
        *(np.zeros(1) for _ in range(3)),  # type: ignore[arg-type]
        plddt=np.full(count, 50.0),
        positions=np.zeros((count, 37, 3), np.float32),
        step=1,
        best_loss=1.0,
    )
    return Design("d", task, sequence, state)


def test_the_table_and_filters_have_the_figures(tmp_path: Path, backbone: Path) -> None:
    chain = read_structure(backbone).chains[0]
    task = fixed_backbone(backbone, chain="A")
    aatype = rc.sequence_to_aatype(chain.sequence)
    fold = helix_prediction("d", 14, aatype=aatype, sequences=(chain.sequence,))
    fold = replace(fold, atom_positions=_bent(backbone).astype(np.float32))
    fold.save(tmp_path / "out", rank=1, plots=False)
    (folded,) = find_predictions(tmp_path / "out")
    figures = fold_figures(folded, task, None)
    expected = _superposed(_bent(backbone)[:, CA], chain.positions[:, CA])
    assert figures["backbone_rmsd"] == pytest.approx(expected, abs=2e-3)
    assert figures["seqid"] == 1.0
    assert (figures["motif_rmsd"], figures["ring_gap"]) == (None, None)
    path = write(tmp_path, {"Average_backbone_rmsd": entry(0.1, False), "1_seqid": entry(0.5)})
    filters = read_filters(path, task, networks=1, say=print)
    assert filters == [Filter("backbone_rmsd", None, 0.1, False), Filter("seqid", 1, 0.5, True)]
    (row,) = design_rows([_design(task, chain.sequence)], find_predictions(tmp_path / "out"), (), filters[:1])
    assert (row["backbone_rmsd"], row["seqid"]) == (f"{expected:.2f}", "1.000")


def test_an_open_ring_is_named(tmp_path: Path) -> None:
    """The ends of a helix are far apart."""
    task = hallucination(14, cyclic=True)
    helix_prediction("d", 14).save(tmp_path, rank=1, plots=False)
    (folded,) = find_predictions(tmp_path)
    chain = read_structure(folded.files[".cif"]).chains[0].positions
    gap = float(np.linalg.norm(chain[0, rc.atom_order["N"]] - chain[-1, rc.atom_order["C"]]))
    (row,) = design_rows([_design(task, "A" * 14)], find_predictions(tmp_path), ())
    assert row["ring_gap"] == f"{gap:.2f}"
    assert row["note"] == f"the ring is not closed: {gap:.2f} Å from C of its last residue to N of its first"
    (row,) = design_rows([_design(hallucination(14), "A" * 14)], find_predictions(tmp_path), ())
    assert (row.get("ring_gap"), row["note"]) == (None, "")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Average_backbone_rmsd", "belongs to the protocol fixbb"),
        ("Average_seqid", "belongs to the protocol fixbb"),
        ("Average_motif_rmsd", "belongs to the protocol partial"),
        ("Average_ring_gap", "needs rings"),
    ],
)
def test_figures_of_other_protocols_are_no_filters(tmp_path: Path, name: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        read_filters(write(tmp_path, {name: entry(1.0)}), hallucination(12), networks=1, say=print)
