"""A complex for a monomer network: chains in a row with a jump of the index, and ColabFold's alignment of them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fastfold.data.features import coevolution
from fastfold.data.features.assembly import CHAIN_GAP, join_chains, joined_features, share_frames
from fastfold.data.features.pipeline import featurize
from fastfold.data.msa.msa import ChainMsas, Msa, parse_a3m
from fastfold.data.targets import make_chains
from fastfold.errors import ConfigError, InputError
from fastfold.evoformer.config import model_config
from fastfold.inference.folding.prediction import input_order
from fastfold.protein import residue_constants as rc
from tests.conftest import require_shared
from tests.helpers.colabfold_records import assert_equal_features, expected, our_features, recorded_features

LETTERS = np.array([*sorted(set("ACDEFGHIKLMNPQRSTVWY")), "X", "-"])


def rows_of(features: dict[str, np.ndarray]) -> list[str]:
    """The alignment in letters."""
    return ["".join(row) for row in LETTERS[features["msa"]]]


def msa_of(*rows: str, species: tuple[str, ...] = (), as_is: bool = False) -> Msa:
    """An alignment; ``species`` are those of its last rows."""
    names = ["q"] * (len(rows) - len(species)) + [f"tr|A0A0K0|A0A0K0_{name}/1-9" for name in species]
    return Msa(tuple(rows), np.zeros((len(rows), len(rows[0])), np.int32), tuple(names), as_is=as_is)


def test_the_index_jumps_between_chains_in_the_order_of_entities() -> None:
    """A, B, A becomes A, A, B, as in the features for multimer networks."""
    found = joined_features(make_chains(["MK", "WWV", "MK"]), [([], [])] * 3)
    assert rc.aatype_to_sequence(np.argmax(found["aatype"], axis=-1)) == "MKMKWWV"
    assert found["residue_index"].tolist() == [0, 1, 202, 203, 404, 405, 406]
    assert found["asym_id"].tolist() == [1, 1, 2, 2, 3, 3, 3]
    assert found["sequence"].tobytes() == b"MKMKWWV"
    assert rows_of(found) == ["MKMKWWV", "MK-----", "--MK---", "----WWV"]
    assert (found["num_alignments"] == 4).all()
    assert CHAIN_GAP > 32  # where relative positions end


def test_pairs_by_species_stand_below_the_query() -> None:
    """AlphaFold's alignments are paired as for a multimer network; rows of pairs are not repeated below."""
    alignments: list[ChainMsas] = [
        ([msa_of("MK", "RK", "MR")], [msa_of("MK", "MR", "M-", species=("HUMAN", "MOUSE"))]),
        ([msa_of("WWV", "WW-")], [msa_of("WWV", "ACA", "WW-", species=("YEAST", "HUMAN"))]),
    ]
    found = joined_features(make_chains(["MK", "WWV"]), alignments)
    assert rows_of(found) == ["MKWWV", "MKWWV", "MRWW-", "RK---"]


def test_lines_pair_chains_whatever_the_rows_of_each_chain_alone_are() -> None:
    """One chain's from the user, the other's and the pairs from a server; all rows stay, as with ColabFold's."""
    alignments: list[ChainMsas] = [
        ([msa_of("MK", "RK", "MR")], [msa_of("MK", "MR", as_is=True)]),
        ([msa_of("WWV", "WW-", as_is=True)], [msa_of("WWV", "ACA", as_is=True)]),
    ]
    found = joined_features(make_chains(["MK", "WWV"]), alignments)
    assert rows_of(found) == [
        *("MKWWV", "MKWWV", "MRACA"),
        *("MK---", "RK---", "MR---"),
        *("--WWV", "--WW-"),
    ]


def test_lines_that_do_not_fit_are_refused() -> None:
    """Rows that came as lines are as many in each chain, and come for all chains."""
    chains = make_chains(["MK", "WWV"])
    lines = msa_of("MK", "MR", as_is=True), msa_of("WWV", as_is=True)
    with pytest.raises(
        InputError, match=r"expected equal numbers of paired rows in all chains, found \[2, 1\]"
    ):
        joined_features(chains, [([], [lines[0]]), ([], [lines[1]])])
    with pytest.raises(InputError, match="expected one kind of alignments for all chains"):
        joined_features(chains, [([], [lines[0]]), ([], [msa_of("WWV")])])
    with pytest.raises(InputError, match="2 columns, its chain 3"):
        joined_features(chains, [([], []), ([msa_of("MK", as_is=True)], [])])


def test_a_chain_alone_has_its_query_twice() -> None:
    """As ColabFold has it for single chains among complexes; nobody joins one chain otherwise."""
    raw = {
        "aatype": np.eye(21, dtype=np.int32)[[12, 11]],
        "between_segment_residues": np.zeros(2, np.int32),
        "sequence": np.frombuffer(b"MK", np.uint8),
        "msa": np.array([[10, 8]]),
        "deletion_matrix_int": np.zeros((1, 2), np.int32),
    }
    assert rows_of(join_chains([raw], [], ["MK"])) == ["MK", "MK"]


