"""``fastfold train`` as a user runs it: killed, stopped, resumed, on several processes, on bad samples."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import fastfold
import fastfold.training.run
from fastfold.cli import main
from fastfold.training.build import plain_network
from fastfold.training.checkpoint.contents import read_shards
from fastfold.training.compose import network_config
from fastfold.training.logging.loggers import read_json_lines
from fastfold.training.report import report
from fastfold.training.run import train
from fastfold.training.trainer import Trainer, TrainingStopped
from tests.helpers.compositions import compose_run
from tests.helpers.forked import Forked, rank_environments
from tests.training.conftest import TINY, without_report, write_data, write_helix

SHORT = [*TINY, "trainer.log_every=1", "trainer.steps=6", "trainer.checkpoint_every=2", "optim.batch_size=2"]
LIGHT = ["optim.batch_size=1", "data.max_recycles=0"]
"""Of runs whose steps may be any."""
_TRUNK = "model.overrides.model.embeddings_and_evoformer"
BARE = [*LIGHT, f"{_TRUNK}.evoformer_num_block=0", f"{_TRUNK}.extra_msa_stack_num_block=0"]
"""Of runs whose network may be any: one without blocks, whose steps take a sixth of the time."""


def command(data: Path, out: Path, *overrides: str, processes: int = 1) -> list[str]:
    launcher = [sys.executable]
    if processes > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    return [
        *launcher,
        "-m",
        "fastfold",
        "train",
        *SHORT,
        f"data.directory={data}",
        f"trainer.out={out}",
        *overrides,
    ]


def environment() -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


def start_anew(data: Path, out: Path, *overrides: str) -> subprocess.Popen[str]:
    """Begin to train in a new interpreter."""
    return subprocess.Popen(
        command(data, out, *overrides),
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def start_forked(data: Path, out: Path, *overrides: str, env: Mapping[str, str] | None = None) -> Forked:
    """Begin to train in a process that starts faster, and neither writes a report nor counts operations."""
    arguments = command(data, out, *overrides)[3:]
    return Forked(_without_report, arguments, stderr=subprocess.STDOUT, env=env)


def test_a_missing_data_folder_leaves_no_run_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    assert main(command(tmp_path / "none", out)[3:]) == 2
    assert f"the data folder '{tmp_path / 'none'}' does not exist" in capsys.readouterr().err
    assert not out.exists()


def test_missing_weights_leave_no_run_folder(
    data_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    weights = tmp_path / "none.npz"
    assert main(command(data_folder, out, f"model.weights={weights}")[3:]) == 1
    assert f"{weights}: no such file" in capsys.readouterr().err
    assert not out.exists()


def _without_report(arguments: Sequence[str]) -> int:
    with without_report():
        return main(arguments)


def run_forked(data: Path, out: Path, *overrides: str, processes: int) -> str:
    """Train to the end on several processes that start faster; returns what was printed."""
    started = [start_forked(data, out, *overrides, env=env) for env in rank_environments(processes)]
    printed = [process.communicate()[0] for process in started]
    assert [process.returncode for process in started] == [0] * processes, printed
    return "".join(printed)


def run(data: Path, out: Path, *overrides: str, processes: int = 1) -> str:
    """Train to the end in a new interpreter, or in several by torchrun; returns what was printed."""
    done = subprocess.run(
        command(data, out, *overrides, processes=processes),
        env=environment(),
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def here(data: Path, out: Path, *overrides: str) -> bool:
    """Train in this process."""
    return train(compose_run(SHORT, f"data.directory={data}", f"trainer.out={out}", *overrides))


def metrics(out: Path) -> list[dict[str, float]]:
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "loss" in line]


def losses(out: Path) -> list[float]:
    return [line["loss"] for line in metrics(out)]


def weights(out: Path) -> dict[str, torch.Tensor]:
    return load_file(out / "mini.safetensors")


def wait_for(path: Path, process: subprocess.Popen[str] | Forked, seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not path.exists():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end, f"{path} did not appear"
        time.sleep(0.02)


@pytest.mark.slow
def test_one_structure_is_learnt(tmp_path: Path):
    """Everything is connected: the loss falls and lDDT rises far beyond what noise explains."""
    structure = tmp_path / "helix.pdb"
    write_helix(structure, 16)
    steps = ["trainer.steps=150", "optim.batch_size=1", "optim.lr=3e-3", "trainer.checkpoint_every=1000"]
    assert here(structure, tmp_path / "run", *steps, "data.max_recycles=0")
    found = metrics(tmp_path / "run")
    assert np.mean([m["fape"] for m in found[-10:]]) < 0.5 * np.mean([m["fape"] for m in found[:10]])
    assert np.mean([m["lddt_ca"] for m in found[-10:]]) > 0.5


@pytest.mark.long
@pytest.mark.usefixtures("with_report")
def test_a_run_leaves_weights_that_fold_and_a_report(data_folder: Path, tmp_path: Path):
    out = tmp_path / "run"
    validated = ["data.valid_split=valid", "trainer.validate_every=1"]
    assert here(data_folder, out, *validated, "trainer.steps=2", *LIGHT)
    model = fastfold.load_model(out / "mini.safetensors", device="cpu")
    assert fastfold.predict("MKTAYIAKQR", model=model, num_recycles=0).plddt.shape == (10,)
    assert "lDDT" in (out / "report" / "report.md").read_text()
    validations = [json.loads(line) for line in (out / "validation.jsonl").read_text().splitlines()]
    assert [v["step"] for v in validations] == [1, 2]
    assert [chain["id"] for chain in validations[0]["chains"]] == ["other0", "other1"]
    (logged, _) = [m for m in read_json_lines(out / "metrics.jsonl") if "valid_lddt_ca" in m]
    for name in ("valid_lddt_ca", "valid_distogram_ce_6_12", "valid_distogram_ce_6_12_single"):
        assert logged[name] == validations[0][name]
    assert "valid_distogram_ce_6_12_msa" not in logged  # no chain has an alignment


@pytest.mark.long
@pytest.mark.parametrize("order", ["draw", pytest.param("ready", marks=pytest.mark.slow)])
def test_killed_at_any_moment_a_run_continues_as_if_nothing_had_happened(
    data_folder: Path, tmp_path: Path, order: str
):
    """Bit for bit, dropout and alignment sampling included; also when samples come as they become ready."""
    workers = ["data.workers=2" if order == "ready" else "data.workers=0", f"data.order={order}"]
    out = tmp_path / "killed"
    start = start_forked if order == "draw" else start_anew
    process = start(data_folder, out, *workers, "trainer.steps=400", "trainer.checkpoint_every=2")
    wait_for(out / "checkpoints" / "step_00000004", process)
    process.kill()  # SIGKILL
    process.communicate()
    last = len((out / "order_rank_0.jsonl").read_text().splitlines()) // 2
    steps = [f"trainer.steps={last + 2}", "trainer.checkpoint_every=2"]
    train_on = here if order == "draw" else run
    train_on(data_folder, out, *workers, *steps)
    whole = tmp_path / "whole"
    if order == "ready":  # the order that came about is what the uninterrupted run repeats
        whole.mkdir()
        lines = [json.loads(line) for line in (out / "order_rank_0.jsonl").read_text().splitlines()]
        first = {line["draw"]: json.dumps(line) for line in lines}
        (whole / "order_rank_0.jsonl").write_text("\n".join(first.values()) + "\n")
    train_on(data_folder, whole, *workers, *steps)
    assert losses(out) == losses(whole)
    killed, uninterrupted = weights(out), weights(whole)
    assert all(torch.equal(killed[name], x) for name, x in uninterrupted.items())


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_saves_and_ends(data_folder: Path, tmp_path: Path, number: signal.Signals):
    out = tmp_path / "run"
    endless = ["trainer.steps=100000", "trainer.checkpoint_every=100000"]
    process = start_forked(data_folder, out, *BARE, *endless)
    wait_for(out / "metrics.jsonl", process)
    process.send_signal(number)
    printed, _ = process.communicate(timeout=120)
    assert process.returncode == 128 + number
    assert "run the same command again to resume" in printed
    assert len(list((out / "checkpoints").iterdir())) == 1


@pytest.mark.parametrize("stopped_at", [1, 2])
def test_a_validation_that_a_signal_prevents_runs_at_the_next_start(
    data_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stopped_at: int
):
    """The validation of the last step too; a start that finds it in the log does not repeat it."""
    settings = [
        "trainer.steps=2",
        "data.valid_split=valid",
        "trainer.validate_every=1",
        "data.workers=0",
        *BARE,
    ]

    def validations(out: Path) -> list[tuple[int, float]]:
        return [(x["step"], x["valid_lddt_ca"]) for x in read_json_lines(out / "validation.jsonl")]

    assert here(data_folder, tmp_path / "whole", *settings)
    expected = validations(tmp_path / "whole")
    assert [step for step, _ in expected] == [1, 2]

    out, compute = tmp_path / "stopped", Trainer._sample

    def compute_and_signal(trainer: Trainer, *arguments: Any) -> dict[str, torch.Tensor]:
        if trainer.progress.step == stopped_at - 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return compute(trainer, *arguments)

    with monkeypatch.context() as patched:
        patched.setattr(Trainer, "_sample", compute_and_signal)
        assert not here(data_folder, out, *settings)
    (checkpoint,) = (out / "checkpoints").iterdir()
    assert checkpoint.name == f"step_{stopped_at:08d}"
    assert not (out / "mini.safetensors").exists()
    for _ in range(2):
        assert here(data_folder, out, *settings)
        assert validations(out) == expected


@pytest.mark.slow
def test_two_processes_compute_what_one_computes(data_folder: Path, tmp_path: Path):
    one, two = tmp_path / "one", tmp_path / "two"
    run(data_folder, one)
    run(data_folder, two, processes=2)
    np.testing.assert_allclose(losses(two), losses(one), rtol=2e-5)
    expected, found = weights(one), weights(two)
    assert max(float((found[name] - x).abs().max()) for name, x in expected.items()) < 1e-4
    # What two processes wrote, one continues; and the other way round.
    longer = ["trainer.steps=8"]
    assert "after step 6" in run(data_folder, two, *longer)
    assert "after step 6" in run(data_folder, one, *longer, processes=2)
    np.testing.assert_allclose(losses(two), losses(one), rtol=2e-5)


def test_a_wrong_number_of_processes_is_refused(data_folder: Path, tmp_path: Path):
    with pytest.raises(fastfold.FastFoldError, match="torchrun --nproc-per-node 3"):
        here(data_folder, tmp_path / "run", "parallel.dp=3")


@pytest.mark.long
@pytest.mark.usefixtures("with_report")
def test_steps_without_finite_numbers_are_skipped_reported_and_in_the_end_too_many(
    data_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    import fastfold.training.trainer as module

    true_loss = module.alphafold_loss

    def spoilt(result, batch, tree):
        loss, parts = true_loss(result, batch, tree)
        return (loss * float("nan") if len(batch["aatype"]) == 24 else loss), parts

    monkeypatch.setattr(module, "alphafold_loss", spoilt)
    out = tmp_path / "run"
    with monkeypatch.context() as patched:
        patched.setattr(fastfold.training.run, "write_report", lambda out: out)
        assert here(data_folder, out, "trainer.steps=4", *BARE)
    assert "helix3" in capsys.readouterr().err
    assert metrics(out)[-1]["skipped"] >= 1
    assert all(bool(x.isfinite().all()) for x in weights(out).values())
    monkeypatch.setattr(report, "curves_png", lambda curves, **options: b"")
    with pytest.raises(TrainingStopped, match="consecutive steps"):
        here(data_folder, tmp_path / "b", "data.min_length=24", "trainer.max_bad_steps=3", *BARE)
    page = (tmp_path / "b" / "report" / "report.md").read_text()
    assert page.count("skipped: loss or gradient not finite in helix3") == 3
    assert "3 consecutive steps without a finite loss" in page


def test_bad_samples_are_listed_and_the_run_goes_on(data_folder: Path, tmp_path: Path):
    (data_folder / "train" / "broken.pdb").write_text("ATOM      1  N   ALA A   1      11.0")
    msas = data_folder / "msas"
    msas.mkdir()
    (msas / "helix1.a3m").write_text(">q\nWWWWWWWWWWWWWWWW\n")
    out = tmp_path / "run"
    settings = [*BARE, "data.single_sequence_probability=0"]
    assert here(data_folder, out, *settings, "trainer.steps=3")
    listed = (out / "quarantine.tsv").read_text()
    assert listed.splitlines()[0].startswith("broken\t")
    assert "helix1\t" in listed
    # Repaired files are found when the run is continued.
    (data_folder / "train" / "broken.pdb").unlink()
    (msas / "helix1.a3m").unlink()
    assert here(data_folder, out, *settings, "trainer.steps=7")
    events = [entry["event"] for entry in read_json_lines(out / "metrics.jsonl") if "event" in entry]
    assert "retrying 1 quarantined samples when they are drawn" in events
    assert not (out / "quarantine.tsv").exists()


@pytest.mark.slow
def test_predicted_structures_are_mixed_in_where_they_are_sure(data_folder: Path, tmp_path: Path):
    """Samples of the second folder come by their probability; one that is unsure everywhere is listed."""
    for name, plddt in (("sure", 90.0), ("unsure", 30.0)):
        write_helix(tmp_path / "predicted" / f"{name}.pdb", 18, plddt=plddt)
    out = tmp_path / "run"
    second = [f"data.distillation={tmp_path / 'predicted'}", "data.distillation_probability=0.5"]
    second += ["data.distillation_min_length=1", "data.distillation_min_rows=0"]
    assert here(data_folder, out, *second, "trainer.steps=10")
    consumed = [json.loads(line)["id"] for line in (out / "order_rank_0.jsonl").read_text().splitlines()]
    assert 4 <= consumed.count("sure") <= 16
    assert "unsure" not in consumed
    assert "unsure\tno residue has a pLDDT of 50 or more" in (out / "quarantine.tsv").read_text()


def test_other_loggers_are_told_too(data_folder: Path, tmp_path: Path):
    class Collector:
        def __init__(self) -> None:
            self.steps: list[int] = []

        def log(self, step: int, values: Mapping[str, float]) -> None:
            self.steps.append(step)

        def event(self, step: int, text: str) -> None: ...
        def resume_from(self, step: int) -> None: ...
        def close(self) -> None: ...

    collector = Collector()
    places = [f"data.directory={data_folder}", f"trainer.out={tmp_path / 'run'}"]
    settings = [*BARE, *places, "logger=none", "trainer.steps=3"]
    assert train(compose_run(SHORT, *settings), loggers=[collector])
    assert collector.steps == [1, 2, 3]
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_no_sample_after_the_filters_says_which_filter_took_how_many(data_folder: Path, tmp_path: Path):
    with pytest.raises(fastfold.FastFoldError, match=r"length >= 100: 4"):
        here(data_folder, tmp_path / "run", "data.min_length=100")


@pytest.mark.slow
def test_one_sample_and_eight_workers(tmp_path: Path):
    write_helix(tmp_path / "data" / "only.pdb", 12)
    run(tmp_path / "data", tmp_path / "run", "data.workers=8", "data.order=ready")
    assert len(losses(tmp_path / "run")) == 6


@pytest.fixture(scope="module")
def plain_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of two steps as they are by default; not to be changed."""
    folder = tmp_path_factory.mktemp("plain")
    here(write_data(folder / "data"), folder / "run", "trainer.steps=2", "optim.batch_size=1")
    return folder / "run"


