"""Samples of complexes: chains in order, crops that keep labels beside features, copies to exchange."""

from __future__ import annotations

import gzip
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fastfold.data.msa.msa import Msa, parse_a3m
from fastfold.data.training.dataset import open_dataset
from fastfold.data.training.entry import (
    DISTILLATION,
    ComplexMsas,
    Entry,
    group_complexes,
    read_entry,
)
from fastfold.data.training.sample import (
    COPIES,
    FEATURES,
    LABELS,
    SampleSettings,
    complex_sample,
    neighboring_chains,
)
from fastfold.errors import InputError
from fastfold.protein import residue_constants as rc
from fastfold.protein.structure import ChainStructure
from fastfold.training.data import EntryReader
from tests.helpers.networks import oracle_config
from tests.helpers.sample_chains import alignment_rows, ca_trace, chain_structure
from tests.helpers.small_sets import a3m, pdb_text, write

TREE = oracle_config("synthetic_multimer")
SETTINGS = SampleSettings(crop_size=16, cycles=2)
CA = rc.atom_order["CA"]
Sample = dict[str, np.ndarray]

FIRST = chain_structure(0, 14, chain_id="A", first=3)
PARTNER = chain_structure(6, 10, chain_id="B", shift=(0.0, 8.0, 0.0))
COPY = chain_structure(0, 14, chain_id="C", shift=(0.0, 0.0, 9.0), first=103)
TRIMER = (FIRST, PARTNER, COPY)  # two copies of a chain, and another one between them in the file
IN_ORDER = (FIRST, COPY, PARTNER)


def sample(
    chains: Sequence[ChainStructure] = TRIMER,
    settings: SampleSettings = SETTINGS,
    seed: int = 0,
    alignments: Sequence[ComplexMsas] | None = None,
) -> Sample:
    alignments = alignments or [ComplexMsas()] * len(chains)
    return complex_sample(chains, alignments, TREE, settings, np.random.default_rng(seed))


def msa(chain: ChainStructure, *rows: tuple[str, str]) -> Msa:
    """An alignment with further rows, each of a species, that are one letter repeated."""
    text = "".join(
        f">tr|A0A00{i}|A0A00{i}_{species}\n{letter * len(chain)}\n"
        for i, (species, letter) in enumerate(rows)
    )
    return parse_a3m(f">q\n{chain.sequence}\n{text}")


@pytest.mark.parametrize("spatial", [0.0, 1.0])
@pytest.mark.parametrize("seed", range(6))
def test_labels_are_those_of_the_residues_in_the_crop(spatial: float, seed: int) -> None:
    """By chain and residue number, each label is the source chain's; chains are grouped as the features are."""
    found = sample(settings=replace(SETTINGS, spatial_crop_probability=spatial), seed=seed)
    asym, index = found[f"{FEATURES}asym_id"][0], found[f"{FEATURES}residue_index"][0]
    assert len(asym) == 16
    np.testing.assert_array_equal(found[f"{FEATURES}aatype"][1], found[f"{LABELS}aatype"])
    for row, (chain_number, number) in enumerate(zip(asym, index, strict=True)):
        chain = IN_ORDER[chain_number - 1]
        place = int(np.flatnonzero(chain.residue_index == number)[0])
        assert rc.restypes[found[f"{LABELS}aatype"][row]] == chain.sequence[place]
        np.testing.assert_array_equal(found[f"{LABELS}all_atom_positions"][row], chain.positions[place])
        np.testing.assert_array_equal(found[f"{LABELS}all_atom_mask"][row], chain.mask[place])
        np.testing.assert_array_equal(
            found[f"{LABELS}backbone_affine_tensor"][row, 4:], chain.positions[place, CA]
        )


def test_ids_of_chains_and_copies() -> None:
    found = sample(settings=replace(SETTINGS, crop_size=100))
    ids = np.stack([found[f"{FEATURES}{name}"][0] for name in ("asym_id", "entity_id", "sym_id")], axis=1)
    chains, residues = np.unique(ids, axis=0, return_counts=True)
    assert chains.tolist() == [[1, 1, 1], [2, 1, 2], [3, 2, 1]]
    assert residues.tolist() == [14, 14, 10]


