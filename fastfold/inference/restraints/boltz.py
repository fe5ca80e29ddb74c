"""Constraints of Boltz' YAML files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from fastfold.data.targets import Target
from fastfold.errors import InputError
from fastfold.inference.restraints.residues import Residues
from fastfold.inference.restraints.restraint import Restraint
from fastfold.inference.restraints.rows import collect, limited, read_number
from fastfold.protein.residue_constants import mask_unknown
from fastfold.utils.foreign_text import parse_yaml

_MAX = 6.0
"""Limit in Å of a constraint without one."""

_KEYS = {
    "contact": ("token1", "token2", "max_distance", "force"),
    "pocket": ("binder", "contacts", "max_distance", "force"),
}


def read_boltz(path: Path, text: str, target: Target, notes: list[str]) -> tuple[Residues, list[Restraint]]:
    """Read the constraints ``contact`` and ``pocket``, which are between the closest heavy atoms.

    ``notes`` receives a line about properties that the fit leaves out.

    Raises:
        InputError: The file cannot be read; names each constraint that cannot be used.
    """
    content = parse_yaml(text, path)
    entries = content.get("constraints") if isinstance(content, Mapping) else None
    if not isinstance(entries, list):
        raise InputError("expected a list 'constraints', as Boltz has it", path=path)
    residues = Residues(target, _chain_names(content, target, path))
    rows = [(f"constraint {number}", entry) for number, entry in enumerate(entries, 1)]
    restraints = collect(path, rows, lambda entry: _read_entry(entry, residues))
    if forced := [place for place, entry in rows if next(iter(entry.values())).get("force")]:
        notes.append(
            f"'force' of {', '.join(forced)} is not a guarantee: every restraint is fitted, and the report tells "
            "whether it holds"
        )
    return residues, restraints


def _chain_names(content: Mapping[str, object], target: Target, path: Path) -> list[str] | None:
    """Return the file's names of the target's chains, None for a file without sequences, or raise InputError."""
    entities = content.get("sequences")
    if not isinstance(entities, list):
        return None
    names: list[str] = []
    sequences: list[str] = []
    for entity in entities:
        protein = entity.get("protein") if isinstance(entity, Mapping) else None
        if isinstance(protein, Mapping):
            ids = protein.get("id")
            copies = [str(one) for one in ids] if isinstance(ids, list) else [str(ids)]
            names += copies
            sequences += [mask_unknown(str(protein.get("sequence", "")).upper())] * len(copies)
    if sequences != [chain.sequence for chain in target.chains]:
        raise InputError(
            f"lists other proteins than the target {target.name}; list the target's sequences in the same order, or "
            "remove 'sequences' and name chains A, B and so on",
            path=path,
        )
    if repeated := next((name for name in names if names.count(name) > 1), None):
        raise InputError(f"names two chains {repeated}; rename one", path=path)
    return names


def _read_entry(entry: object, residues: Residues) -> list[Restraint]:
    if not (isinstance(entry, Mapping) and len(entry) == 1):
        raise ValueError("expected one of contact and pocket")
    ((kind, value),) = entry.items()
    if kind not in _KEYS or not isinstance(value, Mapping):
        raise ValueError(f"{kind!r} is not supported; contact and pocket are")
    if unknown := [key for key in value if key not in _KEYS[kind]]:
        raise ValueError(f"unknown key {str(unknown[0])!r}; {kind} has {', '.join(_KEYS[kind])}")
    if not isinstance(value.get("force", False), bool):
        raise ValueError(f"force: expected true or false, found {value['force']!r}")
    high = read_number(value, "max_distance", _MAX)
    if kind == "contact":
        first, second = (_token(value.get(f"token{i}"), residues) for i in (1, 2))
        return limited([(first, second)], 0.0, high, atoms="any")
    contacts = value.get("contacts")
    if not isinstance(contacts, list):
        raise ValueError("pocket: expected a list 'contacts'")
    binder, restraints = str(value.get("binder", "")), []
    for second in (_token(token, residues) for token in contacts):
        pairs = [(first, second) for first in residues.atoms_of_chain(binder)]
        # Pockets with other limits are constraints of their own.
        group = f"pocket {binder}/{second} to {high:g} Å"
        restraints += limited(pairs, 0.0, high, atoms="any", group=group)
    return restraints


def _token(token: object, residues: Residues) -> int:
    if not (isinstance(token, Sequence) and not isinstance(token, str) and len(token) == 2):
        raise ValueError(f"expected a chain and a residue such as [A, 10], found {token!r}")
    return residues.place(str(token[0]), str(token[1]))
