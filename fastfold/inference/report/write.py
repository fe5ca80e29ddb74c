"""Write the report page: all results of a folder in one HTML file."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fastfold._version import __version__
from fastfold.errors import InputError
from fastfold.inference.output import plots
from fastfold.inference.output.score_files import is_number, mapping_of
from fastfold.inference.output.summary import FAILURES
from fastfold.inference.report.about import RunFacts
from fastfold.inference.report.details import detail_of
from fastfold.inference.report.discover import SCORES as SCORES_ENDING
from fastfold.inference.report.discover import (
    FoundPrediction,
    check_size,
    find_predictions,
    is_regular,
    leaving_out,
)
from fastfold.inference.report.encode import pack, pack_json, pack_pae, pack_structure
from fastfold.inference.report.groups import find_designs, find_ensembles
from fastfold.inference.report.html_page import fill_template, json_element, page_file, script_of, source_hash
from fastfold.inference.report.interfaces import (
    INTERFACES,
    SORTED_BY,
    Condition,
    Row,
    rows_of,
    sort_rows,
    write_rows,
)
from fastfold.inference.report.molstar import PACKAGE, load_molstar, packed_viewer
from fastfold.inference.report.products import TABLES, design_statistics, product_columns
from fastfold.inference.report.relaxations import relaxations_page
from fastfold.protein import residue_constants as rc
from fastfold.protein.metrics.scores import LARGEST_OF_PAIRS, PAIR_SCORES, SCORES, Score
from fastfold.protein.validation.ramachandran import region_map
from fastfold.utils.atomic_files import write_atomic

NAME = "report.html"  #: File name of the page

MAX_EMBEDDED = 20_000_000
"""Largest number of characters of embedded data; structures and aligned errors of the best predictions come first."""

MAX_DETAILED = 1000  #: Predictions up to which a page has the settings and the coverage of all

_ROOM = 2**20
_STRUCTURE_BYTES = 2**14
_PAE_BYTES = 2**5
_LONGEST_REASON = 1000
_MOST_FAILURES = 1000
_SCRIPTS = (
    *("unpack.js", "data.js", "dom.js"),
    *("charts/scale.js", "charts/matrix.js", "charts/pae.js", "charts/strip.js"),
    *("view.js", "charts/superpose.js", "charts/secondary.js", "charts/sequence.js", "charts/geometry.js"),
    *(
        "details.js",
        "products/restraints.js",
        "products/ensemble.js",
        "products/film.js",
        "products/design.js",
        "products/design_table.js",
        "products/scan.js",
    ),
    *("filter.js", "list.js", "state.js", "chosen.js", "address.js", "main.js"),
)


_NOT_SHOWN = frozenset((NAME, "log.txt", "summary.tsv", INTERFACES))
"""Files of a folder of results that the page does not read; a run writes them before or after it."""


def is_stale(folder: Path) -> bool:
    """Return True if a folder of results lacks its page, or has files that are newer than it."""
    try:
        written = (folder / NAME).stat().st_mtime_ns
    except OSError:
        return True
    shown = (one for one in os.scandir(folder) if one.is_dir() and not one.name.startswith("."))
    files = (one for place in (folder, *map(Path, shown)) for one in os.scandir(place) if one.is_file())
    return any(one.stat().st_mtime_ns > written for one in files if one.name not in _NOT_SHOWN)


def write_report(
    directory: str | os.PathLike[str],
    *,
    say: Callable[[str], None] = lambda line: None,
    where: Condition | None = None,
    max_embedded: int = MAX_EMBEDDED,
) -> Path:
    """Write ``report.html`` for a folder of results, and ``interfaces.csv`` for complexes; return the page.

    The page uses no network and loads nothing, so untrusted content cannot either. Its 3D view is Mol*, from the
    package ``molstar-cli``; without it, the page says which package to install. If its files have unexpected sums, the
    page has no 3D view and says so. A folder of ``fastfold relax`` gets a table of its structures.

    Args:
        directory: The folder.
        say: Called with a line about each file that is left out.
        where: Condition on lines of the table of interfaces; predictions without such a line are left out.
        max_embedded: Largest number of characters of embedded data. Scores, pLDDT, coverage and settings of all
            predictions are always embedded, structures and aligned errors while there is room.

    Raises:
        InputError: The folder is missing, cannot be read, or contains no prediction.
        OutputError: The page cannot be written.

    Example:
        >>> import fastfold
        >>> from fastfold.inference.report import write_report
        >>> files = fastfold.predict("MTYKLILNGK", "mini", num_recycles=0).save("results", rank=1)
        >>> write_report("results").name
        'report.html'
    """
    folder = Path(directory)
    predictions = find_predictions(folder, say)
    if not predictions and (table := relaxations_page(folder, say)):
        write_atomic(folder / NAME, table)
        return folder / NAME
    interfaces: list[Row] = []
    entries = []
    is_small = len(predictions) <= MAX_DETAILED
    products = product_columns(folder)
    facts = RunFacts()
    for prediction in predictions:
        with leaving_out(prediction.stem, say):
            rows = rows_of(prediction, say)
            interfaces += rows
            if where is None or any(map(where, rows)):
                detail = detail_of(prediction, folder, say, with_settings=is_small)
                row = _row(prediction, rows) | products.get(prediction.target, {})
                entries.append((prediction, row, pack_json(detail)))
                facts.add(prediction.target, prediction.scores, detail["config"])
    if not entries:
        nothing = (
            "expected a prediction in this folder (..._scores.json), found none; give a folder of results"
        )
        if where is not None and interfaces:
            nothing = "no pair of chains meets the condition of `where`; write a weaker one"
        raise InputError(nothing, path=folder)
    if interfaces:
        write_rows(sort_rows(interfaces, SORTED_BY), folder / INTERFACES)
    page = folder / NAME
    write_atomic(page, _page(folder, entries, facts, say, max_embedded))
    return page


def _page(
    folder: Path,
    entries: list[tuple[FoundPrediction, dict[str, Any], str]],
    facts: RunFacts,
    say: Callable[[str], None],
    max_embedded: int,
) -> str:
    predictions = [prediction for prediction, _, _ in entries]
    rows = [row | {"detail": number} for number, (_, row, _) in enumerate(entries)]
    blobs = [detail for _, _, detail in entries]
    left = _embed_arrays(predictions, rows, blobs, say, max_embedded)
    overlays = find_ensembles(folder, predictions, left // 4, say)
    for one in (one for ensemble in overlays for one in ensemble["overlay"]):
        one["structure"]["blob"] = len(blobs)
        blobs.append(one.pop("text"))
    designs = find_designs(folder, predictions, left // 4, say)
    for film in (design["film"] for design in designs if design["film"] is not None):
        film["blob"] = len(blobs)
        blobs.append(film.pop("text"))
    program, loader = (script_of(*map(page_file, names)) for names in (_SCRIPTS, ("unpack.js", "loader.js")))
    try:
        molstar, refused = load_molstar(), ""
    except ValueError as error:
        molstar, refused = None, str(error)
        say(f"the 3D view: left out of the report, {refused}")
    failures = _failures(folder)
    meta = {
        "rows": rows,
        "failures": failures,
        "tables": [name for name in TABLES if is_regular(folder / name)],
        "ensembles": overlays,
        "designs": designs,
        "statistics": design_statistics(folder),
        "viewer": None,
        **_constants(),
    }
    place = str(len(blobs))
    blobs.append(pack(program.encode("utf-8")))
    # Only scripts with these hashes run, so names cannot inject one. The viewer creates functions from text.
    allowed = [source_hash(loader), source_hash(program)]
    about, license = f"FastFold {__version__}", ""
    if molstar is not None:
        meta["viewer"] = {"script": len(blobs), "style": len(blobs) + 1, "version": molstar.version}
        blobs += packed_viewer()
        allowed += [source_hash(molstar.script), "'unsafe-eval'"]
        about, license = f"{about}, with the viewer Mol* {molstar.version}", molstar.license
    written = max(os.stat(one.files[SCORES_ENDING]).st_mtime for one in predictions)
    values = {
        "policy": f"default-src 'none'; script-src {' '.join(allowed)}; style-src 'unsafe-inline'; "
        "img-src data: blob:; font-src data:; base-uri 'none'; form-action 'none'",
        "title": f"Results in {folder.resolve().name.encode('utf-8', 'replace').decode('utf-8')}",
        "run": " · ".join([*facts.lines(len(failures)), time.strftime("%d %B %Y", time.gmtime(written))]),
        "css": page_file("theme.css") + page_file("page.css"),
        "package": PACKAGE,
        "refused": refused,
        "about": about,
        "licence": license,
        "meta": json_element(meta),
        "loader": loader,
        "program": place,
        "blobs": "\n".join(
            f'<script type="application/octet-stream" id="blob-{number}">{text}</script>'
            for number, text in enumerate(blobs)
        ),
    }
    trusted = ("css", "meta", "loader", "blobs")  # or unable to hold markup
    return fill_template(page_file("page.html"), values, plain=trusted)


def _embed_arrays(
    predictions: Sequence[FoundPrediction],
    rows: Sequence[dict[str, Any]],
    blobs: list[str],
    say: Callable[[str], None],
    max_embedded: int,
) -> int:
    """Add structures and aligned errors to ``blobs`` and their places to ``rows``; return the letters left."""
    left = max_embedded - sum(map(len, blobs))
    # The best predictions of all targets precede the second best of any.
    for number in sorted(range(len(rows)), key=lambda k: (predictions[k].rank or 1, k)):
        # Nearly full: reading the rest would not be worth it.
        arrays = _heavy(predictions[number], say) if left >= max_embedded // 20 else None
        size = 0 if arrays is None else sum(len(text) for _, text in arrays.values())
        if arrays is None or size > left:
            rows[number]["omitted"] = True
            continue
        left -= size
        for key, (layout, text) in arrays.items():
            rows[number][key] = layout | {"blob": len(blobs)}
            blobs.append(text)
    return left


def _constants() -> dict[str, Any]:
    """Return the parts of the page's data that are equal for all folders."""
    return {
        "scores": [_shown_score(one) for one in SCORES if one.shown],
        "style": {
            "bands": [band._asdict() for band in plots.BANDS],
            "chains": plots.CHAIN_COLORS,
            "identity": plots.IDENTITY_COLORS,
            "pae": plots.PAE_COLORS,
        },
        "atoms": list(rc.atom_types),
        "ramachandran": ["".join(map(str, column)) for column in region_map().tolist()],
        "residues": {letter: rc.restype_1to3.get(letter, "UNK") for letter in (*rc.restypes, "X")},
    }


