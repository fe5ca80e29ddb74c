"""Composition of a checked configuration from the command line's overrides, by Hydra."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from importlib import resources
from typing import Any, cast

from hydra import compose, initialize_config_module
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, Quote, QuotedString
from hydra.errors import HydraException
from ml_collections import ConfigDict
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from fastfold.errors import ConfigError, suggest
from fastfold.evoformer.config import is_multimer, model_config
from fastfold.training.bounds import Bounds, check_bounds
from fastfold.training.config import ModelConfig, TrainConfig
from fastfold.training.parallel_config import ParallelConfig, axes_of

_CONFIGS = "fastfold.configs"
_OPEN = ("model.overrides", "data.oversample", "data.depth_weights")  # settings with free keys
_SIZE = re.compile(
    r"(channels?|dim|bins|heads?|layers?|factor|_qk|_v|size|clusters|extra_msa|in_transition)$"
)
"""Keys of the network's configuration that hold sizes; numbers of blocks and of templates may be 0."""
_BOUNDS = (
    (re.compile(r"num_bins$"), Bounds(least=2)),
    (re.compile(r"dropout(_rate)?$"), Bounds(least=0, below=1)),
    (re.compile(r"(_prob|_frac|fraction|share)$"), Bounds(least=0, most=1)),
    (re.compile(r"(scale|unit_distance)$"), Bounds(above=0)),
    (re.compile(r"early_stop_tolerance$"), Bounds()),  # a negative one runs all passes
)
"""Bounds of other numbers of the network's configuration by their keys; the rest is at least 0."""
_FIXED = (
    "clamp_type",
    "equation",
    "msa_cluster_features",
    "multimer_mode",
    "num_output",
    "orientation",
    "shared_dropout",
    "subsample_templates",
    "use_chain_relative",
)
"""Keys of the network's configuration with the same meaning for every run."""
_NAMES_ELSEWHERE = {
    "data.alignments": ("alignment_dir", "alignment_index_path"),
    "data.directory": ("data_dir", "data_path", "dataset", "root"),
    "data.obsolete_pdbs": ("obsolete_pdbs_path",),
    "data.workers": ("num_workers",),
    "model.weights": ("checkpoint", "pretrained"),
    "optim.batch_size": ("accumulate_grad_batches", "global_batch_size"),
    "optim.clip": ("gradient_clip_val", "gradient_clipping", "max_grad_norm"),
    "optim.decay_factor": ("decay",),
    "optim.ema_decay": ("ema",),
    "optim.lr": ("learning_rate",),
    "optim.name": ("optimizer",),
    "optim.warmup_steps": ("warmup", "warmup_iters"),
    "optim.weight_decay": ("wd",),
    "trainer.checkpoint_dir": ("save_dir",),
    "trainer.checkpoint_every": ("save_every", "save_steps"),
    "trainer.keep_last": ("keep_checkpoints", "save_top_k", "save_total_limit"),
    "trainer.log_every": ("log_interval",),
    "trainer.out": ("out_dir", "output", "output_dir"),
    "trainer.precision": ("amp",),
    "trainer.resume": ("checkpoint_path", "ckpt_path", "resume_from", "resume_from_checkpoint"),
    "trainer.seed": ("random_seed",),
    "trainer.steps": ("epochs", "max_epochs", "max_steps", "num_steps", "total_steps"),
    "trainer.validate_every": ("val_check_interval",),
}
_OTHER_NAMES = {other: ours for ours, others in _NAMES_ELSEWHERE.items() for other in others}
"""Our settings by their names in other training programs."""
_GROUPS = {field.name: field.default_factory for field in fields(TrainConfig)}


def compose_tree(overrides: Sequence[str]) -> DictConfig:
    """Compose the whole configuration; settings without a default may be missing (``???``).

    Overrides are as on Hydra's command line: ``group=choice``, ``+preset=mini``, ``group.key=value``.

    Raises:
        ConfigError: A key, choice or value does not exist, has a wrong type or is out of range; the message names the
            closest valid one.
    """
    _store_schemas()
    parsed = _check_names(overrides)
    overrides = _whole_numbers(parsed)
    try:
        with initialize_config_module(config_module=_CONFIGS, version_base="1.3"):
            composed = compose("train", [f"++{x}" if x.startswith(_OPEN) else x for x in overrides])
        tree = OmegaConf.merge(_schema(), composed)
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(_first_lines(error)) from error
    assert isinstance(tree, DictConfig)
    for group, schema in _GROUPS.items():
        check_bounds(group, schema, cast(Any, OmegaConf.to_container(tree[group], resolve=True)))
    _check_effects(parsed, network_config(cast(ModelConfig, OmegaConf.to_object(tree.model))))
    axes_of(cast(ParallelConfig, OmegaConf.to_object(tree.parallel)))
    return tree


