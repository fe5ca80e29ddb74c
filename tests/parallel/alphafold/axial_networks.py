"""Whole networks with features and labels, a training step of them, and the comparison of two."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from ml_collections import ConfigDict
from torch import Tensor

from fastfold.data.features.pipeline import sampler_from_merged
from fastfold.data.training.labels import structure_labels
from fastfold.evoformer.losses import alphafold_loss
from fastfold.evoformer.model import AlphaFold
from fastfold.evoformer.weights.checkpoint import load_model
from fastfold.parallel.alphafold import axial_parallel
from fastfold.parallel.mesh import ParallelMesh
from fastfold.parallel.plan import ParallelPlan
from tests.helpers.mean_gradients import mean_gradients
from tests.helpers.networks import oracle_arrays, oracle_config, oracle_features, random_model
from tests.helpers.spawn_ranks import on_first_rank
from tests.parallel.alphafold.axial_cases import difference

CYCLES = 2

BLIND = (
    "msa_row_attention.pair_norm.bias",
    "structure_module.attention.key.bias",
    "structure_module.attention.pair_bias.bias",
)
"""Endings of parameters that add the same to a query's logits with all keys, of which a softmax sees nothing.

Their gradients are zero but for rounding, and are compared relative to the network's largest."""


@dataclass
class Sample:
    """Features of all cycles, and those of the last one with the labels."""

    features: dict[str, Tensor]
    batch: dict[str, Tensor]


def monomer_sample(residues: int, sequences: int, extra: int, first: int = 0) -> Sample:
    """Some residues and sequences of the synthetic monomer; it has 28, 10 and 12."""
    features = oracle_features(dtype=torch.float64)
    wanted = {28: slice(first, first + residues), 10: slice(0, sequences), 12: slice(0, extra)}
    cut = {}
    for key, value in features.items():
        index = tuple(wanted.get(size, slice(None)) for size in value.shape[1:3])
        cut[key] = value[(slice(None), *index)]
    return Sample(cut, {key: value[-1] for key, value in cut.items()})


def multimer_sample(residues: int = 21) -> Sample:
    """The first residues of the synthetic complex: 18 of its first chain, the others of its second."""
    config = oracle_config("synthetic_multimer")
    merged = oracle_arrays("synthetic_multimer", "features")
    stacked = sampler_from_merged(merged, config, deterministic=True).stack(CYCLES)
    names = ("aatype", "all_atom_positions", "all_atom_mask")
    labels = structure_labels(*(merged[name] for name in names), resolution=2.0)
    whole = len(merged["aatype"])

    def cut(value: Any, axes: slice) -> Tensor:
        found = torch.as_tensor(np.asarray(value))
        shape = found.shape[axes]
        index = tuple(slice(0, residues) if size == whole else slice(None) for size in shape)
        found = found[(*(slice(None),) * (axes.start or 0), *index)]
        return found.double() if found.is_floating_point() else found

    features = {key: cut(value, slice(1, 3)) for key, value in stacked.items()}
    batch = {key: value[-1] for key, value in features.items()}
    return Sample(features, batch | {key: cut(value, slice(0, 1)) for key, value in labels.items()})


def recorded_run(directory: Path) -> tuple[AlphaFold, Sample]:
    """Network, features and labels of a recorded run of a monomer, in float64, with dropout."""
    config = ConfigDict(json.loads((directory / "config.json").read_text()))
    model = load_model(directory / "params.npz", config=config).double().train()
    with np.load(directory / "features.npz") as archive:
        features = {key: torch.from_numpy(archive[key]) for key in archive.files}
    features = {k: v.double() if v.is_floating_point() else v for k, v in features.items()}
    return model, Sample(features, {key: value[-1] for key, value in features.items()})


def small_network(name: str, *, blocks: int = 1, recycles: int = CYCLES - 1) -> AlphaFold:
    """A random network of a recorded run's configuration with few blocks, dropout on."""
    config = oracle_config(name)
    trunk = config.model.embeddings_and_evoformer
    trunk.evoformer_num_block, trunk.extra_msa_stack_num_block = blocks, 1
    config.model.num_recycle = recycles
    config.model.heads.structure_module.num_layer = 2
    return random_model(config, dtype=torch.float64).train()


