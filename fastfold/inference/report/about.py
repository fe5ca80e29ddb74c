"""Facts about the runs behind a page, from settings files."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ml_collections import ConfigDict

from fastfold.inference.output.score_files import is_number, mapping_of

_LONGEST = 80
_LISTED = 3


@dataclass
class RunFacts:
    """Distinct sources, networks, seeds, recycles and versions of predictions, in the order of their addition."""

    sources: dict[str, None] = field(default_factory=dict)
    models: dict[str, None] = field(default_factory=dict)
    seeds: dict[int, None] = field(default_factory=dict)
    recycles: dict[int, None] = field(default_factory=dict)
    versions: dict[str, None] = field(default_factory=dict)
    targets: dict[str, None] = field(default_factory=dict)

    def add(self, target: str, scores: Mapping[str, Any], config: ConfigDict) -> None:
        """Add a prediction of a target by its scores file, and its settings if it has any."""
        self.targets[target] = None
        self.models[str(scores["model"])[:_LONGEST]] = None
        self.seeds[scores["seed"]] = None
        if isinstance(recycles := scores.get("num_recycles"), int):
            self.recycles[recycles] = None
        for values, value in (
            (self.sources, config.get("source") if isinstance(config, dict) else None),
            (self.versions, mapping_of(config, "versions").get("fastfold")),
        ):
            if isinstance(value, str):
                values[value.rpartition("/")[2][:_LONGEST]] = None

    def lines(self, failures: int) -> list[str]:
        """Return the facts in words: input, targets, networks with seeds and recycles, failures, version."""
        facts = [_listed(self.sources)] if self.sources else []
        facts.append(_count(len(self.targets), "target"))
        networks = f"by {_listed(self.models)}, {_count(len(self.seeds), 'seed')}"
        if len(self.recycles) == 1:
            networks += f", {_count(next(iter(self.recycles)), 'recycle')}"
        facts.append(networks)
        if failures:
            facts.append(f"{failures:,} failed")
        if self.versions:
            facts.append(f"FastFold {_listed(self.versions)}")
        return facts


def rows_of_alignments(config: ConfigDict) -> int | None:
    """Return the number of alignment rows of a prediction by its settings; None if they do not tell it."""
    rows = config.get("alignment_rows") if isinstance(config, dict) else None
    if not isinstance(rows, list) or not all(
        isinstance(one, list) and all(map(is_number, one)) for one in rows
    ):
        return None
    return int(sum(sum(one) for one in rows))


def _listed(values: Iterable[str]) -> str:
    values = list(values)
    more = len(values) - _LISTED
    return ", ".join(values[:_LISTED]) + (f" and {more} more" if more > 0 else "")


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
