"""Report of a run: its numbers and curves as a page of Markdown, and its curves as HTML.

Reads ``metrics.jsonl`` (:class:`~fastfold.training.logging.loggers.JsonLinesLogger`), ``validation.jsonl`` (one
validation per line, with the scores of each chain and of its residues), ``quarantine.tsv`` and ``config.yaml``. Each
may be missing.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fastfold.errors import InputError
from fastfold.training.logging.loggers import read_json_lines
from fastfold.training.report.curves import Chart, curves_page
from fastfold.training.report.plots import Curve, calibrate, calibration_png, curves_png
from fastfold.training.validation import DEEP_ROWS, DEPTHS
from fastfold.utils.atomic_files import prepare_output_directory, write_atomic

_PARTS = {
    "structure_module": "structure module",
    "fape": "FAPE",
    "sidechain_fape": "FAPE of side chains",
    "chain_center_of_mass": "centers of mass of chains",
    "smooth_lddt": "smooth lDDT",
    "ca_trace": "CA trace",
    "distogram": "distogram",
    "masked_msa": "masked MSA",
    "predicted_lddt": "predicted lDDT",
    "predicted_aligned_error": "predicted aligned error",
    "experimentally_resolved": "experimentally resolved",
}
_LISTED = 20  # maximum number of quarantined samples and worst chains to list

_SCORE_CURVES = {
    "lddt_ca": "lDDT-CA in training",
    "valid_lddt_ca": "lDDT-CA in validation",
    "valid_tm_score": "TM-score in validation",
    "valid_plddt": "predicted lDDT in validation",
}
_CROSS_ENTROPIES = {
    "valid_distogram_ce_3_6": "3 to 5 residues apart",
    "valid_distogram_ce_6_12": "6 to 11",
    "valid_distogram_ce_12_24": "12 to 23",
    "valid_distogram_ce_24_up": "24 and more",
}
_PRECISIONS = {
    "valid_precision_l5": "best L/5",
    "valid_precision_l2": "best L/2",
    "valid_precision_l5_deep": f"best L/5, alignments of {DEEP_ROWS} rows and more",
}
_NORMS = {"gradient_norm": "of a sample, before clipping", "mean_gradient_norm": "of a step, after clipping"}
# File, heading, vertical axis, True for a logarithmic one, and the curves' metrics with their names in the legend.
_FIGURES: tuple[tuple[str, str, str, bool, dict[str, str]], ...] = (
    ("loss.png", "Loss", "loss of a step", True, {"loss": "loss"}),
    ("parts.png", "Parts of the loss", "unweighted loss", True, _PARTS),
    ("lddt.png", "lDDT-CA and TM-score", "score, 0 to 1", False, _SCORE_CURVES),
    ("distogram.png", "Distogram in validation", "cross-entropy in nats", False, _CROSS_ENTROPIES),
    ("contacts.png", "Contacts in validation", "precision", False, _PRECISIONS),
    ("gradient.png", "Gradient norm", "norm", True, _NORMS),
    ("lr.png", "Learning rate", "learning rate", False, {"lr": "learning rate"}),
)


def write_report(run_dir: str | os.PathLike[str]) -> Path:
    """Write ``report/report.md``, its plots and ``report.html`` into a run's folder, and return the first path.

    Files are written atomically, the page last, so that a report never refers to a missing plot. The run may still be
    in progress.

    Raises:
        InputError: The folder is not that of a run, or a file in it is damaged.
        OutputError: The report cannot be written.
    """
    run_dir = Path(run_dir)
    files = ("config.yaml", "metrics.jsonl", "validation.jsonl")
    known = [name for name in files if (run_dir / name).is_file()]
    if not known:
        problem = "expected the folder of a training run with config.yaml or metrics.jsonl, found neither"
        raise InputError(problem, path=run_dir)
    metrics = read_json_lines(run_dir / "metrics.jsonl") if "metrics.jsonl" in known else []
    validations = read_json_lines(run_dir / "validation.jsonl") if "validation.jsonl" in known else []
    quarantined = _quarantined(run_dir / "quarantine.tsv")
    folder = prepare_output_directory(run_dir / "report")
    # First, so that a damaged file is reported before any plot is drawn.
    validation = _validation(validations, run_dir, folder)
    text = [f"# Training run {_plain(run_dir.resolve().name)}", ""]
    text += _summary(metrics, quarantined)
    marks = [entry["step"] for entry in metrics if "event" in entry]
    if marks:
        text += ["Dotted lines mark the steps of the [events](#events).", ""]
    charts: list[Chart] = []
    for file, heading, ylabel, logarithmic, names in _FIGURES:
        curves = {label: curve(metrics, name) for name, label in names.items()}
        curves = {label: points for label, points in curves.items() if len(points[0])}
        if curves:
            charts.append(Chart(heading, ylabel, logarithmic, curves))
            panels = file == "parts.png"
            picture = curves_png(curves, ylabel=ylabel, logarithmic=logarithmic, panels=panels, marks=marks)
            write_atomic(folder / file, picture)
            text += [f"## {heading}", "", f"![{heading}]({file})", ""]
        else:
            (folder / file).unlink(missing_ok=True)
    text += validation
    text += _troubles(metrics, quarantined)
    if "config.yaml" in known:
        config = (run_dir / "config.yaml").read_text(encoding="utf-8", errors="replace")
        text += ["## Configuration", "", *(f"    {line}" for line in config.splitlines()), ""]
    curves_file = folder / "report.html"
    if charts:
        title = f"Training run {run_dir.resolve().name}".encode("utf-8", "replace").decode("utf-8")
        write_atomic(curves_file, curves_page(title, charts, marks))
    else:
        curves_file.unlink(missing_ok=True)
    page = folder / "report.md"
    write_atomic(page, "\n".join(text))
    return page


def curve(metrics: Iterable[Mapping[str, Any]], name: str) -> Curve:
    """Return steps and finite values of one metric."""
    points = [(entry["step"], entry[name]) for entry in metrics if isinstance(entry.get(name), (int, float))]
    steps = np.asarray([step for step, _ in points], np.int64)
    values = np.asarray([value for _, value in points], np.float64)
    finite = np.isfinite(values)
    return steps[finite], values[finite]


def _summary(metrics: Sequence[Mapping[str, Any]], quarantined: Sequence[tuple[str, str]]) -> list[str]:
    def last(name: str, form: str, factor: float = 1.0) -> str | None:
        values = curve(metrics, name)[1]
        return format(float(values[-1]) * factor, form) if len(values) else None

    steps, valid = curve(metrics, "valid_lddt_ca")
    best = f"{valid.max():.3f} at step {steps[valid.argmax()]:,}" if len(valid) else None
    rows: list[tuple[str, str | None]] = [
        ("Steps", f"{metrics[-1]['step']:,}" if metrics else None),
        ("Samples seen", last("samples", ",.0f")),
        ("Hours of training", last("seconds", ".2f", 1 / 3600)),
        ("Residues per second", _per_second(metrics, "residues", ",.0f")),
        ("TFLOP/s, all devices", _mean(metrics, "tflops_per_s")),
        ("TFLOP/s of a device", _mean(metrics, "tflops_per_s_device")),
        ("Time spent waiting for the loader", _per_second(metrics, "waited_s", ".2%")),
        ("Loss at the end", last("loss", ".4g")),
        ("Learning rate at the end", last("lr", ".3g")),
        ("lDDT-CA in validation, at the end", last("valid_lddt_ca", ".3f")),
        ("lDDT-CA in validation, best", best),
        ("TM-score in validation, at the end", last("valid_tm_score", ".3f")),
        ("Skipped steps", last("skipped", ",.0f")),
        ("Quarantined samples", f"{len(quarantined):,}"),
    ]
    if not metrics:
        rows.insert(0, ("Numbers", "none: nothing was logged, or `logger.jsonl` was off"))
    return [*_table(("", ""), [row for row in rows if row[1] is not None]), ""]


def _per_second(metrics: Sequence[Mapping[str, Any]], name: str, form: str) -> str | None:
    steps, seconds = curve(metrics, "seconds")
    values = curve(metrics, name)[1]
    if not len(values) or not len(steps) or not steps[-1] or not seconds[-1]:
        return None
    return format(values.mean() / (seconds[-1] / steps[-1]), form)


def _mean(metrics: Sequence[Mapping[str, Any]], name: str) -> str | None:
    values = curve(metrics, name)[1]
    return f"{values.mean():.3g}" if len(values) else None


def _validation(validations: Sequence[Mapping[str, Any]], run_dir: Path, folder: Path) -> list[str]:
    """Return the section of the last validation: its chains, and the calibration."""
    if not validations:
        (folder / "calibration.png").unlink(missing_ok=True)
        return []
    try:
        last = validations[-1]
        chains = sorted(last["chains"], key=lambda chain: chain["lddt_ca"])
        predicted, true = (
            np.concatenate([np.array(c[key], np.float64) for c in chains]) for key in ("predicted", "true")
        )
        # Numbers that are not finite are null, and null becomes NaN.
        calibration = calibrate(predicted[~np.isnan(predicted)], true[~np.isnan(predicted)])
        scores = {
            name: np.array([c[key] for c in chains if c[key] is not None]) for name, key in _SCORES.items()
        }
        by_depth = _by_depth(chains)
        worst = [
            (
                _plain(str(c["id"])),
                str(c["residues"]),
                *("" if c[key] is None else f"{c[key]:.3f}" for key in _SCORES.values()),
            )
            for c in chains[:_LISTED]
        ]
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(
            f"the last validation is damaged ({error}); delete its line",
            path=run_dir / "validation.jsonl",
            line=len(validations),
        ) from error
    title = f"validation at step {last['step']}"
    write_atomic(folder / "calibration.png", calibration_png(calibration, title=title))
    spread = [
        (name, *(f"{f(x):.3f}" if len(x) else "" for f in (np.mean, np.median, np.min, np.max)))
        for name, x in scores.items()
    ]
    return [
        f"## Validation at step {last['step']:,}",
        "",
        f"{len(chains)} chains, with the averaged weights.",
        "",
        *_table(("", "mean", "median", "least", "most"), spread),
        "",
        *by_depth,
        "![Calibration](calibration.png)",
        "",
        f"Predicted against true lDDT-CA of {calibration.residues:,} residues: correlation {calibration.pearson:.3f}, "
        f"mean absolute calibration error {calibration.error:.3f}, bias {calibration.bias:+.3f} (above 0: the network "
        "is overconfident).",
        "",
        f"The {len(worst)} chains with the lowest lDDT-CA:",
        "",
        *_table(("chain", "residues", *_SCORES), worst),
        "",
    ]


_SCORES = {"lDDT-CA": "lddt_ca", "TM-score": "tm_score", "predicted lDDT": "plddt"}

_DEPTHS = {
    "deep": f"alignments of {DEEP_ROWS} rows and more",
    "msa": "with an alignment",
    "single": "the sequence alone",
}
_DISTOGRAM = {
    "3 to 5": "distogram_ce_3_6",
    "6 to 11": "distogram_ce_6_12",
    "12 to 23": "distogram_ce_12_24",
    "24 and more": "distogram_ce_24_up",
    "L/5": "precision_l5",
    "L/2": "precision_l2",
}


def _by_depth(chains: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a validation's means by the depth of the chains' alignments; empty without distograms."""
    columns = {"lDDT-CA": "lddt_ca", **_DISTOGRAM}
    if not any(key in chain for chain in chains for key in _DISTOGRAM.values()):
        return []
    groups = {"all": list(chains)}
    for name, text in _DEPTHS.items():
        groups[text] = [c for c in chains if c.get("depth") is not None and DEPTHS[name](c["depth"])]
    rows = []
    for text, members in groups.items():
        values = ([c[key] for c in members if c.get(key) is not None] for key in columns.values())
        cells = (f"{np.mean(x):.3f}" if x else "" for x in values)
        if members:
            rows.append((text, str(len(members)), *cells))
    return [
        *_table(("", "chains", *columns), rows),
        "",
        "By separation in the sequence: cross-entropy of the distogram, in nats. L/5 and L/2: share of contacts among "
        "the L/5 or L/2 pairs of the highest probability, 12 residues and more apart, in chains that have at least "
        "five such contacts.",
        "",
    ]


