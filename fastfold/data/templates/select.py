"""From the hits of a search to the templates of one chain, with what became of every hit that was looked at."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date

import numpy as np

from fastfold.data.templates.database import MmcifFolder
from fastfold.data.templates.features import Template, template_of_hit
from fastfold.data.templates.hits import TemplateHit, is_ranked
from fastfold.data.templates.outcome import Outcome, TemplateSkipped
from fastfold.data.templates.prefilter import check_hit
from fastfold.protein import residue_constants as rc

MAX_TEMPLATES = 4
"""Templates that the networks of AlphaFold take."""


@dataclass(frozen=True)
class ChainTemplates:
    """The templates of one chain.

    Attributes:
        templates: They, the best first.
        outcomes: What became of each hit and structure that was looked at, in that order.
        found: Number of hits and structures there were.
        sources: Where they come from, a file's name for example.
    """

    templates: tuple[Template, ...] = ()
    outcomes: tuple[Outcome, ...] = ()
    found: int = 0
    sources: tuple[str, ...] = ()

    def features(self) -> dict[str, np.ndarray]:
        """Raw template features, as :func:`fastfold.data.features.raw.template_features` describes them.

        Returns:
            With ``T`` templates, ``template_aatype`` ``[T, N, 22]`` one-hot over HHblits ids,
            ``template_all_atom_positions`` ``[T, N, 37, 3]`` in Å, ``template_all_atom_masks`` ``[T, N, 37]`` and
            ``template_sum_probs`` ``[T, 1]``, float32, and ``template_domain_names`` and ``template_sequence``
            ``[T]`` bytes; empty if there are none.
        """
        chosen = self.templates
        if not chosen:
            return {}
        one_hot = np.eye(22, dtype=np.float32)
        ids = [[rc.hhblits_letter_to_id[letter] for letter in one.sequence] for one in chosen]
        return {
            "template_aatype": one_hot[np.array(ids)],
            "template_all_atom_positions": np.stack([one.positions for one in chosen]),
            "template_all_atom_masks": np.stack([one.mask for one in chosen]),
            "template_sum_probs": np.array([[one.sum_probs] for one in chosen], np.float32),
            "template_domain_names": np.array([one.name.encode() for one in chosen]),
            "template_sequence": np.array([one.sequence.encode() for one in chosen]),
        }


def choose_templates(
    hits: Sequence[TemplateHit],
    query: str,
    database: MmcifFolder,
    *,
    max_templates: int = MAX_TEMPLATES,
    max_date: date | None = None,
    source: str = "",
) -> ChainTemplates:
    """Takes templates from a search's hits until there are enough.

    HHsearch's hits are taken by their ``sum_probs``, hmmsearch's in their order; of the latter those that repeat the
    letters of a template are left out (AlphaFold and AlphaFold-Multimer).

    Args:
        hits: The hits.
        query: The chain's sequence.
        database: The PDB's entries.
        max_templates: Templates wanted.
        max_date: Newest release date allowed, None for any.
        source: Where the hits come from.
    """
    ranked = is_ranked(hits)
    order = sorted(hits, key=lambda hit: -(hit.sum_probs or 0.0)) if ranked else list(hits)
    chosen: list[Template] = []
    outcomes: list[Outcome] = []
    for hit in order:
        if len(chosen) >= max_templates:
            break
        name = hit.name.split()[0] if hit.name.split() else f"hit {hit.index}"
        try:
            template = _template(hit, query, database, max_date)
        except TemplateSkipped as skipped:
            outcomes.append(Outcome(name, skipped.reason, str(skipped), hit.index))
            continue
        if not ranked and any(template.sequence == other.sequence for other in chosen):
            outcomes.append(
                Outcome(template.name, "repeated", "it repeats the letters of a template", hit.index)
            )
            continue
        chosen.append(template)
        remark = (
            "" if template.exact else "aligned anew, because its file has another sequence than was listed"
        )
        outcomes.append(Outcome(template.name, "used", remark, hit.index, len(template.mapping)))
    return ChainTemplates(tuple(chosen), tuple(outcomes), len(hits), (source,) if source else ())


def _template(hit: TemplateHit, query: str, database: MmcifFolder, max_date: date | None) -> Template:
    """The template of a hit, or why it has none."""
    if hit.pdb_chain is None:
        raise TemplateSkipped("name", "its name does not begin with a PDB id and a chain, such as 1abc_A")
    pdb_id = database.current_id(hit.pdb_chain[0])
    check_hit(hit, query, released=database.release_dates.get(pdb_id), limit=max_date)
    return template_of_hit(hit, pdb_id, query, database, limit=max_date)
