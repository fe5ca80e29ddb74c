"""Managed training on the simulated device equals the unmanaged run, bit by bit."""

from __future__ import annotations

import copy
import functools
import os
from functools import partial

import pytest
import torch
from torch import nn

from fastfold.errors import ConfigError, OutputError
from fastfold.evoformer.config import model_config
from fastfold.evoformer.evoformer import EvoformerBlock
from fastfold.memory import BudgetError, Gemini, GeminiConfig, SimulatedDevice
from fastfold.utils import machine
from tests.memory.gemini.gpt_runs import Managed, Plain, adam, build, gpt, plain_run, tokens

POLICIES = ["auto", "cpu", "nvme", "cuda"]
TIGHT = 40_000


def budget_of(policy: str, tight: int = TIGHT) -> int:
    """All on the device needs room for all."""
    return 1 << 22 if policy == "cuda" else tight


def equal_trees(a: object, b: object) -> bool:
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(equal_trees(a[k], b[k]) for k in a)
    if isinstance(a, list):
        return isinstance(b, list) and len(a) == len(b) and all(map(equal_trees, a, b))
    return a == b


@pytest.mark.long
@pytest.mark.parametrize("policy", ["auto", pytest.param("cpu", marks=pytest.mark.slow), "nvme"])
def test_parameters_of_twenty_times_the_budget_train_bit_equal(policy, tmp_path):
    """Parameters alone are 20 times what parameters and activations may take together; the budget is hard."""
    sizes = {"layers": 25, "width": 64, "vocabulary": 24}
    model = build(**sizes)
    budget = 245_000
    assert sum(p.nbytes for p in model.parameters()) >= 20 * budget
    managed = Managed(model, adam(model), budget=budget, policy=policy, nvme_folder=tmp_path)
    assert [managed.loss_step(i) for i in range(3)] == plain_run(3, **sizes)[0]
    assert managed.manager.device.peak <= budget


@pytest.mark.long
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("checkpointing", ["none", "block"])
def test_final_states_are_equal_too(policy, checkpointing):
    """Parameters and optimizer states after some steps, as plain state dicts of the usual functions."""
    losses, plain = plain_run(4, checkpointing=checkpointing)
    model = build(checkpointing=checkpointing)
    budget = budget_of(policy, 75_000 if checkpointing == "none" else TIGHT)
    managed = Managed(model, adam(model), budget=budget, policy=policy)
    assert [managed.loss_step(i) for i in range(4)] == losses
    assert equal_trees(plain.model.state_dict(), managed.model.state_dict())
    assert equal_trees(plain.optimizer.state_dict(), managed.optimizer.state_dict())
    assert managed.manager.device.peak <= budget


@pytest.mark.long
@pytest.mark.parametrize("policy", POLICIES)
def test_a_random_number_of_passes_per_step(policy):
    """More passes than ever recorded, fewer, and the same again: nothing is overrun, and the plan comes back."""
    counts = (2, 1, 4, 2, 3, 4, 1, 2, 4)
    expected, _ = plain_run(len(counts), passes=counts)
    model = build()
    managed = Managed(model, adam(model), budget=budget_of(policy), policy=policy)
    assert [managed.loss_step(step, passes) for step, passes in enumerate(counts)] == expected
    if policy in ("auto", "nvme"):
        before = managed.manager.residency.reacted
        managed.loss_step(10, 4)
        assert managed.manager.residency.reacted == before, "a known number of passes goes by the plan"


@pytest.mark.long
@pytest.mark.parametrize("policy", POLICIES)
def test_evaluation_between_steps_changes_nothing(policy):
    """Evaluation of other shapes between training steps; afterwards training follows its plan as before."""
    model = build()
    managed = Managed(model, adam(model), budget=budget_of(policy), policy=policy)
    reacted = []
    for step, (loss, scores) in enumerate(evaluated_run()):
        before = managed.manager.residency.reacted
        assert managed.loss_step(step) == loss
        reacted.append(managed.manager.residency.reacted - before)
        assert torch.equal(evaluate(managed, step), scores)
    if policy in ("auto", "nvme"):
        assert reacted[1:] == [0] * 5


def evaluate(run: Plain, step: int) -> torch.Tensor:
    """Scores of sequences of one of two lengths."""
    run.model.eval()
    with torch.no_grad():
        scores = run.model(tokens(step, 4 + step % 2))
    run.model.train()
    return scores


