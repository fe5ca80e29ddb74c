"""One network called from two threads: each call gives the bytes that it gives alone."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from itertools import combinations_with_replacement
from pathlib import Path

import numpy as np
import pytest
import torch

import fastfold
from fastfold.evoformer.execution import CallSettings, ExecutionPolicy, PolicyModule, calling, recomputed
from fastfold.evoformer.model import AlphaFold
from fastfold.evoformer.primitives import dropout

FIRST, SECOND = "MKTAYIAKQRQISFVK", "GSSGSSGLVPRG"
Call = Callable[[], list[np.ndarray]]
CALLS = 100


def _calls(model: AlphaFold, other: AlphaFold, folder: Path) -> dict[str, Call]:
    """Return calls of every kind, by name, whose results are arrays."""
    file = folder / "restraints.csv"
    file.write_text("chain1,residue1,chain2,residue2,max\nA,2,A,14,8\n")

    def positions(network: AlphaFold = model, **settings: object) -> list[np.ndarray]:
        prediction = fastfold.predict(FIRST, network, num_recycles=0, **settings)  # type: ignore[arg-type]
        return [prediction.atom_positions, prediction.plddt]

    def batch() -> list[np.ndarray]:
        found = fastfold.predict_many([FIRST, SECOND], model, num_recycles=0, batch=2)
        return [one.atom_positions for of_name in found.values() for one in of_name]

    return {
        "predict": positions,
        "dropout": lambda: positions(dropout=True),
        "dropout of another network": lambda: positions(other, dropout=True, seed=3),
        "restraints": lambda: positions(restraints=str(file), restraint_steps=2),
        "embed": lambda: list(fastfold.embed(SECOND, model, num_recycles=0).arrays.values()),
        "embed a block": lambda: list(fastfold.embed(FIRST, model, num_recycles=0, layer=1).arrays.values()),
        "batch": batch,
    }


@pytest.fixture(scope="module")
def models() -> tuple[AlphaFold, AlphaFold]:
    return fastfold.load_model("mini", device="cpu"), fastfold.load_model("mini", device="cpu")


def _in_threads(
    works: list[list[str]], calls: dict[str, Call], expected: dict[str, list[np.ndarray]]
) -> None:
    """Run a list of calls in each of several threads, which start each call together, and compare the results."""
    barrier, errors = threading.Barrier(len(works)), []

    def work(names: list[str]) -> None:
        for name in names:
            barrier.wait()
            try:
                found = calls[name]()
            except Exception as error:
                errors.append((name, repr(error)))
                continue
            if not all(map(np.array_equal, found, expected[name])):
                errors.append((name, "other bytes"))

    threads = [threading.Thread(target=work, args=(names,)) for names in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []


@pytest.mark.slow
def test_all_pairs_of_calls_in_two_threads_give_the_bytes_of_single_calls(
    models: tuple[AlphaFold, AlphaFold], tmp_path: Path
) -> None:
    calls = _calls(*models, tmp_path)
    expected = {name: call() for name, call in calls.items()}
    assert not np.array_equal(expected["predict"][0], expected["dropout"][0])
    pairs = list(combinations_with_replacement(calls, 2))
    pairs += random.Random(0).choices(pairs, k=CALLS // 2 - len(pairs))
    _in_threads([[a for a, _ in pairs], [b for _, b in pairs]], calls, expected)


def test_a_prediction_with_dropout_does_not_reach_one_in_another_thread(
    models: tuple[AlphaFold, AlphaFold], tmp_path: Path
) -> None:
    calls = _calls(*models, tmp_path)
    names = ["predict", "dropout", "embed"]
    expected = {name: calls[name]() for name in names}
    _in_threads([names, names[1:] + names[:1]], calls, expected)


@pytest.mark.long
def test_a_call_leaves_the_network_and_the_random_numbers_of_the_process_alone(
    models: tuple[AlphaFold, AlphaFold], tmp_path: Path
) -> None:
    model, state = models[0], torch.get_rng_state()
    calls = _calls(*models, tmp_path)
    calls["predict"]()  # layers collect their parameters once
    before = {name: dict(vars(module)) for name, module in model.named_modules()}
    for name in ("dropout", "restraints", "embed a block"):
        calls[name]()
    assert {name: dict(vars(module)) for name, module in model.named_modules()} == before
    assert torch.equal(torch.get_rng_state(), state)


def test_a_block_is_computed_again_with_the_random_numbers_and_the_policy_of_its_call() -> None:
    """The backward pass of a GPU runs in another thread, which has no settings of its own."""
    model = fastfold.load_model("mini", device="cpu")
    generator = torch.Generator().manual_seed(1)
    policies: dict[PolicyModule, ExecutionPolicy] = {model: ExecutionPolicy(block_elements=7)}
    seen: list[tuple[int | None, torch.Tensor]] = []

    def block(x: torch.Tensor) -> torch.Tensor:
        drawn = dropout(x, 0.5, training=True)
        seen.append((model.policy.block_elements, drawn.detach()))
        return drawn.sin()

    x = torch.linspace(1, 2, 50).requires_grad_()
    with calling(CallSettings(policies, training=True, generator=generator)):
        y = recomputed(block, x)
        dropout(x.detach(), 0.5, training=True)  # the generator goes on before the backward pass
    thread = threading.Thread(target=y.sum().backward)
    thread.start()
    thread.join()
    (first, drawn), (again, drawn_again) = seen
    assert first == again == 7
    assert torch.equal(drawn, drawn_again)
    assert x.grad is not None
    assert model.policy.block_elements is None
