"""A training step of an AlphaFold network, or a gradient of its inputs, as a workload for the planner."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from ml_collections import ConfigDict
from torch import Tensor, nn
from torch.utils._pytree import tree_iter

from fastfold.data.features import coevolution
from fastfold.errors import ConfigError
from fastfold.evoformer.config import is_multimer
from fastfold.evoformer.model import AlphaFold
from fastfold.evoformer.precision import autocast_trunk, element_size, set_precision
from fastfold.parallel.alphafold.dap import shard
from fastfold.parallel.mesh import ParallelMesh
from fastfold.parallel.planner.workload import Repeat, Workload, standard_layouts

_LEAVES = ("target_feat", "msa_feat")  #: Features that get a gradient

# Number of bytes per parameter in addition to Adam's: the average of the weights, in float32.
_AVERAGE = 4


def alphafold_workload(
    config: ConfigDict,
    *,
    residues: int = 256,
    msa: int = 128,
    extra_msa: int = 1024,
    samples: int = 128,
    precision: str = "bf16",
    recycles: int = 3,
    name: str = "the network",
) -> Workload:
    """Describe one optimisation step of AlphaFold training.

    The loss (a few percent of the arithmetic), the loader and validation are left out.

    Args:
        config: Official configuration tree.
        residues: Residues of a crop.
        msa: Sequences of the MSA (clusters).
        extra_msa: Sequences of the extra MSA.
        samples: Crops of a step.
        precision: ``bf16`` (trunk under autocast) or ``fp32``.
        recycles: Maximum number of recycling iterations; the number is drawn uniformly from 0 to this.
        name: Name of the workload in messages.

    Raises:
        ConfigError: The precision is unknown, or a size is too small.
    """
    _check(precision, recycles, residues=residues, msa=msa, extra_msa=extra_msa, samples=samples)
    stacks, small = alphafold_stacks(config), one_block_config(config)

    def build(mesh: ParallelMesh) -> nn.Module:
        network = shard(AlphaFold(small).train(), mesh)
        if precision == "bf16":
            autocast_trunk(network, "cpu")
        return network

    def loss(network: nn.Module) -> Tensor:
        result = network(dummy_features(config, residues, msa, extra_msa), 0)
        tensors = [x for x in tree_iter(result) if isinstance(x, Tensor) and x.requires_grad]
        return torch.stack([x.float().sum() for x in tensors]).sum()

    return Workload(
        name=name,
        build=build,
        loss=loss,
        samples=samples,
        stacks=stacks,
        # A rank needs at least one residue's row.
        layouts=standard_layouts(dap=residues, grid=True),
        # Each sample's gradient is clipped. Stage 3 never has it, and a pipeline sums several.
        zero=(0, 1, 2),
        passes=recycles / 2,
        copied_bytes=_AVERAGE,
        small=True,  # AlphaFold's initialisation repeats draws that are too large
        description=f"{residues} residues, MSA {msa}, extra MSA {extra_msa}, {precision}, "
        f"0 to {recycles} recycling iterations, batch {samples}",
        settings=(
            f"data.crop_size={residues}",
            f"optim.batch_size={samples}",
            f"trainer.precision={precision}",
        ),
    )


def input_gradient_workload(
    config: ConfigDict,
    *,
    residues: int,
    score: Callable[[dict[str, Any]], Tensor],
    settings: Callable[[AlphaFold], None] = lambda _: None,
    recompute: bool = False,
    msa: int = 1,
    extra_msa: int = 1,
    precision: str = "fp32",
    recycles: int = 0,
    name: str = "the network",
) -> Workload:
    """Describe one pass with gradients of the features of target and MSA; parameters get none.

    Args:
        config: Official configuration tree.
        residues: Residues, of all chains.
        score: Loss of the network's result tree.
        settings: Called with the network on each rank, to set how it records gradients.
        recompute: True if the backward pass recomputes blocks, and ``settings`` lets the modules outside them recompute
            rows.
        msa: Rows of the MSA, without templates.
        extra_msa: Rows of the extra MSA.
        precision: ``bf16`` (parameters and activations of the trunk) or ``fp32``.
        recycles: Passes without gradients before.
        name: Name of the workload in messages.

    Raises:
        ConfigError: The precision is unknown, or a size is too small.
    """
    _check(precision, recycles, residues=residues, msa=msa)
    stacks, small = alphafold_stacks(config), one_block_config(config)

    def build(mesh: ParallelMesh) -> nn.Module:
        network = set_precision(AlphaFold(small), precision).requires_grad_(False)
        network = shard(network.train(), mesh)
        settings(network)
        network.set_checkpointing(recompute)
        return network

    def loss(network: nn.Module) -> Tensor:
        features = {
            key: value[0, 0] for key, value in dummy_features(config, residues, msa, extra_msa).items()
        }
        for key in _LEAVES:
            features[key] = features[key].requires_grad_()
        return score(network(lambda cycle, member: features, 0, recycle_tolerance=0.0))

    return Workload(
        name=name,
        build=build,
        loss=loss,
        samples=1,
        stacks=stacks,
        layouts=standard_layouts(dap=residues),
        zero=(0,),
        passes=recycles,
        parameter_bytes=element_size(precision),
        frozen=True,
        recomputed=recompute,
        small=True,  # AlphaFold's initialisation repeats draws that are too large
        description=f"{residues} residues, {precision}, {recycles} recycling iterations, gradients of the inputs",
    )


def _check(precision: str, recycles: int, **sizes: int) -> None:
    for name, value, least in (*((name, size, 1) for name, size in sizes.items()), ("recycles", recycles, 0)):
        if value < least:
            raise ConfigError(f"{name}: expected at least {least}, found {value}")
    if precision not in ("bf16", "fp32"):
        raise ConfigError(f"precision: expected bf16 or fp32, found {precision!r}")


def alphafold_stacks(config: ConfigDict) -> dict[str, Repeat]:
    """Return the modules of :func:`one_block_config` that a network repeats, each with its number."""
    trunk = config.model.embeddings_and_evoformer
    numbers = {"evoformer": trunk.evoformer_num_block, "extra_msa_stack": trunk.extra_msa_stack_num_block}
    if trunk.template.enabled:
        numbers["template_embedder.stack"] = trunk.template.template_pair_stack.num_block
    return {f"{stack}.blocks.0": Repeat(number) for stack, number in numbers.items() if number}


def one_block_config(config: ConfigDict) -> ConfigDict:
    """Return the network's configuration with one block per stack, and none where it has none.

    The structure module keeps its layers, which share the normalised pair and the final atoms.
    """
    small = config.copy_and_resolve_references()
    trunk = small.model.embeddings_and_evoformer
    trunk.evoformer_num_block = min(1, trunk.evoformer_num_block)
    trunk.extra_msa_stack_num_block = min(1, trunk.extra_msa_stack_num_block)
    if trunk.template.enabled:
        stack = trunk.template.template_pair_stack
        stack.num_block = min(1, stack.num_block)
    return small


def dummy_features(config: ConfigDict, residues: int, msa: int, extra_msa: int) -> dict[str, Tensor]:
    """Create features of the right shapes, batch size 1, for one cycle, with AlphaFold's keys.

    The first axis of each tensor is the cycle. ``msa`` counts rows without templates.
    """
    multimer = is_multimer(config)
    templates = config.model.embeddings_and_evoformer.template.get("max_templates", 4)

    def whole(*shape: int) -> Tensor:
        return torch.zeros(1, 1, *shape, dtype=torch.int64)

    def real(*shape: int) -> Tensor:
        return torch.ones(1, 1, *shape)

    coupled = {}
    if config.model.embeddings_and_evoformer.get("coevolution", False):
        coupled = {
            "coevolution_single": real(residues, coevolution.SINGLE_CHANNELS),
            "coevolution_pair": real(residues, residues, coevolution.PAIR_CHANNELS),
        }
    return coupled | {
        "aatype": whole(residues),
        "residue_index": whole(residues),
        "seq_mask": real(residues),
        "target_feat": real(residues, 21 if multimer else 22),
        "msa_feat": real(msa, residues, 49),
        "msa_mask": real(msa, residues),
        "extra_msa": whole(extra_msa, residues),
        "extra_has_deletion": real(extra_msa, residues),
        "extra_deletion_value": real(extra_msa, residues),
        "extra_msa_mask": real(extra_msa, residues),
        "template_mask": real(templates),
        "template_aatype": whole(templates, residues),
        "template_pseudo_beta": real(templates, residues, 3),
        "template_pseudo_beta_mask": real(templates, residues),
        "template_all_atom_positions": real(templates, residues, 37, 3),
        "template_all_atom_masks": real(templates, residues, 37),
        "template_all_atom_mask": real(templates, residues, 37),
        "asym_id": whole(residues),
        "entity_id": whole(residues),
        "sym_id": whole(residues),
    }
