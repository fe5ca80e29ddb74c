"""``fastfold infer --reference``: predictions are compared with experimental structures."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fastfold.cli import main
from fastfold.errors import InputError
from fastfold.inference.config import OutputFormat
from fastfold.inference.output import references
from fastfold.inference.output.references import compare_target, find_reference
from fastfold.inference.report.references import compare_results
from fastfold.protein import residue_constants as rc
from fastfold.protein.io.pdb_writer import to_pdb
from fastfold.protein.io.read import read_structure
from fastfold.protein.structure import structure_to_protein
from tests.helpers.command_line import CommandLine
from tests.helpers.complexes import cut
from tests.helpers.peptides import helix
from tests.helpers.results import helix_prediction

SEQUENCE = "MKTAYIAKQRGWLPEDNSVT"


def _fold(cli: CommandLine, *options: str) -> int:
    fasta = cli.fasta(f">one\n{SEQUENCE}\n")
    weights = str(cli.weights("model_1_ptm"))
    fixed = ["--device", "cpu", "--num-recycles", "0", "--no-plots"]
    return main(["infer", str(fasta), "--out", str(cli.out), "--weights", weights, *fixed, *options])


def test_a_prediction_agrees_with_itself(
    cli: CommandLine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert _fold(cli) == 0
    structure = next(cli.out.glob("one_rank_001_*.pdb"))
    folder = tmp_path / "references"
    folder.mkdir()
    (folder / "one.pdb").write_bytes(structure.read_bytes())
    assert _fold(cli, "--reference", str(folder)) == 0  # finished before, compared all the same
    printed = capsys.readouterr()
    assert "TM-score 1.000, lDDT-CA 1.000" in printed.out + printed.err
    scores = json.loads((cli.out / "one_reference.json").read_text())
    found = scores[structure.stem]
    assert (found["tm_score"], found["lddt_ca"], found["gdt_ts"]) == (1.0, 1.0, 1.0)
    assert len(found["lddt_ca_per_residue"]) == len(SEQUENCE)


def test_a_distorted_reference_with_missing_residues_scores_less(cli: CommandLine, tmp_path: Path):
    assert _fold(cli) == 0
    protein = structure_to_protein(read_structure(next(cli.out.glob("one_rank_001_*.cif"))))
    rng = np.random.default_rng(0)
    protein.atom_positions[:] += rng.normal(size=protein.atom_positions.shape) * 2
    protein.atom_mask[:3] = 0
    (tmp_path / "true.pdb").write_text(to_pdb(protein))
    scores = next(iter(compare_target(cli.out, "one", tmp_path / "true.pdb")[0].values()))
    assert 0.05 < scores.tm_score < 0.95
    assert scores.aligned_residues == len(SEQUENCE) - 3


def test_a_complex_whose_copies_have_other_names_is_right(tmp_path: Path):
    """The reference has the chains in another order, and names of its own."""
    aatype = np.tile(np.arange(14), 3)
    sequences = (rc.aatype_to_sequence(aatype[:14]),) * 3
    prediction = helix_prediction("t", 14, 14, 14, aatype=aatype, sequences=sequences)
    paths = prediction.save(tmp_path, rank=1, plots=False)
    protein = prediction.protein
    order = np.r_[protein.chains[2], protein.chains[0], protein.chains[1]]
    lines = to_pdb(cut(protein, order)).splitlines()
    renamed = [line[:21] + {"A": "H", "B": "L", "C": "M"}.get(line[21:22], "") + line[22:] for line in lines]
    (tmp_path / "true.pdb").write_text("\n".join([*renamed, ""]))
    compare_target(tmp_path, "t", tmp_path / "true.pdb")
    found = json.loads((tmp_path / "t_reference.json").read_text())[paths["cif"].stem]
    assert (found["tm_score"], found["rmsd_ca"], found["dockq"], found["lddt_interface"]) == (
        1.0,
        0.0,
        1.0,
        1.0,
    )
    assert found["chain_mapping"] == {"C": "H", "A": "L", "B": "M"} == found["dockq_mapping"]
    assert found["interfaces"][0] == {
        "chains": ["H", "M"],
        "predicted_chains": ["C", "B"],
        "dockq": 1.0,
        "fnat": 1.0,
        "f1": 1.0,
        "irmsd": 0.0,
        "lrmsd": 0.0,
        "lddt": 1.0,
    }


def test_what_the_reader_decided_about_a_reference_is_said(
    cli: CommandLine, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    """The second model of the file is not compared."""
    assert _fold(cli) == 0
    models = next(cli.out.glob("one_rank_001_*.pdb")).read_text() * 2
    (tmp_path / "one.pdb").write_text(models)
    assert _fold(cli, "--reference", str(tmp_path / "one.pdb")) == 0
    assert "one.pdb: The file has several models, or atoms after END" in caplog.text


def test_a_target_without_a_structure_is_told_and_goes_on(
    cli: CommandLine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert _fold(cli, "--reference", str(tmp_path)) == 0
    printed = capsys.readouterr()
    assert "no structure of this name" in printed.out + printed.err


def test_a_reference_that_does_not_exist_is_refused_before_anything_is_folded(cli: CommandLine):
    assert _fold(cli, "--reference", "nowhere") == 1
    assert not list(cli.out.glob("one_*"))


def test_a_reference_of_ca_alone_is_refused_before_anything_is_folded(
    cli: CommandLine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    lines = to_pdb(helix(SEQUENCE)).splitlines()
    (tmp_path / "ca.pdb").write_text("\n".join(line for line in lines if line[12:16] == " CA ") + "\n")
    assert _fold(cli, "--reference", str(tmp_path / "ca.pdb")) == 1
    assert "cannot compare with a structure: 20 of 20 residues have CA alone" in capsys.readouterr().err
    assert not list(cli.out.glob("one_*"))


@pytest.mark.parametrize(
    ("method", "kind"),
    [
        ("x-ray diffraction", "experiment"),
        ("solution nmr, theoretical model", "experiment"),
        ("theoretical model", "model"),
        ("predicted model", "model"),
        ("", "structure"),
    ],
)
def test_the_method_of_a_file_tells_experiments_from_models(method: str, kind: str) -> None:
    assert references._kind(method) == kind


def test_a_missing_reference_is_named() -> None:
    with pytest.raises(InputError, match="nowhere"):
        find_reference(Path("nowhere"), "one")


def test_residues_that_a_reference_lacks_are_null_in_the_file(tmp_path: Path) -> None:
    """A helix of 14 without its first three residues, the oxygen of the fourth, and CA of the last."""
    prediction = helix_prediction("t", 14)
    paths = prediction.save(tmp_path, rank=1, plots=False)
    protein = prediction.protein
    protein.atom_mask[:3] = 0
    protein.atom_mask[3, rc.atom_order["O"]] = 0
    protein.atom_mask[13, rc.atom_order["CA"]] = 0
    lines = to_pdb(protein).splitlines(keepends=True)
    (tmp_path / "true.pdb").write_text("".join(line for line in lines if not line.startswith("SEQRES")))
    _, reason = compare_target(tmp_path, "t", tmp_path / "true.pdb")
    written = json.loads((tmp_path / "t_reference.json").read_text())
    found = written[paths["cif"].stem]
    assert (reason, "not_comparable" in written) == ("", False)
    assert found["reference_rows"] == [None] * 3 + list(range(11))
    assert found["lddt_ca_per_residue"] == [1.0] * 10 + [None]
    assert (written["reference"], written["kind"], written["name"]) == ("true.pdb", "structure", "t")
    positions = protein.atom_positions[:, [rc.atom_order[name] for name in ("N", "CA", "C", "O")]]
    assert len(written["backbone"]) == 11
    assert written["backbone"][0][3] is None
    assert written["backbone"][0][:3] == pytest.approx(positions[3, :3], abs=0.006)
    assert written["backbone"][10][1] is None
    assert written["backbone"][1:10] == [pytest.approx(one, abs=0.006) for one in positions[4:13]]


@pytest.mark.parametrize("output_format", ["fastfold", "colabfold"])
def test_a_target_named_like_a_prediction_is_compared_alone(
    tmp_path: Path, output_format: OutputFormat
) -> None:
    for name, residues in (("p", 12), ("p_rank_1", 20), ("p_rank_001", 20)):
        prediction = helix_prediction(name, residues)
        prediction.save(tmp_path / "results", rank=1, plots=False, output_format=output_format)
    (tmp_path / "experiment.pdb").write_text(helix_prediction("p", 12).to_pdb())
    scores, problem = compare_target(tmp_path / "results", "p", tmp_path / "experiment.pdb", output_format)
    assert problem == ""
    assert [(one.aligned_residues, one.tm_score) for one in scores.values()] == [(12, 1.0)]
    lines: list[str] = []
    compare_results(tmp_path / "results", tmp_path / "experiment.pdb", lines.append)
    assert [line.partition(":")[0] for line in lines] == ["p", "p_rank_001", "p_rank_1"]


def test_parts_of_a_protein_are_compared_by_their_numbers(tmp_path: Path) -> None:
    """An alignment would pay for the gap between the parts, and shift the short one."""
    whole = helix_prediction("whole", 120)
    kept = np.r_[4:14, 80:118]
    names = ("aatype", "residue_index", "chain_index", "atom_positions", "atom_mask", "plddt")
    parts = {name: getattr(whole, name)[kept] for name in names}
    sequence = "".join(whole.sequences[0][i] for i in kept)
    cut = replace(whole, name="cut", **parts, sequences=(sequence,), pae=None, max_pae=None)
    cut.save(tmp_path, rank=1, plots=False)
    reference = tmp_path / "whole.pdb"
    reference.write_text(whole.to_pdb())
    (scores,) = compare_target(tmp_path, "cut", reference)[0].values()
    assert scores.reference_rows.tolist() == kept.tolist()
    assert scores.rmsd_ca == pytest.approx(0.0, abs=1e-3)
    assert scores.tm_score == pytest.approx(48 / 120, abs=1e-4)
