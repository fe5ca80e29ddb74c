"""The first time chunks come as they are needed, then by the plan, and never more of them than the budget holds."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import nn

from fastfold.memory import SimulatedDevice, Tier, plan
from fastfold.memory.gemini.access_trace import AccessTrace, PassKey
from fastfold.memory.gemini.chunk_store import ChunkStore
from fastfold.memory.gemini.chunks import ChunkState, build_chunks
from fastfold.memory.gemini.executor import Residency

SIZE = 320  # bytes of a chunk: a layer of 8 * 8 + 8 numbers, padded
ORDER = (0, 1, 2, 3, 2, 1, 0)


def _residency(
    room: int, *, keep: bool = True, count: int = 4, lookahead: int = 0, **options: object
) -> Residency:
    """Of four layers, with room for some of them on the device."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(count)))
    store = ChunkStore(build_chunks(model, largest=1), SimulatedDevice(room * SIZE), Tier())
    return Residency(store, room * SIZE, keep, lookahead, **options)  # type: ignore[arg-type]


def _key(name: str = "", training: bool = True) -> PassKey:
    return PassKey(name, training, training, ((8,),), ())


def _run(residency: Residency, order: Sequence[int], key: PassKey | None = None, elements: int = 8) -> None:
    """One pass whose operators use a chunk each."""
    residency.begin_pass(_key() if key is None else key, elements)
    for index in order:
        residency.pin((index,))
        assert residency.pinned == {index}
        assert index in residency.store.resident
        assert residency.store.chunks[index].state is ChunkState.COMPUTE
        assert len(residency.store.resident) * SIZE <= residency.budget
        residency.pin((), release=(index,))
        assert residency.store.chunks[index].state in (ChunkState.HOLD, ChunkState.FREE)
    residency.end_pass()


def _step(residency: Residency, order: Sequence[int] = ORDER) -> int:
    """A training step, whose optimizer changes all chunks; returns how many were loaded."""
    before = residency.store.loads
    _run(residency, order)
    residency.end_step()
    with residency.store.params_on_host():
        pass
    return residency.store.loads - before


@pytest.mark.parametrize("lookahead", [0, 2])
@pytest.mark.parametrize("room", [1, 2, 3, 4])
def test_a_step_that_comes_again_goes_by_the_plan(room: int, lookahead: int) -> None:
    """As many loads as the planner promises for what was recorded: farthest next use, all gone after the optimizer."""
    residency = _residency(room, lookahead=lookahead)
    assert _step(residency) == len(ORDER)
    # A release is an access of nothing as well: twice as many as there are operators.
    assert (residency.planned, residency.reacted) == (0, 2 * len(ORDER))
    (trace,) = residency.book._traces.values()
    uses = [set(access.chunks) for access in trace.accesses]
    assert uses == [part for index in ORDER for part in ({index}, set())]
    promised = plan(trace.accesses, dict.fromkeys(range(4), SIZE), room * SIZE, volatile=frozenset(range(4)))
    assert _step(residency) == promised.loads
    (made,) = residency.plans
    for _ in range(2):
        assert _step(residency) == promised.loads
    assert promised.loads == {1: 7, 2: 6, 3: 5, 4: 4}[room]
    assert residency.planned == 3 * 2 * len(ORDER)
    assert residency.plans[0] is made  # planned once


def test_a_step_that_goes_another_way_gets_what_it_needs() -> None:
    residency = _residency(2)
    for order in (ORDER, ORDER, (0, 1, 3, 0), (0, 2, 2, 2, 2, 2, 2, 2, 2, 2)):
        _step(residency, order)
    before = residency.reacted
    assert before > 2 * len(ORDER)
    _step(residency, (0, 2, 2, 2, 2, 2, 2, 2, 2, 2))  # the last way is known now
    assert residency.reacted == before


def test_without_keeping_each_chunk_leaves_after_its_use() -> None:
    residency = _residency(4, keep=False)
    for _ in range(3):
        assert _step(residency) == len(ORDER)
    assert residency.plans == ()


def test_an_evaluation_stands_alone() -> None:
    """Between the passes of a step, with other inputs; what it leaves on the device stays."""
    residency = _residency(4)
    for _ in range(3):
        _run(residency, (0, 1), _key("a"))
        _run(residency, (3,), _key(training=False))
        _run(residency, (1, 0), _key("b"))
        residency.end_step()
        with residency.store.params_on_host():
            pass
    assert {tuple(key.module for key in keys) for keys in residency.book._traces} == {("a", "b"), ("",)}


def test_larger_inputs_are_recorded_anew() -> None:
    """Of the same bucket, but more of them than ever: their memory is not known."""
    residency = _residency(4)
    for elements, planned in ((8, 0), (8, 4), (9, 0), (9, 4)):
        before = residency.planned
        _run(residency, (0, 1), elements=elements)
        residency.end_step()
        with residency.store.params_on_host():
            pass
        assert residency.planned - before == planned


def test_a_chunk_that_two_operators_use_is_released_by_the_last() -> None:
    residency = _residency(2)
    residency.begin_pass(_key(), 1)
    residency.pin((0,))
    residency.pin((0, 1))
    residency.pin((), release=(0,))
    assert residency.pinned == {0, 1}
    assert residency.store.chunks[0].state is ChunkState.COMPUTE
    residency.pin((), release=(0, 1))
    assert residency.pinned == frozenset()
    residency.pin((0,))
    residency.begin_pass(_key(), 1)  # the pass before it raised
    assert residency.pinned == frozenset()
    assert residency.store.chunks[0].state is ChunkState.HOLD


