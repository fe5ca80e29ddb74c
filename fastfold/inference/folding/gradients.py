"""Gradients of a network with respect to its inputs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fastfold.evoformer.execution import PolicyModule
from fastfold.evoformer.model import AlphaFold
from fastfold.inference.folding.saved_inputs import SavedInputs
from fastfold.parallel.comm.collectives import all_reduce
from fastfold.parallel.comm.groups import Group

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

    @classmethod
    def of_length(
        cls,
        residues: int,
        templates: tuple[int, ...] | None = None,
        *,
        recompute: bool | None = None,
        ranks: int = 1,
    ) -> GradientPolicy:
        """Return the policy for a target without host memory.

        ``recompute`` is None to recompute from :data:`CHECKPOINTED` residues on. ``ranks`` processes share the target.
        """
        pairs = max(_SMALLEST_BLOCK, residues**2 // (ranks * _BLOCKS))
        return cls(residues >= CHECKPOINTED if recompute is None else recompute, pairs, templates=templates)

    def set(self, model: AlphaFold) -> None:
        """Set how the modules outside the trunk's blocks record gradients, without the stop of orientations."""
        model.structure_module.stop_rotation_gradient = False
        for module in model.modules():
            if isinstance(module, PolicyModule) and module.operator in _IN_ROWS:
                module.policy = replace(module.policy, templates=self.templates)
                if self.recompute:
                    blocks = self.pairs * _CHANNELS
                    module.policy = replace(
                        module.policy, block_elements=blocks, recompute=True, lazy_logits=True
                    )


@dataclass(frozen=True)
class GradientRun:
    """Passes with gradients by a policy.

    Block inputs wait in ``saved`` on the host; None to leave them on the device. ``group`` are the ranks that share the
    target.
    """

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
    """Let a network pass gradients to its inputs alone, without the stop of orientations; undo it at the end.

    ``dropout`` is that of training, drawn from the seed. Without a run, the policy is that of the number of residues.
    """
    run = run or GradientRun(GradientPolicy.of_length(residues))
    training = model.training
    needed = [p for p in model.parameters() if p.requires_grad]
    devices = [p.device for p in model.parameters() if p.device.type == "cuda"][:1]
    before = [(module, module.policy) for module in model.modules() if isinstance(module, PolicyModule)]
    for parameter in needed:
        parameter.requires_grad_(False)
    run.policy.set(model)
    model.set_checkpointing(run.policy.recompute)
    model.train(dropout)
    try:
        with torch.random.fork_rng(devices), nullcontext() if run.saved is None else run.saved.hooks():
            torch.manual_seed(seed)
            yield
    finally:
        model.structure_module.stop_rotation_gradient = True
        for module, own in before:
            module.policy = own
        model.set_checkpointing(False)
        model.train(training)
        for parameter in needed:
            parameter.requires_grad_(True)
