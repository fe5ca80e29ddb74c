"""``fastfold train`` under plans: the numbers of one process, and a rank that fails ends the run with its own error."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

from fastfold.cli import main
from fastfold.data.loading.loader import SampleLoader
from fastfold.protein.io.read import read_structure
from fastfold.training.compose import compose_config, network_config
from fastfold.training.data import entry_reader, make_loader
from fastfold.training.sets.source import open_source
from fastfold.training.trainer import Trainer
from tests.helpers.forked import Forked, fork_command, rank_environments
from tests.helpers.small_sets import a3m, write
from tests.training.conftest import TINY
from tests.training.test_train import LIGHT, command, here, losses, run_forked, start_forked, weights

LETTERS = "ACDEFGHIKLMNPQRSTVWY"
WHOLE_ALIGNMENTS = ["data.block_deletion=false", "data.single_sequence_probability=0"]
LARS = ["optim=lars", "optim.weight_decay=0.01", "optim.warmup_steps=2", *WHOLE_ALIGNMENTS]


@pytest.fixture
def deep_folder(data_folder: Path) -> Path:
    """The chains with alignments of more rows than the MSA has clusters.

    Without an extra sequence the outer product mean, as the official program has it, divides its bias by 1e-3 and not
    by a count. Then one step of LARS shifts the whole pair by a hundred, of which norms cancel the digits.
    """
    rng = np.random.default_rng(0)
    for structure in (data_folder / "train").iterdir():
        sequence = read_structure(structure).chains[0].sequence
        rows = ("".join(rng.choice(list(LETTERS), len(sequence))) for _ in range(63))
        write(data_folder / "msas" / f"{structure.name.partition('.')[0]}.a3m", a3m(sequence, *rows))
    return data_folder


@pytest.mark.long
@pytest.mark.parametrize(
    ("first", "then", "processes"),
    [
        ("dap=2", "dp=2", 2),
        pytest.param("dap=2", "dap=2", 4, marks=pytest.mark.slow),
    ],
)
def test_axial_ranks_and_sharded_states_compute_what_one_process_computes(
    deep_folder: Path, tmp_path: Path, first: str, then: str, processes: int
) -> None:
    """LARS, whose steps depend on norms of whole layers; what one plan saved another resumes."""
    one, many = tmp_path / "one", tmp_path / "many"
    assert here(deep_folder, one, *LARS, "trainer.steps=3")
    first_part = [*LARS, f"parallel.{first}", "parallel.zero=1", "trainer.steps=2"]
    run_forked(deep_folder, many, *first_part, processes=2)
    said = run_forked(
        deep_folder,
        many,
        *LARS,
        f"parallel.{then}",
        "parallel.zero=2",
        "trainer.steps=3",
        processes=processes,
    )
    assert "after step 2" in said
    np.testing.assert_allclose(losses(many), losses(one), rtol=2e-5)
    expected, found = weights(one), weights(many)
    assert max(float((found[name] - x).abs().max()) for name, x in expected.items()) < 1e-4
    # The other way round, in this process.
    assert here(deep_folder, many, *LARS, "trainer.steps=4")
    assert here(deep_folder, one, *LARS, "trainer.steps=4")
    np.testing.assert_allclose(losses(many), losses(one), rtol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["zero=3", "dap_mode=grid"])
def test_sharded_parameters_and_the_grid_train_too(deep_folder: Path, tmp_path: Path, plan: str) -> None:
    """LARS again: of a gradient that is nothing but rounding Adam makes a step of its learning rate."""
    one, many = tmp_path / "one", tmp_path / "many"
    assert here(deep_folder, one, *LARS, "trainer.steps=4")
    run_forked(deep_folder, many, *LARS, f"parallel.{plan}", "parallel.dap=4", "trainer.steps=4", processes=4)
    np.testing.assert_allclose(losses(many), losses(one), rtol=2e-5)
    expected, found = weights(one), weights(many)
    assert max(float((found[name] - x).abs().max()) for name, x in expected.items()) < 1e-4


@pytest.mark.slow
def test_compiled_blocks_train_on_shards(data_folder: Path, tmp_path: Path) -> None:
    one, many = tmp_path / "one", tmp_path / "many"
    assert here(data_folder, one, "trainer.steps=1", "data.max_recycles=1")
    compiled = ["parallel.dap=2", "trainer.compile=true", "trainer.steps=1", "data.max_recycles=1"]
    run_forked(data_folder, many, *compiled, processes=2)
    np.testing.assert_allclose(losses(many), losses(one), rtol=2e-5)


def _failing(how: str, arguments: list[str]) -> int:
    """``fastfold`` that fails in its third sample."""
    sample, calls = Trainer._sample, []

    def failing(self, *args):
        calls.append(None)
        if len(calls) < 3:
            return sample(self, *args)
        print("failing now", file=sys.stderr, flush=True)
        if how == "dies":
            os._exit(7)
        raise KeyError("the reason of rank 1")

    Trainer._sample = failing  # type: ignore[method-assign]
    return main(arguments)


@pytest.mark.parametrize("how", ["raises", pytest.param("dies", marks=pytest.mark.slow)])
@pytest.mark.parametrize("plan", ["dp=2", pytest.param("dap=2", marks=pytest.mark.slow)])
def test_a_rank_that_fails_ends_the_job_with_its_own_error_within_a_minute(
    data_folder: Path, tmp_path: Path, how: str, plan: str
) -> None:
    """Nobody waits for it, whoever started the ranks."""
    options = [f"parallel.{plan}", "parallel.zero=1", "trainer.steps=1000"]
    arguments = command(data_folder, tmp_path / "run", *options)[3:]
    healthy, ill = (
        Forked(_failing, how, arguments, env=environment)
        if environment["RANK"] == "1"
        else fork_command(*arguments, env=environment)
        for environment in rank_environments(2)
    )
    assert ill.stderr is not None
    said = ""
    while "failing now" not in said:
        line = ill.stderr.readline()
        assert line, said
        said += line
    failed = time.monotonic()
    said += ill.communicate()[1]
    _, others = healthy.communicate()
    assert time.monotonic() - failed < 60
    assert healthy.returncode, others
    if how == "raises":
        assert ill.returncode == 1
        assert "the reason of rank 1" in said
    else:
        assert ill.returncode == 7


@pytest.mark.parametrize(
    ("differing", "story"),
    [
        ("parallel.zero={rank}", "the ranks were started with different plans: zero is"),
        ("optim.batch_size=2{rank}", "different settings: batch_size: 20"),
    ],
)
def test_ranks_that_were_started_differently_are_refused(
    data_folder: Path, tmp_path: Path, differing: str, story: str
) -> None:
    started = [
        start_forked(data_folder, tmp_path / "run", differing.format(rank=rank), env=environment)
        for rank, environment in enumerate(rank_environments(2))
    ]
    for process in started:
        printed, _ = process.communicate()
        assert process.returncode == 2
        assert story in printed


def test_processes_that_share_a_sample_draw_the_same_ones(data_folder: Path) -> None:
    """Whatever becomes ready first."""

    class Shared:
        dp_rank, dp_size, size = 0, 1, 2

    config = compose_config([*TINY, f"data.directory={data_folder}", "trainer.out=run", "data.order=ready"])
    source, reader = open_source(config.data, 1), entry_reader(config.data)
    tree = network_config(config.model)
    with make_loader(source, reader, config.data, tree, 0, Shared(), []) as loader:  # type: ignore[arg-type]
        assert isinstance(loader, SampleLoader)
        assert [next(loader).number for _ in range(6)] == list(range(6))


def test_the_checkpoint_of_a_run_holds_plain_names(data_folder: Path, tmp_path: Path) -> None:
    """So that any plan, and earlier versions, read it."""
    assert here(data_folder, tmp_path / "run", "trainer.steps=2", *LIGHT)
    folder = next((tmp_path / "run" / "checkpoints").iterdir())
    names = set(HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata)
    model = {f"model.{name}" for name in weights(tmp_path / "run")}
    assert model <= names
    assert {name.replace("model.", "ema.", 1) for name in model} <= names
    for key in ("step", "exp_avg", "exp_avg_sq"):
        assert {f"{name.replace('model.', 'adam.', 1)}.{key}" for name in model} <= names
