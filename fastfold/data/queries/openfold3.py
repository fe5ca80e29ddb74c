"""Queries of OpenFold 3: JSON with the object ``queries``, and in each the list ``chains``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
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
from fastfold.data.queries.named_alignments import openfold3_alignments
from fastfold.data.queries.records import QueryFile, Record
from fastfold.errors import InputError

QUERIES = "queries"  #: Key that marks such a file

_USES = ("use_msas", "use_main_msas", "use_paired_msas")
_OF_FILE = (QUERIES, "seeds", "ccd_file_path")
_MEANINGFUL = ("covalent_bonds", "pocket_constraint")
_MEANINGFUL_OF_CHAIN = ("non_canonical_residues", "cyclic")
"""Keys that change the meaning of a query."""
_OF_QUERY = ("query_name", "chains", *_MEANINGFUL, *_USES)
_OF_CHAIN = (
    *("molecule_type", "chain_ids", "description", "sequence", *_MEANINGFUL_OF_CHAIN, *_USES),
    *(
        "main_msa_file_paths",
        "paired_msa_file_paths",
        "template_alignment_file_path",
        "template_entry_chain_ids",
    ),
)
_TEMPLATES = ("template_alignment_file_path", "template_entry_chain_ids")


def parse_openfold3(file: QueryFile, tree: Mapping[str, Any]) -> Iterator[Record | InputError]:
    """Yield the complex of each query, or its error.

    Raises:
        InputError: There are no queries.
    """
    queries = tree[QUERIES]
    if not isinstance(queries, Mapping) or not queries:
        raise InputError(f"expected an object {QUERIES!r} with a complex for each name", path=file.path)
    for name, query in queries.items():
        job = QueryJob(file.path, str(name), uses_working_folder=True)
        try:
            yield _complex(job, tree, query)
        except InputError as error:
            yield error


def _complex(job: QueryJob, tree: Mapping[str, Any], query: object) -> Record:
    if not isinstance(query, Mapping) or not isinstance(query.get("chains"), list) or not query["chains"]:
        raise job.fail("expected a list 'chains' with at least one protein")
    job.refuse(query, _MEANINGFUL)
    seeds, warnings = read_seeds(job, tree.get("seeds"), "'seeds'")
    warnings += [*job.ignored(tree, _OF_FILE, "the file"), *job.ignored(query, _OF_QUERY, "the query")]
    entities: list[Entity] = []
    for number, chain in enumerate(query["chains"], 1):
        entity, doubts = _chain(job, query, chain, number)
        entities.append(entity)
        warnings += doubts
    return complex_record(job, entities, seeds=seeds, warnings=warnings)


def _chain(job: QueryJob, query: Mapping[str, Any], chain: object, number: int) -> tuple[Entity, list[str]]:
    if not isinstance(chain, Mapping):
        raise job.fail(f"entry {number} of 'chains' must be an object with a 'molecule_type'")
    kind = str(chain.get("molecule_type")).lower()
    if kind != "protein":
        raise job.fail(
            f"expected only proteins, found {kind[:40]!r} as entry {number}; FastFold folds proteins: remove it from "
            "the file"
        )
    job.refuse(chain, _MEANINGFUL_OF_CHAIN)
    sequence, warnings = chain_letters(job, chain, number)
    warnings += job.ignored(chain, _OF_CHAIN, f"entry {number}")
    if any(chain.get(key) for key in _TEMPLATES):
        warnings.append(f"entry {number}: its template hits are not used; {UNUSED_HITS}")
    both, main, paired = (bool(query.get(key, True)) and bool(chain.get(key, True)) for key in _USES)
    uses = {"main": both and main, "paired": both and paired}
    alignments = openfold3_alignments(job, chain, sequence, number, uses=uses)
    return Entity(sequence, copy_names(job, chain, number, field="chain_ids"), alignments), warnings
