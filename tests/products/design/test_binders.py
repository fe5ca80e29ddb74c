"""Binders with given residues: redesigned chains, motifs, frameworks with loops, copies, and rings."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from fastfold.errors import ConfigError, InputError
from fastfold.evoformer.inputs import Relaxation
from fastfold.evoformer.losses.design import Outputs
from fastfold.evoformer.model import AlphaFold
from fastfold.inference.config import InferConfig
from fastfold.products.design import DesignConfig, DesignRequest, run_designs
from fastfold.products.design.agreement import given_agreement
from fastfold.products.design.evaluate import Evaluator
from fastfold.products.design.tasks.binders import BinderParts, binder
from fastfold.products.design.tasks.given import TargetStructure
from fastfold.products.design.tasks.losses import task_losses
from fastfold.products.design.tasks.protocols import fixed_backbone, hallucination, partial
from fastfold.products.design.tasks.task import DesignTask
from fastfold.protein.io.read import read_structure
from tests.helpers.results import helix_prediction

STEPS = DesignConfig(soft_steps=1, temperature_steps=0, hard_steps=1, mutation_steps=1, tries=2)
CPU = torch.device("cpu")


@pytest.fixture
def framework(tmp_path: Path) -> Path:
    """Chains H of 12 and L of 9 residues."""
    made = helix_prediction("framework", 12, 9, seed=3).save(tmp_path / "framework", plots=False)["pdb"]
    text = made.read_text().splitlines(keepends=True)
    names = {"A": "H", "B": "L"}
    made.write_text(
        "".join(f"{one[:21]}{names[one[21]]}{one[22:]}" if one[:4] == "ATOM" else one for one in text)
    )
    return made


def outputs_of(task: DesignTask, positions: np.ndarray, seed: int = 0) -> Outputs:
    """Outputs with a random distogram and given atoms."""
    count = len(task.source)
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(count, count, 64, generator=generator, dtype=torch.float64)
    edges = torch.linspace(2.3125, 21.6875, 63, dtype=torch.float64)
    atoms = torch.from_numpy(positions).double()
    nothing = torch.zeros(count, 14, 3)
    lower = torch.cat([edges.new_zeros(1), edges])
    return Outputs(logits, lower, torch.zeros(count, 50), torch.zeros(count, 37), atoms, nothing)


def all_atoms(path: Path) -> np.ndarray:
    return np.concatenate([chain.positions for chain in read_structure(path).chains])


def test_a_redesigned_chain_is_the_binder(backbone: Path) -> None:
    given = read_structure(backbone).chains[1]
    task = binder(backbone, parts=BinderParts(redesign=("B",), keep="B2-4"))
    assert [chain.id for chain in task.target.chains] == ["A", "B"]
    assert np.flatnonzero(task.source >= 0).tolist() == [14, *range(18, 24)]
    assert task.letters("W" * 7)[1] == f"W{given.sequence[1:4]}" + "W" * 6
    assert task.weights == {"dgram_cce": 1.0}
    assert task.residue_columns["kept"] == "B2-4"
    first = binder(backbone, chains=["B"], parts=BinderParts(redesign=("A",)))
    assert [chain.id for chain in first.target.chains] == ["B", "A"]
    assert np.flatnonzero(first.in_designed).tolist() == list(range(10, 24))


def test_losses_of_a_redesign_are_colabdesigns(backbone: Path) -> None:
    """Sums over partners per residue of the binder; the binder is superposed by its target."""
    task = binder(backbone, parts=BinderParts(redesign=("B",)))
    true = all_atoms(backbone)
    moved = true.copy()
    moved[14:] += np.float32([3.0, 0.0, 0.0])
    found = task_losses(task, CPU, torch.float64)
    aatype = torch.zeros(24, dtype=torch.long)
    assert float(found["rmsd"](outputs_of(task, moved), aatype)) == pytest.approx(3.0, abs=1e-4)
    outputs = outputs_of(task, moved)
    beta = torch.from_numpy(true[:, 3]).double()
    apart = torch.cdist(beta, beta)
    edges = outputs.lower_edges[1:]
    assert isinstance(outputs.distogram, torch.Tensor)
    bins = (apart[..., None] > edges).sum(-1)
    entropy = -outputs.distogram.log_softmax(-1).gather(-1, bins[..., None])[..., 0]
    wanted = float(entropy[14:].sum() / 10)
    assert float(found["dgram_cce"](outputs, aatype)) == pytest.approx(wanted, rel=1e-6)


def test_the_fit_of_a_bound_motif_moves_with_its_target(backbone: Path) -> None:
    """The deviation of a binder depends on the atoms of the target, on which both are superposed."""
    task = binder(backbone, parts=BinderParts(redesign=("B",)))
    true = all_atoms(backbone)
    noise = np.random.default_rng(0).normal(size=true.shape)
    atoms = torch.from_numpy(true + noise).double().requires_grad_()
    loss = task_losses(task, CPU, torch.float64)["rmsd"]

    def value(at: torch.Tensor) -> torch.Tensor:
        return loss(replace(outputs_of(task, true), positions=at), torch.zeros(24, dtype=torch.long))

    value(atoms).backward()
    assert atoms.grad is not None
    for residue in (3, 17):
        step = torch.zeros_like(atoms)
        step[residue, 1, 0] = 1e-5
        wanted = (value(atoms + step) - value(atoms - step)).item() / 2e-5
        assert float(atoms.grad[residue, 1, 0]) == pytest.approx(wanted, rel=1e-4)


def test_a_motif_stays_at_its_place(backbone: Path) -> None:
    given = read_structure(backbone).chains[1]
    task = binder(backbone, parts=BinderParts(contigs="3/B4-7/2"))
    assert [len(chain.sequence) for chain in task.target.chains] == [14, 9]
    assert task.letters("WWWYY")[1] == f"WWW{given.sequence[3:7]}YY"
    assert task.residue_columns["kept"] == "B4-7"
    assert task.reference is not None
    pairs = task.reference.pairs.numpy()
    assert pairs[17:21, :14].min() == 1
    assert pairs[17:21, 17:21].min() == 1
    assert pairs.sum() == 4 * (14 + 4)
    true = np.zeros((23, 37, 3), np.float32)
    true[:14], true[17:21] = all_atoms(backbone)[:14], given.positions[3:7]
    losses = task_losses(task, CPU, torch.float64)
    aatype = torch.zeros(23, dtype=torch.long)
    assert float(losses["fape"](outputs_of(task, true), aatype)) < 1e-3
    true[17:21] += np.float32([0.0, 4.0, 0.0])
    assert float(losses["fape"](outputs_of(task, true), aatype)) > 0.2
    assert float(losses["rmsd"](outputs_of(task, true), aatype)) == pytest.approx(4.0, abs=1e-3)
    figures = given_agreement(task, true, "".join(task.letters("WWWYY")))
    assert figures == {"motif_rmsd": pytest.approx(0.0, abs=1e-4)}


def test_an_order_of_parts_of_a_motif(backbone: Path) -> None:
    one, two = read_structure(backbone).chains
    task = partial(backbone, contigs="2/B3-5/4/A8-9/1-3", length=(12, 12))
    assert task.letters("ACDEFGHIKL"[: task.num_parameters])[0] == (
        f"AC{two.sequence[2:5]}DEFG{one.sequence[7:9]}H"
    )
    assert task.reference is not None
    assert np.flatnonzero(task.reference.rows).tolist() == [2, 3, 4, 9, 10]
    lengths = {partial(backbone, contigs="2-6/A3-5/4", seed=seed).num_parameters for seed in range(20)}
    assert lengths == {6, 7, 8, 9, 10}
    pair = partial(backbone, contigs="2/A3-5/3", copies=2)
    assert pair.reference is not None
    assert pair.num_parameters == 5
    assert pair.reference.pairs[2:5, 10:13].sum() == 0
    assert pair.reference.pairs.sum() == 18


def test_loops_alone_are_designed(backbone: Path, framework: Path) -> None:
    heavy, light = read_structure(framework).chains
    parts = BinderParts(framework=framework, loops="H:4-6,L:2-3=4")
    task = binder(backbone, chains=["A"], parts=parts)
    assert [chain.id for chain in task.target.chains] == ["A", "H", "L"]
    made = task.letters("WYWYFFF")
    assert made[1] == f"{heavy.sequence[:3]}WYW{heavy.sequence[6:]}"
    assert made[2] == f"{light.sequence[:1]}YFFF{light.sequence[3:]}"
    assert task.paratope.tolist() == [17, 18, 19, 27, 28, 29, 30]
    assert task.residue_columns["chains"] == "A1-14,H1-12,L1-11"
    assert task.reference is not None
    assert task.reference.pairs[14:, :14].sum() == 0
    assert task.reference.pairs[14:17, 30:].sum() > 0
    contacts = task_losses(task, CPU, torch.float64)["i_con"]
    assert np.flatnonzero(contacts.selected.sum(1)).tolist() == task.paratope.tolist()  # type: ignore[attr-defined]
    assert task.alone is not None
    assert [len(chain.sequence) for chain in task.alone.target.chains] == [12, 11]
    fixed = binder(backbone, chains=["A"], parts=replace(parts, loops="H:4-6"))
    assert fixed.letters("WYW")[2] == light.sequence
    assert fixed.in_designed.sum() == 21


def test_the_template_of_a_framework_shows_no_loop_and_no_place(backbone: Path, framework: Path) -> None:
    task = binder(
        backbone, chains=["A"], parts=BinderParts(framework=framework, loops="H:4-6,L:2-3=4"), copies=2
    )
    joined = task.joined_template_features
    assert joined is not None
    masks = np.concatenate([one["template_all_atom_masks"] for one in joined], 1)[..., 1]
    assert [np.flatnonzero(row).tolist() for row in masks] == [
        list(range(14)),
        [*range(14, 17), *range(20, 27), *range(31, 37)],
        [*range(37, 40), *range(43, 50), *range(54, 60)],
    ]
    assert len({tuple(one["template_frame"]) for one in joined}) == 1
    bound = binder(backbone, parts=BinderParts(redesign=("B",), flexible="backbone"))
    assert bound.joined_template_features is not None
    one = bound.joined_template_features[1]
    assert one["template_all_atom_masks"].shape[0] == 1
    assert one["template_aatype"].argmax(-1).min() == 21
    plain = binder(backbone, parts=BinderParts(redesign=("B",)))
    assert plain.template_features is not None
    assert plain.template_features[1] is None
    assert bound.without_templates.template_features is None


def test_copies_are_equal_chains_with_one_score(backbone: Path) -> None:
    task = binder(backbone, 6, chains=["A"], copies=3)
    assert [chain.id for chain in task.target.chains] == ["A", "B", "C", "D"]
    assert task.letters("ACDEFG")[1:] == ["ACDEFG"] * 3
    assert task.designed_chain.tolist() == list(range(14, 20))
    tied = fixed_backbone(backbone, chain=["A", "B"])
    assert tied.num_parameters == 24
    with pytest.raises(ConfigError, match="found A of 14 residues, B of 10 residues"):
        fixed_backbone(backbone, chain=["A", "B"], copies=2)
    repeats = fixed_backbone(backbone, chain="A", repeats=2)
    assert repeats.letters("ACDEFGH") == ["ACDEFGHACDEFGH"]
    with pytest.raises(ConfigError, match="has no 2 repeats with the same kept residues"):
        fixed_backbone(backbone, chain="A", keep="A3", repeats=2)
    assert hallucination(6, copies=2, repeats=2).letters("ACDEFG") == ["ACDEFGACDEFG"] * 2


def test_further_targets_keep_the_motif_alone(backbone: Path) -> None:
    parts = BinderParts(contigs="3/B4-7/2")
    task = binder(backbone, chains=["A"], parts=parts, others=[TargetStructure(backbone, ("B",), "B2")])
    (other,) = task.others
    assert [chain.id for chain in other.target.chains] == ["B", "A"]
    assert other.letters("WWWYY")[1] == task.letters("WWWYY")[1]
    assert other.reference is not None
    assert other.reference.pairs.sum() == 16


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"redesign": ("B",), "contigs": "3/B4-7"}, "redesign= and contigs= exclude each other"),
        ({"loops": "H:3-4"}, "framework= and loops= belong together"),
        ({"keep": "B3"}, "keep= needs redesign=, which is missing"),
        ({"flexible": "none"}, "a new binder has no template"),
        ({"framework": "FRAMEWORK", "loops": "H:3-4=x"}, "expected a length or a range such as"),
        ({"framework": "FRAMEWORK", "loops": "H:3-4=0"}, "expected a length or a range such as"),
        ({"framework": "FRAMEWORK", "loops": "H:3-4=0-3"}, "expected a length or a range such as"),
        ({"framework": "FRAMEWORK", "loops": "H:3-4,H:4-6"}, "overlap, or leave nothing"),
        ({"framework": "FRAMEWORK", "loops": "H:1-12"}, "overlap, or leave nothing of chain H"),
        ({"redesign": ("B",), "keep": "B"}, "all residues are kept"),
        ({"redesign": ("X",)}, "has no chain 'X' to redesign, only A, B"),
        ({"redesign": ("A", "B")}, "no chain of .* is left to bind"),
    ],
)
def test_parts_that_contradict_are_refused(
    parts: dict, message: str, backbone: Path, framework: Path
) -> None:
    given = {name: framework if value == "FRAMEWORK" else value for name, value in parts.items()}
    with pytest.raises((ConfigError, InputError), match=message):
        binder(backbone, parts=BinderParts(**given))


def test_options_of_other_binders_are_refused(backbone: Path, framework: Path) -> None:
    loops = BinderParts(framework=framework, loops="H:4-6")
    for parts, more, message in (
        (loops, {"length": 20}, "length= belongs to new binders and contigs="),
        (loops, {"repeats": 2}, "repeats= belongs to new binders"),
        (BinderParts(contigs="3/B4-7"), {"copies": 2}, "contigs= holds a motif at one place"),
        (BinderParts(redesign=("B",)), {"chains": ["B"]}, "is in both chains= and redesign="),
    ):
        with pytest.raises(ConfigError, match=message):
            binder(backbone, parts=parts, **more)  # type: ignore[arg-type]


def test_a_template_of_a_binder_changes_what_the_network_sees(multimer: AlphaFold, backbone: Path) -> None:
    x = torch.randn(10, 20, generator=torch.manual_seed(0))
    losses = [
        Evaluator(
            binder(backbone, parts=BinderParts(redesign=("B",), flexible=flexible)),
            [multimer],
            {"plddt": 1.0, "exp_res": 1.0},
        )(x, Relaxation(), gradient=False).loss
        for flexible in ("free", "backbone", "none")
    ]
    assert len(set(losses)) == 3


def protocols(backbone: Path, framework: Path) -> dict[str, DesignTask]:
    parts = BinderParts(framework=framework, loops="H:4-6,L:2-3=4")
    return {
        "redesign": binder(backbone, parts=BinderParts(redesign=("B",), keep="B2-4")),
        "motif": binder(backbone, parts=BinderParts(contigs="3/B4-7/2")),
        "ring with a motif": binder(backbone, parts=BinderParts(contigs="3/B4-7/2"), cyclic=True),
        "loops": binder(backbone, chains=["A"], parts=parts),
        "copies": binder(backbone, 6, chains=["A"], copies=2),
        "contigs": partial(backbone, contigs="3/B4-7/2/A3-5/4"),
        "repeats": hallucination(5, repeats=2),
        "tied": fixed_backbone(backbone, chain="A", repeats=2),
    }


@pytest.mark.long
@pytest.mark.parametrize(
    "protocol",
    ["redesign", "motif", "ring with a motif", "loops", "copies", "contigs", "repeats", "tied"],
)
def test_mini_obeys_what_is_given(protocol: str, tmp_path: Path, backbone: Path, framework: Path) -> None:
    task = protocols(backbone, framework)[protocol]
    request = DesignRequest(task, tmp_path / "out", config=STEPS, infer=InferConfig(num_recycles=0))
    (design,) = run_designs(request, say=lambda line: None)
    fixed = np.array(list("".join(chain.sequence for chain in task.target.chains)))
    made = np.array(list("".join(design.sequences)))
    assert (made == fixed)[task.source < 0].all()
    for row in range(task.num_parameters):
        assert len(set(made[task.source == row])) == 1
    assert design.state.step == 3
    structures = list((tmp_path / "out").glob("*_rank_001_*.pdb"))
    assert structures
    assert read_structure(tmp_path / "out" / "trajectories" / f"{design.name}_design.pdb").chains
