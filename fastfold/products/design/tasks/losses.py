"""Losses of a task by ColabDesign's names, with the residues or pairs that each one reads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fastfold.errors import ConfigError
from fastfold.evoformer.losses import design as losses
from fastfold.evoformer.losses.design import Outputs
from fastfold.products.design.tasks.task import CONTACTS, INTERFACE_CONTACTS, DesignTask, Loss, Reference
from fastfold.protein.all_atom import pseudo_beta, pseudo_beta_mask


@dataclass(frozen=True)
class MaskedLoss:
    """Loss that reads some residues or pairs of a task, and is constant without any."""

    compute: Loss
    selected: Tensor  #: ``[N]`` residues or ``[N, N]`` pairs that the loss reads, above 0
    meaning: str  #: These residues or pairs in words

    def __call__(self, outputs: Outputs, aatype: Tensor) -> Tensor:
        """Compute the loss."""
        return self.compute(outputs, aatype)


def check_losses(task: DesignTask, weights: Mapping[str, float]) -> None:
    """Raise ConfigError if a loss with a weight selects no residue or pair, so that it is constant."""
    for name, loss in task_losses(task, torch.device("cpu"), torch.float32).items():
        if weights.get(name) and isinstance(loss, MaskedLoss) and not bool((loss.selected > 0).any()):
            what = "residue" if loss.selected.dim() == 1 else "pair of residues"
            raise ConfigError(
                f"{task.name}: the loss {name} would always be 0: no {what} is {loss.meaning}; leave it out "
                f"({name}=0 in `DesignConfig.weights`), or design a longer chain"
            )


def task_losses(task: DesignTask, device: torch.device, dtype: torch.dtype) -> dict[str, Loss]:
    """Return every loss that is defined for a task, by ColabDesign's name."""
    is_binder = task.name == "binder"
    # Kept residues of a fixed backbone and of a binder are part of the fold.
    is_designed = task.in_designed if is_binder or task.name == "fixbb" else task.source >= 0
    designed = torch.from_numpy(is_designed).to(device, dtype)
    chain = torch.from_numpy(task.chain).to(device)
    index, offset = torch.from_numpy(task.residue_index).to(device), task.offset.to(device)
    same = (chain[:, None] == chain[None]).to(dtype)
    everyone = torch.ones_like(designed)
    # As in ColabDesign, errors of a binder count against all chains, those of other designs within chains.
    error_pairs = designed[:, None] * everyone if is_binder else same * designed[:, None]
    within = same * (designed[None] if is_binder else everyone)
    helical = within * (designed if is_binder else everyone)[:, None]
    first_chain = designed * (chain == int(task.chain[is_designed][0]))
    contacts = task.contacts
    apart = f"at least {contacts.seqsep} apart within a chain" if contacts.seqsep else "within a chain"
    losses_of: dict[str, Loss] = {
        "plddt": MaskedLoss(lambda o, _: losses.plddt_loss(o, designed), designed, "designed"),
        "exp_res": MaskedLoss(lambda o, _: losses.exp_res_loss(o, designed), designed, "designed"),
        "pae": MaskedLoss(lambda o, _: losses.pae_loss(o, error_pairs), error_pairs, "designed"),
        "con": MaskedLoss(
            lambda o, _: losses.contact_loss(o, offset, contacts, designed, within),
            designed[:, None] * losses.separated_pairs(offset, contacts.seqsep, within),
            apart,
        ),
        "helix": MaskedLoss(
            lambda o, _: losses.helix_loss(o, offset, helical),
            losses.helical_pairs(offset, helical),
            "three apart in a designed chain",
        ),
        "rg": MaskedLoss(lambda o, _: losses.rg_loss(o, first_chain), first_chain, "designed"),
        "NC": MaskedLoss(lambda o, _: losses.termini_loss(o, first_chain), first_chain, "designed"),
        "clashes": MaskedLoss(
            lambda o, aatype: losses.clash_loss(o, aatype, index, chain, designed), designed, "designed"
        ),
    }
    if len(task.target.chains) > 1:
        losses_of |= _between_chains(task, designed, offset, chain)
    if task.reference is not None:
        losses_of |= _supervised(task.reference, (everyone - designed) if is_binder else None, device, dtype)
    return losses_of | dict(task.own_losses)


