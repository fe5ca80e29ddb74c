"""Papers to cite are those of CITATION.cff, and those of a folder's results."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest
import yaml

from fastfold.cli.commands.report import run_cite
from fastfold.errors import InputError
from fastfold.inference.output.used_methods import used_methods
from fastfold.protein.citations import CITATIONS, find_citations
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


def test_a_structure_cites_its_network() -> None:
    text = helix_prediction("t", 12, 10).to_mmcif()
    for citation in find_citations(("alphafold", "multimer")):
        assert citation.doi in text
    single = helix_prediction("t", 12, model_name="model_1_ptm").to_mmcif()
    assert "10.1038/s41586-021-03819-2" in single
    assert "10.1101/2021.10.04.463034" not in single


def test_the_command_prints_papers_of_results(cli: CommandLine) -> None:
    cli.out.mkdir()
    (cli.out / "a_config.json").write_text(json.dumps({"weights": {"model": "model_1_multimer_v3"}}))
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


@pytest.mark.parametrize(
    ("method", "key"),
    [("columns", "afsample2"), ("clusters", "afcluster"), ("depth", "subsampling"), ("dropout", "afsample")],
)
def test_samples_name_the_paper_of_their_method(tmp_path: Path, method: str, key: str) -> None:
    config = {"weights": {"model": "model_1"}, "settings": {"sample": {"method": method}}}
    (tmp_path / "a_config.json").write_text(json.dumps(config))
    assert used_methods(tmp_path) == {"alphafold", key}
    assert [one.key for one in find_citations([key])] == [key]
