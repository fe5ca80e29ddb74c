"""Ranks that should be alike and are not: refused at the start, or at the first step that would let them drift."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from fastfold.errors import ConfigError
from fastfold.memory import Gemini, GeminiConfig, SimulatedDevice
from fastfold.parallel import Parallel, ParallelMesh, ParallelPlan, parallelize
from fastfold.parallel.checks import agreement as agreement_module
from fastfold.parallel.checks.agreement import StepAgreement, compare_inputs
from fastfold.parallel.comm.groups import Group, agree_over_store
from fastfold.parallel.tensor_parallel import ParallelMLP
from tests.helpers.spawn_ranks import launch

LAYERS = {"mlp": ParallelMLP.from_plain}
X = torch.randn(8, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


class _Net(nn.Module):
    def __init__(self, more: nn.Module | None = None, rate: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.rate = rate
        self.mlp = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 6))
        self.more = more or nn.Identity()
        self.head = nn.Linear(6, 3)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.more(F.dropout(x + self.mlp(x), self.rate, self.training)))  # type: ignore[no-any-return]


class _Running(nn.Module):
    """Statistics of what it has seen; ``how`` says of what, and how they are written."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.register_buffer("seen", torch.zeros(6), persistent=False)
        self.scale = nn.Parameter(torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        if self.training and self.how == "buffer":
            self.seen.lerp_(x.detach().mean(0), 0.1)
        if self.training and self.how == "data":
            self.scale.data.clamp_(max=float(x.detach().abs().mean()))
        if self.training and self.how == "count":
            self.seen.add_(1)
        if self.training and self.how == "cache":
            self.seen = x.detach().mean(0) * 0
            self.seen += x.detach().sum() * 1e-9
        return x * self.scale + self.seen


def _sgd(named: Mapping[str, nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(named.values(), lr=0.1)


def _step(parallel: Parallel, x: Tensor, target: float = 0.0) -> None:
    optimizer = parallel.optimizer(_sgd)
    (parallel.module(x) - target).square().sum().backward()
    parallel.reduce_gradients()
    optimizer.step()
    optimizer.zero_grad()


def _structures() -> None:
    rank = dist.get_rank()
    for model, message in (
        (nn.Sequential(*[nn.Linear(2, 2) for _ in range(2 + rank)]), "2.weight is"),
        (
            nn.Linear(2, 2).requires_grad_(rank == 0),
            r"weight is \[2, 2\] torch.float32 frozen on rank 1|frozen",
        ),
        (nn.Linear(2, 2, dtype=(torch.float32, torch.float64)[rank]), "weight is .*torch.float64"),
        (nn.Sequential((nn.ReLU(), nn.GELU())[rank]), "module 0 is"),
    ):
        with pytest.raises(ConfigError, match=f"the models of the ranks differ: .*{message}"):
            parallelize(model, {"dp": 2})
    with pytest.raises(ConfigError, match=f"these differ: a is {rank} on rank {rank} and {1 - rank} on rank"):
        agree_over_store("test", {"a": str(rank)}, "these differ")
    agree_over_store("test", {"a": "1"}, "these differ")
    running = _Running("none")
    running.seen += rank
    parallel = parallelize(running, {"dp": 2})
    assert not parallel.module.seen.any()  # the first rank's, though it is not saved


def _same_samples() -> None:
    rank = dist.get_rank()
    for zero in (0, 2):
        parallel = parallelize(_Net(), {"tp": 2, "zero": zero}, layers=LAYERS)
        with parallel.overlapped():
            parallel.module(X[rank : rank + 4]).square().sum().backward()
        with pytest.raises(ConfigError, match="gradients differ between the ranks of tp"):
            parallel.reduce_gradients()
    with pytest.raises(ConfigError, match="the same inputs and labels"):
        _step(parallelize(_Net(), {"tp": 2}, layers=LAYERS), X, target=rank)
    parallel = parallelize(_Net(rate=0.3), {"tp": 2}, layers=LAYERS)
    torch.manual_seed(rank)
    with pytest.raises(ConfigError, match=r"the same seed by torch\.manual_seed"):
        _step(parallel, X)
    torch.manual_seed(5)
    _step(parallelize(_Net(rate=0.3), {"tp": 2}, layers=LAYERS), X)


def _evaluation() -> None:
    rank = dist.get_rank()
    parallel = parallelize(_Net(rate=0.3), {"tp": 2}, layers=LAYERS)
    parallel.module.eval()
    with torch.no_grad():
        parallel.module(X)
        for x in (X[rank : rank + 4], X[: 3 + rank]):
            with pytest.raises(ConfigError, match="_Net has different inputs on the ranks of tp"):
                parallel.module(x)


def _changed_in_forward() -> None:
    for how in ("buffer", "data"):
        parallel = parallelize(_Net(_Running(how)), {"dp": 2})
        with pytest.raises(
            ConfigError, match="the ranks of replicas have different values of weights or buffers"
        ):
            _step(parallel, X[parallel.rows(len(X))])
    _step(parallelize(_Net(_Running("cache")), {"dp": 2}), X[4 * dist.get_rank() :][:4])
    parallel = parallelize(_Net(_Running("count")), {"dp": 2})
    for _ in range(3):
        _step(parallel, X[parallel.rows(len(X))])
    assert parallel.module.more.seen.max() == 3
    frozen = parallelize(_Net(), {"dp": 2})
    frozen.module.head.requires_grad_(dist.get_rank() == 0)
    with pytest.raises(ConfigError, match="the ranks of replicas freeze different parameters"):
        _step(frozen, X)


def _batch_norm() -> None:
    parallel = parallelize(_Net(nn.BatchNorm1d(6).eval()), {"dp": 2})
    _step(parallel, X)
    parallel.module.train()
    with pytest.raises(ConfigError, match=r"more is BatchNorm1d.*eval\(\) of this module"):
        parallel.module(X)
    with pytest.raises(ConfigError, match="more is BatchNorm1d"):
        parallelize(_Net(nn.BatchNorm1d(6, track_running_stats=False).eval()), {"dp": 2})


def _infinities(plan: dict[str, int], place: Callable[[nn.Module], nn.Parameter]) -> None:
    parallel = parallelize(_Net(), plan, layers=LAYERS if "tp" in plan else None)
    optimizer = parallel.optimizer(_sgd)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    before = {name: x.clone() for name, x in parallel.state_dict().items()}
    for number in range(2):
        optimizer.zero_grad()
        x = X[parallel.rows(len(X))]
        scaler.scale(parallel.module(x).square().sum()).backward()
        if number == 0 and dist.get_rank() == 1:
            place(parallel.module).grad.fill_(torch.inf)  # type: ignore[union-attr]
        parallel.reduce_gradients()
        scaler.step(optimizer)
        scaler.update()
        is_same = all(torch.equal(x, before[name]) for name, x in parallel.state_dict().items())
        assert is_same == (number == 0)
    assert scaler.get_scale() == 4.0


@pytest.mark.parametrize("is_contiguous", [True, False])
@pytest.mark.parametrize("bad", [False, True])
def test_an_infinite_gradient_reaches_the_first_number_of_the_first(is_contiguous: bool, bad: bool) -> None:
    one = object.__new__(StepAgreement)
    one._parts, one._parameters = [Group(None)], lambda: []  # type: ignore[method-assign]
    first, second = torch.ones(3, 4), torch.ones(2)
    first = first if is_contiguous else first.T
    if bad:
        second[1] = torch.inf
    one._spread_infinities({"empty": torch.ones(0), "first": first, "second": second})
    assert first.isnan().nonzero().tolist() == ([[0, 0]] if bad else [])


def _scaler() -> None:
    _infinities({"tp": 2}, lambda module: module.mlp.first.weight)
    _infinities({"dp": 2, "zero": 1}, lambda module: module.head.bias)
    _infinities({"dp": 2, "zero": 2}, lambda module: module.mlp[0].weight)


def _gemini() -> None:
    rank = dist.get_rank()

    def managed(more: nn.Module) -> tuple[nn.Module, Gemini]:
        model = _Net(more)
        nn.init.constant_(model.head.weight, rank)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        device = SimulatedDevice(100_000)
        return model, Gemini(model, optimizer, GeminiConfig(100_000, device=device, group=dist.group.WORLD))

    model, manager = managed(nn.Identity())
    with manager.params_on_host():
        assert not model.head.weight.any()
    model, manager = managed(_Running("buffer"))
    with manager.device.running():
        model(X[rank : rank + 2]).sum().backward()
    with pytest.raises(ConfigError, match=r"have different values of more\.seen"):
        manager.step()
    with pytest.raises(ConfigError, match=r"GeminiConfig\(group=\.\.\.\) differ: module more is"):
        managed((nn.ReLU(), nn.GELU())[rank])


def _all() -> None:
    _structures()
    _same_samples()
    _evaluation()
    _changed_in_forward()
    _batch_norm()
    _scaler()
    _gemini()


def test_ranks_that_drift_apart_are_refused() -> None:
    """Structures, samples, labels, random numbers, buffers, weights, frozen sets, infinite gradients, Gemini."""
    launch(_all, 2)


def test_one_process_has_nothing_to_agree_on() -> None:
    module = nn.Linear(2, 2)
    agreement = StepAgreement(module, ParallelMesh(ParallelPlan()), frozenset(), [])
    agreement.check({"weight": torch.full((2, 2), torch.inf)})
    compare_inputs(module, Group(None))
    assert not module._forward_pre_hooks
    agree_over_store("test", {}, "")


@pytest.mark.parametrize("place", range(6))
@pytest.mark.parametrize(("name", "tolerance"), [("replicas", 1e-9), ("tp", 1e-4)])
def test_weights_may_differ_by_rounding_errors_of_their_norm(
    name: str, tolerance: float, place: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Names may not differ, sums and norms within a tolerance; cut weights differ in a tensor parallel group."""
    model = nn.Module()
    model.whole, model.cut = (nn.Parameter(torch.tensor(x).double()) for x in ([3.0, 4.0], [6.0, 8.0]))
    model.whole.grad, model.cut.grad = torch.ones(2).double(), torch.ones(2).double()
    groups = {
        one: SimpleNamespace(size=1 + (one == name), backend="gloo", name=one)
        for one in ("tp", "pp", "replicas")
    }
    mesh: Any = SimpleNamespace(plan=SimpleNamespace(tp_mode="1d", pp=1), group=groups.__getitem__)
    agreement = StepAgreement(model, mesh, frozenset({"cut"}), [])
    change = 0.0

    def gather(own: Tensor, _: Group) -> Tensor:
        if own.shape == (6,):  # two hashes, and sum and norm of whole and of cut weights
            assert own[2:].tolist() == [7.0, 5.0, 14.0, 10.0]
        other = own.clone()
        if len(own.view(-1)) == 6:
            other[place] += change
        return torch.stack([own, other])

    monkeypatch.setattr(agreement_module.async_ops, "gather_numbers", gather)
    norm = (0.0, 0.0, 5.0, 5.0, 10.0, 10.0)[place]
    for share, is_refused in ((0.5, norm == 0.0), (2.0, True)):
        change = share * tolerance * norm if norm else 1.0
        if is_refused and not (name == "tp" and place > 3):
            with pytest.raises(ConfigError, match=r"have different values|freeze different parameters"):
                agreement.check({})
        else:
            agreement.check({})


@pytest.mark.parametrize("place", [0, 1, 2, 4, 5, 6])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-6), (torch.float32, 1e-3), (torch.bfloat16, 5e-2)]
)
def test_gradients_may_differ_by_rounding_errors_of_their_norm_and_of_all(
    dtype: torch.dtype, tolerance: float, place: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sums of elements may differ more than norms, by the root of their number; ranks share each gradient."""
    sizes = {"small": 4, "large": 9, "one": 1, "none": 2}
    model = nn.Module()
    for name, number in (*sizes.items(), ("frozen", 3)):
        setattr(model, name, nn.Parameter(torch.ones(number), requires_grad=name != "frozen"))
    values = {"small": 3.0, "large": 2.0**10, "one": 5.0}
    gradients = {name: torch.full((sizes[name],), value, dtype=dtype) for name, value in values.items()}
    gradients["one"] = gradients["one"].double()
    squares = [4 * 9.0, 9 * 2.0**20, 25.0, 0.0]
    sums = [4 * 3.0, 9 * 2.0**10, 5.0, 0.0]

    def group(name: str) -> Any:
        return SimpleNamespace(size=1 + (name in ("tp", "share")), backend="gloo", name=name)

    mesh: Any = SimpleNamespace(plan=SimpleNamespace(tp_mode="1d", pp=1), group=group)
    agreement = StepAgreement(model, mesh, frozenset(), [group("share")])
    is_norm, number = divmod(place, 4)
    allowed = tolerance * (squares[number] ** 0.5 + 1e-3 * sum(squares) ** 0.5)
    allowed *= 1.0 if is_norm else sizes[list(sizes)[number]] ** 0.5
    change = 0.0

    def gather(own: Tensor, group: Group) -> Tensor:
        assert own.tolist() == pytest.approx([*sums, *squares])
        if group.name == "share":
            return torch.stack([0.25 * own, 0.75 * own])
        other = own.clone()
        # The other rank's norm is the smaller one: the larger one decides.
        other[place] = (own[place].sqrt() - change) ** 2 if is_norm else own[place] + change
        return torch.stack([own, other])

    monkeypatch.setattr(agreement_module.async_ops, "gather_numbers", gather)
    change = 0.9 * allowed
    agreement._check_gradients(gradients, mesh.group("tp"))
    change = 1.1 * allowed
    with pytest.raises(ConfigError, match=r"gradients differ between the ranks of tp, .*small and other"):
        agreement._check_gradients(gradients, mesh.group("tp"))


@pytest.mark.parametrize(
    ("device", "steps", "waits"), [("cpu", 99, False), ("cuda", 99, True), ("cuda", 1, False)]
)
@pytest.mark.parametrize("is_apart", [False, True])
def test_only_a_gpu_refuses_at_the_next_step_and_not_in_the_first_ones(
    device: str, steps: int, waits: bool, is_apart: bool
) -> None:
    class Flag:
        def __init__(self) -> None:
            self.device = torch.device(device)

        def __bool__(self) -> bool:
            return is_apart

    agreement = StepAgreement.__new__(StepAgreement)
    agreement._steps, agreement._pending = steps, []
    flag: Any = Flag()
    if is_apart and not waits:
        with pytest.raises(ConfigError, match="they differ"):
            agreement._refuse(flag, "they differ")
    else:
        agreement._refuse(flag, "they differ")
    assert [one for one, _ in agreement._pending] == ([flag] if waits else [])
