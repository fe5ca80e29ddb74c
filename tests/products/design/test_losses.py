"""Losses of designs equal those of ColabDesign (the ``gamma`` branch of January 2025) on the same random outputs.

Its functions were run in JAX in float64. Radius of gyration and distance of the termini are BindCraft's formulas.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fastfold.data.targets import target_from_sequence
from fastfold.evoformer.losses import design as losses
from fastfold.evoformer.losses.design import Outputs
from fastfold.products.design.tasks.binders import BinderParts, binder
from fastfold.products.design.tasks.losses import task_losses
from fastfold.products.design.tasks.protocols import fixed_backbone, hallucination, partial
from fastfold.products.design.tasks.task import DesignTask, Reference

N, TARGET = 24, 14
AATYPE = torch.arange(N) % 20


def test_a_binder_of_two_chains_touches_its_target_alone(backbone: Path) -> None:
    """Pairs between its own chains are neither contacts nor errors of the interface."""
    task = binder(backbone, 6, chains=["A"], copies=2)
    masked: Any = task_losses(task, torch.device("cpu"), torch.float64)
    is_binder = torch.arange(26) >= 14
    expected = (is_binder[:, None] & ~is_binder[None]).double()
    for name in ("i_con", "i_pae", "avoid"):
        assert torch.equal(masked[name].selected, expected), name


def arrays() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        "distogram": rng.normal(size=(N, N, 64)) * 3,
        "lddt": rng.normal(size=(N, 50)),
        "errors": rng.normal(size=(N, N, 64)),
        "resolved": rng.normal(size=(N, 37)),
        "positions": rng.normal(size=(N, 37, 3)) * 8,
        "given": rng.normal(size=(N, 37, 3)) * 8,
        "sequence": rng.normal(size=(N, 20)),
    }


def outputs() -> Outputs:
    x = {name: torch.from_numpy(value) for name, value in arrays().items()}
    edges = torch.linspace(2.3125, 21.6875, 63, dtype=torch.float64)
    return Outputs(
        distogram=x["distogram"],
        lower_edges=torch.cat([edges.new_zeros(1), edges]),
        lddt=x["lddt"],
        resolved=x["resolved"],
        positions=x["positions"],
        atom14=x["positions"][:, :14],
        errors=x["errors"],
        error_breaks=torch.linspace(0, 31, 63, dtype=torch.float64),
    )


def task(protocol: str) -> DesignTask:
    """A task of 24 residues; complexes have chains of 14 and 10."""
    given = torch.from_numpy(arrays()["given"])
    mask = torch.ones(N, 37, dtype=torch.float64)
    two = target_from_sequence("G" * TARGET + ":" + "G" * (N - TARGET), "two")
    binds = DesignTask("binder", two, np.r_[np.full(TARGET, -1), np.arange(N - TARGET)], {})
    if protocol == "fixbb":
        return replace(
            hallucination(N),
            name="fixbb",
            reference=Reference(given, mask, AATYPE, mask[:, 1], torch.zeros(N)),
        )
    if protocol == "partial":
        mask[:5] = mask[12:] = 0
        return replace(
            hallucination(N),
            name="partial",
            reference=Reference(given, mask, AATYPE, mask[:, 1], torch.zeros(N)),
        )
    if protocol == "hotspots":
        return replace(binds, hotspots=np.array([2, 5]))
    return {
        "hallucinate": hallucination(N),
        "binder": binds,
        "oligomer": replace(binds, name="hallucinate", source=np.arange(N)),
    }[protocol]


WANTED = {
    "hallucinate": {
        "plddt": 0.4858974878718874,
        "exp_res": 0.5252596359702142,
        "pae": 0.5168383711055669,
        "con": 1.1098524700375336,
        "helix": 2.7114249072145222,
    },
    "fixbb": {"dgram_cce": 7.615920622614293, "fape": 0.9249939521351286, "rmsd": 15.867560594417055},
    "partial": {
        "dgram_cce": 7.069850709122271,
        "fape": 0.8452680713022216,
        "rmsd": 8.786004947355362,
    },
    "binder": {
        "plddt": 0.45323990370876055,
        "pae": 0.5158407209312109,
        "con": 0.456000415045648,
        "i_con": 0.5705767609223578,
        "i_pae": 0.5161043174703904,
    },
    "hotspots": {"i_con": 1.1362251763507412, "i_pae": 0.5183571087464998},
    "oligomer": {
        "con": 0.9839931443220119,
        "i_con": 0.6703456144648052,
        "pae": 0.5175327461309733,
        "i_pae": 0.5161043174888228,
    },
}


@pytest.mark.parametrize(("protocol", "name"), [(p, n) for p, values in WANTED.items() for n in values])
def test_values_are_colabdesigns(protocol: str, name: str) -> None:
    found = task_losses(task(protocol), torch.device("cpu"), torch.float64)[name](outputs(), AATYPE)
    assert float(found) == pytest.approx(WANTED[protocol][name], rel=2e-6)


def test_settings_of_contacts_are_colabdesigns() -> None:
    """Against the definition, computed here from the probabilities of the distogram."""
    given = outputs()
    settings = {"con": {"num": 3, "cutoff": 10.0, "seqsep": 5, "binary": True, "num_pos": 4}}
    found = task_losses(hallucination(N).with_contacts(settings), torch.device("cpu"), torch.float64)["con"]
    assert isinstance(given.distogram, Tensor)
    near = (given.distogram.softmax(-1) * (given.lower_edges < 10.0)).sum(-1)
    pair = -torch.log(near + 64e-8)
    index = torch.arange(N)
    apart = (index[:, None] - index).abs() >= 5
    best = torch.where(apart, pair, torch.inf).sort(-1).values[:, :3].mean(-1)
    assert float(found(given, AATYPE)) == pytest.approx(float(best.sort().values[:4].mean()), rel=1e-4)
    near_all = task("binder").with_contacts({"i_con": {"cutoff": 8.0}})
    own = task_losses(near_all, torch.device("cpu"), torch.float64)["i_con"](given, AATYPE)
    assert float(own) > WANTED["binder"]["i_con"]


def test_the_entropy_is_colabdesigns() -> None:
    logits = torch.from_numpy(arrays()["sequence"])
    assert float(losses.seq_ent_loss(logits, logits.new_ones(N), 0.5)) == pytest.approx(1.8114029634128825)


def line(count: int, step: float) -> Outputs:
    """CA atoms on a line."""
    positions = torch.zeros(count, 37, 3, dtype=torch.float64)
    positions[:, 1, 0] = step * torch.arange(count)
    return replace(outputs(), positions=positions)


def test_radius_and_termini_of_a_line() -> None:
    everyone = torch.ones(20, dtype=torch.float64)
    radius = 3.8 * np.sqrt((20**2 - 1) / 12)
    assert float(losses.rg_loss(line(20, 3.8), everyone)) == pytest.approx(radius - 2.38 * 20**0.365)
    assert float(losses.rg_loss(line(20, 0.1), everyone)) == pytest.approx(
        np.expm1(radius / 38 - 2.38 * 20**0.365)
    )
    assert float(losses.termini_loss(line(20, 3.8), everyone)) == pytest.approx(19 * 3.8 - 7)
    assert float(losses.termini_loss(line(20, 0.3), everyone)) == 0.0


def test_only_overlapping_atoms_clash() -> None:
    place = torch.arange(2) * 5
    aatype, chain, everyone = (
        torch.zeros(2, dtype=torch.long),
        torch.zeros(2, dtype=torch.long),
        torch.ones(2),
    )

    def clash(distance: float) -> Tensor:
        atom14 = torch.zeros(2, 14, 3)
        atom14[:, :5] = torch.arange(5)[None, :, None] * 30.0
        atom14[1] += torch.tensor([0.0, 0.0, distance])
        return losses.clash_loss(replace(outputs(), atom14=atom14), aatype, place, chain, everyone)

    assert float(clash(8.0)) == 0.0
    # Carbon 1.7 Å three times, nitrogen 1.55 Å, oxygen 1.52 Å; overlaps of more than 1.5 Å count at both atoms.
    assert float(clash(0.5)) == pytest.approx(3 * 1.4 + 1.1 + 1.04, abs=1e-4)


@pytest.mark.parametrize(
    "name", ["con", "plddt", "pae", "helix", "exp_res", "rg", "NC", "rmsd", "fape", "dgram_cce"]
)
def test_gradients_are_finite_differences(name: str) -> None:
    """Of every loss with respect to every output, along a random direction."""
    given = outputs()
    loss = task_losses(task("fixbb"), torch.device("cpu"), torch.float64)[name]
    fields = ("distogram", "lddt", "resolved", "positions", "errors")
    generator = torch.manual_seed(1)
    directions = {
        f: torch.randn(getattr(given, f).shape, dtype=torch.float64, generator=generator) for f in fields
    }
    leaves = {f: getattr(given, f).clone().requires_grad_() for f in fields}
    loss(replace(given, **leaves), AATYPE).backward()
    found = sum(float((x.grad * directions[f]).sum()) for f, x in leaves.items() if x.grad is not None)
    step = 1e-6

    def value(sign: float) -> float:
        moved = {f: getattr(given, f) + sign * step * directions[f] for f in fields}
        return float(loss(replace(given, **moved), AATYPE))

    assert found == pytest.approx((value(1) - value(-1)) / (2 * step), rel=1e-5)


def test_kept_residues_belong_to_folds_of_fixed_backbones_and_binders(backbone: Path) -> None:
    """In other protocols designed residues alone are scored; a binder's errors count against all chains."""
    cpu = torch.device("cpu")

    def selected(task: DesignTask, loss: str) -> np.ndarray:
        one: Any = task_losses(task, cpu, torch.float64)[loss]
        return one.selected.numpy()

    pattern = [0.0] * 4 + [1.0] * 10
    fixed = fixed_backbone(backbone, chain="A", keep="A1-4")
    assert selected(fixed, "plddt").tolist() == [1.0] * 14
    grafted = partial(backbone, "A1-4", chain="A")
    assert selected(grafted, "plddt").tolist() == pattern
    assert selected(grafted, "pae").tolist() == [[one] * 14 for one in pattern]
    bound = binder(backbone, parts=BinderParts(redesign=("B",), keep="B1-3"))
    assert selected(bound, "plddt").tolist() == [0.0] * 14 + [1.0] * 10
    assert selected(bound, "pae").tolist() == [[0.0] * 24] * 14 + [[1.0] * 24] * 10
