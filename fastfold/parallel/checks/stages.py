"""Comparison of a pipeline's stages with the model that they compose to, before the first step.

Model and stages run once on tensors without data. Every tensor gets a fingerprint of the operators, parameters and
inputs that made it, so that stages that compute something else are found on every rank, without messages and without
memory.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only
from torch.utils.weak import WeakIdKeyDictionary

from fastfold.errors import ConfigError, first_line
from fastfold.parallel.own_stages import Split
from fastfold.parallel.plan import ParallelPlan
from fastfold.utils.module_structure import fake, fake_copy, tensors_in, without_data

_PASSED_ON = ("aten::detach", "aten::alias", "aten::clone", "aten::lift_fresh")
"""Operators whose result is their input."""
_MOST_ELEMENTS = 4096  #: Constants with more elements are told apart by their shapes alone

_REMEDY = (
    "stages= must return modules whose composition is the model; wrap what runs between its layers into a module of "
    "the stage, or pass compare_first=False to parallelize() if the difference is intended"
)


def compare_stages(model: nn.Module, split: Split | None, plan: ParallelPlan) -> StageComparison | None:
    """Return the comparison of a pipeline's stages with the plain model; None if there is nothing to compare."""
    return None if split is None or plan.pp == 1 or plan.dap > 1 else StageComparison(model, split, plan.pp)


class StageComparison:
    """One comparison of stages with the plain model, to be made before the first step.

    The model is copied without data; its stages are spread over ``ranks``.
    """

    def __init__(self, model: nn.Module, split: Split, ranks: int) -> None:
        self._model: nn.Module | None = without_data(model)
        self._split, self._ranks = split, ranks

    @torch.no_grad()
    def compare(self, args: Sequence[Any], everywhere: Mapping[str, Any]) -> None:
        """Run model and stages once; later calls return at once.

        A model that does not take the arguments of the stages is not compared. The arguments are those of the first
        stage for a microbatch, those named of every stage.

        Raises:
            ConfigError: A stage fails, returns no tensors, or the stages compute something else.
        """
        model, self._model = self._model, None
        if model is None or not _takes(model, args, everywhere):
            return
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        plain = fake_copy(model, mode)
        stages = list(self._split(plain, self._ranks))
        names = {id(x): name for name, x in (*plain.named_parameters(), *plain.named_buffers())}
        with mode:
            inputs, named = tree_map_only(Tensor, fake, (tuple(args), dict(everywhere)))
            try:
                expected, _ = _Fingerprints(names, (inputs, named)).of_call(partial(plain, *inputs, **named))
            except Exception as error:  # shapes that depend on data raise many types
                raise ConfigError(
                    f"{type(model).__name__} cannot be traced to compare its pipeline stages with it "
                    f"({type(error).__name__}: {first_line(error)}): if the stages are right, pass "
                    "compare_first=False to parallelize()"
                ) from error
            prints, passed = _Fingerprints(names, (inputs, named)), inputs
            last: list[str] = []
            for number, stage in enumerate(stages):
                place = f"stage {number} of {len(stages)} of the pipeline"
                try:
                    last, result = prints.of_call(partial(stage, *passed, **named))
                except ConfigError:
                    raise
                except Exception as error:
                    raise ConfigError(
                        f"{place} raises {type(error).__name__}: {first_line(error)}; {_REMEDY}"
                    ) from error
                passed = result if isinstance(result, tuple | list) else (result,)
                if number + 1 < len(stages) and not all(isinstance(x, Tensor) for x in passed):
                    kinds_of = ("Tensor" if isinstance(x, Tensor) else type(x).__name__ for x in passed)
                    kinds = ", ".join(dict.fromkeys(kinds_of))
                    raise ConfigError(
                        f"{place} returns {kinds}, expected a tensor or a tuple of tensors to send: {_REMEDY}"
                    )
        if not set(last) <= set(expected):
            raise ConfigError(
                f"the {len(stages)} stages of the pipeline compute another result than {type(model).__name__}: "
                + _REMEDY
            )


def _takes(model: nn.Module, args: Sequence[Any], named: Mapping[str, Any]) -> bool:
    try:
        signature(model.forward).bind(*args, **named)
    except TypeError:
        return False
    return True


class _Fingerprints(TorchDispatchMode):
    """Fingerprint of every tensor by what made it.

    ``names`` are those of parameters and buffers by id.
    """

    def __init__(self, names: Mapping[int, str], inputs: Any) -> None:
        super().__init__()
        self._names = names
        self._known = WeakIdKeyDictionary()
        for number, x in enumerate(tree_flatten(inputs)[0]):
            if isinstance(x, Tensor):
                self._known[x] = f"input {number}"

    def of_call(self, call: Callable[[], Any]) -> tuple[list[str], Any]:
        """Return the fingerprints of the tensors that a call returns, and its result."""
        with self:
            result = call()
        return [self._of(x) for x in tensors_in(result)], result

    def _of(self, x: Tensor) -> str:
        known = self._known.get(x) or self._names.get(id(x))
        if known is not None:
            return str(known)
        value: Any = getattr(x, "constant", None) if isinstance(x, FakeTensor) else x
        elements = None
        if value is not None and value.numel() <= _MOST_ELEMENTS:
            with suppress(RuntimeError):  # a tensor of another kind without data
                elements = value.tolist()
        return f"constant {list(x.shape)} {x.dtype} {elements}"

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        leaves = tree_flatten((args, kwargs or {}))[0]
        before = [self._of(x) if isinstance(x, Tensor) else repr(x) for x in leaves]
        out = func(*args, **(kwargs or {}))
        name = func._schema.name
        for number, x in enumerate(tree_flatten(out)[0]):
            if isinstance(x, Tensor):
                facts = repr((name, number, before)).encode()
                is_same = name in _PASSED_ON and isinstance(leaves[0], Tensor)
                self._known[x] = before[0] if is_same else hashlib.sha256(facts).hexdigest()
        return out