@pytest.mark.parametrize("seed", range(4))
def test_copies_bring_all_that_labels_can_be_exchanged_with(seed: int) -> None:
    """Each cropped residue finds its atoms in every copy of its chain, numbered differently there or not."""
    found = sample(seed=seed, settings=replace(SETTINGS, crop_size=8))
    asym, entity = (found[f"{FEATURES}{name}"][0] for name in ("asym_id", "entity_id"))
    copies = {key.removeprefix(COPIES): x for key, x in found.items() if key.startswith(COPIES)}
    if 1 not in entity:
        assert not copies
        return
    for row, (chain_number, place) in enumerate(zip(asym, copies["residue"], strict=True)):
        chain = IN_ORDER[chain_number - 1]
        np.testing.assert_array_equal(found[f"{LABELS}all_atom_positions"][row], chain.positions[place])
        here = (copies["entity_id"] == entity[row]) & (copies["residue_index"] == place)
        there = {
            int(a): x
            for a, x in zip(copies["asym_id"][here], copies["all_atom_positions"][here], strict=True)
        }
        assert sorted(there) == ([1, 2] if entity[row] == 1 else [3])
        for number, positions in there.items():
            np.testing.assert_array_equal(positions, IN_ORDER[number - 1].positions[place])
    assert len(copies["asym_id"]) <= 2 * 8


def test_different_chains_have_nothing_to_exchange() -> None:
    assert not any(key.startswith(COPIES) for key in sample((FIRST, PARTNER)))
    assert not any(key.startswith(COPIES) for key in sample((FIRST,)))


def test_a_spatial_crop_is_around_an_interface() -> None:
    """Of two chains that touch at their ends and a third far away, the third has no part in it."""
    far = chain_structure(2, 14, chain_id="D", shift=(500.0, 0.0, 0.0))
    near = replace(SETTINGS, crop_size=12, spatial_crop_probability=1.0)
    for seed in range(5):
        asym = sample((FIRST, PARTNER, far), near, seed)[f"{FEATURES}asym_id"][0]
        assert set(asym.tolist()) == {1, 2}
    contiguous = replace(near, spatial_crop_probability=0.0)
    seen = [sample((FIRST, PARTNER, far), contiguous, seed)[f"{FEATURES}asym_id"][0] for seed in range(8)]
    assert any(3 in asym for asym in seen)


def test_the_generator_alone_decides() -> None:
    alignments = [ComplexMsas((msa(c, ("HUMAN", "W"), ("MOUSE", "H"), ("YEAST", "R")),)) for c in TRIMER]
    first, again, other = (sample(seed=seed, alignments=alignments) for seed in (3, 3, 5))
    assert first.keys() == again.keys()
    assert all(np.array_equal(first[key], again[key]) for key in first)
    index = f"{FEATURES}residue_index"
    assert not np.array_equal(first[index], other[index])


def test_rows_are_paired_by_species_and_left_out_with_the_alignment() -> None:
    """The rows of one species stand in one line over both chains; alone, there is the query only."""
    chains = (FIRST, PARTNER)
    paired = [msa(FIRST, ("HUMAN", "W"), ("MOUSE", "H")), msa(PARTNER, ("MOUSE", "K"), ("YEAST", "R"))]
    alignments = [ComplexMsas((), (one,)) for one in paired]
    whole = replace(SETTINGS, crop_size=100, cycles=1, block_deletion=False)
    found = sample(chains, whole, alignments=alignments)
    rows = alignment_rows(found)
    both = rc.restype_order["H"], rc.restype_order["K"]
    assert any((row[:14] == both[0]).all() and (row[14:] == both[1]).all() for row in rows)
    alone = sample(chains, replace(whole, single_sequence_probability=1.0), alignments=alignments)
    assert len(alignment_rows(alone)) == 1


def test_rows_of_chains_outside_of_the_crop_are_left_out() -> None:
    """They would be rows of gaps in the place of others."""
    far = chain_structure(2, 14, chain_id="D", shift=(500.0, 0.0, 0.0))
    rows = [(f"S{i}", letter) for i, letter in enumerate("WHKR")]
    alignments = [ComplexMsas(), ComplexMsas(), ComplexMsas((msa(far, *rows),))]
    settings = replace(SETTINGS, crop_size=12, spatial_crop_probability=1.0, block_deletion=False)
    found = sample((FIRST, PARTNER, far), settings, alignments=alignments)
    assert len(alignment_rows(found)) == 1
    whole = sample((FIRST, PARTNER, far), replace(settings, crop_size=100), alignments=alignments)
    assert len(alignment_rows(whole)) == 5


