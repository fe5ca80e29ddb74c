"""``fastfold mutate``: fold a wild type and its mutants, and write the table and the picture of their differences."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np

from fastfold.data.msa.find import ChainMsas, load_alignments
from fastfold.data.queries.read import read_targets
from fastfold.data.search.colabfold.modes import select_rows
from fastfold.data.targets import Target, safe_stem
from fastfold.data.templates.options import TemplateOptions
from fastfold.data.templates.source import TemplateFinder
from fastfold.errors import ConfigError, InputError
from fastfold.evoformer.config import MINI
from fastfold.inference.alignment_search import ALIGNMENTS, search_targets
from fastfold.inference.config import InferConfig
from fastfold.inference.models import limit_networks, open_networks, suitable
from fastfold.inference.mutate.mutations import Variant, mutant_targets, mutated_residues, read_variants
from fastfold.inference.mutate.strain import effective_strain
from fastfold.inference.output.plots import scan_png
from fastfold.inference.output.results_folder import PredictionRecord, ResultsFolder, TargetResults
from fastfold.inference.output.written_scores import read_pae, read_scores
from fastfold.inference.report.write import SCAN, write_report
from fastfold.inference.runner import Summary, run
from fastfold.inference.target_runner import RunOptions
from fastfold.inference.target_templates import check_takers, find_templates
from fastfold.protein import residue_constants as rc
from fastfold.protein.io.read import read_structure
from fastfold.utils.atomic_files import write_atomic

TABLE = "mutations.tsv"
"""Table of the mutants in the results folder."""

_MEANS = (
    *("plddt", "ptm", "dplddt", "dplddt_site", "dpae", "dpae_site", "dptm", "diptm"),
    *("strain", "strain_site"),
)
COLUMNS = ("mutations", *_MEANS, "largest_strain", "predictions", "name")
"""Columns of the table: differences mutant minus wild type, means over the predictions of both by one network with one
seed; ``site`` are the mutated residues; strains as of :func:`effective_strain`; aligned errors in Å."""


def run_mutations(
    inputs: Sequence[Path],
    output: Path,
    weights: Sequence[Path] = (),
    config: InferConfig | None = None,
    options: RunOptions | None = None,
    *,
    mutations: str = "all",
    positions: str | None = None,
) -> Summary:
    """Fold a target and its mutants, and compare them.

    All mutants have the wild type's alignments, with the mutant in the query's row, and its templates.

    Args:
        inputs: One file with one target.
        output: Folder for the results.
        weights: Weights files or names of published networks; empty for ``mini``.
        config: Settings of the fold.
        options: Options of the run other than the model's.
        mutations: See :func:`~fastfold.inference.mutate.mutations.read_variants`.
        positions: See :func:`~fastfold.inference.mutate.mutations.read_variants`.

    Returns:
        Summary of the run; the wild type counts as well.

    Raises:
        FastFoldError: The run cannot start: not one target, a mutation does not fit it, or see
            :func:`fastfold.inference.runner.run`.
    """
    config, options = config or InferConfig(), options or RunOptions()
    _check(config, options)
    target = _wild_type(inputs, options)
    variants = read_variants(target, mutations, positions)
    target, alignments = _prepared(target, output, weights, options)
    targets = [target, *mutant_targets(target, alignments, variants)]
    plain = replace(options, engines=(), msa_dir=None, templates=TemplateOptions(), name_prefix=None)
    summary = run(lambda: (targets, []), output, weights, config, plain)
    if summary.predictions.get(target.name):
        write_results(targets, variants, summary.predictions, output)
    return summary


def _check(config: InferConfig, options: RunOptions) -> None:
    if config.initial_guess is not None:
        raise ConfigError(
            "an initial guess has the sequence of one target, and mutants have others; leave it out"
        )
    if config.pae is False:
        raise ConfigError(
            "differences of the aligned error need it; leave out --pae no and --skip-output pae_json"
        )
    if options.engines and config.parallel is not None:
        raise ConfigError(
            "--parallel does not search: run fastfold search first and give its folder as --msa-dir"
        )


def _wild_type(inputs: Sequence[Path], options: RunOptions) -> Target:
    """Read the only target."""
    targets, errors = read_targets(inputs, complex_=options.complex_)
    if errors:
        raise errors[0]
    if len(targets) != 1:
        names = ", ".join(target.name for target in targets[:3])
        raise InputError(
            f"expected one target to mutate, found {len(targets)}: {names}; give a file with one record, or --complex",
            path=inputs[0],
        )
    if options.name_prefix is None:
        return targets[0]
    return replace(targets[0], name=safe_stem(options.name_prefix))


def _prepared(
    target: Target, output: Path, weights: Sequence[Path], options: RunOptions
) -> tuple[Target, Sequence[ChainMsas]]:
    """Return the wild type with alignments and templates, and the alignments of its whole chains."""
    msa_dir = options.msa_dir
    if options.engines:
        msa_dir = msa_dir or output / ALIGNMENTS
        found = search_targets([target], options.engines, msa_dir, quiet=options.quiet, needed_alone=True)
        if not found.left([target])[0]:
            raise found.left([target])[1][0]
    if msa_dir is not None and not msa_dir.is_dir():
        raise InputError("no such folder; give the folder of the alignments", path=msa_dir)
    alignments: Sequence[ChainMsas] = [([], []) for _ in target.chains]
    if target.alignments is not None:
        alignments = target.alignments
    elif msa_dir is not None:
        alignments = load_alignments(msa_dir, target.uncut)
    templates = None
    if options.templates.wanted:
        networks = limit_networks(open_networks(weights or [Path(MINI)]), options.num_models)
        check_takers(options.templates, networks)
        rows = select_rows(alignments, options.pair_mode) if target.is_complex else alignments
        finder = TemplateFinder(options.templates)
        shown = find_templates(finder, target.uncut, rows, suitable(networks, target), msa_dir)
        templates = None if shown is None or not shown.number else shown.features
    return replace(target, alignments=tuple(alignments), templates=templates), alignments


class _Fold(NamedTuple):
    """Written prediction.

    Attributes:
        plddt: ``[N]``.
        ptm: pTM; None without that head.
        iptm: ipTM; None for single chains.
        pae: ``[N, N]`` in Å; None without that head.
        ca: ``[N, 3]`` in Å.
    """

    plddt: np.ndarray
    ptm: float | None
    iptm: float | None
    pae: np.ndarray | None
    ca: np.ndarray


def write_results(
    targets: Sequence[Target],
    variants: Sequence[Variant],
    predictions: Mapping[str, Sequence[str]],
    output: Path,
) -> None:
    """Write the table of mutants, the picture of a scan, and the page with it.

    Args:
        targets: The wild type, then the mutants.
        variants: Mutations of the mutants.
        predictions: The ``id`` of the predictions of each target, by its name.
        output: Folder of the results.

    Raises:
        InputError: A file of a prediction is damaged.
        WriteError: A file cannot be written.
    """
    folder = ResultsFolder(output)
    wild_type = _folds(folder, targets[0], predictions)
    rows = []
    for target, variant in zip(targets[1:], variants, strict=True):
        sites = mutated_residues(targets[0], variant)
        mutant = _folds(folder, target, predictions)
        pairs = [(wild_type[key], mutant[key]) for key in wild_type if key in mutant]
        if pairs:
            about = {"mutations": "+".join(map(str, variant)), "name": folder.target(target).stem}
            rows.append(_row(pairs, sites, targets[0]) | about)
    lines = [COLUMNS, *([_cell(row[column]) for column in COLUMNS] for row in rows)]
    write_atomic(output / TABLE, "".join("\t".join(line) + "\n" for line in lines))
    picture = _picture(targets[0], variants, rows)
    if picture is not None:
        write_atomic(output / SCAN, picture)
    with suppress(InputError):  # nothing to show if all targets failed
        write_report(output)


def _folds(
    folder: ResultsFolder, target: Target, predictions: Mapping[str, Sequence[str]]
) -> dict[tuple[str, int], _Fold]:
    """Read the predictions of a target by network and seed."""
    results, wanted = folder.target(target), predictions.get(target.name, ())
    return {
        (record.scores["model"], record.scores["seed"]): _read(results, record)
        for record in results.records()
        if record.id in wanted
    }


def _read(results: TargetResults, record: PredictionRecord) -> _Fold:
    scores = read_scores(results.path(record, "_scores.json"))
    pae = None
    if "_pae.json" in record.files:
        pae, _ = read_pae(results.path(record, "_pae.json"), len(scores["plddt"]))
    chains = read_structure(results.path(record, ".cif")).chains
    ca = np.concatenate([chain.positions[:, rc.atom_order["CA"]] for chain in chains])
    return _Fold(np.array(scores["plddt"], np.float64), scores["ptm"], scores["iptm"], pae, ca)


def _row(pairs: Sequence[tuple[_Fold, _Fold]], sites: np.ndarray, wild_type: Target) -> dict[str, Any]:
    """Return the scores of a mutant, from pairs of a prediction of the wild type and one of the mutant."""
    each = [_difference(old, new, sites) for old, new in pairs]
    strain = effective_strain(np.stack([old.ca for old, _ in pairs]), np.stack([new.ca for _, new in pairs]))
    found: dict[str, Any] = {name: _mean(one.get(name) for one in each) for name in _MEANS}
    found |= {
        "strain": _finite_mean(strain),
        "strain_site": _finite_mean(strain[sites]),
        "largest_strain": None,
    }
    if np.isfinite(strain).any():
        at = int(np.nanargmax(strain))
        found["largest_strain"] = f"{strain[at]:.4f} at {_residue(wild_type, at)}"
    return found | {"predictions": len(pairs)}


def _difference(old: _Fold, new: _Fold, sites: np.ndarray) -> dict[str, float | None]:
    """Return differences mutant minus wild type of two predictions."""
    found: dict[str, float | None] = {
        "plddt": float(new.plddt.mean()),
        "ptm": new.ptm,
        "dplddt": float((new.plddt - old.plddt).mean()),
        "dplddt_site": float((new.plddt - old.plddt)[sites].mean()),
    }
    for name in ("ptm", "iptm"):
        before, after = getattr(old, name), getattr(new, name)
        found[f"d{name}"] = None if before is None or after is None else after - before
    if old.pae is not None and new.pae is not None:
        change = new.pae.astype(np.float64) - old.pae
        found["dpae"] = float(change.mean())
        found["dpae_site"] = float((change[sites].mean() + change[:, sites].mean()) / 2)
    return found


def _residue(target: Target, index: int) -> str:
    """Return the name of a residue such as ``A24``, in a complex ``B:A24``."""
    for chain in target.chains:
        if index < len(chain.sequence):
            prefix = f"{chain.id}:" if target.is_complex else ""
            return f"{prefix}{chain.sequence[index]}{chain.numbers[index]}"
        index -= len(chain.sequence)
    raise IndexError(index)


def _picture(target: Target, variants: Sequence[Variant], rows: Iterable[Mapping[str, Any]]) -> bytes | None:
    """Return the picture of all single mutants; None without matplotlib or single mutants."""
    by_name = {str(row["mutations"]): row for row in rows}
    single = [one[0] for one in variants if len(one) == 1 and str(one[0]) in by_name]
    if not single or find_spec("matplotlib") is None:
        return None
    places = sorted({(one.chains, one.number, one.old, one.prefix) for one in single})
    columns = {place: k for k, place in enumerate(places)}
    letters = sorted(rc.restypes)
    panels = {}
    for label, key in (
        ("ΔpLDDT of the mutated residue", "dplddt_site"),
        ("mean ΔpLDDT", "dplddt"),
        ("effective strain of the mutated residue", "strain_site"),
    ):
        values = np.full((len(letters), len(places)), np.nan)
        for one in single:
            value = by_name[str(one)][key]
            if value is not None:
                at = columns[one.chains, one.number, one.old, one.prefix]
                values[letters.index(one.new), at] = value
        panels[label] = values
    names = [f"{prefix}{old}{number}" for _, number, old, prefix in places]
    wild = [letters.index(old) for _, _, old, _ in places]
    return scan_png(panels, names, letters, wild, title=f"Mutants of {target.name[:100]}")


def _mean(values: Iterable[float | None]) -> float | None:
    numbers = [value for value in values if value is not None]
    return fmean(numbers) if numbers else None


def _finite_mean(values: np.ndarray) -> float | None:
    known = values[np.isfinite(values)]
    return float(known.mean()) if len(known) else None


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4f}"
    return "" if value is None else str(value)
