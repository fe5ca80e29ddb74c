"""Dataclass fields that are options or arguments of the command line as well, each written once."""

from __future__ import annotations

import dataclasses
import numbers
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field
from pathlib import Path
from typing import Any

from fastfold.errors import ConfigError

_KEY = "option"
LARGEST = 2**31 - 1  #: Largest whole number of an option without another limit


@dataclass(frozen=True, kw_only=True)
class Option:
    """Option of the command line that sets a field, or argument by its place."""

    names: tuple[str, ...]  #: Its names; that of the field for an argument by its place
    help: str | None  #: Its line in the help; None for its name alone
    group: str = ""  #: Group of the help that lists it
    #: Name of its value in the help; None for ``N`` of a whole number, and otherwise that of the option
    metavar: str | tuple[str, ...] | None = None
    parse: Callable[[str], Any] | None = None  #: Function from the text to a value; None for text
    bounds: tuple[float, float] | None = None  #: Smallest and largest number, whole numbers if both are
    #: Possible values, or values by their texts; ``(True, False)`` for a switch with a ``--no-`` form and a default
    choices: Sequence[Any] | Mapping[str, Any] | None = None
    bare: str | None = None  #: Value of the option without a text
    nargs: str | int | None = None  #: Number of texts as in argparse; a ``+`` or ``*`` option may be repeated
    fields: tuple[str, ...] = ()  #: Fields that the parts of its value set; empty for its own field
    dest: str = ""  #: Attribute of the parsed options; empty for that of its first name
    is_rare: bool = False  #: True if ``--help`` leaves it out
    is_secret: bool = False  #: True if its value is shown and written nowhere
    is_required: bool = False  #: True if the command refuses to run without it
    is_positional: bool = False  #: True for an argument by its place, without a name on the command line

    @property
    def attribute(self) -> str:
        """Name of the attribute of the parsed options."""
        return self.dest or self.names[0].lstrip("-").replace("-", "_")


def option(*names: str, default: Any = MISSING, help: str | None, **settings: Any) -> Any:
    """Return a dataclass field with its option of the command line.

    Args:
        names: Names of the option; none for that of the field, such as ``--num-recycles`` of ``num_recycles``.
        default: Default of the field. With False the option is a switch, with True a switch that turns it off.
        help: Its line in the help.
        settings: Further attributes of :class:`Option`.
    """
    choice = Option(names=names, help=help, **settings)
    return field(default=default, repr=not choice.is_secret, metadata={_KEY: choice})


def argument(*, default: Any = MISSING, help: str | None, **settings: Any) -> Any:
    """Return a dataclass field with its argument by place, of the field's name; see :func:`option`."""
    return option(default=default, help=help, is_positional=True, **settings)


def options_of(kind: type) -> Iterator[tuple[dataclasses.Field[Any], Option]]:
    """Yield the fields of a dataclass that are options or arguments, in their order."""
    for one in dataclasses.fields(kind):
        choice = one.metadata.get(_KEY)
        if choice is not None and not choice.names:
            name = one.name if choice.is_positional else f"--{one.name.replace('_', '-')}"
            choice = dataclasses.replace(choice, names=(name,))
        if choice is not None:
            yield one, choice


def check_options(settings: Any) -> None:
    """Check the values of a frozen dataclass by its options; make paths of texts, and Python's numbers of NumPy's.

    None is a value of the fields that have it as default, or in their type.

    Raises:
        ConfigError: A value has the wrong type, or is none of the possible ones; names the field.
    """
    for one, choice in options_of(type(settings)):
        value = getattr(settings, one.name)
        if value is None and (one.default is None or str(one.type).endswith("| None")):
            continue
        if choice.bounds is not None:
            check_number(one.name, value, *choice.bounds)
            is_whole = all(isinstance(bound, int) for bound in choice.bounds)
            object.__setattr__(settings, one.name, int(value) if is_whole else float(value))
        elif choice.choices is not None:
            _check_choice(one.name, value, choice.choices)
        elif isinstance(one.default, bool):
            if not isinstance(value, bool):
                raise ConfigError(f"{one.name} must be True or False, found {value!r}")
        elif choice.parse is Path and choice.nargs is None:
            if not isinstance(value, (str, Path)):
                raise ConfigError(f"{one.name} must be a path, found {value!r}")
            object.__setattr__(settings, one.name, Path(value))


def check_kind(name: str, value: Any, kinds: type | tuple[type, ...], expected: str) -> None:
    """Check the type of an argument, or raise ConfigError with its name and the expected kind in words."""
    if not isinstance(value, kinds):
        raise ConfigError(f"{name} must be {expected}, found {type(value).__name__}")


def check_path(value: Any) -> None:
    """Check that an argument is a path, or raise ConfigError."""
    check_kind("path", value, (str, os.PathLike), "a file or folder")


def check_whole(name: str, value: Any, least: int, most: int) -> None:
    """Check a whole number, or raise ConfigError with its name."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise ConfigError(f"{name} must be a whole number, found {value!r}")
    if not least <= int(value) <= most:
        raise ConfigError(f"{name} must be from {least} to {most}, found {value}")


def check_number(name: str, value: Any, least: float, most: float) -> None:
    """Check a number, whole if both its bounds are, or raise ConfigError with its name."""
    if isinstance(least, int) and isinstance(most, int):
        check_whole(name, value, least, most)
        return
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise ConfigError(f"{name} must be a number, found {value!r}")
    if not least <= float(value) <= most:
        raise ConfigError(f"{name} must be from {least:g} to {most:g}, found {value}")


def _check_choice(name: str, value: Any, choices: Sequence[Any] | Mapping[str, Any]) -> None:
    values = list(choices.values()) if isinstance(choices, Mapping) else list(choices)
    if not any(value is one or (isinstance(value, str) and value == one) for one in values):
        raise ConfigError(f"{name} must be one of {', '.join(map(str, values))}, found {value!r}")