def test_large_assemblies_are_cut_to_neighbouring_chains() -> None:
    """Of chains in a row, those next to each other stay."""
    row = [chain_structure(0, 8, chain_id=str(i), shift=(40.0 * i, 0.0, 0.0)) for i in range(7)]
    middles = set()
    for seed in range(10):
        chosen = neighboring_chains(row, 3, np.random.default_rng(seed))
        assert len(chosen) == 3
        assert chosen[2] - chosen[0] == 2
        middles.add(chosen[1])
    assert len(middles) > 2
    assert neighboring_chains(row, 7, np.random.default_rng(0)) == tuple(range(7))
    settings = replace(SETTINGS, max_chains=3, crop_size=100)
    assert sample(row, settings)[f"{FEATURES}asym_id"].max() == 3


def test_a_trace_of_ca_atoms_is_refused() -> None:
    with pytest.raises(InputError, match="chain 'B' has no residue with all of N, CA and C"):
        sample((FIRST, ca_trace(PARTNER), COPY))


# ---- entries -------------------------------------------------------------------------------------------

CHAINS = {"A": "MKVLAAGIT", "B": "WWHHKKPPMM", "C": "MKVLAAGIT"}


def test_a_file_is_an_entry_and_copies_share_alignments(tmp_path: Path) -> None:
    """Named as the file; found as ``<name>_<chain>``; one chain without any is not an obstacle."""
    write(tmp_path / "1abc.pdb.gz", pdb_text(CHAINS))
    write(tmp_path / "2def.pdb", pdb_text({"A": "MKVLAAGIT"}))
    write(tmp_path / "msas" / "1abc_C.a3m", a3m(CHAINS["C"], "MKVLaaAAG--"))
    write(tmp_path / "msas" / "2def.a3m", a3m(CHAINS["A"]))
    first, second = group_complexes(open_dataset(tmp_path).entries)
    assert (first.id, len(first), second.id, len(second)) == ("1abc", 28, "2def", 9)
    data = read_entry(first)
    assert [chain.chain_id for chain in data.chains] == ["A", "B", "C"]
    rows = [[len(found.sequences) for found in msas.unpaired] for msas in data.msas]
    assert rows == [[2], [], [2]]
    assert len(read_entry(second).msas[0].unpaired) == 1


def test_openfold_folders_with_alignments_to_pair(tmp_path: Path) -> None:
    """All chains of the file are there, though one has no alignments and so no entry of its own."""
    write(tmp_path / "mmcifs" / "1abc.pdb", pdb_text(CHAINS))
    for chain in "AB":
        write(tmp_path / "alignments" / f"1abc_{chain}" / "uniref90_hits.a3m", a3m(CHAINS[chain]))
        write(tmp_path / "alignments" / f"1abc_{chain}" / "uniprot_hits.a3m", a3m(CHAINS[chain]))
    (entry,) = group_complexes(open_dataset(tmp_path, layout="openfold").entries)
    data = read_entry(entry)
    assert [(len(m.unpaired), len(m.paired)) for m in data.msas] == [(1, 1)] * 3


def test_weights_of_complexes() -> None:
    """A cluster's complexes together weigh as much as one chain; copies within a file count once."""

    def entry(name: str, sequence: str, size: int, weight: float = 1.0) -> Entry:
        file = Path(f"{name.partition('_')[0]}.pdb")
        return Entry(name, file, sequence, cluster_size=size, weight=weight)

    entries = [
        entry("dimer_A", "MKV", 4),
        entry("dimer_B", "MKV", 4),
        entry("ring_A", "GGT", 1),
        entry("ring_B", "GGT", 1),
        entry("pair_A", "MKL", 4, 3.0),
        entry("pair_B", "WWH", 2, 3.0),
    ]
    found = {complex_.id: complex_.weight for complex_ in group_complexes(entries)}
    assert found == {"dimer": 0.5, "pair": pytest.approx(3.0 * (1 / 4 + 1 / 2)), "ring": 1.0}


def test_the_alignment_of_another_chain_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "1abc.pdb", pdb_text(CHAINS))
    write(tmp_path / "msas" / "1abc_B.a3m", a3m("G" * 10))
    (entry,) = group_complexes(open_dataset(tmp_path).entries)
    with pytest.raises(InputError, match="1abc_B"):
        read_entry(entry)


def test_residues_that_a_prediction_was_not_sure_of_are_masked(tmp_path: Path) -> None:
    text = pdb_text({"A": "MKVLA", "B": "WWHHK"}, b_factors={2: 30.0})
    (tmp_path / "af.pdb.gz").write_bytes(gzip.compress(text.encode()))
    (entry,) = group_complexes(open_dataset(tmp_path).entries)
    masked = EntryReader(None, 50.0)(replace(entry, source=DISTILLATION))
    for chain in masked.chains:
        assert chain.mask[:, CA].tolist() == [1, 0, 1, 1, 1]
