"""Tasks of design: designed residues, kept residues, and losses."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fastfold.data.targets import Chain, Target, structure_chains, target_from_sequence
from fastfold.data.templates.whole.given import empty_template, in_one_frame, with_virtual_cb
from fastfold.errors import ConfigError, InputError
from fastfold.evoformer.inputs import encode_sequence
from fastfold.evoformer.losses import design as losses
from fastfold.evoformer.losses.design import ContactOptions, Outputs
from fastfold.products.design.config import Flexible
from fastfold.products.design.targets import (
    TargetStructure,
    check_flexible,
    residue_places,
    residue_text,
    template_features,
)
from fastfold.protein import residue_constants as rc
from fastfold.protein.all_atom import pseudo_beta, pseudo_beta_mask
from fastfold.protein.io.observed import (
    BINDING_SITE,
    FIXED_BACKBONE,
    MOTIF,
    ObservedChain,
    ObservedStructure,
    Purpose,
    check_backbone,
    read_logged,
)
from fastfold.protein.protein import chain_name

CONTACTS = ContactOptions(num=2, cutoff=14.0, seqsep=9)
INTERFACE_CONTACTS = ContactOptions(num=1, cutoff=21.6875)
"""Contacts within and between chains, as ColabDesign counts them."""

_RING_WEIGHTS = {"pae": 1.0, "plddt": 1.0, "con": 0.5}
"""Weights of ColabDesign's protocol for rings (``af_cyc_design``), for those that are too small for ``CONTACTS``."""

_PLACEHOLDER = "G"

Loss = Callable[[Outputs, Tensor], Tensor]
"""Loss of the outputs and the residue types ``[N]`` of the most likely sequence."""


@dataclass(frozen=True)
class MaskedLoss:
    """Loss that reads some residues or pairs of a task, and is constant without any."""

    compute: Loss
    selected: Tensor  #: ``[N]`` residues or ``[N, N]`` pairs that the loss reads, above 0
    meaning: str  #: These residues or pairs in words

    def __call__(self, outputs: Outputs, aatype: Tensor) -> Tensor:
        """Compute the loss."""
        return self.compute(outputs, aatype)


@dataclass(frozen=True)
class Reference:
    """Given atoms of residues of a task."""

    positions: Tensor  #: ``[N, 37, 3]`` in Å, zero where unknown
    mask: Tensor  #: ``[N, 37]``, 1 for known atoms of supervised residues
    aatype: Tensor  #: ``[N]`` residue types of the given structure


