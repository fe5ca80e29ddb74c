"""``fastfold train`` with a multimer network: complexes in, labels of equal chains exchanged, weights that load."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import fastfold
import fastfold.training.trainer
from fastfold.data.msa.msa import parse_a3m
from fastfold.data.training.entry import ComplexMsas, EntryData
from fastfold.data.training.sample import COPIES, FEATURES, LABELS, SampleSettings, complex_sample
from fastfold.evoformer.losses import alphafold_loss
from fastfold.parallel import ParallelMesh, ParallelPlan
from fastfold.protein import residue_constants as rc
from fastfold.protein.io.pdb_writer import to_pdb
from fastfold.protein.protein import Protein
from fastfold.protein.structure import ChainStructure
from fastfold.training.compose import compose_config, network_config
from fastfold.training.config import DataConfig
from fastfold.training.data import MakeSample, entry_reader, sample_settings
from fastfold.training.run import train
from fastfold.training.sets.source import open_source
from fastfold.training.trainer import Trainer
from fastfold.training.validation import exchange_chains, score_entry
from tests.helpers.compositions import compose_run
from tests.helpers.networks import oracle_config, random_model
from tests.helpers.sample_chains import ca_trace, chain_structure
from tests.training.conftest import ADAM, TINY

TREE = oracle_config("synthetic_multimer")
CA = rc.atom_order["CA"]
_EMBEDDER = "model.overrides.model.embeddings_and_evoformer"
MULTIMER = [
    "+preset=overfit",
    *ADAM,
    "model=model_1_multimer_v3",
    *(option for option in TINY if option.startswith("model.overrides.model")),
    f"{_EMBEDDER}.extra_msa_stack_num_block=1",
    f"{_EMBEDDER}.num_msa=8",
    f"{_EMBEDDER}.num_extra_msa=8",
    f"{_EMBEDDER}.template.enabled=false",
    "data.max_recycles=1",
    "data.valid_split=null",
    "data.crop_size=20",
    "trainer.device=cpu",
    "trainer.validate_recycles=0",
    "trainer.steps=4",
    "trainer.checkpoint_every=2",
    "optim.batch_size=2",
]
Chains = tuple[ChainStructure, ...]
ONE = chain_structure(0, 14)
"""A chain; its copy lies elsewhere and is turned, so that no symmetry hides an exchange."""


def copy_of(chain: ChainStructure, chain_id: str) -> ChainStructure:
    """The same chain 9 Å away, turned by 90 degrees."""
    turn = np.array([[0.0, -1.0, 0.0], [1.0, 0.0, 0.0], [0.0, 0.0, 1.0]], np.float32)
    positions = (chain.positions @ turn.T + np.array([0.0, 0.0, 9.0], np.float32)) * chain.mask[..., None]
    return ChainStructure(
        chain_id,
        chain.sequence,
        positions.astype(np.float32),
        chain.mask,
        chain.residue_index,
        chain.b_factors,
    )


HOMODIMER: Chains = (ONE, copy_of(ONE, "B"))
HETERODIMER: Chains = (ONE, chain_structure(8, 12, chain_id="B", shift=(0.0, 8.0, 0.0)))


def write_complex(path: Path, chains: Chains) -> None:
    """A PDB file of the chains."""
    protein = Protein(
        atom_positions=np.concatenate([chain.positions for chain in chains]),
        atom_mask=np.concatenate([chain.mask for chain in chains]),
        aatype=np.concatenate([rc.sequence_to_aatype(chain.sequence) for chain in chains]),
        residue_index=np.concatenate([chain.residue_index + 1 for chain in chains]),
        chain_index=np.repeat(np.arange(len(chains)), [len(chain) for chain in chains]),
        b_factors=np.concatenate([chain.b_factors for chain in chains]),
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(to_pdb(protein))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two complexes and a single chain to train on, and a homodimer to validate on."""
    data = tmp_path / "data"
    write_complex(data / "train" / "1het.pdb", HETERODIMER)
    write_complex(data / "train" / "2hom.pdb", HOMODIMER)
    write_complex(data / "train" / "3one.pdb", (chain_structure(4, 16),))
    write_complex(data / "valid" / "4hom.pdb", HOMODIMER)
    return data


def here(data: Path, out: Path, *overrides: str) -> bool:
    """Train in this process."""
    return train(compose_run(MULTIMER, f"data.directory={data}", f"trainer.out={out}", *overrides))


