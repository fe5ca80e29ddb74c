"""Tasks of design: which residues are designed and which stay, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from fastfold.errors import ConfigError, InputError
from fastfold.evoformer.inputs import encode_sequence
from fastfold.evoformer.losses.design import ContactOptions, Outputs
from fastfold.products.design.config import DesignConfig
from fastfold.products.design.optimize import check_start
from fastfold.products.design.tasks.binders import binder
from fastfold.products.design.tasks.given import residue_places
from fastfold.products.design.tasks.losses import MaskedLoss, check_losses, task_losses
from fastfold.products.design.tasks.protocols import fixed_backbone, hallucination, partial
from fastfold.products.design.tasks.task import CONTACTS, DesignTask
from fastfold.protein.io.read import read_structure


def test_losses_read_no_value_of_the_device(backbone: Path) -> None:
    """Plans run them on the meta device, which has no values; a GPU would be waited for."""
    meta = torch.device("meta")
    assert {"rg", "NC"} <= task_losses(hallucination(12, copies=2), meta, torch.float32).keys()
    assert {"avoid", "i_pae"} <= task_losses(binder(backbone, 7, hotspots="B2"), meta, torch.float32).keys()
    assert "dgram_cce" in task_losses(fixed_backbone(backbone, chain="A"), meta, torch.float32)


def test_copies_share_their_residues() -> None:
    task = hallucination(12, copies=3)
    assert task.num_parameters == 12
    assert task.letters("ACDEFGHIKLMN") == ["ACDEFGHIKLMN"] * 3
    one_hot = encode_sequence("ACDEFGHIKLMN")
    torch.testing.assert_close(task.sequence(one_hot), one_hot.repeat(3, 1))
    assert task.weights == {"con": 1.0, "i_con": 1.0}


def test_a_binder_alone_has_its_chain_and_other_tasks_have_none(backbone: Path) -> None:
    task = binder(backbone, 7, chains=["A"])
    assert task.alone is not None
    assert [len(chain.sequence) for chain in task.alone.target.chains] == [7]
    assert task.alone.source.tolist() == list(range(7))
    assert [len(chain.sequence) for chain in task.target.chains] == [14, 7]
    assert hallucination(12).alone is None
    assert fixed_backbone(backbone, chain="A").alone is None


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
    sequence = read_structure(backbone).chains[0].sequence
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
        residue_places(text, read_structure(backbone).chains, backbone)


def test_unusable_tasks_are_refused(backbone: Path) -> None:
    with pytest.raises(InputError, match="has chains A, B; choose one with chains="):
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


def _gradients(task: DesignTask, name: str) -> torch.Tensor:
    """Sizes ``[N, N]`` of a loss's gradients with respect to the pairs of a random distogram."""
    count = len(task.source)
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(count, count, 64, generator=generator, dtype=torch.float64).requires_grad_()
    edges = torch.linspace(2.3125, 21.6875, 63, dtype=torch.float64)
    rest = (
        torch.zeros(count, 50),
        torch.zeros(count, 37),
        torch.zeros(count, 37, 3),
        torch.zeros(count, 14, 3),
    )
    outputs = Outputs(logits, torch.cat([edges.new_zeros(1), edges]), *rest)
    loss = task_losses(task, torch.device("cpu"), torch.float64)[name](
        outputs, torch.zeros(count, dtype=torch.long)
    )
    loss.backward()
    assert logits.grad is not None
    return logits.grad.abs().sum(-1)


def _gradient(task: DesignTask, name: str) -> float:
    return float(_gradients(task, name).sum())


@pytest.mark.parametrize("length", [10, 14, 17, 18, 30])
def test_contacts_of_every_ring_have_a_gradient(length: int) -> None:
    """Small rings have ColabDesign's protocol for rings (af_cyc_design), larger ones the usual contacts."""
    task = hallucination(length, cyclic=True)
    assert _gradient(task, "con") > 0.01
    check_losses(task, task.weights)
    small = length < 18
    assert task.contacts == (ContactOptions(length, 21.6875, binary=True) if small else CONTACTS)
    assert task.weights == ({"pae": 1.0, "plddt": 1.0, "con": 0.5} if small else {"con": 1.0})
    assert hallucination(length).contacts == CONTACTS


def test_small_rings_of_several_chains_and_of_binders(backbone: Path) -> None:
    weights = {"pae": 1.0, "plddt": 1.0, "con": 0.5, "i_con": 1.0}
    assert hallucination(12, copies=2, cyclic=True).weights == weights
    ring = binder(backbone, 8, chains=["A"], cyclic=True)
    assert ring.contacts == ContactOptions(8, 21.6875, binary=True)
    assert _gradient(ring, "con") > 0.01


def test_a_loss_without_a_pair_is_refused(backbone: Path) -> None:
    """By the mask that each loss has, whatever its name."""
    short = binder(backbone, 6, chains=["A"])
    assert _gradient(short, "con") == 0
    with pytest.raises(
        ConfigError, match="the loss con would always be 0: no pair of residues is at least 9 apart"
    ):
        check_losses(short, {"plddt": 0.1, "con": 1.0})
    with pytest.raises(ConfigError, match=r"leave it out \(con=0 in DesignConfig.weights\)"):
        check_start(short, DesignConfig(weights={"con": 1.0}))
    check_losses(short, {"con": 0.0, "i_con": 1.0, "helix": 1.0, "plddt": 1.0})
    assert short.reference is None
    task = fixed_backbone(backbone, chain="A")
    assert task.reference is not None
    for name, atoms in (("dgram_cce", slice(None)), ("rmsd", 1), ("fape", 2)):
        mask = task.reference.mask.clone()
        mask[:, atoms] = 0
        empty = replace(task, reference=replace(task.reference, mask=mask))
        with pytest.raises(ConfigError, match=f"the loss {name} would always be 0: no .*kept with"):
            check_losses(empty, {name: 1.0})
        check_losses(task, {name: 1.0})


def test_every_loss_of_a_task_says_what_it_reads(backbone: Path) -> None:
    for task in (
        hallucination(12, copies=2),
        binder(backbone, 10, chains=["A"], hotspots="A3"),
        fixed_backbone(backbone, chain="A"),
    ):
        for name, loss in task_losses(task, torch.device("cpu"), torch.float64).items():
            assert isinstance(loss, MaskedLoss), name
            assert loss.selected.shape in ((len(task.source),), (len(task.source),) * 2)
            assert (loss.selected > 0).any()
            if name in ("con", "helix", "i_con", "avoid"):
                reached = _gradients(task, name) > 0
                assert reached.any()
                assert not (reached & ~(loss.selected > 0)).any(), name
