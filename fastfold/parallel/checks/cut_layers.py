"""Comparison of cut layers with the plain ones on the first batch, gradients included.

A cut with the right shapes may still mix up features. Examples are a linear layer of joint queries, keys and values
whose ranks each hold a third of the wrong ones, or a norm between two cut layers whose gradient is never summed. So
each such layer is compared within the smallest module with whole inputs and results. That module runs once in both
ways with random weights, and results and gradients are compared. Layers that this package cuts as a whole are left
out.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves

from fastfold.errors import ConfigError, first_line
from fastfold.parallel.checks.agreement import compare_generators, compare_inputs
from fastfold.parallel.checks.rounding import is_close
from fastfold.parallel.comm import async_ops
from fastfold.parallel.mesh import ParallelMesh
from fastfold.parallel.own_stages import OwnStages
from fastfold.parallel.tensor_parallel.layers import (
    ParallelAttention,
    ParallelEmbedding,
    ParallelLayerNorm,
    ParallelMLP,
)
from fastfold.parallel.tensor_parallel.linear import ParallelLinear
from fastfold.utils.module_structure import below, detached_copy, is_inside, joined, tensors_in, without_data

Cut = Callable[[nn.Module, ParallelMesh], nn.Module]

_CLOSED = (ParallelAttention, ParallelEmbedding, ParallelLayerNorm, ParallelMLP)
"""Layers from whole tensors to whole tensors with a known plain counterpart."""

_REMEDY = "(or pass compare_first=False to parallelize() if the difference is intended)"


def watch_first_calls(
    own: OwnStages,
    plain: Mapping[str, nn.Module],
    cuts: Mapping[str, Cut],
    mesh: ParallelMesh,
    *,
    is_compared: bool,
) -> None:
    """Compare cut layers at their first call, and inputs and random numbers of ``tp`` ranks at every call.

    ``plain`` and ``cuts`` are by paths in the module of ``own``.
    """
    group = mesh.group("tp")
    if mesh.plan.tp_mode != "1d":
        return
    for name, part in own.called:
        # A stage that is cut as a whole has no module around it to compare.
        inside = {path: cut for path, cut in below(name, cuts).items() if path}
        if is_compared:
            compare_first_calls(part, {p: x for p, x in below(name, plain).items() if p}, inside, mesh)
        compare_inputs(part, group)
        compare_generators(part, group, inside)


def compare_first_calls(
    part: nn.Module, plain: Mapping[str, nn.Module], cuts: Mapping[str, Cut], mesh: ParallelMesh
) -> None:
    """Compare every cut layer with its plain one at its first call.

    Layers of known counterparts are left out.

    ``part`` has whole inputs and results. ``plain`` has the plain layers :func:`without_data` by their paths in it, and
    ``cuts`` what cut each layer. Layouts other than 1d lack whole tensors to compare and are left out.
    """
    group = mesh.group("tp")
    if mesh.plan.tp_mode != "1d" or group.is_alone:
        return
    open_ = [path for path in cuts if not isinstance(part.get_submodule(path), _CLOSED)]
    for target in _targets(part, open_):
        _Comparison(part.get_submodule(target), target, below(target, plain), below(target, cuts), mesh)


def _targets(part: nn.Module, paths: Iterable[str]) -> list[str]:
    """Return the paths of the smallest modules with whole inputs and results, outermost ones only."""
    layers = {path: part.get_submodule(path) for path in paths}
    bare = {path: x for path, x in layers.items() if isinstance(x, ParallelLinear) and not x._forward_hooks}
    targets = {path for path in layers if path not in bare}
    for path in bare:
        owner = path
        while owner:
            owner = owner.rpartition(".")[0]
            roles = {x.role for other, x in bare.items() if is_inside(other, owner)}
            if roles == {"first", "second"} and not isinstance(part.get_submodule(owner), nn.ModuleList):
                break
        targets.add(owner)
    return sorted(
        path for path in targets if not any(is_inside(path, outer) for outer in targets if outer != path)
    )


class _Comparison:
    """One module that is compared at its first call."""

    def __init__(
        self,
        module: nn.Module,
        path: str,
        plain: Mapping[str, nn.Module],
        cuts: Mapping[str, Cut],
        mesh: ParallelMesh,
    ) -> None:
        self._path, self._mesh, self._cuts = path or type(module).__name__, mesh, cuts
        memo: dict[int, Any] = {id(module.get_submodule(name)): layer for name, layer in plain.items()}
        self._plain = memo[id(module)] if id(module) in memo else without_data(module, memo)
        self._handle = module.register_forward_pre_hook(
            torch.compiler.disable(self._called), with_kwargs=True
        )

    def _called(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._handle.remove()
        leaves = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        device = next((x.device for x in leaves), next((p.device for p in module.parameters()), None))
        with (
            torch.inference_mode(False),
            torch.enable_grad(),
            # Activation checkpointing around this call counts the tensors that its own passes save.
            saved_tensors_hooks(lambda x: x, lambda x: x),
            torch.random.fork_rng([device] if device is not None and device.type == "cuda" else []),
        ):
            plain = self._filled(device, module)
            cut = copy.deepcopy(plain)
            for name, shard in self._cuts.items():
                layer = shard(cut.get_submodule(name), self._mesh)
                if name:
                    cut.set_submodule(name, layer)
                else:
                    cut = layer
            expected = self._run(plain, args, kwargs)
            try:
                of_cut = self._run(cut, args, kwargs)
            except (RuntimeError, ValueError, TypeError, IndexError, AttributeError) as error:
                raise ConfigError(
                    f"{self._path} with cut layers raises {type(error).__name__}: {first_line(error)}, and without "
                    "them it does not; cut them by whole heads (Partition.heads), or leave them out of layers= "
                    f"{_REMEDY}"
                ) from error
            for name, layer in plain.named_modules():
                if name in self._cuts:
                    self._cut_gradients(name, layer, expected)
            problem = self._difference(expected, of_cut)
            own = torch.tensor(problem is not None, device=device)
            if bool(async_ops.gather_numbers(own, self._mesh.group("tp")).any()):
                raise ConfigError(
                    f"{self._path} with cut layers gives another result on the first batch "
                    f"({problem or 'on another rank'}). A layer of joint features (fused queries, keys and values; a "
                    "gate and its values) needs out_parts=, such as Partition.heads(heads, width, ranks, 3), and "
                    f"parameters that act on cut features have to be cut with them {_REMEDY}"
                )

    def _filled(self, device: torch.device | None, called: nn.Module) -> nn.Module:
        """Return the plain module with random weights in the dtypes of this call, the same on all ranks, none tied."""
        dtypes = {name: p.dtype for name, p in called.named_parameters(remove_duplicate=False)}
        generator = torch.Generator().manual_seed(0)
        plain = detached_copy(self._plain).eval()
        for path, module in plain.named_modules():
            for name, p in list(module.named_parameters(recurse=False, remove_duplicate=False)):
                values = torch.randn(p.shape, generator=generator)
                values = 1 + values / 4 if p.dim() < 2 else values / p.shape[-1] ** 0.5
                dtype = dtypes.get(joined(path, name), p.dtype)
                setattr(module, name, nn.Parameter(values.to(device=device, dtype=dtype)))
        return plain

    def _run(self, module: nn.Module, args: Any, kwargs: Any) -> dict[str, Tensor | None]:
        # Gradients of other inputs (angles of rotary positions) are partial on each rank and not used.
        wanted = [isinstance(x, Tensor) and x.requires_grad for x in tree_leaves((args, kwargs))]
        args, kwargs = detached_copy((args, kwargs))
        inputs = [x for x, is_wanted in zip(tree_leaves((args, kwargs)), wanted, strict=True) if is_wanted]
        for x in inputs:
            x.requires_grad_()
        before = self._loss_terms(module)
        results = {f"result {i}": x for i, x in enumerate(tensors_in(module(*args, **kwargs)))}
        terms = self._loss_terms(module).items()
        results |= {f"result {name}": x for name, x in terms if x is not before.get(name)}
        values: dict[str, Tensor | None] = {name: x.detach() for name, x in results.items()}
        roots = [x for x in results.values() if x.requires_grad]
        generator = torch.Generator().manual_seed(1)
        weights = [torch.randn(x.shape, generator=generator).to(x) for x in roots]
        named = dict(module.named_parameters())
        gradients: Sequence[Tensor | None] = torch.autograd.grad(
            roots, [*inputs, *named.values()], weights, allow_unused=True
        )
        names = [f"the gradient of input {i}" for i in range(len(inputs))] + list(named)
        return values | dict(zip(names, gradients, strict=True))

    def _loss_terms(self, module: nn.Module) -> dict[str, Tensor]:
        """Return differentiable numbers that are attributes of modules outside of cut layers, by name."""
        return {
            joined(path, name): x
            for path, part in module.named_modules()
            if not any(is_inside(path, cut) for cut in self._cuts)
            for name, x in vars(part).items()
            if isinstance(x, Tensor) and x.numel() == 1 and x.requires_grad
        }

    def _cut_gradients(self, path: str, layer: nn.Module, values: dict[str, Tensor | None]) -> None:
        """Replace gradients of a plain layer by those of this rank's part."""
        with torch.no_grad():
            for name, p in layer.named_parameters():
                gradient = values.pop(joined(path, name))
                p.copy_(torch.zeros_like(p) if gradient is None else gradient)
        part = self._cuts[path](layer, self._mesh)
        values |= {joined(path, name): p.detach() for name, p in part.named_parameters()}

    @staticmethod
    def _difference(expected: Mapping[str, Tensor | None], of_cut: Mapping[str, Tensor | None]) -> str | None:
        # If the exact gradient is zero (a bias of keys), both values are rounding errors of the others.
        gradients = {name: x for name, x in expected.items() if not name.startswith("result ")}
        held = [x for x in gradients.values() if x is not None and x.numel()]
        scale = max((float(x.abs().max()) for x in held), default=0.0)
        for name, x in expected.items():
            y = of_cut.get(name)
            if x is None or y is None or not x.is_floating_point():
                continue
            if x.shape != y.shape:
                return f"{name}: expected shape {list(x.shape)}, found {list(y.shape)}"
            if not is_close(x, y, scale if name in gradients else 0.0):
                return f"{name}: off by {float((x - y).abs().max()):.1e} of {float(x.abs().max()):.1e}"
        return None
