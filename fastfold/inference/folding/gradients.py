"""Gradients of a network with respect to its inputs, and inputs of recomputed blocks on the host."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from fastfold.evoformer.execution import (
    CallSettings,
    ExecutionPolicy,
    PolicyModule,
    calling,
    dropout_generator,
)
from fastfold.evoformer.model import AlphaFold
from fastfold.memory.devices.device import CudaDevice, Device
from fastfold.memory.devices.tiers import Tier
from fastfold.memory.gemini.access_trace import SpanKey
from fastfold.memory.gemini.activations import SavedTensors
from fastfold.parallel.comm.collectives import all_reduce
from fastfold.parallel.comm.groups import Group


class SavedInputs:
    """Manager of large saved tensors: the first ones of a pass wait on the host, the others stay.

    The backward pass needs the first ones last. Each returns while the block after it is recomputed. Tensors of
    ``smallest`` bytes and more take at most ``host`` bytes there, in the memory ``tier``, by default pinned for a GPU.
    """

    def __init__(
        self, host: int, smallest: int, device: Device | torch.device, tier: Tier | None = None
    ) -> None:
        self._host, self._smallest = host, smallest
        if isinstance(device, torch.device):
            device = CudaDevice(0, device) if device.type == "cuda" else Device(0, device)
        self.tier = tier or Tier(pinned=device.device.type == "cuda")
        self.saved = SavedTensors(device, self.tier, self)
        self._away: list[SpanKey] = []
        self._next: dict[SpanKey, int] = {}

    def hooks(self) -> saved_tensors_hooks:
        """Return the context of a forward pass whose saved tensors are managed."""
        self._away, self._next = [], {}
        return self.saved.hooks()

    @property
    def peak(self) -> int:
        """Largest number of bytes on the host."""
        return self.tier.peak

    # The decisions that SavedTensors asks for.

    def new_call(self) -> int:
        """Return the number of a block's call; blocks are recomputed by the network."""
        return 0

    def stays(self, key: SpanKey, size: int) -> bool:
        """Return True if a tensor is small, or the host is full."""
        if size < self._smallest or self.tier.used + size > self._host:
            return True
        self._away.append(key)
        return False

    def resize(self, key: SpanKey, size: int) -> None:
        """Do nothing, because sizes are those of the tensors."""

    def used(self, key: SpanKey) -> None:
        """Begin to bring back the tensor that the backward pass uses after this one."""
        if key in self._away:
            before = self._away[: self._away.index(key)]
            self._next = dict.fromkeys(before[-1:], 1 << 62)
            self.saved.begin_due()

    def due(self) -> Mapping[SpanKey, int]:
        """Return the tensor to bring back now."""
        tensors, self._next = self._next, {}
        return tensors


CHECKPOINTED = 128  #: Residues from which activations are recomputed in the backward pass

_BLOCKS, _SMALLEST_BLOCK = 16, 1 << 17
"""Blocks of rows of the pair outside the trunk's blocks, and the fewest pairs of residues that each has."""

_CHANNELS = 128

_IN_ROWS = ("embedding", "templates", "structure module", "heads")
"""Kinds of modules that work in blocks of rows; blocks of the trunk are recomputed whole."""


@dataclass(frozen=True)
class GradientPolicy:
    """How a pass records gradients."""

    recompute: bool  #: True to keep only the inputs of the trunk's blocks and of blocks of rows outside it
    pairs: int = _SMALLEST_BLOCK  #: Pairs of residues of a block of rows
    host: int = 0  #: Bytes of the host's memory for inputs of the trunk's blocks
    #: Indices of the templates that a monomer network reads; None for all
    templates: tuple[int, ...] | None = None
    keep_projections: bool = False  #: :attr:`ExecutionPolicy.keep_projections` of the trunk's blocks

    @classmethod
    def of_length(
        cls,
        residues: int,
        templates: tuple[int, ...] | None = None,
        *,
        recompute: bool | None = None,
        keep_projections: bool = False,
        ranks: int = 1,
    ) -> GradientPolicy:
        """Return the policy of a length without host memory; ``recompute`` is None to use :data:`CHECKPOINTED`."""
        pairs = max(_SMALLEST_BLOCK, residues**2 // (ranks * _BLOCKS))
        recompute = residues >= CHECKPOINTED if recompute is None else recompute
        return cls(recompute, pairs, templates=templates, keep_projections=keep_projections)

    def policies(self, model: AlphaFold) -> dict[PolicyModule, ExecutionPolicy]:
        """Return the policies of the network's modules."""
        trunk = ExecutionPolicy(keep_projections=self.keep_projections)
        policy = ExecutionPolicy(templates=self.templates)
        if self.recompute:
            blocks = self.pairs * _CHANNELS
            policy = replace(policy, block_elements=blocks, recompute=True, lazy_logits=True)
        return {
            module: policy if module.operator in _IN_ROWS else trunk
            for module in model.modules()
            if isinstance(module, PolicyModule)
        }


@dataclass(frozen=True)
class GradientRun:
    """Passes with gradients by a policy, with ``saved`` block inputs on the host, for a ``group`` of ranks."""

    policy: GradientPolicy
    saved: SavedInputs | None = None
    group: Group | None = None

    def mean(self, gradient: Tensor) -> Tensor:
        """Return the gradient of one loss from those of all ranks, which computed it together."""
        if self.group is None:
            return gradient
        return all_reduce(gradient, self.group) / self.group.size


@contextmanager
def differentiable(
    model: AlphaFold, residues: int, seed: int, dropout: bool, run: GradientRun | None = None
) -> Iterator[None]:
    """Let a network pass gradients to its inputs alone, without the stop of orientations, with dropout by the seed."""
    run = run or GradientRun(GradientPolicy.of_length(residues))
    device = next(model.parameters()).device
    generator = dropout_generator(device, seed) if dropout else None
    settings = CallSettings(
        run.policy.policies(model),
        training=dropout,
        generator=generator,
        checkpointing=run.policy.recompute,
        stop_rotation_gradient=False,
    )
    hooks = nullcontext() if run.saved is None else run.saved.hooks()
    with _frozen(model), hooks, calling(settings):
        yield


_frozen_lock = threading.Lock()
_frozen_parameters: WeakKeyDictionary[AlphaFold, tuple[int, list[nn.Parameter]]] = WeakKeyDictionary()
"""Number of calls that a network is frozen for, and the parameters that get gradients otherwise."""


@contextmanager
def _frozen(model: AlphaFold) -> Iterator[None]:
    """Record no gradients of parameters until the last of all calls in this context ends."""
    with _frozen_lock:
        calls, needed = _frozen_parameters.get(model, (0, []))
        needed = needed or [p for p in model.parameters() if p.requires_grad]
        _frozen_parameters[model] = calls + 1, needed
        for parameter in needed:
            parameter.requires_grad_(False)
    try:
        yield
    finally:
        with _frozen_lock:
            calls, needed = _frozen_parameters.pop(model)
            if calls > 1:
                _frozen_parameters[model] = calls - 1, needed
            else:
                for parameter in needed:
                    parameter.requires_grad_(True)
