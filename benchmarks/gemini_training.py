"""Steps of ``fastfold train`` under ``memory=gemini`` against steps without a manager, with a drawn number of recycles.

    python -m benchmarks.gemini_training [--steps N] [--crop RESIDUES]

Trains ``+preset=initial`` with two Evoformer blocks on artificial chains, on one thread, as three runs whose steps take
turns: without a manager, in a budget that holds everything, and in half of it. Ratios are of processor time. Losses
and weights of all runs have to be equal bit by bit.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

from fastfold.cli.process import prepare_environment

prepare_environment()  # must precede the import of PyTorch

import numpy as np  # noqa: E402
import torch  # noqa: E402

from benchmarks.parallel import machine  # noqa: E402
from benchmarks.train_step import write_chains  # noqa: E402
from fastfold.memory import Gemini  # noqa: E402
from fastfold.parallel import DistributedContext, ParallelPlan, init_distributed  # noqa: E402
from fastfold.training import Trainer  # noqa: E402
from fastfold.training.build import parallel_network, plain_network  # noqa: E402
from fastfold.training.checkpoint.checkpoints import Checkpoints  # noqa: E402
from fastfold.training.compose import compose_config, network_config  # noqa: E402
from fastfold.training.data import entry_reader, make_loader  # noqa: E402
from fastfold.training.optim.ema import ExponentialMovingAverage  # noqa: E402
from fastfold.training.sets.source import open_source  # noqa: E402
from fastfold.training.trainer import Hooks  # noqa: E402

SHARES = (1.0, 0.5)
SETTLED = 8
"""Number of first steps, in which Gemini records and plans."""
SETTINGS = (
    *("data.workers=0", "data.valid_split=null", "data.max_recycles=3", "optim.batch_size=1"),
    *("trainer.precision=fp32", "trainer.log_every=1", "trainer.device=cpu"),
    "model.overrides.model.embeddings_and_evoformer.evoformer_num_block=2",
    "model.overrides.model.embeddings_and_evoformer.extra_msa_stack_num_block=1",
    "model.overrides.data.eval.max_msa_clusters=16",
    "model.overrides.data.common.max_extra_msa=32",
)


class Run:
    """Training run whose steps are taken one by one.

    Args:
        context: Ranks of the process.
        stack: Closes the run's loader.
        folder: Folder with the chains in ``data``.
        name: Name of the run's folder.
        settings: Settings in addition to those of all runs.
    """

    def __init__(
        self, context: DistributedContext, stack: ExitStack, folder: Path, name: str, settings: list[str]
    ) -> None:
        places = [f"data.directory={folder / 'data'}", f"trainer.out={folder / name}"]
        config = compose_config(["+preset=initial", *SETTINGS, *places, *settings])
        torch.manual_seed(0)
        tree = network_config(config.model)
        self.losses: list[float] = []
        hooks = Hooks(
            lambda step, numbers: self.losses.append(numbers["loss"]),
            lambda *_: None,
            lambda step: None,
            print,
        )
        parallel = parallel_network(plain_network(config, tree), config, context)
        source, reader = open_source(config.data, 0, complexes=False), entry_reader(config.data)
        loader = stack.enter_context(make_loader(source, reader, config.data, tree, 0, context, []))
        self.trainer = Trainer(
            parallel,
            tree,
            config,
            loader,
            context,
            checkpoints=Checkpoints(str(folder / name), context, keep_last=1, report=print),
            ema=ExponentialMovingAverage(parallel.module),
            hooks=hooks,
        )
        self.trainer.model.train()

    def step(self) -> float:
        """Take a step, and return its processor time in seconds."""
        start = time.process_time()
        self.trainer._step(time.perf_counter())
        self.trainer._finish_pending()
        return time.process_time() - start

    @property
    def manager(self) -> Gemini:
        """Manager of the run's parameters."""
        manager = self.trainer.placement._manager
        assert manager is not None
        return manager

    def weights(self) -> list[torch.Tensor]:
        """Return a copy of all parameters."""
        with self.trainer.placement.params_on_host():
            return [p.detach().clone() for p in self.trainer.model.parameters()]


def measure(folder: Path, crop: int, steps: int) -> None:
    """Take the steps of all runs in turns, and print a table."""
    write_chains(folder / "data", np.random.default_rng(0))
    sizes = [f"data.crop_size={crop}", f"trainer.steps={steps}"]
    with ExitStack() as stack, init_distributed(ParallelPlan(), torch.device("cpu")) as context:

        def managed(name: str, budget: int) -> Run:
            return Run(context, stack, folder, name, [*sizes, "memory=gemini", f"memory.budget={budget}"])

        whole = managed("whole", 1 << 40)
        for _ in range(SETTLED):
            whole.step()
        peak = whole.manager.device.peak
        runs = {0.0: Run(context, stack, folder, "plain", sizes)}
        runs |= {share: managed(f"share{share}", int(share * peak)) for share in SHARES}
        times = {share: [] for share in runs}
        for _ in range(steps):
            for share, run in runs.items():
                times[share].append(run.step())
        print(
            f"{machine()}; crops of {crop} residues, {steps} steps, {peak / 2**20:.0f} MiB hold everything\n"
        )
        print(
            "| budget | settled step, median | settled steps | all steps | recomputed blocks | equal bits |"
        )
        print("|---|---|---|---|---|---|")
        plain, expected = times[0.0], runs[0.0].weights()
        for share in SHARES:
            ratios = [a / b for a, b in zip(times[share], plain, strict=True)]
            equal = runs[share].losses == runs[0.0].losses and all(
                map(torch.equal, runs[share].weights(), expected)
            )
            saved = runs[share].manager.saved
            print(
                f"| {share:.0%} | {statistics.median(ratios[SETTLED:]):.2f} "
                f"| {sum(times[share][SETTLED:]) / sum(plain[SETTLED:]):.2f} "
                f"| {sum(times[share]) / sum(plain):.2f} | {0 if saved is None else saved.recomputed} "
                f"| {'yes' if equal else 'NO'} |"
            )


def main() -> None:
    """Run the benchmark from the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--crop", type=int, default=64, metavar="RESIDUES")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        measure(Path(folder), options.crop, options.steps)


if __name__ == "__main__":
    main()
