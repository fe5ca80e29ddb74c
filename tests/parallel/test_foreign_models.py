"""Plans on models of many kinds: each trains as one process does, or is refused within seconds."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from functools import partial
from inspect import signature
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fastfold.errors import ConfigError
from fastfold.parallel import Parallel, Pipeline, SequenceParallel, parallelize
from fastfold.parallel.tensor_parallel import (
    ParallelAttention,
    ParallelEmbedding,
    ParallelLayerNorm,
    ParallelLinear,
)
from fastfold.utils.module_structure import tensors_in
from tests.helpers.spawn_ranks import launch
from tests.parallel.foreign_models import NAMES, ROWS, TRANSFORMERS, build

STEPS = 2
_ALWAYS = ("own running mean", "batch norm", "running instance norm", "largest norm", "sparse")
REFUSED = {name: {0, 1, 2, 3} for name in _ALWAYS} | {name: {3} for name in ("scalar", "channels last")}
"""By model the ZeRO stages that are refused; all others train."""


def _loss(output: object) -> Tensor:
    return torch.stack([x.square().mean() for x in tensors_in(output) if x.requires_grad]).sum()


def _sgd(named: dict[str, nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(named.values(), lr=0.05, momentum=0.9)


def _expected(name: str) -> dict[str, Tensor]:
    model, inputs = build(name)
    optimizer = _sgd(dict(model.named_parameters()))
    for _ in range(STEPS):
        _loss(model(**inputs)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


def _outcome(name: str, zero: int) -> str | float:
    model, inputs = build(name)
    try:
        parallel = parallelize(copy.deepcopy(model), {"dp": 2, "zero": zero})
        optimizer = parallel.optimizer(_sgd)
        rows = parallel.rows(ROWS)
        for _ in range(STEPS):
            _loss(parallel(**{key: x[rows] for key, x in inputs.items()})).backward()
            optimizer.step()
            optimizer.zero_grad()
        expected, found = _expected(name), parallel.state_dict()
        assert found.keys() == expected.keys()
        # Not relative: a softmax leaves gradients of rounding errors to biases of its keys.
        return max(float((found[key] - x).abs().max()) for key, x in expected.items())
    except ConfigError as error:
        return str(error)


def _outcomes(name: str) -> dict[str, str | float]:
    logging.disable(logging.WARNING)
    found: dict[str, str | float] = {f"zero {zero}": _outcome(name, zero) for zero in range(4)}
    for kind in CUTS:
        if _cuts(build(name)[0], kind):
            found[kind] = _tried(_tensor_parallel, name, kind)
    found["sp"] = _tried(_sequence_parallel, name)
    for kind in ("halves", "inner halves"):
        found[kind] = _tried(_pipeline, name, kind)
    return found


def _tried(train: Callable[..., Parallel], name: str, *options: str) -> str | float:
    """Largest difference of the trained weights to those of one process, or the message of a ConfigError."""
    try:
        found = train(name, *options).state_dict()
    except ConfigError as error:
        return str(error)
    expected = _expected(name)
    assert found.keys() == expected.keys()
    return max(float((found[key] - x).abs().max()) for key, x in expected.items())


CUTS: dict[str, tuple[type[nn.Module], Any]] = {
    "tp linear": (nn.Linear, ParallelLinear.from_plain),
    "tp embedding": (nn.Embedding, ParallelEmbedding.from_plain),
    "tp attention": (nn.MultiheadAttention, ParallelAttention.from_plain),
    "tp norm": (nn.LayerNorm, ParallelLayerNorm.from_plain),
}
"""What a user cuts who knows nothing of the model: all layers of a class."""


def _cuts(model: nn.Module, kind: str) -> dict[str, Any]:
    layer, maker = CUTS[kind]
    paths = [path for path, x in model.named_modules() if path and isinstance(x, layer)]
    if kind != "tp linear":
        return dict.fromkeys(paths, maker)
    # One after the other, as first and second of a pair.
    roles = {path: ("first", "second")[number % 2] for number, path in enumerate(paths)}
    return {path: partial(maker, role=role) for path, role in roles.items()}


def _tensor_parallel(name: str, kind: str) -> Parallel:
    model, inputs = build(name)
    parallel = parallelize(model, {"tp": 2}, layers=_cuts(model, kind))
    optimizer = parallel.optimizer(_sgd)
    for _ in range(STEPS):
        _loss(parallel(**inputs)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return parallel


def _sequence_parallel(name: str) -> Parallel:
    """The second dimension is the sequence, whatever it means; where a model takes positions, they are given."""
    model, inputs = build(name)
    kinds = {type(x) for x in model.modules() if "Attention" in type(x).__name__} or {nn.MultiheadAttention}
    parallel = parallelize(
        model, {"sp": 2}, sequence=lambda m, group: SequenceParallel(m, group, attention=tuple(kinds))
    )
    optimizer, sequence = parallel.optimizer(_sgd), parallel.sequence
    ((key, x),) = inputs.items()
    own = {key: sequence.shard(x, 1)}
    if "position_ids" in signature(model.forward).parameters:
        own["position_ids"] = sequence.shard(torch.arange(x.shape[1]).expand(ROWS, -1), 1)
    for _ in range(STEPS):
        (_loss(parallel.module(**own)) * parallel.loss_share(own[key].shape[1])).backward()
        parallel.reduce_gradients()
        optimizer.step()
        optimizer.zero_grad()
    return parallel


def _halves(model: nn.Module, ranks: int, inner: bool) -> list[nn.Module]:
    """The children one after the other, as if nothing ran between them."""
    parts = list(model.children())
    while inner and len(parts) == 1 and list(parts[0].children()):
        parts = list(parts[0].children())
    half = (len(parts) + 1) // 2
    return [nn.Sequential(*parts[:half]), nn.Sequential(*parts[half:])]


def _pipeline(name: str, kind: str) -> Parallel:
    model, inputs = build(name)
    parallel = parallelize(model, {"pp": 2}, stages=partial(_halves, inner=kind == "inner halves"))
    optimizer, pipeline = parallel.optimizer(_sgd), Pipeline(parallel, "gpipe")
    (x,) = inputs.values()
    for _ in range(STEPS):
        pipeline.step([(part,) for part in x.chunk(2)], lambda output, _: _loss(output) / 2)
        parallel.reduce_gradients()
        optimizer.step()
        optimizer.zero_grad()
    return parallel


RIGHT = {
    "tp linear": {"perceptron", "frozen"},
    "tp embedding": {"embedding", "llama", "mistral", "qwen2", "mixtral", "t5"},
    "tp attention": {"attention"},
    "tp norm": {"nested lists", "gpt2", "bert", "albert", "opt"},
    "sp": {"encoder", "attention", "llama", "mistral", "qwen2", "mixtral", "gpt2", "bert", "albert", "opt"},
    "halves": {"perceptron", "weight norm", "prelu", "convolutions", "instance norm", "embedding"},
}
"""By kind the models that train; all others are refused."""
RIGHT["inner halves"] = RIGHT["halves"] | {"encoder"}


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_model_trains_as_one_process_does_or_is_refused(name: str) -> None:
    if name in TRANSFORMERS:
        pytest.importorskip("transformers")
    for found in launch(_outcomes, 2, name, timeout=120):
        refused = {kind for kind, outcome in found.items() if isinstance(outcome, str)}
        expected = {f"zero {zero}" for zero in REFUSED.get(name, set())}
        expected |= {kind for kind in found if kind in RIGHT and name not in RIGHT[kind]}
        assert refused == expected, found
        assert all(outcome < 1e-12 for outcome in found.values() if isinstance(outcome, float)), found


def test_there_are_forty_models() -> None:
    assert len(NAMES) >= 40
