"""Layers of the network with inputs for them, and a step of each on one process and on shards."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from fastfold.parallel.alphafold import axial_parallel
from fastfold.parallel.axial.shards import AxialShards
from fastfold.parallel.comm.collectives import all_reduce
from fastfold.parallel.comm.groups import Group
from fastfold.parallel.mesh import ParallelMesh
from fastfold.protein.rigid import Rigid, quaternion_to_rotation
from tests.helpers.mean_gradients import mean_gradients
from tests.helpers.networks import oracle_config, random_model
from tests.helpers.spawn_ranks import on_first_rank

# Neither divides by 2, 4 or 8, and with 8 ranks some have no sequence at all.
RESIDUES, SEQUENCES = 7, 5
C_M, C_E, C_Z, C_T, C_S = 32, 16, 24, 16, 40


@dataclass(frozen=True)
class Case:
    """A module of a network and what it is given.

    Attributes:
        network: Oracle whose configuration the network has.
        path: Name of the module in it.
        shapes: Shapes of its inputs behind the batch axes; ``"mask"`` in front of a shape makes zeros and ones.
        cuts: The axis along which each input is cut; 0 for one that every rank has whole.
        results: The axis along which each output is cut.
        call: What to call the module with; ``module(*inputs)`` by default.
        blocks: Evoformer blocks of the network.
    """

    network: str
    path: str
    shapes: Sequence[tuple[Any, ...]]
    cuts: Sequence[int]
    results: Sequence[int]
    call: Callable[..., Any] = field(default=lambda module, *inputs: module(*inputs))
    blocks: int = 2


def _monomer_msa(c: int) -> tuple[int, int, int]:
    return (SEQUENCES, RESIDUES, c)


PAIR, PAIR_MASK = (RESIDUES, RESIDUES, C_Z), ("mask", RESIDUES, RESIDUES)
MSA_MASK = ("mask", SEQUENCES, RESIDUES)
MONOMER, MULTIMER = "synthetic_monomer", "synthetic_multimer"
_BLOCK = "evoformer.blocks.1"


def _attend(module: nn.Module, single: Tensor, pair: Tensor, quaternion: Tensor, move: Tensor) -> Tensor:
    frames = Rigid(quaternion_to_rotation(quaternion / quaternion.norm(dim=-1, keepdim=True)), move)
    mask = torch.ones_like(single[..., 0])
    mask[..., -1] = 0.0
    return module(single, pair, frames, mask)


def _structure(module: nn.Module, single: Tensor, pair: Tensor) -> tuple[Tensor, ...]:
    aatype = torch.arange(RESIDUES).expand(single.shape[:-1])
    found = module(single, pair, aatype, torch.ones_like(single[..., 0]))
    return found["act"], found["final_atom_positions"], found["traj"]


CASES = {
    "row attention": Case(
        MONOMER,
        f"{_BLOCK}.msa_row_attention",
        [_monomer_msa(C_M), PAIR, MSA_MASK],
        [-3, -2, -2],
        [-3],
    ),
    "outer product": Case(
        MONOMER, f"{_BLOCK}.outer_product_mean", [_monomer_msa(C_M), PAIR, MSA_MASK], [-2, -2, 0], [-2]
    ),
    "outgoing": Case(
        MONOMER, f"{_BLOCK}.triangle_multiplication_outgoing", [PAIR, PAIR_MASK], [-2, -1], [-2]
    ),
    "incoming": Case(
        MONOMER, f"{_BLOCK}.triangle_multiplication_incoming", [PAIR, PAIR_MASK], [-3, -2], [-3]
    ),
    "starting": Case(MONOMER, f"{_BLOCK}.triangle_attention_starting", [PAIR, PAIR_MASK], [-3, -2], [-3]),
    "ending": Case(MONOMER, f"{_BLOCK}.triangle_attention_ending", [PAIR, PAIR_MASK], [-2, -1], [-2]),
    "monomer block": Case(
        MONOMER, _BLOCK, [_monomer_msa(C_M), PAIR, MSA_MASK, PAIR_MASK], [-3, -2, 0, 0], [-3, -2]
    ),
    "multimer block": Case(
        MULTIMER, _BLOCK, [_monomer_msa(C_M), PAIR, MSA_MASK, PAIR_MASK], [-2, -2, 0, 0], [-2, -2]
    ),
    "monomer stack": Case(
        MONOMER, "evoformer", [_monomer_msa(C_M), PAIR, MSA_MASK, PAIR_MASK], [-3, -3, 0, 0], [-3, -3]
    ),
    "multimer stack": Case(
        MULTIMER, "evoformer", [_monomer_msa(C_M), PAIR, MSA_MASK, PAIR_MASK], [-3, -3, 0, 0], [-3, -3]
    ),
    "extra msa stack": Case(
        MONOMER, "extra_msa_stack", [_monomer_msa(C_E), PAIR, MSA_MASK, PAIR_MASK], [-3, -3, 0, 0], [-3, -3]
    ),
    "monomer template stack": Case(
        MONOMER, "template_embedder.stack", [(RESIDUES, RESIDUES, C_T), PAIR_MASK], [-3, 0], [-3]
    ),
    "multimer template stack": Case(
        MULTIMER, "template_embedder.stack", [(RESIDUES, RESIDUES, C_T), PAIR_MASK], [-3, 0], [-3]
    ),
    "point attention": Case(
        MONOMER,
        "structure_module.attention",
        [(RESIDUES, C_S), PAIR, (RESIDUES, 4), (RESIDUES, 3)],
        [0, -3, 0, 0],
        [0],
        _attend,
    ),
    "structure module": Case(
        MULTIMER, "structure_module", [(RESIDUES, C_S), PAIR], [0, -3], [0, 0, 0], _structure
    ),
    "distogram": Case(
        MONOMER,
        "heads.distogram",
        [PAIR],
        [-3],
        [-3],
        lambda module, pair: module({"pair": pair})["logits"],
    ),
}


def difference(found: Tensor, expected: Tensor, whole: Tensor | None = None, least: float = 0.0) -> float:
    """Largest difference, relative to the largest number of the whole tensor.

    Args:
        found: What was computed.
        expected: What it should be.
        whole: What ``expected`` is a shard of.
        least: Least number to be relative to, for what is zero but for rounding.
    """
    assert found.shape == expected.shape, (found.shape, expected.shape)
    scale = max((expected if whole is None else whole).abs().max().item(), least)
    assert scale > 0, "a tensor of zeros compares nothing"
    return (found - expected).abs().max().item() / scale if found.numel() else 0.0


@lru_cache
def _network(name: str, blocks: int) -> nn.Module:
    config = oracle_config(name)
    config.model.embeddings_and_evoformer.evoformer_num_block = blocks
    return random_model(config, dtype=torch.float64)


def plain_module(case: Case) -> nn.Module:
    """The case's module with the same random parameters on every rank, in training mode with dropout."""
    return copy.deepcopy(_network(case.network, case.blocks).get_submodule(case.path)).train()


