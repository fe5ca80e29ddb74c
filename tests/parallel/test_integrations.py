"""Models of other libraries under a plan, in the training loops of other libraries, train as on one process."""

from __future__ import annotations

import importlib
import logging
import os
import warnings
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from examples.frameworks import common
from fastfold.errors import ConfigError
from fastfold.parallel import integrations, parallelize
from fastfold.parallel.integrations.accelerate import adopt_accelerator
from fastfold.parallel.plan import ParallelPlan
from tests.helpers.spawn_ranks import launch

LIBRARIES = {
    "plain_loop": ("transformers",),
    "with_accelerate": ("transformers", "accelerate"),
    "with_trainer": ("transformers", "accelerate"),
    "with_lightning": ("transformers", "lightning"),
}


def _as_torchrun() -> None:
    """Describe the process group in the environment, where these libraries look."""
    group = torch.distributed
    os.environ |= {
        "RANK": str(group.get_rank()),
        "LOCAL_RANK": str(group.get_rank()),
        "WORLD_SIZE": str(group.get_world_size()),
        "LOCAL_WORLD_SIZE": str(group.get_world_size()),
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "29500",
        "TORCHELASTIC_RUN_ID": "test",
        "HF_HUB_OFFLINE": "1",
    }
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")


def _train(loop: str, models: list[str]) -> list[tuple[str, float]]:
    _as_torchrun()
    train = importlib.import_module(f"examples.frameworks.{loop}").train
    found = []
    for name in models:
        expected = common.train_on_one_process(name)
        for zero in range(4):
            state = train(name, {"dp": 2, "zero": zero})
            found.append((f"{name}, zero {zero}", common.difference(state, expected)))
    return found


def _models() -> list[str]:
    try:
        import timm  # noqa: F401
    except (ImportError, RuntimeError):  # torchvision without its operators
        return ["llama", "vit"]
    return ["llama", "vit", "timm"]


@pytest.mark.parametrize(
    "loop",
    [
        pytest.param(loop, marks=pytest.mark.long if loop == "plain_loop" else pytest.mark.slow)
        for loop in LIBRARIES
    ],
)
def test_a_loop_of_another_library_trains_as_one_process_does(loop: str) -> None:
    for library in LIBRARIES[loop]:
        pytest.importorskip(library)
    for found in launch(_train, 2, loop, _models(), timeout=500):
        assert len(found) >= 8
        for case, worst in found:
            assert worst < 1e-12, case


def _adam(named: Mapping[str, nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(named.values(), lr=1e-2, eps=1e-6)


def _trainer(folder: str, zero: int, steps: int, every: int) -> Any:
    import transformers

    from fastfold.parallel.integrations.transformers import ParallelTrainer

    model = parallelize(common.make_model("llama"), {"dp": 2, "zero": zero})
    optimizer = model.optimizer(common.make_optimizer)
    arguments = transformers.TrainingArguments(
        folder,
        use_cpu=True,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=2,
        train_sampling_strategy="sequential",
        max_steps=steps,
        max_grad_norm=common.NORM,
        save_strategy="steps",
        save_steps=every,
        report_to=[],
        disable_tqdm=True,
    )
    schedule = transformers.get_constant_schedule(optimizer)
    samples = common.make_samples("llama")
    return ParallelTrainer(
        model, arguments, train_dataset=samples, eval_dataset=samples[:4], optimizers=(optimizer, schedule)
    )


def _resume_by_trainer(folder: str, zero: int) -> None:
    import transformers

    _as_torchrun()
    common.make_optimizer = _adam
    first = _trainer(folder, zero, 3, 2)
    first.train()
    expected = first.model.state_dict()
    assert common.difference(expected, common.train_on_one_process("llama")) < 1e-12
    again = _trainer(folder, zero, 3, 9)
    again.train(resume_from_checkpoint=f"{folder}/checkpoint-2")
    assert common.difference(again.model.state_dict(), expected) < 1e-12
    assert again.evaluate()["eval_loss"] > 0
    saved = transformers.AutoModelForCausalLM.from_pretrained(f"{folder}/checkpoint-3", dtype=torch.float64)
    assert common.difference(saved.state_dict(), expected) == 0


@pytest.mark.slow
@pytest.mark.parametrize("zero", [2, 3])
def test_trainer_adds_up_batches_and_resumes_its_checkpoints(zero: int, tmp_path: Any) -> None:
    pytest.importorskip("accelerate")
    pytest.importorskip("transformers")
    launch(_resume_by_trainer, 2, str(tmp_path), zero)


def _lightning(folder: str, zero: int, checkpoint: str | None = None) -> Any:
    import lightning
    from torch.utils.data import DataLoader, DistributedSampler

    from examples.frameworks.with_lightning import Training
    from fastfold.parallel.integrations.lightning import ParallelStrategy

    samples: Any = common.make_samples("llama")
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=ParallelStrategy(),
        max_epochs=2 if checkpoint else 1,
        accumulate_grad_batches=2,
        gradient_clip_val=common.NORM,
        default_root_dir=folder,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = Training(parallelize(common.make_model("llama"), {"dp": 2, "zero": zero}))
    loader = DataLoader(samples, 1, sampler=DistributedSampler(samples, shuffle=False))
    trainer.fit(model, loader, ckpt_path=checkpoint)
    trainer.save_checkpoint(f"{folder}/{trainer.global_step}.ckpt")
    return model


def _resume_by_lightning(folder: str, zero: int) -> None:
    _as_torchrun()
    common.make_optimizer = _adam
    _lightning(folder, zero)
    model = _lightning(folder, zero, f"{folder}/3.ckpt")
    assert common.difference(model.model.state_dict(), common.train_on_one_process("llama", epochs=2)) < 1e-12
    saved = torch.load(f"{folder}/6.ckpt", weights_only=True)["state_dict"]
    assert common.difference({f"model.{n}": x for n, x in model.model.state_dict().items()}, saved) == 0


@pytest.mark.slow
@pytest.mark.parametrize("zero", [2, 3])
def test_lightning_adds_up_batches_and_resumes_its_checkpoints(zero: int, tmp_path: Any) -> None:
    pytest.importorskip("lightning")
    pytest.importorskip("transformers")
    launch(_resume_by_lightning, 2, str(tmp_path), zero)


def test_a_plan_whose_ranks_share_samples_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"accelerate gives every process different samples, but tp=2.*use dp and"
    ):
        integrations.check_samples(ParallelPlan(tp=2, dp=2), "accelerate")
    integrations.check_samples(ParallelPlan(dp=2, zero=3), "accelerate")


def test_an_accelerator_of_another_engine_is_refused_and_others_clip_the_whole_model() -> None:
    model = parallelize(nn.Linear(2, 1).double(), {})
    fsdp = SimpleNamespace(distributed_type="FSDP")
    with pytest.raises(
        ConfigError, match=r"accelerate runs FSDP, and the model has a plan .*use one of them"
    ):
        adopt_accelerator(fsdp, model)
    plain = SimpleNamespace(distributed_type="MULTI_CPU", unscale_gradients=lambda: None)
    adopt_accelerator(plain, model)
    model(torch.ones(1, 2, dtype=torch.float64)).sum().backward()
    assert plain.clip_grad_norm_(model.parameters(), 0.5).item() == pytest.approx(3**0.5)
    assert torch.stack([p.grad.norm() for p in model.parameters()]).norm() == pytest.approx(0.5)
    with pytest.raises(ConfigError, match="expected norm_type 2, found inf"):
        plain.clip_grad_norm_(model.parameters(), 0.5, norm_type=torch.inf)
