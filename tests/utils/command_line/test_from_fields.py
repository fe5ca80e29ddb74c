"""Options written beside fields set these fields, and no others."""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from fastfold.errors import ConfigError
from fastfold.utils.command_line.from_fields import (
    add_field_options,
    field_values,
    from_options,
    whole_number,
)
from fastfold.utils.command_line.help_all import is_rare
from fastfold.utils.option_fields import argument, option


def parse_even(text: str) -> int:
    """Parse an even number."""
    if not text.isdigit() or int(text) % 2:
        raise ConfigError(f"{text!r} is not even")
    return int(text)


def parse_range(text: str) -> tuple[int, ...]:
    """Parse one or two numbers."""
    return tuple(map(int, text.split("-")))


@dataclass(frozen=True)
class Settings:
    """Settings of each kind."""

    count: int = option("--count", default=2, bounds=(1, 9), group="a", help="")
    share: float = option("--share", default=0.5, bounds=(0.0, 1.0), group="a", help="")
    flag: bool | None = option(
        "--flag", default=None, choices={"auto": None, "yes": True, "no": False}, group="a", help=""
    )
    plots: bool = option("--no-plots", default=True, group="a", help="")
    deep: bool = option("--deep", default=False, group="a", is_rare=True, help="")
    files: tuple[Path, ...] = option("--files", default=(), nargs="+", parse=Path, group="a", help="")
    relax: str = option(
        "--relax", default="none", choices=("none", "best"), nargs="?", bare="best", group="a", help=""
    )
    even: int = option("--even", default=0, dest="parity", parse=parse_even, group="b", help="")
    low: int = option("--range", default=1, fields=("low", "high"), parse=parse_range, group="b", help="")
    high: int = 2


def _parser(**groups: str) -> tuple[argparse.ArgumentParser, list[argparse.Action]]:
    parser = argparse.ArgumentParser(exit_on_error=False)
    add_field_options(dict.fromkeys(groups, parser), Settings, only=("share",) if "less" in groups else ())
    return parser, parser._actions


def _values(text: str) -> dict[str, Any]:
    return field_values(_parser(a="", b="")[0].parse_args(text.split()), Settings)


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("", {}),
        ("--count 9 --share 0.25", {"count": 9, "share": 0.25}),
        ("--flag no", {"flag": False}),
        ("--flag auto", {}),
        ("--no-plots --deep", {"plots": False, "deep": True}),
        ("--files a b --files c", {"files": (Path("a"), Path("b"), Path("c"))}),
        ("--relax", {"relax": "best"}),
        ("--relax none", {"relax": "none"}),
        ("--even 4", {"even": 4}),
        ("--range 3-5", {"low": 3, "high": 5}),
        ("--range 3", {"low": 3}),
    ],
)
def test_given_options_alone_are_values(text: str, values: dict[str, Any]) -> None:
    assert _values(text) == values


def test_a_command_may_read_some_fields_alone() -> None:
    options = _parser(a="", b="")[0].parse_args(["--count", "3", "--even", "4"])
    assert field_values(options, Settings, only=("even", "share")) == {"even": 4}
    assert options.parity == 4


@dataclass(frozen=True)
class Nested:
    """Settings with settings inside."""

    name: str
    inner: Settings = field(default_factory=Settings)


def test_settings_inside_others_take_their_own_options() -> None:
    options = _parser(a="", b="")[0].parse_args(["--count", "3", "--even", "4"])
    more: dict[type, dict[str, Any]] = {Nested: {"name": "n"}, Settings: {"count": 5}}
    assert from_options(Nested, options, more) == Nested("n", Settings(count=5, even=4))
    more[Nested]["inner"] = Settings(count=1)
    assert from_options(Nested, options, more) == Nested("n", Settings(count=1))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("--count 10", "argument --count: '10' is not a whole number from 1 to 9"),
        ("--count ٣", "is not a whole number from 1 to 9"),
        ("--even 3", "argument --even: '3' is not even"),
        ("--flag maybe", "invalid choice: 'maybe'"),
    ],
)
def test_wrong_values_are_refused(text: str, message: str) -> None:
    with pytest.raises(argparse.ArgumentError) as caught:
        _values(text)
    assert message in str(caught.value)


def test_a_command_has_the_options_of_its_groups() -> None:
    names = {name for action in _parser(b="")[1] for name in action.option_strings}
    assert names == {"-h", "--help", "--even", "--range"}
    names = {name for action in _parser(a="", less="")[1] for name in action.option_strings}
    assert names == {"-h", "--help", "--share"}
    rare = [action.dest for action in _parser(a="")[1] if is_rare(action)]
    assert rare == ["deep"]
    assert whole_number(3)("7") == 7


@dataclass(frozen=True)
class Inputs:
    """Arguments by their places, and an option that a command needs."""

    kind: str = argument(choices=("a", "b"), help=None)
    out: Path = option(is_required=True, parse=Path, metavar="DIR", help="")
    files: tuple[Path, ...] = argument(default=(), nargs="*", parse=Path, metavar="FILE", help="")
    num_folds: int = option(default=1, bounds=(1, 9), help="")
    share: float = option(default=1.0, bounds=(0.0, 1.0), help="")


def _inputs(text: str) -> Inputs:
    parser = argparse.ArgumentParser()
    add_field_options({"": parser}, Inputs)
    return from_options(Inputs, parser.parse_args(text.split()))


def test_arguments_are_read_by_their_places() -> None:
    assert _inputs("a --out d") == Inputs("a", Path("d"))
    expected = Inputs("b", Path("d"), (Path("x"), Path("y")), num_folds=3)
    assert _inputs("b x y --out d --num-folds 3") == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a x", "the following arguments are required: --out"),
        ("--out d", "the following arguments are required: kind"),
        ("c --out d", "argument kind: invalid choice: 'c'"),
        ("a --out=", "argument --out: the path is empty; is a variable of the shell not set?"),
    ],
)
def test_a_missing_or_wrong_argument_is_refused_by_name(
    text: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        _inputs(text)
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("--share 1.5", r"argument --share: '1\.5' is not a number from 0 to 1"),
        ("--share nan", "argument --share: 'nan' is not a number from 0 to 1"),
        ("--share 0_1", "argument --share: '0_1' is not a number"),
        ("--num-folds 1_0", "argument --num-folds: '1_0' is not a whole number from 1 to 9"),
    ],
)
def test_a_number_is_refused_by_the_name_of_its_option(
    text: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        _inputs(f"a --out x {text}")
    assert re.search(message, capsys.readouterr().err)


def test_a_whole_number_may_be_negative() -> None:
    assert whole_number(-10, 10)("-10") == -10
    with pytest.raises(argparse.ArgumentTypeError):
        whole_number(-10, 10)("-11")


def test_a_whole_number_is_called_n_in_the_help() -> None:
    parser = argparse.ArgumentParser()
    add_field_options({"": parser}, Inputs)
    names = {action.dest: action.metavar for action in parser._actions}
    assert (names["num_folds"], names["share"], names["out"]) == ("N", None, "DIR")
