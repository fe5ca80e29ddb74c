"""Papers to cite are those of CITATION.cff, and those of a folder's results."""

from __future__ import annotations

import argparse
import io
import json
from pathlib import Path

import gemmi
import modelcif.reader
import pytest
import yaml

from fastfold.cli.commands.report import run_cite
from fastfold.errors import InputError
from fastfold.inference.output.used_methods import used_methods
from fastfold.protein.citations import CITATIONS, find_citations
from fastfold.protein.io.modelcif_writer import to_modelcif
from tests.conftest import REPOSITORY
from tests.helpers.command_line import CommandLine
from tests.helpers.command_line import cli as cli
from tests.helpers.results import helix_prediction


def test_papers_of_the_repository_are_among_them() -> None:
    references = yaml.safe_load((REPOSITORY / "CITATION.cff").read_text())["references"]
    own = {citation.title: citation for citation in CITATIONS}
    for reference in references:
        citation = own[reference["title"]]
        assert citation.year == reference["year"]
        assert citation.doi == reference.get("doi", citation.doi)
        families = [name.partition(",")[0] for name in citation.author_list]
        assert families == [author["family-names"] for author in reference["authors"]]


@pytest.mark.parametrize("name", ["model_1_multimer_v3", "mini", "multimer_like_file"])
@pytest.mark.parametrize("is_multimer", [True, False])
def test_a_structure_cites_its_network_as_software_by_its_kind(name: str, is_multimer: bool) -> None:
    text = helix_prediction("t", 12, 10, model_name=name, is_multimer=is_multimer).to_mmcif()
    (system,) = modelcif.reader.read(io.StringIO(text))
    cited = {one.name: one.citation and one.citation.doi for one in system.software}
    expected = {"FastFold": None, "AlphaFold": "10.1038/s41586-021-03819-2"}
    if is_multimer:
        expected["AlphaFold-Multimer"] = "10.1101/2021.10.04.463034"
    assert cited == expected
    ((step,),) = (protocol.steps for protocol in system.protocols)
    assert [one.name for one in step.software] == list(expected)


def test_authors_of_the_network_keep_their_letters_and_are_not_those_of_the_model() -> None:
    block = gemmi.cif.read_string(helix_prediction("t", 12).to_mmcif()).sole_block()
    assert not block.find("_audit_author.", ["name"])
    authors = [gemmi.cif.as_string(row[0]) for row in block.find("_citation_author.", ["name"])]
    assert "Zidek, A." in authors
    assert len(authors) == sum(len(one.author_list) for one in find_citations(("alphafold", "multimer")))


def test_a_structure_that_is_no_prediction_cites_no_network() -> None:
    prediction = helix_prediction("t", 12)
    text = to_modelcif(
        prediction.protein,
        entry_id="t",
        title="Žídek's \N{GREEK SMALL LETTER ALPHA}",
        software_version="1",
        model_name="given",
        plddt=None,
    )
    block = gemmi.cif.read_string(text).sole_block()
    assert block.find_value("_citation.title") is None
    assert gemmi.cif.as_string(block.find_value("_struct.title")) == "Zidek`s alpha"


def test_the_command_prints_papers_of_results(cli: CommandLine) -> None:
    cli.out.mkdir()
    (cli.out / "a_config.json").write_text(json.dumps({"weights": {"model": "mini", "is_multimer": True}}))
    (cli.out / "b_config.json").write_text("[1]")
    for name, engine in (("A", "msa server"), ("B", "hhblits"), ("C", "other")):
        (cli.out / "alignments" / name).mkdir(parents=True)
        record = {"colabfold": {"settings": {"engine": engine}}, "x": 1}
        (cli.out / "alignments" / name / "search.json").write_text(json.dumps(record))
    assert used_methods(cli.out) == {"alphafold", "multimer", "colabfold", "hhsuite"}
    (cli.out / "a_relaxed.pdb").touch()
    done = cli.run("cite", cli.out, "--bibtex")
    keys = [line[9:-1] for line in done.out.splitlines() if line.startswith("@article{")]
    assert (done.code, keys) == (0, ["alphafold", "multimer", "colabfold", "hhsuite", "openmm"])
    assert run_cite(argparse.Namespace(directory=None, bibtex=True)) == 0
    every = cli.run("cite").out
    assert every.count("https://doi.org/") == len(CITATIONS)
    assert "Jumper, J.; Evans, R.; Pritzel, A. et al. Highly accurate" in every
    with pytest.raises(InputError, match=r"found none; give a folder"):
        used_methods(cli.out / "alignments")
    with pytest.raises(InputError, match=r"cannot be listed: No such file or directory"):
        used_methods(cli.out / "other")


@pytest.mark.parametrize(
    ("method", "key"),
    [("columns", "afsample2"), ("clusters", "afcluster"), ("depth", "subsampling"), ("dropout", "afsample")],
)
def test_samples_name_the_paper_of_their_method(tmp_path: Path, method: str, key: str) -> None:
    config = {"weights": {"model": "model_1"}, "settings": {"sample": {"method": method}}}
    (tmp_path / "a_config.json").write_text(json.dumps(config))
    assert used_methods(tmp_path) == {"alphafold", key}
    assert [one.key for one in find_citations([key])] == [key]
