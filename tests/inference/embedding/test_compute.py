"""Representations: those of recorded official runs, of every block, and of ``predict``."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import pytest
import torch
from torch import Tensor

import fastfold
from fastfold.data.features.pipeline import sampler_from_merged
from fastfold.errors import ConfigError
from fastfold.evoformer.model import AlphaFold
from fastfold.evoformer.weights.checkpoint import load_model
from fastfold.inference.embedding.config import EmbedConfig
from fastfold.inference.folding.network import NetworkPasses, represent
from fastfold.protein.metrics.contacts import contact_probabilities
from tests.helpers.command_line import small_model
from tests.helpers.networks import folder, oracle_arrays, oracle_config

Source = Callable[[int, int], Mapping[str, Tensor]]
ROWS = ["MKTAYIAKQR", "MKTAYLAKQR", "MRTAYIAKQK", "MKTWYIAKQR"]


def recorded(name: str) -> tuple[AlphaFold, Source, NetworkPasses, dict[str, np.ndarray]]:
    config, arrays = oracle_config(name), oracle_arrays(name, "features")
    passes = NetworkPasses(config.model.num_recycle, distogram=True)
    if "multimer" in name:
        sampler = sampler_from_merged(arrays, config, deterministic=True)
        tolerance = config.model.get("recycle_early_stop_tolerance", 0.0)
        passes = NetworkPasses(config.model.num_recycle, recycle_tolerance=tolerance, distogram=True)

    def features(cycle: int, member: int) -> Mapping[str, Tensor]:
        one = sampler.sample(cycle) if "multimer" in name else {k: v[cycle] for k, v in arrays.items()}
        return {key: torch.as_tensor(value) for key, value in one.items()}

    model = load_model(folder(name) / "params.npz", config=config)
    return model, features, passes, oracle_arrays(name, "outputs")


@pytest.mark.long
@pytest.mark.parametrize("name", ["synthetic_monomer", "synthetic_multimer"])
def test_representations_are_those_of_the_official_run(name: str):
    model, features, passes, outputs = recorded(name)
    found, _ = represent(model, features, passes, stop_after_block=len(model.evoformer.blocks))
    whole, _ = represent(model, features, passes, stop_after_block=None)
    assert "structure_module" not in found
    for key in ("single", "pair", "msa_first_row", "structure_module"):
        theirs = outputs[f"representations/{key}"]
        for ours in (found, whole) if key in found else (whole,):
            error = np.linalg.norm(ours[key].numpy() - theirs) / np.linalg.norm(theirs)
            assert error < 1e-4, key
    logits = outputs["distogram/logits"]
    theirs = np.exp(logits - logits.max(-1, keepdims=True))
    theirs /= theirs.sum(-1, keepdims=True)
    assert np.abs(found["distogram"].float().numpy() - theirs).max() < 2e-3


def test_a_pass_that_ends_after_a_block_has_the_output_of_the_block():
    model, features, passes, _ = recorded("synthetic_monomer")
    number = len(model.evoformer.blocks)
    assert number > 1
    kept: list[tuple[Tensor, Tensor]] = []
    handle = model.evoformer.blocks[0].register_forward_hook(
        lambda module, given, result: kept.append((result[0][0].clone(), result[1].clone()))
    )
    represent(model, features, passes, stop_after_block=number)
    handle.remove()
    found, _ = represent(model, features, passes, stop_after_block=1)
    assert len(kept) == passes.num_recycles + 1
    row, pair = kept[-1]
    assert torch.equal(found["msa_first_row"], row)
    assert torch.equal(found["pair"], pair)
    assert len(model.evoformer.blocks) == number


@pytest.fixture(scope="module")
def model() -> fastfold.AlphaFold:
    return small_model()


def test_python_has_the_representations_of_predict(model: fastfold.AlphaFold):
    names = ("single", "pair", "structure_module", "distogram", "contacts")
    settings = {"msa": ROWS, "num_recycles": 2, "seed": 3}
    wanted = fastfold.predict(ROWS[0], model, save_representations=True, save_distogram=True, **settings)
    found = fastfold.embed(ROWS[0], model, arrays=names, **settings)
    for name in ("single", "pair", "structure_module"):
        assert np.array_equal(found.arrays[name], wanted.representations[name]), name
    assert np.array_equal(found.arrays["distogram"], wanted.distogram["probabilities"])
    logits = np.log(np.maximum(found.arrays["distogram"], 1e-12))
    contacts = contact_probabilities(logits, wanted.distogram["bin_edges"])
    assert np.abs(found.arrays["contacts"] - contacts).max() < 2e-3
    alone = fastfold.embed(ROWS[0], model, **settings)
    assert list(alone.arrays) == ["single", "pair"]
    assert np.abs(alone.arrays["single"] - wanted.representations["single"]).max() < 1e-6
    mean = fastfold.embed(ROWS[0], model, mean=True, **settings).arrays
    assert np.allclose(mean["single"], alone.arrays["single"].mean(0), atol=1e-6)
    assert np.allclose(mean["pair"], alone.arrays["pair"].mean((0, 1)), atol=1e-6)


def test_chains_are_in_the_order_of_the_input():
    multimer = small_model("model_1_multimer_v3")
    aba = "MKTAYIAKQR:GSHMAWLPE:MKTAYIAKQR"
    wanted = fastfold.predict(aba, multimer, num_recycles=0, save_representations=True)
    found = fastfold.embed(aba, multimer, num_recycles=0)
    for name in ("single", "pair"):
        assert np.abs(found.arrays[name] - wanted.representations[name]).max() < 1e-5


def test_a_mistake_is_named(model: fastfold.AlphaFold):
    with pytest.raises(ConfigError, match="layer 99: model_1_ptm has"):
        fastfold.embed(ROWS[0], model, layer=99)
    with pytest.raises(ConfigError, match="embed is not a setting here"):
        fastfold.predict(ROWS[0], model, embed=EmbedConfig())
