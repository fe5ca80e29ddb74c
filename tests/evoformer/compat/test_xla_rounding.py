"""The rounding residues on the diagonal of multimer template features."""

from __future__ import annotations

import numpy as np
import torch

from fastfold.evoformer.compat.xla_rounding import _length, own_frame_direction


def _positions(seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(200, 37, 3, generator=generator) * 10


def test_residues_are_whole_units_in_the_last_place() -> None:
    """What is longer than 1e-6 Å is normalised; what is shorter is a few units of float32 spacing over 1e-6."""
    found = own_frame_direction(_positions())
    lengths = found.norm(dim=-1)
    assert found.dtype == torch.float32
    assert (lengths <= 1 + 1e-6).all()
    single = (found != 0).sum(-1) == 1
    short = single & (lengths > 0) & (lengths < 0.99)
    assert short.any()
    units = lengths[short].double() * 1e-6 * 2.0**28
    torch.testing.assert_close(units, units.round(), atol=1e-3, rtol=0)


def test_most_residues_round_alike_but_not_all() -> None:
    zero = (own_frame_direction(_positions()) == 0).all(-1)
    assert 0 < zero.sum() < 200


def test_exact_coordinates_leave_nothing() -> None:
    """A frame along the axes with small whole coordinates needs no rounding."""
    positions = torch.zeros(3, 37, 3)
    positions[:, 1] = torch.tensor([[1.0, 2.0, 3.0], [0.0, 0.0, 0.0], [-4.0, 8.0, 0.5]])
    positions[:, 2] = positions[:, 1] + torch.tensor([1.0, 0.0, 0.0])
    positions[:, 0] = positions[:, 1] + torch.tensor([0.0, 1.0, 0.0])
    assert not own_frame_direction(positions).any()


def test_double_precision_input_gives_the_same() -> None:
    positions = _positions()
    assert torch.equal(own_frame_direction(positions.double()), own_frame_direction(positions))


def test_groups_of_eight_do_not_see_what_follows_them() -> None:
    """Only the ``N % 8`` last residues are summed in another order, and there it shows."""
    positions = torch.randn(50, 32, 37, 3, generator=torch.Generator().manual_seed(0)) * 10
    whole, cut = own_frame_direction(positions), own_frame_direction(positions[:, :31])
    assert torch.equal(cut[:, :24], whole[:, :24])
    assert not torch.equal(cut[:, 24:28], whole[:, 24:28])


def test_short_chains_are_summed_in_one_order() -> None:
    positions = torch.randn(50, 16, 37, 3, generator=torch.Generator().manual_seed(0)) * 10
    assert torch.equal(own_frame_direction(positions[:, :15]), own_frame_direction(positions)[:, :15])


def test_last_residues_are_divided_by_the_length_of_two_components() -> None:
    """The seven last of 31 residues leave the third component out of their length."""
    positions = torch.randn(50, 31, 37, 3, generator=torch.Generator().manual_seed(0)) * 10
    last = own_frame_direction(positions)[:, -7:]
    assert (last[..., :2].norm(dim=-1) <= 1 + 1e-6).all()
    assert (last.norm(dim=-1) > 1.01).any()


def test_lengths_are_correctly_rounded_roots() -> None:
    """NumPy takes the processor's root; PyTorch's own in float32 misses it for one number in some hundred."""
    squares = torch.rand(10_000, generator=torch.Generator().manual_seed(1)) * 4
    assert np.array_equal(_length(squares).numpy(), np.sqrt(squares.numpy()))