@functools.cache
def evaluated_run() -> list[tuple[float, torch.Tensor]]:
    """Loss of each step of an unmanaged run, and scores after it."""
    model = build()
    plain = Plain(model, adam(model))
    return [(plain.loss_step(step), evaluate(plain, step)) for step in range(6)]


def test_evaluation_between_forward_and_backward():
    """Even there the chunks of the backward pass are found again."""
    runs = [build() for _ in range(2)]
    plain, managed = Plain(runs[0], adam(runs[0])), Managed(runs[1], adam(runs[1]), budget=TIGHT)
    losses: list[list[float]] = [[], []]
    for step in range(3):
        for run, kept in zip((plain, managed), losses, strict=True):
            loss = gpt.next_token_loss(run.model(tokens(step)), tokens(step))
            run.model.eval()
            with torch.no_grad():
                run.model(tokens(step, 4))
            run.model.train()
            loss.backward()
            run.step()
            run.zero_grad()
            kept.append(loss.item())
    assert losses[0] == losses[1]


class Odd(nn.Module):
    """Frozen, shared and unused parameters, parameters next to children, and a child's that its parent uses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.scale = nn.Parameter(torch.full((8,), 1.5))
        self.first = nn.Linear(8, 8)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.shared = nn.Linear(8, 8)
        self.shared.weight = self.first.weight
        self.unused = nn.Linear(8, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.norm = nn.BatchNorm1d(8)
        self.register_buffer("offset", torch.ones(8))

    def forward(self, x: torch.Tensor, twice: bool = False) -> dict[str, list[torch.Tensor]]:
        x = self.first(x) * self.scale
        x = self.frozen(x).relu()
        x = self.shared(x)
        if twice:
            x = self.shared(x)
        x = x + self.attention(x, x, x, need_weights=False)[0]
        x = nn.functional.linear(x, self.frozen.weight) + self.offset
        x = x * self.scale
        return {"out": [self.norm(x.flatten(0, 1))]}


@pytest.mark.parametrize("policy", POLICIES)
def test_frozen_shared_and_unused_parameters(policy):
    """They neither break nor hang; unused ones are not touched by the optimizer, frozen ones have no states."""
    models = [Odd(), Odd()]
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2, weight_decay=0.1) for m in models]
    managers = [
        None,
        Gemini(
            models[1],
            optimizers[1],
            GeminiConfig(budget=1 << 16 if policy == "cuda" else 5000, policy=policy),
        ),
    ]
    x = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(1))
    losses: list[list[float]] = [[], []]
    for step in range(5):
        for model, optimizer, manager, kept in zip(models, optimizers, managers, losses, strict=True):
            for micro in range(1 + step % 2):
                loss = model(x + micro, twice=step == 3)["out"][0].pow(2).mean() + 0.01 * step
                loss.backward()
            (manager or optimizer).step()
            (manager or optimizer).zero_grad()
            kept.append(loss.item())
    assert losses[0] == losses[1]
    assert len(set(losses[0])) == 5
    assert equal_trees(models[0].state_dict(), models[1].state_dict())
    assert equal_trees(optimizers[0].state_dict(), optimizers[1].state_dict())


@pytest.mark.parametrize("reentrant", [False, True])
def test_no_gradient_is_lost_under_checkpointing(reentrant):
    """Both kinds of checkpointing, nested in a module with parameters of its own, on a budget that evicts."""

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.gain = nn.Parameter(torch.ones(16))
            self.blocks = nn.ModuleList(
                nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16)) for _ in range(5)
            )

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x * self.gain
            for block in self.blocks:
                x = x + torch.utils.checkpoint.checkpoint(block, x, use_reentrant=reentrant) * self.gain
            return x * self.gain

    models = [Checkpointed(), Checkpointed()]
    manager = Gemini(
        models[1], torch.optim.SGD(models[1].parameters(), lr=0.1), GeminiConfig(budget=6000, policy="auto")
    )
    x = torch.randn(2, 16, generator=torch.Generator().manual_seed(1))
    for _ in range(3):
        for model in models:
            model(x).pow(2).mean().backward()
        with manager.params_on_host():
            for a, b in zip(*(m.parameters() for m in models), strict=True):
                assert torch.equal(a.grad, b.grad)
        manager.zero_grad()
        models[0].zero_grad()


@pytest.mark.parametrize(
    ("policy", "other"),
    [("auto", "nvme"), ("nvme", "cpu"), ("cpu", "cuda"), ("cuda", "auto"), ("nvme", "nvme")],
)
def test_killed_and_resumed_under_another_policy(policy, other):
    """State dicts are plain: saved under one placement, they go on under another, as if nothing had happened."""
    expected, _ = plain_run(4)
    first_model = build()
    first = Managed(first_model, adam(first_model), budget=budget_of(policy), policy=policy)
    losses = [first.loss_step(i) for i in range(2)]
    saved = copy.deepcopy(first.manager.state_dict())
    second_model = build()
    second = Managed(second_model, adam(second_model), budget=budget_of(other), policy=other)
    second.manager.load_state_dict(saved)
    losses += [second.loss_step(i) for i in (2, 3)]
    assert losses == expected
    unmanaged = build()
    optimizer = adam(unmanaged)
    unmanaged.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    assert Plain(unmanaged, optimizer).loss_step(2) == expected[2]


def test_clipping_on_the_host_equals_clipping():
    """What looks at all gradients finds them, and what it changes counts."""
    runs = [build() for _ in range(2)]
    optimizer = adam(runs[0])
    manager = Gemini(runs[1], adam(runs[1]), GeminiConfig(budget=TIGHT))
    for step in range(2):
        losses = [gpt.next_token_loss(model(tokens(step)), tokens(step)) for model in runs]
        assert losses[0].item() == losses[1].item()
        for loss in losses:
            loss.backward()
        norm = nn.utils.clip_grad_norm_(runs[0].parameters(), 0.1)
        with manager.params_on_host():
            assert torch.equal(norm, nn.utils.clip_grad_norm_(runs[1].parameters(), 0.1))
        for run in (optimizer, manager):
            run.step()
            run.zero_grad()
    assert equal_trees(runs[0].state_dict(), runs[1].state_dict())


def test_parameters_that_operators_read_from_layers_are_managed():
    """Operators of an Evoformer block take the parameters of its layers, which have the manager's hooks."""
    config = model_config("model_1").model.embeddings_and_evoformer.evoformer
    torch.manual_seed(0)
    plain = EvoformerBlock(config, 16, 16, zero_init=False).eval()
    managed = copy.deepcopy(plain)
    inputs = torch.randn(3, 5, 16), torch.randn(5, 5, 16), torch.ones(3, 5), torch.ones(5, 5)
    optimizer = adam(plain)
    manager = Gemini(managed, adam(managed), GeminiConfig(budget=1_000_000))
    for _ in range(2):
        losses = [sum(x.square().mean() for x in block(*inputs)) for block in (plain, managed)]
        assert losses[0].item() == losses[1].item()
        for loss in losses:
            loss.backward()
        for run in (optimizer, manager):
            run.step()
            run.zero_grad()
    assert equal_trees(plain.state_dict(), managed.state_dict())


