"""Low-rank adapters (LoRA) as files of their own, in the format of Hugging Face's PEFT.

An adapter is a folder with ``adapter_config.json`` and ``adapter_model.safetensors``. Merging adds its products to the
weights of a network, ``W + s B A``, as PEFT's ``merge_and_unload`` does. Variants of LoRA with another update are
refused.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from fastfold.errors import InputError, OutputError, WeightsError
from fastfold.evoformer.weights.mapping import refuse_not_finite
from fastfold.evoformer.weights.untrusted import DAMAGED
from fastfold.utils.atomic_files import replacing, write_atomic
from fastfold.utils.foreign_text import json_object_or_none, parse_json
from fastfold.utils.tensor_files import write_tensors
from fastfold.utils.text_files import read_text_bytes

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"

_PREFIX = "base_model.model."
_KEY = re.compile(r"(?:base_model\.model\.)?(?P<layer>.+)\.lora_(?P<side>[AB])\.weight")
_BASE = "fastfold_base"  # header entry: some weights of the base network
_SAMPLES = 4
# Initial values that leave the base network's weights as they are; others subtract the adapter from them.
_NEUTRAL = ("gaussian", "eva", "orthogonal")
_NAMED_LAYERS = 3
_MAX_CONFIG = 1 << 24  # bytes


@dataclass(frozen=True)
class LowRankUpdate:
    """Update ``scale · B A`` of a linear layer's weight ``[c_out, c_in]``."""

    a: Tensor  #: ``[r, c_in]``
    b: Tensor  #: ``[c_out, r]``
    scale: float

    def merged(self, weight: Tensor) -> Tensor:
        """Return the updated weight ``[c_out, c_in]``, in the precision of ``weight``."""
        return weight + self.scale * (self.b.to(weight) @ self.a.to(weight))


@dataclass(frozen=True)
class Adapter:
    """Updates of a network's layers."""

    origin: str  #: Folder of the adapter, for errors
    updates: Mapping[str, LowRankUpdate]  #: By name of the layer
    base: str | None = None  #: Name or path of the network that it was trained on
    #: Some weights of that network by layer; empty if the adapter is another program's
    base_samples: Mapping[str, list[float]] = field(default_factory=dict)


def write_adapter(
    folder: Path, updates: Mapping[str, LowRankUpdate], state: Mapping[str, Tensor], *, base: str | None
) -> None:
    """Write an adapter in PEFT's format.

    Args:
        folder: Created if missing; files of an older adapter are replaced.
        updates: Updates by name of the layer.
        state: State dict of the network without the adapter, some of whose values are kept to recognise it.
        base: Name or path of that network.

    Raises:
        OutputError: The files cannot be written.
    """
    r = max(len(update.a) for update in updates.values())
    # PEFT scales by alpha / r of each layer; all of ours have one scale, also where the layer is smaller than the rank.
    alphas = {layer: _number(update.scale * len(update.a)) for layer, update in updates.items()}
    alpha = next(alphas[layer] for layer, update in updates.items() if len(update.a) == r)
    config = {
        "peft_type": "LORA",
        "base_model_name_or_path": base,
        "inference_mode": True,
        "target_modules": list(updates),
        "r": r,
        "lora_alpha": alpha,
        "rank_pattern": {layer: len(update.a) for layer, update in updates.items() if len(update.a) != r},
        "alpha_pattern": {layer: value for layer, value in alphas.items() if value != alpha},
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "use_rslora": False,
        "init_lora_weights": True,
    }
    tensors = {}
    for layer, update in updates.items():
        tensors[f"{_PREFIX}{layer}.lora_A.weight"] = update.a
        tensors[f"{_PREFIX}{layer}.lora_B.weight"] = update.b
    samples = {layer: _sample(state[f"{layer}.weight"]) for layer in updates}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with replacing(folder / TENSORS) as temporary, temporary.open("wb") as file:
            write_tensors(file, tensors, {"format": "pt", _BASE: json.dumps(samples)})
        write_atomic(folder / CONFIG, json.dumps(config, indent=2) + "\n")
    except OSError as error:
        raise OutputError(
            f"cannot write {folder}: {error}; free some space or choose another folder"
        ) from error