def train_step(model: AlphaFold, sample: Sample, seed: int = 1) -> dict[str, Any]:
    """Fold with dropout, and leave the gradients of the whole loss in the parameters."""
    torch.manual_seed(seed)
    result = model(sample.features)
    loss, parts = alphafold_loss(result, sample.batch, model.config)
    loss.backward()
    structure = result["structure_module"]
    found = {"loss": loss, "positions": structure["final_atom_positions"], "frames": structure["traj"]}
    for name in model.heads:
        logits, rows = result[name]["logits"], result[name].get("rows")
        found[f"{name} logits"] = logits if rows is None else rows.join(logits, -3)
    found |= {f"{name} loss": part["loss"] for name, part in parts.items()}
    return {key: value.detach() for key, value in found.items()}


def gradient_differences(found: AlphaFold, expected: AlphaFold) -> Iterator[tuple[str, float]]:
    """Of every parameter's gradient, relative to its largest element."""
    theirs = {name: p.grad for name, p in expected.named_parameters()}
    largest = max(g.abs().max().item() for g in theirs.values() if g is not None)
    for name, parameter in found.named_parameters():
        ours, right = parameter.grad, theirs.pop(name)
        if ours is None or right is None:
            assert ours is right, f"{name} has a gradient on one side only"
            continue
        least = largest if name.endswith(BLIND) else 1e-9 * largest
        yield f"gradient of {name}", difference(ours, right, least=least)
    assert not theirs


def worst_of(differences: Mapping[str, float] | Iterator[tuple[str, float]]) -> tuple[float, str]:
    """The largest difference and what differs so."""
    return max((value, name) for name, value in dict(differences).items())


def plain_steps(
    model: AlphaFold, samples: list[Sample], seed: int
) -> tuple[list[dict[str, Any]], list[Tensor | None]]:
    """Return what a step of each sample gives on one process, and the mean gradient of each parameter."""
    expected = [train_step(model, sample, seed + i) for i, sample in enumerate(samples)]
    gradients = [p.grad for p in model.parameters()]
    return expected, [None if gradient is None else gradient / len(samples) for gradient in gradients]


def compare_training(
    model: AlphaFold,
    samples: list[Sample],
    plan: ParallelPlan,
    *,
    steps: int = 1,
    checkpointing: bool = False,
    make_parallel: Callable[[AlphaFold, ParallelMesh], AlphaFold] = axial_parallel,
) -> list[tuple[float, str]]:
    """Training of one process next to that on shards.

    Args:
        model: The network.
        samples: One for each data parallel rank.
        plan: Data parallel and DAP ranks.
        steps: Optimisation steps; parameters are compared after each.
        checkpointing: Whether the sharded network recomputes its blocks.
        make_parallel: Shards the network.

    Returns:
        Of each step the worst of its outputs, losses, gradients and updated parameters.
    """
    mesh = ParallelMesh(plan)
    parallel = make_parallel(copy.deepcopy(model), mesh)
    parallel.set_checkpointing(checkpointing)
    optimizers = [torch.optim.SGD(m.parameters(), lr=1e-3, momentum=0.9) for m in (model, parallel)]
    own = mesh.group("dp").rank
    found = []
    for step in range(steps):
        for optimizer in optimizers:
            optimizer.zero_grad()
        expected, gradients = on_first_rank(partial(plain_steps, model, samples, 100 * step))
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            parameter.grad = gradient
        ours = train_step(parallel, samples[own], 100 * step + own)
        mean_gradients(parallel.parameters(), mesh.group("replicas"))
        # A loss may be zero: nothing of a single sequence is masked.
        worst = {name: difference(value, expected[own][name], least=1e-9) for name, value in ours.items()}
        worst |= dict(gradient_differences(parallel, model))
        for optimizer in optimizers:
            optimizer.step()
        theirs = dict(model.named_parameters())
        worst |= {
            name: difference(p.detach(), theirs[name].detach(), least=1e-9)
            for name, p in parallel.named_parameters()
        }
        found.append(worst_of(worst))
    return found
