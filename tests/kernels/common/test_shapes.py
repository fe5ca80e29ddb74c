"""No operator cares how many axes lead, how its inputs lie in memory, or whether there is anything at all."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

from fastfold import kernels
from fastfold.kernels import reference
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
