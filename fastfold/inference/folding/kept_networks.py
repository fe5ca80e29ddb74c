"""Networks that stay on a GPU between predictions, because moving one takes as long as a pass of a short protein."""

from __future__ import annotations

from weakref import WeakKeyDictionary

import torch
from torch import nn

from fastfold.inference.planning.planner import parameter_bytes


class KeptNetworks:
    """Networks that a run has moved to its device, for one thread.

    Example:
        >>> import torch
        >>> from fastfold.inference.folding.kept_networks import KeptNetworks
        >>> kept, network = KeptNetworks(), torch.nn.Linear(3, 3)
        >>> kept.bring(network, torch.device("cpu"))  # is there already
        >>> kept.bytes_besides()
        0
    """

    def __init__(self) -> None:
        self._homes: WeakKeyDictionary[nn.Module, torch.device] = WeakKeyDictionary()

    def bytes_besides(self, *networks: nn.Module) -> int:
        """Return the bytes of the networks that were moved, except some."""
        return sum(parameter_bytes(one) for one in self._homes if one not in networks)

    def bring(self, network: nn.Module, device: torch.device) -> None:
        """Move a network to a device, where it stays."""
        home = next(network.parameters()).device
        network.to(device)
        if next(network.parameters()).device != home:
            self._homes.setdefault(network, home)

    def send_home(self, *, but: nn.Module | None = None) -> None:
        """Move the networks back to where they came from, except one."""
        for network in [one for one in self._homes if one is not but]:
            network.to(self._homes.pop(network))
