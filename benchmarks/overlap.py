"""Share of communication that an asynchronous schedule hides: real collectives on gloo, with an artificial network.

:class:`ArtificialNetwork` wraps the functions that start collectives. Each message takes the link for its bytes over
the bandwidth and arrives a latency later; a caller that waits for it earlier is blocked. The program is unchanged.
:func:`count_schedule` counts the collectives, waits and dispatches of a block, for any number of simulated ranks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fastfold.evoformer.config import model_config
from fastfold.evoformer.evoformer import EvoformerBlock
from fastfold.parallel import Group, ParallelMesh, ParallelPlan
from fastfold.parallel.alphafold import axial_parallel
from fastfold.parallel.axial.shards import AxialShards
from fastfold.parallel.comm import async_ops
from fastfold.parallel.comm.async_ops import AsyncResult
from fastfold.parallel.planner.fake_run import fake_mesh
from fastfold.parallel.planner.recorder import operator_cost


@dataclass
class Message:
    """Collective on the artificial network; times are seconds of its clock.

    Attributes:
        op: Function that started it, without ``start_``.
        sent: Bytes sent.
        started: Time at which it was started.
        takes: Duration on the network.
        arrives: Time at which it arrives.
        blocked: Duration for which a caller waited for it.
    """

    op: str
    sent: float
    started: float
    takes: float
    arrives: float
    blocked: float = 0.0


@dataclass
class ArtificialNetwork:
    """Delays for every message.

    Attributes:
        latency: Seconds from the last byte sent to its arrival.
        bandwidth: Bytes/s of the link, which messages take one after another.
        wall: True for wall time, with sleeping while blocked. Otherwise time is the computing time of the thread, to
            which blocked time is added without sleeping: the same on a busy machine.
        immediate: True to wait for every message at its start, as a program without asynchronous collectives does.
        messages: Messages that were sent.
    """

    latency: float = 0.0
    bandwidth: float = float("inf")
    wall: bool = False
    immediate: bool = False
    messages: list[Message] = field(default_factory=list)
    _added: float = 0.0
    _free: float = 0.0

    def now(self) -> float:
        """Return the time in seconds."""
        return time.perf_counter() if self.wall else time.thread_time() + self._added

    @property
    def busy(self) -> float:
        """Seconds that all messages take."""
        return sum(message.takes for message in self.messages)

    @property
    def hidden_share(self) -> float:
        """Share of that time in which no caller waits."""
        return 1 - sum(message.blocked for message in self.messages) / self.busy

    @contextmanager
    def connected(self) -> Iterator[ArtificialNetwork]:
        """Send every collective of this process over this network."""
        names = [name for name in vars(async_ops) if name.startswith("start_")]
        originals = {name: getattr(async_ops, name) for name in names}
        try:
            for name, start in originals.items():
                setattr(async_ops, name, self._delayed(name.removeprefix("start_"), start))
            yield self
        finally:
            for name, start in originals.items():
                setattr(async_ops, name, start)

    def _delayed(self, op: str, start: Callable[..., Any]) -> Callable[..., Any]:
        def delayed(*arguments: Any, **named: Any) -> Any:
            group = next(x for x in (*arguments, *named.values()) if isinstance(x, Group))
            before = len(self.messages)
            with group.reporter.record() as log:
                pending = start(*arguments, **named)
            if (
                not log.entries or len(self.messages) > before
            ):  # it sent nothing, or an inner call was delayed
                return pending
            started = self.now()
            self._free = max(self._free, started) + log.sent / self.bandwidth
            takes = log.sent / self.bandwidth + self.latency
            message = Message(op, log.sent, started, takes, self._free + self.latency)
            self.messages.append(message)
            if self.immediate:
                self._wait(message)
            if isinstance(pending, list):
                return [_Delayed(each, lambda: self._wait(message)) for each in pending]
            return _Delayed(pending, lambda: self._wait(message))

        return delayed

    def _wait(self, message: Message) -> None:
        left = message.arrives - self.now()
        if left <= 0:
            return
        message.blocked += left
        if self.wall:
            time.sleep(left)
        else:
            self._added += left


class _Delayed(AsyncResult[Tensor]):
    """Collective whose result arrives with its message."""

    def __init__(self, pending: AsyncResult[Tensor], wait: Callable[[], None]) -> None:
        super().__init__(pending.finish, pending.work)
        self._arrive = wait

    def wait(self) -> Tensor:
        self._arrive()
        return super().wait()


@dataclass
class Schedule:
    """Counts of one pass of a block.

    Attributes:
        collectives: Number of collectives.
        waited_at_once: Number of those waited for before a matrix product or a kernel of this package is started.
        dispatches: Number of PyTorch's operators, with collectives.
        kernels: Number of kernels of a GPU, without packing.
        packing: Number of kernels that pack tensors into messages or unpack them.
    """

    collectives: int = 0
    waited_at_once: int = 0
    dispatches: int = 0
    kernels: int = 0
    packing: int = 0


# Matrix products of PyTorch.
_PRODUCTS = {"mm", "bmm", "addmm", "baddbmm"}


class _Counting(TorchDispatchMode):
    """Counter of operators, and of collectives without concurrent computation."""

    def __init__(self) -> None:
        super().__init__()
        self.schedule = Schedule()
        self._computed = 0
        self._inside = 0  # depth of functions that start or end a message
        self._waiting: dict[int, int] = {}  # by work: number of computations at its start

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.schedule.dispatches += 1
        namespace, _, name = func._schema.name.partition("::")
        self._computed += namespace == "fastfold" or name in _PRODUCTS
        out = func(*args, **(kwargs or {}))
        if not func.is_view and namespace not in ("c10d", "prim"):
            launches = operator_cost(func, args, kwargs or {}, out).launches
            if self._inside:
                self.schedule.packing += launches
            else:
                self.schedule.kernels += launches
        return out

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Count collectives started and waited for within."""
        all_to_all, wait = async_ops._all_to_all, AsyncResult.wait
        gather, reduce_scatter = async_ops._all_gather, async_ops._reduce_scatter

        def noted(start: Callable[..., Any]) -> Callable[..., Any]:
            def started(*arguments: Any, **named: Any) -> Any:
                found = start(*arguments, **named)
                work = found[1] if isinstance(found, tuple) else found
                self.schedule.collectives += 1
                self._waiting[id(work)] = self._computed
                return found

            return started

        def waited(pending: AsyncResult[Tensor]) -> Tensor:
            before = self._waiting.pop(id(pending.work), None)
            self.schedule.waited_at_once += before == self._computed
            return wait(pending)

        def packing(function: Callable[..., Any]) -> Callable[..., Any]:
            def within(*arguments: Any, **named: Any) -> Any:
                self._inside += 1
                try:
                    return function(*arguments, **named)
                finally:
                    self._inside -= 1

            return within

        with ExitStack() as stack:
            for name in ("start_exchange", "start_gather", "start_reduce_scatter"):
                new = packing(getattr(async_ops, name))
                stack.enter_context(mock.patch.object(async_ops, name, new))
            for where, name, new in (
                (async_ops, "_all_to_all", noted(all_to_all)),
                (async_ops, "_all_gather", noted(gather)),
                (async_ops, "_reduce_scatter", noted(reduce_scatter)),
                (AsyncResult, "wait", packing(waited)),
            ):
                stack.enter_context(mock.patch.object(where, name, new))
            yield


