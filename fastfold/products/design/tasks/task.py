"""Task of a design: designed residues, kept residues, and the atoms that designs are compared with."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fastfold.data.targets import Chain, Target
from fastfold.data.templates.whole.given import empty_template
from fastfold.evoformer.inputs import encode_sequence
from fastfold.evoformer.losses.design import ContactOptions, Outputs
from fastfold.products.design.config import Flexible
from fastfold.products.design.tasks.given import residue_text, template_features, with_frames
from fastfold.protein.io.observed import ObservedChain
from fastfold.utils.lazy import old_attributes, old_methods

CONTACTS = ContactOptions(num=2, cutoff=14.0, seqsep=9)
INTERFACE_CONTACTS = ContactOptions(num=1, cutoff=21.6875)
"""Contacts within and between chains, as ColabDesign counts them."""

PLACEHOLDER = "G"  #: Letter of designed residues in the chains of a task

Loss = Callable[[Outputs, Tensor], Tensor]
"""Loss of the outputs and the residue types ``[N]`` of the most likely sequence."""


@dataclass(frozen=True)
class Reference:
    """Given atoms of residues of a task."""

    positions: Tensor  #: ``[N, 37, 3]`` in Å, zero where unknown
    mask: Tensor  #: ``[N, 37]``, 1 for known atoms of compared residues and of given chains
    aatype: Tensor  #: ``[N]`` residue types of the given structure, 20 for unknown ones
    rows: Tensor  #: ``[N]``, 1 for residues of designed chains that are compared
    #: ``[N]`` numbers of the frames in which atoms are given; only pairs of one frame are compared
    frame: Tensor
    #: True for sums over partners, as in ColabDesign's redesign of a binder; False for means over pairs
    is_summed: bool = False

    @property
    def pairs(self) -> Tensor:
        """Pairs ``[N, N]`` of a compared residue and one of the same frame, 1 for those that count."""
        present = self.mask.amax(-1)
        same = self.frame[:, None] == self.frame[None]
        return (self.rows * present)[:, None] * present[None] * same


@old_attributes({"given": "bound_ca"})
@old_methods(
    {
        "check_losses": "fastfold.products.design.tasks.losses:check_losses",
        "losses": "fastfold.products.design.tasks.losses:task_losses",
    }
)
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
    #: Residues of a binder that shall touch the given chains, ``[K]``; empty for any
    paratope: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    #: Structure that is the template of each chain, None for no template
    templates: Sequence[ObservedChain | None] | None = None
    cyclic: bool = False  #: True if designed chains are rings
    #: Settings of contacts within and between chains that differ from the protocol's, by the losses' names
    contact_settings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    flexible: Flexible = "none"  #: Parts of the templates of given chains that are left out
    own_flexible: Flexible = "free"  #: Parts of the templates of designed chains that are left out
    others: Sequence[DesignTask] = ()  #: Further complexes that the designed residues shall form
    avoided: Sequence[DesignTask] = ()  #: Complexes that they shall not form
    #: Losses of the user by name; their weights are settings of the design
    own_losses: Mapping[str, Loss] = field(default_factory=dict)
    #: CA atoms ``[N, 3]`` of a binder's given chains in Å, NaN where unknown; None without given chains
    bound_ca: np.ndarray | None = None
    #: Numbers of the designed chains; None for those with a designed residue
    own_chains: Sequence[int] | None = None
    copies: int = 1  #: Groups of designed chains, in their order, with the same sequences

    @cached_property
    def in_designed(self) -> np.ndarray:
        """Residues of designed chains, kept ones included, ``[N]`` bool."""
        own = self.chain[self.source >= 0] if self.own_chains is None else self.own_chains
        return np.isin(self.chain, own)

    @cached_property
    def template_features(self) -> tuple[Mapping[str, np.ndarray] | None, ...] | None:
        """Raw template features of each chain; None without templates."""
        if self.templates is None:
            return None
        own = set(self.chain[self.in_designed].tolist())
        flexible = [self.own_flexible if i in own else self.flexible for i in range(len(self.templates))]
        return template_features(self.templates, self.target.source, flexible)

    @cached_property
    def joined_template_features(self) -> tuple[Mapping[str, np.ndarray], ...] | None:
        """Raw template features of each chain for monomer networks, a template for each frame of atoms."""
        if self.template_features is None:
            return None
        name = self.target.source.encode()
        whole = [
            empty_template(len(chain.sequence), name) if one is None else one
            for one, chain in zip(self.template_features, self.target.chains, strict=True)
        ]
        first = np.unique(self.chain, return_index=True)[1]
        frame = np.zeros(len(self.chain), int) if self.reference is None else self.reference.frame.numpy()
        return with_frames(whole, [int(frame[i]) for i in first], name)

    @property
    def without_templates(self) -> DesignTask:
        """The same task for networks that do not see the structure of given chains."""
        others, avoided = ([one.without_templates for one in group] for group in (self.others, self.avoided))
        return replace(self, flexible="free", own_flexible="free", others=others, avoided=avoided)

    def with_contacts(self, settings: Mapping[str, Mapping[str, Any]]) -> DesignTask:
        """Return the task with settings of contacts (``con``, ``i_con``) for all its complexes."""
        others, avoided = (
            [one.with_contacts(settings) for one in group] for group in (self.others, self.avoided)
        )
        return replace(self, contact_settings=settings, others=others, avoided=avoided)

    @property
    def template_indices(self) -> tuple[int, ...]:
        """Indices of the templates that a monomer network reads, one for each frame of atoms."""
        chains = self.joined_template_features
        return () if chains is None else tuple(range(len(chains[0]["template_frame"])))

    @property
    def complexes(self) -> list[DesignTask]:
        """The task itself, those of further targets, and those of off-targets."""
        return [self, *self.others, *self.avoided]

    @property
    def alone(self) -> DesignTask | None:
        """Task of a binder without its given chains; None for other protocols."""
        if self.bound_ca is None:
            return None
        numbers = np.unique(self.chain[self.in_designed])
        target = make_target("alone", [self.target.chains[number] for number in numbers])
        source, own = self.source[self.in_designed], range(len(numbers))
        return DesignTask("alone", target, source, {}, cyclic=self.cyclic, own_chains=own)

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
        """Residues of all chains, and hotspots and kept ones if there are some, by names of outputs (``D310-338``)."""
        kept = np.flatnonzero(self.in_designed & (self.source < 0))
        places = {
            "chains": range(len(self.source)),
            "hotspots": self.hotspots.tolist(),
            "kept": kept.tolist(),
        }
        return {name: residue_text(self.target, one) for name, one in places.items() if len(one)}

    @cached_property
    def designed_chain(self) -> np.ndarray:
        """Residues of the designed chain, kept ones included, ``[L]``; of several, equal ones once."""
        known: set[int] = set()
        places = []
        for number in np.unique(self.chain[self.in_designed]):
            own = np.flatnonzero(self.chain == number)
            rows = set(self.source[own].tolist()) - {-1}
            if not rows or rows - known:
                places.append(own)
            known |= rows
        return np.concatenate(places)

    @property
    def rings(self) -> bool | str:
        """Chains that are rings: all, none, or their names (``cyclic`` of ``InferConfig``)."""
        designed = np.unique(self.chain[self.in_designed])
        if not self.cyclic or len(designed) == len(self.target.chains):
            return self.cyclic
        return ",".join(self.target.chains[number].id for number in designed)

    @cached_property
    def offset(self) -> Tensor:
        """Separation of residues in the sequence, ``[N, N]``; large between chains, the shorter way in rings."""
        apart = self.residue_index[:, None] - self.residue_index[None]
        if self.cyclic:
            length = np.bincount(self.chain)[self.chain][:, None]
            apart = np.where(self.in_designed[:, None], (apart + length // 2) % length - length // 2, apart)
        same = self.chain[:, None] == self.chain[None]
        return torch.from_numpy(np.where(same, apart, 10**6))

    @property
    def copy_blocks(self) -> Tensor | None:
        """Residues of each copy, ``[copies, N]`` bool; None without copies, and for binders."""
        if self.copies == 1 or not self.in_designed.all():
            return None
        length = len(self.source) // self.copies
        return torch.arange(len(self.source)) // length == torch.arange(self.copies)[:, None]

    @property
    def contacts(self) -> ContactOptions:
        """Contacts within chains; all pairs of a ring whose residues are too near each other in the sequence."""
        length = len(self.designed_chain)
        small = ContactOptions(num=length, cutoff=21.6875, binary=True)
        options = small if self.cyclic and is_small_ring(length) else CONTACTS
        return replace(options, **self.contact_settings.get("con", {}))

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


def is_small_ring(length: int) -> bool:
    """Return True if no two residues of a ring are as far apart in the sequence as contacts must be."""
    return length // 2 < CONTACTS.seqsep


def make_target(name: str, chains: Sequence[Chain], source: str = "") -> Target:
    """Return a target without alignments; its chains are parts of no whole ones, which would be searched."""
    own = tuple(replace(chain, whole="", regions=()) for chain in chains)
    return Target(name, own, source, name, ())
