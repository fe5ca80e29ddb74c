"""Checkpoints of Hugging Face's Trainer, Lightning and accelerate continue learning rates under every schedule."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import lr_scheduler
from torch.optim.optimizer import Optimizer
from torch.utils.data import DataLoader, DistributedSampler

from fastfold.parallel import Parallel, parallelize
from tests.helpers.schedules import SCHEDULES
from tests.helpers.spawn_ranks import launch

STEPS, SAVED_AT, ROWS = 6, 3, 4


class Model(nn.Module):
    """Perceptron that returns its loss, as models of transformers do."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)).double()

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": (self.layers(x) - labels).square().mean()}


def _samples() -> Any:
    generator = torch.Generator().manual_seed(1)

    def draw(channels: int) -> Tensor:
        return torch.randn(channels, generator=generator, dtype=torch.float64)

    return [{"x": draw(8), "labels": draw(3)} for _ in range(STEPS * ROWS)]


def _make_optimizer(named: Mapping[str, nn.Parameter]) -> Optimizer:
    weights = [p for name, p in named.items() if name.endswith("weight")]
    biases = [p for name, p in named.items() if name.endswith("bias")]
    groups = [{"params": weights, "weight_decay": 0.1}, {"params": biases, "weight_decay": 0.0, "lr": 2e-2}]
    return torch.optim.AdamW(groups, lr=1e-2)


def _prepare(zero: int, schedule: str, seed: int) -> tuple[Parallel, Any, Any]:
    size = dist.get_world_size() if dist.is_initialized() else 1
    model = parallelize(Model(seed), {"dp": size, "zero": zero})
    optimizer = model.optimizer(_make_optimizer)
    return model, optimizer, SCHEDULES[schedule](optimizer)


