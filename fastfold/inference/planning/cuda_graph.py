"""Replay passes of a network from a CUDA graph, with one launch by the host per pass.

A pass of a short protein is thousands of short kernels, which run faster than the host launches them. A CUDA graph
(CUDA programming guide, "CUDA Graphs") records the launches of one pass with their addresses, so that a replay costs
one call.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from ml_collections import ConfigDict
from torch import Tensor

from fastfold.errors import ConfigError
from fastfold.evoformer.embedders.templates import TemplateEmbedder, shown_templates
from fastfold.evoformer.execution import CallSettings, PolicyModule, calling, current_call
from fastfold.evoformer.model import AlphaFold, Features, PassResult, RunPass
from fastfold.inference.config import WITHOUT_GRAPHS, InferConfig
from fastfold.inference.error_messages import is_out_of_memory

Iterate = Callable[[list[Features], Features], PassResult]
Capture = Callable[[Callable[[], PassResult], torch.device], tuple[Callable[[], None], PassResult]]
"""Callable with the arguments and results of :func:`capture_graph`."""

_OUTSIDE_OF_PASSES = ("num_recycle", "recycle_early_stop_tolerance", "num_ensemble_eval", "num_extra_msa")
"""Settings of a configuration's ``model`` that no pass reads."""
_REPLACING = threading.Lock()

#: Longest targets that have graphs by default: passes of longer ones keep a GPU busy
MAX_GRAPH_RESIDUES = 256
MIN_GRAPH_PASSES = 4  #: Fewest passes that have graphs by default: two of them are not replayed


def check_cuda_graphs(wanted: bool, device: torch.device) -> None:
    """Raise ConfigError if CUDA graphs are requested on a device that is not a GPU."""
    if wanted and device.type != "cuda":
        raise ConfigError(
            f"cuda_graphs needs a GPU, and the device is {device.type}: leave out `cuda_graphs`, or choose a GPU with "
            "`device=cuda`"
        )


def uses_cuda_graphs(config: InferConfig, device: torch.device, residues: int, passes: int) -> bool:
    """Return True if passes of a target are replayed from a CUDA graph; by default short ones on NVIDIA's GPUs.

    Args:
        config: Settings of the fold.
        device: Device of the fold.
        residues: Residues of the target.
        passes: Number of passes of all networks and seeds together.
    """
    if config.cuda_graphs is not None:
        return config.cuda_graphs
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    is_worth_it = residues <= MAX_GRAPH_RESIDUES and passes >= MIN_GRAPH_PASSES
    return is_worth_it and not any(getattr(config, name) for name in (*WITHOUT_GRAPHS, "restraints", "embed"))


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
            outputs = function()
    except RuntimeError as error:
        if is_out_of_memory(error):
            raise
        raise ConfigError(
            "this GPU, or this PyTorch, could not record a pass as a CUDA graph: leave out `cuda_graphs`"
        ) from error
    return graph.replay, outputs


class _Graph(NamedTuple):
    """Recorded pass: ``replay`` reads ``inputs``, of the members and the previous pass, and ``parameters``."""

    inputs: list[Features]
    parameters: list[Tensor]
    replay: Callable[[], None]
    result: PassResult


class _Tensors:
    """Parameters and buffers of a network, in the order of its modules, and everything else that a pass reads."""

    def __init__(self, model: AlphaFold) -> None:
        self.model = model
        tables: list[dict[str, Any]] = [t for m in model.modules() for t in (m._parameters, m._buffers)]
        self._places = [(table, name) for table in tables for name, x in table.items() if x is not None]
        shapes = tuple(
            (name, x.shape, x.dtype) for (_, name), x in zip(self._places, self.values, strict=True)
        )
        config = getattr(model, "config", None)
        tree = None if config is None else _settings_of_passes(config.model)
        self.structure: Hashable = (str(tree), tuple(map(type, model.modules())), shapes)

    @property
    def values(self) -> list[Tensor]:
        """The tensors."""
        return [table[name] for table, name in self._places]

    @property
    def versions(self) -> list[tuple[int, int | None]]:
        """Address of each tensor, and number of its changes in place."""
        return [(x.data_ptr(), None if x.is_inference() else x._version) for x in self.values]

    @contextmanager
    def replaced(self, others: list[Tensor]) -> Iterator[None]:
        """Let the network read other tensors in this thread and all others, one thread at a time."""
        with _REPLACING:
            own = self.values
            try:
                for (table, name), x in zip(self._places, others, strict=True):
                    table[name] = x
                yield
            finally:
                for (table, name), x in zip(self._places, own, strict=True):
                    table[name] = x