def test_featurize_joins_only_if_asked() -> None:
    """The chains can be told apart in the features, and templates of a complex are refused."""
    config = model_config("model_3_ptm")
    chains = make_chains(["MKVLA", "WWVGG"])
    alignments: list[ChainMsas] = [([msa_of("MKVLA", "MRVLA")], []), ([], [])]
    with pytest.raises(ConfigError, match="complex of 2 chains"):
        featurize(chains, alignments, config)
    with pytest.raises(ConfigError, match="does not use templates of single chains of a complex"):
        featurize(
            chains, alignments, config, join=True, templates=[{"template_aatype": np.zeros((1, 5))}, None]
        )
    sampler = featurize(chains, alignments, config, join=True)
    assert (sampler.is_multimer, sampler.chain_order, sampler.num_residues) == (False, (0, 1), 10)
    sample = sampler.sample(0)
    assert sample["asym_id"].tolist() == [1] * 5 + [2] * 5
    assert sample["residue_index"].tolist() == [0, 1, 2, 3, 4, 205, 206, 207, 208, 209]
    assert sample["msa_feat"].shape == (4, 10, 49)
    single = featurize(chains[:1], alignments[:1], config, join=True)
    assert "asym_id" not in single.sample(0)
    assert single.chain_order == (0,)


def test_templates_of_whole_complexes_are_joined() -> None:
    """In the order of the features, and only if the atoms of all chains are in one frame."""
    chains = make_chains(["MK", "WWV", "MK"])
    templates = []
    for number, chain in enumerate(chains):
        n = len(chain.sequence)
        templates.append(
            {
                "template_aatype": np.eye(22)[np.full((1, n), number)],
                "template_all_atom_positions": np.full((1, n, 37, 3), float(number)),
                "template_all_atom_masks": np.ones((1, n, 37)),
                "template_sum_probs": np.zeros((1, 1)),
                "template_frame": np.array([1]),
            }
        )
    joined = joined_features(chains, [([], [])] * 3, templates)
    assert joined["template_all_atom_positions"][0, :, 0, 0].tolist() == [0, 0, 2, 2, 1, 1, 1]
    assert joined["template_aatype"].argmax(-1).tolist() == [[0, 0, 2, 2, 1, 1, 1]]
    assert share_frames(templates)
    assert not share_frames([templates[0], None])
    assert not share_frames([one | {"template_frame": np.array([0])} for one in templates])
    config = model_config("model_1_ptm")
    sampler = featurize(chains, [([], [])] * 3, config, join=True, templates=templates)
    assert sampler.static["template_mask"].tolist() == [1, 0, 0, 0]
    assert "template_frame" not in sampler.static


def test_residues_come_back_in_the_order_of_the_input() -> None:
    """A network's output for A, B, A has the copies side by side."""
    sequences = ["MKV", "WW", "MKV"]
    sampler = featurize(make_chains(sequences), [([], [])] * 3, model_config("model_3_ptm"), join=True)
    order = input_order(sampler)
    assert order.tolist() == [0, 1, 2, 6, 7, 3, 4, 5]
    assert rc.aatype_to_sequence(sampler.static["aatype"][order]) == "".join(sequences)


def test_coevolution_is_that_of_each_chain() -> None:
    """Rows that cover one chain only would be dropped as gaps; across chains nothing is said."""
    rng = np.random.default_rng(0)
    rows = ["".join(rng.choice([*"ACDEFGHIKLMNPQRSTVWY"], 12)) for _ in range(30)]
    chains = make_chains(["MKV", rows[0], "MKV"])
    alignments: list[ChainMsas] = [([], []), ([msa_of(*rows)], []), ([], [])]
    static = featurize(chains, alignments, model_config("mini"), join=True).static
    alone = featurize(chains[1:2], alignments[1:2], model_config("mini")).static
    for name in coevolution.FEATURES:
        inner = static[name][6:, 6:] if name.endswith("pair") else static[name][6:]
        np.testing.assert_array_equal(inner, alone[name])
        assert alone[name].any()
    assert not static["coevolution_pair"][:6].any()
    assert not static["coevolution_pair"][:, :6].any()


def test_recorded_alignments_of_a_server_have_colabfolds_features() -> None:
    """Paired, unpaired and both, for both kinds of networks.

    The server's rows may have insertions behind their last column. For networks of single chains, ColabFold counts
    these before the first column of the next chain, as if they belonged to it; here they count nowhere.
    """
    folder = require_shared("oracles_data", "colabfold_inputs")
    compared = 0
    for key, case in expected(folder)["server"].items():
        server = json.loads((Path(folder) / "inputs" / "server" / f"{key.split('/')[0]}.json").read_text())
        unpaired, paired = _texts(server, case, key.split("/")[1])
        own = {
            sequence: (_as_is(unpaired, number), _as_is(paired, number))
            for number, sequence in enumerate(case["sequences"])
        }
        chains = make_chains(server["query"])
        alignments = [own[chain.sequence] for chain in chains]
        for kind, theirs in recorded_features(folder, case):
            ours = our_features(kind, chains, alignments, is_complex=len(chains) > 1)
            if kind == "ptm" and len(chains) > 1:
                starts = np.flatnonzero(np.diff(ours["asym_id"]) > 0) + 1
                counted = theirs["deletion_matrix_int"]
                assert (counted[:, starts] >= ours["deletion_matrix_int"][:, starts]).all()
                counted[:, starts] = ours["deletion_matrix_int"][:, starts]
            assert_equal_features(ours, theirs, f"{key} {kind}")
            compared += 1
    assert compared == 36


def _texts(server: dict, case: dict, mode: str) -> tuple[list[str] | None, list[str] | None]:
    """The texts of a mode; those of the deep case are not in the record, but the server's own."""
    if "unpaired" in case:
        return case["unpaired"], case["paired"]
    return (
        None if mode == "paired" else server["unpaired"],
        None if mode == "unpaired" else server["paired"],
    )


def _as_is(texts: list[str] | None, number: int) -> list[Msa]:
    return [replace(parse_a3m(texts[number]), as_is=True)] if texts else []
