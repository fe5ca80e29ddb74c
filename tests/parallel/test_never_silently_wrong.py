"""What no rank could notice by itself is right, or refused before anything is sent."""

from __future__ import annotations

import copy
import os
import socket
from collections.abc import Callable, Mapping

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from fastfold.errors import ConfigError, LostProcessError
from fastfold.parallel import Parallel, ParallelMesh, ParallelPlan, init_distributed, parallelize
from fastfold.parallel.pipeline import Pipeline
from fastfold.parallel.sequence_parallel.module import METHODS, SequenceParallel
from fastfold.parallel.tensor_parallel.layers import ParallelMLP
from fastfold.parallel.tensor_parallel.randomness import own_randomness
from tests.helpers.spawn_ranks import launch


class _Network(nn.Module):
    """A layer, a scale of one dimension, and a parameter that nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(3, 5, dtype=torch.float64)
        self.scale = nn.Parameter(torch.randn(5, dtype=torch.float64))
        self.never = nn.Parameter(torch.ones(1, 2, dtype=torch.float64))  # a gradient of zeros would decay it

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.scale


def _by_dimension(named: Mapping[str, nn.Parameter]) -> torch.optim.Optimizer:
    """The usual groups: matrices decay, all else does not."""
    decayed = [p for p in named.values() if p.dim() > 1]
    rest = [p for p in named.values() if p.dim() <= 1]
    return torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.5}, {"params": rest, "weight_decay": 0.0}], lr=0.1
    )


def _adam(named: Mapping[str, nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(named.values(), lr=0.1)


ROWS = torch.randn(4, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def _backward(parallel: Parallel) -> None:
    (parallel.module(ROWS[parallel.rows(len(ROWS))]).square().sum()).backward()


def _plain_steps() -> tuple[dict[str, Tensor], float]:
    """Parameters after two clipped steps on one process, and the gradient's norm of the last."""
    model = _Network()
    optimizer = _by_dimension(dict(model.named_parameters()))
    norm = 0.0
    for _ in range(2):
        optimizer.zero_grad()
        model(ROWS).square().sum().backward()
        norm = float(nn.utils.clip_grad_norm_(model.parameters(), 0.5))
        optimizer.step()
    return model.state_dict(), norm


def _data_parallel() -> None:
    expected, norm = _plain_steps()
    for zero in range(4):
        parallel = parallelize(_Network(), {"dp": 2, "zero": zero})
        optimizer = parallel.optimizer(_by_dimension)
        for _ in range(2):
            optimizer.zero_grad()
            _backward(parallel)
            parallel.reduce_gradients()
            found = parallel.clip_grad_norm_(0.5)
            optimizer.step()
        assert abs(found - norm) < 1e-12
        for name, x in parallel.state_dict().items():
            assert (x - expected[name]).abs().max() < 1e-12, (zero, name)
        assert torch.equal(parallel.state_dict()["never"], torch.ones(1, 2, dtype=torch.float64))
    for zero in range(3):
        _refused_steps(zero)
    for zero in (1, 2):
        parallel = parallelize(_Network(), {"dp": 2, "zero": zero})
        with pytest.raises(ConfigError, match="Adafactor needs whole parameters"):
            parallel.optimizer(lambda named: torch.optim.Adafactor(named.values()))


def _refused_steps(zero: int) -> None:
    parallel = parallelize(_Network(), {"dp": 2, "zero": zero})
    optimizer = parallel.optimizer(_adam)
    _backward(parallel)
    with pytest.raises(ConfigError, match="call reduce_gradients"):
        optimizer.step()
    parallel.reduce_gradients()
    if zero:
        with pytest.raises(ConfigError, match="clip_grad_norm_"):  # noqa: PT012
            nn.utils.clip_grad_norm_(parallel.module.parameters(), 1e-3)
            optimizer.step()
    else:
        nn.utils.clip_grad_norm_(parallel.module.parameters(), 1e-3)  # whole gradients are here
    optimizer.zero_grad()
    _backward(parallel)
    parallel.reduce_gradients()
    optimizer.step()
    with pytest.raises(ConfigError, match=r"call optimizer\.zero_grad\(\)"):  # noqa: PT012
        _backward(parallel)
        parallel.reduce_gradients()
    optimizer.zero_grad()
    parallel.module.layer.register_parameter("late", nn.Parameter(torch.zeros(2)))
    with pytest.raises(ConfigError, match=r"layer\.late was made to train after parallelize"):
        optimizer.step()


