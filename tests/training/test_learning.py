"""What can be learnt is learnt: the structure of one chain, and of ten chains more than distances along a chain."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

import fastfold
from benchmarks.no_skill import SeparationPrior
from fastfold.cli import main
from fastfold.data.msa.msa import split_records
from fastfold.data.training.dataset import open_dataset
from fastfold.data.training.entry import read_entry
from fastfold.evoformer import AlphaFold
from fastfold.protein.metrics.contacts import score_distogram
from fastfold.training.logging.loggers import read_json_lines
from fastfold.training.validation import resolved_beta
from tests.conftest import REPOSITORY

PROTEINS = {
    record.header.split()[0]: "".join(record.lines)
    for record in split_records((REPOSITORY / "examples" / "proteins.fasta").read_text())[1]
}
EDGES = np.linspace(2.3125, 21.6875, 63)
"""Bins of the distogram's head, in Å."""


@pytest.fixture(scope="module")
def mini() -> AlphaFold:
    return fastfold.load_model("mini", device="cpu")


def write_predicted(model: AlphaFold, sequence: str, path: Path) -> None:
    """A structure like those of proteins, which no test has to download."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(fastfold.predict(sequence, model=model, num_recycles=1).to_pdb())


def overfit(data: Path, out: Path, *overrides: str) -> None:
    """Train by the preset, as from a shell."""
    assert main(["train", "+preset=overfit", f"data.directory={data}", f"trainer.out={out}", *overrides]) == 0


@pytest.mark.slow
@pytest.mark.usefixtures("with_report")
def test_one_chain_is_learnt_within_the_presets_own_steps(mini: AlphaFold, tmp_path: Path):
    """By what the run's own report says; lDDT takes a mirror image for the structure, the TM-score does not."""
    structure, out = tmp_path / "1igd.pdb", tmp_path / "run"
    assert 60 <= len(PROTEINS["1igd"]) <= 100
    write_predicted(mini, PROTEINS["1igd"], structure)
    overfit(structure, out)
    page = (out / "report" / "report.md").read_text()
    found = re.search(r"lDDT-CA in validation, at the end \| (\S+) \|", page)
    assert found is not None
    assert float(found[1]) >= 0.9
    found = re.search(r"TM-score in validation, at the end \| (\S+) \|", page)
    assert found is not None
    assert float(found[1]) >= 0.8
    training = [line["lddt_ca"] for line in read_json_lines(out / "metrics.jsonl") if "lddt_ca" in line]
    assert np.mean(training[-10:]) >= 0.9
    assert np.mean(training[:10]) < 0.4


def of_the_prior(folder: Path) -> dict[str, float]:
    """Cross-entropies of the distribution of distances at every separation, on the chains that it was counted on.

    They are counted a hundred times, so that the one in each bin to begin with is nothing: this is the best that can be
    done knowing separations only.
    """
    chains = [resolved_beta(read_entry(entry).chain) for entry in open_dataset(folder).entries]
    prior = SeparationPrior.from_structures(chains * 100, EDGES)
    scores = [score_distogram(prior.logits(len(mask)), EDGES, beta, mask) for beta, mask in chains]
    return {
        band: float(np.mean([score.cross_entropy[band] for score in scores]))
        for band in scores[0].cross_entropy
    }


def pieces(proteins: Sequence[str], length: int) -> list[str]:
    """Two of each."""
    return [part for protein in proteins for part in (protein[:length], protein[-length:])]


def check_beyond_the_prior(data: Path, out: Path) -> None:
    """A network that knew nothing but separations in the sequence would be as good as their distribution."""
    prior = of_the_prior(data)
    (found,) = [line for line in read_json_lines(out / "metrics.jsonl") if "valid_lddt_ca" in line]
    assert len(prior) == 4
    for band, of_prior in prior.items():
        assert found[f"valid_distogram_ce_{band}"] < of_prior, band


@pytest.mark.long
def test_a_short_chain_is_learnt_in_few_steps(mini: AlphaFold, tmp_path: Path):
    """No loss keeps the others from being learnt at the beginning, when all atoms are at one point."""
    data, out = tmp_path / "data", tmp_path / "run"
    write_predicted(mini, PROTEINS["1igd"][:30], data / "1igd.pdb")
    overfit(data, out, "trainer.steps=80", "trainer.validate_every=80")
    check_beyond_the_prior(data, out)


@pytest.mark.slow
def test_ten_chains_are_told_apart(mini: AlphaFold, tmp_path: Path):
    data, out = tmp_path / "data", tmp_path / "run"
    for number, sequence in enumerate(pieces(list(PROTEINS.values()), 30)):
        write_predicted(mini, sequence, data / f"{number}.pdb")
    small = "model.overrides.model.embeddings_and_evoformer.evoformer_num_block=2"
    overfit(data, out, small, "optim.batch_size=2")
    check_beyond_the_prior(data, out)
