"""Page of a folder of ``fastfold relax``: a table of its structures before and after, without a script."""

from __future__ import annotations

import html
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

from fastfold._version import __version__
from fastfold.inference.output.score_files import is_number, mapping_of
from fastfold.inference.report.discover import is_regular, leaving_out, read_json
from fastfold.inference.report.html_page import fill_template, page_file, source_hash

ENDING = "_relax.json"  #: Ending of the record of a relaxation
_LONGEST = 1000
_STRUCTURES = (".cif", ".pdb")
_HEAD = (
    "structure",
    "result",
    "energy (kJ/mol)",
    "moved (Å)",
    "violating residues",
    "Ramachandran favoured (%)",
    "outliers (%)",
    "overlaps",
)


def relaxations_page(folder: Path, say: Callable[[str], None]) -> str:
    """Return the page of the relaxations in a folder, as HTML; empty without any.

    ``say`` gets a line about each record that is left out. The page loads nothing and runs no script.
    """
    rows, relaxed = [], 0
    for path in sorted(folder.glob(f"*{ENDING}")):
        with leaving_out(path.name, say):
            record = read_json(path) if is_regular(path) else None
            if not isinstance(record, dict) or not isinstance(record.get("relaxed"), bool):
                raise ValueError("expected a record of a relaxation")
            rows.append(_row(folder, path.name.removesuffix(ENDING), record))
            relaxed += record["relaxed"]
    if not rows:
        return ""
    style = page_file("theme.css") + page_file("relaxations.css")
    values = {
        "policy": f"default-src 'none'; style-src {source_hash(style)}; base-uri 'none'; form-action 'none'",
        "css": style,
        "title": f"Relaxed structures in {folder.resolve().name.encode('utf-8', 'replace').decode('utf-8')}",
        "count": f"{relaxed} of {len(rows)} relaxed, in the Amber force field",
        "head": "".join(f'<th scope="col"{_text(name)}>{name}</th>' for name in _HEAD),
        "rows": "\n".join(rows),
        "about": f"FastFold {__version__}",
    }
    return fill_template(page_file("relaxations.html"), values, plain=("css", "head", "rows"))


def _text(name: str) -> str:
    return ' class="text"' if name in _HEAD[:2] else ""


def _row(folder: Path, stem: str, record: Mapping[str, Any]) -> str:
    links = [
        f'<a href="{html.escape(quote(name))}">{ending[1:]}</a>'
        for ending in _STRUCTURES
        if is_regular(folder / (name := f"{stem}_relaxed{ending}"))
    ]
    before, after = (mapping_of(record, key) for key in ("geometry_before", "geometry"))
    is_relaxed = record["relaxed"]
    reason = "" if is_relaxed else html.escape(str(record.get("reason") or "")[:_LONGEST])
    pill = (
        f'<span class="pill {"good" if is_relaxed else "poor"}">{"" if is_relaxed else "not "}relaxed</span>'
    )
    violating = record.get("violating_residues")
    number = len(violating) if isinstance(violating, list) else None
    cells = [
        _change(record.get("energy_before_kj_per_mol"), record.get("energy_after_kj_per_mol"), ",.0f"),
        _number(record.get("heavy_atom_rmsd_angstrom"), ".2f"),
        _change(record.get("violating_residues_before"), number, ".0f"),
        *(
            _change(before.get(key), after.get(key), ".1f", scale=100)
            for key in ("ramachandran_favoured", "ramachandran_outliers")
        ),
        _change(before.get("overlaps"), after.get("overlaps"), ".0f"),
    ]
    return (
        f'<tr><th scope="row" class="text">{html.escape(stem)} {" ".join(links)}</th>'
        f'<td class="text">{pill} {reason}</td>{"".join(f"<td>{cell}</td>" for cell in cells)}</tr>'
    )


def _change(before: Any, after: Any, form: str, *, scale: float = 1) -> str:
    return f"{_number(before, form, scale=scale)} → {_number(after, form, scale=scale)}"


def _number(value: Any, form: str, *, scale: float = 1) -> str:
    return format(scale * value, form) if is_number(value) else "-"
