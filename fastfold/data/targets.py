"""Targets to fold: one chain, or the chains of one complex, with a safe file name."""

from __future__ import annotations

import hashlib
import itertools
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from fastfold.errors import InputError
from fastfold.protein.labels import AuthorNames, fill_numbers, residue_ranges
from fastfold.protein.protein import chain_name
from fastfold.protein.residue_constants import UNKNOWN_LETTERS, mask_unknown
from fastfold.utils.lazy import old_attributes
from fastfold.utils.option_fields import check_kind
from fastfold.utils.text_files import PathLike, split_lines
from fastfold.utils.transliteration import to_ascii

if TYPE_CHECKING:
    from fastfold.data.msa.msa import ChainMsas
    from fastfold.data.templates.features import ForcedTemplate
    from fastfold.data.templates.whole.given import Features, GivenStructure
    from fastfold.protein.io.observed import ObservedChain, ObservedStructure

MAX_NAME_LENGTH = 100
MAX_SHOWN_LENGTH = 200  #: Largest number of letters of a record's name in tables and on pages

_NO_BLANKS = str.maketrans("", "", " \t")
_NO_RESIDUE = re.compile(r"[^A-Za-z:*]")
_CHAIN_NAME = re.compile(r"[A-Za-z0-9_+][A-Za-z0-9._+-]{0,19}")
_RESERVED = frozenset(  # device names of Windows, with any extension
    ("con", "prn", "aux", "nul", *(f"{port}{n}" for port in ("com", "lpt") for n in range(1, 10)))
)


@dataclass(frozen=True)
class Chain:
    """Protein chain."""

    #: Name in outputs: that of a given structure or of an input with names of chains, otherwise ``A``, ``B``, … in the
    #: order of the input
    id: str
    sequence: str  #: One letter per residue, upper case, the 20 amino acids and X
    #: Identifier of the chain's own FASTA record, if it has one; used to find its alignments
    record: str = field(default="", compare=False)
    #: The given sequence in upper case, if it contains B, J, O, U or Z; otherwise empty. Without an alignment, the
    #: network sees these letters as in an alignment: B as D, Z as E, U as C.
    letters: str = field(default="", compare=False)
    #: The given sequence of the whole protein, if the chain has only parts of it; otherwise empty
    whole: str = field(default="", compare=False)
    #: First and last residue of each part in the whole protein, from 1; empty for a whole protein
    regions: tuple[tuple[int, int], ...] = ()
    #: Residue index of a given structure, strictly increasing; empty for that of :attr:`numbers`
    indices: tuple[int, ...] = ()
    #: Number and insertion code of each residue in a given structure, ``52A``; empty for :attr:`numbers`
    labels: tuple[str, ...] = ()
    #: Sequence of the first copy of the chain in a given structure, if it lacks other residues; otherwise empty
    copy_of: str = field(default="", compare=False)
    #: Name of the chain in its ``record``, if that has several chains; otherwise empty
    record_chain: str = field(default="", compare=False)

    @property
    def entity(self) -> str:
        """Sequence that all copies of the chain share, by which networks see them as one entity."""
        return self.copy_of or self.sequence

    @property
    def numbers(self) -> list[int]:
        """Number of each residue in the whole protein, from 1."""
        if not self.regions:
            return list(range(1, len(self.sequence) + 1))
        return [number for first, last in self.regions for number in range(first, last + 1)]

    @property
    def residue_index(self) -> np.ndarray:
        """Residue index ``[N]`` int32 that networks see; a step over 1 is a gap in the chain."""
        return np.array(self.indices or self.numbers, np.int32) - (not self.indices)

    @property
    def residue_labels(self) -> tuple[str, ...]:
        """Number of each residue in outputs, with its insertion code."""
        return self.labels or tuple(map(str, self.numbers))

    @property
    def has_gap(self) -> bool:
        """True if residues are missing between two residues of the chain."""
        return bool((np.diff(self.residue_index) > 1).any())

    @property
    def uncut(self) -> Chain:
        """The chain with all residues of its protein."""
        if not self.regions:
            return self
        sequence = mask_unknown(self.whole)
        letters = "" if sequence == self.whole else self.whole
        return replace(
            self, sequence=sequence, letters=letters, whole="", regions=(), indices=(), labels=(), copy_of=""
        )


