"""Networks within the containers of training programs: Lightning, DeepSpeed, moving averages.

Containers differ in their keys, so a network is recognised by the name of its first layer, at any depth and behind any
prefix.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

#: First layer of a network under our names, and under OpenFold's
OWN_LAYER, OPENFOLD_LAYER = "input_embedder.target_to_msa.weight", "input_embedder.linear_tf_m.weight"

_DEEPEST = 4
_AVERAGE = re.compile(r"(?:^|[^a-z])(?:ema|swa|averag|shadow)", re.IGNORECASE)


@dataclass(frozen=True)
class ContainedNetwork:
    """Entries of a network in a checkpoint."""

    place: str  #: Keys that lead to it and prefix of its names, with dots; empty for the checkpoint's own entries
    entries: Mapping[Any, Any]  #: Tensors by name, without the prefix; not checked

    @property
    def is_average(self) -> bool:
        """True if the place names a moving average."""
        return _AVERAGE.search(self.place) is not None


def contained_networks(content: object) -> list[ContainedNetwork]:
    """Return the networks in a checkpoint; only the moving averages if it has any.

    Entries of other prefixes, such as losses of a Lightning module, belong to no network. Without a prefix all entries
    of a mapping do.
    """
    networks = list(_networks(content, ""))
    return [network for network in networks if network.is_average] or networks


def _networks(content: object, place: str, depth: int = 0) -> Iterator[ContainedNetwork]:
    if not isinstance(content, Mapping) or depth > _DEEPEST:
        return
    names = [name for name in content if isinstance(name, str)]
    for prefix in dict.fromkeys(prefix for name in names if (prefix := _prefix(name)) is not None):
        entries: Mapping[Any, Any] = content
        if prefix:
            entries = {n.removeprefix(prefix): content[n] for n in names if n.startswith(prefix)}
        yield ContainedNetwork((place + prefix).rstrip("."), entries)
    for key, inner in content.items():
        yield from _networks(inner, f"{place}{key}.", depth + 1)


def _prefix(name: str) -> str | None:
    """Return the prefix of a first layer's name, or None for another name."""
    for layer in (OWN_LAYER, OPENFOLD_LAYER):
        if name == layer or name.endswith(f".{layer}"):
            return name.removesuffix(layer)
    return None
