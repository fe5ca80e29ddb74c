"""Numbers of a mutant against those of the wild type, by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import fastfold
from fastfold.data.targets import target_from_sequence
from fastfold.products.mutate import table
from fastfold.products.mutate.mutations import _variant

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
            "dpae_site": (3 + 9 + 0 + 6 + 3) / 5,
        }
    )
    assert "dpae" not in table._difference(fold(pae=None), new, SITES)
    assert table._difference(fold(iptm=0.25), fold(iptm=1.0), SITES)["diptm"] == 0.75


def test_folds_are_compared_by_network_seed_and_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    """Samples of a seed are folds of their own; predictions of other runs are left out."""
    keys = [("m", 0, "columns_001"), ("m", 0, "columns_002"), ("m", 1, None), ("n", 0, None), ("n", 1, None)]
    records = [
        SimpleNamespace(id=str(number), scores={"model": model, "seed": seed, "sample": sample})
        for number, (model, seed, sample) in enumerate(keys)
    ]
    del records[2].scores["sample"]
    folder = SimpleNamespace(target=lambda target: SimpleNamespace(records=lambda: records))
    monkeypatch.setattr(table, "_read", lambda results, record: record.id)
    folds = table._folds(folder, replace(target_from_sequence("MKV"), name="t"), {"t": "0123"})
    assert folds == dict(zip(keys[:4], "0123", strict=True))


def test_atoms_of_unknown_residues_are_absent(tmp_path: Path) -> None:
    prediction = fastfold.predict("MKXV", "mini", num_recycles=0)
    files = prediction.save(tmp_path)
    results = SimpleNamespace(path=lambda record, ending: tmp_path / f"query_mini_seed_0{ending}")
    record = SimpleNamespace(files=["_pae.json"])
    one = table._read(results, record)
    assert files["cif"].exists()
    assert np.isnan(one.ca).all(-1).tolist() == [False, False, True, False]
    known = [0, 1, 3]
    np.testing.assert_allclose(one.ca[known], prediction.atom_positions[known, 1], atol=1e-3)


def test_a_residue_is_named_by_its_chain_in_a_complex() -> None:
    one = target_from_sequence("MKV")
    assert [table._residue(one, index) for index in range(3)] == ["M1", "K2", "V3"]
    (chain,) = one.chains
    two = replace(one, chains=(chain, replace(chain, id="B", sequence="WY")))
    assert [table._residue(two, index) for index in (0, 2, 3, 4)] == ["A:M1", "A:V3", "B:W1", "B:Y2"]
    with pytest.raises(IndexError):
        table._residue(two, 5)


def test_strains_of_a_mutant_leave_out_residues_without_neighbours() -> None:
    """Two residues 4 Å apart move to 5 Å; the third has none."""
    old, new = np.array([[0.0, 0, 0], [4, 0, 0], [50, 0, 0]]), np.array([[0.0, 0, 0], [5, 0, 0], [50, 0, 0]])
    row = table._row([(fold(ca=old), fold(ca=new))] * 2, SITES, target_from_sequence("MKV"))
    assert (row["strain"], row["strain_site"], row["predictions"]) == (
        pytest.approx(0.25),
        pytest.approx(0.25),
        2,
    )
    assert row["largest_strain"] in ("0.2500 at M1", "0.2500 at K2")
    alone = table._row([(fold(ca=old * 50), fold(ca=new * 50))], SITES, target_from_sequence("MKV"))
    assert (alone["strain"], alone["strain_site"], alone["largest_strain"]) == (None, None, None)


def test_neighbours_are_within_thirteen_angstroms_in_all_structures() -> None:
    ca = np.array([[0.0, 0, 0], [13.0, 0, 0], [0, 13.1, 0]])
    assert np.isfinite(table.effective_strain(ca[None], ca[None])).tolist() == [True, True, False]
    wide = ca * 1.01
    assert not np.isfinite(table.effective_strain(ca[None], np.stack([ca, wide]))).any()


def test_single_mutants_of_a_scan_have_a_cell_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cells of mutants without a value, and of those that were not folded, are empty."""
    drawn: list[Any] = []
    monkeypatch.setattr(table, "scan_png", lambda *given, title: drawn.append((*given, title)) or b"png")
    target = replace(target_from_sequence("MKV"), name="t")
    variants = [_variant(target, text, None, None) for text in ("M1A", "V3W", "M1A+K2A", "K2C", "V3A")]
    rows = [
        {"mutations": "M1A", "dplddt_site": 1.0, "dplddt": 2.0, "strain_site": 3.0},
        {"mutations": "V3W", "dplddt_site": -1.0, "dplddt": -2.0, "strain_site": None},
        {"mutations": "V3A", "dplddt_site": 0.5, "dplddt": 0.0, "strain_site": 0.0},
        {"mutations": "M1A+K2A", "dplddt_site": 9.0, "dplddt": 9.0, "strain_site": 9.0},
    ]
    assert table._picture(target, variants, rows) == b"png"
    ((panels, names, letters, wild, title),) = drawn
    assert (names, letters, title) == (["M1", "V3"], sorted("ARNDCQEGHILKMFPSTWYV"), "Mutants of t")
    assert [letters[row] for row in wild] == ["M", "V"]
    for values, expected in zip(
        panels.values(),
        ({"A0": 1.0, "W1": -1.0, "A1": 0.5}, {"A0": 2.0, "W1": -2.0, "A1": 0.0}, {"A0": 3.0, "A1": 0.0}),
        strict=True,
    ):
        cells = {
            f"{letters[i]}{j}": values[i, j] for i, j in zip(*np.nonzero(np.isfinite(values)), strict=True)
        }
        assert cells == expected
    assert table._picture(target, variants[2:3], rows) is None


def test_the_picture_marks_no_letter_of_an_unknown_residue() -> None:
    target = replace(target_from_sequence("MUV"), name="t")
    variants = [_variant(target, text, None, None) for text in ("U2C", "X2A", "V3A")]
    rows = [
        {"mutations": text, "dplddt_site": 1.0, "dplddt": 2.0, "strain_site": None}
        for text in ("U2C", "X2A", "V3A")
    ]
    pytest.importorskip("matplotlib")
    picture = table._picture(target, variants, rows)
    assert picture is not None
    assert picture.startswith(b"\x89PNG")


@pytest.mark.parametrize("score", ["ptm", "iptm"])
@pytest.mark.parametrize(("old", "new"), [(None, 0.5), (0.5, None), (None, None)])
def test_a_score_that_a_prediction_lacks_has_no_difference(
    score: str, old: float | None, new: float | None
) -> None:
    difference = table._difference(fold(**{score: old}), fold(**{score: new}), SITES)
    assert difference[f"d{score}"] is None
