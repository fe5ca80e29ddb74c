"""Complexes of other programs' inputs: the parts that all formats share, with errors that name the field."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from fastfold.data.msa.keyed import pair_by_keys
from fastfold.data.queries.records import Record
from fastfold.data.targets import name_chains, parse_sequence
from fastfold.errors import InputError
from fastfold.protein.residue_constants import mask_unknown
from fastfold.utils.text_files import PathLike, split_lines

if TYPE_CHECKING:
    from fastfold.data.msa.msa import ChainMsas
    from fastfold.data.templates.features import ForcedTemplate
    from fastfold.data.templates.whole.listed import Features

UNUSED_HITS = (
    "put them among the alignments (`msa_dir`) as pdb_hits.sto or pdb_hits.hhr, or give an .m8 with "
    "`TemplateOptions.hits`; the structures come from `TemplateOptions.mmcif_dir`"
)
"""Remedy for template hits that an input names."""

_MAX_COPIES = 1000
_SEED_LIMIT = 2**31  #: Seeds of a fold are smaller than this, those of other programs smaller than its double


class Entity(NamedTuple):
    """Protein of a complex, in one or more copies."""

    sequence: str  #: Letters in upper case
    names: list[str]  #: Name of each copy, empty for copies without names
    alignments: ChainMsas | None = None  #: Alignments that the input names; None if it leaves them open
    templates: Features | None = None  #: Raw template features that the input names; None for none
    forced: tuple[ForcedTemplate, ...] = ()  #: Those of its templates that the prediction keeps to


@dataclass(frozen=True)
class QueryJob:
    """Place of a complex in an input of another program."""

    path: PathLike  #: File of the input
    name: str  #: Name of the complex
    uses_working_folder: bool = (
        False  #: True if paths may also start at the working folder, as in most programs
    )

    def fail(self, message: str) -> InputError:
        """Return an error of this complex."""
        return InputError(message, path=self.path, record=self.name)

    @contextlib.contextmanager
    def reading(self, field: str) -> Iterator[None]:
        """Let errors of a file or text that a field names begin with the input and the field."""
        try:
            yield
        except InputError as error:
            message = f"{field}: {error}"
            raise InputError(message, path=self.path, record=self.name, temporary=error.temporary) from None

    def find(self, place: object, field: str) -> Path:
        """Return the file or folder that a field names, from the folder of the input.

        Raises:
            InputError: The field is not a path, or nothing is there.
        """
        if not isinstance(place, str) or not place or "\0" in place:
            raise self.fail(f"{field}: expected a path, found {str(place)[:60]!r}")
        folder = Path(self.path).parent
        places = [folder / place, *([Path(place)] if self.uses_working_folder else [])]
        for path in places:
            if os.path.exists(path):
                return path
        inside = "" if Path(place).is_absolute() else f" in {os.path.abspath(folder)}"
        raise self.fail(
            f"{field}: no such file: {place[:200]!r}{inside}; paths start at the folder of the input"
        )

    def refuse(self, content: Mapping[str, Any], keys: Sequence[str]) -> None:
        """Refuse filled fields that change the meaning of the input.

        Raises:
            InputError: There is such a field; names the first.
        """
        for key in keys:
            if content.get(key):
                raise self.fail(
                    f"has {key!r}, which FastFold does not support in such files; remove it to fold only the chains"
                )

    def ignored(self, content: Mapping[str, Any], known: Collection[str], owner: str) -> list[str]:
        """Return a warning about filled fields that are not known; empty without any."""
        names = [
            str(key)[:40]
            for key, value in content.items()
            if key not in known and value not in (None, "", [])
        ]
        return [f"{owner}: {', '.join(map(repr, names))} is not used"] if names else []


def chain_letters(job: QueryJob, content: Mapping[str, Any], number: int) -> tuple[str, list[str]]:
    """Return the sequence of a protein and warnings about it, or raise InputError."""
    if not isinstance(content.get("sequence"), str):
        raise job.fail(f"entry {number} lacks a text 'sequence'")
    (sequence, *more), doubts = parse_sequence(
        split_lines(content["sequence"]), path=job.path, record=job.name
    )
    if more:
        raise job.fail(f"entry {number} has ':' in its sequence; list each chain")
    return sequence, doubts


def copy_names(
    job: QueryJob, content: Mapping[str, Any], number: int, *, field: str, count_field: str = ""
) -> list[str]:
    """Return the name of each copy of a protein.

    Args:
        job: The input.
        content: Fields of the protein.
        number: Place of the protein in the input, from 1.
        field: Field of a name or a list of names. A chain may be named by a number.
        count_field: Field of a number of copies without names, for proteins without the other field.

    Raises:
        InputError: A name or number has another type, or there are no or too many copies.
    """
    named = content.get(field)
    if named is not None:
        names = named if isinstance(named, list) else [named]
        if wrong := [name for name in names if isinstance(name, bool) or not isinstance(name, str | int)]:
            raise job.fail(
                f"entry {number}: expected the name of a chain in {field!r}, found {wrong[0]!r}; put quotes around it"
            )
        count = len(names)
    else:
        count = 1 if (listed := content.get(count_field)) is None else listed
        if isinstance(count, bool) or not isinstance(count, int):
            raise job.fail(f"entry {number}: expected a whole number in {count_field!r}, found {count!r}")
        names = [""]
    if not 1 <= count <= _MAX_COPIES:
        raise job.fail(f"entry {number} has {count} copies, expected 1 to {_MAX_COPIES}")
    return [str(name) for name in names] if named is not None else names * count


def read_seeds(job: QueryJob, listed: object, field: str) -> tuple[tuple[int, ...], list[str]]:
    """Return the seeds of an input, numbers or texts of digits, and warnings; none for an empty field.

    Raises:
        InputError: It is not a list of whole numbers below 2³².
    """
    if not listed:
        return (), []
    if not isinstance(listed, list):
        raise job.fail(f"{field}: expected a list of whole numbers, found {str(listed)[:40]!r}")
    seeds: dict[int, None] = {}
    large: list[int] = []
    for one in listed:
        text = str(one)
        if isinstance(one, bool) or not (text.isascii() and text.isdigit() and len(text) <= 10):
            raise job.fail(f"{field}: expected whole numbers from 0 to 2³² - 1, found {text[:40]!r}")
        if int(text) >= 2 * _SEED_LIMIT:
            raise job.fail(f"{field}: expected whole numbers from 0 to 2³² - 1, found {text[:40]!r}")
        large += [int(text)] if int(text) >= _SEED_LIMIT else []
        seeds[int(text) % _SEED_LIMIT] = None
    shown = f"seeds from 2³¹ on, such as {large[0]}, are taken modulo 2³¹" if large else ""
    return tuple(seeds), [shown] if shown else []


def complex_record(
    job: QueryJob, entities: Sequence[Entity], *, seeds: tuple[int, ...] = (), warnings: Sequence[str] = ()
) -> Record:
    """Return the record of a complex.

    Raises:
        InputError: Two chains have one name, or two proteins of one sequence have different alignments.
    """
    names = [name for one in entities for name in one.names]
    if repeated := next((name for name in names if name and names.count(name) > 1), None):
        raise job.fail(f"names two chains {repeated[:40]!r}; rename one")
    chain_ids = name_chains(names)
    doubts = [
        f"chain {name[:40]!r} is called {chain_id} in the results, which need a short name of letters and digits"
        for name, chain_id in zip(names, chain_ids, strict=True)
        if name not in ("", chain_id)
    ]
    known: dict[str, ChainMsas] = {}
    for number, one in enumerate(entities, 1):
        if one.alignments is None:
            continue
        if known.setdefault(mask_unknown(one.sequence), one.alignments) is not one.alignments:
            first = known[mask_unknown(one.sequence)]
            if _rows(first) != _rows(one.alignments):
                raise job.fail(
                    f"entry {number} has the sequence of an earlier entry, and another alignment; name the same "
                    "alignment for both"
                )
    sequences = [one.sequence for one in entities for _ in one.names]
    alignments = [known.get(mask_unknown(sequence)) for sequence in sequences]
    complete = [msas for msas in alignments if msas is not None]
    lines = {_paired_lines(msas) for msas in known.values()} - {0}
    if len(lines) > 1:
        raise job.fail(
            f"expected equal numbers of paired rows in all chains, found {' and '.join(map(str, sorted(lines)))}"
        )
    if len(complete) == len(sequences):
        alignments = [*pair_by_keys([mask_unknown(sequence) for sequence in sequences], complete)]
    templates = tuple(one.templates for one in entities for _ in one.names)
    return Record(
        job.name,
        1,
        sequences,
        list(dict.fromkeys([*warnings, *doubts])),
        [(name, "") for name in names],
        chain_ids=chain_ids,
        alignments=tuple(alignments) if complete else None,
        templates=templates if any(templates) else None,
        forced_templates=tuple(one.forced for one in entities for _ in one.names),
        seeds=seeds,
    )


def _paired_lines(alignments: ChainMsas) -> int:
    """Return the number of rows that are paired by their number."""
    return sum(len(msa.sequences) for msa in alignments[1] if msa.as_is)


def _rows(alignments: ChainMsas) -> list[list[tuple[str, ...]]]:
    return [[msa.sequences for msa in group] for group in alignments]
