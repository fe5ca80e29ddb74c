"""Embedding of templates against Algorithms 2, 16 and 17, and section 7.2 of AlphaFold-Multimer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastfold.evoformer.compat.xla_rounding import own_frame_direction
from fastfold.evoformer.embedders.multimer_templates import (
    MultimerTemplateEmbedder,
    MultimerTemplateTorsionEmbedder,
)
from fastfold.evoformer.embedders.templates import TemplateEmbedder, TemplateTorsionEmbedder
from fastfold.evoformer.evoformer import TemplatePairBlock
from fastfold.evoformer.execution import CallSettings, ExecutionPolicy, PolicyModule, calling
from fastfold.protein import residue_constants as rc
from fastfold.protein.all_atom import atom37_to_torsion_angles, chi_angles
from tests.helpers.definitions import close, linear, norm, random, randomized
from tests.helpers.networks import oracle_config

N, TEMPLATES, C_Z = 7, 3, 24
MONOMER, MULTIMER = "synthetic_monomer", "synthetic_multimer"


def _config(name: str) -> Any:
    config = oracle_config(name).model.embeddings_and_evoformer.template
    if name == MONOMER:
        config.use_template_unit_vector = True
    return config


def _features() -> dict[str, Tensor]:
    """Three templates, the second of which is masked, with some atoms missing."""
    generator = torch.Generator().manual_seed(1)
    masks = (torch.rand(TEMPLATES, N, 37, generator=generator) > 0.2).double()
    masks[:, :3] = 1.0
    return {
        "template_mask": torch.tensor([1.0, 0.0, 1.0]).double(),
        "template_aatype": torch.randint(0, 22, (TEMPLATES, N), generator=generator),
        "template_all_atom_positions": 5 * random(TEMPLATES, N, 37, 3, seed=2),
        "template_all_atom_masks": masks,
        "template_all_atom_mask": masks,
        "template_pseudo_beta": 8 * random(TEMPLATES, N, 3, seed=3),
        "template_pseudo_beta_mask": masks[..., rc.atom_order["CB"]],
        "asym_id": torch.tensor([1] * 4 + [2] * 3),
    }


def _pair_mask() -> Tensor:
    mask = torch.ones(N).double()
    mask[-1] = 0.0
    return mask[:, None] * mask


def _embedder(name: str) -> nn.Module:
    kind = TemplateEmbedder if name == MONOMER else MultimerTemplateEmbedder
    return randomized(kind(_config(name), C_Z, zero_init=False))


def _square(mask: Tensor) -> Tensor:
    return mask[:, None] * mask


def _distances(positions: Tensor, config: Any) -> Tensor:
    lower = torch.linspace(config.min_bin, config.max_bin, config.num_bins, dtype=positions.dtype).square()
    upper = torch.cat([lower[1:], lower.new_tensor([1e8])])
    squared = (positions[:, None] - positions).square().sum(-1, keepdim=True)
    return ((squared > lower) & (squared < upper)).double()


def _directions(positions: Tensor) -> Tensor:
    """CA of residue j in the frame of residue i that Algorithm 21 makes of N, CA and C: ``[N, N, 3]`` in Å."""
    n, ca, c = (positions[:, rc.atom_order[name]] for name in ("N", "CA", "C"))
    e1 = F.normalize(c - ca, dim=-1)
    e2 = F.normalize((n - ca) - ((n - ca) * e1).sum(-1, keepdim=True) * e1, dim=-1)
    axes = torch.stack([e1, e2, torch.linalg.cross(e1, e2)], -2)
    return torch.einsum("iax,ijx->ija", axes, ca[None] - ca[:, None])


def _backbone(mask: Tensor) -> Tensor:
    n, ca, c = (mask[:, rc.atom_order[name]] for name in ("N", "CA", "C"))
    return _square(n * ca * c)[..., None]


def _monomer(layer: TemplateEmbedder, pair: Tensor, features: dict[str, Tensor], pair_mask: Tensor) -> Tensor:
    """Algorithm 2, lines 9-13, with the blocks of the stack as they are."""
    embedded = []
    for t in range(TEMPLATES):
        positions, mask = (features[f"template_all_atom_{key}"][t] for key in ("positions", "masks"))
        vectors = _directions(positions)
        vectors = vectors / (vectors.square().sum(-1, keepdim=True) + 1e-6).sqrt()
        types = F.one_hot(features["template_aatype"][t], 22).double()
        both = _backbone(mask)
        parts = [
            _distances(features["template_pseudo_beta"][t], layer.config.dgram_features),
            _square(features["template_pseudo_beta_mask"][t])[..., None],
            types[None].expand(N, N, 22),
            types[:, None].expand(N, N, 22),
            vectors * both,
            both,
        ]
        x = linear(layer.embedding, torch.cat(parts, -1) * both)
        for block in layer.stack.blocks:
            x = block(x, pair_mask)
        embedded.append(norm(layer.norm, x))
    # Algorithm 17.
    inner, stacked = layer.attention, torch.stack(embedded)
    split = (inner.heads, -1)
    q = linear(inner.query, pair).unflatten(-1, split)
    k, v = (linear(part, stacked).unflatten(-1, split) for part in (inner.key, inner.value))
    logits = torch.einsum("ijhc,tijhc->ijht", q, k) / q.shape[-1] ** 0.5
    weights = torch.softmax(logits.masked_fill(features["template_mask"] == 0, -torch.inf), -1)
    return pair + linear(inner.output, torch.einsum("ijht,tijhc->ijhc", weights, v).flatten(-2))


def _multimer(
    layer: MultimerTemplateEmbedder, pair: Tensor, features: dict[str, Tensor], pair_mask: Tensor
) -> Tensor:
    """AlphaFold-Multimer, section 7.2, with the blocks of the stack as they are."""
    frames = features.get("template_frame", features["asym_id"].expand(TEMPLATES, N))
    total = torch.zeros(())
    for t in range(TEMPLATES):
        same_chain = (frames[t, :, None] == frames[t]).double()[..., None]
        positions, mask = (features[f"template_all_atom_{key}"][t] for key in ("positions", "mask"))
        aatype = features["template_aatype"][t]
        atom = torch.where(aatype == rc.restype_order["G"], rc.atom_order["CA"], rc.atom_order["CB"])
        beta, has_beta = positions[range(N), atom], mask[range(N), atom]
        beta_pair, both = _square(has_beta)[..., None] * same_chain, _backbone(mask) * same_chain
        vectors = _directions(positions)
        vectors = vectors / vectors.square().sum(-1, keepdim=True).clamp(min=1e-12).sqrt()
        vectors[range(N), range(N)] = own_frame_direction(positions).double()
        types = F.one_hot(aatype, 22).double()
        x = linear(layer.distance, _distances(beta, layer.dgram) * beta_pair)
        x = x + linear(layer.beta_mask, beta_pair) + linear(layer.backbone_mask, both)
        x = x + linear(layer.aatype_column, types)[None] + linear(layer.aatype_row, types)[:, None]
        for axis, unit in enumerate(layer.unit_vector):
            x = x + linear(unit, (vectors * both)[..., axis : axis + 1])
        x = x + linear(layer.query, norm(layer.query_norm, pair))
        for block in layer.stack.blocks:
            x = block(x, pair_mask)
        total = total + norm(layer.norm, x)
    return pair + linear(layer.output, torch.relu(total / TEMPLATES))


def test_monomer_templates_are_embedded_and_attended_to() -> None:
    layer, pair = _embedder(MONOMER), random(N, N, C_Z)
    expected = _monomer(layer, pair, _features(), _pair_mask())
    close(layer(pair, _features(), _pair_mask()), expected, 1e-7)
    with torch.no_grad():  # each template is embedded for itself
        close(layer(pair, _features(), _pair_mask()), expected, 1e-7)


def test_multimer_templates_are_averaged() -> None:
    layer, pair = _embedder(MULTIMER), random(N, N, C_Z)
    expected = _multimer(layer, pair, _features(), _pair_mask())
    close(layer(pair, _features(), _pair_mask()), expected, 1e-7)


def test_templates_in_one_frame_have_no_mask_of_chains() -> None:
    """One number for all residues is the official formula without its mask; other templates keep theirs."""
    layer, pair, features = _embedder(MULTIMER), random(N, N, C_Z), _features()
    chains = features["asym_id"]
    masked = layer(pair, features, _pair_mask())
    unmasked = layer(pair, features | {"asym_id": torch.ones_like(chains)}, _pair_mask())
    assert (masked - unmasked).abs().max() > 1e-3
    frames = torch.full((TEMPLATES, N), -1)
    assert torch.equal(layer(pair, features | {"template_frame": frames}, _pair_mask()), unmasked)
    assert torch.equal(
        layer(pair, features | {"template_frame": chains.expand(TEMPLATES, N)}, _pair_mask()), masked
    )
    frames = torch.stack([torch.full((N,), -1), chains, chains])
    mixed = features | {"template_frame": frames}
    close(layer(pair, mixed, _pair_mask()), _multimer(layer, pair, mixed, _pair_mask()), 1e-7)


@pytest.mark.parametrize("name", [MONOMER, MULTIMER])
@pytest.mark.parametrize("recording", [False, True])
def test_a_part_of_the_templates_that_is_hidden_changes_nothing(name: str, recording: bool) -> None:
    """A whole template of the monomer network; a residue's atoms in all templates in both."""
    layer, pair, mask, features = _embedder(name), random(N, N, C_Z), _pair_mask(), _features()
    for key in ("masks", "mask"):
        features[f"template_all_atom_{key}"][:, 5] = 0.0
    features["template_pseudo_beta_mask"][:, 5] = 0.0
    changed = {key: value.clone() for key, value in features.items()}
    changed["template_all_atom_positions"][:, 5] += 3.0
    changed["template_pseudo_beta"][:, 5] -= 3.0
    if name == MONOMER:
        changed["template_all_atom_positions"][1] += random(N, 37, 3, seed=8)
        changed["template_aatype"][1] = 3
    shown = {key: value.clone() for key, value in features.items()}
    shown["template_all_atom_positions"][0, 1] += random(37, 3, seed=8)
    with torch.set_grad_enabled(recording):
        expected = layer(pair, features, mask)
        close(layer(pair, changed, mask), expected)
        assert (layer(pair, shown, mask) - expected).abs().max() > 1e-3


