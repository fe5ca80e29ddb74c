"""The sum of all losses, of monomers and complexes: chains, batches, half precision, empty masks, gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fastfold.data.features.pipeline import sampler_from_merged
from fastfold.data.training.labels import structure_labels
from fastfold.evoformer.config import model_config
from fastfold.evoformer.losses import alphafold_loss
from fastfold.evoformer.losses.fape import backbone_fape, complex_backbone_fape
from fastfold.evoformer.losses.permutation import permute_labels, split_chains
from fastfold.evoformer.losses.total import structure_loss
from fastfold.evoformer.losses.violation import find_violations, violation_loss
from fastfold.evoformer.structure.structure_module import StructureModule
from fastfold.protein import residue_constants as rc
from tests.helpers.networks import oracle_arrays, oracle_config, oracle_features, random_model

MONOMER, MULTIMER = oracle_config(), oracle_config("synthetic_multimer")
LABELS = {key: value[-1] for key, value in oracle_features(dtype=torch.float64).items()}
LENGTH = len(LABELS["aatype"])
Tree = dict[str, Any]


def _batch(*, multimer: bool = True) -> dict[str, torch.Tensor]:
    """The recorded labels; for a complex the chain is cut in two, each numbered from zero."""
    if not multimer:
        return dict(LABELS)
    half = LENGTH // 2
    second = (torch.arange(LENGTH) >= half).long()
    return LABELS | {
        "asym_id": second + 1,
        "entity_id": second + 1,
        "sym_id": torch.ones_like(second),
        "residue_index": torch.arange(LENGTH) - half * second,
    }


def _structure_module(config: Any, *, multimer: bool) -> StructureModule:
    torch.manual_seed(0)
    node = config.model.heads.structure_module
    return StructureModule(node, node.num_channel, 8, multimer=multimer, zero_init=False)


def _result(config: Any, batch: dict[str, torch.Tensor], *, multimer: bool = True, seed: int = 0) -> Tree:
    """What a network's heads could return, in float64."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).double()

    heads, n = config.model.heads, len(batch["aatype"])
    module = _structure_module(config, multimer=multimer).double().eval()
    structure = module(
        random(n, module.initial.in_features), random(n, n, 8), batch["aatype"], batch["seq_mask"]
    )
    rows = batch["bert_mask"].shape[-2]
    pae = heads.predicted_aligned_error
    edges = torch.linspace(
        heads.distogram.first_break, heads.distogram.last_break, heads.distogram.num_bins - 1
    )
    return {
        "structure_module": structure,
        "distogram": {"logits": random(n, n, heads.distogram.num_bins), "bin_edges": edges},
        "masked_msa": {"logits": random(rows, n, heads.masked_msa.get("num_output", 22))},
        "experimentally_resolved": {"logits": random(n, 37)},
        "predicted_lddt": {"logits": random(n, heads.predicted_lddt.num_bins)},
        "predicted_aligned_error": {
            "logits": random(n, n, pae.num_bins),
            "breaks": torch.linspace(0.0, pae.max_error_bin, pae.num_bins - 1),
        },
    }


def _map(tree: Any, function: Any) -> Any:
    return {k: _map(v, function) for k, v in tree.items()} if isinstance(tree, dict) else function(tree)


def _float(x: torch.Tensor) -> torch.Tensor:
    return x.float() if x.is_floating_point() else x


def _numbers(tree: Any) -> list[torch.Tensor]:
    return [x for value in tree.values() for x in _numbers(value)] if isinstance(tree, dict) else [tree]


def _case(multimer: bool) -> tuple[Any, dict[str, torch.Tensor]]:
    return (MULTIMER if multimer else MONOMER), _batch(multimer=multimer)


def test_every_term_of_a_complex() -> None:
    """The parts have the official names, and the total is the official weighting of them."""
    config, batch = _case(True)
    total, parts = alphafold_loss(_result(config, batch), batch, config)
    structure, weights = parts["structure_module"], config.model.heads
    assert set(parts) == {name for name in weights if name != "global_config"}
    fape = structure["intra_chain_fape"] + structure["interface_fape"]
    torch.testing.assert_close(structure["fape"], fape)
    expected = sum(weights[name].weight * part["loss"] for name, part in parts.items())
    torch.testing.assert_close(total, expected)
    assert all(part["loss"] > 0 for part in parts.values())


