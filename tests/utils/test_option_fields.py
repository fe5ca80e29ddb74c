"""Fields with options are checked by what their options say."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fastfold.errors import ConfigError
from fastfold.utils.option_fields import argument, check_options, option, options_of


@dataclass(frozen=True)
class Settings:
    """Settings of each kind."""

    count: int = option(default=2, bounds=(1, 9), help="")
    share: float | None = option("--share", default=None, bounds=(0.0, 1.0), help="")
    kind: str = option("--kind", default="a", choices=("a", "b"), help="")
    flag: bool | None = option(
        "--flag", default=None, choices={"auto": None, "yes": True, "no": False}, help=""
    )
    plots: bool = option("--no-plots", default=True, help="")
    file: Path | None = option("--the-file", "--other", default=None, parse=Path, help="")
    plain: int = 0
    num_folds: int = option(default=1, bounds=(1, 9), help="")
    input_files: tuple[Path, ...] = argument(default=(), nargs="*", parse=Path, help="")

    def __post_init__(self) -> None:
        check_options(self)


def test_values_are_taken_and_texts_of_files_become_paths() -> None:
    found = Settings(count=9, share=1, kind="b", flag=False, plots=False, file="a/b")  # type: ignore[arg-type]
    assert found.file == Path("a/b")
    assert Settings() == Settings(share=None, flag=None, file=None)


def test_numbers_of_numpy_become_python_s() -> None:
    made = Settings(count=np.int32(3), share=np.float32(0.5))
    assert (type(made.count), type(made.share)) == (int, float)
    assert made == Settings(count=3, share=0.5)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"count": 0}, "count must be from 1 to 9, found 0"),
        ({"count": 1.5}, "count must be a whole number, found 1.5"),
        ({"count": True}, "count must be a whole number, found True"),
        ({"count": None}, "count must be a whole number, found None"),
        ({"share": 1.1}, "share must be from 0 to 1, found 1.1"),
        ({"share": float("nan")}, "share must be from 0 to 1, found nan"),
        ({"share": "1"}, "share must be a number, found '1'"),
        ({"kind": "c"}, "kind must be one of a, b, found 'c'"),
        ({"flag": "yes"}, "flag must be one of None, True, False, found 'yes'"),
        ({"flag": 1}, "flag must be one of None, True, False, found 1"),
        ({"plots": 1}, "plots must be True or False, found 1"),
        ({"file": 3}, "file must be a path, found 3"),
    ],
)
def test_others_are_refused_by_name(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Settings(**values)
    assert str(caught.value) == message


def test_an_option_is_named_by_its_first_name() -> None:
    found = {field.name: one.attribute for field, one in options_of(Settings)}
    assert found["plots"] == "no_plots"
    assert found["file"] == "the_file"
    assert "plain" not in found


def test_an_option_without_a_name_has_that_of_its_field() -> None:
    names = {field.name: one.names for field, one in options_of(Settings)}
    assert names["num_folds"] == ("--num-folds",)
    assert names["input_files"] == ("input_files",)
    assert names["file"] == ("--the-file", "--other")