def parse_overrides(overrides: Sequence[str]) -> list[Override]:
    """Parse overrides; settings of text, such as paths, keep the typed letters: ``2024_05``, ``Süd (1)``.

    Raises:
        ConfigError: An override is not one of Hydra's.
    """
    parser, types = OverridesParser.create(), dict(_keys(TrainConfig))
    parsed = []
    for text in overrides:
        key, equals, value = text.partition("=")
        is_text = bool(equals) and types.get(key.lstrip("+"), "").startswith("str")
        try:
            override = parser.parse_override(text)
            is_kept = override.is_sweep_override() or isinstance(override.value(), str | None)
        except HydraException as error:
            if not is_text or value.startswith(("'", '"')):
                raise ConfigError(f"{_first_lines(error)}; overrides look like trainer.steps=1000") from error
            is_kept = False
        if is_text and not is_kept:
            override = parser.parse_override(f"{key}={quoted(value)}")
        parsed.append(override)
    return parsed


def quoted(value: str) -> str:
    """Return a value in Hydra's quotation marks."""
    return QuotedString(value, Quote.single).with_quotes()


def compose_config(overrides: Sequence[str]) -> TrainConfig:
    """Compose the complete and checked configuration of a run from overrides of :func:`compose_tree`.

    Raises:
        ConfigError: As :func:`compose_tree`; or a setting is missing.
    """
    tree = compose_tree(overrides)
    missing = sorted(OmegaConf.missing_keys(tree))
    if missing:
        raise ConfigError(f"{missing[0]} is not set; pass {missing[0]}=VALUE")
    config = OmegaConf.to_object(tree)
    assert isinstance(config, TrainConfig)
    return config


def to_yaml(config: TrainConfig | DictConfig) -> str:
    """Return the whole configuration as YAML, every key with its value."""
    return OmegaConf.to_yaml(
        config if isinstance(config, DictConfig) else OmegaConf.structured(config), resolve=True
    )


def network_config(model: ModelConfig) -> ConfigDict:
    """Return the configuration tree of a run's network, with AlphaFold's keys.

    Raises:
        ConfigError: The preset, or a key of the overrides, does not exist; or a value has a wrong type or is not a
            valid size.
    """
    tree = model_config(model.preset)
    _update(tree, model.overrides, "model.overrides")
    return tree


@functools.cache
def _store_schemas() -> None:
    for group, factory in _GROUPS.items():
        ConfigStore.instance().store(group=group, name="schema", node=factory)


@functools.cache
def _schema() -> DictConfig:
    """Return the types of all settings; merging copies them."""
    return OmegaConf.structured(TrainConfig)


def _update(tree: ConfigDict, changes: Mapping[str, Any], where: str) -> None:
    for key, value in changes.items():
        path = f"{where}.{key}"
        if key not in tree:
            hint = suggest(path, [f"{where}.{name}" for name in tree], cutoff=0.0)
            raise ConfigError(f"{path} does not exist; {hint}")
        if isinstance(tree[key], ConfigDict) != isinstance(value, Mapping):
            kind = "a group of keys" if isinstance(tree[key], ConfigDict) else "a value"
            raise ConfigError(f"{path} is {kind}, got {value!r}")
        if isinstance(value, Mapping):
            _update(tree[key], value, path)
            continue
        if key in _FIXED and value != tree[key]:
            raise ConfigError(f"{path} cannot change: expected {tree[key]!r}, found {value!r}")
        try:
            if value is None:
                raise TypeError(key)
            tree[key] = value
        except TypeError as error:
            kind = type(tree[key]).__name__
            raise ConfigError(f"{path} must be of type {kind}, got {value!r}") from error
        if isinstance(value, int | float) and not isinstance(value, bool):
            _bounds_of(key, value).check(path, value)


def _bounds_of(key: str, value: float) -> Bounds:
    other = Bounds(least=1 if isinstance(value, int) and _SIZE.search(key) else 0)
    return next((bounds for pattern, bounds in _BOUNDS if pattern.search(key)), other)


def _check_names(overrides: Sequence[str]) -> list[Override]:
    """Return the overrides parsed; refuse unknown keys and choices, and name the closest."""
    parsed, valid = parse_overrides(overrides), dict(_keys(TrainConfig))
    for override in parsed:
        key = override.key_or_group
        if override.is_sweep_override():
            raise ConfigError(
                f"expected one value of {key}, found several; `multirun` makes a run of each, and text with "
                f"commas needs quotation marks: \"{key}='a,b'\""
            )
        if re.match(r"hydra\b", key):
            raise ConfigError(
                f"{key}: Hydra's own settings and launchers are not used; `multirun` starts runs one after another. "
                "For runs at the same time start each by its own command and trainer.out, for example in a job array"
            )
        if key in (*_GROUPS, "preset"):
            _check_choice(override, key)
        elif key not in valid and not key.startswith("model.overrides."):
            names = sorted({*valid, *_GROUPS, "preset"})
            meant = _OTHER_NAMES.get(key.rpartition(".")[2].lower())
            raise ConfigError(f"found no setting {key!r}; {suggest(key, names, meant=meant, cutoff=0.0)}")
    return parsed


