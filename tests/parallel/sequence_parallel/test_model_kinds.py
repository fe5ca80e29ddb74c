"""Models of many kinds on parts of a sequence: each trains as on one process, or is refused by its operator's name."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from fastfold.errors import ConfigError
from fastfold.parallel import ParallelMesh, ParallelPlan, SequenceParallel
from tests.helpers.spawn_ranks import launch

WIDTH, HEADS = 8, 2


class _Attention(nn.Module):
    """Attention of two heads that turn by given angles."""

    def __init__(self) -> None:
        super().__init__()
        self.joint, self.output = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, angles: Tensor | None = None, is_causal: bool = True) -> Tensor:
        q, k, v = self.joint(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        if angles is not None:
            q, k = (
                torch.cat((a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()), -1)
                for a, b in (q.chunk(2, -1), k.chunk(2, -1))
            )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=is_causal)
        return self.output(mixed.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class _Net(nn.Module):
    """One operator of a kind, then attention and an output layer."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.change = KINDS[kind][0]
        self.attention, self.output = _Attention(), nn.Linear(WIDTH, 3)
        self.calls, self.shift = 0, 0
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)
        self.dilated = nn.Conv1d(WIDTH, WIDTH, 3, padding=32, dilation=32)
        self.point = nn.Conv1d(WIDTH, WIDTH, 1)
        self.group, self.layer = nn.GroupNorm(2, WIDTH), nn.LayerNorm(WIDTH)
        self.recurrent = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.table, self.places = nn.Parameter(torch.randn(1, 256, WIDTH)), nn.Embedding(256, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)
        self.experts = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(2)])
        self.scan = nn.Linear(WIDTH, 2 * WIDTH)
        self.filter = nn.Parameter(torch.randn(256, WIDTH))
        self.drop = nn.Dropout(0.5)
        self.double()

    def forward(self, x: Tensor, **more: Tensor) -> Tensor:
        self.calls += 1
        x = self.change(self, x, **more)
        x = x + self.attention(x)
        return self.output(x)  # type: ignore[no-any-return]


def _along(layer: Any, x: Tensor) -> Tensor:
    """Apply a layer of [batch, channels, positions]."""
    return layer(x.mT).mT  # type: ignore[no-any-return]


def _in_training(change: Callable[[Any, Tensor], Tensor]) -> Callable[[Any, Tensor], Tensor]:
    return lambda m, x: change(m, x) if m.training else x


def _when(
    test: Callable[[Any, Tensor], bool], change: Callable[[Any, Tensor], Tensor]
) -> Callable[[Any, Tensor], Tensor]:
    return lambda m, x: change(m, x) if test(m, x) else x


def _in_blocks(m: Any, x: Tensor) -> Tensor:
    blocks = x.unflatten(1, (-1, 8))
    return (x.unflatten(1, (-1, 8)) + blocks.cumsum(2)).flatten(1, 2)


def _routed(m: Any, x: Tensor) -> Tensor:
    """Send each position to one expert."""
    flat = x.flatten(0, 1)
    chosen, found = flat[:, 0] > 0, torch.zeros_like(flat)
    for number, expert in enumerate(m.experts):
        rows = (chosen == bool(number)).nonzero()[:, 0]
        found = found.index_add(0, rows, expert(flat[rows][None])[0])
    return x + found.view_as(x)


def _mamba(m: Any, x: Tensor) -> Tensor:
    """A selective scan: ``h[t] = a[t] h[t - 1] + b[t]``, with gates from the input."""
    gate, new = m.scan(x).chunk(2, -1)
    decay = F.logsigmoid(gate).cumsum(1)
    return x + decay.exp() * (new * (-decay).exp()).cumsum(1)


def _mamba_by_steps(m: Any, x: Tensor) -> Tensor:
    gate, new = m.scan(x).chunk(2, -1)
    state, states = torch.zeros_like(x[:, 0]), []
    for t in range(x.shape[1]):
        state = gate[:, t].sigmoid() * state + new[:, t]
        states.append(state)
    return x + torch.stack(states, 1)


