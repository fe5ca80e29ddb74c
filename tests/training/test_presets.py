"""Every preset trains, on one process and on two, and both have the same weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from fastfold.training.run import train
from tests.helpers.compositions import compose_run
from tests.helpers.forked import Forked, rank_environments
from tests.training.conftest import NETWORK, overrides, without_report

SHORT = [
    *(
        "trainer.steps=3",
        "trainer.log_every=1",
        "trainer.device=cpu",
        "data.valid_split=null",
        "data.workers=0",
    ),
    *("optim.batch_size=2", "data.crop_size=12", "data.max_recycles=0", "finetune.from_weights=false"),
]
# Widths of the official networks are those of the tests; that of `mini` needs only fewer blocks.
_SMALL = overrides(NETWORK, "model.overrides")
_FEWER = [
    "model.overrides.model.embeddings_and_evoformer.evoformer_num_block=1",
    "model.overrides.model.heads.structure_module.num_layer=1",
]
PRESETS = {
    "initial": _SMALL,
    "finetune": _SMALL,
    "mini": _FEWER,
    "mini_late": _FEWER,
    "overfit": _FEWER,
}


def _settings(preset: str, data: Path, out: Path) -> list[str]:
    return [f"+preset={preset}", *PRESETS[preset], *SHORT, f"data.directory={data}", f"trainer.out={out}"]


def _train(settings: list[str]) -> int:
    torch.set_num_threads(1)
    with without_report():
        return int(not train(compose_run(settings)))


def test_no_preset_is_left_out() -> None:
    folder = Path(__file__).parents[2] / "fastfold/configs/preset"
    # That of complexes is in test_train_complex.py, with its data.
    assert {path.stem for path in folder.glob("*.yaml")} == {*PRESETS, "finetune_multimer"}


@pytest.mark.parametrize("preset", PRESETS)
def test_three_steps_on_two_processes_equal_those_on_one(
    preset: str, data_folder: Path, tmp_path: Path
) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    started = [
        Forked(_train, _settings(preset, data_folder, two), env=environment)
        for environment in rank_environments(2)
    ]
    assert _train(_settings(preset, data_folder, one)) == 0
    said = [process.communicate() for process in started]
    assert [process.returncode for process in started] == [0, 0], said
    (expected,), (found,) = ([load_file(path) for path in out.glob("*.safetensors")] for out in (one, two))
    assert found.keys() == expected.keys()
    assert max(float((found[name] - x).abs().max()) for name, x in expected.items()) == 0.0
