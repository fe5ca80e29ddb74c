"""Recorder of a module's operators, messages and memory by region, also on tensors without data."""

from __future__ import annotations

import bisect
import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from fastfold.kernels.common.cost import OPERATOR_COSTS, OperatorCost
from fastfold.parallel.comm.groups import Communication


class Operation(NamedTuple):
    """One call of an operator.

    The dtype is that of its largest floating input, ``bfloat16`` or ``float32``. ``traffic`` is bytes, and
    ``exponentials`` are those of its softmax.
    """

    name: str
    dtype: str
    flops: float
    traffic: float
    launches: int
    exponentials: float = 0.0


@dataclass
class Part:
    """Work of one rank in one direction of one region."""

    operations: Counter[Operation] = field(default_factory=Counter)
    sent: list[Communication] = field(default_factory=list)

    @property
    def flops(self) -> float:
        """Floating-point operations of all matrix products."""
        return sum(operation.flops * number for operation, number in self.operations.items())


@dataclass
class TracedRegion:
    """One submodule, or the model outside of all named ones.

    ``entering`` is bytes of its input tensors; activation checkpointing keeps only these. ``kept`` is other bytes that
    it keeps for its backward pass, without parameters and inputs. ``parameters`` and ``calls`` are numbers, on this
    rank.
    """

    forward: Part = field(default_factory=Part)
    backward: Part = field(default_factory=Part)
    entering: int = 0
    kept: int = 0
    parameters: int = 0
    calls: int = 0


@dataclass
class Trace:
    """One training step of one rank."""

    regions: dict[str, TracedRegion]  #: By name; ``""`` is the model outside of all named ones
    peak: float  #: Maximum number of bytes that exist at a time in addition to the parameters


def _own_bytes(x: Tensor) -> int:
    """Return the bytes of a tensor's elements in memory; expanded elements count once."""
    return min(x.numel() * x.element_size(), x.untyped_storage().nbytes())


class Recorder(TorchDispatchMode):
    """Recorder of every operator, forward and backward, in the region that runs.

    A backward operator belongs to the region that created its autograd node; nodes are numbered in the order of their
    creation.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._regions: dict[str, TracedRegion] = {"": TracedRegion()}
        self._inside = ""
        self._around: list[str] = []
        self._first_nodes: list[int] = []
        self._names: list[str] = []
        self._parameters = {p.untyped_storage()._cdata for p in module.parameters()}
        self._module = module
        self._known: dict[str, set[int]] = {"": set()}
        self._alive = 0
        self._peak = 0.0
        self._seen: dict[int, weakref.ref[Any]] = {}

    def leave_out(self, tensors: Iterable[Tensor]) -> None:
        """Leave tensors, such as a model's inputs, out of the memory, as parameters are."""
        self._parameters |= {x.untyped_storage()._cdata for x in tensors}

    def watch(self, name: str, module: nn.Module) -> list[Any]:
        """Record a submodule separately; regions inside of others are left out of these."""
        self._regions[name] = TracedRegion(parameters=sum(p.numel() for p in module.parameters()))

        def enter(_: nn.Module, arguments: Any, named: Any) -> None:
            if _in_backward():
                return  # a recomputed pass is work of the backward pass
            self._around.append(self._inside)
            self._mark(name)
            entering = {
                x.untyped_storage()._cdata: x for x in tree_iter((arguments, named)) if isinstance(x, Tensor)
            }
            self._known[name] = set(entering)
            self._regions[name].calls += 1
            self._regions[name].entering += sum(_own_bytes(x) for x in entering.values())

        def leave(*_: Any) -> None:
            if not _in_backward():
                self._mark(self._around.pop())

        return [
            module.register_forward_pre_hook(enter, with_kwargs=True),
            module.register_forward_hook(leave),
        ]

    def _mark(self, name: str) -> None:
        self._inside = name
        self._first_nodes.append(torch.autograd._get_sequence_nr())
        self._names.append(name)

    def _running_region(self) -> tuple[TracedRegion, bool]:
        """Return the running region, and True in its backward pass."""
        if not _in_backward():
            return self._regions[self._inside], False
        node = torch._C._current_autograd_node()
        # Accumulation of a parameter's gradient has no number of its own.
        number = node._sequence_nr() if node is not None else 0
        last = bisect.bisect_right(self._first_nodes, number) - 1
        name = self._names[last] if last >= 0 and number < 2**63 else ""
        return self._regions[name], True

    def _part(self) -> Part:
        region, backward = self._running_region()
        return region.backward if backward else region.forward

    def communicated(self, entry: Communication) -> None:
        """Record a started collective."""
        self._part().sent.append(entry)

    def keep(self, x: Tensor) -> Tensor:
        """Record a tensor that autograd keeps for the backward pass."""
        storage = x.untyped_storage()
        known = self._known[self._inside]
        if storage._cdata not in self._parameters and storage._cdata not in known:
            known.add(storage._cdata)
            self._regions[self._inside].kept += storage.nbytes()
        return x

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # a wrapper around every operator would import PyTorch's compiler

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if func.is_view or func.namespace in ("c10d", "prim"):
            self._born(out, 0.0)
            return out
        cost = operator_cost(func, args, kwargs, out)
        inputs = [x for x in tree_iter((args, kwargs)) if isinstance(x, Tensor)]
        outputs = [x for x in tree_iter(out) if isinstance(x, Tensor)]
        floating = [x for x in (*inputs, *outputs) if x.is_floating_point()]
        largest = max(floating, key=lambda x: x.numel(), default=None)
        dtype = "bfloat16" if largest is not None and largest.element_size() == 2 else "float32"
        traffic = cost.traffic + sum(_own_bytes(x) for x in (*inputs, *outputs))
        if cost.launches:
            operation = Operation(
                str(func._schema.name), dtype, cost.flops, traffic, cost.launches, cost.exponentials
            )
            self._part().operations[operation] += 1
        self._born(out, cost.workspace)
        return out

    def _born(self, out: Any, workspace: float) -> None:
        """Count new memory until it is freed."""
        for x in tree_iter(out):
            if not isinstance(x, Tensor):
                continue
            storage = x.untyped_storage()
            key = storage._cdata
            if key in self._parameters or key in self._seen:
                continue
            size = storage.nbytes()
            self._alive += size
            # Kept here, and not in the registry of finalizers, which would keep this object and so the storage.
            self._seen[key] = weakref.ref(storage, self._dies(key, size))
        self._peak = max(self._peak, self._alive + workspace)

    def _dies(self, key: int, size: int) -> Callable[[Any], None]:
        def died(_: Any) -> None:
            self._alive -= size
            self._seen.pop(key, None)

        return died

    def record(self, loss: Callable[[nn.Module], Tensor], regions: Iterable[str]) -> Trace:
        """Record a forward and backward pass of the module, whose scalar loss is a function of it."""
        handles = [hook for name in regions for hook in self.watch(name, self._module.get_submodule(name))]
        try:
            with self, torch.autograd.graph.saved_tensors_hooks(self.keep, lambda x: x):
                loss(self._module).backward()
        finally:
            for handle in handles:
                handle.remove()
        return self.result()

    def result(self) -> Trace:
        """Return the recorded step."""
        every = sum(p.numel() for p in self._module.parameters())
        rest = self._regions[""]
        rest.parameters = every - sum(r.parameters for name, r in self._regions.items() if name)
        return Trace(self._regions, self._peak)


