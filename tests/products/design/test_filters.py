"""Filters of designs: files, thresholds, and figures of folds."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from Bio.SVDSuperimposer import SVDSuperimposer

from fastfold.errors import ConfigError, InputError
from fastfold.inference.models import requested_networks
from fastfold.inference.output.summary import score_table
from fastfold.inference.report.discover import find_predictions
from fastfold.products.design.optimize import DesignState
from fastfold.products.design.results import folds
from fastfold.products.design.results.filters import Filter, read_filters
from fastfold.products.design.results.folds import alone_figures, fold_figures, mean_figure, touching
from fastfold.products.design.results.table import (
    COLUMNS,
    PASSED,
    Design,
    design_rows,
    open_ring,
    sorted_rows,
)
from fastfold.products.design.tasks.binders import binder
from fastfold.products.design.tasks.protocols import hallucination
from fastfold.protein import residue_constants as rc
from fastfold.protein.metrics.interface.geometry import InterfaceGeometry
from fastfold.protein.metrics.secondary_structure import HELIX, LOOP, STRAND
from tests.helpers.results import helix_prediction


def write(folder: Path, content: Any, name: str = "filters.json") -> Path:
    path = folder / name
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def entry(threshold: Any, higher: Any = True) -> dict[str, Any]:
    return {"threshold": threshold, "higher": higher}


def test_filters_are_bindcrafts(tmp_path: Path) -> None:
    given = {
        "Average_pLDDT": entry(0.8),
        "2_i_pAE": entry(0.35, False),
        "Average_dG": entry(None, False),
        "Average_n_InterfaceResidues": entry(7),
    }
    wanted = [
        Filter("pLDDT", None, 0.8, True),
        Filter("i_pAE", 2, 0.35, False),
        Filter("n_InterfaceResidues", None, 7.0, True),
    ]
    assert read_filters(write(tmp_path, given), hallucination(10, copies=2), networks=2, say=print) == wanted
    text = "Average_pLDDT: {threshold: 0.8, higher: true}\n"
    assert (
        read_filters(write(tmp_path, text, "f.yaml"), hallucination(10), networks=1, say=print) == wanted[:1]
    )


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"Average_pTm": entry(0), "Average_PLDDT": entry(1)}, "unknown filters: Average_pTm, Average_PLDDT"),
        ({"pLDDT": entry(0.8)}, "unknown filters: pLDDT"),
        ({"Average_dSASA": entry(1)}, "Average_dSASA belongs to the protocol binder"),
        ({"Average_i_pTM": entry(0.5)}, "Average_i_pTM needs designs of several chains"),
        ({"1_Binder_RMSD": entry(3.5)}, "1_Binder_RMSD belongs to the protocol binder"),
        ({"Average_Off_i_pTM": entry(3.5)}, "Average_Off_i_pTM needs off-targets"),
        ({"Average_pLDDT": 0.8}, "expected threshold and higher, found 0.8"),
        ({"Average_pLDDT": entry("high")}, "expected a number as threshold"),
        ({"Average_pLDDT": entry(0.8, "yes")}, "true or false as higher"),
        ("[", "is not plain YAML"),
        ("[]", "expected filters such as"),
    ],
)
def test_unusable_filters_are_refused(tmp_path: Path, content: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        read_filters(write(tmp_path, content), hallucination(10), networks=2, say=print)


RANGES = {
    "pLDDT": (0.8, True), "pTM": (0.55, True), "i_pTM": (0.5, True), "i_pAE": (0.35, False),
    "Binder_Energy_Score": (0, False), "Surface_Hydrophobicity": (0.35, False), "ShapeComplementarity": (0.6, True),
    "dG": (0, False), "dSASA": (1, True), "n_InterfaceResidues": (7, True), "n_InterfaceHbonds": (3, True),
    "n_InterfaceUnsatHbonds": (4, False), "Binder_Loop%": (90, False), "HotspotRMSD": (6, False),
    "Binder_pLDDT": (0.8, True), "Binder_RMSD": (3.5, False),
}  # fmt: skip
"""Filters of BindCraft's default file that have a threshold, with that of the mean."""
OPEN = (
    "pAE", "i_pLDDT", "ss_pLDDT", "Unrelaxed_Clashes", "Relaxed_Clashes", "PackStat", "dG/dSASA", "Interface_SASA_%",
    "Interface_Hydrophobicity", "InterfaceHbondsPercentage", "InterfaceUnsatHbondsPercentage", "Interface_Helix%",
    "Interface_BetaSheet%", "Interface_Loop%", "Binder_Helix%", "Binder_BetaSheet%", "Target_RMSD", "Binder_pTM",
    "Binder_pAE",
)  # fmt: skip
"""Those without."""


