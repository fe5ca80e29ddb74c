"""One complex to train on: all protein chains of a structure file, each with its alignments."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import NamedTuple

from fastfold.data.msa.find import ChainAlignments, find_alignments, find_hits
from fastfold.data.msa.msa import Msa
from fastfold.data.targets import Chain
from fastfold.data.training.entry import Entry, mask_low_plddt, read_chain_msa
from fastfold.protein.io.read import read_structure
from fastfold.protein.structure import ChainStructure, Structure


class ComplexMsas(NamedTuple):
    """Alignments of one chain of a complex; their first rows are the chain.

    Attributes:
        unpaired: Used as they are.
        paired: Whose rows are paired with those of the other chains by species (UniProt).
    """

    unpaired: tuple[Msa, ...] = ()
    paired: tuple[Msa, ...] = ()


@dataclass(frozen=True)
class ComplexEntry(Entry):
    """All protein chains of a structure file; an :class:`Entry` whose sequence is that of its members in a row.

    Attributes:
        members: The chains that the training set lists; the file may have more, which belong to the complex too.
    """

    members: tuple[Entry, ...] = ()

    def template_hits(self, chains: Sequence[ChainStructure]) -> dict[str, Path]:
        """As :meth:`fastfold.data.training.entry.Entry.template_hits`; of chains with one sequence the first that has
        hits shares them."""
        found: dict[str, Path] = {}
        for chain, asked in zip(chains, _asked(self, chains), strict=True):
            if self.alignment_dir is not None and chain.sequence not in found:
                files = find_hits(self.alignment_dir, _stem(self.structure), chain=asked)
                found |= dict(zip([chain.sequence], files, strict=False))
        return found

    @property
    def has_template_hits(self) -> bool:
        """Whether such a file is there for a member."""
        asked = [Chain(member.chain_id or "", member.sequence, record=member.id) for member in self.members]
        stem = _stem(self.structure)
        return self.alignment_dir is not None and any(
            find_hits(self.alignment_dir, stem, chain=chain) for chain in asked
        )


@dataclass(frozen=True, eq=False)
class ComplexData:
    """What the files of a complex hold.

    Attributes:
        chains: Chains in the order of the file.
        alignments: Alignments of each chain; chains of one sequence share theirs.
        resolution: The structure's, in Å, or None: what the entry says, else what the file says.
        release_date: The structure's, ``YYYY-MM-DD`` or an empty string, in the same way.
    """

    chains: tuple[ChainStructure, ...]
    alignments: tuple[ComplexMsas, ...]
    resolution: float | None
    release_date: str = ""


def group_complexes(entries: Sequence[Entry]) -> tuple[ComplexEntry, ...]:
    """The complexes that chains belong to: chains of one structure file make one.

    A complex is called as its file, or as its only chain. Its weight is the sum over its different sequences of
    ``min(1, copies / cluster_size)`` times the chain's own factor: together, the complexes of a cluster of chains
    come as often as one chain of which there is no other, and a ring of twelve equal chains not twelve times as often
    as one of them.

    Args:
        entries: Chains of one training set.

    Returns:
        The complexes, sorted by name.
    """
    files: dict[Path, list[Entry]] = {}
    for entry in entries:
        files.setdefault(entry.structure, []).append(entry)
    return tuple(sorted((_complex(members) for members in files.values()), key=lambda entry: entry.id))


def _complex(members: list[Entry]) -> ComplexEntry:
    first = members[0]
    copies = Counter(member.sequence for member in members)
    weights = {m.sequence: m.weight * min(1.0, copies[m.sequence] / m.cluster_size) for m in members}
    total = sum(len(member) for member in members)
    shares = [member.resolved for member in members]
    known = [share * len(m) for share, m in zip(shares, members, strict=True) if share is not None]
    values = {field.name: getattr(first, field.name) for field in fields(Entry)}
    values |= {
        "id": first.id if len(members) == 1 else _stem(first.structure),
        "sequence": "".join(member.sequence for member in members),
        "chain_id": None,
        "cluster": "",
        "cluster_size": 1,
        "resolved": sum(known) / total if len(known) == len(members) else None,
        "weight": sum(weights.values()),
    }
    return ComplexEntry(**values, members=tuple(members))


def read_complex(
    entry: ComplexEntry,
    *,
    structure_reader: Callable[[Path], Structure] = read_structure,
    msa_reader: Callable[[Path, str], Msa] = read_chain_msa,
) -> ComplexData:
    """Reads the structure of a complex and the alignments of its chains.

    Those of chain ``A`` of ``1abc.cif`` are looked up as ``1abc_A`` and in the other places of
    :mod:`fastfold.data.msa.find`, and under the name that the training set has for the chain. Of chains with one
    sequence the first that has any shares them with the others.

    Args:
        entry: The complex.
        structure_reader: Reads a structure file.
        msa_reader: Reads an alignment of a sequence.

    Raises:
        InputError: A file cannot be used, or an alignment is of another chain.
    """
    structure = structure_reader(entry.structure)
    files: dict[str, ChainAlignments] = {}
    for chain, asked in zip(structure.chains, _asked(entry, structure.chains), strict=True):
        if entry.alignment_dir is not None and not files.get(chain.sequence):
            files[chain.sequence] = find_alignments(entry.alignment_dir, _stem(entry.structure), chain=asked)
    msas = {
        sequence: ComplexMsas(
            tuple(msa_reader(path, sequence) for path in found.unpaired),
            tuple(msa_reader(path, sequence) for path in found.paired),
        )
        for sequence, found in files.items()
    }
    return ComplexData(
        chains=structure.chains,
        alignments=tuple(msas.get(chain.sequence, ComplexMsas()) for chain in structure.chains),
        resolution=structure.resolution if entry.resolution is None else entry.resolution,
        release_date=entry.release_date or structure.release_date,
    )


def _asked(entry: ComplexEntry, chains: Sequence[ChainStructure]) -> list[Chain]:
    """The chains by the names under which their alignments are looked up."""
    names = {member.chain_id: member.id for member in entry.members}
    if len(chains) == 1:
        names.setdefault(chains[0].chain_id, entry.members[0].id)
    return [Chain(chain.chain_id, chain.sequence, record=names.get(chain.chain_id, "")) for chain in chains]


def mask_complex_plddt(data: ComplexData, minimum: float) -> ComplexData:
    """A predicted complex without the residues under a pLDDT; see
    :func:`fastfold.data.training.entry.mask_low_plddt`."""
    return replace(data, chains=tuple(mask_low_plddt(chain, minimum) for chain in data.chains))


def _stem(structure: Path) -> str:
    return os.path.splitext(structure.name.removesuffix(".gz"))[0]