class _Experts(nn.Module):
    """Two layers of one shape, of which a call uses one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor, number: int) -> Tensor:
        return (self.first, self.second)[number](x)  # type: ignore[no-any-return]


def _different_parameters() -> None:
    """FSDP2 would add the first layer's gradient to the second's."""
    rank = dist.get_rank()
    parallel = parallelize(_Experts(), {"dp": 2, "zero": 3})
    parallel.module(torch.ones(1, 3), rank).sum().backward()
    with pytest.raises(ConfigError, match="zero=3 all ranks have to use the same parameters"):
        parallel.reduce_gradients()
    parallel.gradients.forget_gradients()
    parallel.module(torch.ones(1, 3), 1).sum().backward()
    parallel.reduce_gradients()
    assert parallel.module.first.weight.grad is None
    assert parallel.gradients.gradient_square() > 0


class _HandWritten(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (x @ x.mT).softmax(-1) @ x


class _Heads(nn.Module):
    def __init__(self, **settings: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.attention = nn.MultiheadAttention(8, 2, dtype=torch.float64, **settings)
        nn.init.normal_(self.attention.in_proj_bias)

    def forward(self, x: Tensor, **more: object) -> Tensor:
        return self.attention(x, x, x, need_weights=False, **more)[0]  # type: ignore[no-any-return]


def _sequence_parallel() -> None:
    group = ParallelMesh(ParallelPlan(sp=2)).group("sp")
    x = torch.randn(2, 7, 8, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    seen = torch.rand(7, 7, generator=torch.Generator().manual_seed(4)) > 0.4
    seen[3] = False  # a query that may look at nothing
    padding = torch.zeros(2, 7, dtype=torch.bool)
    padding[0, 5:] = True
    future = nn.Transformer.generate_square_subsequent_mask(7, dtype=torch.float64)
    for method in METHODS:
        for batch_first in (True, False):
            plain = _Heads(batch_first=batch_first)
            sequence = SequenceParallel(
                copy.deepcopy(plain), group, attention=nn.MultiheadAttention, method=method
            )
            given = x if batch_first else x.transpose(0, 1)
            dim = 1 if batch_first else 0
            own = sequence.shard(given, dim)
            mine = slice(sequence.first, sequence.first + own.shape[dim])
            for whole, part in (
                ({}, {}),
                ({"attn_mask": future}, {"attn_mask": future[mine]}),
                ({"attn_mask": future, "is_causal": True}, {"attn_mask": future[mine], "is_causal": True}),
                ({"key_padding_mask": padding}, {"key_padding_mask": padding[:, mine]}),
                ({"attn_mask": ~seen}, {"attn_mask": ~seen[mine]}),
            ):
                expected = plain(given, **whole).narrow(dim, mine.start, own.shape[dim])
                assert torch.allclose(sequence(own, **part), expected, atol=1e-12), (method, list(whole))
        # PyTorch's fused layer would look at this rank's part alone.
        layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True, dtype=torch.float64).eval()
        sequence = SequenceParallel(
            copy.deepcopy(layer), group, attention=nn.MultiheadAttention, method=method
        )
        own = sequence.shard(x, 1)
        with torch.no_grad():
            expected = layer(x)[:, sequence.first : sequence.first + own.shape[1]]
            assert torch.allclose(sequence(own), expected, atol=1e-12)
    sequence = SequenceParallel(_HandWritten(), group, attention=_HandWritten)
    with pytest.raises(ConfigError, match="_HandWritten called no attention"):
        sequence(sequence.shard(x, 1))
    sequence = SequenceParallel(_Heads(batch_first=True), group, attention=nn.MultiheadAttention)
    own = sequence.shard(x, 1)
    with pytest.raises(ConfigError, match="need_weights=False"):
        sequence.module.attention(own, own, own)


class _Random(nn.Module):
    """A cut perceptron that drops hidden numbers, and dropout of what every rank has."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        activation = nn.Sequential(nn.ReLU(), nn.Dropout(0.5))
        self.mlp = nn.Sequential(nn.Linear(6, 401), activation, nn.Linear(401, 6)).double()
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(x + self.mlp(x))  # type: ignore[no-any-return]


