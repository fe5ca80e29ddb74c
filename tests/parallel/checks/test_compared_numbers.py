"""Numbers that a rank compares with those of a second rank, which the tests invent."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fastfold.errors import ConfigError
from fastfold.parallel.checks import agreement as agreement_module
from fastfold.parallel.checks.agreement import (
    StepAgreement,
    _checksum,
    compare_generators,
    compare_inputs,
)

Patch = pytest.MonkeyPatch


def _mesh(*pairs: str, tp_mode: str = "1d") -> Any:
    """Return a mesh whose groups have two ranks if they are named, and one if not."""
    groups = {
        name: SimpleNamespace(size=1 + (name in pairs), backend="gloo", name=name, is_alone=name not in pairs)
        for name in ("tp", "pp", "replicas", "dp")
    }
    return SimpleNamespace(
        plan=SimpleNamespace(tp_mode=tp_mode, pp=groups["pp"].size), group=groups.__getitem__
    )


@pytest.fixture
def sent(monkeypatch: Patch) -> list[Tensor]:
    """Numbers that this rank sends; the other rank sends the same."""
    numbers: list[Tensor] = []

    def gather(own: Tensor, _: Any) -> Tensor:
        numbers.append(own.clone())
        return torch.stack([own, own])

    monkeypatch.setattr(agreement_module.async_ops, "gather_numbers", gather)
    return numbers


def _answer(monkeypatch: Patch, other: Callable[[Tensor], Tensor]) -> None:
    """Let the other rank send a function of this rank's numbers."""
    monkeypatch.setattr(
        agreement_module.async_ops, "gather_numbers", lambda own, _: torch.stack([own, other(own)])
    )


def test_a_checksum_weighs_tensors_by_their_places() -> None:
    """Weights are one and the fractions of multiples of the golden ratio; infinite numbers count as finite ones."""
    tensors = [
        torch.tensor([3.0, -4.0]),
        torch.tensor([1, 2, 2]),
        torch.tensor([1 + 2j, 2j]),
        torch.tensor([torch.nan, 6.0], dtype=torch.bfloat16),
    ]
    weights = [1 + k * 0.6180339887 - int(k * 0.6180339887) for k in range(4)]
    total, length = _checksum(tensors, torch.device("cpu"))
    assert total.item() == pytest.approx(sum(w * x for w, x in zip(weights, (-1, 5, 5, 6), strict=True)))
    assert length.item() == pytest.approx(sum(w * x for w, x in zip(weights, (5, 3, 3, 6), strict=True)))
    assert [x.item() for x in _checksum([], torch.device("cpu"))] == [0.0, 0.0]


@pytest.mark.parametrize("place", range(3))
def test_inputs_of_evaluation_are_compared_by_shapes_and_values(place: int, monkeypatch: Patch) -> None:
    module, pair = nn.Identity().eval(), _mesh("tp").group("tp")
    x, y = torch.tensor([3.0, 4.0]), torch.tensor([[5.0]])
    shapes = zlib.crc32(b"[(2,), (1, 1)]")
    weight = 1.6180339887

    def other(own: Tensor) -> Tensor:
        assert own.dtype == torch.float64
        assert own.tolist() == pytest.approx([shapes, 7 + 5 * weight, 5 + 5 * weight])
        return own + change * (torch.arange(3) == place)

    _answer(monkeypatch, other)
    compare_inputs(module, pair)
    (hook,) = module._forward_pre_hooks.values()
    arguments: Any = ((x,), {"y": [y], "z": 1})
    change = 0.0
    hook(module, *arguments)
    change = 1.0
    with pytest.raises(ConfigError, match="Identity has different inputs on the ranks of tp"):
        hook(module, *arguments)
    hook(module.train(), *arguments)  # in training the gradients are compared


def test_generators_are_compared_before_a_module_draws_for_whole_tensors(monkeypatch: Patch) -> None:
    model = nn.ModuleDict({"cut": nn.Dropout(0.5), "plain": nn.Linear(2, 2), "whole": nn.Dropout(0.5)})
    pair = _mesh("tp").group("tp")
    for group, cut in ((pair, ["cut", "whole"]), (_mesh().group("tp"), [])):
        compare_generators(model, group, cut)
        assert not model._forward_pre_hooks
    compare_generators(model, pair, ["cut"])
    (hook,) = model._forward_pre_hooks.values()
    state = zlib.crc32(torch.get_rng_state().numpy().tobytes())
    change = 0

    def other(own: Tensor) -> Tensor:
        assert own.item() == state
        return own + change

    _answer(monkeypatch, other)
    hook(model, ())
    change = 1
    with pytest.raises(ConfigError, match="whole draws numbers for one tensor on every rank of tp"):
        hook(model, ())
    hook(model.eval(), ())


class _Watched(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.frozen = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2), False)
        self.register_buffer("saved", torch.ones(2))
        self.register_buffer("cache", torch.ones(2), persistent=False)
        self.register_buffer("absent", None)


