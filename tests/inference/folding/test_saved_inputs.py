"""Block inputs on the host: only as many as there is room for, and each back before its use."""

from __future__ import annotations

import torch
from torch.utils.checkpoint import checkpoint

from fastfold.inference.folding.gradients import SavedInputs

SIZE = 4096


def gradient(saved: SavedInputs | None, blocks: int = 5) -> torch.Tensor:
    leaf = torch.linspace(0.1, 1, SIZE // 8, dtype=torch.float64).requires_grad_()

    def run() -> torch.Tensor:
        x = leaf * 1.0
        for _ in range(blocks):
            x = checkpoint(lambda y: (y.sin() * 1.5).exp(), x, use_reentrant=False)
        return x.sum()

    if saved is None:
        return torch.autograd.grad(run(), leaf)[0]
    with saved.hooks():
        total = run()
    return torch.autograd.grad(total, leaf)[0]


def test_as_many_leave_as_fit_and_gradients_stay_equal() -> None:
    wanted = gradient(None)
    for room, count in ((0, 0), (3 * SIZE, 3), (3 * SIZE + 1, 3), (100 * SIZE, 5)):
        saved = SavedInputs(room, SIZE, torch.device("cpu"))
        assert torch.equal(gradient(saved), wanted)
        assert saved.saved.sent == saved.peak == count * SIZE
        # Each but the last was on its way before its use.
        assert saved.saved.waited == min(1, count) * SIZE


def test_small_tensors_stay() -> None:
    saved = SavedInputs(100 * SIZE, SIZE + 1, torch.device("cpu"))
    gradient(saved)
    assert saved.saved.sent == 0
