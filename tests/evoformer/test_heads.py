"""Heads against section 1.9 of the supplement, whole and by rows."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from fastfold.evoformer.execution import ExecutionPolicy, LazyRows, PolicyModule
from fastfold.evoformer.heads import (
    DistogramHead,
    ExperimentallyResolvedHead,
    MaskedMsaHead,
    PredictedAlignedErrorHead,
    PredictedLDDTHead,
)
from tests.helpers.definitions import close, linear, norm, random, randomized

N, S, C = 7, 3, 5
DISTOGRAM = SimpleNamespace(first_break=2.0, last_break=22.0, num_bins=6)
ERRORS = SimpleNamespace(max_error_bin=31.0, num_bins=4)


def _distogram() -> DistogramHead:
    return randomized(DistogramHead(DISTOGRAM, C, zero_init=False))


def _aligned_error() -> PredictedAlignedErrorHead:
    return randomized(PredictedAlignedErrorHead(ERRORS, C, zero_init=False))


def test_distances_are_symmetric_and_their_bins_evenly_spaced() -> None:
    """Section 1.9.8: the logits of i and j are the sum of both projections."""
    head, pair = _distogram(), random(N, N, C)
    found = head({"pair": pair})
    logits = linear(head.logits, pair)
    close(found["logits"], logits + logits.transpose(0, 1))
    close(found["bin_edges"], torch.tensor([2.0, 7.0, 12.0, 17.0, 22.0]))


def test_aligned_errors_are_not_symmetric() -> None:
    head, pair = _aligned_error(), random(2, N, N, C)
    found = head({"pair": pair})
    close(found["logits"], linear(head.logits, pair))
    close(found["breaks"], torch.tensor([0.0, 15.5, 31.0]))


@pytest.mark.parametrize("make", [_distogram, _aligned_error])
def test_lazy_logits_are_those_of_the_whole(make: Callable[[], PolicyModule]) -> None:
    """Two rows at a time; with gradients they are a tensor, whatever the policy says."""
    head, pair = make(), random(N, N, C)
    whole = head({"pair": pair})["logits"]
    head.policy = ExecutionPolicy(lazy_logits=True, block_elements=2 * N * whole.shape[-1])
    assert isinstance(head({"pair": pair})["logits"], Tensor)
    with torch.no_grad():
        rows = head({"pair": pair})["logits"]
        assert isinstance(rows, LazyRows)
        assert tuple(rows.shape) == tuple(whole.shape)
        close(rows.whole(), whole)


def test_a_distogram_whose_mirrored_columns_are_elsewhere_is_never_lazy() -> None:
    class Elsewhere(DistogramHead):
        has_columns = False

        def transposed(self, half: Tensor) -> Tensor:
            return torch.zeros_like(half)

    head, pair = randomized(Elsewhere(DISTOGRAM, C, zero_init=False)), random(N, N, C)
    head.policy = ExecutionPolicy(lazy_logits=True)
    with torch.no_grad():
        close(head({"pair": pair})["logits"], linear(head.logits, pair))


def test_masked_residues_and_resolved_atoms_are_one_projection() -> None:
    """Sections 1.9.9 and 1.9.10."""
    masked, resolved = MaskedMsaHead(23, C, zero_init=False), ExperimentallyResolvedHead(C, zero_init=False)
    msa, single = random(S, N, C), random(N, C)
    close(randomized(masked)({"msa": msa})["logits"], linear(masked.logits, msa))
    found = randomized(resolved)({"single": single})["logits"]
    close(found, linear(resolved.logits, single))
    assert found.shape == (N, 37)


def test_lddt_runs_through_two_layers() -> None:
    """Algorithm 29, of the structure module's activations and not of the single representation."""
    head = randomized(PredictedLDDTHead(SimpleNamespace(num_channels=6, num_bins=50), C, zero_init=False))
    x = random(N, C)
    hidden = linear(head.hidden, norm(head.norm, x)).clamp(min=0)
    expected = linear(head.logits, linear(head.hidden_2, hidden).clamp(min=0))
    close(head({"structure_module": x, "single": x + 1})["logits"], expected)


def test_heads_compute_in_their_own_precision() -> None:
    """A trunk in bfloat16 does not make the logits coarse."""
    for head, key, shape in (
        (_distogram(), "pair", (N, N, C)),
        (_aligned_error(), "pair", (N, N, C)),
        (randomized(MaskedMsaHead(23, C, zero_init=False)), "msa", (S, N, C)),
        (randomized(ExperimentallyResolvedHead(C, zero_init=False)), "single", (N, C)),
        (
            randomized(PredictedLDDTHead(SimpleNamespace(num_channels=6, num_bins=5), C, zero_init=False)),
            "structure_module",
            (N, C),
        ),
    ):
        coarse = random(*shape).to(torch.bfloat16)
        found = head.float()({key: coarse})["logits"]
        assert found.dtype == torch.float32
        close(found, head({key: coarse.float()})["logits"])


def test_zero_initialised_heads_start_undecided() -> None:
    heads: list[nn.Module] = [
        MaskedMsaHead(23, C, zero_init=True),
        DistogramHead(DISTOGRAM, C, zero_init=True),
    ]
    x = {"msa": random(S, N, C).float(), "pair": random(N, N, C).float()}
    assert not any(head(x)["logits"].any() for head in heads)