@old_attributes({"given": "scored_structure"})
@dataclass(frozen=True)
class Target:
    """Target of a fold: a chain or a complex."""

    #: Stem of output files: letters, digits and ``._+-``, at most 100 of them, never hidden and never a path; unique
    #: among the targets of one run, regardless of case
    name: str
    chains: tuple[Chain, ...]  #: The chains
    source: str  #: File of the target; empty if there is none
    #: Identifier in the input: the first word of the FASTA header, or the file's stem for a complex of several records
    record: str
    warnings: tuple[str, ...]  #: Changes of the input, one sentence each
    #: Per chain, the alignments in the input (unpaired, and paired with other chains'), as expected by
    #: :func:`fastfold.data.features.pipeline.featurize`, or None for a chain without any; None if the input has none
    alignments: Sequence[ChainMsas | None] | None = field(default=None, compare=False, repr=False)
    #: Names of the files of ``alignments`` by chain; None for the target's own file
    alignment_files: Mapping[str, Sequence[str]] | None = field(default=None, compare=False, repr=False)
    scored_structure: GivenStructure | None = None  #: Structure of the target to be scored; None to fold
    #: Per chain, raw template features that replace a search; None for a search
    templates: tuple[Features | None, ...] | None = field(default=None, compare=False, repr=False)
    #: Per chain, templates that the prediction keeps to; empty for none
    forced_templates: tuple[tuple[ForcedTemplate, ...], ...] = field(default=(), compare=False, repr=False)
    #: Random seeds that the input names; empty for none
    seeds: tuple[int, ...] = field(default=(), compare=False)
    #: Sorted partners of a complex from a list of proteins that gives it no name; empty for other targets
    partners: tuple[object, ...] = field(default=(), compare=False, repr=False)

    def has_alignment(self, index: int) -> bool:
        """Return True if the input decides on the alignment of a chain, by number from 0, which may be empty."""
        return self.alignments is not None and self.alignments[index] is not None

    @property
    def has_all_alignments(self) -> bool:
        """True if the input decides on the alignment of every chain."""
        return all(map(self.has_alignment, range(len(self.chains))))

    @property
    def shown_name(self) -> str:
        """Name in tables, scores and on pages: that of the record, in its own letters.

        The name of the files is shown if the user chose it, or if the record's is too long.
        """
        shown = "".join(letter for letter in self.record if letter.isprintable())
        is_shown = 0 < len(shown) <= MAX_SHOWN_LENGTH and _is_stem_of(self.name, self.record)
        return shown if is_shown else self.name

    @property
    def is_complex(self) -> bool:
        """True if the target has more than one chain."""
        return len(self.chains) > 1

    @property
    def brings_templates(self) -> bool:
        """True if the target has templates of its own."""
        return self.templates is not None or (
            self.scored_structure is not None and self.scored_structure.needs_templates
        )

    @property
    def has_forced_templates(self) -> bool:
        """True if the prediction of a chain keeps to a template."""
        return any(self.forced_templates)

    @property
    def is_cut(self) -> bool:
        """True if a chain has parts of its protein only."""
        return any(chain.regions for chain in self.chains)

    @property
    def uncut(self) -> Target:
        """The target with all residues of its proteins, for which alignments are searched."""
        return replace(self, chains=tuple(chain.uncut for chain in self.chains)) if self.is_cut else self

    @property
    def num_residues(self) -> int:
        """Number of residues of all chains together."""
        return sum(len(chain.sequence) for chain in self.chains)

    @property
    def names(self) -> AuthorNames:
        """Names of chains and residues in outputs."""
        return AuthorNames(
            chain_ids=tuple(chain.id for chain in self.chains),
            numbers=tuple(label for chain in self.chains for label in chain.residue_labels),
        )


