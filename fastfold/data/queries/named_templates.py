"""Templates that inputs of AlphaFold 3 and Boltz name, as raw template features of their chains.

AlphaFold 3 gives each template as mmCIF with one protein chain, as text or as a file, and the pairs of residues of the
chain and of the template's sequence, from 0. Boltz names structures, and optionally the chains that they are for and
the structure's chains; they are aligned here like those of ``--templates``. Its templates with ``force`` also keep the
prediction within a ``threshold``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastfold.data.msa.msa import ChainMsas
from fastfold.data.queries.jobs import Entity, QueryJob
from fastfold.data.templates.hits import TemplateSkipped
from fastfold.data.templates.options import MAX_TEMPLATES
from fastfold.protein.io.cif_tables import CifTable, read_cif_tables
from fastfold.protein.residue_constants import atom_order, mask_unknown
from fastfold.utils.text_files import read_packed_text, read_text_bytes, split_lines

if TYPE_CHECKING:
    from fastfold.data.templates.custom import CustomChain
    from fastfold.data.templates.features import ForcedTemplate, Template
    from fastfold.data.templates.select import ChainTemplates
    from fastfold.data.templates.whole.listed import Features

_LIMIT = 1 << 30
_MMCIF_FIELDS = ("mmcif", "mmcifPath", "queryIndices", "templateIndices")
_BOLTZ_FIELDS = ("cif", "pdb", "chain_id", "template_id", "force", "threshold")


def entity_templates(
    job: QueryJob, listed: object, sequence: str, number: int
) -> tuple[Features | None, list[str]]:
    """Read the templates of a protein of AlphaFold 3, and warnings; None for a missing field or an empty list.

    The networks use the first four.

    Raises:
        InputError: A template is not such a structure, or its residues are not in it.
    """
    if not listed:
        return None, []
    if not isinstance(listed, list):
        raise job.fail(f"entry {number}, 'templates': expected a list, found {str(listed)[:40]!r}")
    from fastfold.data.templates.select import ChainTemplates

    templates: list[Template] = []
    warnings: list[str] = []
    for index, one in enumerate(listed, 1):
        field = f"entry {number}, template {index}"
        if len(templates) == MAX_TEMPLATES:
            break
        if not isinstance(one, Mapping):
            raise job.fail(
                f"{field}: expected mmcif, queryIndices and templateIndices, found {str(one)[:40]!r}"
            )
        warnings += job.ignored(one, _MMCIF_FIELDS, field)
        try:
            templates.append(
                _mapped_template(job, one, mask_unknown(sequence), field, name=f"template_{index}")
            )
        except TemplateSkipped as skipped:
            warnings.append(f"{field} is left out: {skipped}")
    if len(listed) > MAX_TEMPLATES:
        warnings.append(
            f"entry {number}: {len(templates)} of {len(listed)} templates are used, the networks take no more"
        )
    return ChainTemplates(tuple(templates)).features() or None, warnings


def _mapped_template(
    job: QueryJob, one: Mapping[str, Any], sequence: str, field: str, *, name: str
) -> Template:
    from fastfold.data.templates.entry import TemplateEntry
    from fastfold.data.templates.features import place_template

    text, place = one.get("mmcif"), one.get("mmcifPath")
    if bool(text) == bool(place):
        raise job.fail(f"{field}: expected one of 'mmcif' and 'mmcifPath'")
    path = Path(job.path)
    if place:
        path = job.find(place, f"{field}, 'mmcifPath'")
        with job.reading(field):
            text = read_packed_text(path, limit=_LIMIT)
        name = path.name.partition(".")[0] or name
    if not isinstance(text, str):
        raise job.fail(f"{field}, 'mmcif': expected the text of an mmCIF file, found {str(text)[:40]!r}")
    pairs = _residue_pairs(job, one, field)
    with job.reading(field):
        entry = TemplateEntry(split_lines(text), path=path)
    if len(entry.sequences) != 1:
        names = ", ".join(entry.sequences) or "none"
        raise job.fail(
            f"{field}: expected an mmCIF of one protein chain, found {len(entry.sequences)} ({names})"
        )
    ((chain_id, theirs),) = entry.sequences.items()
    for kind, length, places in (
        ("queryIndices", len(sequence), pairs),
        ("templateIndices", len(theirs), pairs.values()),
    ):
        if max(places) >= length:
            raise job.fail(
                f"{field}, {kind!r}: {max(places)} is beyond the {length} residues, counted from 0"
            )
    with job.reading(field):
        chain = entry.chain(chain_id)
    letters = {mine: theirs[place] for mine, place in pairs.items()}
    return place_template(chain, pairs, letters, len(sequence), name=f"{name}_{chain_id}")


def _residue_pairs(job: QueryJob, one: Mapping[str, Any], field: str) -> dict[int, int]:
    """Return the residue of the template for each residue of the chain, from 0."""
    mine, theirs = one.get("queryIndices"), one.get("templateIndices")
    for name, places in (("queryIndices", mine), ("templateIndices", theirs)):
        if not isinstance(places, list) or not places:
            raise job.fail(f"{field}, {name!r}: expected a list of whole numbers from 0")
        if any(isinstance(place, bool) or not isinstance(place, int) or place < 0 for place in places):
            raise job.fail(f"{field}, {name!r}: expected whole numbers from 0")
        if len(set(places)) < len(places):
            raise job.fail(f"{field}, {name!r}: a residue is repeated; each has one partner")
    assert isinstance(mine, list)
    assert isinstance(theirs, list)
    if len(mine) != len(theirs):
        raise job.fail(
            f"{field}: expected as many queryIndices as templateIndices, found {len(mine)} and {len(theirs)}"
        )
    return dict(zip(mine, theirs, strict=True))


def boltz_templates(
    job: QueryJob, listed: object, entities: Sequence[Entity]
) -> tuple[list[Entity], list[str]]:
    """Return proteins with the templates of Boltz' list, and warnings.

    A template without ``chain_id`` is for all proteins, one without ``template_id`` shows its best aligned chains.

    Raises:
        InputError: A structure cannot be read, a chain is unknown, or a forced template lacks a threshold or a chain
            that aligns.
    """
    if not isinstance(listed, list):
        raise job.fail(f"'templates': expected a list, found {str(listed)[:40]!r}")
    chains: dict[int, list[CustomChain]] = {}
    forced: dict[int, list[ForcedTemplate]] = {}
    warnings: list[str] = []
    for index, one in enumerate(listed, 1):
        field = f"template {index}"
        if not isinstance(one, Mapping) or ("cif" in one) == ("pdb" in one):
            raise job.fail(f"{field}: expected one of 'cif' and 'pdb' with a path")
        warnings += job.ignored(one, _BOLTZ_FIELDS, field)
        threshold = _threshold(job, one, field)
        of_structure: dict[int, list[CustomChain]] = {}
        for number, chain in _chains_for(job, one, field, entities):
            of_structure.setdefault(number, []).append(chain)
        for number, shown in of_structure.items():
            chains.setdefault(number, []).extend(shown)
        if threshold is not None:
            for number, template in _forced(job, of_structure, entities, field, threshold).items():
                forced.setdefault(number, []).append(template)
    complete = list(entities)
    for number, shown in chains.items():
        chosen = _aligned(job, shown, entities[number], number + 1, max_templates=MAX_TEMPLATES)
        complete[number] = entities[number]._replace(
            templates=chosen.features() or None, forced=tuple(forced.get(number, ()))
        )
        warnings += [] if chosen.templates else [f"entry {number + 1}: {chosen.describe()}"]
    if sum(len(entities[number].names) for number in forced) > 1:
        warnings.append(
            "'force' keeps each chain near its template, not the chains to each other; `TemplateOptions.complexes` "
            "shows their distances to multimer networks"
        )
    return complete, warnings


def _threshold(job: QueryJob, one: Mapping[str, Any], field: str) -> float | None:
    """Return the threshold of a forced template in Å, None for others, or raise InputError."""
    force, threshold = one.get("force", False), one.get("threshold")
    if not isinstance(force, bool):
        raise job.fail(f"{field}, 'force': expected true or false, found {str(force)[:40]!r}")
    if not force:
        return None
    if isinstance(threshold, bool) or not isinstance(threshold, int | float) or not 0 < threshold < math.inf:
        raise job.fail(f"{field}: 'force' needs a 'threshold' over 0 Å, found {str(threshold)[:40]!r}")
    return float(threshold)


def _forced(
    job: QueryJob,
    of_structure: Mapping[int, Sequence[CustomChain]],
    entities: Sequence[Entity],
    field: str,
    threshold: float,
) -> dict[int, ForcedTemplate]:
    """Return the best aligned chain of a structure for each protein, or raise InputError without any."""
    from fastfold.data.templates.features import ForcedTemplate

    forced, problems = {}, []
    for number, chains in of_structure.items():
        chosen = _aligned(job, chains, entities[number], number + 1, max_templates=1)
        if not chosen.templates:
            problems.append(f"entry {number + 1}: {chosen.describe()}")
            continue
        (template,) = chosen.templates
        positions, mask = (x[:, atom_order["CA"]] for x in (template.positions, template.mask))
        forced[number] = ForcedTemplate(template.name, threshold, positions, mask > 0)
    if not forced:
        raise job.fail(f"{field}: 'force' needs a chain that aligns; {'; '.join(problems)}")
    return forced


def _chains_for(
    job: QueryJob, one: Mapping[str, Any], field: str, entities: Sequence[Entity]
) -> list[tuple[int, CustomChain]]:
    """Return the chains of a structure, each with the index of a protein that it is for."""
    from fastfold.data.templates.custom import read_custom_chains

    kind = "cif" if "cif" in one else "pdb"
    path = job.find(one[kind], f"{field}, {kind!r}")
    with job.reading(field):
        there, _ = read_custom_chains([path])
        names = _boltz_names(path, kind, there)
    wanted, shown = (_names(one.get(key)) for key in ("chain_id", "template_id"))
    number_of = {
        name: index for index, entity in reversed(list(enumerate(entities))) for name in entity.names
    }
    for name in wanted or ():
        if name not in number_of:
            raise job.fail(
                f"{field}, 'chain_id': {name!r} is not a protein; expected one of {', '.join(number_of)}"
            )
    for name in shown or ():
        if name not in names:
            raise job.fail(
                f"{field}, 'template_id': {name!r} is not in the file; expected one of {', '.join(names)}"
            )
    if wanted and shown:
        if len(wanted) != len(shown):
            raise job.fail(
                f"{field}: expected a template_id for each chain_id, found {len(shown)} and {len(wanted)}"
            )
        pairs = [(number_of[mine], names[theirs]) for mine, theirs in zip(wanted, shown, strict=True)]
    else:
        numbers = [number_of[name] for name in wanted] if wanted else range(len(entities))
        pairs = [
            (number, chain) for number in numbers for chain in ([names[n] for n in shown] if shown else there)
        ]
    return list({(number, chain.name): (number, chain) for number, chain in pairs}.values())


def _names(listed: object) -> list[str]:
    return [str(one) for one in listed] if isinstance(listed, list) else [str(listed)] if listed else []


def _boltz_names(path: Path, kind: str, chains: Sequence[CustomChain]) -> dict[str, CustomChain]:
    """Return the chains of a structure under Boltz' names: of mmCIF the file's own, of PDB with a number."""
    if kind == "pdb":
        return {name: one for one in chains for name in (f"{one.chain_id}1", one.chain_id)}
    blocks = read_cif_tables(
        split_lines(read_text_bytes(path, limit=_LIMIT).decode("latin-1")), ("_atom_site",), path=path
    )
    table = next((block["_atom_site"] for block in blocks if "_atom_site" in block), CifTable())
    labels = dict(zip(table.column("label_asym_id"), table.column("auth_asym_id"), strict=True))
    by_author = {one.chain_id: one for one in chains}
    return {label: by_author[author] for label, author in labels.items() if author in by_author} or by_author


def _aligned(
    job: QueryJob, chains: Sequence[CustomChain], entity: Entity, number: int, *, max_templates: int
) -> ChainTemplates:
    """Return templates from the structures' chains, aligned with a protein."""
    from fastfold.data.templates.custom import custom_templates
    from fastfold.data.templates.source import profile_msa

    nothing: ChainMsas = ([], [])
    query = mask_unknown(entity.sequence)
    msa = profile_msa(query, entity.alignments or nothing)
    with job.reading(f"entry {number}"):
        return custom_templates(chains, query, msa, max_templates=max_templates)