def _hyena(m: Any, x: Tensor) -> Tensor:
    """A long convolution by Fourier transforms, of twice the length."""
    length = x.shape[1]
    spectrum = torch.fft.rfft(x, 2 * length, 1) * torch.fft.rfft(m.filter[:length], 2 * length, 0)
    return x + torch.fft.irfft(spectrum, 2 * length, 1)[:, :length]


def _rotary(m: Any, x: Tensor, positions: Tensor | None = None) -> Tensor:
    """Bidirectional attention with rotary positions, as of ESM-2."""
    places = torch.arange(x.shape[1])[None] if positions is None else positions
    angles = places[:, None, :, None] * torch.tensor([1.0, 0.1], dtype=x.dtype)
    return x + m.attention(m.layer(x), angles, is_causal=False)  # type: ignore[no-any-return]


def _random_layer(m: Any, x: Tensor) -> Tensor:
    return m.down(m.up(x).relu()) if random.random() < 0.5 else x  # type: ignore[no-any-return]


PART = "sees only this rank's part of the sequence"
LENGTH = "depends on the length of the sequence or counts positions from 0"
Kind = tuple[Callable[..., Tensor], str | None]

KINDS: dict[str, Kind] = {
    "plain": (lambda m, x: x, None),
    "norm and perceptron": (lambda m, x: x + m.down(F.gelu(m.up(m.layer(x)))), None),
    "flattened batch": (lambda m, x: m.layer(x.reshape(-1, WIDTH)).view(x.shape), None),
    "experts": (_routed, None),
    "checkpointed": (lambda m, x: x + checkpoint(m.up, x, use_reentrant=False).chunk(2, -1)[0], None),
    "convolution of one position": (lambda m, x: x + _along(m.point, x), None),
    "random layer": (_random_layer, None),
    "changed in place": (lambda m, x: x.clone().mul_(2).add_(1), None),
    "blocks that divide the parts": (_in_blocks, None),
    "esm with given positions": (_rotary, None),
    "esm": (_rotary, f"aten.arange in _Net {LENGTH}"),
    "mamba": (_mamba, f"aten.cumsum in _Net {PART}"),
    "mamba by steps": (_mamba_by_steps, "on the whole and .* on parts|sees only this rank's part"),
    "hyena": (_hyena, f"aten._fft_r2c in _Net {PART}"),
    "convolution": (lambda m, x: x + _along(m.conv, x), rf"aten.convolution in conv \(Conv1d\) {PART}"),
    "dilated convolution": (lambda m, x: x + _along(m.dilated, x), f"aten.convolution in dilated .* {PART}"),
    "convolution in training": (
        _in_training(lambda m, x: x + _along(m.conv, x)),
        f"aten.convolution in conv .* {PART}",
    ),
    "mean in training": (_in_training(lambda m, x: x - x.mean(1, keepdim=True)), f"aten.mean in _Net {PART}"),
    "scale by a mean in training": (
        _in_training(lambda m, x: x * (1 + x.abs().mean((1, 2), keepdim=True))),
        f"aten.mean in _Net {PART}",
    ),
    "convolution of long sequences": (
        _when(lambda m, x: x.shape[1] > 20, lambda m, x: x + _along(m.conv, x)),
        f"aten.convolution in conv .* {PART}",
    ),
    "convolution of whole sequences only": (
        _when(lambda m, x: x.shape[1] > 40, lambda m, x: x + _along(m.conv, x)),
        "runs aten.transpose on the whole and .* on parts|runs .* on the whole",
    ),
    "roll": (lambda m, x: x + x.roll(6, 1), f"aten.roll in _Net {PART}"),
    "roll by a part": (lambda m, x: x + x.roll(24, 1), f"aten.roll in _Net {PART}"),
    "lag": (lambda m, x: x + F.pad(x, (0, 0, 20, 0))[:, :-20], f"aten.constant_pad_nd in _Net {PART}"),
    "norm over positions": (lambda m, x: _along(m.group, x), rf"aten.native_group_norm in group .* {PART}"),
    "cumulative sum": (lambda m, x: x + x.cumsum(1) * 1e-2, f"aten.cumsum in _Net {PART}"),
    "sort": (lambda m, x: x.sort(1)[0], f"aten.sort in _Net {PART}"),
    "first token": (lambda m, x: x + x[:, :1], f"aten.slice in _Net {PART}"),
    "flip": (lambda m, x: x + x.flip(1), f"aten.flip in _Net {PART}"),
    "largest": (lambda m, x: x - x.amax(1, keepdim=True), f"aten.amax in _Net {PART}"),
    "softmax over positions": (lambda m, x: x + x.softmax(1), f"aten._softmax in _Net {PART}"),
    "learned positions": (lambda m, x: x + m.table[:, : x.shape[1]], f"aten.slice in _Net {LENGTH}"),
    "counted positions": (
        lambda m, x: x + m.places(torch.arange(x.shape[1])),
        f"aten.arange in _Net {LENGTH}",
    ),
    "scale by the length": (lambda m, x: x * x.shape[1] ** -0.5, f"aten.mul in _Net {LENGTH}"),
    "scale by the length's logarithm": (
        lambda m, x: x * torch.log(torch.tensor(float(x.shape[1]))),
        f"aten.lift_fresh in _Net {LENGTH}",
    ),
    "recurrent": (lambda m, x: m.recurrent(x)[0], r"recurrent \(GRU\)"),
    "attention by hand": (lambda m, x: x + (x @ x.mT).softmax(-1) @ x, f"in _Net {PART}"),
    "dropout": (lambda m, x: m.drop(x), None),
}
"""By kind its operator, and what the refusal says of it, or None where it trains."""