def default_filters() -> dict[str, Any]:
    """Filters with the names of BindCraft's default file, and its thresholds of the means."""
    named: dict[str, Any] = {"MPNN_score": entry(None, False), "MPNN_seq_recovery": entry(None, False)}
    for prefix in ("Average", *"12345"):
        first = prefix in ("Average", "1", "2")
        for name, (threshold, higher) in RANGES.items():
            is_set = first or name in ("Binder_pLDDT", "Binder_RMSD")
            named[f"{prefix}_{name}"] = entry(threshold if is_set else None, higher)
        named |= {f"{prefix}_{name}": entry(None) for name in OPEN}
        limit = {letter: 3 if prefix == "Average" and letter in "KM" else None for letter in rc.restypes}
        named[f"{prefix}_InterfaceAAs"] = {letter: entry(value, False) for letter, value in limit.items()}
    return named


def test_the_default_file_loads_but_for_energies(tmp_path: Path, backbone: Path) -> None:
    lines: list[str] = []
    filters = read_filters(
        write(tmp_path, default_filters()), binder(backbone, 10, chains=["A"]), networks=2, say=lines.append
    )
    energies = [
        f"{prefix}_{name}" for prefix in ("Average", "1", "2") for name in ("Binder_Energy_Score", "dG")
    ]
    assert lines[0] == f"filters.json: left out, because they need Rosetta's energies: {', '.join(energies)}"
    further = [f"{number}_{name}" for number in "345" for name in ("Binder_pLDDT", "Binder_RMSD")]
    assert lines[1:] == [f"filters.json: left out, because 2 networks fold the designs: {', '.join(further)}"]
    names = {one.name for one in filters}
    wanted = {f"{p}_{n}" for p in ("Average", "1", "2") for n in RANGES} - set(energies)
    wanted = {name.replace("HotspotRMSD", "Hotspot_RMSD") for name in wanted}
    assert names == wanted | {"Average_InterfaceAAs_K", "Average_InterfaceAAs_M"}


def test_all_figures_of_the_default_file_are_computed(tmp_path: Path, backbone: Path) -> None:
    made = helix_prediction("x", 14, 10)
    made.save(tmp_path / "out", rank=1, plots=False)
    (found,) = find_predictions(tmp_path / "out")
    figures = fold_figures(found, binder(backbone, 10, chains=["A"]), made.atom_positions)
    energies = ("Binder_Energy_Score", "PackStat", "dG", "dG/dSASA", "Relaxed_Clashes")
    alone = ("Binder_pLDDT", "Binder_RMSD", "Binder_pTM", "Binder_pAE")
    for name in (*RANGES, *OPEN):
        if name not in (*energies, *alone):
            assert figures[name.replace("HotspotRMSD", "Hotspot_RMSD")] is not None, name
    count = figures["n_InterfaceResidues"]
    assert count is not None
    letters = {letter: figures[f"InterfaceAAs_{letter}"] or 0.0 for letter in rc.restypes}
    assert sum(letters.values()) == count > 0
    hydrophobic = sum(letters[one] for one in "ACFILMPVWY")
    assert figures["Interface_Hydrophobicity"] == pytest.approx(100 * hydrophobic / count)
    assert (figures["Binder_Helix%"], figures["Binder_Loop%"]) == (80.0, 20.0)  # a helix lacks its ends
    assert figures["ss_pLDDT"] == pytest.approx(made.plddt[15:23].mean() / 100, abs=1e-3)
    assert figures["Unrelaxed_Clashes"] == 0


def test_clashes_of_relaxed_folds_need_relaxation(tmp_path: Path, backbone: Path) -> None:
    path, task = (
        write(tmp_path, {"Average_Relaxed_Clashes": entry(0, False)}),
        binder(backbone, 10, chains=["A"]),
    )
    with pytest.raises(InputError, match="needs relaxed folds; give relax='all'"):
        read_filters(path, task, networks=1, say=print)
    assert len(read_filters(path, task, networks=1, is_relaxed=True, say=print)) == 1


def test_a_failure_names_value_and_threshold() -> None:
    folds = {"m1": [{"pLDDT": 0.9}, {"pLDDT": 0.7}], "m2": [{"pLDDT": 0.2}], "m3": []}
    assert Filter("pLDDT", 1, 0.8, True).failure(folds) == ""
    assert Filter("pLDDT", None, 0.6, True).failure(folds) == ""
    assert Filter("pLDDT", 2, 0.5, True).failure(folds) == "2_pLDDT 0.2 < 0.5"
    assert Filter("pLDDT", 1, 0.75, False).failure(folds) == "1_pLDDT 0.8 > 0.75"
    assert Filter("pLDDT", 3, 0.5, True).failure(folds) == "3_pLDDT is missing"
    assert Filter("i_pTM", None, 0.5, True).failure(folds) == "Average_i_pTM is missing"
    assert mean_figure([{"a": 1.0}, {"a": None}], "a") is None