def _in_backward() -> bool:
    return bool(torch._C._current_graph_task_id() != -1)


_FREE = OperatorCost(0.0, launches=0)
_PRODUCTS = {"mm": 0, "bmm": 0, "addmm": 1, "baddbmm": 1}
"""Products of matrices, each with the place of the first matrix among its arguments."""
_WITHOUT_WORK = {
    "aten::_unsafe_view",
    "aten::empty",
    "aten::empty_like",
    "aten::empty_strided",
    "aten::new_empty",
    "aten::lift_fresh",
}


def operator_cost(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> OperatorCost:
    """Return the cost of one call of an operator, as a dispatch mode sees it."""
    name = func._schema.name
    if name in _WITHOUT_WORK:
        return _FREE
    namespace, _, short = name.partition("::")
    if namespace == "fastfold":
        names = [argument.name for argument in func._schema.arguments]
        return OPERATOR_COSTS[short](dict(zip(names, args, strict=False)) | kwargs)
    if short in _PRODUCTS:
        return OperatorCost(2.0 * out.numel() * args[_PRODUCTS[short]].shape[-1])
    if not any(word in short for word in ("mm", "conv", "attention")):
        return OperatorCost(0.0)
    # Imported with the first of these operators, because it imports Triton and SymPy.
    from torch.utils.flop_counter import flop_registry

    formula = flop_registry.get(func.overloadpacket)
    if short.startswith("_scaled_dot_product"):
        return _attention_cost(short, args, kwargs, formula, out)
    return OperatorCost(float(formula(*args, **kwargs, out_val=out)) if formula is not None else 0.0)


def _attention_cost(
    name: str, args: tuple[Any, ...], kwargs: dict[str, Any], formula: Any, out: Any
) -> OperatorCost:
    """Return the cost of PyTorch's fused attention, which skips half of the scores if it is causal."""
    from torch.utils.flop_counter import sdpa_backward_flop_count, sdpa_flop_count

    backward = "backward" in name
    q, k = args[1:3] if backward else args[:2]
    if "for_cpu" in name:  # PyTorch counts its attention for GPUs only
        flops = float(
            sdpa_backward_flop_count(*(x.shape for x in args[:4]))
            if backward
            else sdpa_flop_count(*(x.shape for x in args[:3]))
        )
    else:
        flops = float(formula(*args, **kwargs, out_val=out)) if formula is not None else 0.0
    scores = q.shape.numel() / q.shape[-1] * k.shape[-2]
    causal = 0.5 if any(x is True for x in (*args, *kwargs.values())) else 1.0
    return OperatorCost(causal * flops, exponentials=causal * scores, launches=2 if backward else 1)