def test_the_executed_loads_are_the_planned_ones():
    """From the second step on every access goes by the plan, and fewer chunks move than without one."""
    model = build(layers=6)
    run = Managed(model, adam(model), budget=TIGHT)
    loads, total = [], 0
    for step in range(4):
        run.loss_step(step)
        loads.append(run.manager.store.loads - total)
        total = run.manager.store.loads
    (made,) = run.manager.residency.plans
    assert loads[1:] == [made.loads] * 3
    assert loads[1] < loads[0]


def test_a_larger_input_of_the_same_bucket_is_recorded_anew():
    """Length 5 and 8 share a bucket; what was measured for 5 is not trusted for 8."""
    model = build()
    run = Managed(model, adam(model), budget=TIGHT)
    run.loss_step(0, length=5)
    before = run.manager.residency.reacted
    run.loss_step(1, length=8)
    assert run.manager.residency.reacted > before
    before = run.manager.residency.reacted
    run.loss_step(2, length=6)
    run.loss_step(3, length=8)
    assert run.manager.residency.reacted == before
    assert len(run.manager.residency.book) == 1


def test_a_pass_that_raises_leaves_a_working_manager():
    """After an error inside a forward pass the next step trains as if it had not been."""
    runs = [build() for _ in range(2)]
    plain, managed = Plain(runs[0], adam(runs[0])), Managed(runs[1], adam(runs[1]), budget=TIGHT)
    for step in range(3):
        with pytest.raises((IndexError, RuntimeError)):
            managed.model(torch.full((1, 8), 1000))
        managed.zero_grad()
        assert managed.loss_step(step) == plain.loss_step(step)


