"""Windows with the wrong hand become their mirror images at the same place; the rest of the chain stays."""

from __future__ import annotations

import torch
from torch import Tensor

from fastfold.evoformer.structure.mirrored_windows import mirror_windows
from tests.evoformer.structure.test_distogram_descent import helix

LENGTH = 20


def hands(ca: Tensor) -> Tensor:
    """Return the signed volumes of each four CA atoms in a row; positive in right-handed helices."""
    step = ca[1:] - ca[:-1]
    return (torch.linalg.cross(step[:-2], step[1:-1]) * step[2:]).sum(-1)


def run(wrong: list[int], breaks: list[int]) -> tuple[Tensor, Tensor]:
    ca = helix(LENGTH)[:, 4:] + torch.tensor([30.0, -20.0, 5.0])
    is_wrong, bonded = torch.zeros(LENGTH).bool(), torch.ones(LENGTH - 1).bool()
    is_wrong[wrong], bonded[breaks] = True, False
    return ca, mirror_windows(ca, is_wrong, bonded)


def test_a_run_and_two_residues_on_each_side_change_their_hand() -> None:
    ca, moved = run([8, 9, 11], [])
    assert torch.equal(moved[:6], ca[:6])
    assert torch.equal(moved[14:], ca[14:])
    window = slice(6, 14)
    torch.testing.assert_close(torch.cdist(moved[window], moved[window]), torch.cdist(ca[window], ca[window]))
    assert bool((hands(ca) > 0).all())
    assert bool((hands(moved[window]) < 0).all())
    torch.testing.assert_close(moved[window].mean(0), ca[window].mean(0))
    assert float((moved - ca).norm(dim=-1).max()) < 4.0


def test_windows_end_at_breaks_and_ends() -> None:
    ca, moved = run([1, 9, 18], [8, 10])
    changed = (moved - ca).norm(dim=-1) > 1e-3
    assert changed.nonzero()[:, 0].tolist() == [
        0,
        1,
        2,
        3,
        16,
        17,
        18,
        19,
    ]  # two points equal their mirror image
    assert torch.equal(run([], [])[0], run([], [])[1])
