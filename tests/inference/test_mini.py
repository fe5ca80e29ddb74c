"""The network that ships: it is used when no weights are given, says what it is, and folds the examples."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import gemmi
import numpy as np
import pytest
import torch

import fastfold
from fastfold.data.queries.fasta import read_fasta
from fastfold.data.training.dataset import open_dataset
from fastfold.data.training.entry import read_entry
from fastfold.evoformer.model import AlphaFold
from fastfold.evoformer.weights.checkpoint import weights_info
from fastfold.evoformer.weights.published import one_weights_file
from fastfold.protein import residue_constants as rc
from fastfold.protein.metrics.compactness import near_neighbors, radius_of_gyration
from fastfold.protein.structure import ChainStructure
from fastfold.training.validation import ChainScore, score_chain
from tests.conftest import REPOSITORY, require_shared
from tests.helpers.command_line import QUICK, CommandLine

EXAMPLES = {
    name: tuple(float(figure) for figure in figures.split("|"))
    for name, figures in re.findall(
        r"^\| [^|]+ \(`(\w+)`\) \| \d+ \|(.*)\|$", (REPOSITORY / "docs" / "mini.md").read_text(), re.MULTILINE
    )
}
"""By name the lDDT-CA, TM-score and predicted lDDT-CA that docs/mini.md gives for a fold from the sequence alone."""
UNSEEN = {"1i2t"}
"""Examples that are validation chains."""


@pytest.fixture(scope="module")
def mini() -> Iterator[AlphaFold]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield fastfold.load_model("mini", device="cpu")
    torch.set_num_threads(threads)


def score(mini: AlphaFold, name: str, split: str = "train") -> tuple[ChainScore, ChainStructure]:
    """Fold from the sequence alone, and compare with the experiment."""
    structures = require_shared("data", "structures")
    entries = open_dataset(structures, split=split).entries
    (entry,) = (entry for entry in entries if entry.id.startswith(name))
    chain = read_entry(entry).chain
    return score_chain(mini, name, chain, (), mini.config, mini.config.model.num_recycle), chain


def check_example(mini: AlphaFold, name: str) -> None:
    """The figures are those of the documents, with room for another processor's rounding."""
    found = score(mini, name, "valid" if name in UNSEEN else "train")[0]
    assert [found.lddt_ca, found.tm_score, found.mean_plddt] == pytest.approx(EXAMPLES[name], abs=0.005)


def test_without_weights_the_shipped_network_folds_and_says_what_it_is(cli: CommandLine):
    done = cli.run("infer", cli.fasta({"T1": "MKTAYIAKQR"}), "--out", cli.out, *QUICK)
    assert done.code == 0
    chains = int(weights_info(one_weights_file("mini")).notes["trained_chains"])
    assert chains > 1000
    assert f"mini, trained on {chains:,} protein chains" in done.err
    assert (
        "does not replace AlphaFold's weights: download them with 'fastfold weights download monomer_ptm'"
        in done.err
    )
    assert "T1_rank_001_mini_seed_0.pdb" in cli.names()


@pytest.mark.long
def test_the_shortest_chains_are_folded_and_embedded_alone_and_together(cli: CommandLine):
    shortest = {"one": "M", "two": "GT", "three": "MTK"}
    sequences = cli.fasta(shortest)
    done = cli.run("infer", sequences, "--out", cli.out, "--zip", "--save-recycles", *QUICK)
    assert done.code == 0, done.err
    for name, sequence in shortest.items():
        assert len(cli.scores(name)["plddt"]) == len(sequence)
        structure = gemmi.read_structure(str(cli.out / f"{name}_rank_001_mini_seed_0.cif"))
        assert [residue.name for residue in structure[0]["A"]] == gemmi.expand_one_letter_sequence(
            sequence, gemmi.ResidueKind.AA
        )
    embedded = cli.folder / "embedded"
    assert cli.run("embed", sequences, "--out", embedded, "--num-recycles", "0").code == 0
    assert len(list(embedded.glob("*.safetensors"))) == len(shortest)
    one = fastfold.predict("M", "mini", num_recycles=0)
    together = fastfold.predict_many(shortest, "mini", num_recycles=0)
    np.testing.assert_allclose(together["one"][0].atom_positions, one.atom_positions, atol=1e-3)


