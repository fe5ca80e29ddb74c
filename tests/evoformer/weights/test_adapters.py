"""Adapters are files in PEFT's format, and merging is what PEFT computes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from fastfold.errors import WeightsError
from fastfold.evoformer.weights.adapters import LowRankUpdate, merge_adapter, read_adapter, write_adapter
from fastfold.evoformer.weights.checkpoint import weights_info


def waves(*shape: int, step: float) -> Tensor:
    return (torch.arange(torch.Size(shape).numel(), dtype=torch.float32) * step).sin().reshape(shape)


BASE = {"attention.key.weight": waves(3, 4, step=0.5), "hidden.weight": waves(2, 2, step=0.7)}
# Settings of adapter_config.json and merged weights of PEFT 0.21.2 for BASE, with A = waves(step=0.3) and
# B = waves(step=0.9): get_peft_model, save_pretrained, merge_and_unload.
PATTERNS = {
    "peft_type": "LORA",
    **{"r": 3, "lora_alpha": 6, "rank_pattern": {"hidden": 1}, "alpha_pattern": {"attention.key": 5}},
    **{"use_rslora": False, "use_dora": False, "fan_in_fan_out": False, "init_lora_weights": True},
    **{"loftq_config": {}, "megatron_core": "megatron.core", "target_modules": ["key", "hidden"]},
}
PATTERNS_KEY = (
    *(2.313149, 2.475371, 2.341921, 1.868419, -0.8785887, -0.6230096),
    *(-0.4048458, -0.1724633, 0.1628045, -0.764861, -1.47219, -1.898893),
)
PATTERNS_HIDDEN = (0.0, 0.6442177, 0.9854497, 2.252143)
ROOT = PATTERNS | {"r": 4, "rank_pattern": {}, "alpha_pattern": {}, "use_rslora": True}
ROOT_KEY = (
    *(3.596295, 3.190315, 2.424799, 1.311828, -3.412234, -3.744577),
    *(-3.835495, -3.605743, 3.397642, 4.100911, 4.589871, 4.817952),
)


def peft_adapter(folder: Path, config: dict[str, Any], **ranks: int) -> Path:
    """Write an adapter as PEFT does."""
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps(config))
    tensors = {}
    for layer, r in ranks.items():
        out, columns = BASE[f"{layer.replace('__', '.')}.weight"].shape
        name = f"base_model.model.{layer.replace('__', '.')}"
        tensors[f"{name}.lora_A.weight"] = waves(r, columns, step=0.3)
        tensors[f"{name}.lora_B.weight"] = waves(out, r, step=0.9)
    save_file(tensors, folder / "adapter_model.safetensors", {"format": "pt"})
    return folder


def test_peft_adapters_merge_as_in_peft(tmp_path: Path) -> None:
    """Ranks and scales of single layers, and scales by the root of the rank."""
    merged = merge_adapter(
        BASE, read_adapter(peft_adapter(tmp_path / "a", PATTERNS, attention__key=3, hidden=1))
    )
    torch.testing.assert_close(merged["attention.key.weight"], torch.tensor(PATTERNS_KEY).reshape(3, 4))
    torch.testing.assert_close(merged["hidden.weight"], torch.tensor(PATTERNS_HIDDEN).reshape(2, 2))
    merged = merge_adapter(BASE, read_adapter(peft_adapter(tmp_path / "b", ROOT, attention__key=4)))
    torch.testing.assert_close(merged["attention.key.weight"], torch.tensor(ROOT_KEY).reshape(3, 4))
    assert torch.equal(merged["hidden.weight"], BASE["hidden.weight"])


UPDATES = {
    "attention.key": LowRankUpdate(waves(3, 4, step=0.3), waves(3, 3, step=0.9), scale=2.0),
    "hidden": LowRankUpdate(waves(1, 2, step=0.3), waves(2, 1, step=0.9), scale=2.0),
}


def test_written_adapters_have_pefts_names_and_scales(tmp_path: Path) -> None:
    """A layer that is smaller than the rank has patterns of its own."""
    write_adapter(tmp_path, UPDATES, BASE, base="model.npz")
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert (config["peft_type"], config["base_model_name_or_path"]) == ("LORA", "model.npz")
    assert config["target_modules"] == ["attention.key", "hidden"]
    assert (config["r"], config["lora_alpha"]) == (3, 6)
    assert (config["rank_pattern"], config["alpha_pattern"]) == ({"hidden": 1}, {"hidden": 2})
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    layers = ("attention.key", "hidden")
    assert set(tensors) == {
        f"base_model.model.{layer}.lora_{side}.weight" for layer in layers for side in "AB"
    }
    assert torch.equal(tensors["base_model.model.hidden.lora_B.weight"], UPDATES["hidden"].b)


def test_written_adapters_are_read_back(tmp_path: Path) -> None:
    write_adapter(tmp_path, UPDATES, BASE, base=None)
    adapter = read_adapter(tmp_path)
    assert adapter.base is None
    for layer, update in UPDATES.items():
        found = adapter.updates[layer]
        assert torch.equal(found.a, update.a)
        assert torch.equal(found.b, update.b)
        assert found.scale == update.scale
    merged = merge_adapter(BASE, adapter)
    assert torch.equal(
        merged["hidden.weight"], BASE["hidden.weight"] + 2 * (UPDATES["hidden"].b @ UPDATES["hidden"].a)
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_base_may_be_rounded_but_not_another(tmp_path: Path, dtype: torch.dtype) -> None:
    write_adapter(tmp_path, UPDATES, BASE, base="model.npz")
    adapter = read_adapter(tmp_path)
    merge_adapter({name: value.to(dtype).float() for name, value in BASE.items()}, adapter)
    for name in BASE:
        other = BASE | {name: BASE[name] + 0.02}
        with pytest.raises(
            WeightsError, match=r"expected weights near .*another network \(it was trained on model.npz"
        ):
            merge_adapter(other, adapter)


def test_adapters_of_other_networks_are_refused(tmp_path: Path) -> None:
    adapter = read_adapter(peft_adapter(tmp_path / "a", PATTERNS, attention__key=3, hidden=1))
    with pytest.raises(WeightsError, match="the network has no layer hidden"):
        merge_adapter({name: value for name, value in BASE.items() if "hidden" not in name}, adapter)
    with pytest.raises(
        WeightsError, match=r"layer hidden: expected a weight of shape \[2, 2\], found \[2, 3\]"
    ):
        merge_adapter(BASE | {"hidden.weight": torch.zeros(2, 3)}, adapter)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"peft_type": "IA3"}, "expected an adapter of peft_type LORA, found IA3"),
        ({"use_dora": True}, "use_dora changes more than"),
        ({"kasa_config": {"beta": 1.0}}, "kasa_config changes more than"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights=pissa changes more than"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out changes more than"),
        ({"r": 5}, r"layer attention\.key: expected rank 5 .*found 3"),
        ({"lora_alpha": None, "alpha_pattern": {}}, "lora_alpha or alpha_pattern is invalid"),
        ({"alpha_pattern": {"(": 1}}, "lora_alpha or alpha_pattern is invalid"),
        ({"alpha_pattern": {"key": -1}}, r"lora_alpha of attention\.key must be above 0"),
    ],
)
def test_other_updates_and_damaged_settings_are_refused(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    folder = peft_adapter(tmp_path / "a", PATTERNS | change, attention__key=3, hidden=1)
    with pytest.raises(WeightsError, match=message):
        read_adapter(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"base_model.model.hidden.bias": torch.zeros(2)}, r"hidden\.bias is not a low-rank matrix"),
        ({"base_model.model.hidden.lora_magnitude_vector": torch.zeros(2)}, "is not a low-rank matrix"),
        ({"base_model.model.hidden.lora_A.weight": None}, "layer hidden lacks lora_A"),
        (
            {"base_model.model.hidden.lora_A.weight": torch.zeros(2, 2)},
            r"expected matrices \[r, in\] and \[out, r\]",
        ),
        ({"base_model.model.hidden.lora_A.weight": torch.full((1, 2), torch.nan)}, "holds NaN or infinite"),
    ],
)
def test_other_tensors_are_refused(tmp_path: Path, change: dict[str, Tensor | None], message: str) -> None:
    path = peft_adapter(tmp_path / "a", PATTERNS, attention__key=3, hidden=1) / "adapter_model.safetensors"
    tensors = {**load_file(path), **change}
    save_file({name: x for name, x in tensors.items() if x is not None}, path)
    with pytest.raises(WeightsError, match=message):
        read_adapter(path.parent)


def test_folders_that_are_no_adapters_are_refused(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=r"expected a folder with adapter_config\.json"):
        read_adapter(tmp_path)
    (tmp_path / "adapter_config.json").write_text("{")
    with pytest.raises(WeightsError, match="cannot be read as JSON"):
        read_adapter(tmp_path)
    (tmp_path / "adapter_config.json").write_text(json.dumps(PATTERNS))
    (tmp_path / "adapter_model.bin").write_bytes(b"")
    with pytest.raises(
        WeightsError, match=r"adapter_model\.bin is a pickle; save the adapter as safetensors"
    ):
        read_adapter(tmp_path)
    (tmp_path / "adapter_model.safetensors").write_bytes(b"damage")
    with pytest.raises(WeightsError, match="truncated or damaged"):
        read_adapter(tmp_path)


def test_an_adapter_given_as_weights_is_explained(tmp_path: Path) -> None:
    write_adapter(tmp_path, UPDATES, BASE, base=None)
    with pytest.raises(
        WeightsError, match=r"is an adapter; merge it into its base first: fastfold weights merge"
    ):
        weights_info(tmp_path)
