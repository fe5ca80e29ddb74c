"""Settings of Gemini, and the device and host memory that they select."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from fastfold.errors import ConfigError
from fastfold.memory.devices.device import CudaDevice, Device
from fastfold.memory.devices.simulated import SimulatedDevice
from fastfold.memory.devices.tiers import NvmeTier, Tier
from fastfold.utils.units import parse_bytes

POLICIES = ("auto", "cuda", "cpu", "nvme")


@dataclass(frozen=True)
class GeminiConfig:
    """Settings of :class:`fastfold.memory.Gemini`.

    Raises:
        ConfigError: The policy or the budget is unknown.

    Example:
        >>> import torch
        >>> from fastfold import Gemini, GeminiConfig
        >>> config = GeminiConfig(budget="1MiB", policy="nvme", nvme_folder=".", device="cpu")
        >>> config.budget_bytes
        1048576
        >>> model = torch.nn.Linear(8, 4)
        >>> manager = Gemini(model, config=config)
        >>> with manager.device.running(), torch.no_grad():
        ...     model(torch.ones(3, 8)).shape
        torch.Size([3, 4])
        >>> manager.release()
    """

    #: Bytes on the device for chunks and activations together, for example ``"20GiB"``
    budget: str | int = "16GiB"
    #: ``"auto"``: parameters on the host, and on the device as planned. ``"cpu"``: the same, but evicted after each
    #: use. ``"nvme"``: as ``auto``, in memory-mapped files instead of the host's memory. ``"cuda"``: all on the device;
    #: a budget smaller than parameters, gradients and optimizer states together is refused.
    policy: str = "auto"
    #: Device of the model; None for a GPU if there is one, otherwise a simulated device of that budget
    device: Device | torch.device | str | None = None
    #: Folder for ``"nvme"``; None for the system's folder of temporary files. One file there holds parameters,
    #: gradients and optimizer states; its space is reserved at the start.
    nvme_folder: str | os.PathLike[str] | None = None
    lookahead: int = 2  #: Largest number of operators by which a load may precede its use
    #: Process group of data parallelism. All ranks start from the first rank's parameters and buffers, and
    #: :meth:`~fastfold.memory.Gemini.step` averages gradients. Its backend must support the tier of the gradients: the
    #: host, or with ``"cuda"`` the device.
    group: dist.ProcessGroup | None = None
    #: Process group, on the host, whose ranks make equal plans; None for ``group``. All its ranks call
    #: :meth:`~fastfold.memory.Gemini.step` together.
    statistics: dist.ProcessGroup | None = None
    #: Each rank of ``group`` keeps the optimizer's states of its share of the parameters only (ZeRO stage 1).
    #: :meth:`~fastfold.memory.Gemini.state_dict` is then a collective.
    shard: bool = False
    #: Plan saved tensors too: those over the budget are offloaded until the backward pass. Without effect with
    #: ``"cuda"``.
    activations: bool = True
    #: Modules that may be recomputed in the backward pass instead, such as the blocks of a network. The plan decides
    #: for each call. The modules must not use activation checkpointing themselves.
    recompute: Iterable[nn.Module] = ()
    #: On a GPU, limit PyTorch's allocator to the budget until :meth:`~fastfold.memory.Gemini.release`. An allocation
    #: over it raises ``torch.OutOfMemoryError`` (:meth:`fastfold.memory.CudaDevice.enforce`). Otherwise only the plans
    #: keep to the budget, if steps repeat as recorded. A simulated device keeps to it in every step that it counts.
    hard_budget: bool = False

    def __post_init__(self) -> None:
        if self.policy not in POLICIES:
            raise ConfigError(f"unknown memory policy {self.policy!r}; choose one of {', '.join(POLICIES)}")
        parse_bytes(self.budget)

    @property
    def budget_bytes(self) -> int:
        """Budget in bytes."""
        return parse_bytes(self.budget)

    def open_device(self) -> Device:
        """Return the device of the model."""
        if isinstance(self.device, Device):
            return self.device
        device = torch.device(self.device or ("cuda" if torch.cuda.is_available() else "cpu"))
        budget = self.budget_bytes
        return CudaDevice(budget, device) if device.type == "cuda" else SimulatedDevice(budget)

    def open_host(self, device: Device) -> Tier:
        """Return the memory that holds parameters while they are not on the device."""
        if self.policy == "cuda":
            return device
        return NvmeTier(self.nvme_folder) if self.policy == "nvme" else Tier(device.device.type == "cuda")
