"""Settings are the network's own unless they are given, and its configuration stays as it is."""

from __future__ import annotations

import pytest

from fastfold.errors import ConfigError, as_option, settings_spelled
from fastfold.evoformer.config import model_config
from fastfold.inference.config import InferConfig
from fastfold.inference.models import check_settings
from fastfold.inference.network_settings import apply_settings, numeric_settings, recycle_tolerance


@pytest.mark.parametrize("name", ["model_1", "model_3_ptm", "model_1_multimer_v3", "mini"])
def test_nothing_given_changes_nothing(name: str):
    network = model_config(name)
    assert apply_settings(InferConfig(), network).to_dict() == network.to_dict()


@pytest.mark.parametrize("name", ["model_3_ptm", "model_1_multimer_v3"])
def test_what_is_given_is_in_the_configuration_that_is_used(name: str):
    network = model_config(name)
    before = network.to_dict()
    given = InferConfig(num_recycles=7, num_ensemble=2, recycle_tolerance=0.25, max_msa=(16, 32))
    numbers = numeric_settings(given, network)
    assert (numbers["num_recycles"], numbers["num_ensemble"], numbers["max_msa"]) == (7, 2, [16, 32])
    assert recycle_tolerance(apply_settings(given, network)) == numbers["recycle_tolerance"] == 0.25
    assert network.to_dict() == before


def test_the_default_spelled_out_is_the_same_run():
    network = model_config("model_1_multimer_v3")
    spelled = InferConfig(num_recycles=20, num_ensemble=1, recycle_tolerance=0.5, max_msa=(508, 2048))
    assert numeric_settings(spelled, network) == numeric_settings(InferConfig(), network)


def test_where_and_in_which_pieces_a_target_is_folded_does_not_make_it_another_run():
    network = model_config("model_1")
    moved = InferConfig(
        device="cpu", memory_budget="1GiB", plots=False, pae=True, rank="ptm", save_recycles=True
    )
    assert numeric_settings(moved, network) == numeric_settings(InferConfig(), network)


def test_templates_leave_a_row_for_the_sequence():
    with (
        settings_spelled(as_option),
        pytest.raises(ConfigError, match=r"--max-msa 4:1 leaves no row .* give at least 5:1"),
    ):
        apply_settings(InferConfig(max_msa=(4, 1)), model_config("model_1_ptm"))
    apply_settings(InferConfig(max_msa=(1, 1)), model_config("model_3_ptm"))


def test_cluster_profiles_are_disabled_for_multimer_networks_alone():
    """Monomer networks keep their features, and a run of nothing else is refused."""
    monomer, multimer = model_config("model_1_ptm"), model_config("model_1_multimer_v3")
    disabled = InferConfig(use_cluster_profile=False)
    assert apply_settings(disabled, multimer).model.embeddings_and_evoformer.use_cluster_profile is False
    assert apply_settings(disabled, monomer).to_dict() == monomer.to_dict()
    changed = numeric_settings(InferConfig(), multimer) | {"use_cluster_profile": False}
    assert numeric_settings(disabled, multimer) == changed
    assert numeric_settings(disabled, monomer) == numeric_settings(InferConfig(), monomer)
    check_settings(disabled, [monomer, multimer])
    with pytest.raises(ConfigError, match=r"leave out InferConfig\.use_cluster_profile,"):
        check_settings(disabled, [monomer])
