"""Record of the settings of every start of a run, and their changes."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from fastfold.errors import ConfigError
from fastfold.parallel import DistributedContext
from fastfold.training.compose import to_yaml
from fastfold.training.config import TrainConfig
from fastfold.utils.atomic_files import write_atomic

CURRENT, FOLDER = "config.yaml", "configs"
"""File with the settings of the last start, and folder with a numbered file for each start with changes."""

_DECISIVE = ("trainer.seed", "data.", "model.")  #: Prefixes of settings whose change makes it another run
_HARMLESS = ("data.workers", "data.prefetch", "data.cache", "data.index", "data.order", "model.name")
"""Exceptions: samples and network do not depend on these settings."""
_NOT_COMPARED = ("trainer.accept_changes", "trainer.resume")


def agreed_settings(config: TrainConfig, context: DistributedContext) -> DictConfig:
    """Return the settings of a run, which are the same on all processes.

    Raises:
        ConfigError: They differ between processes, which would then wait for each other forever.
    """
    of_all = context.gather(config)
    settings = OmegaConf.structured(config)  # refuses values of wrong types, before the folder is touched
    texts = [to_yaml(each).splitlines() for each in of_all] if len({*map(repr, of_all)}) > 1 else []
    for other, lines in enumerate(texts):
        for first, its in itertools.zip_longest(texts[0], lines, fillvalue="less"):
            if first != its:
                raise ConfigError(
                    f"the processes were started with different settings: {first.strip()} on rank 0, {its.strip()} on "
                    f"rank {other}"
                )
    return settings


class Change(NamedTuple):
    """A setting that differs from the last start; a value is None if it was not set."""

    name: str
    before: Any
    now: Any

    def __str__(self) -> str:
        before, now = ("null" if value is None else value for value in (self.before, self.now))
        return f"{self.name}: {before} -> {now}"

    @property
    def is_decisive(self) -> bool:
        """True for changes of seed, data or network, which make it another run."""
        return self.name.startswith(_DECISIVE) and not self.name.startswith(_HARMLESS)


def changes_since(
    out: Path, config: TrainConfig | DictConfig, otherwise: Mapping[str, Any] | None = None
) -> list[Change]:
    """Return the changes since the last start of a run; empty for the first start.

    ``otherwise`` are settings by name of a checkpoint, compared if the folder lacks a record.

    Raises:
        ConfigError: The record of the last start cannot be read.
    """
    path = out / CURRENT
    before = otherwise
    try:
        if path.is_file():
            before = _flat(OmegaConf.to_container(OmegaConf.create(path.read_text(encoding="utf-8"))))
    except (OSError, ValueError, YAMLError, OmegaConfBaseException) as error:
        raise ConfigError(
            f"{path} cannot be read ({type(error).__name__}), so the settings of the last start are unknown; "
            "remove it to continue anyway"
        ) from error
    if before is None:
        return []
    now = settings_of(config)
    return [
        Change(name, before.get(name), now.get(name))
        for name in sorted(before.keys() | now.keys())
        if before.get(name) != now.get(name) and not name.startswith(_NOT_COMPARED)
    ]


def refuse_decisive(changes: Sequence[Change]) -> None:
    """Refuse to continue with other seed, data or network.

    Raises:
        ConfigError: A change is decisive; the message names all such changes.
    """
    decisive = [str(change) for change in changes if change.is_decisive]
    if decisive:
        raise ConfigError(
            f"the run was started with other settings of seed, data or network ({'; '.join(decisive)}); choose another "
            "trainer.out, or continue anyway with trainer.accept_changes=true"
        )


def record_start(out: Path, config: TrainConfig | DictConfig) -> None:
    """Record the settings of a start.

    Raises:
        WriteError: A file cannot be written.
    """
    text = to_yaml(config)
    folder = out / FOLDER
    last = max((int(path.stem) for path in folder.glob("*.yaml") if path.stem.isdecimal()), default=0)
    if not last or (folder / f"{last:04d}.yaml").read_text(encoding="utf-8") != text:
        folder.mkdir(exist_ok=True)
        write_atomic(folder / f"{last + 1:04d}.yaml", text)
    write_atomic(out / CURRENT, text)


def settings_of(config: TrainConfig | DictConfig) -> dict[str, Any]:
    """Return all settings of a run by name, such as ``optim.lr``."""
    tree = config if isinstance(config, DictConfig) else OmegaConf.structured(config)
    return _flat(OmegaConf.to_container(tree))


def _flat(tree: Any, name: str = "") -> dict[str, Any]:
    if not isinstance(tree, Mapping) or not tree:
        return {name: tree}
    settings: dict[str, Any] = {}
    for key, value in tree.items():
        settings |= _flat(value, f"{name}.{key}" if name else str(key))
    return settings
