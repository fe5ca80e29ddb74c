"""Inputs of AlphaFold 3, its server, Protenix, Boltz and OpenFold 3 as queries: JSON and YAML files.

They list the molecules of one complex or several. Those with only protein chains are read, with the alignments,
templates and seeds that they name. Ligands, nucleic acids, modified residues, bonds and constraints are refused,
because a fold without them would answer another question.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fastfold.data.queries.jobs import (
    UNUSED_HITS,
    Entity,
    QueryJob,
    chain_letters,
    complex_record,
    copy_names,
    read_seeds,
)
from fastfold.data.queries.named_alignments import ALIGNMENT_FIELDS, entity_alignments
from fastfold.data.queries.named_templates import boltz_templates, entity_templates
from fastfold.data.queries.openfold3 import QUERIES, parse_openfold3
from fastfold.data.queries.records import QueryFile, Record
from fastfold.errors import InputError
from fastfold.utils.foreign_text import parse_json, parse_yaml

ENTITY_ENDINGS = (".json", ".yaml", ".yml")
MAX_ENTITY_BYTES = 1 << 30

_PROTEINS = ("protein", "proteinChain")
_SERVER_PROTEIN = "proteinChain"  #: Kind of the AlphaFold server's and Protenix' proteins
_MEANINGFUL = (
    *("bondedAtomPairs", "userCCD", "userCCDPath", "constraints", "properties"),
    *("covalent_bonds", "constraint"),
)
"""Keys that change the meaning of a file."""
_OF_JOB = (*_MEANINGFUL, "name", "modelSeeds", "sequences", "templates", "dialect", "version")
_MEANINGFUL_OF_CHAIN = ("modifications", "cyclic", "glycans")
_OF_CHAIN = (
    *(*_MEANINGFUL_OF_CHAIN, *ALIGNMENT_FIELDS, "id", "count", "sequence", "description", "templates"),
    *("useStructureTemplate", "maxTemplateDate", "templatesPath"),
)
_NOT_USED = {
    "maxTemplateDate": "give the date with `TemplateOptions.max_date`",
    "templatesPath": UNUSED_HITS,
}


def parse_entities(file: QueryFile) -> Iterator[Record | InputError]:
    """Yield each complex of a JSON or YAML file, or its error; most files have one.

    Raises:
        InputError: The content is neither JSON nor YAML, or not such an input.
    """
    tree = _parsed(file)
    if isinstance(tree, Mapping) and QUERIES in tree:
        yield from parse_openfold3(file, tree)
        return
    jobs = tree if isinstance(tree, list) else [tree]
    if not jobs:
        raise InputError("the list contains no complex; add one", path=file.path)
    for number, job in enumerate(jobs, 1):
        if not isinstance(job, Mapping) or not isinstance(job.get("sequences"), list) or not job["sequences"]:
            raise InputError(
                "expected an input of AlphaFold 3 or Boltz with a list 'sequences', or of OpenFold 3 with 'queries', "
                "found other content; FASTA files end in .fasta, tables in .csv",
                path=file.path,
            )
        title = str(job.get("name") or "").strip()
        name = title or file.stem + (f"_{number}" if len(jobs) > 1 else "")
        try:
            yield _complex(
                QueryJob(file.path, name, uses_working_folder=not _is_alphafold3(job)), job
            )._replace(is_named=bool(title))
        except InputError as error:
            yield error


def _parsed(file: QueryFile) -> Any:
    is_json = Path(str(file.path).removesuffix(".gz")).suffix.lower() == ".json"
    return parse_json(file.data, file.path) if is_json else parse_yaml(file.data, file.path)


def _is_alphafold3(job: Mapping[str, Any]) -> bool:
    """Return True for AlphaFold 3's own dialect, whose paths start at the folder of the file alone."""
    return job.get("dialect") == "alphafold3"


def _complex(job: QueryJob, content: Mapping[str, Any]) -> Record:
    job.refuse(content, _MEANINGFUL)
    seeds, warnings = read_seeds(job, content.get("modelSeeds"), "'modelSeeds'")
    warnings += job.ignored(content, _OF_JOB, "the file")
    entities: list[Entity] = []
    for number, entity in enumerate(content["sequences"], 1):
        protein, doubts = _entity(job, entity, number)
        entities.append(protein)
        warnings += doubts
    if content.get("templates"):
        entities, doubts = boltz_templates(job, content["templates"], entities)
        warnings += doubts
    return complex_record(job, entities, seeds=seeds, warnings=warnings)


def _entity(job: QueryJob, entity: object, number: int) -> tuple[Entity, list[str]]:
    """Return a protein of a complex, and warnings about it."""
    if not isinstance(entity, Mapping) or len(entity) != 1:
        raise job.fail(f"entry {number} of 'sequences' must have a single kind of molecule")
    ((kind, content),) = entity.items()
    if kind not in _PROTEINS:
        raise job.fail(
            f"expected only proteins, found {str(kind)[:40]!r} as entry {number}; FastFold folds proteins: remove it "
            "from the file"
        )
    if not isinstance(content, Mapping):
        raise job.fail(f"entry {number} lacks a text 'sequence'")
    job.refuse(content, _MEANINGFUL_OF_CHAIN)
    sequence, warnings = chain_letters(job, content, number)
    warnings += job.ignored(content, _OF_CHAIN, f"entry {number}")
    warnings += [
        f"entry {number}: {key!r} is not used; {remedy}"
        for key, remedy in _NOT_USED.items()
        if content.get(key)
    ]
    names = copy_names(job, content, number, field="id", count_field="count")
    alignments = entity_alignments(job, content, sequence, number, is_protenix=kind == _SERVER_PROTEIN)
    templates, doubts = entity_templates(job, content.get("templates"), sequence, number)
    return Entity(sequence, names, alignments, templates), [*warnings, *doubts]
