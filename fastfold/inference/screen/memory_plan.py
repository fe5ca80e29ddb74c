"""How the memory of a machine is shared out among workers, and how much of it a target needs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fastfold.data.targets import Target
from fastfold.inference.config import InferConfig
from fastfold.inference.models import Network, suitable
from fastfold.inference.network_settings import apply_settings
from fastfold.inference.planning.planner import Planner

PROCESS_BYTES = 512 << 20
"""Of a worker that does nothing: Python, PyTorch and what it keeps for later."""


@dataclass(frozen=True)
class MemoryPlan:
    """Shares out the host's memory.

    Attributes:
        per_worker: Bytes that every worker takes besides its folds: see :func:`worker_bytes`.
        budget: Bytes for each fold, where a person has decided; None to share what there is.
        limit: Bytes that a fold may take at most, whatever there is; None for no such limit.
    """

    per_worker: int = PROCESS_BYTES
    budget: int | None = None
    limit: int | None = None

    def total(self, memory: int, workers: int) -> int:
        """Bytes of a machine for all folds together, of those that were free before its workers came."""
        return max(1, memory * 9 // 10 - workers * self.per_worker)

    def share(self, total: int, workers: int) -> int:
        """Bytes that every fold gets at least."""
        share = max(1, total // workers) if self.budget is None else self.budget
        return share if self.limit is None else min(share, self.limit)

    def grant(self, smallest: int, total: int, workers: int) -> int:
        """Bytes for a fold: its share, or what it needs if that is more and can be had.

        Args:
            smallest: Bytes without which it cannot be done.
            total: See :meth:`total`.
            workers: Of the machine.
        """
        share = self.share(total, workers)
        most = min(x for x in (self.budget or total, self.limit) if x is not None)
        return max(share, min(smallest, most))


@dataclass
class TargetMemory:
    """What the smallest plan of a target takes, on the CPU.

    Attributes:
        networks: Those of the run.
        config: How targets are folded.
        templates: Shown to the networks; None for as many as they take.
    """

    networks: Sequence[Network]
    config: InferConfig
    templates: int | None = 0

    def __post_init__(self) -> None:
        size = 2 if self.config.precision == "bf16" else 4
        self._planners = {
            network.name: Planner(
                apply_settings(self.config, network.info.config),
                size,
                "cpu",
                parameters=network.info.parameters * size,
            )
            for network in self.networks
        }
        self._known: dict[tuple[str, int], int] = {}

    def smallest(self, target: Target) -> int:
        """Bytes without which a target cannot be folded by one of the networks that suit it."""
        return max(self._of(network.name, target.num_residues) for network in suitable(self.networks, target))

    def _of(self, name: str, residues: int) -> int:
        if (name, residues) not in self._known:
            # With as many rows as the network takes: what the alignments hold is not known yet.
            self._known[name, residues] = self._planners[name].smallest(residues, templates=self.templates)
        return self._known[name, residues]


def worker_bytes(networks: Sequence[Network], precision: str | None) -> int:
    """Bytes that a worker takes besides its folds: its process, and the parameters of all networks."""
    size = 2 if precision == "bf16" else 4
    # While a network is loaded, its file's numbers are there in float32.
    most = max((network.info.parameters * 4 for network in networks), default=0)
    return PROCESS_BYTES + most + sum(network.info.parameters * size for network in networks)
