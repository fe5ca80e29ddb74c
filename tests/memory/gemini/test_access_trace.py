"""What a step touched, written down, and recognised when it comes again."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fastfold.memory import Access, Span
from fastfold.memory.gemini.access_trace import (
    REMEMBERED,
    AccessRecorder,
    AccessTrace,
    PassKey,
    TraceBook,
    pass_key,
)


def _key(name: str = "", *, training: bool = True, opaque: bool = False) -> PassKey:
    return PassKey(name, training, True, ((8,),), (), opaque)


def _trace(*keys: PassKey, elements: int = 10, other: int = 5, chunk: int = 0) -> AccessTrace:
    accesses = tuple(Access(frozenset({chunk}), other) for _ in keys)
    return AccessTrace(keys, (elements,) * len(keys), tuple(range(len(keys))), accesses, (0,) * len(keys))


def test_a_pass_is_known_by_what_changes_it() -> None:
    """Shapes in buckets of powers of two, numbers and texts by value, and what brings anything as opaque."""
    module = nn.Linear(2, 2).eval()
    args = (torch.zeros(3, 17, 0), [torch.zeros(1)], 4)
    kwargs = {"b": {"recycles": 3, "name": "x"}, "a": True}
    with torch.no_grad():
        key, elements = pass_key("inner", module, args, kwargs)
    assert key == PassKey("inner", False, False, ((4, 32, 0), (1,)), key.options)
    assert sorted(map(str, key.options)) == sorted(["4", "a", "True", "b", "3", "x"])
    assert elements == 1
    assert key.evaluation
    same, more = pass_key("inner", module, (torch.zeros(4, 32, 0), [torch.zeros(1)], 4), kwargs)
    assert (same.shapes, more) == (key.shapes, 1)
    assert same.grad
    assert not same.evaluation
    assert pass_key("", module, (torch.zeros(5),), {})[0].shapes == ((8,),)
    assert pass_key("", module, (len,), {})[0].opaque
    assert not PassKey("", True, False, (), ()).evaluation


def test_a_cycle_is_written_down_access_by_access() -> None:
    recorder = AccessRecorder()
    recorder.measured(99)  # before the first access: nobody's
    recorder.begin(_key("a"), 7)
    recorder.access(frozenset({0}), 1)
    recorder.measured(10)
    recorder.measured(4)
    recorder.saved(("tensor", 1, 0), 100)
    recorder.saved(("tensor", 1, 1), 50)
    recorder.access(frozenset({0, 1}), 2)
    recorder.begin(_key("b"), 8)
    recorder.saved(("tensor", 1, 0), 80)  # its size was not known before
    recorder.access(frozenset(), 3)
    recorder.measured(20)
    recorder.used(("tensor", 1, 0))
    recorder.used(("tensor", 9, 9))  # nobody saved it
    recorder.access(frozenset({1}), 4)
    recorder.used(("tensor", 1, 0))  # the first use counts
    recorder.kept.add(("tensor", 1, 1))
    found = recorder.trace()
    assert len(recorder) == 4
    assert (found.keys, found.elements, found.starts) == ((_key("a"), _key("b")), (7, 8), (0, 2))
    expected = (({0}, 10), ({0, 1}, 0), (set(), 20), ({1}, 0))
    assert found.accesses == tuple(Access(frozenset(chunks), other) for chunks, other in expected)
    assert found.before == (1, 2, 3, 4)
    assert found.spans == {("tensor", 1, 0): Span(80, 0, 2)}  # what nobody used has no end
    assert found.kept == {("tensor", 1, 1)}


def test_the_latest_cycle_that_began_alike_and_was_no_smaller_is_expected() -> None:
    book, a, b, c = TraceBook(), _key("a"), _key("b"), _key("c")
    book.keep(_trace(a, b))
    long = book.keep(_trace(a, b, c))
    assert book.expect([a], [10]) is long
    assert book.expect([a, b], [3, 10]) is long
    assert book.expect([a], [11]) is None
    assert book.expect([b], [1]) is None
    assert book.expect([a, c], [1, 1]) is None
    short = book.keep(_trace(a, b))
    assert book.expect([a], [10]) is short
    assert len(book) == 2


def test_a_cycle_seen_again_keeps_the_most_of_every_number() -> None:
    book, a = TraceBook(), _key("a")
    first = book.keep(_trace(a, elements=10, other=5))
    assert book.keep(_trace(a, elements=8, other=3)) is first
    more = book.keep(_trace(a, elements=8, other=9))
    assert (more.elements, more.accesses[0].other) == ((10,), 9)
    # Other chunks are another step, whose numbers say nothing of this one.
    assert book.keep(_trace(a, elements=1, other=1, chunk=1)).accesses[0].other == 1


@pytest.mark.parametrize("larger", [0, 1])
def test_of_two_spans_the_larger_counts(larger: int) -> None:
    sizes, a = [10, 20], _key("a")
    book, base = TraceBook(), _trace(a)
    for size in sizes if larger else reversed(sizes):
        spans = {("tensor", 0, 0): Span(size, 0, 1)}
        found = book.keep(
            AccessTrace(base.keys, base.elements, base.starts, base.accesses, base.before, spans)
        )
    assert found.spans == {("tensor", 0, 0): Span(20, 0, 1)}


def test_opaque_passes_are_never_alike_and_old_cycles_are_forgotten() -> None:
    book = TraceBook()
    opaque = _trace(_key(opaque=True))
    assert book.keep(opaque) is opaque
    assert len(book) == 0
    assert book.expect(opaque.keys, opaque.elements) is None
    for number in range(REMEMBERED + 3):
        book.keep(_trace(_key(str(number))))
    assert len(book) == REMEMBERED
    assert book.expect([_key("2")], [1]) is None
    assert book.expect([_key("3")], [1]) is not None


def test_a_trace_serves_other_numbers_and_smaller_shapes_and_nothing_else() -> None:
    key = PassKey("a", True, True, ((8, 4), (2,)), (3, "x", True))
    assert key.serves(PassKey("a", True, True, ((8, 2), (2,)), (0, "x", True)))
    for other in (
        PassKey("b", True, True, key.shapes, key.options),
        PassKey("a", False, True, key.shapes, key.options),
        PassKey("a", True, False, key.shapes, key.options),
        PassKey("a", True, True, ((16, 4), (2,)), key.options),
        PassKey("a", True, True, ((8, 4),), key.options),
        PassKey("a", True, True, ((8,), (2,)), key.options),
        PassKey("a", True, True, key.shapes, (3, "y", True)),
        PassKey("a", True, True, key.shapes, (3, "x", False)),
    ):
        assert not key.serves(other)


def test_without_a_cycle_of_its_own_a_pass_expects_the_smallest_that_serves_it() -> None:
    def key(recycles: int, width: int = 8) -> PassKey:
        return PassKey("", True, True, ((width,),), (recycles,))

    book = TraceBook()
    own, large = book.keep(_trace(key(2))), book.keep(_trace(key(2, 16), elements=16))
    assert book.expect([key(2)], [10]) is own
    assert book.expect([key(3)], [10]) is own
    assert book.expect([key(3, 4)], [5]) is own
    assert book.expect([key(3)], [12]) is large
    assert book.expect([key(3, 32)], [12]) is None


def test_an_access_after_a_loop_of_another_length_has_its_place() -> None:
    """Root, two loops without gradients of chunks 1 and 2, the pass with gradients, and the backward pass."""
    chunks = [0, 1, 2, 1, 2, 1, 2, 2, 1]
    grads = (True, False, False, False, False, True, True, False, False)
    accesses = tuple(Access(frozenset({chunk})) for chunk in chunks)
    trace = AccessTrace((_key(),), (1,), (0,), accesses, (0,) * 9, grads=grads)
    one, two = frozenset({1}), frozenset({2})
    assert [
        trace.place(i, a.chunks, g) for i, (a, g) in enumerate(zip(accesses, grads, strict=True))
    ] == list(range(9))
    assert trace.place(1, one, True) == 5  # no loop
    assert trace.place(3, one, True) == 5  # one loop
    assert trace.place(5, one, False) == 1  # a third loop
    assert trace.place(3, two, True) is None
    assert trace.place(5, two, False) is None
    assert trace.place(9, one, True) is None