@pytest.mark.parametrize("recording", [False, True])
def test_without_templates_the_monomer_pair_stays(recording: bool) -> None:
    layer, pair, features = _embedder(MONOMER), random(N, N, C_Z), _features()
    features["template_mask"].zero_()
    with torch.set_grad_enabled(recording):
        assert torch.equal(layer(pair, features, _pair_mask()), pair)


@pytest.mark.parametrize("name", [MONOMER, MULTIMER])
def test_some_rows_with_the_stack_left_out(name: str) -> None:
    """Rows of the pair, as a process of several has them; the blocks, which need all rows, are left out."""
    layer, pair = _embedder(name), random(N, N, C_Z)
    layer.stack.blocks = nn.ModuleList()
    expected = layer(pair, _features(), _pair_mask())
    close(layer(pair[2:5], _features(), _pair_mask(), 2), expected[2:5])


@pytest.mark.parametrize("attention_first", [False, True])
def test_the_order_of_a_block(attention_first: bool) -> None:
    """Algorithm 16 has attention first; the multimer network has multiplication first."""
    config = _config(MONOMER).template_pair_stack
    block = randomized(TemplatePairBlock(config, 16, attention_first=attention_first, zero_init=False))
    attention = [block.triangle_attention_starting, block.triangle_attention_ending]
    multiplication = [block.triangle_multiplication_outgoing, block.triangle_multiplication_incoming]
    expected = pair = random(N, N, 16)
    for step in attention + multiplication if attention_first else multiplication + attention:
        expected = step(expected, _pair_mask())
    close(block(pair, _pair_mask()), block.pair_transition(expected))


