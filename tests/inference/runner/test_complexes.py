"""``fastfold infer`` of complexes, and by multimer networks."""

from __future__ import annotations

import json

import numpy as np
import pytest
from Bio.PDB import MMCIFParser

from fastfold.inference.output.summary import read_table
from tests.helpers.command_line import CommandLine
from tests.inference.runner.inputs import OTHER, SEQUENCE


def test_chains_come_in_the_order_of_the_input(cli: CommandLine):
    """Also where copies of a chain stand apart, which the network's features group."""
    weights = [cli.weights("model_1_multimer_v3")]
    fasta = cli.fasta({"aba": f"{SEQUENCE}:{OTHER}:{SEQUENCE}"})
    assert cli.infer(fasta, weights=weights).code == 0
    scores = cli.scores("aba")
    assert scores["sequences"] == [SEQUENCE, OTHER, SEQUENCE]
    assert scores["chain_ids"] == ["A", "B", "C"]
    assert scores["ranking_confidence"] == pytest.approx(0.8 * scores["iptm"] + 0.2 * scores["ptm"], abs=1e-3)
    (line,) = read_table(cli.out / "summary.tsv")
    assert line["clashes"] == str(scores["interfaces"]["clashes"])
    assert line["has_clash"] == str(scores["interfaces"]["has_clash"])
    (path,) = cli.out.glob("*.cif")
    chains = list(MMCIFParser(QUIET=True).get_structure("x", path)[0])
    assert [chain.id for chain in chains] == ["A", "B", "C"]
    assert [len(list(chain)) for chain in chains] == [10, 9, 10]
    assert [residue.resname for residue in chains[1]][:3] == ["GLY", "SER", "HIS"]
    (pae,) = cli.out.glob("*_pae.json")
    assert np.shape(json.loads(pae.read_text())[0]["predicted_aligned_error"]) == (29, 29)


def test_records_of_a_file_are_one_complex_when_asked(cli: CommandLine):
    fasta = cli.fasta({"first": SEQUENCE, "second": OTHER}, name="dimer.fasta")
    weights = [cli.weights("model_1_multimer_v3")]
    assert cli.infer(fasta, "--complex", weights=weights).out.startswith("1 folded;")
    assert cli.scores("dimer")["sequences"] == [SEQUENCE, OTHER]


def test_each_target_is_folded_by_the_networks_that_suit_it(cli: CommandLine):
    weights = [cli.weights("model_1_ptm"), cli.weights("model_1_multimer_v3")]
    fasta = cli.fasta({"pair": f"{SEQUENCE}:{OTHER}", "single": OTHER})
    done = cli.infer(fasta, weights=weights)
    assert done.code == 0
    assert "sequence alone, by model_1_multimer_v3" in done.err
    assert "sequence alone, by model_1_ptm\n" in done.err
    assert cli.scores("pair")["model"] == "model_1_multimer_v3"
    assert cli.scores("single")["model"] == "model_1_ptm"
    assert not list(cli.out.glob("*_rank_002_*"))


def test_a_single_chain_goes_to_a_multimer_network_if_there_is_no_other(cli: CommandLine):
    done = cli.infer(cli.fasta({"single": SEQUENCE}), weights=[cli.weights("model_1_multimer_v3")])
    assert done.code == 0
    scores = cli.scores("single")
    assert scores["iptm"] is None
    assert scores["ranking_confidence"] == pytest.approx(scores["mean_plddt"], abs=0.01)


def test_a_complex_with_monomer_weights_is_folded_as_one_chain_and_that_is_said(cli: CommandLine):
    done = cli.infer(cli.fasta({"pair": f"{SEQUENCE}:{OTHER}"}))
    assert done.code == 0
    assert "warning: pair: a monomer network folds this complex as one chain" in done.err
    assert "use --weights multimer for complexes" in done.err
    scores = cli.scores("pair")
    assert scores["sequences"] == [SEQUENCE, OTHER]
    assert scores["chain_ids"] == ["A", "B"]
    assert 0 < scores["iptm"] < 1
    assert scores["interfaces"]["pairs"]["A-B"]["iptm"] is not None
