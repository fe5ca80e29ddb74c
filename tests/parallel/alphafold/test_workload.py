"""Networks as workloads: operators of all their layers, and gradients of inputs with block inputs on the host."""

from __future__ import annotations

import pytest
from torch import Tensor

from fastfold.errors import ConfigError
from fastfold.evoformer.config import MINI, model_config
from fastfold.evoformer.model import AlphaFold
from fastfold.parallel.alphafold.workload import (
    alphafold_stacks,
    alphafold_workload,
    input_gradient_workload,
    one_block_config,
)
from fastfold.parallel.plan import ParallelPlan
from fastfold.parallel.planner.cost_model import step_cost
from fastfold.parallel.planner.fake_run import fake_mesh, trace
from fastfold.parallel.planner.hardware import rates
from fastfold.parallel.planner.recorder import Part
from tests.helpers.networks import oracle_config


def score(result: dict[str, dict[str, Tensor]]) -> Tensor:
    return result["distogram"]["logits"].square().mean()


@pytest.mark.long
def test_repeated_blocks_count_the_operators_of_the_whole_network() -> None:
    config = oracle_config()
    workload = alphafold_workload(config, residues=8, msa=3, extra_msa=4, precision="fp32")
    with fake_mesh(ParallelPlan()) as mesh:
        whole = trace(lambda _: AlphaFold(config).train(), workload.loss, mesh, small=True)

    def launches(part: Part) -> int:
        return sum(operation.launches * number for operation, number in part.operations.items())

    traced = workload.trace(ParallelPlan()).regions.items()
    forward, backward = (
        sum(workload.repeat(name).count * launches(getattr(region, part)) for name, region in traced)
        for part in ("forward", "backward")
    )
    assert forward == launches(whole.regions[""].forward)
    assert backward == pytest.approx(launches(whole.regions[""].backward), rel=0.02)


@pytest.mark.long
def test_parameters_take_no_gradient_and_inputs_of_blocks_wait_on_the_host() -> None:
    config = oracle_config()
    config.model.embeddings_and_evoformer.evoformer_num_block = 9
    workload = input_gradient_workload(config, residues=24, score=score, recompute=True)
    speeds = rates("h100")
    here, away = (step_cost(workload, ParallelPlan(), speeds, host=host) for host in (0, 1 << 40))
    assert set(here.memory) == {"parameters", "activations", "working"}
    assert here.host == 0
    assert away.host > 0
    assert here.total_memory - away.total_memory == pytest.approx(away.host)
    regions = workload.trace(ParallelPlan()).regions
    largest = max(region.entering for name, region in regions.items() if "blocks" in name)
    assert away.memory["activations"] == pytest.approx(2 * largest)
    assert away.seconds >= here.seconds
    # The traced backward pass has the recomputation, which is therefore not counted once more.
    plain = step_cost(workload, ParallelPlan(), speeds, checkpointing=False)
    assert here.flops == plain.flops


def test_sizes_are_checked() -> None:
    for wrong in ({"residues": 0}, {"residues": 9, "recycles": -1}, {"residues": 9, "precision": "int8"}):
        with pytest.raises(ConfigError, match="expected"):
            input_gradient_workload(oracle_config(), score=score, **wrong)  # type: ignore[arg-type]


def test_a_network_without_a_stack_is_traced_without_it() -> None:
    """The small network that ships has no extra MSA; a block of its one channel would have heads of none."""
    config = model_config(MINI)
    assert set(alphafold_stacks(config)) == {"evoformer.blocks.0"}
    network = AlphaFold(one_block_config(config))
    assert not list(network.extra_msa_stack.parameters())
    assert len(network.evoformer.blocks) == 1