def _random_numbers() -> None:
    rank = dist.get_rank()
    parallel = parallelize(_Random(), {"tp": 2}, layers={"mlp": ParallelMLP.from_plain})
    x = torch.randn(5, 6, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    torch.manual_seed(rank)
    with pytest.raises(
        ConfigError, match=r"drop draws numbers for one tensor on every rank.*torch\.manual_seed"
    ):
        parallel.module(x)
    parallel.module.eval()
    parallel.module(x)  # nothing is drawn
    parallel.module.train()
    torch.manual_seed(3)
    for _ in range(3):  # shards of 201 and 200 hidden numbers draw alike for all that follows
        found = parallel.module(x)
        both = [torch.empty_like(found) for _ in range(2)]
        dist.all_gather(both, found.detach())
        assert torch.equal(*both)
    ones = torch.ones(1, 200, dtype=torch.float64)
    with own_randomness(parallel.mesh.group("tp"), ones.device):
        drawn = nn.functional.dropout(ones)
    both = [torch.empty_like(drawn) for _ in range(2)]
    dist.all_gather(both, drawn)
    assert not torch.equal(*both)  # parts of one layer, each with its own numbers


def _drawn_parts() -> None:
    """Weights that every rank draws alike are refused; constants, states and draws before a plan are not."""

    def step(change: Callable[[Parallel], object]) -> None:
        torch.manual_seed(0)
        mlp = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 6)).double()
        parallel = parallelize(nn.Sequential(mlp), {"tp": 2}, layers={"0": ParallelMLP.from_plain})
        optimizer = parallel.optimizer(_adam)
        torch.manual_seed(1)
        change(parallel)
        parallel.module(torch.ones(5, 6, dtype=torch.float64)).square().sum().backward()
        parallel.reduce_gradients()
        optimizer.step()

    def all_of(parallel: Parallel, fill: Callable[[Tensor], object]) -> None:
        for parameter in parallel.parameters():
            fill(parameter)

    twice = torch.arange(6, dtype=torch.float64).expand(8, 6)
    with pytest.raises(ConfigError, match=r"has the same values on several ranks of tp.*initialize="):
        step(lambda parallel: all_of(parallel, nn.init.normal_))
    step(lambda parallel: all_of(parallel, nn.init.ones_))
    step(lambda parallel: parallel.load_state_dict(parallel.state_dict() | {"0.0.weight": twice}))
    step(lambda _: None)


