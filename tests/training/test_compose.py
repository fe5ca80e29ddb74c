"""The configuration: what Hydra composes is complete, typed, and refused with the nearest valid name."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from fastfold.cli import main
from fastfold.errors import ConfigError
from fastfold.training import compose
from fastfold.training.compose import compose_config, compose_tree, network_config, to_yaml
from fastfold.training.config import TrainConfig
from fastfold.training.lifecycle.sweep import sweep_jobs
from tests.helpers.compositions import compose_run

KEY = "model.overrides.model.embeddings_and_evoformer"
TRIANGLE = f"{KEY}.evoformer.triangle_attention_starting_node"
HEADS = "model.overrides.model.heads"
MASKED = "model.overrides.data.common.masked_msa"
PLACES = ["data.directory=structures", "trainer.out=run"]


@pytest.mark.parametrize(
    "text",
    ["2024_05", "1e5", "007", "true", "Läufe (neu), v=1", "a'b\\", "[x]", "{y}", "x's \\'y", "a b", "off"],
)
def test_text_is_what_was_typed(text: str) -> None:
    """Hydra reads numbers, and refuses letters beyond ASCII and most signs without quotation marks."""
    assert compose_config(["data.directory=x", f"trainer.out={text}"]).trainer.out == text
    swept = sweep_jobs(["data.directory=x", f"trainer.out={text}", "trainer.seed=1,2"])
    assert [compose_config(job).trainer.out for job in swept.values()] == [
        f"{text}/trainer.seed={seed}" for seed in (1, 2)
    ]


@pytest.mark.parametrize(
    "preset", ["initial", "finetune", "finetune_multimer", "mini", "mini_late", "overfit"]
)
def test_every_preset_composes_and_describes_a_network(preset: str):
    config = compose_config([f"+preset={preset}", *PLACES])
    assert (config.data.directory, config.trainer.out) == ("structures", "run")
    assert network_config(config.model).model.embeddings_and_evoformer.evoformer_num_block > 0


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        (["model=model_1_multimer_v3", "data.unclamped_probability=1.0"], "clamps every backbone FAPE"),
        (["+preset=finetune_multimer", "data.coevolution_dropout=0.5"], "does not read coevolution"),
        (["+preset=initial", "data.coevolution_subsets=2"], "does not read coevolution"),
        (["+preset=mini", "data.max_chains=3"], "its samples are single chains"),
        (["+preset=finetune", "data.spatial_crop_probability=0.2"], "its samples are single chains"),
    ],
)
def test_a_setting_without_effect_on_the_network_is_refused(settings: list[str], reason: str):
    name = settings[-1].partition("=")[0]
    with pytest.raises(
        ConfigError, match=rf"{name} has no effect on this (multimer|monomer) network.*{reason}"
    ):
        compose_config([*settings, *PLACES])


def test_settings_with_an_effect_and_those_of_presets_compose():
    given = {"data.coevolution_dropout": 0.5, "data.unclamped_probability": 0.3}
    config = compose_config(["+preset=mini", *(f"{name}={x}" for name, x in given.items()), *PLACES])
    assert (config.data.coevolution_dropout, config.data.unclamped_probability) == (0.5, 0.3)
    config = compose_config(["+preset=overfit", "model=model_1_multimer_v3", "data.max_chains=3", *PLACES])
    assert (config.data.unclamped_probability, config.data.max_chains) == (1.0, 3)


def loss_weights(name: str, *overrides: str) -> list[float | None]:
    """Weights of smooth lDDT and the CA trace in a preset; None where the network has no such loss."""
    node = network_config(compose_config([f"+preset={name}", *overrides, *PLACES]).model).model.heads
    return [node.structure_module.get(loss, {}).get("weight") for loss in ("smooth_lddt", "ca_trace")]


def test_overfit_has_less_smooth_lddt_than_mini_and_other_networks_have_none():
    assert loss_weights("overfit")[0] == 1.0
    assert loss_weights("mini")[0] == 10.0
    assert loss_weights("overfit", "model=model_3_ptm") == [None, None]


def test_the_loss_on_the_ca_trace_waits_until_there_is_a_structure():
    weights = {name: loss_weights(name)[1] for name in ("overfit", "mini", "mini_late")}
    assert weights == {"overfit": 0.0, "mini": 0.0, "mini_late": 1.0}


def test_the_late_stage_of_mini_trains_the_same_network_to_a_rate_of_nothing():
    first, late = (compose_config([f"+preset={name}", *PLACES]) for name in ("mini", "mini_late"))
    assert late.model == replace(first.model, overrides={})
    assert late.data.crop_size > first.data.crop_size
    assert late.data.unclamped_probability < first.data.unclamped_probability
    changed = {name: getattr(first.data, name) for name in ("crop_size", "unclamped_probability")}
    assert replace(late.data, **changed) == first.data
    assert late.optim.cosine_steps == late.trainer.steps
    assert late.optim.final_fraction == 0.0


def test_the_rate_of_overfit_falls_to_nothing_in_as_many_steps_as_there_are():
    for steps in ([], ["trainer.steps=7"]):
        config = compose_config(["+preset=overfit", *PLACES, *steps])
        assert config.optim.cosine_steps == config.trainer.steps


def test_what_a_user_sets_wins_over_the_preset():
    config = compose_config(
        [*PLACES, "+preset=mini", "optim.lr=0.25", "data.crop_size=7", "data.oversample={1ten: 3}"]
    )
    assert (config.optim.lr, config.data.crop_size, config.data.oversample["1ten"]) == (0.25, 7, 3.0)


def test_overrides_reach_the_network():
    key = "model.overrides.model.embeddings_and_evoformer"
    tree = network_config(compose_config([*PLACES, "+preset=mini", f"{key}.pair_channel=24"]).model)
    assert tree.model.embeddings_and_evoformer.pair_channel == 24
    assert tree.model.embeddings_and_evoformer.msa_channel == 64  # of the preset, untouched


def test_a_negative_tolerance_of_recycling_runs_all_passes():
    """AlphaFold stops where the change is at most the tolerance, so a negative one never stops."""
    setting = "model.overrides.model.recycle_early_stop_tolerance"
    multimer = [*PLACES, "model=model_1_multimer_v3"]
    tree = network_config(compose_config([*multimer, f"{setting}=-1.0"]).model)
    assert tree.model.recycle_early_stop_tolerance == -1.0
    with pytest.raises(ConfigError, match=f"{setting} must be finite"):
        network_config(compose_config([*multimer, f"{setting}=inf"]).model)


def test_the_printed_configuration_is_the_whole_one_and_composes_again(capsys: pytest.CaptureFixture[str]):
    assert main(["train", "--cfg", "job", "+preset=mini", "data.directory=structures"]) == 0
    printed = OmegaConf.create(capsys.readouterr().out)
    expected = compose_tree(["+preset=mini", "data.directory=structures"])
    assert printed == expected
    assert set(OmegaConf.structured(TrainConfig)) == set(printed)
    config = compose_config([*PLACES, "+preset=mini"])
    assert OmegaConf.create(to_yaml(config)).optim.lr == config.optim.lr


def test_runs_of_tests_have_the_configuration_that_they_ask_for():
    base = ["+preset=overfit", "data.directory=x", "optim.batch_size=1"]
    changes = [
        "trainer.out=y",
        "memory=checkpointing",
        "trainer.steps=7",
        "data.directory=z",
        "optim.decay_after=null",
    ]
    more = ["finetune.freeze=['evoformer.*','heads.*']", f"{KEY}.pair_channel=24", "data.oversample={a: 3}"]
    for chosen in (changes, [*more, *changes], changes):  # nothing of one is left in the next
        assert compose_run(base, *chosen) == compose_config([*base, *chosen])


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["data.crop_sze=3"], r"no setting 'data.crop_sze'; did you mean data.crop_size\?"),
        (["modle=mini"], r"no setting 'modle'; did you mean model\?"),
        (["model=mni"], r"did you mean model=mini\?"),
        (["+preset=minni"], r"did you mean preset=mini\?"),
        (["preset=mini"], r"write \+preset=mini"),
        (["data.crop_size=many"], r"data.crop_size: .*'many'"),
        (["trainer.steps=1.5"], r"trainer.steps: .*1.5"),
        ([*PLACES, "data.crop_size=0"], "data.crop_size must be at least 1, got 0"),
        ([*PLACES, "optim.lr=-1"], "optim.lr must be above 0"),
        ([*PLACES, "data.order=random"], "data.order must be one of draw, ready"),
        ([*PLACES, "optim.beta1=1.5"], "optim.beta1 must be at least 0 and below 1, got 1.5"),
        (["learning_rate=1e-3"], r"no setting 'learning_rate'; did you mean optim.lr\?"),
        (["trainer.keep_checkpoints=5"], r"no setting .*; did you mean trainer.keep_last\?"),
        (
            [*PLACES, "trainer.keep_every=750"],
            "trainer.keep_every=750 must be a multiple of trainer.checkpoint_every=500",
        ),
        (["trainer.max_steps=10"], r"did you mean trainer.steps\?"),
        (["Optim.Output_Dir=x"], r"did you mean trainer.out\?"),
        (
            ["hydra/launcher=joblib"],
            "hydra/launcher: Hydra's own settings and launchers are not used; multirun=",
        ),
        (["hydra.launcher.n_jobs=4"], "by its own command and trainer.out, for example in a job array"),
        (["data.directory=x"], "trainer.out is not set"),
        (["trainer.out=x"], "data.directory is not set"),
        (["data.directory"], "overrides look like"),
        (["data.directory='x"], "overrides look like"),
        ([*PLACES, "optim.lr=(1)"], "overrides look like"),
        ([*PLACES, "optim.lr=1e-3,1e-4"], "expected one value of optim.lr, found several; multirun"),
        ([*PLACES, f"{KEY}.pair_chanel=3"], r"pair_chanel does not exist; did you mean .*pair_channel\?"),
        ([*PLACES, f"{KEY}.pair_channel=wide"], "pair_channel must be of type int, got 'wide'"),
        ([*PLACES, f"{KEY}.pair_channel=null"], "pair_channel must be of type int, got None"),
        ([*PLACES, f"{KEY}=3"], "embeddings_and_evoformer is a group of keys"),
        ([*PLACES, f"{KEY}.max_relative_feature=-1"], "max_relative_feature must be at least 0, got -1"),
        ([*PLACES, f"{TRIANGLE}.dropout_rate=1.0"], "dropout_rate must be at least 0 and below 1, got 1.0"),
        ([*PLACES, f"{TRIANGLE}.dropout_rate=-0.1"], "dropout_rate must be at least 0 and below 1, got -0.1"),
        (
            [*PLACES, f"{HEADS}.distogram.weight=nan"],
            "distogram.weight must be finite and at least 0, got nan",
        ),
        (
            [*PLACES, f"{HEADS}.structure_module.position_scale=0.0"],
            "position_scale must be above 0, got 0.0",
        ),
        ([*PLACES, f"{MASKED}.same_prob=1.5"], "same_prob must be at least 0 and at most 1, got 1.5"),
        ([*PLACES, f"{TRIANGLE}.orientation=rows"], "orientation cannot change: .*'per_row', found 'rows'"),
        ([*PLACES, "model.overrides.model.global_config.multimer_mode=true"], "multimer_mode cannot change"),
        ([*PLACES, f"{TRIANGLE}.shared_dropout=false"], "shared_dropout cannot change: expected True"),
        ([*PLACES, "model.preset=model_9"], "did you mean"),
        ([*PLACES, "model.name=runs/first"], "without folders, not 'runs/first'; trainer.out is"),
        ([*PLACES, "model.name=''"], "model.name is empty; give a value, or leave the setting out"),
        (["data.directory=", "trainer.out=x"], "data.directory is empty"),
        (["data.directory=x", "trainer.out="], "trainer.out is empty"),
        ([*PLACES, "data.cache=' '"], "data.cache is empty"),
        ([*PLACES, "trainer.checkpoint_dir="], "trainer.checkpoint_dir is empty"),
        ([*PLACES, "model.weights="], "model.weights is empty"),
        ([*PLACES, f"trainer.seed={2**63}"], "trainer.seed must be at least 0 and at most"),
    ],
)
def test_what_is_wrong_is_refused_before_anything_is_loaded(overrides: list[str], message: str):
    with pytest.raises(ConfigError, match=message):
        compose_config(overrides)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("trainer.precision=fp16", "trainer.precision must be one of fp32, bf16, not 'fp16'"),
        ("optim.lr=-1", "optim.lr must be above 0, got -1.0"),
        ("optim.lr=inf", "optim.lr must be finite and above 0, got inf"),
        ("data.crop_size=0", "data.crop_size must be at least 1, got 0"),
        ("optim.beta1=1.0", "optim.beta1 must be at least 0 and below 1, got 1.0"),
        ("optim.weight_decay=nan", "optim.weight_decay must be finite and at least 0 and at most 1, got nan"),
        ("data.max_resolution=-3", "data.max_resolution must be above 0, got -3.0"),
        ("finetune.lora_alpha=0", "finetune.lora_alpha must be above 0, got 0.0"),
        ("parallel.dap=0", "dap"),
        ("parallel.dp=0", "parallel.dp must be at least 1, got 0"),
        (
            "model.overrides.model.heads.structure_module.num_layer=0",
            "model.overrides.model.heads.structure_module.num_layer must be at least 1, got 0",
        ),
        (f"{KEY}.pair_channel=-4", "pair_channel must be at least 1, got -4"),
    ],
)
def test_a_start_and_the_printed_configuration_refuse_the_same(
    override: str, message: str, capsys: pytest.CaptureFixture[str]
):
    """Although what is printed may lack settings that a start needs."""
    assert main(["train", "--cfg", "job", override]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    with pytest.raises(ConfigError) as refused:
        compose_config([*PLACES, override])
    assert message in str(refused.value)
    assert str(refused.value) in printed.err


def test_other_names_are_no_settings_and_lead_to_ones():
    settings = set(dict(compose._keys(TrainConfig)))
    assert set(compose._OTHER_NAMES.values()) <= settings
    assert not set(compose._OTHER_NAMES) & {name.rpartition(".")[2] for name in settings}


def test_the_command_says_it_in_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    assert main(["train", "trainr.steps=3"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "did you mean trainer.steps?" in error
