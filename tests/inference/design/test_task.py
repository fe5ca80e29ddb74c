"""Tasks of design: which residues are designed and which stay, and what is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from fastfold.errors import ConfigError, InputError
from fastfold.evoformer.inputs import encode_sequence
from fastfold.inference.design.targets import residue_places
from fastfold.inference.design.task import binder, fixed_backbone, hallucination, partial
from fastfold.protein.io.read import read_user_structure


def test_losses_read_no_value_of_the_device(backbone: Path) -> None:
    """Plans run them on the meta device, which has no values; a GPU would be waited for."""
    meta = torch.device("meta")
    assert {"rg", "NC"} <= hallucination(12, copies=2).losses(meta, torch.float32).keys()
    assert {"avoid", "i_pae"} <= binder(backbone, 7, hotspots="B2").losses(meta, torch.float32).keys()
    assert "dgram_cce" in fixed_backbone(backbone, chain="A").losses(meta, torch.float32)


def test_copies_share_their_residues() -> None:
    task = hallucination(12, copies=3)
    assert task.num_parameters == 12
    assert task.letters("ACDEFGHIKLMN") == ["ACDEFGHIKLMN"] * 3
    one_hot = encode_sequence("ACDEFGHIKLMN")
    torch.testing.assert_close(task.sequence(one_hot), one_hot.repeat(3, 1))
    assert task.weights == {"con": 1.0, "i_con": 1.0}


def test_gradients_of_copies_add_up() -> None:
    one_hot = torch.rand(12, 20, requires_grad=True)
    hallucination(12, copies=3).sequence(one_hot).sum().backward()
    assert one_hot.grad is not None
    assert one_hot.grad.unique().tolist() == [3.0]


def test_separation_is_the_shorter_way_in_rings() -> None:
    ring = hallucination(12, cyclic=True).offset
    assert ring[0, 11].item() == 1
    assert ring[11, 0].item() == -1
    assert int(ring.abs().max()) == 6
    assert hallucination(12).offset[11, 0].item() == 11
    assert hallucination(12, copies=2).offset[0, 12].item() == 10**6


def test_kept_residues_are_the_files(backbone: Path) -> None:
    sequence = read_user_structure(backbone).chains[0].sequence
    task = fixed_backbone(backbone, chain="A", keep="A2-4,A9")
    assert task.num_parameters == 10
    (designed,) = task.letters("W" * 10)
    assert np.flatnonzero(task.source < 0).tolist() == [1, 2, 3, 8]
    assert all(designed[i] == sequence[i] for i in (1, 2, 3, 8))
    assert task.reference is not None
    assert task.reference.positions.shape == (14, 37, 3)


def test_only_the_motif_is_supervised(backbone: Path) -> None:
    task = partial(backbone, "A3-6", chain="A")
    assert task.reference is not None
    assert np.flatnonzero(task.reference.mask[:, 1]).tolist() == [2, 3, 4, 5]
    assert task.source[2:6].tolist() == [-1] * 4
    assert task.num_parameters == 10


def test_a_binder_follows_the_given_chains(backbone: Path) -> None:
    task = binder(backbone, 7, hotspots="B2,A3-4")
    assert [len(chain.sequence) for chain in task.target.chains] == [14, 10, 7]
    assert task.hotspots.tolist() == [2, 3, 15]
    assert [chain and chain.chain_id for chain in task.templates or ()] == ["A", "B", None]
    one = binder(backbone, 7, chains=["B"], hotspots="B2")
    assert one.hotspots.tolist() == [1]
    assert one.letters("ACDEFGH")[1] == "ACDEFGH"


def test_only_the_designed_chain_of_a_binder_is_a_ring(backbone: Path) -> None:
    task = binder(backbone, 8, cyclic=True)
    assert (task.rings, binder(backbone, 8).rings, hallucination(12, cyclic=True).rings) == ("C", False, True)
    assert task.offset[24, 31].item() == 1
    assert task.offset[0, 13].item() == -13


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("C3", r"expected residues such as A10-25, found 'C3'; the file's chains are A, B"),
        ("3", r"expected residues such as A10-25, found '3'"),
        ("A99", r"chain A has no residue 99 with coordinates; its numbers go from 1 to 14"),
        ("A5-2", r"A5-2: the last residue comes before the first"),
        ("A2-x", r"found 'A2-x'"),
    ],
)
def test_residues_that_do_not_exist_are_named(backbone: Path, text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        residue_places(text, read_user_structure(backbone).chains, backbone)


def test_unusable_tasks_are_refused(backbone: Path) -> None:
    with pytest.raises(InputError, match="has chains A, B; choose one with --chain"):
        fixed_backbone(backbone)
    with pytest.raises(InputError, match="has no chain 'X', only A, B"):
        fixed_backbone(backbone, chain="X")
    with pytest.raises(InputError, match="has no chain 'X'"):
        binder(backbone, 8, chains=["X"])
    with pytest.raises(ConfigError, match="motif of 1 to 13 residues"):
        partial(backbone, "", chain="A")
    with pytest.raises(ConfigError, match="length from 10"):
        hallucination(3)
    with pytest.raises(ConfigError, match="5 residues or more"):
        binder(backbone, 2)