def read_adapter(folder: Path) -> Adapter:
    """Read an adapter that FastFold or PEFT wrote.

    Raises:
        WeightsError: The folder lacks an adapter's files, they are damaged or disagree, or the update is not
            ``s B A`` of linear layers alone.
    """
    config = _read_config(folder)
    tensors, header = _read_tensors(folder)
    sides: dict[str, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        match = _KEY.fullmatch(key)
        if match is None:
            raise WeightsError(
                f"{folder}: {key} is not a low-rank matrix of a linear layer; only plain LoRA adapters can be merged, "
                "without trained biases, embeddings or whole modules"
            )
        sides.setdefault(match["layer"], {})[match["side"]] = tensor
    if not sides:
        raise WeightsError(f"{folder}: expected low-rank matrices, found none; the adapter {DAMAGED}")
    updates = {layer: _update(folder, layer, pair, config) for layer, pair in sides.items()}
    base = config.get("base_model_name_or_path")
    return Adapter(str(folder), updates, base if isinstance(base, str) else None, _base_samples(header))


def merge_adapter(state: Mapping[str, Tensor], adapter: Adapter) -> dict[str, Tensor]:
    """Return a network's state dict with an adapter's updates added to its weights.

    Raises:
        WeightsError: The network lacks a layer or has one of another size, or its weights are not those that the
            adapter was trained on.
    """
    problems = list(_problems(state, adapter))
    if problems:
        shown = "; ".join(problems[:_NAMED_LAYERS])
        more = f"; and {len(problems) - _NAMED_LAYERS} more" if len(problems) > _NAMED_LAYERS else ""
        trained_on = f" (it was trained on {adapter.base})" if adapter.base else ""
        raise WeightsError(
            f"{adapter.origin}: {shown}{more}. The adapter belongs to another network{trained_on}; pass that one's "
            "weights"
        )
    merged = dict(state)
    for layer, update in adapter.updates.items():
        merged[f"{layer}.weight"] = update.merged(state[f"{layer}.weight"])
    return merged


def _problems(state: Mapping[str, Tensor], adapter: Adapter) -> Iterator[str]:
    for layer, update in adapter.updates.items():
        weight = state.get(f"{layer}.weight")
        shape = [len(update.b), update.a.shape[1]]
        if weight is None:
            yield f"the network has no layer {layer}"
        elif list(weight.shape) != shape:
            yield f"layer {layer}: expected a weight of shape {shape}, found {list(weight.shape)}"
        elif layer in adapter.base_samples and not _is_like(weight, adapter.base_samples[layer]):
            yield f"layer {layer}: expected weights near {adapter.base_samples[layer]}, found {_sample(weight)}"


def _sample(weight: Tensor) -> list[float]:
    """Return some values of a weight, evenly spaced."""
    places = torch.linspace(0, weight.numel() - 1, _SAMPLES, dtype=torch.float64).long()
    return [float(f"{x:.6g}") for x in weight.detach().cpu().reshape(-1)[places].tolist()]


def _is_like(weight: Tensor, sample: list[float]) -> bool:
    """Return True if a weight has these values, perhaps rounded to half precision."""
    own = _sample(weight)
    pairs = zip(own, sample, strict=True)
    return len(own) == len(sample) and all(math.isclose(x, y, rel_tol=2**-7, abs_tol=1e-6) for x, y in pairs)


def _number(x: float) -> float:
    return int(x) if x == int(x) else x


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / CONFIG
    if not path.is_file():
        raise WeightsError(f"{folder}: expected a folder with {CONFIG} and {TENSORS}, as PEFT writes it")
    try:
        config = parse_json(read_text_bytes(path, limit=_MAX_CONFIG), CONFIG)
    except InputError as error:
        raise WeightsError(f"{path}: cannot be read as JSON ({error})") from None
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        kind = config.get("peft_type") if isinstance(config, dict) else type(config).__name__
        raise WeightsError(f"{path}: expected an adapter of peft_type LORA, found {str(kind)[:40]}")
    initial = config.get("init_lora_weights", True)
    variants = [key for key in config if key.startswith("use_") or key.endswith("_config")]
    unsupported = [key for key in variants if config[key] and key not in ("use_rslora", "eva_config")]
    unsupported += [key for key in ("fan_in_fan_out", "layer_replication") if config.get(key)]
    if isinstance(initial, str) and initial not in _NEUTRAL:
        unsupported.append(f"init_lora_weights={initial[:20]}")
    if unsupported:
        raise WeightsError(
            f"{path}: {', '.join(unsupported)} changes more than scale · B A; merge it with PEFT (merge_and_unload)"
        )
    return config


def _read_tensors(folder: Path) -> tuple[dict[str, Tensor], Mapping[str, str]]:
    path = folder / TENSORS
    if not path.is_file():
        pickled = " adapter_model.bin is a pickle;" if (folder / "adapter_model.bin").exists() else ""
        raise WeightsError(f"{folder}: expected {TENSORS};{pickled} save the adapter as safetensors")
    try:
        with safe_open(path, "pt") as file:
            return {key: file.get_tensor(key) for key in file.keys()}, file.metadata() or {}  # noqa: SIM118
    except (SafetensorError, OSError, ValueError) as error:
        raise WeightsError(f"{path}: {DAMAGED} ({error})") from None


def _update(
    folder: Path, layer: str, sides: Mapping[str, Tensor], config: Mapping[str, Any]
) -> LowRankUpdate:
    """Check the matrices of a layer against each other and the configuration."""
    a, b = sides.get("A"), sides.get("B")
    if a is None or b is None:
        raise WeightsError(
            f"{folder}: layer {layer} lacks lora_{'A' if a is None else 'B'}; the adapter {DAMAGED}"
        )
    if (
        a.ndim != 2
        or b.ndim != 2
        or len(a) != b.shape[1]
        or not (a.is_floating_point() and b.is_floating_point())
    ):
        raise WeightsError(
            f"{folder}: layer {layer}: expected matrices [r, in] and [out, r], found {list(a.shape)} and "
            f"{list(b.shape)}; only linear layers can be merged"
        )
    for side, matrix in sides.items():
        refuse_not_finite(str(folder), f"{layer}.lora_{side}", matrix.float().numpy())
    r = _of_layer(folder, config, layer, pattern="rank_pattern", default="r")
    alpha = _of_layer(folder, config, layer, pattern="alpha_pattern", default="lora_alpha")
    if r != len(a):
        raise WeightsError(
            f"{folder}: layer {layer}: expected rank {r:g} ({CONFIG}), found {len(a)} ({TENSORS})"
        )
    return LowRankUpdate(a, b, alpha / math.sqrt(r) if config.get("use_rslora") else alpha / r)


def _of_layer(folder: Path, config: Mapping[str, Any], layer: str, *, pattern: str, default: str) -> float:
    """Return a layer's setting by PEFT's rule: the first pattern that matches the end of its name."""
    patterns = config.get(pattern) or {}
    value: Any = config.get(default)
    try:
        match = next((key for key in patterns if re.match(rf"(.*\.)?({key})$", layer)), None)
        number = float(value if match is None else patterns[match])
    except (re.error, TypeError, ValueError):
        raise WeightsError(
            f"{folder / CONFIG}: {default} or {pattern} is invalid; save the adapter again"
        ) from None
    if not 0 < number < math.inf:
        raise WeightsError(f"{folder / CONFIG}: {default} of {layer} must be above 0, got {number}")
    return number


def _base_samples(header: Mapping[str, str]) -> dict[str, list[float]]:
    samples = json_object_or_none(header.get(_BASE, "{}")) or {}
    try:
        return {str(layer): [float(x) for x in values] for layer, values in samples.items()}
    except (ValueError, TypeError):
        return {}