def test_a_complex_is_refused_unless_the_shipped_network_is_chosen(cli: CommandLine):
    sequences = cli.fasta({"T1": "MKTAYIAKQR:MKT", "T2": "MKTAYIAKQR"})
    done = cli.run("infer", sequences, "--out", cli.out, *QUICK)
    assert done.code == 1
    assert "T1: complex of 2 chains, but the default network was trained on single chains" in done.err
    assert "--weights multimer, or --weights mini" in done.err
    assert not [name for name in cli.names() if name.startswith("T1")]
    assert "T2_rank_001_mini_seed_0.pdb" in cli.names()
    (failure,) = (cli.out / "failures.tsv").read_text().splitlines()[1:]
    assert failure.startswith("T1\tT1: complex of 2 chains")


def test_a_complex_by_the_shipped_network_has_no_interface_scores(cli: CommandLine):
    sequences = cli.fasta({"T1": "MKTAYIAKQR:MKT"})
    done = cli.run("infer", sequences, "--out", cli.out, "--weights", "mini", *QUICK)
    assert done.code == 0
    assert "a monomer network folds this complex as one chain whose residue numbers jump by 200" in done.err
    assert done.err.count("mini was trained on single chains only: complexes get no interface scores") == 1
    scores = cli.scores("T1")
    assert scores["sequences"] == ["MKTAYIAKQR", "MKT"]
    assert scores["iptm"] is None
    assert scores["interfaces"]["reason"] == "mini was trained on single chains only"
    pair = scores["interfaces"]["pairs"]["A-B"]
    assert pair.keys() >= {"iptm", "pdockq", "ipsae", "lis"}
    assert all(x is None for x in leaves(pair)), pair
    assert scores["interfaces"]["ipsae_max"] is None


def leaves(tree: dict[str, Any]) -> Iterator[Any]:
    """Yield all scores but those of clashes, which are counted in the coordinates."""
    for key, value in tree.items():
        if "clash" not in key:
            yield from leaves(value) if isinstance(value, dict) else [value]


def test_python_says_why_a_complex_has_no_interface_scores(mini: AlphaFold):
    found = fastfold.predict("MKTAYIAKQR:MKT", model=mini, num_recycles=0)
    assert found.iptm is None
    assert found.no_interface_scores == "mini was trained on single chains only"
    assert found.interface_scores["reason"] == found.no_interface_scores
    assert all(x is None for x in leaves(found.interface_scores["pairs"]))


def test_a_screen_of_complexes_by_the_shipped_network_is_refused(cli: CommandLine):
    sequences = cli.fasta({"T1": "MKTAYIAKQR:MKT"})
    for weights in ((), ("--weights", "mini")):
        done = cli.run("screen", sequences, "--out", cli.out, *weights)
        assert done.code != 0
        assert "cannot screen complexes with mini" in done.err
        assert not cli.out.exists() or not cli.names()


def test_the_file_is_small_enough_to_ship():
    assert one_weights_file("mini").stat().st_size <= 25e6


def test_the_examples_are_four_known_proteins_and_one_unseen(mini: AlphaFold):
    assert mini.name == "mini"
    names = [target.name for target in read_fasta(REPOSITORY / "examples" / "proteins.fasta")]
    assert sorted(names) == sorted(EXAMPLES)
    assert len(names) == 5
    assert set(names) > UNSEEN


@pytest.mark.parametrize(
    "name", ["1igd", *(pytest.param(n, marks=pytest.mark.slow) for n in sorted(EXAMPLES) if n != "1igd")]
)
def test_an_example_folds_from_its_sequence_alone(mini: AlphaFold, name: str):
    check_example(mini, name)


@pytest.mark.parametrize("name", ["1bpi", "1i2t", "1utg"])
def test_a_protein_that_it_has_not_seen_comes_out_neither_collapsed_nor_torn(mini: AlphaFold, name: str):
    """lDDT-CA does not see a ball of overlapping residues; these figures do."""
    found, chain = score(mini, name, "valid")
    assert found.positions is not None
    ca = rc.atom_order["CA"]
    predicted, true = found.positions[:, ca], torch.from_numpy(chain.positions[:, ca])
    mask = torch.from_numpy(chain.mask[:, ca])
    ratio = float(radius_of_gyration(predicted, mask) / radius_of_gyration(true, mask))
    assert 0.75 < ratio < 1.3
    assert near_neighbors(predicted, mask) <= 0.05
    lengths = (predicted[1:] - predicted[:-1]).norm(dim=-1)
    assert float((lengths - rc.ca_ca_distance).abs().max()) < 0.4
