"""``parallel=auto``: the fastest plan for the processes that torchrun started."""

from __future__ import annotations

import difflib
from dataclasses import replace
from typing import Any

import torch

from fastfold.errors import ConfigError
from fastfold.evoformer.config import is_multimer
from fastfold.parallel import started_processes
from fastfold.parallel.alphafold.workload import alphafold_workload
from fastfold.parallel.planner.hardware import ACCELERATORS, accelerator
from fastfold.parallel.planner.report import step_text
from fastfold.parallel.planner.search import best_plans, overrides
from fastfold.training.config import TrainConfig


def choose_plan(config: TrainConfig, tree: Any) -> tuple[TrainConfig, str]:
    """The configuration of a run that asks for it (``parallel.auto``) with the best plan; the same on every process.

    To be called before the processes join each other: plans are traced on ranks that are not there.

    Args:
        config: The run's configuration.
        tree: The network's.

    Returns:
        The configuration, and a line about the plan.

    Raises:
        ConfigError: There is no GPU to plan for, no table of it, or no plan.
    """
    parallel = config.parallel
    cost = best_plans(
        workload_of(config, tree),
        gpus=started_processes(),
        gpu=parallel.gpu or _own_gpu(),
        count=1,
    )[0]
    plan = {name: value for name, value in cost.plan.to_dict().items() if hasattr(parallel, name)}
    memory = replace(config.memory, checkpointing=cost.checkpointing)
    chosen = replace(config, parallel=replace(parallel, auto=False, **plan), memory=memory)
    return chosen, (
        f"{' '.join(overrides(cost))}: {step_text(cost)} per step, "
        f"{cost.total_memory / 1024**3:.1f} GiB per GPU by the cost model"
    )


def workload_of(config: TrainConfig, tree: Any) -> Any:
    """A run's optimisation step as something to be planned."""
    if is_multimer(tree):
        trunk = tree.model.embeddings_and_evoformer
        msa, extra = trunk.num_msa, trunk.num_extra_msa
    else:
        msa, extra = tree.data.eval.max_msa_clusters, tree.data.common.max_extra_msa
    return alphafold_workload(
        tree,
        residues=config.data.crop_size,
        msa=msa,
        extra_msa=extra,
        samples=config.optim.batch_size,
        precision=config.trainer.precision,
        recycles=config.data.max_recycles,
    )


def _own_gpu() -> str:
    """The table's name of this process's GPU."""
    if not torch.cuda.is_available():
        raise ConfigError(
            "parallel=auto plans for a GPU, and there is none here; name one: parallel.gpu=h200, or choose a plan"
        )
    name = torch.cuda.get_device_name().lower()
    found = [known for known in ACCELERATORS if known.partition("-")[0] in name]
    if not found:
        close = difflib.get_close_matches(name, ACCELERATORS, n=1, cutoff=0.0)[0]
        raise ConfigError(
            f"parallel=auto has no table of {name!r}; name the GPU that is most like it, for example "
            f"parallel.gpu={close}"
        )
    memory = torch.cuda.get_device_properties(0).total_memory
    # The same chip is sold with different memories.
    return min(found, key=lambda known: abs(accelerator(known).memory - memory))