def _between_chains(task: DesignTask, designed: Tensor, offset: Tensor, chain: Tensor) -> dict[str, Loss]:
    """Return losses between chains; ``designed [N]`` are 1 for residues of the design."""
    is_binder, everyone = task.name == "binder", torch.ones_like(designed)
    different = (chain[:, None] != chain[None]).to(designed.dtype)
    goal = everyone - designed if is_binder else everyone
    has_hotspots = is_binder and len(task.hotspots) > 0
    if has_hotspots:
        hotspots = torch.from_numpy(task.hotspots).to(designed.device)
        goal = torch.zeros_like(goal).index_fill(0, hotspots, 1.0)
    touching = designed
    if len(task.paratope):
        paratope = torch.from_numpy(task.paratope).to(designed.device)
        touching = torch.zeros_like(designed).index_fill(0, paratope, 1.0)
    rows, columns = (goal, touching) if has_hotspots else (touching, goal)
    between = different * columns[None]
    options = replace(INTERFACE_CONTACTS, **task.contact_settings.get("i_con", {}))
    between_losses: dict[str, Loss] = {
        "i_con": MaskedLoss(
            lambda o, _: losses.contact_loss(o, offset, options, rows, between),
            rows[:, None] * between,
            "between chains",
        )
    }
    if is_binder:
        facing = between.transpose(0, 1) if has_hotspots else between
        between_losses["avoid"] = MaskedLoss(
            lambda o, _: losses.avoid_loss(o, CONTACTS.cutoff, designed, facing),
            designed[:, None] * facing,
            "between chains",
        )
    between_losses["i_ptm"] = MaskedLoss(
        lambda o, _: losses.interface_ptm_loss(o, chain), different, "between chains"
    )
    error_pairs = different * (designed[:, None] * goal[None])
    between_losses["i_pae"] = MaskedLoss(
        lambda o, _: losses.pae_loss(o, error_pairs), error_pairs, "between chains"
    )
    return between_losses


def _supervised(
    reference: Reference, target: Tensor | None, device: torch.device, dtype: torch.dtype
) -> dict[str, Loss]:
    """Return losses against given atoms; CB is that of the designed residue type, as in ColabDesign.

    ``target [N]`` are 1 for the chains that a binder binds, None for other protocols. A binder whose atoms are given in
    their frame is superposed on them.
    """
    positions, mask = reference.positions.to(device, dtype), reference.mask.to(device, dtype)
    rows = reference.rows.to(device, dtype)
    compared = reference.pairs.to(device, dtype)
    backbone = mask[:, 0] * mask[:, 1] * mask[:, 2]
    frames = backbone[:, None] * backbone[None] * compared
    moved = mask[:, 1] * rows
    is_bound = target is not None and bool((reference.frame[reference.rows > 0] == 0).all())
    fitted = mask[:, 1] * target if target is not None and is_bound else None

    def summed(loss: Tensor, pairs: Tensor) -> Tensor:
        return loss * pairs.sum() / (rows.sum() + 1e-8) if reference.is_summed else loss

    def dgram(outputs: Outputs, aatype: Tensor) -> Tensor:
        present = pseudo_beta_mask(aatype, mask)
        pairs = present[:, None] * present[None] * compared
        return summed(losses.dgram_cce_loss(outputs, pseudo_beta(aatype, positions), pairs), pairs)

    return {
        "dgram_cce": MaskedLoss(dgram, compared, "kept with atoms of the file"),
        "rmsd": MaskedLoss(
            lambda o, _: losses.rmsd_loss(o, positions[:, 1], moved, fitted), moved, "kept with a CA atom"
        ),
        "fape": MaskedLoss(
            lambda o, _: summed(losses.fape_loss(o, positions, frames), frames),
            frames,
            "kept with N, CA and C atoms",
        ),
    }
