"""No operator cares how many axes lead, how its inputs lie in memory, or whether there is anything at all."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from fastfold import kernels
from fastfold.errors import InputError
from fastfold.kernels import reference
from fastfold.kernels.common.shapes import axes_of, check_shapes
from tests.helpers.forced_blocks import WHOLE, force_blocks
from tests.helpers.kernel_checks import BACKENDS, check_against_definition
from tests.kernels.test_operators import NAMES, Case, case_of


def _check(case: Case, inputs: dict[str, Any], backend: str) -> None:
    operator = functools.partial(case.operator, backend=backend)
    check_against_definition(operator, case.definition, inputs, torch.float32, case.constants)


def _turned(x: Any) -> Any:
    """The same numbers, with the last two axes the other way round in memory."""
    return x.mT.contiguous().mT if isinstance(x, Tensor) and x.dim() > 1 else x


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", NAMES)
def test_leading_axes_and_strides_do_not_matter(
    name: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    force_blocks(monkeypatch, BM=32, BH=64, BO=64, BI=8, BJ=8, BK=WHOLE)
    case = case_of(name, 3, batch=(2, 1))
    _check(case, {k: _turned(x) for k, x in case.inputs.items()}, backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", NAMES)
def test_nothing_gives_nothing(name: str, backend: str) -> None:
    """An empty axis gives an empty result, and gradients of zero for the parameters."""
    case = case_of(name, 0)
    _check(case, case.inputs, backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("queries", "keys"), [(3, 0), (0, 3)])
def test_queries_without_keys_and_keys_without_queries(queries: int, keys: int, backend: str) -> None:
    inputs = {
        "q": torch.randn(2, queries, 2, 8),
        "k": torch.randn(2, keys, 2, 8),
        "v": torch.randn(2, keys, 2, 8),
        "bias": torch.randn(2, queries, keys),
        "mask": torch.ones(2, keys),
        "gate": torch.randn(2, queries, 2, 8),
    }
    case = Case(kernels.attention, reference.attention, inputs, frozenset({"mask"}))
    _check(case, {k: x.double() for k, x in inputs.items()}, backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_alignment_without_rows(backend: str) -> None:
    """The mean of nothing is the bias over eps, as the definition has it."""
    case = case_of("outer_product_mean", 4)
    none = {k: x[:0] if k.startswith(("left", "right")) else x for k, x in case.inputs.items()}
    _check(case, none, backend)


def _other_shapes(x: Tensor) -> Iterator[list[int]]:
    """Shapes that broadcast to that of ``x``, and shapes that do not."""
    for axis, size in enumerate(x.shape):
        for other in {0, 1, size - 1, size + 1} - {size}:
            yield [*x.shape[:axis], other, *x.shape[axis + 1 :]]
    yield from ([1, *x.shape], [2, *x.shape], [*x.shape[1:]], [x.numel()] * (x.dim() > 1), [])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("batch", [(), (2,)])
def test_shapes_that_do_not_belong_together_are_refused(name: str, batch: tuple[int, ...]) -> None:
    """A kernel would read outside of them, and PyTorch would broadcast some and leave out parts of others."""
    case = case_of(name, 5, batch)
    options = inspect.signature(case.operator).parameters
    inputs = case.inputs
    with torch.no_grad():
        result = case.operator(**inputs)
        for key in {"residual", "out"} & options.keys():
            inputs = {**inputs, key: torch.zeros_like(result)}
        # The shape of the first argument may be free, and the number of heads; factors of dropout may broadcast.
        free = {"layer_norm": {"x"}, "pair_bias": {"z", "weight"}, "residual_update": {"dropout"}}
        for key in sorted(inputs.keys() - free.get(name, set())):
            for shape in _other_shapes(inputs[key]) if isinstance(inputs[key], Tensor) else ():
                with pytest.raises(
                    InputError, match=name.removesuffix("_outgoing").removesuffix("_incoming")
                ):
                    case.operator(**{**inputs, key: torch.ones(shape, dtype=torch.float64)})


@pytest.mark.parametrize("heads", [0, -1, 3, "4", None])
def test_heads_divide_the_channels(heads: Any) -> None:
    case = case_of("gated_attention", 5)
    width = case.inputs["query_weight"].shape[0]
    with pytest.raises(InputError, match=f"gated_attention: heads must divide the {width} channels .* found"):
        case.operator(**case.inputs | {"heads": heads, "bias": None})


def test_outer_products_take_each_sequence_of_the_mask() -> None:
    case = case_of("outer_product_mean", 5)
    right, mask, *fixed = (case.inputs[key] for key in ("right", "right_mask", "weight", "bias"))
    for blocks in ([right[:2]], [right[:2], right[:2]], [right, right], [right[:2], right[2:, :-1]]):
        with pytest.raises(InputError, match="outer_product_mean: expected"):
            kernels.OuterProductRows(blocks, mask, *fixed)


def test_a_wrong_shape_is_named_with_the_expected_one() -> None:
    check_shapes("op", "x", (3, 4), [("z", None, (9,)), ("y", (4,), (4,))])
    with pytest.raises(InputError, match=r"op: expected y \[4\] for x \[3, 4\], found \[5\]"):
        check_shapes("op", "x", (3, 4), [("y", (5,), (4,))])
    assert axes_of("op", "x", (2, 3, 4), "A, c") == (2, 3, 4)
    with pytest.raises(InputError, match=r"op: expected x \[\*, A, c\], found \[3\]"):
        axes_of("op", "x", (3,), "A, c")


def test_other_dtypes_are_refused() -> None:
    """PyTorch would round normalised integers to integers."""
    with pytest.raises(InputError, match=r"layer_norm: expected x of a floating dtype, found torch\.int64"):
        kernels.layer_norm(torch.ones(3, 4, dtype=torch.int64), None, None)
    inputs = case_of("outer_product_mean", 5).inputs
    with pytest.raises(InputError, match="outer_product_mean: expected one dtype"):
        kernels.outer_product_mean(**{**inputs, "left": inputs["left"].float()})
