"""Several processes that fold one target together: ``fastfold infer --parallel dap=4`` under torchrun.

Rank 0 reads the inputs and the weights, and writes the results. The other ranks receive a network, then for each target
the features of every cycle. If memory is short, MSA and pair representation are sharded over the processes
(:func:`fastfold.parallel.alphafold.shard`). Each process has a part of the machine, and all make the same plan from
the same numbers. Commands that score, mutate and embed use them as well. Gradients of designs and restraints are
functions of sharded networks that rank 0 calls on all processes (:meth:`DistributedFolder.together`).
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.distributed as dist
from ml_collections import ConfigDict
from torch import Tensor

from fastfold.errors import ConfigError, FastFoldError, OutputError
from fastfold.evoformer.model import AlphaFold
from fastfold.evoformer.precision import Precision, precision_of, set_precision
from fastfold.inference.error_messages import is_out_of_memory
from fastfold.inference.folding.network import NetworkPasses, OnCycle
from fastfold.inference.output.recycle_state import Gather, RecycleState
from fastfold.inference.planning.fit import FoldMemory, offload_buffers
from fastfold.inference.planning.planner import FoldPlan, FoldRequest
from fastfold.memory import HostBuffers
from fastfold.parallel.data_parallel.buckets import broadcast_tensors
from fastfold.parallel.plan import ParallelPlan
from fastfold.parallel.slurm import started_processes
from fastfold.utils.device import current_device

if TYPE_CHECKING:
    from fastfold.parallel.distributed import DistributedContext

Shared = Callable[..., Any]  #: Function that all processes call with the same arguments


_MEMORY = "out of memory"  #: Reason of an abort after which the processes meet again


class DistributedFoldError(FastFoldError):
    """Failure of a process within a target, after which the others cannot continue."""


class _Abandoned(Exception):
    """Rank 0 abandoned a target before all of its features were sent, because of ``error``."""

    def __init__(self, error: Exception) -> None:
        super().__init__(error)
        self.error = error


@dataclass
class DistributedFolder:
    """Group of processes that fold together; rank 0 reads and writes."""

    context: DistributedContext  #: The processes, as one DAP group
    _networks: list[tuple[AlphaFold, AlphaFold]] = field(default_factory=list)
    _precisions: list[Precision] = field(default_factory=list)
    _shared: list[Shared] = field(default_factory=list)
    _host: HostBuffers = field(default_factory=HostBuffers)

    @property
    def ranks(self) -> int:
        """Number of processes that fold one target."""
        return self.context.size

    def memory(self, *, host_memory: int | None, offload_dir: Path | None) -> FoldMemory:
        """On rank 0, return the smallest :meth:`FoldMemory.here` of all processes, or raise ConfigError."""
        self._send("memory", (host_memory, offload_dir))
        return self._smallest_memory(host_memory, offload_dir)

    def run(
        self,
        function: Callable[..., Any],
        model: AlphaFold,
        features: Callable[[int, int], Mapping[str, Tensor]],
        passes: NetworkPasses,
        on_cycle: OnCycle | None = None,
        *,
        plan: FoldPlan | None = None,
        state: RecycleState | None = None,
        **options: Any,
    ) -> Any:
        """On rank 0, run a function such as :func:`.run_network` on all processes, which receive it by pickle.

        Each process saves the state of its shard, also on other machines if they have the folder. ``MemoryError`` tells
        that all processes are ready for a smaller plan, and :class:`DistributedFoldError` that they are not.
        """
        function = partial(function, **options)

        def sent(cycle: int, member: int) -> Mapping[str, Tensor]:
            try:
                tensors = features(cycle, member)
            except Exception as error:
                self._send("abandon", None)
                raise _Abandoned(error) from error
            self._send("features", dict(tensors))
            return tensors

        try:
            number, sharded = self._known(model)
            other = None if state is None else state.of_rank()
            self._send("fold", (function, number, passes, None if plan is None else plan.request, other))
            if state is not None:
                state.gather = self.context.gather
            with self._until_parted():
                return function(sharded, sent, passes, on_cycle, plan=plan, state=state)
        except _Abandoned as abandoned:
            raise abandoned.error from None
        except Exception as error:
            self._fail(error, "target", "continue with the next target")

    def together(
        self, make: Callable[[Sequence[AlphaFold], DistributedContext], Shared], models: Sequence[AlphaFold]
    ) -> tuple[Shared, Shared]:
        """On rank 0, make a function of networks on all processes; return it, and one that calls it on all.

        ``make`` returns the function for the sharded networks, which are on the device, and the processes. It is
        pickled, or raises ConfigError, and fails with the same FastFoldError on all processes. Arguments of the second
        function are pickled. It raises ``OutputError`` as the function does on all processes alike, and other errors as
        :meth:`run`.
        """
        known = [self._known(model) for model in models]
        try:
            pickle.dumps(make)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise ConfigError(
                f"other processes cannot receive a part of this task ({error}); define own losses at the top level of "
                "a module, or use one process"
            ) from error
        self._send("make", (make, [number for number, _ in known]))
        number, function = len(self._shared), make([sharded for _, sharded in known], self.context)
        self._shared.append(function)

        def call(*arguments: Any, **options: Any) -> Any:
            self._send("call", (number, arguments, options))
            try:
                with self._until_parted():
                    return function(*arguments, **options)
            except OutputError:
                raise
            except Exception as error:
                self._fail(error, "step", "continue")

        return function, call

    def forget(self) -> None:
        """On rank 0, forget the functions of :meth:`together` on all processes."""
        self._send("forget", None)
        self._shared.clear()

    def rest(self) -> None:
        """On rank 0, forget the functions of :meth:`together`, and move all networks to the host."""
        self._send("rest", None)
        self._rest()

    def worker_loop(self) -> None:
        """On the other ranks, do what rank 0 sends until it stops, again if a process ran out of memory."""
        going = True
        while going:
            try:
                going = self._follow(*self._receive())
            except Exception as error:
                if not self._met_again(error):
                    raise

    def _follow(self, message: str, content: Any) -> bool:
        """Execute a message of rank 0; return False after the last one."""
        match message, content:
            case "network", (config, precision):
                model = set_precision(AlphaFold(ConfigDict(config)), precision)
                self._add(model.to(self.context.device).eval())
            case "fold", (function, number, passes, request, of_rank):
                self._fold(function, self._networks[number][1], passes, request, of_rank)
            case "precision", (number, precision):
                self._set_precision(number, precision)
            case "make", (make, numbers):
                models = [self._networks[number][1].to(self.context.device) for number in numbers]
                with suppress(FastFoldError):  # rank 0 raises it too
                    self._shared.append(make(models, self.context))
            case "call", (number, arguments, options):
                with suppress(OutputError), self._until_parted():
                    self._shared[number](*arguments, **options)
            case "forget", _:
                self._shared.clear()
            case "rest", _:
                self._rest()
            case "memory", (host_memory, offload_dir):
                with suppress(ConfigError):  # rank 0 raises it too
                    self._smallest_memory(host_memory, offload_dir)
        return message != "stop"

    def _fold(
        self,
        function: Callable[..., Any],
        model: AlphaFold,
        passes: NetworkPasses,
        request: FoldRequest | None,
        of_rank: Callable[[int, Gather], RecycleState] | None,
    ) -> None:
        """Take this rank's part in a fold that rank 0 runs."""
        try:
            with suppress(_Abandoned):
                plan = None if request is None else request.plan(self._host)
                state = None if of_rank is None else of_rank(self.context.rank, self.context.gather)
                model.to(self.context.device)
                with self._until_parted():
                    function(model, self._features, passes, None, plan=plan, state=state)
        finally:
            model.to("cpu")

    def _until_parted(self) -> AbstractContextManager[None]:
        """Stop waiting on a GPU for a process that ran out of memory, inside."""
        meeting = self.context.meeting
        return nullcontext() if meeting is None else meeting.ended_by(_MEMORY)

    def _met_again(self, error: Exception) -> bool:
        """Return True if a process ran out of memory and all have met again."""
        meeting = self.context.meeting
        if meeting is None:
            return False
        if is_out_of_memory(error):
            meeting.say_why(_MEMORY)
        elif meeting.why() != _MEMORY:
            return False
        self.context.regroup()
        return True

    def _fail(self, error: Exception, work: str, purpose: str) -> NoReturn:
        if self._met_again(error):
            raise MemoryError("of one of the processes") from None
        raise DistributedFoldError(
            f"{type(error).__name__}: {error}. The other processes are in the middle of this {work}, so the run ends "
            f"here; start it again to {purpose}"
        ) from error

    def stop(self) -> None:
        """On rank 0, stop the other processes."""
        self._send("stop", None)

    def _smallest_memory(self, host_memory: int | None, offload_dir: Path | None) -> FoldMemory:
        """Compute :meth:`memory` on every rank, and allocate buffers of that size for offloaded tensors."""
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
        memories: list[FoldMemory] = []
        for one in self.context.gather(own):
            if isinstance(one, ConfigError):
                raise one
            memories.append(one)
        smallest = FoldMemory(
            free=min(one.free for one in memories),
            host=min(one.host for one in memories),
            disk=min(one.disk for one in memories),
        )
        self._host = offload_buffers(smallest.host, offload_dir)
        return smallest

    def _features(self, cycle: int, member: int) -> Mapping[str, Tensor]:
        message, content = self._receive()
        if message != "features":
            raise _Abandoned(RuntimeError(message))
        features: Mapping[str, Tensor] = content
        return features

    def _rest(self) -> None:
        self._shared.clear()
        for _, model in self._networks:
            model.to("cpu")

    def _known(self, model: AlphaFold) -> tuple[int, AlphaFold]:
        """Return number and shard of a network, which all processes get with the first use."""
        if not any(model is known for known, _ in self._networks):
            self._send("network", (model.config.to_dict(), precision_of(model)))
            self._add(model)
        number, sharded = next((i, x) for i, (known, x) in enumerate(self._networks) if model is known)
        if (precision := precision_of(model)) != self._precisions[number]:
            self._send("precision", (number, precision))
            self._set_precision(number, precision)
        return number, sharded

    def _set_precision(self, number: int, precision: Precision) -> None:
        set_precision(self._networks[number][1], precision)
        self._precisions[number] = precision

    def _add(self, model: AlphaFold) -> None:
        """Load the first process's weights into a network and parallelise it."""
        from fastfold.parallel import alphafold

        broadcast_tensors(list(model.state_dict().values()), self.context.mesh.group("dap"))
        self._precisions.append(precision_of(model))
        # The caller's network keeps its identity, and shares the submodules.
        self._networks.append((model, alphafold.shard(copy.copy(model), self.context.mesh)))

    def _send(self, message: str, content: Any) -> None:
        dist.broadcast_object_list([message, content], 0, group=self.context.cpu_group)

    def _receive(self) -> tuple[str, Any]:
        message: list[Any] = [None, None]
        dist.broadcast_object_list(message, 0, group=self.context.cpu_group)
        return message[0], message[1]