def test_less_room_than_when_it_was_recorded_is_noticed() -> None:
    """Something that stays on the device pushes chunks out that a plan would keep, also later on."""
    residency = _residency(4, count=3)
    order = (0, 1, 2, 0, 1, 2)
    assert _step(residency, order) == 6
    assert _step(residency, order) == 3
    with residency.store.device.running():
        ballast = torch.zeros(2 * SIZE // 4)
    assert _step(residency, order) > 3
    del ballast
    assert _step(residency, order) > 3


def test_saved_tensors_stay_where_there_is_room() -> None:
    """What one step saved and used is known in the next: all of it with much room, none of it without."""
    for room, stays in ((1, False), (8, True)):
        residency = _residency(room, count=1)
        for expected in (False, stays):
            residency.begin_pass(_key(), 1)
            call = residency.new_call()
            assert call == 1
            residency.pin((0,))
            key = ("saved", call, 0)
            assert residency.stays(key, SIZE) is expected
            assert not residency.stays(("saved", call, 1), SIZE)  # nobody used it
            residency.pin((), release=(0,))
            residency.used(key)
            residency.end_step()
            with residency.store.params_on_host():
                pass
    residency.begin_pass(_key(), 1)
    residency.pin((0,))
    assert not residency.stays(
        ("saved", residency.new_call(), 0), SIZE + 1
    )  # larger than what was planned for


def test_ranks_remember_what_any_of_them_has_seen() -> None:
    """Evaluations are a rank's own; a step is remembered when the ranks have met."""
    met: list[list[AccessTrace]] = []

    def agree(traces: list[AccessTrace]) -> list[AccessTrace]:
        met.append(traces)
        return [*traces, AccessTrace((_key("elsewhere"),), (1,), (0,), (), ())]

    residency = _residency(4, agree=agree)
    _run(residency, (0,), _key(training=False))
    assert len(residency.book) == 1
    _run(residency, (0, 1))
    residency.end_step()
    assert len(residency.book) == 1
    residency.exchange()
    assert [len(traces) for traces in met] == [1]
    assert len(residency.book) == 3
    residency.exchange()
    assert met[1] == []


def _recycled(residency: Residency, recycles: int, order: Sequence[int] = (0, 1, 2, 3)) -> tuple[int, int]:
    """A step with passes without gradients before the last one; returns its accesses without a trace, and its loads."""
    reacted, loads = residency.reacted, residency.store.loads
    residency.begin_pass(PassKey("", True, True, ((8,),), (recycles,)), 8)
    residency.pin(())
    for cycle in range(recycles + 1):
        with torch.set_grad_enabled(cycle == recycles):
            for index in order:
                residency.pin((index,))
                assert len(residency.store.resident) * SIZE <= residency.budget
                residency.pin((), release=(index,))
    with torch.no_grad():
        for index in reversed(order):
            residency.pin((index,))
            residency.pin((), release=(index,))
    residency.end_pass()
    residency.end_step()
    with residency.store.params_on_host():
        pass
    return residency.reacted - reacted, residency.store.loads - loads


@pytest.mark.parametrize(("room", "most"), [(4, 4), (3, 15)])
def test_one_trace_serves_any_number_of_recycles(room: int, most: int) -> None:
    residency = _residency(room)
    assert _recycled(residency, 1) == (25, 12)
    for recycles in (3, 0, 2, 5, 1, 0):
        reacted, loads = _recycled(residency, recycles)
        assert reacted == 0
        assert loads <= (4 if room == 4 else 4 * (recycles + 2))
        if recycles == 3:
            assert loads <= most
    assert len(residency.book) == 1
    assert _recycled(residency, 2, order=(3, 2, 1, 0))[0] > 0  # another way


def test_a_step_that_repeats_a_measured_one_is_not_counted() -> None:
    residency = _residency(8)
    device = residency.store.device
    counted = []
    for _ in range(2 + 64):
        with device.running():
            before = device.other_bytes()
            residency.begin_pass(_key(), 8)
            tensor = torch.ones(8)
            counted.append(device.other_bytes() > before)
            del tensor
            residency.pin((0,))
            residency.pin((), release=(0,))
        residency.end_step()
        with residency.store.params_on_host():
            pass
    # After 16 steps that followed, then 32, then 64
    assert [step for step, is_counted in enumerate(counted) if is_counted] == [0, 1, 17, 33, 65]


def test_a_step_of_other_numbers_is_not_counted() -> None:
    """The trace that it follows stays, so its own would be of no use."""
    residency = _residency(8)
    device = residency.store.device
    counted = []
    for numbers in (3, 1, 1, 3, 2):
        with device.running():
            before = device.other_bytes()
            residency.begin_pass(PassKey("", True, True, ((8,),), (numbers,)), 8)
            tensor = torch.ones(8)
            counted.append(device.other_bytes() > before)
            del tensor
            residency.pin((0,))
            residency.pin((), release=(0,))
        residency.end_step()
        with residency.store.params_on_host():
            pass
    assert counted == [True, False, False, False, False]
    assert len(residency.book) == 1
