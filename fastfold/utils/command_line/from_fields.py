"""Options of the command line that are written next to the fields that they set."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import re
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, TypeVar

from fastfold.errors import OPTION_NAMES, ConfigError
from fastfold.utils.command_line.help_all import mark_rare
from fastfold.utils.option_fields import LARGEST, Option, options_of
from fastfold.utils.units import parse_number

T = TypeVar("T")
More = Mapping[type, dict[str, Any]]  #: Values of fields of dataclasses, by class and name


def add_field_options(groups: Mapping[str, Any], *kinds: type, only: Collection[str] = ()) -> None:
    """Add the options of dataclasses to a command.

    Without an option, its field keeps its default.

    Args:
        groups: Parser or group of the help by name; fields of other groups are left out.
        kinds: The dataclasses.
        only: Names of the fields with an option in this command; empty for all.
    """
    for kind in kinds:
        OPTION_NAMES.update(
            {f"{kind.__name__}.{field.name}": one.names[0] for field, one in options_of(kind)}
        )
    for field, option in itertools.chain.from_iterable(map(options_of, kinds)):
        if option.group in groups and (not only or field.name in only):
            action = groups[option.group].add_argument(*option.names, **_settings(option, field.default))
            action.is_secret = option.is_secret
            if option.is_rare:
                mark_rare(action)


def from_options(kind: type[T], options: argparse.Namespace, more: More | None = None) -> T:
    """Return a dataclass with the values that the command line gives, or raise ConfigError.

    Its fields that are dataclasses are filled in the same way. ``more`` has values of fields without an option of their
    own, or in place of it.
    """
    values = field_values(options, kind) | (more or {}).get(kind, {})
    for field in dataclasses.fields(kind):  # type: ignore[arg-type]
        if dataclasses.is_dataclass(field.default_factory) and field.name not in values:
            values[field.name] = from_options(field.default_factory, options, more)
    return kind(**values)


def field_values(options: argparse.Namespace, kind: type, only: Collection[str] = ()) -> dict[str, Any]:
    """Return the values of a dataclass's fields that the command line gives, by name.

    ``only`` has the names of the fields to return, as for :func:`add_field_options`; empty for all.
    """
    values: dict[str, Any] = {}
    for field, option in options_of(kind):
        if only and field.name not in only:
            continue
        value = getattr(options, option.attribute, None)
        if isinstance(field.default, bool):
            value = not field.default if value else None
        elif isinstance(option.choices, Mapping) and value is not None:
            value = option.choices[value]
        if isinstance(value, list):
            value = tuple(value)
        if value is not None:
            values |= dict(zip(option.fields, value, strict=False)) if option.fields else {field.name: value}
    return values


def whole_number(low: int, high: int = LARGEST) -> Callable[[str], int]:
    """Return an argument type: a whole number from ``low`` to ``high``."""

    def parse(text: str) -> int:
        if not (re.fullmatch(r"-?[0-9]{1,10}", text) and low <= int(text) <= high):
            raise argparse.ArgumentTypeError(f"{text[:20]!r} is not a whole number from {low} to {high}")
        return int(text)

    return parse


def real_number(low: float, high: float) -> Callable[[str], float]:
    """Return an argument type: a number from ``low`` to ``high``."""

    def parse(text: str) -> float:
        value = parse_number(text)
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"{text[:20]!r} is not a number from {low:g} to {high:g}")
        return value

    return _argument_type(parse)


def _path(text: str) -> Path:
    """Return a path; an empty one would be the current folder."""
    if not text:
        raise argparse.ArgumentTypeError("the path is empty; is a variable of the shell not set?")
    return Path(text)


def _argument_type(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """Return the function with errors of argparse."""

    @functools.wraps(parse)
    def parsed(text: str) -> Any:
        try:
            return parse(text)
        except ConfigError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return parsed


def _settings(option: Option, default: Any) -> dict[str, Any]:
    """Return the arguments of ``add_argument``."""
    settings: dict[str, Any] = {"help": option.help}
    if not option.is_positional:
        settings |= {"dest": option.attribute, "required": option.is_required}
    if isinstance(default, bool):
        return {**settings, "action": "store_true"}
    if option.choices == (True, False):
        return {**settings, "action": argparse.BooleanOptionalAction}
    if option.bounds is not None:
        least, most = option.bounds
        if isinstance(least, int) and isinstance(most, int):
            settings |= {"type": whole_number(least, most), "metavar": "N"}
        else:
            settings["type"] = real_number(least, most)
    elif option.parse is not None:
        settings["type"] = _path if option.parse is Path else _argument_type(option.parse)
    if option.choices is not None:
        settings["choices"] = tuple(option.choices)
    if option.nargs is not None:
        settings["nargs"] = option.nargs
        settings |= {"action": "extend"} if option.nargs in ("+", "*") and not option.is_positional else {}
    if option.bare is not None:
        settings["const"] = option.bare
    if option.metavar is not None:
        settings["metavar"] = option.metavar
    return settings