@pytest.mark.long
@pytest.mark.parametrize(
    ("overrides", "changes"),
    [
        (["finetune=lora"], lambda name: "attention" in name or "transition" in name),
        (
            ["finetune.freeze=['evoformer.*','extra_msa_stack.*']"],
            lambda name: not name.startswith(("evoformer", "extra_msa_stack")),
        ),
    ],
)
def test_fine_tuning_changes_what_it_should_and_nothing_else(
    data_folder: Path, tmp_path: Path, plain_run: Path, overrides: Sequence[str], changes
):
    start = f"model.weights={plain_run / 'mini.safetensors'}"
    here(data_folder, tmp_path / "tuned", start, *LIGHT, *overrides, "optim.ema_decay=0", "trainer.steps=2")
    before, after = weights(plain_run), weights(tmp_path / "tuned")
    assert before.keys() == after.keys()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed
    assert all(changes(name) for name in changed)
    is_adapted = "finetune=lora" in overrides
    assert (tmp_path / "tuned" / "adapter").exists() is is_adapted
    if is_adapted:  # the adapter alone, merged later, gives the weights of the run
        merged = tmp_path / "merged.safetensors"
        base, adapter = plain_run / "mini.safetensors", tmp_path / "tuned" / "adapter"
        assert main(["weights", "merge", str(base), str(adapter), str(merged)]) == 0
        again = load_file(merged)
        assert [name for name in after if not torch.equal(after[name], again[name])] == []


