"""Files: names and numbers kept, nothing overwritten."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from fastfold.errors import InputError, OutputError
from fastfold.inference.relax import RelaxConfig, relax, relax_file
from fastfold.inference.relax.files import result_paths, structures_to_relax
from fastfold.protein import residue_constants as rc
from fastfold.protein.io.modelcif_writer import to_modelcif
from fastfold.protein.io.pdb_writer import to_pdb
from fastfold.protein.io.read import read_structure
from fastfold.protein.labels import AuthorNames, author_names
from fastfold.protein.structure import structure_to_protein
from tests.helpers.peptides import helix

NAMES = AuthorNames(("H", "x"), ("-1", "0", "52", "52A", "52B", "7", "8", "9"))
N, C = rc.atom_order["N"], rc.atom_order["C"]
CPU = RelaxConfig(platform="CPU", threads=1)


def write_pdb(path: Path, *, names: AuthorNames | None = NAMES) -> Path:
    path.write_text(to_pdb(helix("AKLEW", "GSA"), names=names))
    return path


def test_chains_numbers_and_b_factors_are_kept(tmp_path: Path) -> None:
    source = write_pdb(tmp_path / "x.pdb")
    _, paths = relax_file(source, tmp_path, RelaxConfig(platform="CPU", max_iterations=20, max_rounds=1))
    before = read_structure(source)
    for kind in ("pdb", "cif"):
        after = read_structure(paths[kind])
        assert author_names(after) == author_names(before) == NAMES
        old, new = structure_to_protein(before), structure_to_protein(after)
        was = old.atom_mask > 0.5
        assert (new.atom_mask > 0.5)[was].all()
        np.testing.assert_allclose(new.b_factors[was], old.b_factors[was], atol=0.006)
        assert 0 < np.abs(new.atom_positions - old.atom_positions)[was].max() < 3
    assert " HA  ALA H  -1 " in paths["pdb"].read_text()
    assert " LEU H  52 " in paths["pdb"].read_text()
    assert " GLU H  52A" in paths["pdb"].read_text()


@pytest.mark.parametrize("first_after", [332, 330])
def test_a_missing_loop_stays_open_under_the_names_of_the_file(tmp_path: Path, first_after: int) -> None:
    """Two residues are left out, with a gap in the numbers and with consecutive ones; no sequence is listed."""
    names = AuthorNames(("D",), tuple(str(326 + i) for i in range(9)))
    lines = [line for line in to_pdb(helix("AKLEWGSAV"), names=names).splitlines() if line[:4] == "ATOM"]
    moved = [
        f"{line[:22]}{number - 332 * (number > 331) + first_after * (number > 331):>4}{line[26:]}"
        for line in lines
        if (number := int(line[22:26])) not in (330, 331)
    ]
    source = tmp_path / "x.pdb"
    source.write_text("\n".join([*moved, "END", ""]))
    result, paths = relax_file(source, tmp_path, RelaxConfig(platform="CPU", max_iterations=20, max_rounds=1))
    (text,) = json.loads(paths["record"].read_text())["chain_breaks"]
    assert text.startswith(f"GLU 329 of chain D and SER {first_after} of chain D (C-N ")
    expected = AuthorNames(("D",), tuple(map(str, [*range(326, 330), *range(first_after, first_after + 3)])))
    for kind in ("pdb", "cif"):
        assert author_names(read_structure(paths[kind])) == expected
    ends = result.protein.atom_positions[4, N] - result.protein.atom_positions[3, C]
    assert np.linalg.norm(ends) > 3.0  # a bond has 1.33


@pytest.mark.parametrize("run", [relax, relax_file])
def test_chains_of_ca_alone_are_refused_by_the_purpose(tmp_path: Path, run: Callable[[Path], object]) -> None:
    source = tmp_path / "x.pdb"
    lines = to_pdb(helix("AKLEW")).splitlines()
    source.write_text("\n".join(line for line in lines if line[12:16] == " CA ") + "\n")
    with pytest.raises(InputError, match="cannot relax a structure: 5 of 5 residues have CA alone"):
        run(source)
    assert list(tmp_path.iterdir()) == [source]


def test_names_that_a_pdb_file_cannot_hold_give_a_cif_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    protein = helix("AAA")
    names = AuthorNames(("AA",), ("10001", "10002", "10003"))
    source = tmp_path / "big.cif"
    source.write_text(
        to_modelcif(
            protein, entry_id="x", title="x", software_version="1", model_name="m", plddt=None, names=names
        )
    )
    _, paths = relax_file(source, None, RelaxConfig(platform="CPU", max_iterations=5, max_rounds=1))
    assert set(paths) == {"cif", "record"}
    assert "residue number 10001, only -999 to 9999 fit" in caplog.text
    assert author_names(read_structure(paths["cif"])) == names


def test_long_chain_names_are_told_in_the_pdb_file(tmp_path: Path) -> None:
    names = AuthorNames(("AA",), ("1", "2", "3"))
    about = {"entry_id": "x", "title": "x", "software_version": "1", "model_name": "m"}
    source = tmp_path / "long.cif"
    source.write_text(to_modelcif(helix("AAA"), plddt=None, names=names, **about))
    _, paths = relax_file(source, None, RelaxConfig(platform="CPU", max_iterations=5, max_rounds=1))
    assert "REMARK 999 CHAIN A IS CHAIN AA OF THE MMCIF FILE" in paths["pdb"].read_text()
    assert author_names(read_structure(paths["cif"])) == names
    assert author_names(read_structure(paths["pdb"])).chain_ids == ("A",)


def test_results_that_are_there_are_replaced_on_request_alone(tmp_path: Path) -> None:
    source = write_pdb(tmp_path / "x.pdb")
    quick = RelaxConfig(platform="CPU", max_iterations=2, max_rounds=1)
    there = result_paths(source)["cif"]
    there.write_text("precious")
    with pytest.raises(OutputError, match="exists; use overwrite=True"):
        relax_file(source, None, quick)
    assert there.read_text() == "precious"
    relax_file(source, None, quick, overwrite=True)
    assert there.read_text() != "precious"


@pytest.mark.parametrize("left", [{"record"}, {"record", "pdb"}])
def test_results_of_an_interrupted_run_are_made_again(tmp_path: Path, left: set[str]) -> None:
    """Those of a whole run are refused, and so are structures without a record, which other programs wrote."""
    source = write_pdb(tmp_path / "x.pdb")
    quick = RelaxConfig(platform="CPU", threads=1, max_iterations=2, max_rounds=1)
    _, paths = relax_file(source, None, quick)
    whole = paths["cif"].read_bytes(), paths["pdb"].read_bytes()
    for kind in paths.keys() - left:
        paths[kind].unlink()
    relax_file(source, None, quick)
    assert (paths["cif"].read_bytes(), paths["pdb"].read_bytes()) == whole
    with pytest.raises(OutputError, match="exists; use overwrite=True"):
        relax_file(source, None, quick)
    paths["record"].unlink()
    with pytest.raises(OutputError, match="exists; use overwrite=True"):
        relax_file(source, None, quick)


def test_of_a_failed_structure_the_record_alone_is_written(tmp_path: Path) -> None:
    protein = helix("AAAAAA")
    xyz = protein.atom_positions.copy()
    xyz[2:4] = xyz[:2]
    text = to_pdb(type(protein)(**(vars(protein) | {"atom_positions": xyz})))
    source = tmp_path / "bad.pdb"
    source.write_text(text)
    (tmp_path / "bad_relaxed.pdb").write_text("of an earlier run")
    result, paths = relax_file(source, None, CPU, overwrite=True)
    assert not result.minimized
    assert list(paths) == ["record"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad.pdb", "bad_relax.json"]
    record = json.loads(paths["record"].read_text())
    assert (record["relaxed"], record["file"], record["schema_version"]) == (False, "bad.pdb", 1)


def test_ligands_and_modified_residues_of_the_file_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    names = {"MET": "MSE", "HIS": "HIE"}
    lines = [line for line in to_pdb(helix("AMHAG")).splitlines() if line.startswith("ATOM")]
    lines = [line[:17] + names.get(line[17:20], line[17:20]) + line[20:] for line in lines]
    lines = [*(line.replace(" SD  MSE", "SE   MSE") for line in lines), "TER"]
    for record, name, residue, chain, x in (
        ("HETATM", "ZN", "ZN", "A", 30.0),
        ("HETATM", "O", "HOH", "A", 40.0),
        ("ATOM", "C1'", "DA", "N", 60.0),
        ("ATOM", "N9", "DA", "N", 61.5),
    ):
        number = 91 if residue != "HOH" else 92
        lines.append(
            f"{record:6}   90  {name:3} {residue:>3} {chain}{number:4}    {x:8.3f}{x:8.3f}{x:8.3f}  1.00 10.00"
        )
    source = tmp_path / "x.pdb"
    source.write_text("\n".join([*lines, "END", ""]))
    _, paths = relax_file(source, None, CPU)
    notes = [
        "Left out, since only protein chains are relaxed: DA, ZN, water.",
        "Modified residues are relaxed as standard ones: MSE 2 of chain A as MET.",
    ]
    assert json.loads(paths["record"].read_text())["notes"] == notes
    for note in notes:
        assert f"{source}: {note}" in caplog.text
    _, paths = relax_file(paths["pdb"], tmp_path / "again", CPU)
    assert json.loads(paths["record"].read_text())["notes"] == []


def test_a_file_that_cannot_be_read_leaves_nothing(tmp_path: Path) -> None:
    source = tmp_path / "x.pdb"
    source.write_text("not a structure")
    with pytest.raises(InputError, match="not a PDB or mmCIF file"):
        relax_file(source, tmp_path / "out", CPU)
    assert not (tmp_path / "out").exists()


def test_folders_are_their_structures_without_relaxed_ones(tmp_path: Path) -> None:
    for name in ("a.cif", "a.pdb", "a_relaxed.pdb", "b.pdb.gz"):
        (tmp_path / name).write_text("")
    named = tmp_path / "a_relaxed.pdb"
    assert structures_to_relax([tmp_path, named]) == [tmp_path / "a.cif", tmp_path / "b.pdb.gz", named]
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="contains no structure"):
        structures_to_relax([tmp_path / "empty"])
