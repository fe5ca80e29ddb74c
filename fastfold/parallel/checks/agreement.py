"""Checks that ranks agree: on inputs and random numbers at a call, and on a few numbers at every step."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from fastfold.errors import ConfigError
from fastfold.parallel.comm import async_ops
from fastfold.parallel.comm.groups import Group
from fastfold.parallel.data_parallel.sharded_norm import local
from fastfold.parallel.mesh import ParallelMesh
from fastfold.parallel.tensor_parallel.randomness import draws
from fastfold.utils.module_structure import is_inside

_LOOSE = {torch.float64: 1e-6, torch.float32: 1e-3}
"""Relative difference by dtype that sums of equal gradients may have, since some kernels add in any order."""

_WAITED_STEPS = 2  #: Number of first steps whose comparisons the host waits for on a GPU


def compare_inputs(module: nn.Module, group: Group) -> None:
    """Compare the inputs of a module over ranks that share its work, at every call in evaluation.

    In training a comparison of gradients at the end of the step detects different inputs, without a wait at every call.
    The ranks of the group get the same inputs.
    """
    if group.is_alone:
        return

    def compare(called: nn.Module, args: Any, kwargs: Any) -> None:
        if called.training:
            return
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        device = next((local(p).device for p in called.parameters()), torch.device("cpu"))
        shapes = zlib.crc32(repr([tuple(x.shape) for x in tensors]).encode())
        with torch.no_grad():
            first = torch.tensor(float(shapes), dtype=torch.float64, device=device)
            own = torch.stack([first, *_checksum(tensors, device)])
            is_apart = bool((async_ops.gather_numbers(own, group) != own).any())
        if is_apart:
            raise ConfigError(
                f"{type(called).__name__} has different inputs on the ranks of {group.name}, which compute one result "
                "together: give them the same inputs"
            )

    # Before comparisons that exchange numbers which depend on the inputs.
    module.register_forward_pre_hook(torch.compiler.disable(compare), prepend=True, with_kwargs=True)


def compare_generators(module: nn.Module, group: Group, cut: Iterable[str]) -> None:
    """Compare the ranks' generators in training before each call of a module that draws.

    Ranks with different numbers would drop different elements of one tensor, and diverge silently.

    The group works on the same tensors, except in the layers at the paths ``cut``, whose draws differ between ranks.
    """
    paths = tuple(cut)
    drawing = [
        name
        for name, part in module.named_modules()
        if draws(part) and not any(is_inside(name, path) for path in paths)
    ]
    if group.is_alone or not drawing:
        return

    def check(called: nn.Module, _: Any) -> None:
        if not called.training:
            return
        device = next((p.device for p in module.parameters()), torch.device("cpu"))
        state = zlib.crc32(torch.get_rng_state().numpy().tobytes())
        if device.type == "cuda":
            state = zlib.crc32(torch.cuda.get_rng_state(device).numpy().tobytes(), state)
        states = async_ops.gather_numbers(torch.tensor(state, device=device), group)
        if not bool((states == state).all()):
            name = drawing[0] or type(module).__name__
            raise ConfigError(
                f"{name} draws numbers for one tensor on every rank of {group.name}, and the ranks' random number "
                "generators are in different states: call torch.manual_seed with the same number on them"
            )

    module.register_forward_pre_hook(check)


class StepAgreement:
    """Comparison of ranks that should be alike, once a step after the gradients are summed.

    Ranks of one tensor parallel group work on the same samples, so gradients of uncut parameters are the same. Ranks
    with the same parameters keep the same weights and buffers, also if a forward pass changes them in place. A
    gradient that is not finite on one rank is made so on all, because GradScaler decides on each rank.

    The module is this rank's part of the model. ``cut`` names the parameters that tensor parallelism cuts, and
    ``shares`` are the groups over which the optimizer's gradients are cut.
    """

    def __init__(
        self, module: nn.Module, mesh: ParallelMesh, cut: frozenset[str], shares: Sequence[Group]
    ) -> None:
        self._cut = cut
        tp = mesh.group("tp")
        self._shares = [group for group in shares if group.size > 1]
        self._same_samples = tp if tp.size > 1 and mesh.plan.tp_mode == "1d" else None
        self._pipeline = mesh.group("pp") if mesh.plan.pp > 1 else None
        self._parts = [*self._shares, *(g for g in (tp, mesh.group("pp")) if g.size > 1)]
        replicas = mesh.group("replicas")
        self._same_weights = [g for g in (replicas, self._same_samples) if g is not None and g.size > 1]
        groups = [*self._parts, *self._same_weights]
        self._is_alone = not groups or groups[0].backend == "fake"
        # Collected once: walking through a large model at every step would take longer than the comparison.
        self._places = [
            (f"{path}.{name}" if path else name, part, name)
            for path, part in module.named_modules()
            for name in (*part._parameters, *part._buffers)
        ]
        self._caches = {name for name, part, own in self._places if own in part._non_persistent_buffers_set}
        self._steps = 0
        self._pending: list[tuple[Tensor, ConfigError]] = []
        self._versions: dict[str, tuple[int, int]] = {}
        self._changed_by_stages: set[str] = set()
        self._equal_parts: set[str] | None = None
        self.settle()

    def settle(self) -> None:
        """Record the versions of weights and buffers: later changes are made by a forward pass."""
        if not self._is_alone:
            self._versions = _versions(self._watched())

    def note_equal_parts(self) -> None:
        """Record the parts of cut weights that are equal at the start (a collective)."""
        self._equal_parts = self._find_equal_parts()

    def accept_equal_parts(self) -> None:
        """Accept all equal parts, because a state has given the weights."""
        self._equal_parts = None

    @contextmanager
    def pipeline_pass(self) -> Iterator[None]:
        """Note the weights and buffers that a pipeline's stages change, once for each microbatch."""
        before = _versions(self._watched())
        yield
        changed = _versions(self._watched()).items() - before.items()
        self._changed_by_stages |= {name for name, _ in changed if name in before}

    @torch.no_grad()
    def check(self, gradients: Mapping[str, Tensor | None]) -> None:
        """Compare this step (a collective), with the optimizer's gradients by the parameters' names.

        Raises:
            ConfigError: The ranks have different gradients, weights, buffers or frozen parameters.
        """
        if self._is_alone:
            return
        self._steps += 1
        pending, self._pending = self._pending, []
        for is_apart, error in pending:
            if bool(is_apart):
                raise error
        present = {name: _real(local(g)) for name, g in gradients.items() if g is not None}
        self._spread_infinities(present)
        self._check_tensors()
        self._check_parts()
        if self._same_samples is not None:
            self._check_gradients(present, self._same_samples)

    def _check_gradients(self, gradients: Mapping[str, Tensor], group: Group) -> None:
        sizes = {name: p.numel() for name, p in self._parameters() if p.requires_grad}
        names = [name for name in sizes if name not in self._cut]
        if not names:
            return
        held = [gradients.get(name) for name in names]
        zero = torch.zeros((), dtype=torch.float64, device=self._device())
        sums = [zero if x is None else x.sum(dtype=_wide(x)).double() for x in held]
        norms = [zero if x is None else torch.linalg.vector_norm(x, dtype=_wide(x)).double() for x in held]
        own = torch.stack([*sums, *(x.square() for x in norms)])
        for share in self._shares:
            own = async_ops.gather_numbers(own, share).sum(0)
        of_all = async_ops.gather_numbers(own, group)
        (of_all, squares), (own, own_squares) = (
            of_all.unflatten(1, (2, -1)).unbind(1),
            own.unflatten(0, (2, -1)),
        )
        loose = max((_LOOSE.get(x.dtype, 5e-2) for x in held if x is not None), default=1e-6)
        largest = squares.amax(0).sqrt()
        lengths = largest.new_tensor([sizes[name] for name in names]).sqrt()
        # Gradients that are rounding errors of others may differ, because some kernels add in any order.
        allowed = loose * (largest + 1e-3 * squares.sum(1).amax().sqrt())
        # Comparisons with infinite numbers are false: the optimizer or its scaler skips such a step.
        apart = (squares.sqrt() - own_squares.sqrt()).abs() > allowed
        apart |= (of_all - own).abs() > allowed * lengths
        self._refuse(
            apart.any(),
            f"gradients differ between the ranks of {group.name}, which work on the same samples ({names[0]} and "
            "other uncut parameters): give them the same inputs and labels (DistributedSampler over the ranks of dp "
            "only), and the same seed by torch.manual_seed() if the model draws random numbers, as for dropout",
        )

    def _check_tensors(self) -> None:
        """Compare weights and buffers changed since the last step; at steps 1, 2, 4, ... all saved ones."""
        in_full = self._steps & (self._steps - 1) == 0
        watched, before = self._watched(), self._versions
        self._versions = _versions(watched)
        touched = [name for name, version in self._versions.items() if before.get(name, version) != version]
        changed = [name for name in watched if self._is_compared(name, before, in_full)]
        frozen = [name for name, p in self._parameters() if not p.requires_grad]
        device = self._device()
        if self._pipeline is not None:
            saved = sorted(self._changed_by_stages - self._caches)
            self._changed_by_stages.clear()
            own = torch.tensor(float(bool(saved)), dtype=torch.float64, device=device)
            self._refuse(
                async_ops.gather_numbers(own, self._pipeline).any(),
                f"forward changes {', '.join(saved[:3]) or 'tensors of another stage'} in place (running statistics, "
                "power iterations, max_norm, clamping), in a pipeline once for each microbatch instead of once a step: "
                "leave it out, use eval() for these modules, or use dp or tp instead of pp",
            )
        names = torch.tensor(
            [float(zlib.crc32(repr(x).encode())) for x in (changed, frozen)],
            dtype=torch.float64,
            device=device,
        )
        whole = _checksum([watched[name] for name in changed if name not in self._cut], device)
        cut = _checksum([watched[name] for name in changed if name in self._cut], device)
        numbers = torch.stack([*names, *whole, *cut])
        for group in self._same_weights:
            # Cut weights differ in a tensor parallel group; whole weights may differ there by rounding errors.
            count, loose = (4, 1e-4) if group is self._same_samples else (6, 1e-9)
            allowed = loose * numbers[[0, 1, 3, 3, 5, 5][:count]].abs()
            allowed[:2] = 0
            apart = (
                (async_ops.gather_numbers(numbers, group)[:, :count] - numbers[:count]).abs() > allowed
            ).any(0)
            self._refuse(
                apart[1],
                f"the ranks of {group.name} freeze different parameters; freeze the same ones on every rank, before "
                "parallelize()",
            )
            self._refuse(
                apart.any(),
                f"the ranks of {group.name} have different values of weights or buffers that should be alike: "
                f"{', '.join((touched or changed)[:3]) or 'on another rank'}. A forward pass that changes them in "
                "place (running statistics, codebooks, max_norm, clamping) sees only each rank's part of the batch: "
                "leave it out, use eval() for these modules, or sum over the ranks in it by torch.distributed",
            )

    def _find_equal_parts(self) -> set[str] | None:
        """Return the cut weights with equal parts on several ranks (a collective), except constants.

        None if parts are not compared.
        """
        parts = {name: local(p).detach() for name, p in self._parameters() if name in self._cut}
        if (
            self._is_alone
            or self._same_samples is None
            or any(x.is_meta for x in parts.values())
            or not parts
        ):
            return None
        nothing = torch.full((), torch.nan, dtype=torch.float64, device=self._device())
        sums = [
            nothing if not x.numel() or x.min() == x.max() else x.sum(dtype=torch.float64)
            for x in map(_real, parts.values())
        ]
        own = torch.stack(sums)
        is_equal = (async_ops.gather_numbers(own, self._same_samples) == own).sum(0) > 1
        return {name for name, equal in zip(parts, is_equal.tolist(), strict=True) if equal}

    def _check_parts(self) -> None:
        """Refuse a first step with parts of weights that all ranks drew alike."""
        if self._equal_parts is None:
            return
        before, self._equal_parts = self._equal_parts, None
        drawn = sorted((self._find_equal_parts() or set()) - before)
        if drawn:
            raise ConfigError(
                f"{drawn[0]} has the same values on several ranks of tp, which hold different parts of it, as if drawn "
                "by torch.nn.init on each: initialize the model before parallelize(), or make it on the device meta "
                "and pass initialize="
            )

    def _is_compared(self, name: str, before: Mapping[str, tuple[int, int]], in_full: bool) -> bool:
        version = self._versions[name]
        was_changed = before.get(name, version) != version
        if name in self._caches:  # a replaced cache holds tensors of this rank's inputs
            return was_changed and before[name][0] == version[0]
        return in_full or was_changed

    def _spread_infinities(self, gradients: Mapping[str, Tensor]) -> None:
        if not self._parts:
            return
        held = [x for x in gradients.values() if x.numel()]
        norms = torch._foreach_norm(held) if held else ()
        bad = sum((~x.isfinite()).double() for x in norms) + torch.zeros(1, device=self._device())
        for group in self._parts:
            bad = async_ops.gather_numbers(bad.sum(), group).sum()
        for x in held[:1]:
            first = x.view(-1)[:1] if x.is_contiguous() else x[(slice(0, 1),) * x.dim()]
            first.copy_(torch.where(bad.to(x.device) > 0, torch.full_like(first, torch.nan), first))

    def _watched(self) -> dict[str, Tensor]:
        """Return weights and buffers that are whole or cut on this rank, by name."""
        buffers = {name: x for name, part, own in self._places if (x := part._buffers.get(own)) is not None}
        # Parameters of other classes are shards, or managed and stored outside of the module.
        return {name: p for name, p in self._parameters() if type(p) is nn.Parameter} | buffers

    def _parameters(self) -> list[tuple[str, nn.Parameter]]:
        return [(name, p) for name, part, own in self._places if (p := part._parameters.get(own)) is not None]

    def _refuse(self, is_apart: Tensor, message: str) -> None:
        """Raise at once; on a GPU after the first steps at the next step, so that the host need not wait."""
        if is_apart.device.type != "cpu" and self._steps > _WAITED_STEPS:
            self._pending.append((is_apart, ConfigError(message)))
        elif bool(is_apart):
            raise ConfigError(message)

    def _device(self) -> torch.device:
        return next((local(p).device for _, p in self._parameters()), torch.device("cpu"))


def _versions(tensors: Mapping[str, Tensor]) -> dict[str, tuple[int, int]]:
    """Return numbers by name that differ after a change in place or a replacement."""
    return {name: (id(x), x._version) for name, x in tensors.items()}


def _real(x: Tensor) -> Tensor:
    return torch.view_as_real(x) if x.is_complex() else x


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _checksum(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Return two numbers that distinguish lists of tensors."""
    total, length = torch.zeros(2, dtype=torch.float64, device=device)
    for number, x in enumerate(tensors):
        values = torch.nan_to_num(_real(x.detach()))
        if not values.is_floating_point():
            values = values.float()
        weight = 1 + (number * 0.6180339887) % 1
        total = total + weight * values.sum(dtype=_wide(values)).double().to(device)
        length = length + weight * torch.linalg.vector_norm(values, dtype=_wide(values)).double().to(device)
    return [total, length]