def test_the_aligned_error_counts_after_its_step(data_folder: Path, tmp_path: Path):
    """Its weight is 0 before that step, so that its head keeps its initial weights, and the network's from then on."""
    options = [*BARE, "trainer.steps=2", "trainer.aligned_error_after=1", "trainer.checkpoint_every=1"]
    here(data_folder, tmp_path / "late", *options)
    config = compose_run(SHORT, "data.directory=x", "trainer.out=y", *options)
    tree = network_config(config.model)
    heads, first, second = tree.model.heads, *metrics(tmp_path / "late")
    parts = [name for name in heads if name in first]
    assert "predicted_aligned_error" in parts
    for figures, counted in ((first, 0.0), (second, 1.0)):
        loss = sum(heads[name].weight * figures[name] for name in parts)
        error = heads.predicted_aligned_error.weight * figures["predicted_aligned_error"]
        assert error > 0.01
        assert figures["loss"] == pytest.approx(loss - (1.0 - counted) * error, rel=1e-5)
    network = plain_network(config, tree)
    initial = {f"model.{name}": x for name, x in network.state_dict().items() if "aligned_error" in name}
    for step, is_trained in ((1, False), (2, True)):
        saved = {name: torch.zeros_like(x) for name, x in initial.items()}
        read_shards(tmp_path / "late" / "checkpoints" / f"step_{step:08d}", saved, None)
        assert all(torch.equal(saved[name], x) for name, x in initial.items()) is not is_trained