def count_schedule(ranks: int, residues: int, sequences: int) -> tuple[Schedule, Schedule]:
    """Count the schedule of an official Evoformer block on rank 0 under axial parallelism, on shapes alone.

    Args:
        ranks: Number of ranks that share the protein; 1 for the plain block.
        residues: N.
        sequences: Rows of the MSA.

    Returns:
        Counts of the forward pass and of the backward pass, in float32.
    """
    trunk = model_config("model_1").model.embeddings_and_evoformer
    with fake_mesh(ParallelPlan(dap=ranks)) as mesh, torch.device("meta"):
        block = EvoformerBlock(trunk.evoformer, trunk.msa_channel, trunk.pair_channel)
        if ranks > 1:
            block = axial_parallel(block, mesh)
        shards = AxialShards(mesh.group("dap"))
        msa = shards.take(torch.empty(sequences, residues, trunk.msa_channel), 0).requires_grad_()
        pair = shards.take(torch.empty(residues, residues, trunk.pair_channel), 1).requires_grad_()
        with _Counting() as forward, forward.watching():
            found = block(msa, pair, torch.empty(sequences, residues), torch.empty(residues, residues))
        gradients = [torch.empty_like(x) for x in found]
        with _Counting() as backward, backward.watching():
            torch.autograd.backward(found, gradients)
    return forward.schedule, backward.schedule


def block_step(ranks: int, residues: int, sequences: int) -> Callable[[], None]:
    """Return a function that runs both passes of one Evoformer block, sharded over the default group."""
    torch.manual_seed(0)
    mesh = ParallelMesh(ParallelPlan(dap=ranks))
    trunk = model_config("model_1").model.embeddings_and_evoformer
    block = EvoformerBlock(trunk.evoformer, trunk.msa_channel, trunk.pair_channel, zero_init=False)
    block = axial_parallel(block, mesh)
    shards = AxialShards(mesh.group("dap"))
    msa = shards.take(torch.randn(sequences, residues, trunk.msa_channel), 0)
    pair = shards.take(torch.randn(residues, residues, trunk.pair_channel), 1)
    masks = torch.ones(sequences, residues), torch.ones(residues, residues)

    def step() -> None:
        leaves = msa.detach().requires_grad_(), pair.detach().requires_grad_()
        outputs = block(*leaves, *masks)
        torch.autograd.backward(outputs, [torch.ones_like(x) for x in outputs])

    return step


def measure_overlap(
    ranks: int, residues: int, sequences: int, ratios: tuple[float, ...], latency: float
) -> dict[str, Any]:
    """Measure the hidden share on one rank, for several ratios of communication to computation.

    Args:
        ranks: Processes of the default group.
        residues: N.
        sequences: Rows of the MSA.
        ratios: Time of communication over time of computation.
        latency: Latency in seconds.
    """
    step = block_step(ranks, residues, sequences)
    step()  # allocates buffers and starts threads
    with ArtificialNetwork().connected() as free:
        began = free.now()
        step()
        computing = free.now() - began
    sent = sum(message.sent for message in free.messages)
    found = []
    for ratio in ratios:
        shared = max(ratio * computing - latency * len(free.messages), 1e-9)
        row: dict[str, Any] = {"ratio": ratio}
        for name, immediate in (("asynchronous", False), ("immediate", True)):
            network = ArtificialNetwork(latency, sent / shared, immediate=immediate)
            with network.connected():
                began = network.now()
                step()
                row[f"{name}_seconds"] = network.now() - began
            row[f"{name}_hidden"] = network.hidden_share
        found.append(row)
    by_op: dict[str, float] = {}
    for message in free.messages:
        by_op[message.op] = by_op.get(message.op, 0.0) + message.sent
    return {
        "ranks": ranks,
        "residues": residues,
        "sequences": sequences,
        "computing_seconds": computing,
        "messages": len(free.messages),
        "megabytes": sent / 1e6,
        "megabytes_by_op": {op: value / 1e6 for op, value in by_op.items()},
        "latency_seconds": latency,
        "networks": found,
    }