def check_started(ranks: int) -> None:
    """Raise ConfigError unless as many processes were started as should fold together."""
    started = started_processes()
    if ranks == 1 and started > 1:
        raise ConfigError(
            f"WORLD_SIZE says that {started} processes were started, but one folds without `parallel`; add `parallel` "
            f"dap={started} to fold each target by all of them, or start one process with WORLD_SIZE unset"
        )
    if ranks != started:
        started_as = f"{started} processes were started" if started > 1 else "one process was started"
        raise ConfigError(
            f"`parallel=dap={ranks}` needs {ranks} processes, but {started_as}; run torchrun "
            f"--nproc-per-node {ranks} -m fastfold COMMAND --parallel dap={ranks} ..."
        )


@contextmanager
def distributed_folder(ranks: int, device: torch.device) -> Iterator[DistributedFolder | None]:
    """Yield the group of processes started by torchrun for ``--parallel``; None for one process.

    The first process stops the others at the end. On CUDA each process uses the GPU of its local rank, and one process
    alone its device, as PyTorch's current one. A ConfigError tells that another number of processes was started, or
    that the machine has too few GPUs.
    """
    plan = ParallelPlan(dap=ranks)
    check_started(ranks)
    if ranks == 1:
        with current_device(device):
            yield None
        return
    from fastfold.parallel.distributed import init_distributed  # slow to import

    # The other ranks wait without a limit while rank 0 reads alignments and writes results.
    with init_distributed(plan, device, message_timeout=timedelta(days=7)) as context:
        folder = DistributedFolder(context)
        try:
            yield folder
        except DistributedFoldError:
            raise  # the others do not receive messages
        except Exception:
            if context.is_rank_zero:
                folder.stop()
            raise
        if context.is_rank_zero:
            folder.stop()
