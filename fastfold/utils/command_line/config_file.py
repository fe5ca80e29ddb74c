"""Options of a command in a YAML file: ``--config FILE``, and ``--print-config`` to write one."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from fastfold.errors import ConfigError, InputError, suggest
from fastfold.utils.foreign_text import parse_yaml, read_settings_text, shown

CONFIG = "--config"
_MAX_BYTES = 1 << 20
_OWN = frozenset(("help", "help_all", "config", "print_config"))
_SWITCHES = dict.fromkeys(("true", "yes", "on"), True) | dict.fromkeys(("false", "no", "off"), False)


def add_config_options(parser: argparse.ArgumentParser) -> None:
    """Add ``--config`` and ``--print-config`` to a parser."""
    parser.add_argument(
        CONFIG,
        type=Path,
        metavar="FILE",
        help="read options from a YAML file, by their names without dashes; options of the command come first",
    )
    parser.add_argument(
        "--print-config",
        action="store_true",
        help="print the options that differ from the defaults as such a file, and stop",
    )


def expand_config(
    arguments: Sequence[str], actions: Iterable[argparse.Action], *, help_command: str
) -> list[str]:
    """Return the arguments of a command and those of its file.

    Options that the command has itself are left out. ``help_command`` lists the options, for messages.

    Raises:
        ConfigError: The file cannot be read, is not YAML, has an unknown option, an option twice, or a value that no
            option takes; or there are two files.
    """
    end = arguments.index("--") if "--" in arguments else len(arguments)
    own, rest = arguments[:end], arguments[end:]
    path = _config_path(own)
    if path is None:
        return list(arguments)
    actions = list(actions)
    set_here = _set_by(own, actions)
    known = {name: action for action in actions if action.dest not in _OWN for name in _names(action)}
    inputs: list[str] = []
    more: list[str] = []
    keys: dict[str, Any] = {}
    for key, value in _read(path).items():
        name = str(key).replace("_", "-")
        action = known.get(name)
        if action is None:
            hint = suggest(name, known, otherwise=f"{help_command} lists them")
            raise ConfigError(f"{path}: no option {shown(key)}; {hint}")
        if (other := keys.setdefault(action.dest, key)) != key:
            raise ConfigError(f"{path}: {shown(other)} and {shown(key)} are the same option; remove one")
        if isinstance(value, list) and action.option_strings and action.nargs in (None, "?"):
            raise ConfigError(f"{path}: {name}: expected one value, found a list: {shown(value)}")
        if not action.option_strings:
            inputs += _texts(value, path, name)
        elif action.dest not in set_here and value is not None:
            more += _arguments(action, name, value, path)
    return [*inputs, *own, *more, *rest]


def _arguments(action: argparse.Action, name: str, value: Any, path: Path) -> list[str]:
    """Return the arguments of an option with a value other than null."""
    is_on = _SWITCHES.get(value.lower()) if isinstance(value, str) else None
    if isinstance(action, argparse.BooleanOptionalAction) and is_on is not None:
        is_on = is_on != name.startswith("no-")
        return [next(text for text in action.option_strings if text.startswith("--no-") != is_on)]
    if action.nargs == 0 and is_on is None:
        raise ConfigError(f"{path}: {name}: expected true or false, found {shown(value)}")
    option = action.option_strings[0]
    if is_on is None or action.nargs not in (0, "?", "*"):
        texts = _texts(value, path, name)
        # A value of its own may begin with a dash.
        return [f"{option}={texts[0]}"] if action.nargs in (None, "?") else [option, *texts]
    return [option] if is_on else []


def config_text(options: argparse.Namespace, actions: Iterable[argparse.Action]) -> str:
    """Return options that differ from their defaults as YAML, without passwords."""
    import yaml

    values: dict[str, Any] = {}
    for action in actions:
        value = getattr(options, action.dest, None)
        if (
            action.dest in _OWN | {argparse.SUPPRESS}
            or getattr(action, "is_secret", False)
            or value == action.default
            or (value == [] and not action.option_strings)
            or not _names(action)
        ):
            continue
        if value == [] and action.nargs == "*" and action.option_strings:
            value = True
        if isinstance(value, tuple) and action.nargs is None:  # a list in one text
            value = ",".join(map(str, value))
        values[_names(action)[0]] = _plain(value)
    return str(yaml.safe_dump(values, sort_keys=False, allow_unicode=True)) if values else ""


def _config_path(arguments: Sequence[str]) -> Path | None:
    """Return the file that the arguments name, or raise ConfigError for two."""
    paths = [Path(text.partition("=")[2]) for text in arguments if text.startswith(f"{CONFIG}=")]
    paths += [Path(path) for text, path in pairwise(arguments) if text == CONFIG]
    if len(paths) > 1:
        raise ConfigError(f"{CONFIG} is given {len(paths)} times; write all options into one file")
    return paths[0] if paths else None


def _set_by(arguments: Sequence[str], actions: Iterable[argparse.Action]) -> set[str]:
    """Return the ``dest`` of the options that arguments set, abbreviated or joined to a value as argparse allows."""
    options = {text: action.dest for action in actions for text in action.option_strings}
    set_here: set[str] = set()
    for argument in arguments:
        text = argument.partition("=")[0]
        if text in options:
            set_here.add(options[text])
        elif text.startswith("--"):
            set_here |= {dest for option, dest in options.items() if option.startswith(text)}
        else:
            set_here |= {dest for option, dest in options.items() if option == argument[:2]}
    return set_here


def _names(action: argparse.Action) -> list[str]:
    """Return the names of an option in a file; inputs are called ``inputs``."""
    if not action.option_strings:
        return [action.dest]
    return [name[2:] for name in action.option_strings if name.startswith("--") and "_" not in name]


def _read(path: Path) -> dict[Any, Any]:
    try:
        values = parse_yaml(read_settings_text(path, limit=_MAX_BYTES), path, as_text=True)
    except InputError as error:
        raise ConfigError(f"{error}; write lines such as 'num-recycles: 3'") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: expected lines such as 'num-recycles: 3', found {type(values).__name__}")
    return values


def _texts(value: Any, path: Path, name: str) -> list[str]:
    """Return a value as arguments."""
    values = value if isinstance(value, list) else [value]
    if not values or any(not isinstance(one, str) for one in values):
        raise ConfigError(
            f"{path}: {name}: expected a number, a text or a list of them, found {shown(value)}"
        )
    return values


def _plain(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return value if isinstance(value, bool | int | float) else str(value)
