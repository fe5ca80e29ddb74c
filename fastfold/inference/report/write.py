"""Write the report page: all results of a folder in one HTML file."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from importlib.resources import files
from pathlib import Path
from typing import Any

from fastfold._version import __version__
from fastfold.errors import InputError
from fastfold.inference.output import plots
from fastfold.inference.output.file_names import ARCHIVE
from fastfold.inference.output.score_files import is_number, map_floats, mapping_of, scored_names
from fastfold.inference.output.summary import FAILURES
from fastfold.inference.report.discover import (
    FoundPrediction,
    check_size,
    find_predictions,
    is_regular,
    leaving_out,
    numbers_of,
    read_json,
    read_table,
)
from fastfold.inference.report.encode import pack_json, pack_pae, pack_structure
from fastfold.inference.report.groups import find_designs, find_ensembles
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
from fastfold.protein import residue_constants as rc
from fastfold.protein.metrics.scores import LARGEST_OF_PAIRS, PAIR_SCORES, SCORES
from fastfold.protein.validation.ramachandran import region_map
from fastfold.utils.atomic_files import write_atomic

_MOST_RESTRAINTS = 2000
_LONGEST_LINE = 100


def restraints_of(scores: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the restraints of a scores file, cut to the page's size, None without any, or raise ValueError."""
    if (given := scores.get("restraints")) is None:
        return None
    residues = len(scores["plddt"])
    try:
        rows = [_restraint(one, residues) for one in given["restraints"][:_MOST_RESTRAINTS]]
        counts = {key: int(given[key]) for key in ("satisfied_before", "satisfied", "total", "steps")}
        paid = _number(given["confidence_paid"])
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError) as error:
        raise ValueError("its restraints have another form") from error
    found = {"confidence_paid": paid, "leave_one_out": given.get("leave_one_out") is True}
    return {**counts, **found, "restraints": rows}


def _restraint(given: Any, residues: int) -> dict[str, Any]:
    places = [int(number) for number in given["residues"]]
    if len(places) != 2 or not all(1 <= place <= residues for place in places):
        raise ValueError
    row: dict[str, Any] = {"residues": places, "holds": given["holds"] is True}
    row |= {key: str(given[key])[:_LONGEST_LINE] for key in ("line", "group")}
    row |= {key: _number(given[key]) for key in ("min", "distance_before", "distance")}
    row["max"] = None if given["max"] is None else _number(given["max"])
    if "atoms" in given:  # files of earlier versions are about CA
        row |= {"atoms": str(given["atoms"])[:_LONGEST_LINE], "pairs": int(given["pairs"])}
    if "contradicts" in given:
        row["contradicts"] = [str(line)[:_LONGEST_LINE] for line in given["contradicts"][:_MOST_RESTRAINTS]]
        row["plddt_gain_without"] = _number(given["plddt_gain_without"])
    return row


def _number(value: Any) -> float:
    """Return a finite number, or raise ValueError."""
    number = float(value)
    if not math.isfinite(number):
        raise ValueError
    return number


NAME = "report.html"  #: File name of the page

MAX_EMBEDDED = 20_000_000
"""Largest number of characters of embedded data; structures and aligned errors of the best predictions come first."""

MAX_DETAILED = 1000  #: Predictions up to which a page has the settings and the coverage of all

_ROOM = 2**20
_STRUCTURE_BYTES = 2**14
_PAE_BYTES = 2**5
_LONGEST_REASON = 1000
_MOST_FAILURES = 1000
_LARGEST_SCAN = 2**23
SCAN = "mutations.png"  #: Picture of a scan of mutants in a folder of results, which the page shows
MUTATIONS = "mutations.tsv"  #: Table of mutants in a folder of results
_OF_MUTANTS = ("dplddt", "dpae", "strain")  #: Columns of that table that the page lists
_SCRIPTS = (
    *("data.js", "charts.js", "matrix.js", "view.js", "ensemble.js", "superpose.js", "scores.js"),
    *("geometry.js", "restraints.js", "design.js", "main.js"),
)


_NOT_SHOWN = frozenset((NAME, "log.txt", "summary.tsv", INTERFACES))
"""Files of a folder of results that the page does not read; a run writes them before or after it."""