def test_torsion_angles_become_rows() -> None:
    """Algorithm 2, lines 7-8."""
    layer, features = randomized(TemplateTorsionEmbedder(12, placeholder_for_undefined=True)), _features()
    aatype, positions = features["template_aatype"], features["template_all_atom_positions"]
    masks = features["template_all_atom_masks"]
    angles = atom37_to_torsion_angles(aatype, positions, masks, placeholder_for_undefined=True)
    parts = [
        F.one_hot(aatype, 22).double(),
        angles["torsion_angles_sin_cos"].flatten(-2),
        angles["alt_torsion_angles_sin_cos"].flatten(-2),
        angles["torsion_angles_mask"],
    ]
    rows, mask = layer(features)
    close(rows, linear(layer.projection, torch.relu(linear(layer.single, torch.cat(parts, -1)))))
    assert torch.equal(mask, angles["torsion_angles_mask"][..., 2])


def test_side_chain_angles_become_rows() -> None:
    """AlphaFold-Multimer, section 7.2."""
    layer, features = randomized(MultimerTemplateTorsionEmbedder(12)), _features()
    aatype, positions = features["template_aatype"], features["template_all_atom_positions"]
    chi, present = chi_angles(aatype, positions, features["template_all_atom_mask"])
    parts = [F.one_hot(aatype, 22).double(), chi.sin() * present, chi.cos() * present, present]
    rows, mask = layer(features)
    close(rows, linear(layer.projection, torch.relu(linear(layer.single, torch.cat(parts, -1)))))
    assert torch.equal(mask, present[..., 0])


def test_a_template_that_is_embedded_twice_has_one_dropout() -> None:
    """Plans that keep no embedding give what others give, and leave the same random numbers to later layers."""
    embedder, features = _embedder(MONOMER).eval(), _features()
    pair, results = random(N, N, C_Z, seed=4), []
    for hold in (True, False):
        generator = torch.Generator().manual_seed(5)
        policies = {
            module: ExecutionPolicy(hold_templates=hold)
            for module in embedder.modules()
            if isinstance(module, PolicyModule)
        }
        with torch.no_grad(), calling(CallSettings(policies, training=True, generator=generator)):
            results.append((embedder(pair, features, _pair_mask()), generator.get_state()))
    (held, after_held), (repeated, after_repeated) = results
    assert not torch.equal(held, embedder(pair, features, _pair_mask()))  # dropout acts
    assert torch.equal(held, repeated)
    assert torch.equal(after_held, after_repeated)
