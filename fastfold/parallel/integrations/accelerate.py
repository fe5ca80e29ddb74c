"""Parallel models in accelerate's training loops."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastfold.errors import ConfigError
from fastfold.parallel.integrations import check_samples
from fastfold.parallel.parallel_model import Parallel


def adopt_accelerator(accelerator: Any, model: Parallel) -> None:
    """Make an ``accelerate.Accelerator`` train a parallel model.

    ``accelerator.prepare()`` leaves the model unchanged, and ``accelerator.clip_grad_norm_()`` clips the gradient of
    the whole model.

    The accelerator trains only this model.

    Raises:
        ConfigError: The accelerator has another engine (DeepSpeed, FSDP), or the plan has ranks that work on the same
            samples.
    """
    kind = str(getattr(accelerator.distributed_type, "value", accelerator.distributed_type))
    if kind in ("DEEPSPEED", "FSDP", "MEGATRON_LM", "XLA"):
        raise ConfigError(f"accelerate runs {kind}, and the model has a plan ({model.plan}): use one of them")
    check_samples(model.plan, "accelerate")

    def clip_grad_norm_(parameters: Any, max_norm: float, norm_type: float = 2) -> Tensor:
        if norm_type != 2:
            raise ConfigError(
                f"clip_grad_norm_() of a parallel model: expected norm_type 2, found {norm_type}"
            )
        accelerator.unscale_gradients()
        return torch.tensor(model.clip_grad_norm_(max_norm))

    accelerator.clip_grad_norm_ = clip_grad_norm_