def sample(chains: Chains, crop_size: int = 100) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Features of all iterations, the batch of the last one with labels, and what the copies bring."""
    settings = SampleSettings(crop_size=crop_size, cycles=1)
    found = complex_sample(chains, [ComplexMsas()] * len(chains), TREE, settings, np.random.default_rng(0))
    features, labels, copies = (
        {key.removeprefix(p): torch.as_tensor(x) for key, x in found.items() if key.startswith(p)}
        for p in (FEATURES, LABELS, COPIES)
    )
    return features, {key: x[0] for key, x in features.items()} | labels, copies


def test_the_order_of_equal_chains_in_the_file_does_not_matter() -> None:
    """The prediction is near one order. With the other one, the exchange brings the same loss to the bit."""
    features, right, copies = sample(HOMODIMER)
    _, swapped, swapped_copies = sample(HOMODIMER[::-1])
    with torch.no_grad():
        result = random_model(TREE)(features, 0)
    predicted = right["all_atom_positions"][:, CA] + 0.3 * torch.sin(torch.arange(28.0))[:, None]

    def loss(batch: dict[str, torch.Tensor]) -> float:
        return float(alphafold_loss(result, batch, TREE)[0])

    kept = exchange_chains(predicted, right, copies)
    exchanged = exchange_chains(predicted, swapped, swapped_copies)
    assert loss(kept) == loss(right) == loss(exchanged)
    assert loss(swapped) != loss(right)
    assert all(torch.equal(kept[key], right[key]) for key in right)
    # No loss reads the torsions before a chain's first residue, which depend on what stands before it.
    for key in right.keys() - {"torsion_angles_sin_cos", "alt_torsion_angles_sin_cos", "torsion_angles_mask"}:
        assert torch.equal(exchanged[key], right[key]), key


def test_a_crop_gets_the_labels_of_a_chain_outside_of_it() -> None:
    """The crop has residues of one copy only; predicted in the shape of the other, it gets the other's labels."""
    bent = chain_structure(0, 14, chain_id="B", shift=(0.0, 0.0, 9.0))
    bent.positions[6:, :, 1] += 4.0 * np.arange(8, dtype=np.float32)[:, None] * bent.mask[6:]
    settings = SampleSettings(crop_size=8, cycles=1, spatial_crop_probability=0.0)
    for seed in range(40):
        found = complex_sample((ONE, bent), [ComplexMsas()] * 2, TREE, settings, np.random.default_rng(seed))
        asym = found[f"{FEATURES}asym_id"][0]
        place = found[f"{COPIES}residue"]
        if len(set(asym.tolist())) == 1 and place[-1] == 13:
            break
    other = (ONE, bent)[2 - asym[0]]
    batch = {
        key.partition("/")[2]: torch.as_tensor(x[0] if key.startswith(FEATURES) else x)
        for key, x in found.items()
        if not key.startswith(COPIES)
    }
    copies = {
        key.removeprefix(COPIES): torch.as_tensor(x) for key, x in found.items() if key.startswith(COPIES)
    }
    exchanged = exchange_chains(torch.as_tensor(other.positions[place, CA]), batch, copies)
    np.testing.assert_array_equal(exchanged["all_atom_positions"], other.positions[place])
    assert not torch.equal(exchanged["backbone_affine_tensor"], batch["backbone_affine_tensor"])


def test_the_labels_of_the_alignment_are_those_of_the_last_iteration(monkeypatch: pytest.MonkeyPatch) -> None:
    """A multimer network that stops early has seen the rows of an earlier iteration than was asked for."""
    tree = oracle_config("synthetic_multimer")
    tree.model.recycle_early_stop_tolerance = 1e6
    rows = "".join(f">{letter}\n{letter * len(ONE)}\n" for letter in "WHKRDEFY" * 2)
    msas = ComplexMsas((parse_a3m(f">q\n{ONE.sequence}\n{rows}"),))
    settings = SampleSettings(crop_size=100, cycles=4, block_deletion=False)
    found = complex_sample((ONE,), [msas], tree, settings, np.random.default_rng(0))
    batches = []

    def recorded(result: dict[str, Any], batch: dict[str, torch.Tensor], config: Any) -> Any:
        batches.append(batch)
        assert result["num_recycles"] == 1
        return alphafold_loss(result, batch, config)

    monkeypatch.setattr(fastfold.training.trainer, "alphafold_loss", recorded)
    context = SimpleNamespace(device=torch.device("cpu"), mesh=ParallelMesh(ParallelPlan()))
    settings = SimpleNamespace(memory=SimpleNamespace(policy=None))
    gradients = SimpleNamespace(overlapped=nullcontext)
    trainer: Any = SimpleNamespace(
        context=context, model=random_model(tree), config=settings, _gradients=gradients
    )
    Trainer._sample(trainer, found, 3, tree)
    true = found[f"{FEATURES}true_msa"]
    assert not np.array_equal(true[1], true[3])
    np.testing.assert_array_equal(batches[0]["true_msa"], true[1])


def test_no_gradient_flows_through_the_choice() -> None:
    _, swapped, copies = sample(HOMODIMER[::-1])
    predicted = torch.as_tensor(np.concatenate([c.positions[:, CA] for c in HOMODIMER])).requires_grad_()
    assert not any(x.requires_grad for x in exchange_chains(predicted, swapped, copies).values())


