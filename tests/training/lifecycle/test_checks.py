"""Settings that exclude each other are refused before data are read, and the remedy named helps."""

from __future__ import annotations

import pytest

from fastfold.errors import ConfigError
from fastfold.training.compose import check_settings, compose_config, network_config
from tests.helpers.compositions import compose_run

GIVEN = ("data.directory=x", "trainer.out=y")
TEMPLATES = "model.overrides.data.common.use_templates"
LAYERS = "model.overrides.model.embeddings_and_evoformer.template.enabled"
CLUSTERS = "model.overrides.data.eval.max_msa_clusters"


def check(*overrides: str) -> None:
    config = compose_run(GIVEN, *overrides)
    check_settings(config, network_config(config.model))


@pytest.mark.parametrize(
    ("overrides", "message", "remedy"),
    [
        (["+preset=finetune"], "give model.weights=FILE, or finetune.from", "finetune.from_weights=false"),
        (["+preset=finetune"], "expected weights to fine-tune, found none", "model.weights=w.npz"),
        (["finetune=lora"], "give model.weights=FILE$", "model.weights=w.npz"),
        (["finetune.lora_rank=4"], "give model.weights=FILE$", "model.weights=w.npz"),
        (
            ["+preset=mini", "finetune=lora", "model.weights=w.npz"],
            "muon does not step: set optim=finetune",
            "optim=finetune",
        ),
        ([f"{TEMPLATES}=false"], "has layers for templates", f"{TEMPLATES}=true"),
        (["model=model_3_ptm", f"{TEMPLATES}=true"], "lacks layers for templates", f"{TEMPLATES}=false"),
        (
            ["model=model_3_ptm", f"{LAYERS}=true"],
            "expected data.common.use_templates=true in model.overrides",
            f"{TEMPLATES}=true",
        ),
        ([f"{CLUSTERS}=4"], f"found 4: set {CLUSTERS}=5 or more", f"{CLUSTERS}=5"),
    ],
)
def test_what_is_refused_passes_with_its_remedy(overrides: list[str], message: str, remedy: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check(*overrides)
    check(*overrides, remedy)


def test_multimers_have_no_clusters_that_templates_take() -> None:
    check("model=model_1_multimer_v3")


def test_a_whole_number_may_be_written_with_an_exponent() -> None:
    config = compose_config([*GIVEN, "trainer.steps=2e3", "optim.lr=1e-3", "trainer.validate_every=1.5e2"])
    assert (config.trainer.steps, config.optim.lr, config.trainer.validate_every) == (2000, 1e-3, 150)
    with pytest.raises(ConfigError, match=r"trainer.steps: Value '1500.5' of type 'float'"):
        compose_config([*GIVEN, "trainer.steps=1500.5"])
