"""Group ``parallel``: what it makes of the processes that were started, and what it refuses before they talk."""

from __future__ import annotations

import pytest

from fastfold.errors import ConfigError
from fastfold.parallel import ParallelPlan
from fastfold.training.compose import compose_config
from fastfold.training.parallel_config import ParallelConfig, plan_of

PLACES = ["data.directory=structures", "trainer.out=run"]


def test_data_parallelism_takes_what_the_other_axes_leave() -> None:
    assert plan_of(ParallelConfig(), 6) == ParallelPlan(dp=6)
    assert plan_of(ParallelConfig(dap=2, zero=1), 6) == ParallelPlan(dp=3, dap=2, zero=1)
    assert plan_of(ParallelConfig(dap=4, dap_mode="grid"), 4) == ParallelPlan(dap=4, dap_mode="grid")
    assert plan_of(ParallelConfig(dap=4, zero=3), 4) == ParallelPlan(dap=4, zero=3)


@pytest.mark.parametrize(
    ("config", "processes", "message"),
    [
        (ParallelConfig(dp=3), 1, "dp 3 = 3 ranks, but 1 was started; run torchrun --nproc-per-node 3"),
        (ParallelConfig(dp=2, dap=2), 2, "dp 2 x dap 2 = 4 ranks, but 2 were started"),
        (ParallelConfig(dap=4), 6, "dap 4 = 4 ranks do not divide the 6 started processes"),
        (ParallelConfig(dap=3, dap_mode="grid"), 3, "square number"),
        (ParallelConfig(tp=2), 2, "parallel.tp=2: this network is sharded by parallel.dap"),
        (ParallelConfig(sp=2), 2, "parallel.sp=2: this network is sharded by parallel.dap"),
        (ParallelConfig(pp=2), 2, "parallel.pp=2: fastfold train clips each sample's gradient"),
        (ParallelConfig(zero=3), 2, "parallel.zero=3 with dp=2"),
        (ParallelConfig(zero=7), 2, "parallel.zero: expected stage 0, 1, 2 or 3, found 7"),
    ],
)
def test_what_cannot_be_is_refused_with_the_arithmetic(
    config: ParallelConfig, processes: int, message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        plan_of(config, processes)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("choice", "plan"),
    [
        ("data", ParallelPlan(dp=4)),
        ("zero", ParallelPlan(dp=4, zero=2)),
        ("axial", ParallelPlan(dp=2, dap=2, zero=1)),
        ("grid", ParallelPlan(dap=4, dap_mode="grid", zero=1)),
    ],
)
def test_every_choice_of_the_group_is_a_plan(choice: str, plan: ParallelPlan) -> None:
    assert plan_of(compose_config([*PLACES, f"parallel={choice}"]).parallel, 4) == plan


def test_optimizers_are_chosen_by_group_or_name_and_keys_have_neighbours() -> None:
    assert compose_config([*PLACES, "optim=lamb"]).optim.name == "lamb"
    lars = compose_config([*PLACES, "optim=lars", "optim.trust=0.5"]).optim
    assert (lars.name, lars.trust, lars.warmup_steps) == ("lars", 0.5, 1000)
    with pytest.raises(ConfigError, match=r"no setting 'parallel.zer'; did you mean parallel.zero\?"):
        compose_config([*PLACES, "parallel.zer=1"])
    with pytest.raises(ConfigError, match=r"optim\.name must be one of adam, muon, lamb, lars, not 'adams'"):
        compose_config([*PLACES, "optim.name=adams"])
    with pytest.raises(ConfigError, match=r"did you mean parallel=axial\?"):
        compose_config([*PLACES, "parallel=axal"])