def is_stale(folder: Path) -> bool:
    """Return True if a folder of results lacks its page, or has files that are newer than it."""
    try:
        written = (folder / NAME).stat().st_mtime_ns
    except OSError:
        return True
    places = [
        folder,
        *(Path(one) for one in os.scandir(folder) if one.is_dir() and not one.name.startswith(".")),
    ]
    files = (one for place in places for one in os.scandir(place) if one.is_file())
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
    page has no 3D view and says so.

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
    interfaces: list[Row] = []
    entries = []
    is_small = len(predictions) <= MAX_DETAILED
    mutants: dict[str, dict[str, float]] = {}
    if is_regular(folder / MUTATIONS):
        lines = read_table(folder / MUTATIONS)
        mutants = {line["name"]: numbers_of(line, _OF_MUTANTS) for line in lines if line.get("name")}
    for prediction in predictions:
        with leaving_out(prediction.stem, say):
            rows = rows_of(prediction, say)
            interfaces += rows
            if where is None or any(map(where, rows)):
                detail = pack_json(_detail(prediction, folder, say, with_settings=is_small))
                row = _row(prediction, rows) | mutants.get(prediction.target, {})
                entries.append((prediction, row, detail))
    if not entries:
        nothing = (
            "expected a prediction in this folder (..._scores.json), found none; give a folder of results"
        )
        if where is not None and interfaces:
            nothing = "no pair of chains meets the condition of --where; write a weaker one"
        raise InputError(nothing, path=folder)
    if interfaces:
        write_rows(sort_rows(interfaces, SORTED_BY), folder / INTERFACES)
    page = folder / NAME
    write_atomic(page, _page(folder, entries, say, max_embedded))
    return page