def _check_effects(overrides: Sequence[Override], network: ConfigDict) -> None:
    """Refuse settings of samples that the network does not have; those of a preset may stay.

    Raises:
        ConfigError: A setting has no effect on this network.
    """
    reads_coevolution = bool(network.model.embeddings_and_evoformer.get("coevolution", False))
    needs = {
        "data.unclamped_probability": (
            not is_multimer(network),
            "it clamps every backbone FAPE within a chain, and those between chains by interface_fape",
        ),
        "data.coevolution_dropout": (reads_coevolution, "it does not read coevolution"),
        "data.coevolution_subsets": (reads_coevolution, "it does not read coevolution"),
        "data.max_chains": (is_multimer(network), "its samples are single chains"),
        "data.spatial_crop_probability": (is_multimer(network), "its samples are single chains"),
    }
    kind = "multimer" if is_multimer(network) else "monomer"
    for override in overrides:
        has_effect, reason = needs.get(override.key_or_group, (True, ""))
        if not has_effect:
            raise ConfigError(
                f"{override.key_or_group} has no effect on this {kind} network: {reason}. Leave the setting out, or "
                "choose another network with model="
            )


def _whole_numbers(overrides: Sequence[Override]) -> list[str]:
    """Return the overrides as text, with ``1e3`` as ``1000`` where a setting is an integer."""
    types, texts = dict(_keys(TrainConfig)), []
    for override in overrides:
        value, text = override.value(), str(override.input_line)
        is_int = types.get(override.key_or_group, "").startswith("int")
        if is_int and isinstance(value, float) and value.is_integer():
            text = f"{text.partition('=')[0]}={int(value)}"
        texts.append(text)
    return texts


def _check_choice(override: Override, group: str) -> None:
    files = [entry.name for entry in resources.files(_CONFIGS).joinpath(group).iterdir()]
    choices = sorted(name.removesuffix(".yaml") for name in files if name.endswith(".yaml"))
    choice = override.value()
    if choice not in choices:
        hint = suggest(f"{group}={choice}", [f"{group}={name}" for name in choices])
        raise ConfigError(f"expected {group}={'|'.join(choices)}, found {choice}; {hint}")
    if group == "preset" and override.type is not None and not override.is_add():
        raise ConfigError(f"presets need a plus sign: write +preset={choice}")


def _keys(schema: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield every setting of a group and those below it, with the text of its type."""
    for field in fields(schema):
        factory = field.default_factory
        if is_dataclass(factory):
            yield from _keys(factory, f"{prefix}{field.name}.")
        else:
            yield f"{prefix}{field.name}", str(field.type)


def _first_lines(error: BaseException) -> str:
    """Return the message of an error of Hydra or OmegaConf, without its internals."""
    cause = error.__cause__ if isinstance(error.__cause__, OmegaConfBaseException) else error
    lines = [line.strip() for line in str(cause).splitlines() if line.strip()]
    place = next((line.removeprefix("full_key: ") for line in lines if line.startswith("full_key: ")), "")
    return f"{place}: {lines[0]}" if place else lines[0]


def check_settings(config: TrainConfig, tree: ConfigDict) -> None:
    """Check that the settings of a run go together.

    Raises:
        ConfigError: Two settings exclude each other; names them and what to set.
    """
    finetune = config.finetune
    if config.model.weights is None and (finetune.from_weights or finetune.lora_rank):
        remedy = "" if finetune.lora_rank else ", or finetune.from_weights=false to begin with random ones"
        raise ConfigError(f"expected weights to fine-tune, found none: give model.weights=FILE{remedy}")
    if finetune.lora_rank and config.optim.name == "muon":
        raise ConfigError("finetune=lora trains adapters, which muon does not step: set optim=finetune")
    if "data" not in tree:  # a multimer network, whose templates take no rows of the clustered MSA
        return
    data = tree.data
    has_templates = tree.model.embeddings_and_evoformer.template.enabled
    if data.common.use_templates != has_templates:
        raise ConfigError(
            f"expected data.common.use_templates={str(has_templates).lower()} in model.overrides, because the network "
            f"{'has' if has_templates else 'lacks'} layers for templates (template.enabled), found the opposite"
        )
    templates, rows = data.eval.max_templates, data.eval.max_msa_clusters
    if data.common.reduce_msa_clusters_by_max_templates and rows <= templates:
        raise ConfigError(
            f"expected data.eval.max_msa_clusters above {templates}, because each of {templates} templates takes a row "
            f"of the clustered MSA, found {rows}: set model.overrides.data.eval.max_msa_clusters={templates + 1} or "
            "more"
        )
