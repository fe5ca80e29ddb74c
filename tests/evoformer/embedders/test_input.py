"""Input embedders and relative positions against their algorithms, term by term."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fastfold.evoformer.embedders.input import InputEmbedder, distogram_bins, extra_msa_features
from fastfold.evoformer.embedders.relative_position import ChainRelativePosition, RelativePosition
from fastfold.protein import residue_constants as rc
from tests.helpers.definitions import close, linear, norm, random, randomized
from tests.helpers.networks import oracle_config

N, SEQUENCES = 11, 4
ALL = slice(0, N)


def _trunk(name: str) -> Any:
    return oracle_config(name).model.embeddings_and_evoformer


def _features(c_target: int) -> dict[str, Tensor]:
    """Two chains of one entity and one of another, with a gap and a far jump in the residue numbers."""
    generator = torch.Generator().manual_seed(2)
    return {
        "target_feat": random(N, c_target, seed=3),
        "msa_feat": random(SEQUENCES, N, 49, seed=4),
        "aatype": torch.randint(0, 20, (N,), generator=generator),
        "residue_index": torch.tensor([0, 1, 2, 5, 0, 1, 2, 3, 0, 1, 90]),
        "asym_id": torch.tensor([1] * 4 + [2] * 4 + [3] * 3),
        "entity_id": torch.tensor([1] * 8 + [2] * 3),
        "sym_id": torch.tensor([1] * 4 + [2] * 4 + [1] * 3),
    }


def _previous(config: Any) -> dict[str, Tensor]:
    return {
        "prev_pos": 8 * random(N, 37, 3, seed=5),
        "prev_msa_first_row": random(N, config.msa_channel, seed=6),
        "prev_pair": random(N, N, config.pair_channel, seed=7),
    }


def _one_hot(index: Tensor, classes: int) -> Tensor:
    """Algorithm 5 for whole numbers."""
    return F.one_hot(index, classes).double()


def _relative(layer: RelativePosition, features: dict[str, Tensor]) -> Tensor:
    """Algorithm 4."""
    index, limit = features["residue_index"], layer.max_offset
    offset = (index[:, None] - index).clamp(-limit, limit)
    return linear(layer.linear, _one_hot(offset + limit, 2 * limit + 1))


def _relative_of_chains(layer: ChainRelativePosition, features: dict[str, Tensor]) -> Tensor:
    """AlphaFold-Multimer, section 7.1, pair by pair."""
    rows = []
    for i in range(N):
        for j in range(N):
            delta = {key: int(value[i] - value[j]) for key, value in features.items() if value.dim() == 1}
            k, s = layer.max_offset, layer.max_chain
            position = 2 * k + 1 if delta["asym_id"] else min(max(delta["residue_index"], -k), k) + k
            copy = 2 * s + 1 if delta["entity_id"] else min(max(delta["sym_id"], -s), s) + s
            same_entity = torch.tensor([float(delta["entity_id"] == 0)]).double()
            position_part = _one_hot(torch.tensor(position), 2 * k + 2)
            rows.append(torch.cat([position_part, same_entity, _one_hot(torch.tensor(copy), 2 * s + 2)]))
    return linear(layer.linear, torch.stack(rows)).unflatten(0, (N, N))


def _distance_classes(positions: Tensor, config: Any) -> Tensor:
    """One-hot distance bins, as the official program has them: strictly between two edges."""
    lower = torch.linspace(config.min_bin, config.max_bin, config.num_bins, dtype=positions.dtype).square()
    upper = torch.cat([lower[1:], lower.new_tensor([1e8])])
    squared = (positions[:, None] - positions).square().sum(-1, keepdim=True)
    return ((squared > lower) & (squared < upper)).double()


def _embedded(
    layer: InputEmbedder, features: dict[str, Tensor], previous: dict[str, Tensor]
) -> tuple[Tensor, Tensor]:
    """Algorithms 3 and 32."""
    target = features["target_feat"]
    pair = linear(layer.target_left, target)[:, None] + linear(layer.target_right, target)[None]
    position = layer.relative_position
    if isinstance(position, RelativePosition):
        pair = pair + _relative(position, features)
    else:
        pair = pair + _relative_of_chains(position, features)
    msa = linear(layer.msa, features["msa_feat"]) + linear(layer.target_to_msa, target)

    glycine = features["aatype"] == rc.restype_order["G"]
    atoms = previous["prev_pos"]
    beta = torch.where(glycine[:, None], atoms[:, rc.atom_order["CA"]], atoms[:, rc.atom_order["CB"]])
    pair = pair + linear(layer.prev_distance, _distance_classes(beta, layer.prev_pos))
    pair = pair + norm(layer.prev_pair_norm, previous["prev_pair"])
    recycled = norm(layer.prev_msa_norm, previous["prev_msa_first_row"])
    return torch.cat([msa[:1] + recycled, msa[1:]]), pair


def test_relative_position_is_the_clipped_offset() -> None:
    layer, features = randomized(RelativePosition(_trunk("synthetic_monomer"))), _features(22)
    found = layer(features, ALL)
    close(found, _relative(layer, features))
    close(layer(features, slice(3, 8)), found[3:8])
    # 90 is further from 0 and from 1 than offsets go.
    assert torch.equal(found[10, 8], found[10, 9])
    assert not torch.equal(found[8, 10], found[10, 8])


def test_relative_position_tells_chains_and_copies_apart() -> None:
    layer, features = randomized(ChainRelativePosition(_trunk("synthetic_multimer"))), _features(21)
    found = layer(features, ALL)
    close(found, _relative_of_chains(layer, features))
    close(layer(features, slice(3, 8)), found[3:8])


@pytest.mark.parametrize("name", ["synthetic_monomer", "synthetic_multimer"])
def test_embedding_and_recycling(name: str) -> None:
    config, multimer = _trunk(name), name == "synthetic_multimer"
    c_target = 21 if multimer else 22
    layer = randomized(InputEmbedder(config, c_target=c_target, multimer=multimer))
    features, previous = _features(c_target), _previous(config)
    found = layer(features, previous)
    for a, b in zip(found, _embedded(layer, features, previous), strict=True):
        close(a, b)


def test_a_part_of_the_rows_is_that_part_of_the_whole() -> None:
    config = _trunk("synthetic_monomer")
    layer = randomized(InputEmbedder(config, c_target=22, multimer=False))
    features, previous = _features(22), _previous(config)
    msa, pair = layer(features, previous)
    part = previous | {"prev_pair": previous["prev_pair"][4:9]}
    found = layer(features | {"msa_feat": features["msa_feat"][1:3]}, part, first_sequence=1, first_row=4)
    close(found[0], msa[1:3])
    close(found[1], pair[4:9])


def test_distances_outside_the_bins_have_no_class() -> None:
    config = _trunk("synthetic_monomer").prev_pos
    along = torch.tensor([0.0, config.min_bin, config.min_bin + 0.1, config.max_bin + 1, 2e4]).double()
    positions = F.pad(along[:, None], (0, 2))
    assert distogram_bins(positions, config)[0].tolist() == [0, 0, 1, config.num_bins, 0]


def test_extra_msa_features_are_types_and_deletions() -> None:
    generator = torch.Generator().manual_seed(0)
    types = torch.randint(0, 23, (3, N), generator=generator)
    flag, value = random(3, N, seed=1), random(3, N, seed=2)
    given = {"extra_msa": types, "extra_has_deletion": flag, "extra_deletion_value": value}
    found = extra_msa_features(given)
    assert found.shape == (3, N, 25)
    assert torch.equal(found[..., :23].argmax(-1), types)
    assert torch.equal(found[..., :23].sum(-1), torch.ones(3, N).double())
    assert torch.equal(found[..., 23], flag)
    assert torch.equal(found[..., 24], value)
