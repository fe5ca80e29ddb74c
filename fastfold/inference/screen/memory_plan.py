"""Distribution of a machine's memory among workers, and the memory of a target."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial

from fastfold.data.targets import Target
from fastfold.evoformer.precision import element_size
from fastfold.inference.config import InferConfig
from fastfold.inference.models import Network, suitable
from fastfold.inference.network_settings import apply_settings
from fastfold.inference.planning.planner import Planner

PROCESS_BYTES = 512 << 20  #: Memory of an idle worker: Python, PyTorch and its cache


@dataclass(frozen=True)
class MemoryPlan:
    """Distribution of the host's memory.

    Every worker has :func:`worker_bytes` in addition to its folds. The budget for each fold is the user's; None to
    share the free memory. ``limit`` is the largest number of bytes of a fold.
    """

    per_worker: int = PROCESS_BYTES
    budget: int | None = None
    limit: int | None = None

    def total(self, memory: int, workers: int) -> int:
        """Return the bytes for all folds on a machine, from its free memory before its workers started."""
        return max(1, memory * 9 // 10 - workers * self.per_worker)

    def share(self, total: int, workers: int) -> int:
        """Return the bytes that every fold gets at least."""
        share = max(1, total // workers) if self.budget is None else self.budget
        return share if self.limit is None else min(share, self.limit)

    def grant(self, smallest: int, total: int, workers: int) -> int:
        """Return the bytes for a fold: its share, or its smallest memory if that is more and available."""
        share = self.share(total, workers)
        most = min(x for x in (self.budget or total, self.limit) if x is not None)
        return max(share, min(smallest, most))


@dataclass
class TargetMemory:
    """Memory of a target's smallest plan on the CPU, with a number of templates; None for the networks' maximum."""

    networks: Sequence[Network]
    config: InferConfig
    templates: int | None = 0

    def __post_init__(self) -> None:
        size = element_size(self.config.precision)
        self._smallest = {}
        for network in self.networks:
            config = apply_settings(self.config, network.info.config)
            planner = Planner(config, size, "cpu", parameters=network.info.parameters * size)
            # With the network's maximum of rows, because the alignments are not known yet.
            self._smallest[network.name] = cache(partial(planner.smallest, templates=self.templates))

    def smallest(self, target: Target) -> int:
        """Return the bytes without which no suitable network can fold a target."""
        networks = suitable(self.networks, target)
        return max(self._smallest[network.name](target.num_residues) for network in networks)


def worker_bytes(networks: Sequence[Network], precision: str | None) -> int:
    """Return the bytes of a worker without its folds: its process, and the parameters of all networks."""
    size = element_size(precision)
    # While a network is loaded, its file's parameters are in memory in float32.
    most = max((network.info.parameters * 4 for network in networks), default=0)
    return PROCESS_BYTES + most + sum(network.info.parameters * size for network in networks)