def test_parameters_that_are_away_have_their_shape_alone():
    """Counting parameters works; reading or writing values outside a pass says where they are."""
    model = build()
    Gemini(model, config=GeminiConfig(budget=TIGHT))
    assert model.tokens.weight.shape == (24, 16)
    assert sum(p.numel() for p in model.parameters()) == sum(p.numel() for p in build().parameters())
    for attempt in (model.tokens.weight.isnan, lambda: model.tokens.weight.add_(1)):
        with (
            torch.no_grad(),
            pytest.raises(ConfigError, match=r"tokens\.weight is managed and not on the device"),
        ):
            attempt()


def test_too_small_a_budget_is_refused_with_what_would_work():
    """At once where one operator's parameters do not fit; at the first operator where activations do not."""
    model = build(width=64)
    with pytest.raises(BudgetError, match="a budget of 50,000 bytes is too small") as caught:
        Gemini(model, config=GeminiConfig(budget=50_000))
    assert caught.value.smallest == (64 * 256 + 256) * 4
    model = build(width=64)
    run = Managed(model, adam(model), budget=caught.value.smallest)
    with pytest.raises((BudgetError, RuntimeError), match=r"do not fit|too small"):
        run.loss_step(0)
    with pytest.raises(BudgetError, match="Policy 'auto' needs only"):
        Gemini(build(width=64), config=GeminiConfig(budget=caught.value.smallest, policy="cuda"))


def test_wrong_use_is_named():
    """Unknown policies, other optimizers, and the optimizer's own step."""
    with pytest.raises(ConfigError, match="unknown memory policy 'gpu'; choose one of auto, cuda, cpu, nvme"):
        Gemini(build(), config=GeminiConfig(policy="gpu"))
    with pytest.raises(ConfigError, match="parameters that the model does not have"):
        Gemini(build(), adam(build()))
    compiled = nn.Sequential(nn.Linear(2, 2))
    compiled[0].compile(backend="eager")
    with pytest.raises(ConfigError, match=r"0 is compiled, .*; leave torch.compile out"):
        Gemini(compiled)
    with pytest.raises(ConfigError, match="the model is compiled"):
        Gemini(torch.compile(build(), backend="eager"))
    model = build()
    optimizer = adam(model)
    manager = Gemini(model, optimizer, GeminiConfig(budget=TIGHT))
    with pytest.raises(ConfigError, match=r"call step\(\) of the Gemini manager"):
        optimizer.step()
    with pytest.raises(ConfigError, match="not an amount of memory"):
        Gemini(build(), budget="much")
    with pytest.raises(
        ConfigError, match=r"expected a GeminiConfig, found 5000; use GeminiConfig\(budget=5000"
    ):
        Gemini(build(), None, 5000)
    with pytest.raises(TypeError, match="color"):
        Gemini(build(), color="red")
    assert manager.optimizer is optimizer


def test_a_full_disk_ends_with_a_clear_error(tmp_path, monkeypatch):
    """The error names the folder and what to do; what was saved before is not touched."""

    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    (tmp_path / "checkpoint.pt").write_bytes(b"saved")
    model = build()
    monkeypatch.setattr("os.posix_fallocate", full)
    with pytest.raises(OutputError, match=r"No space left on device.*checkpoints written so far are intact"):
        Managed(model, adam(model), budget=TIGHT, policy="nvme", nvme_folder=tmp_path)
    assert (tmp_path / "checkpoint.pt").read_bytes() == b"saved"


def test_room_on_the_disk_is_reserved_before_training(tmp_path, monkeypatch):
    """One file holds parameters, gradients and states, of all steps; where it has no room, nothing has begun."""
    sizes = []
    reserve = os.posix_fallocate

    def count(file: int, start: int, size: int) -> None:
        sizes.append(size)
        reserve(file, start, size)

    monkeypatch.setattr("os.posix_fallocate", count)
    model, plain = build(), build()
    manager = Gemini(
        model, adam(model), GeminiConfig(1 << 24, "nvme", nvme_folder=tmp_path, activations=False)
    )
    optimizer = adam(plain)
    parameters = sum(p.nbytes for p in plain.parameters())
    (size,) = sizes
    assert 4 * parameters <= size <= 4.5 * parameters  # with gradients and both moments
    assert list(tmp_path.iterdir()) == []
    for step in range(2):
        batch = tokens(step)
        for trained, steps in ((model, manager), (plain, optimizer)):
            gpt.next_token_loss(trained(batch), batch).backward()
            steps.step()
            steps.zero_grad()
    assert len(sizes) == 1
    for name, value in model.state_dict().items():
        assert torch.equal(value, plain.state_dict()[name]), name

    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", full)
    other = build()
    before = {name: value.clone() for name, value in other.state_dict().items()}
    with pytest.raises(
        OutputError, match=r"cannot reserve [\d,]+ bytes for the memory tier.*Free some space"
    ):
        Gemini(other, adam(other), GeminiConfig(TIGHT, "nvme", nvme_folder=tmp_path))
    assert all(torch.equal(value, before[name]) for name, value in other.state_dict().items())