@pytest.mark.long
@pytest.mark.parametrize("overrides", [["trainer.precision=bf16"], ["memory=checkpointing"]])
def test_precision_and_checkpointing_change_the_numbers_little(
    data_folder: Path, tmp_path: Path, plain_run: Path, overrides: Sequence[str]
):
    other, plain_losses = tmp_path / "other", losses(plain_run)
    here(data_folder, other, "trainer.steps=2", "optim.batch_size=1", *overrides)
    tolerance = 0.03 if "bf16" in overrides[0] else 1e-5
    np.testing.assert_allclose(losses(other), plain_losses, rtol=tolerance)
    assert (losses(other) == plain_losses) == ("bf16" not in overrides[0])


@pytest.mark.slow
def test_compiled_blocks_compute_the_same(data_folder: Path, tmp_path: Path):
    """In training, and in validation, where nothing is compiled."""
    plain, compiled = tmp_path / "plain", tmp_path / "compiled"
    validated = ("trainer.steps=2", "data.valid_split=valid", "trainer.validate_every=1")
    here(data_folder, plain, *validated)
    here(data_folder, compiled, *validated, "trainer.compile=true")
    np.testing.assert_allclose(losses(compiled), losses(plain), rtol=1e-5)
    first, second = (
        [json.loads(line)["valid_plddt"] for line in (out / "validation.jsonl").read_text().splitlines()]
        for out in (plain, compiled)
    )
    assert len(first) == 2
    np.testing.assert_allclose(second, first, rtol=1e-4)


def test_a_folder_that_cannot_be_written_is_refused(data_folder: Path, tmp_path: Path):
    (tmp_path / "file").touch()
    with pytest.raises(fastfold.FastFoldError, match="choose another"):
        here(data_folder, tmp_path / "file" / "run")
