"""Partners of a complex in AlphaPulldown's notation: ``P``, ``P:2``, ``P:1-100`` and ``P:2:1-100:150-200``."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from fastfold.data.targets import Chain, Target, mask_unknown
from fastfold.errors import InputError
from fastfold.utils.text_files import PathLike

MAX_COPIES = 100

_RANGE = re.compile(r"([0-9]{1,6})-([0-9]{1,6})", re.ASCII)
_COPIES = re.compile(r"[0-9]{1,6}", re.ASCII)


@dataclass(frozen=True)
class Partner:
    """A protein of a complex, or parts of it, in a number of copies."""

    protein: Target  #: The whole protein
    copies: int = 1  #: Number of copies
    #: First and last residue of each part, from 1; empty for all residues
    regions: tuple[tuple[int, int], ...] = ()

    @property
    def name(self) -> str:
        """Name in names of complexes: ``P``, ``P_x2``, ``P_1-100_150-200`` or ``P_1-100_x2``."""
        ranges = "".join(f"_{first}-{last}" for first, last in self.regions)
        return f"{self.protein.record}{ranges}" + (f"_x{self.copies}" if self.copies > 1 else "")

    @property
    def key(self) -> list[tuple[str, tuple[tuple[int, int], ...]]]:
        """Record and regions of each copy, for comparing complexes."""
        return [(self.protein.record, self.regions)] * self.copies

    @property
    def chains(self) -> list[Chain]:
        """Chains of all copies, with identifiers that are still to be given."""
        record = "" if self.protein.is_complex else self.protein.record
        chains = [_cut_chain(replace(chain, record=record), self.regions) for chain in self.protein.chains]
        return chains * self.copies


def parse_partner(
    text: str, proteins: Mapping[str, Target], *, path: PathLike, line: int, record: str | None = None
) -> Partner:
    """Parse a partner.

    Args:
        text: A protein's name, then ``:`` and a number of copies, then ``:`` and a range for each part. A name that
            has colons itself is taken as it is.
        proteins: The proteins by name.
        path: File of the text, for errors.
        line: Its line.
        record: Name of the complex, for errors.

    Raises:
        InputError: The protein is unknown, or a number or range does not fit it.
    """

    def fail(problem: str) -> InputError:
        return InputError(problem, path=path, line=line, record=record)

    if text in proteins:
        return Partner(proteins[text])
    name, *parts = text.split(":")
    while name not in proteins and parts and not _RANGE.fullmatch(parts[0]):
        name = f"{name}:{parts.pop(0)}"
    if name not in proteins:
        raise fail(
            f"the list of proteins lacks {text.partition(':')[0][:60]!r}; add it there, or correct the name"
        )
    protein, copies = proteins[name], 1
    if parts and _COPIES.fullmatch(parts[0]):
        copies = int(parts.pop(0))
        if not 1 <= copies <= MAX_COPIES:
            raise fail(f"{text[:60]!r}: expected 1 to {MAX_COPIES} copies, found {copies}")
    matches = [_RANGE.fullmatch(part) for part in parts]
    regions = [(int(match[1]), int(match[2])) for match in matches if match is not None]
    if len(regions) < len(parts):
        wrong = next(part for part, match in zip(parts, matches, strict=True) if match is None)
        raise fail(
            f"{text[:60]!r}: expected a range such as 1-100 after the number of copies, found {wrong[:20]!r}"
        )
    if regions and protein.is_complex:
        raise fail(f"{text[:60]!r}: {name} has several chains; give ranges of proteins with one chain")
    before = 0
    for first, last in regions:
        if not before < first <= last <= protein.num_residues:
            raise fail(
                f"{text[:60]!r}: expected ranges from 1 to {protein.num_residues}, the length of {name}, in order and "
                f"without overlap, found {first}-{last}"
            )
        before = last
    whole = regions == [(1, protein.num_residues)]
    return Partner(protein, copies, () if whole else tuple(regions))


def _cut_chain(chain: Chain, regions: Sequence[tuple[int, int]]) -> Chain:
    """Return parts of a whole chain, by first and last residue from 1, as one chain."""
    if not regions:
        return chain
    whole = chain.letters or chain.sequence
    letters = "".join(whole[first - 1 : last] for first, last in regions)
    sequence = mask_unknown(letters)
    return replace(
        chain,
        sequence=sequence,
        letters="" if letters == sequence else letters,
        whole=whole,
        regions=tuple(regions),
    )