RANDOM = {"dropout"}
"""Kinds whose ranks draw other numbers than one process."""

LENGTH_OF_KINDS = 48


def _inputs(kind: str, length: int = LENGTH_OF_KINDS) -> dict[str, Tensor]:
    x = torch.randn(2, length, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    more = {"positions": torch.arange(length).expand(2, -1)} if kind == "esm with given positions" else {}
    return {"x": x, **more}


def _difference(kind: str) -> float:
    """Largest difference of outputs and gradients to those of one process, in two steps."""
    group = ParallelMesh(ParallelPlan(sp=2)).group("sp")
    plain, net = _Net(kind), _Net(kind)
    sequence = SequenceParallel(net, group, attention=_Attention)
    worst = 0.0
    for length in (LENGTH_OF_KINDS, LENGTH_OF_KINDS - 16):
        inputs = _inputs(kind, length)
        own = {name: sequence.shard(x, 1) for name, x in inputs.items()}
        random.seed(length)
        expected = plain(**inputs)
        random.seed(length)
        found = sequence(**own)
        for result in (expected, found):
            result.square().sum().backward()
        mine = slice(sequence.first, sequence.first + own["x"].shape[1])
        worst = max(worst, float((found - expected[:, mine]).detach().abs().max()))
    for ours, theirs in zip(net.parameters(), plain.parameters(), strict=True):
        if ours.grad is not None:
            dist.all_reduce(ours.grad)
            worst = max(
                worst, float((ours.grad - theirs.grad).abs().max() / theirs.grad.abs().max().clamp(1e-9))
            )
    return worst


def _outcomes(kinds: list[str]) -> dict[str, float | str]:
    found: dict[str, float | str] = {}
    for kind in kinds:
        try:
            found[kind] = _difference(kind)
        except ConfigError as error:
            found[kind] = str(error)
    return found


@pytest.mark.long
def test_a_model_of_any_kind_trains_as_on_one_process_or_is_refused_by_name() -> None:
    """On two ranks, with outputs and gradients; every rank says the same."""
    assert len(KINDS) >= 20
    of_all = launch(_outcomes, 2, list(KINDS), timeout=240)
    for kind, (_, refusal) in KINDS.items():
        for found in (outcomes[kind] for outcomes in of_all):
            print(f"{kind:40} {found}")
            if refusal is None:
                assert isinstance(found, float), (kind, found)
                assert found < 1e-12 or kind in RANDOM, (kind, found)
            else:
                assert isinstance(found, str), (kind, found)
                assert re.search(refusal, found), (kind, found)
                assert "pass compare_first=False" in found, (kind, found)