@pytest.mark.long
def test_complexes_are_learnt_from_and_the_weights_fold_them(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two different chains, two equal ones and a single one; all numbers finite; a complex is validated on."""
    with_copies = []

    def recorded(ca: torch.Tensor, batch: dict[str, torch.Tensor], copies: dict[str, torch.Tensor]) -> Any:
        with_copies.append(bool(copies))
        return exchange_chains(ca, batch, copies)

    monkeypatch.setattr(fastfold.training.trainer, "exchange_chains", recorded)
    out = tmp_path / "run"
    assert here(folder, out, "data.valid_split=valid", "trainer.validate_every=4")
    assert len(with_copies) == 8
    assert {True, False} == set(with_copies)
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if "loss" in line]
    assert len(losses) == 4
    assert np.isfinite(losses).all()
    apart = [line["chain_center_of_mass"] for line in lines if "loss" in line]
    assert np.isfinite(apart).all()
    assert max(apart) > 0
    assert lines[-1].get("skipped", 0) == 0
    drawn = [json.loads(line) for line in (out / "order_rank_0.jsonl").read_text().splitlines()]
    assert {"1het", "2hom", "3one"} == {line["id"] for line in drawn}
    (validation,) = [json.loads(line) for line in (out / "validation.jsonl").read_text().splitlines()]
    assert [(chain["id"], chain["residues"]) for chain in validation["chains"]] == [("4hom", 28)]
    assert 0.0 < validation["valid_tm_score"] <= 1.0
    model = fastfold.load_model(out / "model_1_multimer_v3.safetensors", device="cpu")
    assert model.multimer
    folded = fastfold.predict("MKTAYIAKQR:MKTAYIAKQR", model=model, num_recycles=0)
    assert folded.plddt.shape == (20,)


@pytest.mark.slow
def test_workers_make_what_the_training_process_makes(folder: Path, tmp_path: Path) -> None:
    """And what a cache holds is what the files hold."""
    alone, helped = tmp_path / "alone", tmp_path / "helped"
    for out, workers in ((alone, 0), (helped, 1)):
        cache = [f"data.cache={tmp_path / 'cache'}"] if workers else []
        assert here(folder, out, f"data.workers={workers}", "trainer.steps=1", *cache)
    assert len(list((tmp_path / "cache").glob("??/*.npz"))) > 1
    read = [
        [json.loads(x)["loss"] for x in (o / "metrics.jsonl").read_text().splitlines()]
        for o in (alone, helped)
    ]
    assert read[0] == read[1]


def test_traces_of_ca_atoms_are_quarantined(folder: Path, tmp_path: Path) -> None:
    write_complex(folder / "train" / "5trace.pdb", tuple(ca_trace(chain) for chain in HETERODIMER))
    out = tmp_path / "run"
    assert here(folder, out, "trainer.steps=3", "optim.batch_size=1", "data.max_recycles=0")
    (line,) = (out / "quarantine.tsv").read_text().splitlines()
    assert line.startswith("5trace\t")
    assert "N, CA and C" in line


def test_validation_takes_equal_chains_in_the_order_that_fits() -> None:
    """The scores do not depend on the order in the file, though its second copy has another shape."""
    bent = copy_of(ONE, "B")
    bent.positions[6:, :, 1] += 4.0 * np.arange(8, dtype=np.float32)[:, None] * bent.mask[6:]
    model = random_model(TREE)
    scores = [
        score_entry(model, "x", EntryData(chains, (ComplexMsas(),) * 2, None), TREE, 0)
        for chains in ((ONE, bent), (bent, ONE))
    ]
    assert scores[0].lddt_ca == pytest.approx(scores[1].lddt_ca)
    assert scores[0].tm_score == pytest.approx(scores[1].tm_score)
    assert scores[0].residues == 28


def test_whole_files_are_drawn_for_multimer_networks_and_chains_for_others(folder: Path) -> None:
    """And ``data.max_length`` then limits all chains together."""
    config = DataConfig(directory=str(folder), valid_split="valid", crop_size=12, unknown_resolution=2.0)
    whole, single = open_source(config, 5, complexes=True), open_source(config, 5)
    assert [entry.id for entry in whole.train.entries] == ["1het", "2hom", "3one"]
    assert [entry.id for entry in single.train.entries] == ["1het_A", "1het_B", "2hom_A", "2hom_B", "3one"]
    assert [len(entry) for entry in whole.valid] == [28]
    short = DataConfig(directory=str(folder), max_length=27)
    assert [entry.id for entry in open_source(short, 5, complexes=True).train.entries] == ["1het", "3one"]
    make = MakeSample(entry_reader(config), TREE, sample_settings(config), seed=0)
    first, again = make(3, whole.train.entries[1]), make(3, whole.train.entries[1])
    assert all(np.array_equal(first[key], again[key]) for key in first)
    assert len(first[f"{LABELS}aatype"]) == 12


def test_the_official_presets_can_be_chosen() -> None:
    for number in range(1, 6):
        config = compose_config([f"model=model_{number}_multimer_v3", "data.directory=x", "trainer.out=y"])
        assert network_config(config.model).model.global_config.multimer_mode


@pytest.mark.parametrize("option", ["data.max_chains=0", "data.spatial_crop_probability=1.5"])
def test_options_out_of_range_are_refused(option: str) -> None:
    with pytest.raises(fastfold.FastFoldError, match=option.partition("=")[0]):
        compose_config([*MULTIMER, "data.directory=x", "trainer.out=y", option])