def inputs_of(case: Case, batch: tuple[int, ...]) -> list[Tensor]:
    """Random inputs, the same on every rank; a fifth of a mask is zero."""
    generator = torch.Generator().manual_seed(3)
    found = []
    for shape in case.shapes:
        if shape[0] == "mask":
            found.append((torch.rand(*batch, *shape[1:], generator=generator) > 0.2).double())
        else:
            found.append(torch.randn(*batch, *shape, generator=generator, dtype=torch.float64))
    return found


@dataclass
class Step:
    """Outputs of a step and the gradients of inputs (None for masks) and parameters."""

    outputs: list[Tensor]
    inputs: list[Tensor | None]
    parameters: dict[str, Tensor | None]


def run_step(
    case: Case, module: nn.Module, inputs: Sequence[Tensor], take: Callable[[Tensor, int], Tensor]
) -> Step:
    """Forward with dropout, and backward of a random sum of the outputs; ``take`` cuts what is to be cut."""
    leaves = []
    for shape, x, cut in zip(case.shapes, inputs, case.cuts, strict=True):
        part = take(x, cut).clone()
        leaves.append(part if shape[0] == "mask" else part.requires_grad_())
    torch.manual_seed(11)
    result = case.call(module, *leaves)
    outputs = list(result) if isinstance(result, tuple) else [result]
    generator = torch.Generator().manual_seed(5)
    loss = torch.zeros((), dtype=torch.float64)
    for number, (output, cut) in enumerate(zip(outputs, case.results, strict=True)):
        whole = list(output.shape)
        if cut:
            # Two results are an MSA and a pair; a single one of the MSA is that of a case that gives no pair.
            sequences = cut == -3 and number == 0 and MSA_MASK in case.shapes
            whole[cut] = SEQUENCES if sequences else RESIDUES
        weight = torch.randn(whole, generator=generator, dtype=torch.float64)
        loss = loss + (output * take(weight, cut)).sum()
    loss.backward()
    return Step(
        [output.detach() for output in outputs],
        [leaf.grad for leaf in leaves],
        {name: p.grad for name, p in module.named_parameters()},
    )


