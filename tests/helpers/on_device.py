"""What a test makes by PyTorch's functions lies on a device, whatever the test says: the same bodies run on GPUs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors


class OnDevice(TorchFunctionMode):
    """Tensors that are made without a device are made on the host, with the host's numbers, and moved to a device.

    ``torch.set_default_device`` refuses generators of the host, by which tests draw the same numbers on every rank.

    Args:
        device: Where to.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        made = func(*args, **kwargs)
        makes = func in _device_constructors() or func is torch.from_numpy
        if not makes or kwargs.get("device") is not None or not isinstance(made, Tensor):
            return made
        return made.detach().to(self._device).requires_grad_(made.requires_grad)
