"""Configurations of runs from one composition by Hydra, which takes a fifth of a second."""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence

from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf

from fastfold.training.compose import compose_tree
from fastfold.training.config import TrainConfig


@functools.cache
def _composed(overrides: tuple[str, ...]) -> DictConfig:
    return compose_tree(overrides)


def compose_run(base: Sequence[str], *changes: str) -> TrainConfig:
    """Return what ``compose_config`` gives for the base and the changes.

    Base, choices of groups, and settings with free keys are composed once for all runs that share them; other changes
    are laid over a copy, in their order. Values are not checked: what shall be refused needs ``compose_config``.
    """
    shared, own = list(base), []
    for change in changes:
        name = change.partition("=")[0]
        is_single = "." in name and not name.startswith(("model.overrides", "data.oversample", "data.depth"))
        (own if is_single else shared).append(change)
    tree = copy.deepcopy(_composed(tuple(shared)))
    for override in OverridesParser.create().parse_overrides(own):
        OmegaConf.update(tree, override.key_or_group, override.value())
    config = OmegaConf.to_object(tree)
    assert isinstance(config, TrainConfig)
    return config