class _Nested(nn.Module):
    """Lists of lists of layers, two of which are one parameter."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        rows = [[nn.Linear(3, 3, dtype=torch.float64) for _ in range(2)] for _ in range(3)]
        rows[2][1].weight = rows[0][0].weight
        self.rows = nn.ModuleList(nn.ModuleList(row) for row in rows)
        self.named = nn.ModuleList([nn.ModuleDict({"last": nn.Linear(3, 3, dtype=torch.float64)})])

    def forward(self, x: Tensor) -> Tensor:
        for row in self.rows:
            for layer in row:
                x = layer(x).tanh()
        return self.named[0]["last"](x)  # type: ignore[no-any-return, index]


def _step_of_both(
    plain: nn.Module, expected: torch.optim.Optimizer, parallel: Parallel, found: torch.optim.Optimizer
) -> None:
    """One step on the same rows, in one process and in parallel."""
    plain(ROWS).square().sum().backward()
    expected.step()
    expected.zero_grad()
    _backward(parallel)
    parallel.reduce_gradients()
    found.step()
    found.zero_grad()


def _nested_and_tied_units() -> None:
    plain, parallel = _Nested(), parallelize(_Nested(), {"dp": 2, "zero": 3})
    units = [name for name, part in parallel.module.named_modules() if isinstance(part, FSDPModule)]
    assert units == ["", "rows.0.1", "rows.1.0", "rows.1.1", "rows.2.0", "named.0.last"]
    expected, found = (
        torch.optim.AdamW(plain.parameters(), lr=0.1),
        parallel.optimizer(_adam),
    )
    for _ in range(3):
        _step_of_both(plain, expected, parallel, found)
    state = parallel.state_dict()
    assert all((x - state[name]).abs().max() < 1e-12 for name, x in plain.state_dict().items())


def _schedulers() -> None:
    for zero in range(4):
        plain, parallel = _Network(), parallelize(_Network(), {"dp": 2, "zero": zero})
        expected, found = torch.optim.AdamW(plain.parameters(), lr=0.1), parallel.optimizer(_adam)
        assert isinstance(found, torch.optim.Optimizer)
        schedules = [
            torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.5, total_steps=5)
            for optimizer in (expected, found)
        ]
        for _ in range(3):
            _step_of_both(plain, expected, parallel, found)
            for schedule in schedules:
                schedule.step()
        assert found.inner.param_groups[0]["lr"] == expected.param_groups[0]["lr"] != 0.1
        state = parallel.state_dict()
        for name in ("layer.weight", "layer.bias", "scale"):
            assert (plain.state_dict()[name] - state[name]).abs().max() < 1e-12
        with pytest.raises(ConfigError, match=r"parallel\.optimizer\(\)"):
            found.add_param_group({"params": [nn.Parameter(torch.ones(1))]})


def _encoder_with_padding() -> None:
    """In evaluation PyTorch's encoder packs sequences without their padding, which no rank could do alone."""
    group = ParallelMesh(ParallelPlan(sp=2)).group("sp")
    layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True, dtype=torch.float64)
    plain = nn.TransformerEncoder(layer, 2).eval()
    x = torch.randn(2, 7, 8, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    padding = torch.zeros(2, 7, dtype=torch.bool)
    padding[0, 5:] = True
    sequence = SequenceParallel(copy.deepcopy(plain), group, attention=nn.MultiheadAttention)
    own = sequence.shard(x, 1)
    mine = slice(sequence.first, sequence.first + own.shape[1])
    with torch.no_grad():
        expected, found = (
            plain(x, src_key_padding_mask=padding)[:, mine],
            sequence(own, src_key_padding_mask=padding[:, mine]),
        )
    assert torch.allclose(found[~padding[:, mine]], expected[~padding[:, mine]], atol=1e-12)


def _pipeline_in_float64() -> None:
    """With float64 as the default type too."""
    torch.set_default_dtype(torch.float64)
    try:
        torch.manual_seed(0)
        plain = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        parallel = parallelize(
            copy.deepcopy(plain), {"pp": 2}, stages=lambda model, _: list(model.children())
        )
        x = torch.randn(3, 4)
        pipeline = Pipeline(parallel)
        losses = pipeline.step([(row[None],) for row in x], lambda result, _: result.square().sum())
        results = pipeline.evaluate([(row[None],) for row in x])
        if pipeline.has_last:
            assert abs(sum(losses) - plain(x).square().sum()) < 1e-12
            assert torch.allclose(torch.cat(results), plain(x), atol=1e-12)
    finally:
        torch.set_default_dtype(torch.float32)


def _forgotten_stages() -> None:
    with pytest.raises(ConfigError, match=r"no stage of the pipeline has 1\.weight"):
        parallelize(
            nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)),
            {"pp": 2},
            stages=lambda model, _: [model[0], nn.Identity()],
        )


def _everything() -> None:
    _data_parallel()
    _different_parameters()
    _sequence_parallel()
    _random_numbers()
    _drawn_parts()
    _nested_and_tied_units()
    _schedulers()
    _encoder_with_padding()
    _pipeline_in_float64()
    _forgotten_stages()


def test_on_two_ranks() -> None:
    launch(_everything, 2)


def _fails(port: int) -> str:
    rank = dist.get_rank()
    dist.destroy_process_group()
    os.environ |= {"WORLD_SIZE": "2", "RANK": str(rank), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    try:
        with init_distributed(ParallelPlan(dp=2), torch.device("cpu")) as context:
            if rank == 0:
                raise ValueError("the first rank fails")
            context.barrier()
    except (ValueError, LostProcessError) as error:
        return f"{error} {dist.is_initialized()}"
    return "no error"


def test_processes_part_when_one_fails() -> None:
    """The one that fails leaves nothing behind that a second run would stumble over, and the others do not wait."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    first, second = launch(_fails, 2, port)
    assert first == "the first rank fails False"
    assert second.startswith("rank 1 of 2 lost another process")
    assert second.endswith("False")
