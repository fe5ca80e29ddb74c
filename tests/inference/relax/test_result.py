"""Settings are checked, and the record is plain JSON with units."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from fastfold.errors import ConfigError, OutputError
from fastfold.inference.relax import RelaxConfig, RelaxResult
from fastfold.inference.relax.result import BondedCysteines, relaxed_mmcif, relaxed_pdb
from fastfold.inference.relax.stereo import Violation, violating_residues
from fastfold.protein import residue_constants as rc
from fastfold.protein.protein import Hydrogens
from tests.helpers.peptides import helix, twisted

CLASH = Violation(1, "ALA 2 of chain A", ("clash", "bond"))


def result(reason: str = "", **changes: object) -> RelaxResult:
    fields: dict[str, object] = {
        "protein": helix("AAA"),
        "hydrogens": Hydrogens(np.array([0]), ("HA",), np.ones((1, 3))),
        "reason": reason,
        "platform": "CPU (1 thread)",
        "energy_before": 1234.567,
        "energy_after": -1234.567,
        "restraint_energy": 12.3456,
        "heavy_atom_rmsd": 0.123456,
        "violations_before": (CLASH, CLASH),
        "violations": (CLASH,) if reason else (),
        "rounds": 2,
        "iterations": 321,
        "iteration_limit_reached": False,
        "residues_freed": 4,
        "atoms_added": 1,
        "seconds": 1.2345,
    }
    return RelaxResult(**(fields | changes))  # type: ignore[arg-type]


def test_the_record_is_plain_and_names_its_units() -> None:
    record = json.loads(json.dumps(result("it clashes").to_dict(), allow_nan=False))
    assert record["relaxed"] is False
    assert record["energy_after_kj_per_mol"] == -1234.57
    assert record["heavy_atom_rmsd_angstrom"] == 0.1235
    assert record["violating_residues_before"] == 2
    assert record["violating_residues"] == [
        {"index": 1, "residue": "ALA 2 of chain A", "kinds": ["clash", "bond"]}
    ]
    failed = result("no", energy_after=None, heavy_atom_rmsd=None, restraint_energy=None, hydrogens=None)
    assert failed.to_dict()["energy_after_kj_per_mol"] is None
    assert not failed.minimized
    assert str(failed) == "not relaxed on CPU (1 thread): no"


def test_the_record_lists_bonds_of_cysteines_and_rings() -> None:
    bond = BondedCysteines((1, 7), ("CYS 2 of chain A", "CYS 8 of chain A"))
    found = result(
        disulfides=(bond,),
        side_chains_rebuilt=("LYS 3 of chain A",),
        pierced_rings=("PHE 1 by CA-CB of ALA 9",),
    )
    record = json.loads(json.dumps(found.to_dict()))
    assert record["disulfides"] == [{"indices": [1, 7], "residues": ["CYS 2 of chain A", "CYS 8 of chain A"]}]
    assert record["side_chains_rebuilt"] == ["LYS 3 of chain A"]
    assert record["pierced_rings"] == ["PHE 1 by CA-CB of ALA 9"]
    assert str(found).endswith(
        "disulfide bonds CYS 2 of chain A - CYS 8 of chain A; side chains placed again to free rings: LYS 3 of chain A"
    )


def test_the_sentence_says_what_happened() -> None:
    assert str(result()).startswith("relaxed: 1,235 to -1,235 kJ/mol, heavy atoms moved by 0.12 Å")
    assert str(result("it clashes")).startswith("not relaxed: it clashes (1,235 to")


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("platform", "cuda"),
        ("threads", 0),
        ("max_iterations", 0),
        ("max_rounds", 1.5),
        ("max_rounds", True),
        ("stiffness", -1.0),
        ("tolerance", 0.0),
        ("tolerance", float("nan")),
    ],
)
def test_settings_without_sense_are_refused_by_name(setting: str, value: object) -> None:
    with pytest.raises(ConfigError, match=setting):
        RelaxConfig(**{setting: value})  # type: ignore[arg-type]


def test_texts_say_whether_the_structure_is_relaxed() -> None:
    good = relaxed_pdb(result(), title="Peptide")
    assert "TITLE     Peptide, relaxed" in good
    assert "ATOM      6  HA  ALA A   1       1.000   1.000   1.000  1.00 50.00           H" in good
    bad = relaxed_pdb(result("it clashes"), title="Peptide")
    assert "TITLE     Peptide, minimised but not relaxed: it clashes" in bad
    cif = relaxed_mmcif(result("it clashes"), title="Peptide", entry_id="x")
    assert "minimised but not relaxed: it clashes" in cif
    assert "minimisation without success" in cif
    with pytest.raises(OutputError, match="gave no structure to write: burst"):
        relaxed_pdb(result("burst", hydrogens=None), title="Peptide")


def test_twisted_peptides_and_long_backbone_bonds_are_violations() -> None:
    protein = helix("AKLEWAKL")
    found = violating_residues(twisted(protein, 4, 60.0))
    assert {v.index for v in found if "omega" in v.kinds} == {3, 4}
    assert not any("omega" in v.kinds for v in violating_residues(twisted(protein, 4, 30.0)))
    xyz = protein.atom_positions.copy()
    xyz[2, rc.atom_order["O"]] += 0.25 * (xyz[2, rc.atom_order["O"]] - xyz[2, rc.atom_order["C"]])
    (one,) = violating_residues(replace(protein, atom_positions=xyz))
    assert (one.index, "bond" in one.kinds) == (2, True)


def test_violations_name_residues_and_their_kinds() -> None:
    assert violating_residues(helix("AKLEW")) == ()
    protein = helix("AAAA", "AAAA", apart=0.5)
    found = violating_residues(protein)
    assert {v.residue for v in found if "clash" in v.kinds} >= {"ALA 1 of chain A", "ALA 1 of chain B"}
    assert all(v.kinds for v in found)
    assert violating_residues(helix("XX", "AAA")) == ()