def _hash(*names: str) -> float:
    return float(zlib.crc32(repr(list(names)).encode()))


def test_changed_tensors_are_compared_and_all_at_powers_of_two(sent: list[Tensor]) -> None:
    """A cache is compared if it changes in place, since a replaced one has tensors of this rank's inputs."""
    model = _Watched()
    agreement = StepAgreement(model, _mesh("replicas"), frozenset(), [])
    every = ("weight", "frozen", "saved")

    def change(step: int) -> tuple[str, ...]:
        with torch.no_grad():
            if step == 3:
                model.weight.add_(1)
                return ("weight",)
            if step == 4:
                model.cache.add_(1)  # type: ignore[operator]
                return (*every, "cache")
            if step == 5:
                model.cache = torch.zeros(2)
                return ()
            if step == 6:
                model.saved = torch.full((2,), 3.0)
                return ("saved",)
        return every if step in (1, 2, 8) else ()

    for step in range(1, 10):
        names = change(step)
        sent.clear()
        agreement.check({})
        (numbers,) = sent
        assert numbers[:2].tolist() == [_hash(*names), _hash("frozen")], step
        assert (numbers[3] > 0) == bool(names)
    model.weight.data.add_(1)
    agreement.settle()
    sent.clear()
    agreement.check({})
    assert sent[0][0] == _hash()


def test_stages_may_not_change_saved_tensors_in_each_microbatch(
    monkeypatch: Patch, sent: list[Tensor]
) -> None:
    model = _Watched()
    agreement = StepAgreement(model, _mesh("pp"), frozenset(), [])
    with agreement.pipeline_pass():
        model.cache.add_(1)  # type: ignore[operator]
        model.fresh = nn.Parameter(torch.ones(1))
    model.saved.add_(1)  # type: ignore[operator]
    agreement.check({})
    with agreement.pipeline_pass():
        model.saved.add_(1)  # type: ignore[operator]
    with pytest.raises(ConfigError, match=r"forward changes saved in place .*pipeline"):
        agreement.check({})
    agreement.check({})
    _answer(monkeypatch, lambda own: own + (own.dim() == 0))
    with pytest.raises(ConfigError, match="forward changes tensors of another stage in place"):
        agreement.check({})


def test_a_refusal_that_waits_is_raised_once_at_the_next_step(sent: list[Tensor]) -> None:
    agreement = StepAgreement(_Watched(), _mesh("replicas"), frozenset(), [])
    agreement._pending = [
        (torch.tensor(is_apart), ConfigError(f"refusal {is_apart}")) for is_apart in (False, True)
    ]
    with pytest.raises(ConfigError, match="refusal True"):
        agreement.check({})
    assert sent == []
    agreement.check({})


def _cut_model() -> nn.Module:
    model = nn.Module()
    model.whole, model.first, model.second, model.constant = (
        nn.Parameter(torch.tensor(values)) for values in ([1.0, 2.0], [1.0, 3.0], [2.0, 5.0], [4.0, 4.0])
    )
    model.empty = nn.Parameter(torch.ones(0))
    return model


CUT = frozenset({"first", "second", "constant", "empty"})


def test_parts_drawn_alike_are_refused_at_the_first_step(monkeypatch: Patch) -> None:
    """Constants are equal on all ranks, and so are parts that were equal before a start."""
    model = _cut_model()
    agreement = StepAgreement(model, _mesh("tp"), CUT, [])
    equal: tuple[float, ...] = (4.0,)  # of the first part

    def other(own: Tensor) -> Tensor:
        if own.shape != (4,):
            return own
        assert own.isnan().tolist() == [False, False, True, True]
        return torch.where(torch.isin(own, own.new_tensor(equal)), own, own + 1)

    _answer(monkeypatch, other)
    agreement.note_equal_parts()
    equal = (4.0, 7.0)
    with pytest.raises(ConfigError, match="second has the same values on several ranks of tp"):
        agreement.check({})
    agreement.check({})
    for accept in (False, True):
        equal = ()
        agreement.note_equal_parts()
        equal = (4.0,) if accept else ()
        if accept:
            agreement.accept_equal_parts()
        agreement.check({})
    equal = (4.0, 7.0)
    agreement.check({})  # a later step
    equal = ()
    agreement.note_equal_parts()
    equal = (4.0,)
    with pytest.raises(ConfigError, match="first has the same values"):
        agreement.check({})


@pytest.mark.parametrize("why", ["no tensor parallelism", "another layout", "nothing is cut", "no memory"])
def test_parts_are_not_compared_without_numbers_of_their_own(why: str, sent: list[Tensor]) -> None:
    model = _cut_model()
    if why == "no memory":
        model.first = nn.Parameter(torch.ones(2, device="meta"))
    mesh = _mesh(
        "dp" if why == "no tensor parallelism" else "tp", tp_mode="2d" if why == "another layout" else "1d"
    )
    agreement = StepAgreement(model, mesh, frozenset() if why == "nothing is cut" else CUT, [])
    agreement.note_equal_parts()
    assert sent == []
