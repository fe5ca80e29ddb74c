"""What a setting may be, declared where the setting is."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any

from omegaconf import MISSING as NOT_SET

from fastfold.errors import ConfigError

_KEY = "bounds"


@dataclass(frozen=True)
class Bounds:
    """The values that a setting may have; null is one of them where its type has it.

    Attributes:
        least: The smallest one.
        above: All are larger than this.
        most: The largest one.
        below: All are smaller than this.
        choices: All that there are.
    """

    least: float | None = None
    above: float | None = None
    most: float | None = None
    below: float | None = None
    choices: tuple[str, ...] = ()

    def check(self, name: str, value: object) -> None:
        """See that a value is one of them.

        Raises:
            ConfigError: It is not; names the setting and what it may be.
        """
        if value is None or value == NOT_SET:
            return
        if self.choices:
            if value not in self.choices:
                raise ConfigError(f"{name} must be one of {', '.join(self.choices)}, not {value!r}")
            return
        assert isinstance(value, (int, float))
        limits = (
            (self.least, "at least", lambda limit: value >= limit),
            (self.above, "above", lambda limit: value > limit),
            (self.most, "at most", lambda limit: value <= limit),
            (self.below, "below", lambda limit: value < limit),
        )
        given = [(limit, word, holds) for limit, word, holds in limits if limit is not None]
        if not (math.isfinite(value) and all(holds(limit) for limit, _, holds in given)):
            words = [] if math.isfinite(value) else ["finite"]
            allowed = " and ".join([*words, *(f"{word} {limit:g}" for limit, word, _ in given)])
            raise ConfigError(f"{name} must be {allowed}, got {value}")


def bounded(default: Any = MISSING, **bounds: Any) -> Any:
    """A dataclass field with the attributes of :class:`Bounds`.

    Args:
        default: The setting's default.
        bounds: See there.
    """
    return field(default=default, metadata={_KEY: Bounds(**bounds)})


def share(default: float | None) -> Any:
    """A field from 0 to 1."""
    return bounded(default, least=0.0, most=1.0)


def check_bounds(group: str, schema: Any, values: Mapping[str, object]) -> None:
    """See that all settings of a group are within their bounds.

    Args:
        group: Its name.
        schema: A dataclass whose fields may be :func:`bounded`.
        values: Its settings by name; those that are not set yet (``???``) are left out.

    Raises:
        ConfigError: One is not.
    """
    for one in fields(schema):
        if _KEY in one.metadata:
            one.metadata[_KEY].check(f"{group}.{one.name}", values[one.name])