def test_figures_of_a_fold(tmp_path: Path, backbone: Path) -> None:
    """The binder is the second helix; its design is the fold, moved."""
    made = helix_prediction("x", 14, 10)
    made.save(tmp_path / "out", rank=1, plots=False)
    (found,) = find_predictions(tmp_path / "out")
    task = binder(backbone, 10, chains=["A"])
    figures = fold_figures(found, task, made.atom_positions + 5.0)
    assert figures["pLDDT"] == pytest.approx(made.plddt[14:].mean() / 100, abs=1e-3)
    assert (figures["pTM"], figures["i_pTM"]) == (0.71, 0.62)
    assert made.pae is not None
    between = np.concatenate([made.pae[:14, 14:].ravel(), made.pae[14:, :14].ravel()])
    assert figures["i_pAE"] == pytest.approx(between.mean() / 31, abs=1e-3)
    assert figures["pAE"] == pytest.approx(made.pae[14:, 14:].mean() / 31, abs=1e-3)
    assert [figures[name] for name in ("RMSD", "Hotspot_RMSD", "Target_RMSD")] == pytest.approx(
        [0, 0, 0], abs=1e-2
    )
    moved_by_5 = made.atom_positions + 0.0
    moved_by_5[14:] += np.array([3.0, 4.0, 0.0])
    moved = fold_figures(found, task, moved_by_5)
    assert moved["Hotspot_RMSD"] == pytest.approx(5, abs=1e-2)
    assert 1 < moved["RMSD"] < 5
    assert moved["Target_RMSD"] == pytest.approx(0, abs=1e-2)


def test_copies_of_a_chain_are_exchangeable_in_a_fold(tmp_path: Path) -> None:
    """The fold has the chains of the design in another order."""
    one = helix_prediction("x", 12)
    made = helix_prediction("x", 12, 12, 12, aatype=np.tile(one.aatype, 3), sequences=one.sequences * 3)
    made.save(tmp_path / "out", rank=1, plots=False)
    (found,) = find_predictions(tmp_path / "out")
    design = np.roll(made.atom_positions, 12, axis=0) + 5.0
    figures = fold_figures(found, hallucination(12, copies=3), design)
    assert figures["RMSD"] == pytest.approx(0, abs=1e-2)


def test_residues_without_atoms_in_a_fold_do_not_count(tmp_path: Path, backbone: Path) -> None:
    """An unknown residue of the given chain; Biopython superposes all others."""
    made = helix_prediction("x", 14, 10)
    aatype, mask = made.aatype.copy(), made.atom_mask.copy()
    aatype[2], mask[2] = rc.unk_restype_index, 0.0
    sequences = (rc.aatype_to_sequence(aatype[:14]), made.sequences[1])
    replace(made, aatype=aatype, atom_mask=mask, sequences=sequences).save(
        tmp_path / "out", rank=1, plots=False
    )
    (found,) = find_predictions(tmp_path / "out")
    design = made.atom_positions + np.random.default_rng(0).normal(size=(24, 1, 3))
    figures = fold_figures(found, binder(backbone, 10, chains=["A"]), design)
    rest = np.delete(np.arange(24), 2)
    ca = rc.atom_order["CA"]
    overlay = SVDSuperimposer()
    overlay.set(design[rest, ca].astype(float), made.atom_positions[rest, ca].astype(float))
    overlay.run()
    assert figures["RMSD"] == pytest.approx(overlay.get_rms(), abs=2e-3)
    overlay.set(design[rest[:13], ca].astype(float), made.atom_positions[rest[:13], ca].astype(float))
    overlay.run()
    turn, shift = overlay.get_rotran()
    apart = made.atom_positions[14:, ca] @ turn + shift - design[14:, ca]
    assert figures["Hotspot_RMSD"] == pytest.approx(np.sqrt(np.square(apart).sum(-1).mean()), abs=2e-3)
    assert figures["Target_RMSD"] == pytest.approx(0, abs=1e-2)


