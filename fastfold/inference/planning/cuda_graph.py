"""Replay passes of a network from a CUDA graph, with one launch by the host per pass.

A pass of a short protein is thousands of short kernels, which run faster than the host launches them. A CUDA graph
(CUDA programming guide, "CUDA Graphs") records the launches of one pass with their addresses, so that a replay costs
one call.
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
from fastfold.evoformer.execution import CallSettings, PolicyModule, calling, current_call
from fastfold.evoformer.model import AlphaFold, Features, PassResult
from fastfold.inference.error_messages import is_out_of_memory

Iterate = Callable[[list[Features], Features], PassResult]
Capture = Callable[[Callable[[], PassResult], torch.device], tuple[Callable[[], None], PassResult]]
"""Callable with the arguments and results of :func:`capture_graph`."""


def check_cuda_graphs(wanted: bool, device: torch.device) -> None:
    """Raise ConfigError if CUDA graphs are requested on a device that is not a GPU."""
    if wanted and device.type != "cuda":
        raise ConfigError(
            f"cuda_graphs needs a GPU, and the device is {device.type}: leave out --cuda-graphs, or choose a GPU with "
            "--device cuda"
        )


def capture_graph(
    function: Callable[[], PassResult], device: torch.device
) -> tuple[Callable[[], None], PassResult]:
    """Record a function's launches on a GPU without running them, or raise ConfigError; return replay and result.

    The function must not read the values of tensors, and must have run once with such tensors, so that its kernels are
    compiled and loaded. Each replay fills the tensors of the result again.
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
    """Recorded pass: ``replay`` reads ``inputs``, the tensors of the ensemble's members and of the previous pass."""

    inputs: list[Features]
    replay: Callable[[], None]
    result: PassResult


class PassGraph:
    """Runner of passes, used as ``run_pass`` of :meth:`fastfold.evoformer.model.AlphaFold.forward`.

    The first pass runs normally, which compiles and loads its kernels. The second pass is captured on copies of its
    inputs and replayed. Later ones copy their inputs to these tensors and replay. The graph is captured again when
    something else changes: shapes, visible templates, addresses of parameters and buffers, or the execution policy.
    """

    def __init__(self, model: AlphaFold, capture: Capture | None = None) -> None:
        self._model, self._capture = model, capture or capture_graph
        self._key: Hashable = None
        self._graph: _Graph | None = None
        self.captures = self.replays = 0

    def __call__(self, iterate: Iterate, members: list[Features], previous: Features) -> PassResult:
        """Run a pass; the next one overwrites the representation ``pair`` of its result, and nothing else."""
        shown = None
        if isinstance(self._model.template_embedder, TemplateEmbedder):
            shown = shown_templates(members[0]["template_mask"])
        # Everything that a graph contains and does not read from its inputs.
        inputs = [(name, x.shape, x.dtype) for part in (*members, previous) for name, x in part.items()]
        read = itertools.chain(self._model.parameters(), self._model.buffers())
        places = tuple((x.data_ptr(), x.dtype) for x in read)
        policies = tuple(m.policy for m in self._model.modules() if isinstance(m, PolicyModule))
        key = tuple(inputs), shown, places, policies
        if key != self._key:
            self._key, self._graph = key, None
            with self._templates(shown):
                return iterate(members, previous)
        graph = self._graph
        if graph is None:
            graph = self._graph = self._record(iterate, members, previous, shown)
            self.captures += 1
        else:
            for own, given in zip(graph.inputs, (*members, previous), strict=True):
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
        own = [_copies(features) for features in (*members, previous)]

        def run() -> PassResult:
            *of_members, of_previous = map(dict, own)  # a pass removes features from their dicts
            return iterate(of_members, of_previous)

        with self._templates(shown):
            replay, result = self._capture(run, previous["prev_pair"].device)
        return _Graph(own, replay, result)

    @contextmanager
    def _templates(self, shown: tuple[int, ...] | None) -> Iterator[None]:
        """Tell the template embedder which templates are visible, so that it does not read the mask."""
        embedder = self._model.template_embedder
        if not isinstance(embedder, TemplateEmbedder):
            yield
            return
        call = current_call() or CallSettings()
        own = replace(embedder.policy, templates=shown)
        with calling(replace(call, policies={**call.policies, embedder: own})):
            yield


class KeptGraph:
    """Graph of the last predictions, kept for targets of the same length; one, because it holds a pass's memory."""

    def __init__(self) -> None:
        self._residues: int | None = None
        self._model: AlphaFold | None = None
        self._graph: PassGraph | None = None

    def keep_for(self, residues: int) -> None:
        """Free a graph of another length before a target of ``residues`` is planned."""
        if residues != self._residues:
            self.drop()
        self._residues = residues

    def of(self, model: AlphaFold) -> PassGraph:
        """Return the graph for a network's predictions, and free that of another network."""
        if self._graph is None or self._model is not model:
            self.drop()
            self._model, self._graph = model, PassGraph(model)
        return self._graph

    def drop(self) -> None:
        """Free the memory of the graph."""
        self._model = self._graph = None


def _copies(tree: Mapping[str, Any]) -> dict[str, Any]:
    return {k: x.clone() if isinstance(x, Tensor) else _copies(x) for k, x in tree.items()}
