"""What cannot run in chunks is refused with one clear error when it is exported."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from fastfold.errors import ConfigError
from fastfold.memory.chunking.graph import ChunkLayout, export_graph
from tests.memory.chunking.test_flow import graph_of

_X = torch.randn(4, 6)


def _changed(x: Tensor) -> Tensor:
    x.add_(1)
    return x * 2


def _decided(x: Tensor) -> Tensor:
    return x if x.sum() > 0 else -x


def _read(x: Tensor) -> Tensor:
    return x * x.sum().item()


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (_changed, "changes args_0 in place.*return the changed tensor instead"),
        (_decided, "branches on the values.*torch.where"),
        (_read, "reads a number out of a tensor|draws|branches on"),
        (lambda x: x + torch.rand(6), "draws random numbers.*eval"),
    ],
    ids=["in place", "data", "number", "random"],
)
def test_what_cannot_be_cut_is_refused(function: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        graph_of(function, _X)  # type: ignore[arg-type]


def test_dropout_in_training_and_running_statistics_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"random numbers .*eval\(\)"):
        export_graph(nn.Dropout(0.5), (_X,), {}, {})
    with pytest.raises(ConfigError, match=r"in place.*eval\(\)"):
        export_graph(nn.BatchNorm1d(6), (_X,), {}, {})
    assert export_graph(nn.Sequential(nn.Dropout(0.5), nn.BatchNorm1d(6)).eval(), (_X,), {}, {})


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_are_refused_for_their_dropout_alone(kind: type[nn.RNNBase]) -> None:
    """PyTorch marks their operators as random ones, with and without dropout."""
    layer = kind(6, 4, num_layers=2, dropout=0.5)
    with pytest.raises(ConfigError, match=r"random numbers .*eval\(\)"):
        export_graph(layer, (_X,), {}, {})
    assert export_graph(layer.eval(), (_X,), {}, {})
    assert export_graph(kind(6, 4), (_X,), {}, {})


def test_sources_and_layouts_are_those_of_the_module() -> None:
    graph = export_graph(nn.Linear(6, 3), (_X,), {}, {})
    assert [(source.kind, source.name) for source in graph.sources] == [
        ("parameter", "weight"),
        ("parameter", "bias"),
        ("input", "input"),
    ]
    assert graph.operations[-1].name == "aten::linear"
    assert graph.layout(graph.operations[-1].index).shape == (4, 3)
    assert graph.layout(0).nbytes == ChunkLayout.of(torch.empty(3, 6)).nbytes == 72