@dataclass(frozen=True)
class DesignTask:
    """Residues to design in the chains of a target, and losses of them.

    Example:
        >>> from fastfold.products.design import hallucination
        >>> task = hallucination(60)
        >>> task.name, len(task.source), list(task.weights)
        ('hallucinate', 60, ['con'])
    """

    name: str  #: Name of the protocol
    target: Target  #: Chains; designed residues are glycines in it
    source: np.ndarray  #: Parameter row that each residue has its type from, ``[N]``; -1 for fixed residues
    weights: Mapping[str, float]  #: Default weights of losses by name
    reference: Reference | None = None  #: Given atoms that designs are compared with, None for none
    #: Residues of the given chains that a binder must touch, ``[H]``; empty for any
    hotspots: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    #: Structure that is the template of each chain, None for no template
    templates: Sequence[ObservedChain | None] | None = None
    cyclic: bool = False  #: True if designed chains are rings
    #: Settings of contacts within and between chains that differ from the protocol's, by the losses' names
    contact_settings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    flexible: Flexible = "none"  #: Parts of the templates that are left out
    others: Sequence[DesignTask] = ()  #: Further complexes that the designed residues shall form
    avoided: Sequence[DesignTask] = ()  #: Complexes that they shall not form
    #: Losses of the user by name; their weights are settings of the design
    own_losses: Mapping[str, Loss] = field(default_factory=dict)
    #: CA atoms ``[N, 3]`` of a binder's given chains in Å, NaN where unknown; None without given chains
    given: np.ndarray | None = None

    @cached_property
    def template_features(self) -> tuple[Mapping[str, np.ndarray] | None, ...] | None:
        """Raw template features of each chain; None without templates."""
        if self.templates is None:
            return None
        return template_features(self.templates, self.target.source, self.flexible)

    @cached_property
    def joined_template_features(self) -> tuple[Mapping[str, np.ndarray], ...] | None:
        """Raw template features of each chain for monomer networks, all in the frame of the file."""
        if self.template_features is None:
            return None
        lengths = [len(chain.sequence) for chain in self.target.chains]
        name = self.target.source.encode()
        parts = zip(self.template_features, lengths, strict=True)
        return in_one_frame([empty_template(length, name) if one is None else one for one, length in parts])

    @property
    def without_templates(self) -> DesignTask:
        """The same task for networks that do not see the structure of given chains."""
        others, avoided = ([one.without_templates for one in group] for group in (self.others, self.avoided))
        return replace(self, flexible="free", others=others, avoided=avoided)

    def with_contacts(self, settings: Mapping[str, Mapping[str, Any]]) -> DesignTask:
        """Return the task with settings of contacts (``con``, ``i_con``) for all its complexes."""
        others, avoided = (
            [one.with_contacts(settings) for one in group] for group in (self.others, self.avoided)
        )
        return replace(self, contact_settings=settings, others=others, avoided=avoided)

    @property
    def template_indices(self) -> tuple[int, ...] | None:
        """Indices of the templates that a monomer network reads; None for all."""
        return () if self.templates is None else None

    @property
    def complexes(self) -> list[DesignTask]:
        """The task itself, those of further targets, and those of off-targets."""
        return [self, *self.others, *self.avoided]

    @property
    def alone(self) -> DesignTask | None:
        """Task of a binder without its given chains; None for other protocols."""
        if self.given is None:
            return None
        length = len(self.designed_chain)
        name = self.target.chains[int(self.chain[self.designed_chain[0]])].id
        target = _target("alone", [Chain(name, _PLACEHOLDER * length)])
        return DesignTask("alone", target, np.arange(length), {}, cyclic=self.cyclic)

    @property
    def num_parameters(self) -> int:
        """Number of residues that are designed independently."""
        return int(self.source.max()) + 1

    @cached_property
    def chain(self) -> np.ndarray:
        """Chain number of each residue, ``[N]``."""
        lengths = [len(chain.sequence) for chain in self.target.chains]
        return np.repeat(np.arange(len(lengths)), lengths)

    @cached_property
    def place(self) -> np.ndarray:
        """Number of each residue in its chain from 0, ``[N]``."""
        return np.concatenate([np.arange(len(chain.sequence)) for chain in self.target.chains])

    @cached_property
    def residue_index(self) -> np.ndarray:
        """Residue index that networks see, ``[N]``, with the gaps of given chains."""
        return np.concatenate([chain.residue_index for chain in self.target.chains])

    @property
    def residue_columns(self) -> dict[str, str]:
        """Residues of all chains, and hotspots if there are some, as names of outputs such as ``D310-338,A1-60``."""
        columns = {"chains": residue_text(self.target, range(len(self.source)))}
        return columns | (
            {"hotspots": residue_text(self.target, self.hotspots.tolist())} if len(self.hotspots) else {}
        )

    @cached_property
    def designed_chain(self) -> np.ndarray:
        """Residues of the first designed chain, kept ones included, ``[L]``."""
        return np.flatnonzero(self.chain == self.chain[np.argmax(self.source >= 0)])

    @property
    def rings(self) -> bool | str:
        """Chains that are rings: all, none, or their names (``cyclic`` of ``InferConfig``)."""
        designed = np.unique(self.chain[self.source >= 0])
        if not self.cyclic or len(designed) == len(self.target.chains):
            return self.cyclic
        return ",".join(self.target.chains[number].id for number in designed)

    @cached_property
    def offset(self) -> Tensor:
        """Separation of residues in the sequence, ``[N, N]``; large between chains, the shorter way in rings."""
        apart = self.residue_index[:, None] - self.residue_index[None]
        if self.cyclic:
            length = np.bincount(self.chain)[self.chain][:, None]
            is_ring = np.isin(self.chain, self.chain[self.source >= 0])[:, None]
            apart = np.where(is_ring, (apart + length // 2) % length - length // 2, apart)
        same = self.chain[:, None] == self.chain[None]
        return torch.from_numpy(np.where(same, apart, 10**6))

    @property
    def contacts(self) -> ContactOptions:
        """Contacts within chains; all pairs of a ring whose residues are too near each other in the sequence."""
        length = len(self.designed_chain)
        small = ContactOptions(num=length, cutoff=21.6875, binary=True)
        options = small if self.cyclic and _is_small_ring(length) else CONTACTS
        return replace(options, **self.contact_settings.get("con", {}))

    def check_losses(self, weights: Mapping[str, float]) -> None:
        """Raise ConfigError if a loss with a weight selects no residue or pair, so that it is constant."""
        for name, loss in self.losses(torch.device("cpu"), torch.float32).items():
            if weights.get(name) and isinstance(loss, MaskedLoss) and not bool((loss.selected > 0).any()):
                what = "residue" if loss.selected.dim() == 1 else "pair of residues"
                raise ConfigError(
                    f"{self.name}: the loss {name} would always be 0: no {what} is {loss.meaning}; leave it out "
                    f"({name}=0 in `loss`), or design a longer chain"
                )

    def sequence(self, one_hot: Tensor) -> Tensor:
        """Return a form ``[N, 20]`` of all residues, from its rows ``[P, 20]`` of the designed ones."""
        fixed = encode_sequence("".join(chain.sequence for chain in self.target.chains)).to(one_hot)
        source = torch.from_numpy(self.source).to(one_hot.device)
        return torch.where(source[:, None] >= 0, one_hot[source.clamp(min=0)], fixed)

    def letters(self, parameters: str) -> list[str]:
        """Return the sequence of each chain, from the letters of the parameter rows."""
        whole = "".join(chain.sequence for chain in self.target.chains)
        chosen = [parameters[s] if s >= 0 else letter for s, letter in zip(self.source, whole, strict=True)]
        return ["".join(chosen[i] for i in np.flatnonzero(self.chain == c)) for c in np.unique(self.chain)]

    def losses(self, device: torch.device, dtype: torch.dtype) -> dict[str, Loss]:
        """Return every loss that is defined for the task, by ColabDesign's name."""
        # Kept residues of a fixed backbone are part of the fold.
        is_designed = (self.source >= 0) | (self.name == "fixbb")
        designed = torch.from_numpy(is_designed).to(device, dtype)
        chain = torch.from_numpy(self.chain).to(device)
        index, offset = torch.from_numpy(self.residue_index).to(device), self.offset.to(device)
        same = (chain[:, None] == chain[None]).to(dtype)
        everyone = torch.ones_like(designed)
        is_binder = self.name == "binder"
        # As in ColabDesign, errors of a binder count against all chains, those of other designs within chains.
        error_pairs = designed[:, None] * everyone if is_binder else same * designed[:, None]
        within = same * (designed[None] if is_binder else everyone)
        helical = within * (designed if is_binder else everyone)[:, None]
        first_chain = designed * (chain == int(self.chain[is_designed][0]))
        contacts = self.contacts
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
        if len(self.target.chains) > 1:
            goal = everyone - designed if is_binder else everyone
            if is_binder and len(self.hotspots):
                hotspots = torch.from_numpy(self.hotspots).to(device)
                goal = torch.zeros_like(goal).index_fill(0, hotspots, 1.0)
            rows, columns = (goal, designed) if is_binder and len(self.hotspots) else (designed, goal)
            between = (1.0 - same) * columns[None]
            partners = rows[:, None] * between
            facing_options = replace(INTERFACE_CONTACTS, **self.contact_settings.get("i_con", {}))
            losses_of["i_con"] = MaskedLoss(
                lambda o, _: losses.contact_loss(o, offset, facing_options, rows, between),
                partners,
                "between chains",
            )
            if is_binder:
                facing = between if rows is designed else between.transpose(0, 1)
                losses_of["avoid"] = MaskedLoss(
                    lambda o, _: losses.avoid_loss(o, CONTACTS.cutoff, designed, facing),
                    designed[:, None] * facing,
                    "between chains",
                )
            losses_of["i_ptm"] = MaskedLoss(
                lambda o, _: losses.interface_ptm_loss(o, chain), 1.0 - same, "between chains"
            )
            error_columns = (1.0 - same) * (designed[:, None] * goal[None])
            losses_of["i_pae"] = MaskedLoss(
                lambda o, _: losses.pae_loss(o, error_columns), error_columns, "between chains"
            )
        if self.reference is not None:
            losses_of |= _supervised(self.reference, device, dtype)
        return losses_of | dict(self.own_losses)


def _supervised(reference: Reference, device: torch.device, dtype: torch.dtype) -> dict[str, Loss]:
    """Return losses against given atoms; CB is that of the designed residue type, as in ColabDesign."""
    positions, mask = reference.positions.to(device, dtype), reference.mask.to(device, dtype)
    backbone = mask[:, 0] * mask[:, 1] * mask[:, 2]
    frames = backbone[:, None] * backbone[None]

    def dgram(outputs: Outputs, aatype: Tensor) -> Tensor:
        present = pseudo_beta_mask(aatype, mask)
        beta = pseudo_beta(aatype, positions)
        return losses.dgram_cce_loss(outputs, beta, present[:, None] * present[None])

    return {
        "dgram_cce": MaskedLoss(dgram, mask.amax(-1), "kept with atoms of the file"),
        "rmsd": MaskedLoss(
            lambda o, _: losses.rmsd_loss(o, positions[:, 1], mask[:, 1]), mask[:, 1], "kept with a CA atom"
        ),
        "fape": MaskedLoss(
            lambda o, _: losses.fape_loss(o, positions, frames), frames, "kept with N, CA and C atoms"
        ),
    }


def _is_small_ring(length: int) -> bool:
    """Return True if no two residues of a ring are as far apart in the sequence as contacts must be."""
    return length // 2 < CONTACTS.seqsep


def draw_length(seed: int, low: int, high: int) -> int:
    """Draw a length from a range, both ends included, for a seed."""
    return int(np.random.default_rng([seed, 2**20]).integers(low, high + 1))


def hallucination(length: int, *, copies: int = 1, cyclic: bool = False) -> DesignTask:
    """Design a protein of a length without a given structure.

    Args:
        length: Residues of a chain.
        copies: Chains with the same sequence.
        cyclic: True for rings.

    Raises:
        ConfigError: Length or copies are out of range.

    Example:
        >>> from fastfold.products.design import hallucination
        >>> task = hallucination(60, copies=2)
        >>> [len(chain.sequence) for chain in task.target.chains]
        [60, 60]
    """
    if length < 10 or copies < 1:
        raise ConfigError(f"expected a length from 10 and copies from 1, found {length} and {copies}")
    weights = _RING_WEIGHTS if cyclic and _is_small_ring(length) else {"con": 1.0}
    weights = weights | ({"i_con": 1.0} if copies > 1 else {})
    target = target_from_sequence(":".join([_PLACEHOLDER * length] * copies), "hallucinate")
    return DesignTask("hallucinate", target, np.tile(np.arange(length), copies), weights, cyclic=cyclic)


def fixed_backbone(path: Path, *, chain: str | None = None, keep: str = "") -> DesignTask:
    """Design a sequence for the backbone of a chain.

    Args:
        path: PDB or mmCIF file.
        chain: Chain name; needed if the file has several.
        keep: Residues whose type stays, such as ``A10-25,A40``.

    Raises:
        InputError: The file or a residue cannot be used.
        ConfigError: All residues are kept.

    Example:
        >>> import fastfold
        >>> from pathlib import Path
        >>> from fastfold.products.design import fixed_backbone
        >>> _ = Path("backbone.pdb").write_text(fastfold.predict("MTYKLILNGK", "mini", num_recycles=0).to_pdb())
        >>> task = fixed_backbone(Path("backbone.pdb"), keep="A1-3")
        >>> len(task.source), task.source.tolist().count(-1)
        (10, 3)
    """
    structure = _read_chain(path, chain, FIXED_BACKBONE)
    kept = residue_places(keep, structure.chains, path)
    length = len(structure.chains[0])
    if len(kept) == length:
        raise ConfigError(f"all {length} residues of {path} are kept; leave at least one to design")
    return _single_chain("fixbb", structure, kept, {"dgram_cce": 1.0}, np.arange(length))


def partial(path: Path, motif: str, *, chain: str | None = None) -> DesignTask:
    """Design everything around a motif, whose structure and residue types stay.

    Args:
        path: PDB or mmCIF file.
        motif: Residues, such as ``A10-25,A40``.
        chain: Chain name; needed if the file has several.

    Raises:
        InputError: The file or a residue cannot be used.
        ConfigError: The motif is empty or the whole chain.

    Example:
        >>> import fastfold
        >>> from pathlib import Path
        >>> from fastfold.products.design import partial
        >>> _ = Path("motif.pdb").write_text(fastfold.predict("MTYKLILNGK", "mini", num_recycles=0).to_pdb())
        >>> task = partial(Path("motif.pdb"), "A3-7")
        >>> task.source.tolist().count(-1)
        5
    """
    structure = _read_chain(path, chain, MOTIF)
    kept = residue_places(motif, structure.chains, path)
    chain_id, length = structure.chains[0].chain_id, len(structure.chains[0])
    if not 0 < len(kept) < length:
        raise ConfigError(
            f"expected a motif of 1 to {length - 1} residues of {path}, found {len(kept)}; name residues such as "
            f"{chain_id}10-25"
        )
    check_backbone(structure.chains, replace(MOTIF, needs_every_residue=True), path=path, residues=kept)
    return _single_chain("partial", structure, kept, {"dgram_cce": 1.0, "con": 1.0}, kept)


def binder(
    path: Path,
    length: int,
    *,
    chains: Sequence[str] = (),
    hotspots: str = "",
    flexible: Flexible = "none",
    others: Sequence[TargetStructure] = (),
    avoided: Sequence[TargetStructure] = (),
    cyclic: bool = False,
) -> DesignTask:
    """Design a chain that binds given ones, whose structure is a template.

    Args:
        path: PDB or mmCIF file of the bound protein.
        length: Residues of the binder.
        chains: Chain names to bind; empty for all.
        hotspots: Residues to touch, such as ``A10-25,B40``; empty for any.
        flexible: Parts of the given chains' templates that are left out.
        others: Further targets of the same binder.
        avoided: Off-targets, which it shall not touch; at their hotspots if they have some.
        cyclic: True for a ring.

    Raises:
        InputError: The file, a chain or a residue cannot be used.
        ConfigError: The length is out of range.

    Example:
        >>> import fastfold
        >>> from pathlib import Path
        >>> from fastfold.products.design import binder
        >>> _ = Path("bound.pdb").write_text(fastfold.predict("MTYKLILNGK", "mini", num_recycles=0).to_pdb())
        >>> task = binder(Path("bound.pdb"), 20, hotspots="A3-5")
        >>> [len(chain.sequence) for chain in task.target.chains], task.hotspots.tolist()
        ([10, 20], [2, 3, 4])
    """
    if length < 5:
        raise ConfigError(f"expected a binder of 5 residues or more, found {length}")
    check_flexible(flexible)
    structure = read_logged(path, BINDING_SITE, chain_ids=chains)
    bound_chains = list(structure.chains)
    touched = residue_places(hotspots, bound_chains, path)
    own = structure_chains(structure)
    name = next(name for name in map(chain_name, count()) if name not in [one.id for one in own])
    ca = rc.atom_order["CA"]
    atoms = [np.where(one.mask[:, ca, None] > 0.5, one.positions[:, ca], np.nan) for one in bound_chains]

    def bound(other: TargetStructure) -> DesignTask:
        where, spots = other.chains, other.hotspots
        return binder(other.path, length, chains=where, hotspots=spots, flexible=flexible, cyclic=cyclic)

    return DesignTask(
        "binder",
        _target("binder", [*own, Chain(name, _PLACEHOLDER * length)], structure.name),
        np.concatenate([np.full(sum(map(len, bound_chains)), -1), np.arange(length)]),
        {"plddt": 0.1, "i_con": 1.0},
        hotspots=touched,
        templates=[*bound_chains, None],
        cyclic=cyclic,
        flexible=flexible,
        others=[bound(one) for one in others],
        avoided=[bound(one) for one in avoided],
        given=np.concatenate([*atoms, np.full((length, 3), np.nan)]),
    )


def _target(name: str, chains: Sequence[Chain], source: str = "") -> Target:
    """Return a target without alignments; its chains are parts of no whole ones, which would be searched."""
    own = tuple(replace(chain, whole="", regions=()) for chain in chains)
    return Target(name, own, source, name, ())


def _read_chain(path: Path, name: str | None, purpose: Purpose) -> ObservedStructure:
    """Read one chain of a structure, which must be named if there are several."""
    structure = read_logged(path, purpose, chain_ids=() if name is None else (name,))
    if len(structure.chains) > 1:
        names = ", ".join(chain.chain_id for chain in structure.chains)
        raise InputError(f"has chains {names}; choose one with `chains`", path=path)
    return structure


def _single_chain(
    name: str,
    structure: ObservedStructure,
    kept: np.ndarray,
    weights: Mapping[str, float],
    supervised: np.ndarray,
) -> DesignTask:
    """Return a task that designs all residues of a chain but ``kept``; atoms of ``supervised`` ones are compared."""
    (observed,), (chain,) = structure.chains, structure_chains(structure)
    designed = np.setdiff1d(np.arange(len(observed)), kept)
    letters, source = np.array(list(observed.sequence)), np.full(len(observed), -1)
    letters[designed], source[designed] = _PLACEHOLDER, np.arange(len(designed))
    is_supervised = torch.zeros(len(observed), 1).index_fill(0, torch.from_numpy(supervised), 1.0)
    # As in ColabDesign, glycines have a CB, so that other residues in their place are compared with it.
    whole = with_virtual_cb(observed)
    mask = torch.from_numpy(whole.mask) * is_supervised
    aatype = encode_sequence(observed.sequence).argmax(-1)
    reference = Reference(torch.from_numpy(whole.positions), mask, aatype)
    target = _target(name, [replace(chain, sequence="".join(letters))], structure.name)
    return DesignTask(name, target, source, weights, reference)