class PassGraph:
    """Graph of a pass, replayed for all networks of a structure.

    :meth:`of` returns a network's ``run_pass`` of :meth:`fastfold.evoformer.model.AlphaFold.forward`. The first pass
    runs normally, which compiles and loads its kernels. The second pass is captured on copies of its inputs and of the
    parameters, and replayed. Later ones, also of other networks, copy their inputs to these tensors and replay; the
    parameters are copied if they are another network's or have changed. The graph is captured again when something
    else changes: shapes, visible templates, the network's structure, or the execution policy. Unless the graph is
    required, passes run normally where it cannot be captured.
    """

    def __init__(self, capture: Capture | None = None, *, is_required: bool = True) -> None:
        self._capture, self._is_required = capture or capture_graph, is_required
        self._is_refused = False
        self._key: Hashable = None
        self._graph: _Graph | None = None
        self._held: tuple[AlphaFold, list[tuple[int, int | None]]] | None = None
        self.captures = self.replays = 0

    def of(self, model: AlphaFold) -> RunPass:
        """Return the function that runs passes of a network.

        The next pass overwrites the representation ``pair`` of a result, and nothing else.
        """
        return partial(self._run, _Tensors(model))

    def _run(
        self, network: _Tensors, iterate: Iterate, members: list[Features], previous: Features
    ) -> PassResult:
        model, shown = network.model, None
        if isinstance(model.template_embedder, TemplateEmbedder):
            shown = shown_templates(members[0]["template_mask"])
        # Everything that a graph contains and does not read from its inputs.
        inputs = [(name, x.shape, x.dtype) for part in (*members, previous) for name, x in part.items()]
        policies = tuple(m.policy for m in model.modules() if isinstance(m, PolicyModule))
        key = tuple(inputs), shown, network.structure, policies
        if key != self._key or self._is_refused:
            self._key, self._graph, self._held = key, None, None
            with _templates(model, shown):
                return iterate(members, previous)
        graph, held = self._graph, (model, network.versions)
        if graph is None:
            try:
                graph = self._graph = self._record(network, iterate, members, previous, shown)
            except ConfigError:
                if self._is_required:
                    raise
                self._is_refused = True
                return self._run(network, iterate, members, previous)
            self.captures += 1
        else:
            for own, source in zip(graph.inputs, (*members, previous), strict=True):
                for name, tensor in own.items():
                    tensor.copy_(source[name])
            if self._held is None or self._held[0] is not model or self._held[1] != held[1]:
                torch._foreach_copy_(graph.parameters, network.values)
        self._held = held
        graph.replay()
        self.replays += 1
        representations, structure = graph.result
        pair = {"pair": representations["pair"]}
        return _copies({k: x for k, x in representations.items() if k != "pair"}) | pair, _copies(structure)

    def _record(
        self,
        network: _Tensors,
        iterate: Iterate,
        members: list[Features],
        previous: Features,
        shown: tuple[int, ...] | None,
    ) -> _Graph:
        own = [_copies(features) for features in (*members, previous)]
        parameters = [x.detach().clone() for x in network.values]

        def run() -> PassResult:
            *of_members, of_previous = map(dict, own)  # a pass removes features from their dicts
            return iterate(of_members, of_previous)

        with _templates(network.model, shown), network.replaced(parameters):
            replay, result = self._capture(run, previous["prev_pair"].device)
        return _Graph(own, parameters, replay, result)


@contextmanager
def _templates(model: AlphaFold, shown: tuple[int, ...] | None) -> Iterator[None]:
    """Tell the template embedder which templates are visible, so that it does not read the mask."""
    embedder = model.template_embedder
    if not isinstance(embedder, TemplateEmbedder):
        yield
        return
    call = current_call() or CallSettings()
    own = replace(embedder.policy, templates=shown)
    with calling(replace(call, policies={**call.policies, embedder: own})):
        yield


class KeptGraph:
    """Graph of the last predictions, kept for targets of the same length; one, because it holds a pass's memory."""

    def __init__(self, *, is_required: bool = True) -> None:
        self._is_required = is_required
        self._residues: int | None = None
        self._graph: PassGraph | None = None

    def keep_for(self, residues: int) -> None:
        """Free a graph of another length before a target of ``residues`` is planned."""
        if residues != self._residues:
            self.drop()
        self._residues = residues

    def of(self, model: AlphaFold) -> RunPass:
        """Return the function that runs passes of a network, by the graph of earlier networks if it serves them."""
        if self._graph is None:
            self._graph = PassGraph(is_required=self._is_required)
        return self._graph.of(model)

    def drop(self) -> None:
        """Free the memory of the graph."""
        self._graph = None


def _settings_of_passes(tree: Any) -> Any:
    if not isinstance(tree, Mapping | ConfigDict):
        return tree
    return {k: _settings_of_passes(v) for k, v in tree.items() if k not in _OUTSIDE_OF_PASSES}


def _copies(tree: Mapping[str, Any]) -> dict[str, Any]:
    return {k: x.clone() if isinstance(x, Tensor) else _copies(x) for k, x in tree.items()}