def _by_trainer(zero: int, schedule: str, folder: str, is_resumed: bool, last: int) -> Any:
    import transformers

    from fastfold.parallel.integrations.transformers import ParallelTrainer

    class Stop(transformers.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_training_stop = control.should_save = state.global_step == last

    model, optimizer, rates = _prepare(zero, schedule, 9 if is_resumed else 0)
    is_plateau = isinstance(rates, lr_scheduler.ReduceLROnPlateau)
    arguments = transformers.TrainingArguments(
        folder,
        use_cpu=True,
        per_device_train_batch_size=ROWS // model.plan.dp,
        train_sampling_strategy="sequential",
        max_steps=STEPS,
        save_strategy="no",
        eval_strategy="steps" if is_plateau else "no",
        eval_steps=1,
        metric_for_best_model="loss",
        report_to=[],
        disable_tqdm=True,
    )
    samples = _samples()
    trainer = ParallelTrainer(
        model,
        arguments,
        train_dataset=samples,
        eval_dataset=samples[:4],
        optimizers=(optimizer, rates),
        callbacks=[Stop()],
    )
    trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-{SAVED_AT}" if is_resumed else None)
    return model.state_dict(), optimizer.state_dict()


def _by_lightning(zero: int, schedule: str, folder: str, is_resumed: bool, last: int) -> Any:
    import lightning

    from fastfold.parallel.integrations.lightning import ParallelStrategy

    class Training(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model, self.optimizer, self.rates = _prepare(zero, schedule, 9 if is_resumed else 0)

        def training_step(self, batch: dict[str, Tensor]) -> Tensor:
            self.log("loss_so_far", 1.0)
            return self.model(**batch)["loss"]

        def configure_optimizers(self) -> Any:
            settings = {"scheduler": self.rates, "interval": "step", "monitor": "loss_so_far"}
            return {"optimizer": self.optimizer, "lr_scheduler": settings}

    # Lightning repeats the samples of an epoch that a checkpoint ended, so epochs have as many steps.
    training, samples = Training(), _samples()[: SAVED_AT * ROWS]
    dealt = DistributedSampler(samples, training.model.plan.dp, _rank(), shuffle=False)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=training.model.plan.dp,
        strategy=ParallelStrategy(),
        max_epochs=last // SAVED_AT,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    loader = DataLoader(samples, ROWS // training.model.plan.dp, sampler=dealt)
    place = f"{folder}/{SAVED_AT}.ckpt"
    trainer.fit(training, loader, ckpt_path=place if is_resumed else None)
    if last == SAVED_AT:
        trainer.save_checkpoint(place)
    return training.model.state_dict(), training.optimizer.state_dict()


def _by_accelerate(zero: int, schedule: str, folder: str, is_resumed: bool, last: int) -> Any:
    from accelerate import Accelerator

    from fastfold.parallel.integrations.accelerate import adopt_accelerator

    accelerator = Accelerator(cpu=True, step_scheduler_with_optimizer=False)
    plain, optimizer, rates = _prepare(zero, schedule, 9 if is_resumed else 0)
    adopt_accelerator(accelerator, plain)
    loader: Any = DataLoader(_samples(), ROWS // plain.plan.dp)
    model, stepped, loader, rates = accelerator.prepare(plain, optimizer, loader, rates)
    if is_resumed:
        accelerator.load_state(folder)
        loader = accelerator.skip_first_batches(loader, SAVED_AT)
    for step, batch in enumerate(loader, SAVED_AT if is_resumed else 0):
        if step == last:
            accelerator.save_state(folder)
            break
        accelerator.backward(model(**batch)["loss"])
        stepped.step()
        rates.step(*([1.0] if schedule == "plateau" else []))
        stepped.zero_grad()
    return plain.state_dict(), optimizer.state_dict()


LOOPS: dict[str, tuple[tuple[str, ...], Callable[..., Any]]] = {
    "trainer": (("transformers", "accelerate"), _by_trainer),
    "lightning": (("lightning",), _by_lightning),
    "accelerate": (("accelerate",), _by_accelerate),
}
"""Libraries that a loop needs, and the loop."""


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _describe_processes() -> None:
    """Describe the process group in the environment, where these libraries look."""
    os.environ |= {
        "RANK": str(_rank()),
        "LOCAL_RANK": str(_rank()),
        "WORLD_SIZE": str(dist.get_world_size()),
        "LOCAL_WORLD_SIZE": str(dist.get_world_size()),
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "29500",
        "TORCHELASTIC_RUN_ID": "test",
        "HF_HUB_OFFLINE": "1",
    }
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")


def _apart(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    assert found.keys() == expected.keys()
    return max(float((x - expected[name]).abs().max()) for name, x in found.items())


def _resumed(loop: str, zero: int, folder: str) -> dict[str, float]:
    """Distance of a resumed run to one without a stop, by schedule."""
    _describe_processes()
    train, found = LOOPS[loop][1], {}
    for schedule in SCHEDULES:
        place = f"{folder}/{schedule.replace(' ', '-')}"
        expected, _ = train(zero, schedule, f"{place}-whole", False, STEPS)
        cut, _ = train(zero, schedule, place, False, SAVED_AT)
        weights, _ = train(zero, schedule, place, True, STEPS)
        assert _apart(cut, expected) > 1e-4
        found[schedule] = _apart(weights, expected)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("zero", range(4))
@pytest.mark.parametrize("loop", LOOPS)
def test_a_resumed_run_equals_one_run_under_every_schedule(loop: str, zero: int, tmp_path: Path) -> None:
    for library in LOOPS[loop][0]:
        pytest.importorskip(library)
    for found in launch(_resumed, 2, loop, zero, str(tmp_path), timeout=500):
        assert found == dict.fromkeys(SCHEDULES, 0.0)


def _write(loop: str, zero: int, folder: str) -> Any:
    _describe_processes()
    return LOOPS[loop][1](zero, "exponential", folder, False, SAVED_AT)


def _go_on(loop: str, zero: int, folder: str) -> Any:
    _describe_processes()
    return LOOPS[loop][1](zero, "exponential", folder, True, STEPS)


@pytest.mark.slow
@pytest.mark.parametrize(("writer", "reader"), [(1, 3), (3, 0)])
@pytest.mark.parametrize("loop", LOOPS)
def test_fewer_processes_resume_a_checkpoint_of_four(
    loop: str, writer: int, reader: int, tmp_path: Path
) -> None:
    for library in LOOPS[loop][0]:
        pytest.importorskip(library)
    launch(_write, 4, loop, writer, str(tmp_path), timeout=500)
    found = [launch(_go_on, size, loop, reader, str(tmp_path), timeout=500)[0] for size in (2, 1)]
    for _, state in found:
        assert [group["lr"] for group in state["param_groups"]] == [1e-2 * 0.5**STEPS, 2e-2 * 0.5**STEPS]
    assert _apart(found[0][0], found[1][0]) < 1e-12