def _page(
    folder: Path,
    entries: list[tuple[FoundPrediction, dict[str, Any], str]],
    say: Callable[[str], None],
    max_embedded: int,
) -> str:
    predictions = [prediction for prediction, _, _ in entries]
    rows = [row | {"detail": number} for number, (_, row, _) in enumerate(entries)]
    blobs = [detail for _, _, detail in entries]
    left = max_embedded - sum(map(len, blobs))
    # The best predictions of all targets precede the second best of any.
    for number in sorted(range(len(rows)), key=lambda k: (predictions[k].rank or 1, k)):
        if left < max_embedded // 20:  # nearly full: reading the rest would not be worth it
            rows[number]["omitted"] = True
            continue
        found = _heavy(predictions[number], say)
        size = sum(len(text) for _, text in found.values())
        if size > left:
            rows[number]["omitted"] = True
            continue
        left -= size
        for key, (layout, text) in found.items():
            rows[number][key] = layout | {"blob": len(blobs)}
            blobs.append(text)
    overlays = find_ensembles(folder, predictions, left // 4, say)
    for one in (one for ensemble in overlays for one in ensemble["overlay"]):
        one["structure"]["blob"] = len(blobs)
        blobs.append(one.pop("text"))
    designs = find_designs(folder, predictions, left // 4, say)
    for film in (design["film"] for design in designs if design["film"] is not None):
        film["blob"] = len(blobs)
        blobs.append(film.pop("text"))
    script = "(() => {\n'use strict';\n" + "\n".join(_file(name) for name in _SCRIPTS) + "\n})();\n"
    try:
        molstar, refused = load_molstar(), ""
    except ValueError as error:
        molstar, refused = None, str(error)
        say(f"the 3D view: left out of the report, {refused}")
    meta = {
        "rows": rows,
        "failures": _failures(folder),
        "scan": _scan(folder),
        "ensembles": overlays,
        "designs": designs,
        "viewer": None,
        "scores": [{**asdict(one), "key": one.key} for one in SCORES if one.shown],
        "style": {
            "bands": [band._asdict() for band in plots.BANDS],
            "chains": plots.CHAIN_COLOURS,
            "identity": plots.IDENTITY_COLOURS,
            "pae": plots.PAE_COLOURS,
            "ink": plots.INK,
            "faint": plots.FAINT,
            "fonts": list(plots.FONTS),
        },
        "atoms": list(rc.atom_types),
        "ramachandran": ["".join(map(str, column)) for column in region_map().tolist()],
        "residues": {letter: rc.restype_1to3.get(letter, "UNK") for letter in (*rc.restypes, "X")},
    }
    hashes = [script]
    if molstar is not None:
        meta["viewer"] = {"script": len(blobs), "style": len(blobs) + 1, "version": molstar.version}
        blobs += packed_viewer()
        hashes.append(molstar.script)
    # Only scripts with these hashes run, so names cannot inject one. The viewer creates functions from text.
    allowed = [*map(_hash, hashes), *(["'unsafe-eval'"] if molstar is not None else [])]
    title = f"Results in {folder.resolve().name.encode('utf-8', 'replace').decode('utf-8')}"
    about = f"FastFold {__version__}"
    if molstar is not None:
        about += f", with the viewer Mol* {molstar.version}"
    values = {
        "policy": f"default-src 'none'; script-src {' '.join(allowed)}; style-src 'unsafe-inline'; "
        "img-src data: blob:; font-src data:; base-uri 'none'; form-action 'none'",
        "title": title,
        "css": _file("page.css"),
        "package": PACKAGE,
        "refused": refused,
        "about": about,
        "licence": "" if molstar is None else molstar.licence,
        # Without characters that could end a script element or begin a comment.
        "meta": json.dumps(meta, allow_nan=False).translate({ord(c): f"\\u{ord(c):04x}" for c in "&<>"}),
        "script": script,
        "blobs": "\n".join(
            f'<script type="application/octet-stream" id="blob-{number}">{text}</script>'
            for number, text in enumerate(blobs)
        ),
    }
    plain = {"css", "meta", "script", "blobs"}  # trusted, or unable to hold markup

    def fill(field: re.Match[str]) -> str:
        value = values[field[1]]
        return value if field[1] in plain else html.escape(value, quote=True)

    return re.sub(r"\{\{(\w+)\}\}", fill, _file("page.html"))


def _file(name: str) -> str:
    return (files("fastfold.inference.report") / "page" / name).read_text("utf-8")


def _hash(script: str) -> str:
    digest = hashlib.sha256(script.encode("utf-8")).digest()
    return f"'sha256-{base64.b64encode(digest).decode('ascii')}'"


_OF_BEST_PAIR = tuple(one.name for one in PAIR_SCORES if one.shown in ("list", "matrix"))


def _row(prediction: FoundPrediction, pairs: Sequence[Row]) -> dict[str, Any]:
    scores = prediction.scores
    numbers = {key: scores.get(key) for key in ("mean_plddt", "ptm", "iptm")}
    interfaces, given = (mapping_of(scores, key) for key in ("interfaces", "given_structure"))
    numbers |= {key: interfaces.get(key) for key in (*LARGEST_OF_PAIRS, "clashes")}
    numbers |= {"composite": given.get("composite"), "given_tm": given.get("tm_score")}
    numbers |= prediction.listed
    sample = mapping_of(scores, "sample")
    is_sample = {"method", "number"} <= set(sample)
    best = sort_rows(pairs, SORTED_BY)[:1]  # none of a single chain
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


def _detail(
    prediction: FoundPrediction, folder: Path, say: Callable[[str], None], *, with_settings: bool
) -> dict[str, Any]:
    scores = prediction.scores
    archive = folder / f"{prediction.target}{ARCHIVE}"
    paths = [*prediction.files.values(), *([archive] if is_regular(archive) else [])]
    found = {
        "name": scores["name"],
        "sequences": scores["sequences"],
        "ranges": scores.get("residue_ranges"),
        "chain_ids": list(scored_names(scores).chain_ids),
        "labels": scores.get("residue_labels"),
        "plddt": [round(float(value), 1) for value in scores["plddt"]],
        "interfaces": _finite(scores.get("interfaces")),
        **_relaxation(prediction),
        "geometry": _geometry(scores),
        "templates": _finite(scores.get("templates")),
        "restraints": None,
        "reference": _reference(prediction, say),
        "files": sorted(path.relative_to(folder).as_posix() for path in paths),
        "config": None,
        "coverage": None,
    }
    with leaving_out(f"{prediction.stem}: restraints", say):
        found["restraints"] = restraints_of(scores)
    for key in ("config", "coverage") if with_settings else ():
        if (path := prediction.files.get(f"_{key}.json")) is None:
            continue
        with leaving_out(path.name, say):
            value = read_json(path)
            if not isinstance(value, dict) or (key == "coverage" and not _is_coverage(value, scores)):
                raise ValueError("its content does not match its name")
            pack_json(value := _finite(value))  # an error here leaves out only this file
            found[key] = value
    return found


def _reference(prediction: FoundPrediction, say: Callable[[str], None]) -> dict[str, Any] | None:
    folder = next(iter(prediction.files.values())).parent
    path = folder / f"{prediction.target}_reference.json"
    if not is_regular(path):
        return None
    with leaving_out(path.name, say):
        value = read_json(path)
        own = value.get(prediction.stem)
        if isinstance(own, dict):
            names = ("tm_score", "lddt_ca", "gdt_ts", "dockq", "lddt_interface")
            numbers = {key: number for key in names if is_number(number := own.get(key))}
            chains = " ".join(f"{ours}:{theirs}" for ours, theirs in mapping_of(own, "chain_mapping").items())
            return {"file": str(value.get("reference"))[:200], "chains": chains[:200], **numbers}
    return None


def _geometry(scores: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the check of a structure's geometry from its scores; None if it is missing or does not fit them."""
    geometry = _finite(mapping_of(scores, "geometry"))
    lists = [geometry.get(key) for key in ("phi", "psi", "regions")]
    problems = geometry.get("problems")
    if not (isinstance(problems, list) and all(isinstance(one, str) for one in problems)):
        return None
    if not all(isinstance(one, list) and len(one) == len(scores["plddt"]) for one in lists):
        return None
    if not all(x is None or is_number(x) for one in lists for x in one):
        return None
    figures = {key: x for key, x in geometry.items() if is_number(x)}
    return {"figures": figures, "problems": [one[:_LONGEST_REASON] for one in problems[:20]]} | dict(
        zip(("phi", "psi", "regions"), lists, strict=True)
    )


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


def _scan(folder: Path) -> str | None:
    """Return the picture of a scan of mutants as a data URI, if the folder has one of moderate size."""
    path = folder / SCAN
    if is_regular(path):
        with suppress(OSError, ValueError):
            data = check_size(path, _LARGEST_SCAN).read_bytes()
            if data.startswith(b"\x89PNG\r\n\x1a\n"):
                return f"data:image/png;base64,{base64.b64encode(data).decode('ascii')}"
    return None


def _relaxation(prediction: FoundPrediction) -> dict[str, Any]:
    """Return if the page's structure is relaxed according to its record, and the reason if not."""
    record = mapping_of(prediction.scores, "relaxation")
    outcome = record.get("relaxed")
    is_minimized = prediction.has_relaxed_structure
    not_relaxed = None
    if outcome is False:
        not_relaxed = str(record.get("reason") or "no reason is recorded")[:_LONGEST_REASON]
    elif is_minimized and outcome is not True:
        not_relaxed = "a record of its relaxation is missing from the scores file"
    return {"relaxed": is_minimized and outcome is True, "not_relaxed": not_relaxed}


def _is_coverage(value: Mapping[str, Any], scores: Mapping[str, Any]) -> bool:
    lengths = [len(sequence) for sequence in scores["sequences"]]
    depth, edges = value.get("depth_by_identity"), value.get("identity_edges")
    return (
        value.get("chain_lengths") == lengths
        and isinstance(edges, list)
        and isinstance(depth, list)
        and len(depth) == len(edges) - 1
        and all(isinstance(one, list) and len(one) == sum(lengths) for one in depth)
        and all(is_number(number) for number in (*edges, *(x for one in depth for x in one)))
        and isinstance(value.get("rows"), list)
    )


def _finite(value: Any) -> Any:
    """Replace floats that are not finite with None, because JSON cannot represent them."""
    return map_floats(value, lambda number: number if is_number(number) else None)


def _heavy(prediction: FoundPrediction, say: Callable[[str], None]) -> dict[str, tuple[dict[str, Any], str]]:
    found = {}
    sequences, residues = prediction.scores["sequences"], len(prediction.scores["plddt"])
    if (path := prediction.structure) is not None:
        with leaving_out(path.name, say):
            check_size(path, _ROOM + residues * _STRUCTURE_BYTES)
            found["structure"] = pack_structure(path, sequences)
    if (path := prediction.files.get("_pae.json")) is not None:
        with leaving_out(path.name, say):
            check_size(path, _ROOM + residues**2 * _PAE_BYTES)
            found["pae"] = pack_pae(path, residues)
    return found
