"""Several processes that fold one target together: ``fastfold infer --parallel dap=4`` under torchrun.

Rank 0 is the process that a person sees. It reads the inputs and the weights, and writes the results; the
others wait for what it sends: a network, then for each target the features of every cycle. Where memory is short,
MSA and pair representation are cut over the processes (:func:`fastfold.parallel.alphafold.shard`). Rank 0 plans for
all: each process has a part of the machine, and every one makes the same plan of the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from ml_collections import ConfigDict
from torch import Tensor

from fastfold.errors import ConfigError, FastFoldError
from fastfold.evoformer.model import AlphaFold
from fastfold.evoformer.precision import Precision, precision_of, set_precision
from fastfold.inference.error_messages import is_out_of_memory
from fastfold.inference.folding.network import NetworkPasses, OnCycle, run_network
from fastfold.inference.output.recycle_state import RecycleState
from fastfold.inference.planning.available_memory import FoldMemory, offload_buffers
from fastfold.inference.planning.planner import FoldPlan
from fastfold.memory import HostBuffers
from fastfold.parallel import (
    DistributedContext,
    ParallelPlan,
    alphafold,
    init_distributed,
    started_processes,
)

FeatureFunction = Callable[[int, int], Mapping[str, Tensor]]


_MEMORY = "out of memory"
"""Why processes part that are to meet again."""


class DistributedFoldError(FastFoldError):
    """A process failed in the middle of a target: the others cannot go on to the next one."""


class _Abandoned(Exception):
    """Rank 0 gave a target up before all of its features were there, because of ``error``."""

    def __init__(self, error: Exception) -> None:
        super().__init__(error)
        self.error = error


@dataclass
class DistributedFolder:
    """Folds with several processes, of which rank 0 reads and writes.

    Attributes:
        context: The processes, one DAP group.
    """

    context: DistributedContext
    _networks: list[AlphaFold] = field(default_factory=list)
    _host: HostBuffers = field(default_factory=HostBuffers)

    @property
    def ranks(self) -> int:
        """How many processes fold one target."""
        return self.context.size

    def memory(self, *, host_memory: int | None, offload_dir: Path | None) -> FoldMemory:
        """On rank 0: the least that one of the processes has for a fold.

        Args:
            host_memory: As of :meth:`FoldMemory.here`; of each machine.
            offload_dir: As of :meth:`FoldMemory.here`.

        Raises:
            ConfigError: The folder cannot be used in one of the processes.
        """
        where = (host_memory, offload_dir)
        self._send("memory", where)
        return self._least(*where)

    def run(
        self,
        model: AlphaFold,
        features: FeatureFunction,
        passes: NetworkPasses,
        on_cycle: OnCycle | None,
        *,
        plan: FoldPlan | None = None,
        state: RecycleState | None = None,
    ) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """On rank 0: :func:`fastfold.inference.folding.network.run_network` by all processes.

        Each process keeps the state of what it holds; those on other machines too if the folder is there.

        Raises:
            MemoryError: The memory of one of the processes ended; all of them are ready for a smaller plan.
            DistributedFoldError: This process failed where the others could not notice.
        """

        def sent(cycle: int, member: int) -> Mapping[str, Tensor]:
            try:
                found = features(cycle, member)
            except Exception as error:
                self._send("abandon", None)
                raise _Abandoned(error) from error
            self._send("features", dict(found))
            return found

        try:
            if not any(model is known for known in self._networks):
                self._share(model)
            number = next(i for i, known in enumerate(self._networks) if model is known)
            other = None if state is None else state.of_rank()
            self._send("fold", (number, passes, None if plan is None else plan.request, other))
            if state is not None:
                state.gather = self.context.gather
            with self._until_parted():
                return run_network(model, sent, passes, on_cycle, plan=plan, state=state)
        except _Abandoned as abandoned:
            raise abandoned.error from None
        except Exception as error:
            if self._met_again(error):
                raise MemoryError("of one of the processes") from None
            raise DistributedFoldError(
                f"{type(error).__name__}: {error}. The other processes are in the middle of this target, so the run "
                "ends here; start it again to go on with the next one"
            ) from error

    def worker_loop(self) -> None:
        """On the other ranks: fold what rank 0 sends until it is done.

        Where the memory of a process ends, all of them part and meet again, and rank 0 sends the target anew.
        """
        going = True
        while going:
            try:
                going = self._follow(*self._receive())
            except Exception as error:
                if not self._met_again(error):
                    raise

    def _follow(self, message: str, content: Any) -> bool:
        """Do what rank 0 says; whether there is more to come."""
        if message == "network":
            self._take(*content)
        elif message == "fold":
            number, passes, request, of_rank = content
            model = self._networks[number]
            try:
                with suppress(_Abandoned):
                    plan = None if request is None else request.plan(self._host)
                    state = None if of_rank is None else of_rank(self.context.rank, self.context.gather)
                    model.to(self.context.device)
                    with self._until_parted():
                        run_network(model, self._features, passes, None, plan=plan, state=state)
            finally:
                model.to("cpu")
        elif message == "memory":
            with suppress(ConfigError):  # which rank 0 raises too
                self._least(*content)
        return message != "stop"

    def _until_parted(self) -> AbstractContextManager[None]:
        """Inside, wait on a GPU for no process whose memory has ended."""
        meeting = self.context.meeting
        return nullcontext() if meeting is None else meeting.ended_by(_MEMORY)

    def _met_again(self, error: Exception) -> bool:
        """Whether the memory of one of the processes ended, which then have met again."""
        meeting = self.context.meeting
        if meeting is None:
            return False
        if is_out_of_memory(error):
            meeting.say_why(_MEMORY)
        elif meeting.why() != _MEMORY:
            return False
        self.context.meet_again()
        return True

    def stop(self) -> None:
        """On rank 0: let the others end."""
        self._send("stop", None)

    def _least(self, host_memory: int | None, offload_dir: Path | None) -> FoldMemory:
        """See :meth:`memory`; on every rank, which keeps buffers of that size for what leaves its device."""
        own: FoldMemory | ConfigError
        try:
            own = FoldMemory.here(
                self.context.device,
                host_memory=host_memory,
                offload_dir=offload_dir,
                processes=self.context.local_size,
            )
        except ConfigError as error:
            own = error
        found = self.context.gather(own)
        for one in found:
            if isinstance(one, ConfigError):
                raise one
        least = FoldMemory(*(min(getattr(one, name) for one in found) for name in ("free", "host", "disk")))
        self._host = offload_buffers(least.host, offload_dir)
        return least

    def _features(self, cycle: int, member: int) -> Mapping[str, Tensor]:
        message, content = self._receive()
        if message != "features":
            raise _Abandoned(RuntimeError(message))
        found: Mapping[str, Tensor] = content
        return found

    def _share(self, model: AlphaFold) -> None:
        """Send a network, and make this process' one parallel."""
        self._send("network", (model.config.to_dict(), precision_of(model)))
        self._add(model)

    def _take(self, config: dict[str, Any], precision: Precision) -> None:
        self._add(set_precision(AlphaFold(ConfigDict(config)), precision).to(self.context.device).eval())

    def _add(self, model: AlphaFold) -> None:
        """Give a network the first process' weights and make it parallel."""
        with torch.no_grad():
            for tensor in model.state_dict().values():
                dist.broadcast(tensor, 0)
        alphafold.shard(model, self.context.mesh)
        self._networks.append(model)

    def _send(self, message: str, content: Any) -> None:
        dist.broadcast_object_list([message, content], 0, group=self.context.cpu_group)

    def _receive(self) -> tuple[str, Any]:
        found: list[Any] = [None, None]
        dist.broadcast_object_list(found, 0, group=self.context.cpu_group)
        return found[0], found[1]


