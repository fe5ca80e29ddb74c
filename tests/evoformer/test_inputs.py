"""Features of a designed sequence: they equal the pipeline's, and gradients with respect to them are right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fastfold.data.features.pipeline import featurize
from fastfold.data.targets import target_from_sequence
from fastfold.errors import InputError
from fastfold.evoformer.confidence import plddt
from fastfold.evoformer.config import model_config
from fastfold.evoformer.inputs import (
    Relaxation,
    decode_sequence,
    encode_sequence,
    relax_sequence,
    sequence_features,
)
from fastfold.evoformer.model import AlphaFold
from tests.helpers.networks import oracle_features, random_model, shallow_config

SEQUENCE = "MKTAYIAKQRQISFVKWGGP"


def test_the_relaxation_goes_from_parameters_to_residues() -> None:
    x = torch.randn(6, 20, generator=torch.manual_seed(0))
    plain = relax_sequence(x, Relaxation())
    torch.testing.assert_close(plain.pseudo, x)
    torch.testing.assert_close(plain.logits, 2 * x)
    cold = relax_sequence(x, Relaxation(soft=1, temperature=0.01)).pseudo
    hard = relax_sequence(x, Relaxation(soft=1, hard=1)).pseudo
    assert hard.argmax(-1).tolist() == x.argmax(-1).tolist()
    torch.testing.assert_close(hard, torch.eye(20)[x.argmax(-1)])
    torch.testing.assert_close(cold, hard, atol=1e-2, rtol=0)
    half = relax_sequence(x, Relaxation(soft=0.5)).pseudo
    torch.testing.assert_close(half, 0.5 * x + 0.5 * (2 * x).softmax(-1))


def test_the_gradient_of_residues_is_that_of_the_softmax() -> None:
    x = torch.randn(4, 20, generator=torch.manual_seed(0))
    weight = torch.randn(4, 20)
    found = []
    for relaxation in (Relaxation(soft=1, hard=1), Relaxation(soft=1)):
        leaf = x.clone().requires_grad_()
        (relax_sequence(leaf, relaxation).pseudo * weight).sum().backward()
        found.append(leaf.grad)
    torch.testing.assert_close(*found)


def test_a_bias_forbids() -> None:
    x, bias = torch.zeros(5, 20), torch.zeros(20)
    bias[1:] = -1e6
    assert decode_sequence(relax_sequence(x, Relaxation(), bias).hard) == "AAAAA"


def test_letters_are_encoded_and_decoded() -> None:
    assert decode_sequence(encode_sequence(SEQUENCE)) == SEQUENCE
    assert encode_sequence("AX").sum(-1).tolist() == [1.0, 0.0]


@pytest.mark.parametrize("wrong", [{"soft": 1.1}, {"hard": -0.1}, {"temperature": 0.0}, {"alpha": -1.0}])
def test_values_outside_their_range_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(InputError, match=next(iter(wrong))):
        Relaxation(**wrong)


def test_parameters_of_another_shape_are_refused() -> None:
    with pytest.raises(InputError, match=r"parameters \[N, 20\], found \[3, 21\]"):
        relax_sequence(torch.zeros(3, 21), Relaxation())


@pytest.mark.parametrize("name", ["model_3_ptm", "model_1_multimer_v3"])
def test_features_are_the_pipelines(name: str) -> None:
    """Of a sequence alone, but for the positions that the pipeline masks at random."""
    config = model_config(name)
    target = target_from_sequence(SEQUENCE)
    sampled = featurize(target.chains, [([], [])], config, seed=0).sample(0, 0)
    found = sequence_features(encode_sequence(SEQUENCE), multimer="multimer" in name)
    np.testing.assert_array_equal(found["target_feat"].numpy(), sampled["target_feat"])
    np.testing.assert_array_equal(found["aatype"].numpy(), sampled["aatype"])
    row = sampled["msa_feat"][0]
    seen = row[:, :22].argmax(-1) == found["aatype"].numpy()
    assert seen.mean() > 0.5
    np.testing.assert_allclose(found["msa_feat"][0].numpy()[seen], row[seen], atol=1e-6)


def _slopes(
    model: AlphaFold, features: dict[str, Tensor], key: str, score: Callable[..., Any]
) -> tuple[float, float, float]:
    """Slope along a direction: of central differences, and of gradients without and with the stop of rotations."""
    start = features[key]
    direction = torch.randn(start.shape, dtype=start.dtype, generator=torch.manual_seed(1))
    slopes = []
    for stop in (False, True):
        model.structure_module.stop_rotation_gradient = stop
        leaf = start.clone().requires_grad_()
        score(model(features | {key: leaf}, 1)).backward()
        assert leaf.grad is not None
        slopes.append(float((leaf.grad[-1] * direction[-1]).sum()))
    # Only the last pass records gradients, so only its features move.
    direction[:-1] = 0
    step = 1e-7  # with larger ones, units of a ReLU switch

    def value(step: float) -> float:
        with torch.no_grad():
            return float(score(model(features | {key: start + step * direction}, 1)))

    return (value(step) - value(-step)) / (2 * step), slopes[0], slopes[1]


SCORES: dict[str, Callable[[dict[str, Any]], Tensor]] = {
    "plddt": lambda r: plddt_in_double(r["predicted_lddt"]["logits"]),
    "coordinates": lambda r: r["structure_module"]["final_atom_positions"][3:20].square().mean(),
    "distogram": lambda r: r["distogram"]["logits"].softmax(-1).square().sum(),
    "aligned error": lambda r: r["predicted_aligned_error"]["logits"].softmax(-1)[..., :5].sum(),
}


def plddt_in_double(logits: Tensor) -> Tensor:
    """:func:`plddt` without its conversion to float32."""
    centers = (torch.arange(logits.shape[-1], dtype=logits.dtype) + 0.5) / logits.shape[-1]
    score = (logits.softmax(-1) * centers).sum(-1)
    torch.testing.assert_close(100 * score.float(), plddt(logits), atol=1e-3, rtol=1e-5)
    return score.mean()


_FAST = (
    ("plddt", "msa_feat"),
    ("coordinates", "target_feat"),
    ("aligned error", "template_all_atom_positions"),
)


@pytest.mark.long
@pytest.mark.parametrize(
    ("score", "key"),
    [
        pytest.param(score, key, marks=() if (score, key) in _FAST else pytest.mark.slow)
        for score in SCORES
        for key in ("target_feat", "msa_feat", "template_all_atom_positions")
    ],
)
def test_gradients_are_finite_differences_without_the_stop(score: str, key: str) -> None:
    model = random_model(shallow_config(), dtype=torch.float64)
    features = oracle_features(dtype=torch.float64)
    stops = score in ("plddt", "coordinates")
    wanted, found, stopped = _slopes(model, features, key, SCORES[score])
    assert abs(found - wanted) < 1e-5 * abs(wanted)
    assert (abs(stopped - wanted) > 1e-3 * abs(wanted)) == stops


@pytest.mark.parametrize("score", ["plddt", "distogram"])
def test_initial_positions_have_no_gradient(score: str) -> None:
    """The network sees the bins of their distances, which small moves do not change, and large ones do."""
    model = random_model(shallow_config(), dtype=torch.float64)
    model.structure_module.stop_rotation_gradient = False
    features = {key: value[:1] for key, value in oracle_features(dtype=torch.float64).items()}
    residues = features["aatype"].shape[-1]
    places = 4.0 * torch.randn(1, residues, 37, 3, dtype=torch.float64, generator=torch.manual_seed(0))

    def value(moved: Tensor) -> Tensor:
        return SCORES[score](model(features | {"initial_positions": moved}, 0))

    leaf = places.clone().requires_grad_()
    features["target_feat"].requires_grad_()
    (found,) = torch.autograd.grad(value(leaf), leaf, allow_unused=True)
    assert found is None or not found.any()
    with torch.no_grad():
        same, small, large = (float(value(places * scale)) for scale in (1.0, 1.0 + 1e-9, 2.0))
    assert small == same != large
