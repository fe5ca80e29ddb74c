"""Gradients of a network with respect to its inputs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from fastfold.evoformer.model import AlphaFold

_CHECKPOINTED = 128
"""Residues from which activations are recomputed in the backward pass."""


@contextmanager
def differentiable(model: AlphaFold, residues: int, seed: int, dropout: bool) -> Iterator[None]:
    """Let a network pass gradients to its inputs alone, without the stop of orientations; undo it at the end."""
    training = model.training
    needed = [p for p in model.parameters() if p.requires_grad]
    devices = [p.device for p in model.parameters() if p.device.type == "cuda"][:1]
    module = model.structure_module
    for parameter in needed:
        parameter.requires_grad_(False)
    module.stop_rotation_gradient = False
    model.set_checkpointing(residues >= _CHECKPOINTED)
    model.train(dropout)
    try:
        with torch.random.fork_rng(devices):
            torch.manual_seed(seed)
            yield
    finally:
        module.stop_rotation_gradient = True
        model.set_checkpointing(False)
        model.train(training)
        for parameter in needed:
            parameter.requires_grad_(True)
