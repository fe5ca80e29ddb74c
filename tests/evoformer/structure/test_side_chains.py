"""Side chains of a moved backbone are rotamers; backbones, padding and unknown residues stay."""

from __future__ import annotations

import torch

from fastfold.evoformer.config import model_config
from fastfold.evoformer.structure.backbone_energy import bonds
from fastfold.evoformer.structure.side_chains import place_rotamers
from fastfold.evoformer.structure.structure_module import StructureModule
from fastfold.protein import residue_constants as rc
from fastfold.protein.all_atom import atom14_to_atom37
from fastfold.protein.metrics.backbone import measure_backbone, torsion
from fastfold.protein.metrics.lddt import count_clashes
from tests.evoformer.structure.test_distogram_descent import helix

SEQUENCE = "MKLFWYRHXPG"
BACKBONE = [rc.atom_order[name] for name in ("N", "CA", "C", "O", "CB")]


def test_rotamers_take_overlaps_away_and_leave_the_backbone() -> None:
    torch.manual_seed(0)
    length, pad = len(SEQUENCE), 2
    aatype = torch.as_tensor(rc.sequence_to_aatype(SEQUENCE + "A" * pad)).long()
    index, mask = torch.arange(length + pad), (torch.arange(length + pad) < length).float()
    module = StructureModule(
        model_config("mini").model.heads.structure_module, 128, 64, multimer=False, zero_init=True
    )
    chi = 2 * torch.pi * torch.rand(length + pad, 7)
    angles = torch.stack([chi.sin(), chi.cos()], -1)
    structure = {"sidechains": {"angles_sin_cos": angles[None]}}
    moved = module.moved(structure, helix(length + pad), aatype, bonds(index, mask > 0))
    found = place_rotamers(moved, aatype, index, mask)
    before, after = moved["final_atom_positions"], found["final_atom_positions"]
    torch.testing.assert_close(after[:, BACKBONE], before[:, BACKBONE])
    assert torch.equal(after[length:], before[length:])
    assert not torch.allclose(after[:length], before[:length])
    assert torch.equal(atom14_to_atom37(found["final_atom14_positions"], aatype), after)
    present = torch.as_tensor(rc.restype_atom37_mask)[aatype] * mask[:, None]
    clashes = [count_clashes(x, present, index, 0 * index) for x in (before, after)]
    assert clashes[1] <= clashes[0]
    batch = [torch.stack([x] * 2) for x in (aatype, index, mask)]
    doubled = {"final_atom_positions": torch.stack([before] * 2)}
    doubled["sidechains"] = {"angles_sin_cos": torch.stack([angles] * 2)[None]}
    for sample in place_rotamers(doubled, *batch)["final_atom_positions"]:
        assert torch.equal(sample, after)


def test_o_is_opposite_to_the_next_nitrogen() -> None:
    length, cut = 8, 4
    aatype = torch.zeros(length).long()
    index = torch.arange(length) + 9 * (torch.arange(length) >= cut)
    module = StructureModule(
        model_config("mini").model.heads.structure_module, 128, 64, multimer=False, zero_init=True
    )
    angles = torch.tensor([0.6, 0.8]).expand(1, length, 7, 2)
    present = torch.ones(length).bool()
    structure = {"sidechains": {"angles_sin_cos": angles}}
    moved = module.moved(structure, helix(length), aatype, bonds(index, present))["final_atom_positions"]
    geometry = measure_backbone(moved, torch.as_tensor(rc.restype_atom37_mask)[aatype], index, 0 * index)
    n, ca, c, o = (moved[:, rc.atom_order[name]].double() for name in ("N", "CA", "C", "O"))
    to_oxygen = (torsion(n, ca, c, o) + 360) % 360 - 180
    inside = ~geometry.psi.isnan()
    assert inside.tolist() == [True, True, True, False, True, True, True, False]
    torch.testing.assert_close(to_oxygen[inside], geometry.psi[inside], rtol=0, atol=0.5)
    free = torch.rad2deg(torch.atan2(torch.tensor(0.6), torch.tensor(0.8))).double()
    torch.testing.assert_close(to_oxygen[~inside], free.expand(2), rtol=0, atol=0.5)
