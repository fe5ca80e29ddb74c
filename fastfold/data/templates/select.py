"""Choose the templates of one chain from the hits of a search, with the outcome of every hit."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import date
from typing import Any

import numpy as np

from fastfold.data.templates.database import MmcifFolder
from fastfold.data.templates.features import Template, check_parts, template_of_hit
from fastfold.data.templates.hits import Outcome, TemplateHit, TemplateSkipped, is_ranked
from fastfold.data.templates.options import MAX_TEMPLATES
from fastfold.protein import residue_constants as rc
from fastfold.utils.lazy import old_attributes

MAX_SUBSEQUENCE = 0.95  #: Largest share of the query for a hit that is a part of the query itself
MIN_ALIGNED = 0.1  #: Share of the query's residues that a hit must exceed
MIN_RESIDUES = 10  #: Smallest number of residues of a hit
_SHOWN = 3  #: Number of left-out hits that are named with a reason


@old_attributes({"found": "examined"})
@dataclass(frozen=True)
class ChainTemplates:
    """Templates of one chain."""

    templates: tuple[Template, ...] = ()  #: Templates, the best first
    outcomes: tuple[Outcome, ...] = ()  #: Outcome of each examined hit and structure, in that order
    examined: int = 0  #: Number of hits and structures
    sources: tuple[str, ...] = ()  #: Sources of the templates, for example a file's name

    def __add__(self, other: ChainTemplates) -> ChainTemplates:
        return ChainTemplates(
            self.templates + other.templates,
            self.outcomes + other.outcomes,
            self.examined + other.examined,
            tuple(dict.fromkeys(self.sources + other.sources)),
        )

    def report(self, parts: Collection[int] | None = None) -> dict[str, Any]:
        """Return numbers of found and used templates, and reasons for others, in JSON's types.

        Aligned residues are those in the ``parts`` of the chain, from 0; None for a whole chain.
        """
        used = {outcome.name: outcome for outcome in self.outcomes if outcome.used}
        return {
            "sources": list(self.sources),
            "found": self.examined,
            "used": [
                {
                    "name": one.name,
                    "aligned_residues": sum(parts is None or place in parts for place in one.mapping),
                    "remark": used[one.name].message,
                }
                for one in self.templates
            ],
            "left_out": [{"name": one.name, "reason": one.message} for one in self.outcomes if not one.used],
        }

    def describe(self) -> str:
        """Return one line about found, used and left-out templates."""
        counted = f"{self.examined:,} found" if self.examined else "none found"
        where = f" in {' and '.join(self.sources)}" if self.sources else ""
        names = f": {', '.join(one.name for one in self.templates)}" if self.templates else ""
        line = (
            f"{len(self.templates)} used of {counted}{where}{names}" if self.examined else f"{counted}{where}"
        )
        left = [one for one in self.outcomes if not one.used]
        if left:
            shown = ", ".join(f"{one.name} ({one.message})" for one in left[:_SHOWN])
            more = f" and {len(left) - _SHOWN:,} more" if len(left) > _SHOWN else ""
            line += f"; left out: {shown}{more}"
        return line

    def features(self) -> dict[str, np.ndarray]:
        """Return raw template features, see :func:`fastfold.data.features.raw.template_features`.

        Returns:
            With ``T`` templates, ``template_aatype`` ``[T, N, 22]`` one-hot over HHblits ids,
            ``template_all_atom_positions`` ``[T, N, 37, 3]`` in Å, ``template_all_atom_masks`` ``[T, N, 37]`` and
            ``template_sum_probs`` ``[T, 1]``, float32, ``template_domain_names`` and ``template_sequence``
            ``[T]`` bytes, and ``template_frame`` ``[T]`` int32 if a template is of several chains; empty if there are
            none.
        """
        chosen = self.templates
        if not chosen:
            return {}
        one_hot, frames = np.eye(22, dtype=np.float32), [one.frame for one in chosen]
        ids = [[rc.hhblits_letter_to_id[letter] for letter in one.sequence] for one in chosen]
        return {
            "template_aatype": one_hot[np.array(ids)],
            "template_all_atom_positions": np.stack([one.positions for one in chosen]),
            "template_all_atom_masks": np.stack([one.mask for one in chosen]),
            "template_sum_probs": np.array([[one.sum_probs] for one in chosen], np.float32),
            "template_domain_names": np.array([one.name.encode() for one in chosen]),
            "template_sequence": np.array([one.sequence.encode() for one in chosen]),
            **({"template_frame": np.array(frames, np.int32)} if any(frames) else {}),
        }


def best_first(hits: Sequence[TemplateHit]) -> list[TemplateHit]:
    """Sort HHsearch's hits by ``sum_probs``; keep the order of hmmsearch's."""
    return sorted(hits, key=lambda hit: -(hit.sum_probs or 0.0)) if is_ranked(hits) else list(hits)


def choose_templates(
    hits: Sequence[TemplateHit],
    query: str,
    database: MmcifFolder,
    *,
    max_templates: int = MAX_TEMPLATES,
    max_date: date | None = None,
    source: str = "",
    earlier: Sequence[Template] = (),
    keep_order: bool = False,
    parts: Collection[int] | None = None,
) -> ChainTemplates:
    """Choose templates from a search's hits until there are enough.

    HHsearch's hits are ordered by ``sum_probs``, hmmsearch's are in the search's order. Hits of hmmsearch that repeat
    the letters of a template are left out (as in AlphaFold and AlphaFold-Multimer).

    ``earlier`` are templates of the chain; a hit with the same letters repeats them. With ``keep_order`` hits are
    taken in the given order, instead of the best first, up to the release date ``max_date``. Templates without atoms in
    the ``parts`` of the chain, residues from 0, are left out; None for a whole chain.
    """
    ranked = is_ranked(hits)
    chosen: list[Template] = []
    outcomes: list[Outcome] = []
    for hit in hits if keep_order else best_first(hits):
        if len(chosen) >= max_templates:
            break
        name = (hit.name.split() or [f"hit {hit.index}"])[0]
        try:
            if hit.pdb_chain is None:
                raise TemplateSkipped(
                    "name", "its name does not begin with a PDB id and a chain, such as 1abc_A"
                )
            pdb_id = database.current_id(hit.pdb_chain[0])
            check_hit(hit, query, released=database.release_dates.get(pdb_id), limit=max_date)
            template = template_of_hit(hit, pdb_id, query, database, limit=max_date)
            check_parts(template, parts)
        except TemplateSkipped as skipped:
            outcomes.append(Outcome(name, skipped.reason, str(skipped), hit.index))
            continue
        if any(template.sequence == other.sequence for other in (*earlier, *(() if ranked else chosen))):
            outcomes.append(
                Outcome(template.name, "repeated", "it repeats the letters of a template", hit.index)
            )
            continue
        chosen.append(template)
        remark = "" if template.exact else "realigned, because its file has another sequence than was listed"
        outcomes.append(Outcome(template.name, "used", remark, hit.index, len(template.mapping)))
    return ChainTemplates(tuple(chosen), tuple(outcomes), len(hits), (source,) if source else ())


def check_hit(
    hit: TemplateHit, query: str, *, released: date | None = None, limit: date | None = None
) -> None:
    """Check a hit before its structure is read (AlphaFold's supplement, section 1.2.3).

    The checks are AlphaFold's, in its order: the listed release date, the aligned share, a repetition of the query, the
    length.

    Raises:
        TemplateSkipped: The hit is left out; has the reason.
    """
    if released is not None and limit is not None and released > limit:
        raise TemplateSkipped("date", f"released on {released}, after {limit}")
    share = hit.aligned_cols / len(query)
    if share <= MIN_ALIGNED:
        raise TemplateSkipped(
            "coverage", f"aligned with {100 * share:.1f}% of the query, expected more than {MIN_ALIGNED:.0%}"
        )
    letters = hit.letters
    ratio = len(letters) / len(query)
    if letters in query and ratio > MAX_SUBSEQUENCE:
        raise TemplateSkipped(
            "duplicate", f"it is {100 * ratio:.1f}% of the query, more than {MAX_SUBSEQUENCE:.0%}"
        )
    if len(letters) < MIN_RESIDUES:
        raise TemplateSkipped("short", f"it has {len(letters)} residues, fewer than {MIN_RESIDUES}")