def differences(
    case: Case,
    mesh: ParallelMesh,
    batch: tuple[int, ...] = (),
    make_parallel: Callable[[nn.Module, ParallelMesh], nn.Module] = axial_parallel,
) -> dict[str, float]:
    """Largest difference of each output, input gradient and parameter gradient between one process and shards.

    Where all outputs are cut, the sum of the ranks' losses is the plain loss and so are the sums of gradients; where
    they are whole, every rank's loss is the plain one and the gradients' means are.
    """
    return compared_step(case, mesh, batch, make_parallel)()


def compared_step(
    case: Case,
    mesh: ParallelMesh,
    batch: tuple[int, ...] = (),
    make_parallel: Callable[[nn.Module, ParallelMesh], nn.Module] = axial_parallel,
) -> Callable[[], dict[str, float]]:
    """A step on shards that gives :func:`differences` whenever it is called, from one step of one process."""
    plain, inputs = plain_module(case), inputs_of(case, batch)
    expected = on_first_rank(lambda: run_step(case, plain, inputs, lambda x, _: x))
    module = make_parallel(copy.deepcopy(plain), mesh)
    return lambda: _sharded_differences(case, mesh, module, inputs, expected)


def rounding(
    case: Case,
    mesh: ParallelMesh,
    dtype: torch.dtype,
    make_parallel: Callable[[nn.Module, ParallelMesh], nn.Module] = axial_parallel,
) -> tuple[dict[str, float], dict[str, float]]:
    """Differences from float64, without dropout, of shards in a dtype, and of one process in it."""
    exact, inputs = plain_module(case).eval(), inputs_of(case, ())
    expected = on_first_rank(lambda: run_step(case, exact, inputs, lambda x, _: x))
    plain, rounded = copy.deepcopy(exact).to(dtype), [x.to(dtype) for x in inputs]
    module = make_parallel(copy.deepcopy(plain), mesh)
    shards = _sharded_differences(case, mesh, module, rounded, expected)
    alone = AxialShards(Group(None))
    own = on_first_rank(lambda: run_step(case, plain, rounded, lambda x, _: x))
    return shards, _step_differences(case, alone, own, expected)


def _sharded_differences(
    case: Case,
    mesh: ParallelMesh,
    module: nn.Module,
    inputs: Sequence[Tensor],
    expected: Step,
) -> dict[str, float]:
    """Of a parallel module, on this rank's shards of the inputs, from a step of one process."""
    module.zero_grad()
    shards = AxialShards(mesh.group("dap"))
    found = run_step(case, module, inputs, lambda x, cut: shards.take(x, cut) if cut else x)
    mean_gradients(module.parameters(), shards.group)
    found.parameters = {name: p.grad for name, p in module.named_parameters()}
    return _step_differences(case, shards, found, expected)


def _step_differences(case: Case, shards: AxialShards, found: Step, expected: Step) -> dict[str, float]:
    """Of a step on shards, whose parameters' gradients are means over the ranks already."""

    def own(x: Tensor, cut: int) -> Tensor:
        return shards.take(x, cut) if cut else x

    # Every rank's loss is the plain one, or a part of it.
    parts = 1 if not all(case.results) else shards.group.size
    worst = {}
    for number, (a, b, cut) in enumerate(zip(found.outputs, expected.outputs, case.results, strict=True)):
        worst[f"output {number}"] = difference(a, own(b, cut), b)
    for number, (a, b, cut) in enumerate(zip(found.inputs, expected.inputs, case.cuts, strict=True)):
        if a is None or b is None:
            assert a is b
            continue
        if not cut:
            a = all_reduce(a, shards.group)
        worst[f"gradient of input {number}"] = difference(a / shards.group.size * parts, own(b, cut), b)
    # A constant added to all keys changes no attention, so the gradient of such a bias is rounding and nothing else.
    least = 1e-3 * max(b.abs().max().item() for b in expected.parameters.values() if b is not None)
    for name, b in expected.parameters.items():
        a = found.parameters[name]
        if a is None or b is None:
            assert a is b, f"{name} has a gradient on one side only"
            continue
        worst[f"gradient of {name}"] = difference(a * parts, b, least=least)
    return worst
