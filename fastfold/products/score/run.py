"""``fastfold score``: score given structures by networks, and rank them in a table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fastfold._version import __version__
from fastfold.data.targets import (
    FoundTarget,
    Target,
    number_targets,
    safe_stem,
    structure_chains,
    unique_targets,
)
from fastfold.data.templates.custom import structures_inside
from fastfold.data.templates.whole.given import GivenStructure, Use
from fastfold.errors import ConfigError, InputError
from fastfold.inference.models import Network, requested_networks
from fastfold.inference.output.results_folder import ResultsFolder
from fastfold.inference.output.score_files import mapping_of, read_scores
from fastfold.inference.output.summary import mean_score, read_table, score_table
from fastfold.inference.report.discover import numbers_of
from fastfold.inference.request import InferRequest
from fastfold.inference.runner import Summary, run
from fastfold.inference.workers.options import ScreenOptions
from fastfold.inference.workers.run import screen
from fastfold.protein.io.modelcif_writer import to_modelcif
from fastfold.protein.io.observed import SCORE, read_observed
from fastfold.protein.io.read import named_protein, read_objects, structure_name
from fastfold.protein.metrics.scores import LARGEST_OF_PAIRS
from fastfold.protein.structure import Structure
from fastfold.protein.validation import LISTED_GEOMETRY
from fastfold.utils.atomic_files import write_atomic

TABLE = "scores.tsv"  #: Table of scored structures in the results folder, the best first
STRUCTURES = "structures"  #: Folder of structures in the results folder that were given as objects
TEMPLATE_RECYCLES = 1  #: Recycles of AF2Rank

_MEANS = (
    *("composite", "plddt", "ptm", "iptm", "tm_score", "rmsd", *LARGEST_OF_PAIRS),
    *("binder_plddt", "interaction_pae", "binder_rmsd", "binder_rmsd_on_target"),
)
COLUMNS = ("name", *_MEANS, "residues", "chains", "predictions", "file", *LISTED_GEOMETRY, "geometry")
"""Columns of the table: means over the predictions of a structure; lengths in Å, pLDDT from 0 to 100. The last ones
are about the geometry of the scored structure itself."""


@dataclass(frozen=True)
class Protocol:
    """How structures are scored; see :class:`fastfold.data.templates.whole.given.GivenStructure`."""

    use: Use = "template"
    shows_targets: bool = False

    def __post_init__(self) -> None:
        if self.shows_targets and self.use != "initial_guess":
            raise ConfigError("`show_target` belongs to `initial_guess`; AF2Rank shows all chains already")


def run_scores(
    files: Sequence[Any],
    request: InferRequest,
    *,
    protocol: Protocol | None = None,
    workers: ScreenOptions | None = None,
) -> Summary:
    """Score structures, write their table next to the results, and return the summary of the run.

    Args:
        files: PDB and mmCIF files, plain or ``.gz``, folders of them, and objects of
            :func:`fastfold.protein.io.read.read_structure`, which are written to ``structures`` among the results.
        request: How they are scored; its own inputs are not read. AF2Rank makes one recycle unless the settings of
            the fold name another number.
        protocol: How structures are scored.
        workers: Workers of a screen; None for this process.

    Raises:
        FastFoldError: The run cannot start: no network fits the protocol, or see :func:`fastfold.inference.runner.run`.
    """
    config, options, protocol = request.config, request.options, protocol or Protocol()
    if config.initial_guess is not None:
        raise ConfigError("each structure is its own initial guess; give Protocol(use='initial_guess')")
    if protocol.use == "template":
        if options.templates.wanted:
            raise ConfigError("the scored structure is the only template; leave out other templates")
        if config.num_recycles is None:
            config = replace(config, num_recycles=TEMPLATE_RECYCLES)
    searches = options.msa_dir is not None or options.sources.wanted
    prefix, options = options.name_prefix, replace(options, name_prefix=None)
    targets: list[Target] = []

    def read() -> tuple[list[Target], list[InputError]]:
        """Read the structures, on the first of several processes alone."""
        check_networks(requested_networks(request.weights, options.num_models), protocol)
        structures = write_objects(files, request.output / STRUCTURES)
        scored, errors = structure_targets(structures, protocol.use, protocol.shows_targets, searches)
        targets[:] = scored if prefix is None else number_targets(scored, prefix)
        return list(targets), errors

    request = replace(request, inputs=read, config=config, options=options)
    summary = run(request) if workers is None else screen(request, workers)
    if summary.predictions:
        is_part = workers is not None and workers.shard is not None
        failed = {name for name, _ in summary.failed}
        others = [one for one in targets if one.name not in failed] if is_part else []
        write_table(targets, summary.predictions, request.output, others=others)
    return summary


def check_networks(networks: Sequence[Network], protocol: Protocol) -> None:
    """Raise ConfigError if a network lacks pTM, or uses no templates although the protocol shows some."""
    for network in networks:
        if not network.info.config.model.heads.predicted_aligned_error.weight:
            raise ConfigError(
                f"{network.name} does not predict a TM-score, which the scores need; give `weights=monomer_ptm`, "
                "multimer, or another network with pTM"
            )
        if (protocol.use == "template" or protocol.shows_targets) and not network.takes_templates:
            what, rest = "structures are shown", ", or score with `initial_guess`, which suits every network"
            if protocol.shows_targets:
                what, rest = "`show_target` shows chains", ""
            raise ConfigError(
                f"{what} as templates, and {network.name} does not use any; give `weights=model_1_ptm`, model_2_ptm or "
                f"multimer{rest}"
            )


def write_table(
    targets: Iterable[Target],
    predictions: Mapping[str, Sequence[str]],
    output: Path,
    *,
    others: Iterable[Target] = (),
) -> Path:
    """Write the table of scored structures, the best composite score first.

    Targets without predictions are left out; ``predictions`` has the ``id`` of each target's, by its name. Lines of
    ``others``, which another part of a job array has scored, stay.
    """
    folder, path = ResultsFolder(output), output / TABLE
    all_rows = (_row(folder, target, predictions.get(target.name, ())) for target in targets)
    rows = [row for row in all_rows if row is not None]
    kept = {folder.target(one).stem for one in others} - {row["name"] for row in rows}
    with folder.locked():
        rows += [
            dict.fromkeys(COLUMNS) | line | {"composite": numbers_of(line, ("composite",)).get("composite")}
            for line in read_table(path)
            if line.get("name") in kept
        ]
        rows.sort(key=lambda row: (row["composite"] is None, -(row["composite"] or 0.0), row["name"]))
        write_atomic(path, score_table(COLUMNS, rows))
    return path


def _row(folder: ResultsFolder, target: Target, predictions: Sequence[str]) -> dict[str, Any] | None:
    """Return the mean scores of a structure; None without predictions."""
    results = folder.target(target)
    rows = []
    for record in results.records():
        if record.id not in predictions:
            continue
        scores = read_scores(results.path(record, "_scores.json"))
        compared, interfaces = scores["given_structure"], scores.get("interfaces") or {}
        own = {"plddt": scores.get("mean_plddt"), "ptm": scores["ptm"], "iptm": scores["iptm"]}
        rows.append(own | {name: interfaces.get(name) for name in LARGEST_OF_PAIRS} | compared)
    if not rows:
        return None
    means = {name: mean_score(one.get(name) for one in rows) for name in _MEANS}
    geometry = mapping_of(rows[0], "geometry")
    own = {key: geometry.get(key) for key in LISTED_GEOMETRY}
    own["geometry"] = "; ".join(map(str, geometry.get("problems", []))) or "ok"
    about = own | {"name": results.stem, "residues": target.num_residues, "chains": len(target.chains)}
    return means | about | {"predictions": len(rows), "file": target.source}


def write_objects(inputs: Sequence[Any], folder: Path) -> list[Path]:
    """Write the structures of a list that are objects into a folder, as mmCIF; return the paths of all.

    The folder is created if needed. A ConfigError names an input of another type, an InputError one without protein.
    """
    paths = []
    for source in read_objects(inputs):
        if isinstance(source, Structure):
            protein, names = named_protein(source)
            text = to_modelcif(
                protein,
                entry_id=source.name,
                title=f"Structure {source.name[:100]}",
                software_version=__version__,
                model_name="given",
                plddt=None,
                names=names,
            )
            folder.mkdir(parents=True, exist_ok=True)
            source = folder / f"{safe_stem(source.name)}.cif"
            write_atomic(source, text)
        paths.append(source)
    return paths


def structure_targets(
    inputs: Sequence[Path], use: Use = "template", shows_targets: bool = False, searches: bool = False
) -> tuple[list[Target], list[InputError]]:
    """Read structure files, and folders of them, as targets; return an error for each unreadable file as well.

    Without searches the network sees the sequences alone. ``use`` and ``shows_targets`` are those of
    :class:`~fastfold.data.templates.whole.given.GivenStructure`.
    """
    errors: list[InputError] = []
    files: list[Path] = []
    for path in inputs:
        try:
            files += structures_inside(path) if path.is_dir() else [path]
        except InputError as error:
            errors.append(error)
    files = list(dict.fromkeys(files))
    repeated = Counter(map(structure_name, files))
    targets = []
    for file in files:
        name = structure_name(file)
        record = f"{file.resolve().parent.name}_{name}" if repeated[name] > 1 else name
        try:
            target = _read_target(file, record, GivenStructure(file.resolve(), use, shows_targets))
        except InputError as error:
            errors.append(error)
            continue
        if not searches:
            target = replace(target, alignments=tuple(([], []) for _ in target.chains))
        targets.append(FoundTarget(target, file, None))
    return unique_targets(targets, errors), errors


def _read_target(path: Path, record: str, scored: GivenStructure) -> Target:
    structure = read_observed(path, SCORE)
    chains = structure_chains(structure, record)
    if scored.shows_targets and len(chains) == 1:
        raise InputError("has one chain; `show_target` needs a binder and its target", path=path)
    return Target(
        name=record,
        chains=chains,
        source=str(path),
        record=record,
        warnings=structure.warnings,
        scored_structure=scored,
    )