class FoundTarget(NamedTuple):
    """Target of a file, whose name is not unique yet."""

    target: Target
    path: PathLike  #: Path of its file
    line: int | None  #: Line of its record, from 1; None if unknown

    @property
    def place(self) -> str:
        """File and line of the record."""
        return self.target.source if self.line is None else f"{self.target.source}:{self.line}"

    def is_read_from(self, other: FoundTarget) -> bool:
        """Return True if both are the same record of a file."""
        is_same_line = self.line is not None and self.line == other.line
        return is_same_line and os.path.realpath(self.path) == os.path.realpath(other.path)


def unique_targets(records: Sequence[FoundTarget], errors: list[InputError]) -> list[Target]:
    """Return the targets with unique names, in the order of the input.

    ``errors`` receives an error for each repeated identifier, whose target is left out.
    """
    targets: list[Target] = []
    earlier: dict[str, FoundTarget] = {}
    for one in records:
        target, path, line = one
        first = earlier.setdefault(target.record, one)
        if first is not one:
            if one.is_read_from(first):
                message = "the same record is given twice; leave one out"
            else:
                message = f"the identifier was used before, at {first.place}; rename one of the two"
            errors.append(InputError(message, path=path, line=line, record=target.record))
            continue
        targets.append(target)
    names = unique_stems([target.record for target in targets])
    return [replace(target, name=name) for target, name in zip(targets, names, strict=True)]


def number_targets(targets: Sequence[Target], prefix: str) -> list[Target]:
    """Return targets under the names ``<prefix>_0``, ``<prefix>_1`` and so on, as ColabFold numbers them.

    Numbers have as many digits as the number of targets. Alignments are found by the records' names.
    """
    digits = len(str(len(targets)))
    stem = safe_stem(prefix)[: MAX_NAME_LENGTH - digits - 1]
    return [replace(target, name=f"{stem}_{k:0{digits}}") for k, target in enumerate(targets)]


def target_from_sequence(sequence: str, name: str = "query") -> Target:
    """Build the target of a sequence given as text.

    Args:
        sequence: One letter per residue, either case; blanks and line ends are ignored. ``:`` joins the chains of a
            complex.
        name: Name of the target; converted to a safe form for file names.

    Raises:
        ConfigError: The sequence is not text.
        InputError: The sequence is empty or contains invalid characters.
    """
    check_kind("sequence", sequence, str, "text")
    sequences, warnings = parse_sequence(split_lines(sequence), record=name)
    return Target(safe_stem(name), make_chains(sequences), "", name, tuple(warnings))


def make_chains(
    sequences: Sequence[str],
    records: Sequence[tuple[str, str]] | None = None,
    names: Sequence[str] | None = None,
) -> tuple[Chain, ...]:
    """Build chains, named A-Z, a-z, 0-9, then AA, AB and so on by default.

    ``records`` are their records and names in these.
    """
    records = records or [("", "")] * len(sequences)
    names = names or [chain_name(number) for number in range(len(sequences))]
    chains = []
    for name, letters, (record, record_chain) in zip(names, sequences, records, strict=True):
        sequence = mask_unknown(letters)
        unmasked = "" if letters == sequence else letters
        chains.append(Chain(name, sequence, record, unmasked, record_chain=record_chain))
    return tuple(chains)