def parse_parallel(text: str | None) -> ParallelPlan:
    """The plan of ``--parallel dap=4``; of nothing, one process.

    Raises:
        ConfigError: Not a plan for folding, or not as many processes as it needs were started.
    """
    started = started_processes()
    name, _, number = (text or "dap=1").partition("=")
    if name != "dap" or not number.isascii() or not number.isdigit():
        raise ConfigError(
            f"--parallel {text}: a fold is spread by dynamic axial parallelism alone; give --parallel dap=4 for "
            "four processes"
        )
    plan = ParallelPlan(dap=int(number))
    if plan.ranks != started:
        started_as = f"{started} processes were started" if started > 1 else "one process was started"
        raise ConfigError(
            f"--parallel dap={plan.dap} needs {plan.dap} processes, but {started_as}; run torchrun "
            f"--nproc-per-node {plan.dap} -m fastfold infer --parallel dap={plan.dap} ..."
        )
    return plan


@contextmanager
def distributed_folder(text: str | None, device: torch.device) -> Iterator[DistributedFolder | None]:
    """The processes that torchrun started for ``--parallel``; None for one alone.

    Args:
        text: ``dap=<number>``, or None.
        device: Where to compute; on CUDA each process takes the GPU of its local rank.

    Raises:
        ConfigError: See :func:`parse_parallel`, or there are fewer GPUs than processes.
    """
    plan = parse_parallel(text)
    if plan.ranks == 1:
        yield None
        return
    # The others wait while rank 0 reads alignments and writes results, however long that takes.
    with init_distributed(plan, device, message_timeout=timedelta(days=7)) as context:
        yield DistributedFolder(context)