def _shown_score(one: Score) -> dict[str, Any]:
    """Return the entries of a score's row that the page reads."""
    row = {"name": one.name, "key": one.key, "label": one.label, "covers": one.covers, "digits": one.digits}
    row |= {"better": one.better, "meaning": one.meaning, "shown": one.shown, "is_share": one.is_share}
    return row | {"scale": None if one.scale is None else asdict(one.scale)}


_OF_BEST_PAIR = tuple(one.name for one in PAIR_SCORES if one.shown in ("list", "matrix"))


def _row(prediction: FoundPrediction, pairs: Sequence[Row]) -> dict[str, Any]:
    scores = prediction.scores
    numbers = {key: scores.get(key) for key in ("mean_plddt", "ptm", "iptm")}
    interfaces, compared = (mapping_of(scores, key) for key in ("interfaces", "given_structure"))
    numbers |= {key: interfaces.get(key) for key in (*LARGEST_OF_PAIRS, "clashes")}
    numbers |= {"composite": compared.get("composite"), "given_tm": compared.get("tm_score")}
    numbers |= prediction.listed
    sample = mapping_of(scores, "sample")
    is_sample = {"method", "number"} <= set(sample)
    # Chains within a partner, such as a bait of several chains, say nothing about the other one.
    between = [one for one in pairs if one["partner_1"] != one["partner_2"]]
    best = sort_rows(between or pairs, SORTED_BY)[:1]  # none of a single chain
    pair = {key: one[key] for one in best for key in ("partner_1", "partner_2", *_OF_BEST_PAIR)}
    return {
        "target": prediction.target,
        "name": scores["name"],
        "model": scores["model"],
        "seed": scores["seed"],
        **({"sample": f"{sample['method']} {sample['number']}"[:40]} if is_sample else {}),
        "rank": prediction.rank,
        "length": len(scores["plddt"]),
        **{key: round(x, 4) if isinstance(x, float) else x for key, x in pair.items() if x is not None},
    } | {key: value for key, value in numbers.items() if is_number(value)}


def _failures(folder: Path) -> list[list[str]]:
    path = folder / FAILURES
    try:
        lines = check_size(path).read_text("utf-8").splitlines() if path.is_file() else []
    except (OSError, ValueError):
        return []
    return [
        [text[:_LONGEST_REASON] for text in line.partition("\t")[::2]]
        for line in lines[1 : 1 + _MOST_FAILURES]
    ]


def _heavy(prediction: FoundPrediction, say: Callable[[str], None]) -> dict[str, tuple[dict[str, Any], str]]:
    arrays = {}
    sequences, residues = prediction.scores["sequences"], len(prediction.scores["plddt"])
    if (path := prediction.structure) is not None:
        with leaving_out(path.name, say):
            check_size(path, _ROOM + residues * _STRUCTURE_BYTES)
            arrays["structure"] = pack_structure(path, sequences)
    if (path := prediction.files.get("_pae.json")) is not None:
        with leaving_out(path.name, say):
            check_size(path, _ROOM + residues**2 * _PAE_BYTES)
            arrays["pae"] = pack_pae(path, residues)
    return arrays