def structure_chains(structure: ObservedStructure, record: str = "") -> tuple[Chain, ...]:
    """Build the chains of a target from a structure, with its residue index, names and numbers.

    Residues that the structure lacks are parts left out of the whole chain. Chains with one type in all common residues
    are copies. A chain whose name is empty, or cannot be part of a file name, gets the first free letter.

    Args:
        structure: As of :func:`fastfold.protein.io.observed.read_observed`.
        record: Name of the structure; chains of a complex are records such as ``<record>_A``. Empty for no records.
    """
    names = name_chains([chain.chain_id for chain in structure.chains])
    is_complex = len(names) > 1
    return tuple(
        Chain(
            name,
            chain.sequence,
            record=f"{record}_{chain.chain_id}" if record and is_complex else "",
            whole=chain.whole,
            regions=tuple((first + 1, last + 1) for first, last in residue_ranges(chain.places))
            if chain.whole
            else (),
            indices=tuple(chain.residue_index.tolist()),
            labels=_labels(chain),
            copy_of=copy if copy != chain.sequence else "",
        )
        for name, chain, copy in zip(names, structure.chains, _first_copies(structure.chains), strict=True)
    )


def _first_copies(chains: Sequence[ObservedChain]) -> list[str]:
    """Return the sequence of the first copy of each chain."""
    sequences = [chain.sequence for chain in chains]
    if len(set(sequences)) == 1:
        return sequences
    from fastfold.protein.metrics.chain_mapping import sets_of_copies  # imports torch

    sets = sets_of_copies(sequences, [chain.residue_index for chain in chains], identity=1.0)
    first = {number: sequences[own[0]] for own in sets for number in own}
    return [first[number] for number in range(len(chains))]


def _labels(chain: ObservedChain) -> tuple[str, ...]:
    """Return the numbers of all residues; none if unused ones are too few for those that the file lacks."""
    numbers = tuple(fill_numbers(chain.author_numbers))
    return numbers if all(numbers) else ()


def name_chains(names: Sequence[str]) -> list[str]:
    """Return the names of chains, with the first free letter in place of each empty, long or unsafe name."""
    free = filter(lambda name: name not in names, map(chain_name, itertools.count()))
    return [name if _CHAIN_NAME.fullmatch(name) else next(free) for name in names]


def parse_sequence(
    lines: Sequence[str],
    *,
    path: PathLike | None = None,
    record: str | None = None,
    first_line: int | None = None,
) -> tuple[list[str], list[str]]:
    """Parse the upper-case chains in the sequence lines of one record, with a list of warnings.

    Lower case, blanks and one ``*`` at the end of a chain (the stop codon of translation tools) are accepted. Letters
    such as B stay. The time is linear in the length of the record.

    Raises:
        InputError: The record or a chain is empty, or a character is not a residue; with its line.
    """
    text = "".join(lines).translate(_NO_BLANKS)

    def fail(message: str, offset: int) -> InputError:
        line = None if first_line is None else first_line + _line_index(lines, offset)
        return InputError(message, path=path, line=line, record=record)

    if not text:
        raise InputError(
            "lacks a sequence; add its residues below the header or remove the record",
            path=path,
            line=None if first_line is None else max(first_line - 1, 1),
            record=record,
        )
    if match := _NO_RESIDUE.search(text):
        raise fail(_explain(match.group(), match.start()), match.start())
    sequences, warnings, start = [], [], 0
    pieces = text.split(":")
    for number, piece in enumerate(pieces, 1):
        chain = f"chain {chain_name(number - 1)}: " if len(pieces) > 1 else ""
        body = piece.removesuffix("*")
        if "*" in body:
            offset = start + body.index("*")
            raise fail(_explain("*", offset), offset)
        if not body:
            message = f"chain {number} of {len(pieces)} is empty; ':' separates two chains"
            raise fail(message, min(start, len(text) - 1))
        if len(body) < len(piece):
            warnings.append(f"{chain}the '*' (stop) at the end is left out")
        warnings += (chain + warning for warning in _doubts(body.upper()))
        sequences.append(body.upper())
        start += len(piece) + 1
    return sequences, warnings


