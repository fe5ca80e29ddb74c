"""``fastfold mutate``: one alignment for all mutants, differences to the wild type, and a picture."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path

import numpy as np
import pytest

from fastfold.data.targets import target_from_sequence
from fastfold.data.templates.options import TemplateOptions
from fastfold.inference.output.plots import scan_png
from fastfold.inference.request import InferRequest, RunOptions
from fastfold.inference.target_templates import TargetTemplates
from fastfold.products.mutate import run
from fastfold.products.mutate.table import COLUMNS
from tests.helpers.command_line import QUICK, CommandLine

SEQUENCE = "MKTAYIAKQRQISFVK"


def table(cli: CommandLine) -> dict[str, dict[str, str]]:
    """Rows of the table by their mutations."""
    lines = (cli.out / "mutations.tsv").read_text().splitlines()
    return {row["mutations"]: row for row in csv.DictReader(lines, delimiter="\t")}


@pytest.mark.long
def test_mutants_are_compared_with_the_wild_type(cli: CommandLine):
    """Numbers are those of the scores files, of this run alone; a second run folds nothing."""
    msas = cli.folder / "msas"
    msas.mkdir()
    (msas / "T1.a3m").write_text(f">q\n{SEQUENCE}\n>r\n{SEQUENCE.replace('K', 'R')}\n")
    flags = ("--mutations", "A4G,K8W+T3S", "--num-recycles", "0", "--msa-dir", msas)
    arguments = ("mutate", cli.fasta({"T1": SEQUENCE}), "--out", cli.out, "--weights", cli.weights(), *flags)
    done = cli.run(*arguments)
    assert done.code == 0, done.err
    assert done.out.startswith("3 folded")
    rows = table(cli)
    assert list(rows) == ["A4G", "T3S+K8W"]
    wild, mutant = cli.scores("T1"), cli.scores("T1_A4G")
    assert mutant["sequences"] == ["MKTGYIAKQRQISFVK"]
    assert cli.config("T1_A4G")["alignment_rows"] == [[2, 0]]
    change = np.array(mutant["plddt"]) - np.array(wild["plddt"])
    assert float(rows["A4G"]["dplddt"]) == pytest.approx(change.mean(), abs=1e-3)
    assert float(rows["A4G"]["dplddt_site"]) == pytest.approx(change[3], abs=1e-3)
    assert float(rows["A4G"]["dptm"]) == pytest.approx(mutant["ptm"] - wild["ptm"], abs=1e-4)
    assert float(rows["A4G"]["strain"]) > 0
    assert (cli.out / "mutations.png").read_bytes().startswith(b"\x89PNG")
    page = (cli.out / "report.html").read_text()
    listed = json.loads(re.search(r'<script[^>]* id="meta"[^>]*>(.*?)</script>', page, re.DOTALL)[1])["rows"]  # type: ignore[index]
    (own,) = (row for row in listed if row["target"] == "T1_A4G")
    assert own["dplddt"] == pytest.approx(change.mean(), abs=1e-3)
    assert own["mutation"] == "A4G"
    assert {"dplddt_site", "dpae", "dpae_site", "strain", "strain_site"} <= own.keys()
    first = (cli.out / "mutations.tsv").read_bytes()
    assert cli.run(*arguments).out.startswith("0 folded, 3 finished before")
    assert (cli.out / "mutations.tsv").read_bytes() == first
    other = cli.run(*arguments, "--seed", "1")
    assert other.out.startswith("3 folded")
    assert {row["predictions"] for row in table(cli).values()} == {"1"}
    assert (cli.out / "mutations.tsv").read_bytes() != first
    cli.run(*arguments, "--no-plots")  # the earlier picture would show other mutants than the table
    assert not (cli.out / "mutations.png").exists()


@pytest.mark.long
def test_a_mutant_is_folded_as_infer_folds_its_sequence(cli: CommandLine):
    """Only the first row of the alignment changes; its other rows are those of the wild type."""
    mutant = SEQUENCE.replace("A", "G", 1)
    row = SEQUENCE.replace("K", "R")
    for name, query in (("T1", SEQUENCE), ("T1_A4G", mutant)):
        (cli.folder / name).mkdir()
        (cli.folder / name / f"{name}.a3m").write_text(f">q\n{query}\n>r\n{row}\n")
    common = ("--weights", cli.weights(), *QUICK)
    own, other = cli.out / "mutate", cli.out / "infer"
    mutations = ("--mutations", "A4G", "--msa-dir", cli.folder / "T1")
    assert cli.run("mutate", cli.fasta({"T1": SEQUENCE}), "--out", own, *common, *mutations).code == 0
    query = cli.fasta({"T1_A4G": mutant}, "mutant.fasta")
    assert cli.run("infer", query, "--out", other, *common, "--msa-dir", cli.folder / "T1_A4G").code == 0
    structures = [path.name for path in other.glob("T1_A4G*.pdb")]
    assert structures
    for name in structures:
        assert (own / name).read_bytes() == (other / name).read_bytes()


@pytest.mark.slow
def test_mutants_share_passes(cli: CommandLine):
    """They have one length; the differences are those of single folds up to rounding."""
    arguments = [
        "mutate",
        cli.fasta({"T1": SEQUENCE}),
        "--mutations",
        "A4G,K8W",
        "--num-recycles",
        "0",
        "--no-plots",
    ]
    assert cli.run(*arguments, "--out", cli.out).code == 0
    alone = table(cli)
    cli.out = cli.folder / "batched"
    assert cli.run(*arguments, "--out", cli.out, "--batch", "auto").code == 0
    assert cli.config("T1_A4G")["batch"] == 3
    for name, row in table(cli).items():
        assert float(row["dplddt"]) == pytest.approx(float(alone[name]["dplddt"]), abs=0.1)
        assert float(row["dpae"]) == pytest.approx(float(alone[name]["dpae"]), abs=0.1)


@pytest.mark.parametrize(
    ("flags", "code", "message"),
    [
        (["--mutations", "A4G", "--initial-guess", "x.pdb"], 2, "leave it out"),
        (["--mutations", "A4G", "--pae", "no"], 2, "differences of the aligned error need it"),
        (["--mutations", "W4G"], 1, "residue 4 is A, not W"),
        (["--mutations", "A4G", "--templates", "none.cif"], 2, "mini does not use any"),
        (["--mutations", "A4G", "--msa-dir", "none"], 1, "no such folder"),
    ],
)
def test_wrong_requests_are_refused(cli: CommandLine, flags: list[str], code: int, message: str):
    done = cli.run("mutate", cli.fasta({"T1": SEQUENCE}), "--out", cli.out, *flags)
    assert done.code == code
    assert message in done.err
    assert not cli.out.exists()


def test_missing_evidence_is_reported(cli: CommandLine):
    """A folder without an alignment of the target, as in ``infer``."""
    (cli.folder / "msas").mkdir()
    flags = ("--mutations", "A4G", "--num-recycles", "0", "--no-plots", "--msa-dir", cli.folder / "msas")
    fasta, weights = cli.fasta({"T1": SEQUENCE}), ("--weights", cli.weights())
    done = cli.run("mutate", fasta, "--out", cli.out, *weights, *flags)
    assert "T1: no alignment of chain A in" in done.err
    assert {row["mutations"]: row["name"] for row in table(cli).values()} == {"A4G": "T1_A4G"}
    assert COLUMNS[0] == "mutations"


@pytest.mark.parametrize(
    ("templates", "lines"),
    [
        (TargetTemplates((None,), lines=("no template fits",)), ["no template fits"]),
        (None, []),
        (TargetTemplates(({"template_aatype": np.zeros(1)},), ({"used": 1},), ("one used",)), []),
    ],
)
def test_templates_that_do_not_fit_are_told_with_the_wild_type(
    templates: TargetTemplates | None, lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("check_takers", "open_templates", "suitable"):
        monkeypatch.setattr(run, name, lambda *_: None)
    monkeypatch.setattr(run, "requested_networks", lambda *_: [])
    monkeypatch.setattr(run, "find_templates", lambda *_: templates)
    options = RunOptions(templates=TemplateOptions(structures=(Path("a.pdb"),)))
    wild_type, _ = run._prepared(target_from_sequence("MKV"), InferRequest([], Path("out"), options=options))
    assert list(wild_type.warnings) == lines
    assert wild_type.templates == (templates.features if templates and templates.number else None)


def test_one_target_is_expected(cli: CommandLine):
    for number, names in ((2, "T1, T2"), (4, "T1, T2, T3")):
        fasta = cli.fasta({f"T{k}": SEQUENCE for k in range(1, number + 1)})
        done = cli.run("mutate", fasta, "--out", cli.out, "--mutations", "all")
        assert f"expected one target to mutate, found {number}: {names}; give a file" in done.err
    assert "no target given" in cli.run("mutate", "--out", cli.out, "--mutations", "all").err


def test_heat_maps_are_pictures() -> None:
    values = np.array([[np.nan, 1.0], [-2.0, np.nan]])
    png = scan_png({"Δ": values, "strain": np.abs(values)}, ["A1", "G2"], ["A", "G"], [0, 1], title="x")
    assert png.startswith(b"\x89PNG")
    assert png == scan_png(
        {"Δ": values, "strain": np.abs(values)}, ["A1", "G2"], ["A", "G"], [0, 1], title="x"
    )
