"""``parallel=auto``: choice of the fastest plan for the processes that torchrun started."""

from __future__ import annotations

from dataclasses import replace

import torch
from ml_collections import ConfigDict

from fastfold.errors import ConfigError
from fastfold.evoformer.config import is_multimer
from fastfold.parallel import started_processes
from fastfold.parallel.alphafold.workload import alphafold_workload
from fastfold.parallel.planner.hardware import ACCELERATORS, accelerator
from fastfold.parallel.planner.search import best_plans, overrides, step_text
from fastfold.parallel.planner.workload import Workload
from fastfold.training.config import TrainConfig


def choose_plan(config: TrainConfig, tree: ConfigDict) -> tuple[TrainConfig, str]:
    """Return a configuration with the fastest plan for ``parallel.auto``, and one line that describes it.

    It is equal on every process. Call before the process group is initialised, because plans are traced with simulated
    ranks.

    Raises:
        ConfigError: The machine has no GPU, the GPU is unknown to the cost model, or no plan fits.
    """
    parallel, workload = config.parallel, workload_of(config, tree)
    cost = best_plans(workload, gpus=started_processes(), gpu=parallel.gpu or _own_gpu(), count=1)[0]
    plan = {name: value for name, value in cost.plan.to_dict().items() if hasattr(parallel, name)}
    memory = replace(config.memory, checkpointing=cost.checkpointing)
    chosen = replace(config, parallel=replace(parallel, auto=False, **plan), memory=memory)
    return chosen, (
        f"{' '.join(overrides(cost))}: {step_text(cost)} per step, "
        f"{cost.total_memory / 1024**3:.1f} GiB per GPU by the cost model"
    )


def workload_of(config: TrainConfig, tree: ConfigDict) -> Workload:
    """Return the workload of one optimisation step, the planner's input."""
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
    """Return the cost model's name of this process's GPU."""
    if not torch.cuda.is_available():
        raise ConfigError(
            "parallel=auto found no GPU on this machine; name one (parallel.gpu=h200), or choose a plan"
        )
    name = torch.cuda.get_device_name().lower()
    similar = [known for known in ACCELERATORS if known.partition("-")[0] in name]
    if not similar:
        raise ConfigError(
            f"parallel=auto has no table of {name!r}; name the GPU that is most like it: "
            f"parallel.gpu={'|'.join(ACCELERATORS)}"
        )
    memory = torch.cuda.get_device_properties(0).total_memory
    # The same chip is sold with different memory sizes.
    return min(similar, key=lambda known: abs(accelerator(known).memory - memory))