def test_a_binder_is_compared_with_itself_alone(tmp_path: Path, backbone: Path) -> None:
    """Alone it is a helix; in the design its second half has moved."""
    made = helix_prediction("x", 10)
    made.save(tmp_path / "out", rank=1, plots=False)
    (found,) = find_predictions(tmp_path / "out")
    alone = binder(backbone, 10, chains=["A"]).alone
    assert alone is not None
    figures = alone_figures(found, alone, made.atom_positions + 5.0)
    assert figures["Binder_pLDDT"] == pytest.approx(made.plddt.mean() / 100, abs=1e-3)
    assert made.pae is not None
    assert figures["Binder_pAE"] == pytest.approx(made.pae.mean() / 31, abs=1e-3)
    assert figures["Binder_RMSD"] == pytest.approx(0, abs=1e-2)
    bent = made.atom_positions + 0.0
    bent[5:] += 10.0
    assert alone_figures(found, alone, bent)["Binder_RMSD"] > 3
    assert hallucination(10).alone is None


def test_residues_touch_within_four_angstroms() -> None:
    positions, mask = np.zeros((3, 37, 3)), np.zeros((3, 37))
    mask[:, 1] = 1
    positions[:, 1, 0] = [0.0, 4.0, 8.1]
    assert touching(positions, mask, np.array([0, 1, 0])).tolist() == [True, True, False]
    assert not touching(positions, mask, np.zeros(3, int)).any()


def test_rows_name_failed_filters_and_passing_designs_come_first(tmp_path: Path) -> None:
    task = hallucination(10)

    def design(name: str, **log: Any) -> Design:
        found = helix_prediction(name, 10)
        if not log:
            found.save(tmp_path, rank=1, plots=False)
        state = DesignState(
            parameters=None,  # type: ignore[arg-type]
            step=3,
            moments=None,  # type: ignore[arg-type]
            best=None,  # type: ignore[arg-type]
            best_loss=1.5,
            best_violation=0.0,
            plddt=np.full(10, 60.0),
            positions=found.atom_positions,
            log=[{"loss": 2.0, **log}],
            trace=[],
        )
        return Design(name, task, found.sequences[0], state)

    (network,) = requested_networks([])
    network.name = "model_1_multimer_v3"  # that of the folds
    designs = [design("low", given_up=True), design("high")]
    rows = design_rows(designs, find_predictions(tmp_path), [network], [Filter("pLDDT", None, 0.5, True)])
    assert [(row["name"], row["filters"]) for row in rows] == [
        ("high", PASSED),
        ("low", "Average_pLDDT is missing"),
    ]
    assert rows[1]["note"] == "given up after step 3"
    for where, wanted in (("plddt>10 and charge<99", PASSED), ("plddt<10", "not plddt<10")):
        (met,) = design_rows(designs[1:], find_predictions(tmp_path), [network], where=where)
        assert met["filters"] == wanted
    with pytest.raises(ConfigError, match="no column 'pldt'; did you mean plddt"):
        design_rows(designs, find_predictions(tmp_path), [network], where="pldt>10")
    assert rows[0]["loss"] == "1.5000"
    lines = score_table(COLUMNS, rows).splitlines()
    assert lines[0].split("\t") == list(COLUMNS)
    assert all(line.count("\t") == len(COLUMNS) - 1 for line in lines)


def test_rows_are_sorted_by_verdict_then_confidence() -> None:
    """A complex has 0.8 ipTM and 0.2 pTM, a single chain its pLDDT; without folds a design is last."""
    rows: list[dict[str, Any]] = [
        {"name": "unfolded", "filters": ""},
        {"name": "chain", "filters": "", "plddt": "75.0", "ptm": "0.99"},
        {"name": "failed", "filters": "pLDDT 0.4 < 0.8", "iptm": "0.9", "ptm": "0.9"},
        {"name": "complex", "filters": PASSED, "iptm": "0.90", "ptm": "0.10", "plddt": "10.0"},
        {"name": "loose", "filters": PASSED, "iptm": "0.10", "ptm": "0.90", "plddt": "99.0"},
        {"name": "worse", "filters": "not iptm>0.6", "iptm": "0.2", "ptm": "0.2"},
    ]
    names = [row["name"] for row in sorted_rows(rows)]
    assert names == ["chain", "complex", "loose", "unfolded", "failed", "worse"]
    assert open_ring({"ring_gap": "1.45"}) is None
    assert open_ring({}) is None
    assert "2.90 Å from C" in str(open_ring({"ring_gap": "2.90"}))