def test_one_chain_has_the_fape_of_a_monomer() -> None:
    """With the monomer's clamping; and no interface."""
    config, batch = _case(True)
    batch["asym_id"] = torch.ones(LENGTH)
    structure = _result(config, batch)["structure_module"]
    within, between = complex_backbone_fape(structure, batch, config.model.heads.structure_module)
    torch.testing.assert_close(within, backbone_fape(structure, batch, MONOMER.model.heads.structure_module))
    assert not between.any()


def _fapes(move: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """FAPE within chains and between them after moving the second chain of the truth by ``move [3]`` (Å)."""
    config, batch = _case(True)
    truth = batch["backbone_affine_tensor"].clone()
    second = (batch["asym_id"] == 2).double()[:, None]
    moved = torch.cat([truth[..., :4], truth[..., 4:] + second * move], -1)
    return complex_backbone_fape({"traj": moved[None]}, batch, config.model.heads.structure_module)


def test_moving_a_chain_is_an_error_of_the_interface_alone() -> None:
    """100 Å away, far beyond the clamp within chains: 100 Å in the interface's unit of 20 Å, and it still pulls."""
    move = torch.tensor([100.0, 0.0, 0.0]).double().requires_grad_()
    within, between = _fapes(move)
    assert within.item() == pytest.approx(0.01 / 10.0, rel=1e-3)
    assert between.item() == pytest.approx(100.0 / 20.0, rel=1e-3)
    assert torch.autograd.grad(within.sum(), move, retain_graph=True)[0].abs().max() < 1e-9
    assert torch.autograd.grad(between.sum(), move)[0][0].item() == pytest.approx(1 / 20.0, rel=1e-3)


def test_the_interface_is_clamped_where_the_configuration_says() -> None:
    config, batch = _case(True)
    node = config.model.heads.structure_module.copy_and_resolve_references()
    node.interface_fape.atom_clamp_distance = 30.0
    truth = batch["backbone_affine_tensor"]
    moved = truth + 100.0 * torch.nn.functional.pad((batch["asym_id"] == 2).double()[:, None], (4, 2))
    between = complex_backbone_fape({"traj": moved[None]}, batch, node)[1]
    assert between.item() == pytest.approx(30.0 / 20.0, rel=1e-3)


def test_chains_have_no_bond() -> None:
    """Numbers that go on over the end of a chain do not make its neighbour the next residue."""
    config, batch = _case(True)
    node = config.model.heads.structure_module
    batch["residue_index"] = torch.arange(LENGTH)
    half = LENGTH // 2
    exists = torch.zeros(LENGTH, 14).double()
    exists[half - 1 : half + 1, :3] = 1.0
    batch["atom14_atom_exists"] = exists
    positions = batch["atom14_gt_positions"].clone()
    positions[half:] += 50.0
    apart = find_violations(positions, batch, node)["between_residues"]
    assert not apart["connections_per_residue_violation_mask"].any()
    assert not apart["bonds_c_n_loss_mean"].any()
    del batch["asym_id"]
    broken = find_violations(positions, batch, node)["between_residues"]
    assert broken["connections_per_residue_violation_mask"].nonzero().squeeze(-1).tolist() == [half - 1, half]


@pytest.mark.parametrize("numbers", [(3, 3), (3, 4), (4, 3), (7, 2)])
def test_clashes_between_chains_count_once(numbers: tuple[int, int]) -> None:
    """Whatever their numbers, C and N of two chains at 1.3 Å clash; in one chain they are a bond."""
    node = MULTIMER.model.heads.structure_module
    exists = torch.zeros(2, 14).double()
    exists[0, 2] = exists[1, 0] = 1.0
    positions = torch.zeros(2, 14, 3).double()
    positions[1, :, 0] = 1.3
    batch = {
        "atom14_atom_exists": exists,
        "residue_index": torch.tensor(numbers),
        "aatype": torch.zeros(2, dtype=torch.long),
        "asym_id": torch.tensor([1, 2]),
    }
    found = find_violations(positions, batch, node)["between_residues"]
    overlap = rc.element_radius["C"] + rc.element_radius["N"] - 1.5 - 1.3
    assert found["clashes_per_atom_loss_sum"].sum().item() == pytest.approx(2 * overlap)
    batch |= {"asym_id": torch.tensor([1, 1]), "residue_index": torch.tensor([3, 4])}
    assert not find_violations(positions, batch, node)["between_residues"]["clashes_per_atom_loss_sum"].any()


@pytest.mark.parametrize("multimer", [False, True])
def test_gradient_of_every_part(multimer: bool) -> None:
    """Derivatives along a random direction of all outputs at once, against central differences in float64."""
    config, batch = _case(multimer)
    start = _map(_result(config, batch, multimer=multimer), torch.Tensor.detach)
    generator = torch.Generator().manual_seed(7)
    # Near the truth, where errors are not clamped.
    near = torch.randn(start["structure_module"]["traj"].shape, generator=generator).double()
    start["structure_module"]["traj"] = batch["backbone_affine_tensor"] + near
    direction = _map(start, lambda x: torch.randn(x.shape, generator=generator).double())

    def parts(shift: float | torch.Tensor) -> dict[str, torch.Tensor]:
        def moved(tree: Any, along: Any) -> Any:
            if isinstance(tree, dict):
                fixed = ("bin_edges", "breaks")
                return {k: v if k in fixed else moved(v, along[k]) for k, v in tree.items()}
            return tree + shift * along

        tree = alphafold_loss(moved(start, direction), batch, config)[1]
        structure = tree["structure_module"]
        names = ["loss", "fape", "sidechain_fape", "chi_loss", "angle_norm_loss"]
        names += ["intra_chain_fape", "interface_fape"] if multimer else []
        found = {name: structure[name] for name in names}
        found["violation"] = violation_loss(structure["violations"], batch)
        return found | {name: tree[name]["loss"] for name in tree if name != "structure_module"}

    shift = torch.zeros((), dtype=torch.float64, requires_grad=True)
    analytic = {name: torch.autograd.grad(v, shift, retain_graph=True)[0] for name, v in parts(shift).items()}
    step = 1e-6
    above, below = parts(step), parts(-step)
    for name, derivative in analytic.items():
        numeric = (above[name] - below[name]) / (2 * step)
        assert numeric.abs() > 1e-7, name
        torch.testing.assert_close(derivative, numeric, rtol=2e-4, atol=1e-7, msg=name)


@pytest.mark.parametrize("multimer", [False, True])
def test_a_batch_is_its_samples(multimer: bool) -> None:
    """Every part of a batch of two (with different labels and masks) holds the values of both on their own."""
    config, batch = _case(multimer)
    generator = torch.Generator().manual_seed(3)
    hidden = (torch.rand(LENGTH, generator=generator) < 0.7).double()
    other = {
        key: value * hidden.reshape(-1, *(1,) * (value.dim() - 1))
        if key.endswith(("mask", "exists")) and value.shape[:1] == (LENGTH,)
        else value
        for key, value in batch.items()
    }
    batches = [batch, other]
    results = [_result(config, b, multimer=multimer, seed=i) for i, b in enumerate(batches)]

    def stack(*trees: Any, path: str = "") -> Any:
        first = trees[0]
        if isinstance(first, dict):
            return {k: stack(*(t[k] for t in trees), path=f"{path}/{k}") for k in first}
        if path.endswith(("bin_edges", "breaks")):
            return first
        layers = "traj" in path or "sidechains" in path
        return torch.stack(trees, 1 if layers else 0)

    total, parts = alphafold_loss(stack(*results), stack(*batches), config)
    alone = [alphafold_loss(r, b, config) for r, b in zip(results, batches, strict=True)]
    torch.testing.assert_close(total, torch.stack([a[0] for a in alone]).mean())
    for i, (_, expected) in enumerate(alone):
        for found, value in zip(_numbers(parts), _numbers(expected), strict=True):
            torch.testing.assert_close(found[i], value)


@pytest.mark.parametrize("multimer", [False, True])
def test_half_precision_is_not_used(multimer: bool) -> None:
    """bfloat16 outputs, under autocast as well, are taken to float32 before anything is computed."""
    config, batch = _case(multimer)
    half = _map(_result(config, batch, multimer=multimer), lambda x: x.detach().bfloat16())
    exact = _map(half, lambda x: x.float())
    labels = _map(batch, _float)
    expected, parts = alphafold_loss(exact, labels, config)
    with torch.autocast("cpu", torch.bfloat16):
        found, others = alphafold_loss(half, labels, config)
    assert found.dtype == torch.float32
    assert found.item() == expected.item()
    for a, b in zip(_numbers(others), _numbers(parts), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("multimer", [False, True])
def test_labels_may_have_another_precision_and_boolean_masks(multimer: bool) -> None:
    config, batch = _case(multimer)
    result = _result(config, batch, multimer=multimer)
    single = _map(result, lambda x: x.detach().float())
    expected = alphafold_loss(result, batch, config)[0].item()
    boolean = {k: v.bool() if k.endswith(("mask", "exists")) else v for k, v in batch.items()}
    for predicted, labels in ((result, _map(boolean, _float)), (single, boolean)):
        found = alphafold_loss(predicted, labels, config)[0]
        assert found.dtype == predicted["distogram"]["logits"].dtype
        assert found.item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("multimer", [False, True])
def test_empty_masks_give_finite_losses_and_gradients(multimer: bool) -> None:
    """A sample without a resolved atom, without masked positions, or of padding alone."""
    config, batch = _case(multimer)
    empty = {k: torch.zeros_like(v) if k.endswith(("mask", "exists")) else v for k, v in batch.items()}
    for mask in (
        empty,
        empty | {"seq_mask": batch["seq_mask"], "atom14_atom_exists": batch["atom14_atom_exists"]},
    ):
        result = _result(config, batch, multimer=multimer)
        leaves = [x for x in _numbers(result) if x.requires_grad]
        total, parts = alphafold_loss(result, mask, config)
        assert all(torch.isfinite(x).all() for x in _numbers(parts))
        gradients = torch.autograd.grad(total, leaves, allow_unused=True)
        assert all(torch.isfinite(g).all() for g in gradients if g is not None)


@pytest.mark.parametrize("multimer", [False, True])
def test_masked_labels_may_be_nan(multimer: bool) -> None:
    """Losses and gradients are those of zeros in the places of masked labels."""
    config, batch = _case(multimer)
    generator = torch.Generator().manual_seed(3)
    seen = (torch.rand(LENGTH, 37, generator=generator) < 0.8).double()
    atoms = structure_labels(*(x.numpy() for x in (LABELS["aatype"], LABELS["all_atom_positions"], seen)))
    batch |= {name: torch.as_tensor(x).to(batch[name]) for name, x in atoms.items() if name in batch}
    masks = {name: name.replace("positions", "exists") for name in batch if name.endswith("gt_positions")}
    masks |= {name: "rigidgroups_gt_exists" for name in batch if name.endswith("gt_frames")}
    masks |= {"chi_angles": "chi_mask", "pseudo_beta": "pseudo_beta_mask"}
    masks |= {"all_atom_positions": "all_atom_mask", "backbone_affine_tensor": "backbone_affine_mask"}

    def filled(value: float) -> list[torch.Tensor]:
        labels = {}
        for name, mask in masks.items():
            trailing = (1,) * (batch[name].dim() - batch[mask].dim())
            hidden = (batch[mask] == 0).reshape(*batch[mask].shape, *trailing)
            labels[name] = batch[name].masked_fill(hidden, value)
        result = _result(config, batch, multimer=multimer)
        leaves = [x for x in _numbers(result) if x.requires_grad]
        total = alphafold_loss(result, batch | labels, config)[0]
        return [total, *torch.autograd.grad(total, leaves, allow_unused=True)]

    for of_nan, of_zero in zip(filled(torch.nan), filled(0.0), strict=True):
        assert of_zero is None or torch.equal(of_nan, of_zero)


def test_losses_after_permutation_are_those_of_the_right_order() -> None:
    """Two copies in the wrong order: with permuted labels the loss is what it would have been."""
    config, batch = _case(True)
    half = LENGTH // 2
    labels = {k: v for k, v in batch.items() if v.shape[:1] == (LENGTH,) and k != "seq_mask"}
    chain = {k: v[:half] for k, v in labels.items()}
    far = torch.tensor([30.0, 5.0, 0.0]).double()
    moved = dict(chain)
    for key in ("all_atom_positions", "atom14_gt_positions", "atom14_alt_gt_positions", "pseudo_beta"):
        moved[key] = chain[key] + far
    moved["backbone_affine_tensor"] = chain["backbone_affine_tensor"] + torch.cat([torch.zeros(4), far])
    turn = {key: chain[key] + torch.cat([torch.zeros(9), far]) for key in chain if key.endswith("gt_frames")}
    moved |= turn | {"asym_id": chain["asym_id"] + 1, "sym_id": chain["sym_id"] + 1}
    moved["chi_angles"] = chain["chi_angles"] + 0.3
    both = {k: torch.cat([chain[k], moved[k]]) for k in chain}
    swapped = {k: torch.cat([moved[k], chain[k]]) for k in chain}
    identity = ("asym_id", "entity_id", "sym_id", "residue_index")
    swapped |= {k: both[k] for k in identity}
    complex_ = batch | both
    predicted = both["all_atom_positions"][:, rc.atom_order["CA"]]
    found = permute_labels(
        predicted,
        both["asym_id"],
        both["entity_id"],
        both["residue_index"],
        split_chains(swapped, both["asym_id"]),
    )
    result = _result(config, complex_)
    right = alphafold_loss(result, complex_, config)[0]
    wrong = alphafold_loss(result, complex_ | swapped, config)[0]
    assert alphafold_loss(result, complex_ | found, config)[0].item() == right.item()
    assert abs(wrong.item() - right.item()) > 1e-3


@pytest.mark.long
def test_a_multimer_network_learns_from_its_loss() -> None:
    """From merged features and labels to gradients: of all parameters but those whose output nothing reads.

    The multimer network takes the outer product first, so its last extra-MSA block updates that MSA for nothing.
    """
    config = MULTIMER.copy_and_resolve_references()
    config.model.embeddings_and_evoformer.masked_msa.replace_fraction = 0.3
    merged = oracle_arrays("synthetic_multimer", "features")
    sampler = sampler_from_merged(merged, config)
    features = [{k: torch.as_tensor(v) for k, v in sampler.sample(cycle).items()} for cycle in range(2)]
    names = ("aatype", "all_atom_positions", "all_atom_mask")
    labels = structure_labels(*(merged[name] for name in names), resolution=2.0)
    model = random_model(config).train()
    torch.manual_seed(1)
    result = model(lambda cycle, member: features[cycle], 1)
    batch = features[-1] | {k: torch.as_tensor(v) for k, v in labels.items()}
    total, parts = alphafold_loss(result, batch, config)
    total.backward()
    assert all(part["loss"] > 0 for part in parts.values())
    last = config.model.embeddings_and_evoformer.extra_msa_stack_num_block - 1
    for name, parameter in model.named_parameters():
        learns = parameter.grad is not None and bool(parameter.grad.any())
        assert learns != name.startswith(f"extra_msa_stack.blocks.{last}.msa_"), name
        assert parameter.grad is None or torch.isfinite(parameter.grad).all()


def test_the_chain_center_of_mass_loss_is_part_of_a_complexs_loss() -> None:
    """With its weight; of networks whose configuration has it, which the official ones lack."""
    config, batch = _case(True)
    node = model_config("model_1_multimer_v3").model.heads.structure_module.chain_center_of_mass
    far = batch | {"all_atom_positions": batch["all_atom_positions"].clone()}
    far["all_atom_positions"][batch["asym_id"] == 2] += 50.0
    result = _result(config, far)
    before = structure_loss(result["structure_module"], far, config.model.heads.structure_module)
    with_it = config.copy_and_resolve_references().model.heads.structure_module
    with_it.chain_center_of_mass = node
    after = structure_loss(result["structure_module"], far, with_it)
    assert "chain_center_of_mass" not in before
    assert after["chain_center_of_mass"] > 1
    torch.testing.assert_close(after["loss"], before["loss"] + after["chain_center_of_mass"])
    assert "chain_center_of_mass" not in model_config("model_1_ptm").model.heads.structure_module
