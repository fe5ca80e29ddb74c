"""Passes of a network from a CUDA graph: the host launches a pass once, and the GPU replays it.

A pass of a short protein is thousands of kernels, each over before the host has launched the next. A CUDA graph (CUDA
programming guide, "CUDA Graphs") keeps the launches of one pass with the addresses that they read and write, so that
a replay costs the host one call.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastfold.errors import ConfigError
from fastfold.evoformer.embedders.templates import TemplateEmbedder, shown_templates
from fastfold.evoformer.execution import PolicyModule
from fastfold.evoformer.model import AlphaFold, Features, PassResult
from fastfold.inference.error_messages import is_out_of_memory

Iterate = Callable[[list[Features], Features], PassResult]
Capture = Callable[[Callable[[], PassResult], torch.device], tuple[Callable[[], None], PassResult]]
"""Something with the arguments and results of :func:`capture_graph`."""


def check_cuda_graphs(wanted: bool, device: torch.device) -> None:
    """See that a device can replay CUDA graphs, if they are wanted.

    Raises:
        ConfigError: It is no GPU.
    """
    if wanted and device.type != "cuda":
        raise ConfigError(
            f"cuda_graphs needs a GPU, and the device is {device.type}: leave out --cuda-graphs, or choose a GPU by "
            "--device cuda"
        )


def capture_graph(
    function: Callable[[], PassResult], device: torch.device
) -> tuple[Callable[[], None], PassResult]:
    """Record what a function launches on a GPU, which does not run it yet.

    Args:
        function: Must have run once with such tensors, so that its kernels are compiled and loaded, and must not look
            at values of tensors.
        device: The GPU.

    Returns:
        What replays the launches, and what the function returned: tensors that each replay fills anew.

    Raises:
        ConfigError: The function does what a graph cannot hold.
    """
    graph = torch.cuda.CUDAGraph()
    try:
        # Other threads of the process may use the GPU meanwhile.
        with torch.cuda.device(device), torch.cuda.graph(graph, capture_error_mode="thread_local"):
            found = function()
    except RuntimeError as error:
        if is_out_of_memory(error):
            raise
        raise ConfigError(
            "this GPU, or this PyTorch, could not record a pass as a CUDA graph: leave out --cuda-graphs"
        ) from error
    return graph.replay, found


class _Graph(NamedTuple):
    """A recorded pass.

    Attributes:
        members: What it reads as the features of each ensemble member.
        previous: What it reads as left by the pass before.
        replay: Runs it.
        result: What that fills.
    """

    members: list[Features]
    previous: Features
    replay: Callable[[], None]
    result: PassResult


class PassGraph:
    """Carries out the passes of predictions, as ``run_pass`` of :meth:`fastfold.evoformer.model.AlphaFold.forward`.

    The first pass runs as ever, which compiles and loads its kernels. The second is captured on copies of its inputs
    and replayed, and so are all others, those of later predictions included, once their inputs are copied to where the
    graph reads them. When something changes that the graph does not read anew (shapes, templates that are shown, where
    parameters and buffers are, how the network is carried out), it is dropped, and all of this begins again.

    Args:
        model: The network, in evaluation mode and on its device, which works without the host's memory.
        capture: Records a pass; by default on the GPU.

    Attributes:
        captures: How often a pass was recorded.
        replays: How often one was replayed.
    """

    def __init__(self, model: AlphaFold, capture: Capture | None = None) -> None:
        self._model, self._capture = model, capture or capture_graph
        self._key: Hashable = None
        self._graph: _Graph | None = None
        self.captures = self.replays = 0

    def __call__(self, iterate: Iterate, members: list[Features], previous: Features) -> PassResult:
        """Carry out a pass.

        Args:
            iterate: Runs one.
            members: Features of each ensemble member.
            previous: What the pass before left.

        Returns:
            What ``iterate`` returns: copies, but for the representation ``pair``, which the next pass overwrites.

        Raises:
            ConfigError: The pass cannot be captured here.
        """
        shown = None
        if isinstance(self._model.template_embedder, TemplateEmbedder):
            shown = shown_templates(members[0]["template_mask"])
        key = self._key_of(members, previous, shown)
        if key != self._key:
            self._key, self._graph = key, None
            with self._templates(shown):
                return iterate(members, previous)
        graph = self._graph
        if graph is None:
            graph = self._graph = self._record(iterate, members, previous, shown)
            self.captures += 1
        else:
            for own, given in zip((*graph.members, graph.previous), (*members, previous), strict=True):
                for name, tensor in own.items():
                    tensor.copy_(given[name])
        graph.replay()
        self.replays += 1
        representations, structure = graph.result
        pair = {"pair": representations["pair"]}
        return _copies({k: x for k, x in representations.items() if k != "pair"}) | pair, _copies(structure)

    def _record(
        self, iterate: Iterate, members: list[Features], previous: Features, shown: tuple[int, ...] | None
    ) -> _Graph:
        own_members, own_previous = [_copies(features) for features in members], _copies(previous)

        def run() -> PassResult:
            # A pass takes features out of their dicts as it goes.
            return iterate([dict(features) for features in own_members], dict(own_previous))

        with self._templates(shown):
            replay, result = self._capture(run, previous["prev_pair"].device)
        return _Graph(own_members, own_previous, replay, result)

    def _key_of(self, members: list[Features], previous: Features, shown: tuple[int, ...] | None) -> Hashable:
        """What a graph holds and does not read anew."""
        inputs = tuple(
            (name, x.shape, x.dtype) for features in (*members, previous) for name, x in features.items()
        )
        read = itertools.chain(self._model.parameters(), self._model.buffers())
        places = tuple((x.data_ptr(), x.dtype) for x in read)
        policies = tuple(m.policy for m in self._model.modules() if isinstance(m, PolicyModule))
        return inputs, shown, places, policies

    @contextmanager
    def _templates(self, shown: tuple[int, ...] | None) -> Iterator[None]:
        """Inside, the embedder of templates knows which are shown, and looks at no mask."""
        embedder = self._model.template_embedder
        if not isinstance(embedder, TemplateEmbedder):
            yield
            return
        policy = embedder.policy
        embedder.policy = replace(policy, templates=shown)
        try:
            yield
        finally:
            embedder.policy = policy


class KeptGraph:
    """The graph of the last predictions, for the next ones: targets of one length often follow each other.

    There is one at a time, because it holds as much memory as a pass takes.
    """

    def __init__(self) -> None:
        self._residues: int | None = None
        self._model: AlphaFold | None = None
        self._graph: PassGraph | None = None

    def keep_for(self, residues: int) -> None:
        """Before a target of ``residues`` is planned: free a graph that is none of its length."""
        if residues != self._residues:
            self.drop()
        self._residues = residues

    def of(self, model: AlphaFold) -> PassGraph:
        """The graph for predictions by a network; that of another is freed."""
        if self._graph is None or self._model is not model:
            self.drop()
            self._model, self._graph = model, PassGraph(model)
        return self._graph

    def drop(self) -> None:
        """Free the memory of the graph."""
        self._model = self._graph = None


def _copies(tree: Mapping[str, Any]) -> dict[str, Any]:
    """A tree of tensors, each in memory of its own."""
    return {k: x.clone() if isinstance(x, Tensor) else _copies(x) for k, x in tree.items()}