@pytest.mark.parametrize(
    ("value", "higher", "text"),
    [
        (0.5, True, ""),
        (0.5, False, ""),
        (0.49, True, "2_pLDDT 0.49 < 0.5"),
        (0.51, False, "2_pLDDT 0.51 > 0.5"),
    ],
)
def test_a_filter_of_a_network_reads_its_folds_alone(value: float, higher: bool, text: str) -> None:
    folds = {
        "a": [{"pLDDT": 9.0}],
        "b": [{"pLDDT": value - 0.1}, {"pLDDT": value + 0.1}],
        "c": [{"pLDDT": 9.0}],
    }
    assert Filter("pLDDT", 2, 0.5, higher).failure(folds) == text
    assert Filter("pLDDT", 4, 0.5, higher).failure(folds) == "4_pLDDT is missing"
    mean = (9.0 + 2 * value + 9.0) / 4
    expected = "" if higher else f"Average_pLDDT {mean:.3g} > 0.5"
    assert Filter("pLDDT", None, 0.5, higher).failure(folds) == expected
    assert Filter("i_pTM", 1, 0.5, True, is_off=True).name == "1_Off_i_pTM"


@pytest.mark.parametrize("is_bound", [True, False])
def test_figures_of_an_interface_are_shares_of_its_residues(
    monkeypatch: pytest.MonkeyPatch, backbone: Path, is_bound: bool
) -> None:
    """Ten residues of a binder, of which four touch the target; numbers of the geometry are chosen."""
    one = binder(backbone, 10, chains=["A"])
    touching = np.zeros(24, bool)
    if is_bound:
        touching[[14, 15, 18, 23]] = True
    interface = InterfaceGeometry(
        touching, 500.0 * is_bound, 800.0 if is_bound else 0.0, 0.6, 3, 1, 0.25 if is_bound else None, 0.4
    )
    secondary = "L" * 14 + "HHHHHEELLL"
    letters = {"H": HELIX, "E": STRAND, "L": LOOP}
    monkeypatch.setattr(folds, "interface_geometry", lambda *_: interface)
    monkeypatch.setattr(
        folds, "assign_secondary_structure", lambda *_: "".join(letters[x] for x in secondary)
    )
    aatype = rc.sequence_to_aatype("A" * 14 + "WWGGWGGGGY")
    plddt = np.arange(24) / 100
    found = folds.geometry_figures(np.zeros((24, 37, 3)), np.ones((24, 37)), aatype, one, plddt)
    assert tuple(sorted(found)) == tuple(sorted(folds.GEOMETRY))
    shares = {"Binder_Helix%": 50.0, "Binder_BetaSheet%": 20.0, "Binder_Loop%": 30.0}
    shares |= {"Interface_Helix%": 75.0, "Interface_BetaSheet%": 0.0, "Interface_Loop%": 25.0}
    expected = {
        "ShapeComplementarity": 0.6,
        "dSASA": 500.0,
        "Interface_SASA_%": 62.5,
        "Interface_Hydrophobicity": 25.0,
        "Surface_Hydrophobicity": 0.4,
        "n_InterfaceHbonds": 3.0,
        "InterfaceHbondsPercentage": 75.0,
        "n_InterfaceUnsatHbonds": 1.0,
        "InterfaceUnsatHbondsPercentage": 25.0,
        "ss_pLDDT": pytest.approx(0.17),
        **shares,
        **dict.fromkeys(folds.RESIDUES, 0.0),
        **{"InterfaceAAs_W": 3.0, "InterfaceAAs_Y": 1.0},
    }
    if not is_bound:
        expected |= {"dSASA": 0.0, "InterfaceAAs_W": 0.0, "InterfaceAAs_Y": 0.0}
        nothing = ("Interface_SASA_%", "Interface_Hydrophobicity", "InterfaceHbondsPercentage")
        nothing += ("InterfaceUnsatHbondsPercentage",)
        expected |= dict.fromkeys([*nothing, *(name for name in shares if name.startswith("Interface"))])
    assert found == expected


def test_a_binder_of_loops_has_no_structure_to_be_sure_of(
    monkeypatch: pytest.MonkeyPatch, backbone: Path
) -> None:
    interface = InterfaceGeometry(np.zeros(24, bool), 0.0, 0.0, None, 0, 0, None, None)
    monkeypatch.setattr(folds, "interface_geometry", lambda *_: interface)
    monkeypatch.setattr(folds, "assign_secondary_structure", lambda *_: HELIX * 14 + LOOP * 10)
    one, nothing = binder(backbone, 10, chains=["A"]), np.zeros((24, 37))
    found = folds.geometry_figures(np.zeros((24, 37, 3)), nothing, np.zeros(24, int), one, np.ones(24))
    assert (found["ss_pLDDT"], found["Binder_Helix%"], found["Binder_Loop%"]) == (None, 0.0, 100.0)