def _troubles(metrics: Sequence[Mapping[str, Any]], quarantined: Sequence[tuple[str, str]]) -> list[str]:
    events = [(f"{e['step']:,}", _plain(str(e["event"]))) for e in metrics if "event" in e]
    text = []
    if events:
        text += ["## Events", "", *_table(("step", "what happened"), events), ""]
    if quarantined:
        named = [(_plain(name), _plain(reason)) for name, reason in quarantined[:_LISTED]]
        more = len(quarantined) - len(named)
        text += ["## Quarantined samples", "", *_table(("sample", "reason"), named), ""]
        text += [f"{more:,} more are listed in `quarantine.tsv`.", ""] if more else []
    return text


def _quarantined(path: Path) -> list[tuple[str, str]]:
    """Read names and reasons, separated by a tab."""
    text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    rows = (line.partition("\t") for line in text.splitlines() if line)
    return [(name, reason) for name, _, reason in rows]


def _table(header: Sequence[str], rows: Iterable[Sequence[str | None]]) -> list[str]:
    return [f"| {' | '.join(map(str, row))} |" for row in (header, ["---"] * len(header), *rows)]


def _plain(text: str) -> str:
    """Return a text as one line with Markdown escaped, because names of samples are untrusted."""
    text = " ".join(text.split())
    return "".join(f"\\{c}" if c in "\\`*_[]<>|#!&~$" else c for c in text)
