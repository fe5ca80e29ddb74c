"""Passes of a network whose gradient counts, as ColabDesign's recycle modes choose them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fastfold.evoformer.inputs import RelaxedSequence
from fastfold.evoformer.losses.design import Outputs
from fastfold.evoformer.losses.masked import PairLogits
from fastfold.evoformer.model import recycled
from fastfold.products.design.config import RecycleMode

PAIR_OUTPUTS = ("distogram", "predicted_aligned_error")  #: Heads with logits of residue pairs


class RecordedPass(NamedTuple):
    """Pass of a network over a sequence."""

    result: Mapping[str, Any]  #: Result of the network
    outputs: Outputs  #: Outputs that losses read
    relaxed: RelaxedSequence  #: Forms of the sequence
    aatype: Tensor  #: Most likely residue types ``[N]``


@dataclass(frozen=True)
class PassState:
    """State that a network resumes from for one more pass (:class:`fastfold.evoformer.model.KeptState`)."""

    number: int
    previous: dict[str, Tensor]

    @classmethod
    def after(cls, number: int, result: Mapping[str, Any], *, detach: bool = True) -> PassState:
        """Return the state after pass ``number`` from its result."""
        previous = recycled(result["representations"], result["structure_module"])
        if detach:
            previous = {key: value.detach().clone() for key, value in previous.items()}
        return cls(number + 1, previous)

    @property
    def recorded(self) -> list[Tensor]:
        """Tensors that the next pass depends on smoothly; positions are read in bins."""
        return [self.previous["prev_msa_first_row"], self.previous["prev_pair"]]

    def record(self, is_recorded: bool) -> None:
        """Let gradients of the next pass reach the state."""
        for value in self.recorded:
            value.requires_grad_(is_recorded)

    def load(self, device: torch.device) -> tuple[int, int, dict[str, Tensor]]:
        """Return number, limit and tensors of the next pass."""
        return self.number, self.number, dict(self.previous)

    def save(self, cycle: int, limit: int, previous: dict[str, Tensor]) -> None:
        """Keep nothing: the pass is the last."""


OnePass = Callable[[int, PassState | None], AbstractContextManager[RecordedPass]]
"""Pass of a number from the state before it, recorded while the context is open.

Without a state, all passes before it run as well, and are not recorded.
"""


def counted_passes(
    mode: RecycleMode, one_pass: OnePass, recycles: int, *, seed: int, is_recorded: bool
) -> Iterator[tuple[float, RecordedPass]]:
    """Yield the passes whose loss is asked for, with the share of its gradient.

    The caller computes the gradient of each before it asks for the next. Modes that need gradients of earlier passes
    add them after that.

    Args:
        mode: Passes whose gradient counts.
        one_pass: Function that runs a pass.
        recycles: Extra passes.
        seed: Seed of the pass that ``sample`` draws.
        is_recorded: True if gradients are asked for.
    """
    if mode == "last" or not recycles:
        with one_pass(recycles, None) as last:
            yield 1.0, last
    elif mode == "backprop":
        yield from _through_all(one_pass, recycles, is_recorded)
    elif mode == "add_prev":
        yield from _mean_outputs(one_pass, recycles, is_recorded)
    else:
        count, state = recycles + 1, None
        shares = [1 / count] * count
        if mode != "average":
            chosen = 0 if mode == "first" else int(np.random.default_rng(seed).integers(count))
            shares = [float(number == chosen) for number in range(count)]
        for number, share in enumerate(shares):
            with torch.set_grad_enabled(share > 0), one_pass(number, state) as one:
                yield share, one
            state = PassState.after(number, one.result)


def _through_all(one_pass: OnePass, recycles: int, is_recorded: bool) -> Iterator[tuple[float, RecordedPass]]:
    """Yield the last pass, and then add the gradients through each earlier one.

    Earlier passes are computed again one by one, so that one pass is recorded at a time.
    """
    states: list[PassState | None] = [None]
    for number in range(recycles):
        with torch.no_grad(), one_pass(number, states[-1]) as one:
            states.append(PassState.after(number, one.result))
    state = states.pop()
    assert state is not None
    state.record(is_recorded)
    with one_pass(recycles, state) as last:
        yield 1.0, last
    for number in reversed(range(recycles) if is_recorded else ()):
        assert state is not None
        # Losses of the sequence alone do not depend on the state.
        gradients = [torch.zeros_like(x) if x.grad is None else x.grad for x in state.recorded]
        state = states.pop()
        if state is not None:
            state.record(True)
        with one_pass(number, state) as one:
            recorded = PassState.after(number, one.result, detach=False).recorded
            torch.autograd.backward(recorded, gradients)


def _mean_outputs(
    one_pass: OnePass, recycles: int, is_recorded: bool
) -> Iterator[tuple[float, RecordedPass]]:
    """Yield the last pass with the mean logits of all, and then add the gradients of earlier ones.

    The state between passes is constant. Earlier passes are computed again one by one, so that one pass is recorded at
    a time.
    """
    states: list[PassState | None] = [None]
    sums: dict[str, Tensor] = {}
    for number in range(recycles):
        with torch.no_grad(), one_pass(number, states[-1]) as one:
            states.append(PassState.after(number, one.result))
            for name, logits in _logits(one.outputs).items():
                sums[name] = sums[name] + logits if name in sums else logits.clone()
    for total in sums.values():
        total.requires_grad_(is_recorded)
    with one_pass(recycles, states.pop()) as last:
        means = {
            name: (sums[name] + logits) / (recycles + 1) for name, logits in _logits(last.outputs).items()
        }
        yield 1.0, last._replace(outputs=replace(last.outputs, **means))
    for number in reversed(range(recycles) if is_recorded else ()):
        with one_pass(number, states.pop()) as one:
            used = {name: x for name, x in _logits(one.outputs).items() if sums[name].grad is not None}
            torch.autograd.backward(list(used.values()), [sums[name].grad for name in used])


def _logits(outputs: Outputs) -> dict[str, Tensor]:
    """Return the logits that ``add_prev`` averages over passes, by the names of :class:`Outputs`."""
    pairs = {"distogram": outputs.distogram, "errors": outputs.errors}
    whole = {
        name: x.whole() if isinstance(x, PairLogits) else x for name, x in pairs.items() if x is not None
    }
    return {**whole, "lddt": outputs.lddt}