def safe_stem(identifier: str) -> str:
    """Convert an identifier to a similar file stem that cannot be a path.

    Letters outside ASCII are spelled (:func:`~fastfold.utils.transliteration.to_ascii`). Characters other than letters,
    digits and ``._+-`` become ``_``; leading dots and dashes are removed. A longer name than 100 characters is cut and
    marked with a hash of the whole. If nothing remains, the name is the hash.
    """
    stem = re.sub(r"[^A-Za-z0-9._+-]+", "_", to_ascii(identifier))
    stem = re.sub(r"\.{2,}", ".", stem).lstrip("._-").rstrip("._-")
    if not any(character.isalnum() for character in stem):
        return f"record_{_digest(identifier)[:8]}"
    if stem.partition(".")[0].lower() in _RESERVED:
        stem = f"record_{stem}"
    return stem if len(stem) <= MAX_NAME_LENGTH else marked_stem(stem, _digest(identifier))


def unique_stems(identifiers: Sequence[str]) -> list[str]:
    """Return one safe stem per identifier, unique regardless of case.

    Safe identifiers keep their names. Another identifier with the same stem is marked with its hash, so that its name
    does not depend on its place in the list.
    """
    stems = [safe_stem(identifier) for identifier in identifiers]
    used: set[str] = set()
    for i in sorted(range(len(stems)), key=lambda i: stems[i] != identifiers[i]):
        stem = stems[i]
        for digits in itertools.count(8, 4):
            if stems[i].casefold() not in used:
                break
            stems[i] = marked_stem(stem, _digest(identifiers[i]), digits)
        used.add(stems[i].casefold())
    return stems


def marked_stem(stem: str, mark: str, digits: int = 8) -> str:
    """Append the first ``digits`` characters of a hash to a stem, within the limit of length."""
    return f"{stem[: MAX_NAME_LENGTH - 1 - digits]}_{mark[:digits]}"


def _is_stem_of(name: str, identifier: str) -> bool:
    """Return True if a file stem is that of an identifier, marked or not."""
    stem, mark = safe_stem(identifier), name.rpartition("_")[2]
    return name in (stem, marked_stem(stem, _digest(identifier), len(mark)))


def _digest(identifier: str) -> str:
    return hashlib.sha256(identifier.encode("utf-8", "surrogatepass")).hexdigest()


def _line_index(lines: Sequence[str], offset: int) -> int:
    """Return the index of the line with character ``offset`` of the joined lines without blanks."""
    ends = itertools.accumulate(len(line.translate(_NO_BLANKS)) for line in lines)
    return next(i for i, end in enumerate(ends) if offset < end)


def _explain(character: str, offset: int) -> str:
    """Explain a character that is not a residue, with a remedy."""
    place = f"at position {offset + 1} of the sequence"
    if character in "-.~":
        return (
            f"gap {character!r} {place}; remove the gaps: FASTA holds the plain sequence, an alignment "
            "belongs into the folder of alignments"
        )
    if character == "*":
        return f"'*' (stop) {place}, before the end; cut the sequence there or remove it"
    if character == "|":
        return f"'|' {place}: the notation of another molecule than a protein; only proteins can be folded, remove it"
    if character.isdigit():
        return f"digit {character!r} {place}; remove the position numbers"
    if not character.isascii():
        code = ord(character)
        shown = f"byte 0x{code - 0xDC00:02X}" if 0xDC80 <= code <= 0xDCFF else repr(character)
        return f"{shown} {place} is not ASCII; write the sequence in plain letters A-Z"
    return f"{character!r} {place} is not a residue; write one letter A-Z per residue, ':' between chains"


def _doubts(sequence: str) -> Iterator[str]:
    """Yield warnings about a valid upper-case sequence."""
    unknown = [i for i, letter in enumerate(sequence) if letter in UNKNOWN_LETTERS]
    if unknown:
        shown = ", ".join(f"{sequence[i]} at {i + 1}" for i in unknown[:5])
        more = f" and {len(unknown) - 5} more" if len(unknown) > 5 else ""
        yield f"{shown}{more} read as X (unknown residue)"
    if len(sequence) >= 15 and set(sequence) <= set("ACGTUN"):
        yield "the sequence looks like DNA or RNA; each letter is read as an amino acid"
