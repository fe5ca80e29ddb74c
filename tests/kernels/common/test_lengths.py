"""Lengths: one compilation serves them all, and those that are no multiple of any block are right."""

from __future__ import annotations

import functools
import sys
from collections import defaultdict
from typing import Any

import pytest
import torch
from torch import Tensor

from fastfold.kernels.common.backend import interpreted
from tests.helpers.forced_blocks import WHOLE, force_all_blocks
from tests.helpers.kernel_checks import BACKENDS, check_against_definition
from tests.kernels.test_operators import NAMES, case_of


def _force(monkeypatch: pytest.MonkeyPatch, **others: int) -> None:
    # The interpreter adds the rows of a block one after the other, and a thousand of them would round more than a GPU.
    blocks = {"BM": 256, "BH": 64, "BO": 64, "BI": 16, "BJ": 64, "BT": 4096, "BQ": 512, "BK": WHOLE}
    force_all_blocks(monkeypatch, **(blocks | others))


def _check(operator: str, n: int, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _force(monkeypatch)
    case = case_of(operator, n)
    function = functools.partial(case.operator, backend=backend)
    check_against_definition(function, case.definition, case.inputs, torch.float32, case.constants)


@pytest.mark.long
@pytest.mark.parametrize("operator", NAMES)
def test_lengths_that_are_no_multiple_of_a_block(operator: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One more than a multiple of 16, 32 and 64, and as many pairs as make several blocks and a rest."""
    _check(operator, 65, "triton", monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("operator", NAMES)
def test_a_thousand_residues(operator: str, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _check(operator, 1000, backend, monkeypatch)


class _Recorder:
    """A kernel that notes for every launch what Triton compiles it by, and then runs.

    Args:
        kernel: The kernel.
        keys: Where the keys of its launches go.

    Triton compiles by ``tl.constexpr`` arguments, dtypes, and, of all other arguments that are not in
    ``do_not_specialize``, whether they are 1, multiples of 16, or beyond 32 bits; so for the elements of a tuple.
    """

    def __init__(self, kernel: Any, keys: set[Any]) -> None:
        self._kernel, self._keys = kernel, keys
        self._plain = set(kernel.kwargs.get("do_not_specialize") or ())

    def __getitem__(self, grid: Any) -> Any:
        def launch(*args: Any, **kwargs: Any) -> Any:
            named = dict(zip(self._kernel.arg_names, args, strict=False)) | kwargs
            self._keys.add(tuple((name, self._key(name, x)) for name, x in sorted(named.items())))
            return self._kernel[grid](*args, **kwargs)

        return launch

    def _key(self, name: str, x: Any) -> Any:
        if isinstance(x, Tensor):
            return x.dtype, x.data_ptr() % 16 == 0
        if isinstance(x, tuple):
            return tuple(self._key("", element) for element in x)
        if isinstance(x, bool) or not isinstance(x, int) or name.isupper():
            return "float" if isinstance(x, float) else x
        wide = not -(2**31) <= x < 2**31
        return ("int64" if wide else "int32") if name in self._plain else (wide, x == 1, x % 16 == 0)


@pytest.mark.long
@pytest.mark.skipif(not interpreted(), reason="looks at launches in the interpreter")
@pytest.mark.parametrize("operator", NAMES)
def test_kernels_are_compiled_once_for_all_lengths(operator: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A length that differs in nothing but itself finds everything compiled."""
    # The interpreter computes whole blocks, however few queries and keys there are.
    _force(monkeypatch, **({"BQ": 32, "BK": 32} if "attention" in operator else {}))
    case = case_of(operator, 2)
    check_against_definition(  # loads the modules of the kernels
        functools.partial(case.operator, backend="triton"),
        case.definition,
        case.inputs,
        torch.float32,
        case.constants,
    )
    keys: dict[str, set[Any]] = defaultdict(set)
    for module_name, module in list(sys.modules.items()):
        if module_name.startswith("fastfold.kernels."):
            for name, x in list(vars(module).items()):
                if name.endswith("_kernel") and hasattr(x, "arg_names"):
                    monkeypatch.setattr(module, name, _Recorder(x, keys[name]))

    def run(n: int) -> None:
        case = case_of(operator, n)
        inputs = {
            k: x.float().requires_grad_(k not in case.constants) if isinstance(x, Tensor) else x
            for k, x in case.inputs.items()
        }
        case.operator(**inputs, backend="triton").sum().backward()

    run(17)
    compiled = {name: set(found) for name, found in keys.items()}
    assert any(compiled.values())
    run(27)
    for name, found in keys.items():
        assert found == compiled[name], (name, _differences(found))


def _differences(keys: set[Any]) -> list[tuple[str, set[Any]]]:
    """Arguments that a kernel is compiled anew for, with what differs."""
    found = [(arguments[0][0], {x for _, x in arguments}) for arguments in zip(*keys, strict=True)]
    return [(name, values) for name, values in found if len(values) > 1]