def test_a_limit_of_the_host_s_memory_is_seen_before_training(tmp_path, monkeypatch):
    """As control groups of version 1 set it, from files as the kernel shows them; a disk is what is left then."""
    group = tmp_path / "memory" / "batch" / "job_3"
    group.mkdir(parents=True)
    (tmp_path / "own").write_text("9:cpu:/\n4:memory:/batch/job_3\n")
    (group / "memory.usage_in_bytes").write_text("1000000\n")
    (group / "memory.stat").write_text("cache 0\ntotal_cache 0\ntotal_shmem 0\n")
    read = partial(machine._group_memory, tmp_path / "own", tmp_path)
    monkeypatch.setattr(machine, "_group_memory", read)
    parameters = sum(p.nbytes for p in build().parameters())
    for left, policy in (
        (3 * parameters, "auto"),
        (3 * parameters, "cpu"),
        (0, "nvme"),
        (4 * parameters, "auto"),
    ):
        (group / "memory.limit_in_bytes").write_text(f"{1000000 + left}\n")
        model = build()
        if policy == "nvme" or left > 3 * parameters:
            Gemini(model, adam(model), GeminiConfig(TIGHT, policy, nvme_folder=tmp_path))
            continue
        with pytest.raises(BudgetError, match=r"more bytes of the host's memory.*Policy 'nvme'") as caught:
            Gemini(model, adam(model), GeminiConfig(TIGHT, policy))
        # Gradients and both moments, and no parameters: these are there already.
        assert left < caught.value.smallest < 4 * parameters
        assert model.tokens.weight.isfinite().all(), "nothing was changed"


def test_nothing_outlives_the_manager_but_its_own():
    """Two managers on two devices do not see each other: no global state."""
    models = [build() for _ in range(2)]
    devices = [SimulatedDevice(TIGHT), SimulatedDevice(2 * TIGHT)]
    managers = [
        Gemini(m, adam(m), GeminiConfig(b, device=d))
        for m, d, b in zip(models, devices, (TIGHT, 2 * TIGHT), strict=True)
    ]
    for step in range(3):
        losses = [gpt.next_token_loss(m(tokens(step)), tokens(step)) for m in models]
        assert losses[0].item() == losses[1].item()
        for loss, manager in zip(losses, managers, strict=True):
            loss.backward()
            manager.step()
            manager.zero_grad()
    assert managers[0].store.loads > managers[1].store.loads


def test_what_stays_on_the_device_between_steps_is_made_room_for():
    """Tensors kept from earlier steps were not there when the plan's trace was recorded; the budget still holds."""
    runs = [build(layers=8) for _ in range(2)]
    plain, managed = Plain(runs[0], adam(runs[0])), Managed(runs[1], adam(runs[1]), budget=TIGHT)
    kept = []
    for step in range(5):
        with managed.manager.device.running():
            kept.append(torch.ones(400 * (step > 0)))
        assert managed.loss_step(step) == plain.loss_step(step)
    assert managed.manager.device.peak <= TIGHT


@pytest.mark.parametrize("policy", POLICIES)
def test_a_released_model_goes_on_as_a_plain_one(policy):
    """After the management has ended, model and optimizer train on as if there had been none."""
    expected, _ = plain_run(4, checkpointing="none")
    model = build(checkpointing="none")
    managed = Managed(
        model, adam(model), budget=budget_of(policy), policy=policy, recompute=list(model.blocks)
    )
    losses = [managed.loss_step(step) for step in range(2)]
    managed.manager.release()
    after = Plain(model, managed.optimizer)
    assert [*losses, *(after.loss_step(step) for step in (2, 3))] == expected
    assert "forward" not in vars(model.blocks[0])
