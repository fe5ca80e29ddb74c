"""Layers compute in bfloat16 while gradients are summed in float32, equally under every ZeRO stage."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.func import functional_call

from examples.gpt.gpt import GPT, GPTConfig, next_token_loss
from fastfold.errors import ConfigError
from fastfold.parallel import parallelize
from fastfold.parallel.checks.plan import check_precision
from fastfold.parallel.data_parallel.precision import compute_in
from tests.helpers.spawn_ranks import launch

POLICY = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
PASSES = 8


def _make(*, checkpointing: str = "none") -> GPT:
    torch.manual_seed(0)
    return GPT(GPTConfig(13, 8, 2, 3, 12, checkpointing=checkpointing))


def _tokens(number: int) -> Tensor:
    return torch.randint(13, (2, 2, 6), generator=torch.Generator().manual_seed(number))


def _expected() -> dict[str, Tensor]:
    """Gradients of passes in bfloat16, added up in float32 by PyTorch alone."""
    model = _make()
    for number in range(PASSES):
        for tokens in _tokens(number):
            narrow = {name: p.bfloat16() for name, p in model.named_parameters()}
            (next_token_loss(functional_call(model, narrow, (tokens,)), tokens) / 2).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def _differences() -> dict[str, float]:
    expected, found = _expected(), {}
    for stage in range(4):
        for checkpointing in ("none", "block"):
            parallel = parallelize(
                _make(checkpointing=checkpointing), {"dp": 2, "zero": stage}, mp_policy=POLICY
            )
            optimizer = parallel.optimizer(lambda named: torch.optim.SGD(named.values(), 1.0))
            before = {name: x.clone() for name, x in parallel.state_dict().items()}
            for number in range(PASSES):
                tokens = _tokens(number)[torch.distributed.get_rank()]
                next_token_loss(parallel(tokens), tokens).backward()
            optimizer.step()
            after = parallel.state_dict()
            assert {x.dtype for x in after.values()} == {torch.float32}
            apart = [
                float((before[n] - after[n] - g).abs().max() / g.abs().max()) for n, g in expected.items()
            ]
            found[f"zero {stage}, checkpointing {checkpointing}"] = max(apart)
    return found


@pytest.mark.long
def test_every_stage_sums_gradients_of_bfloat16_passes_in_float32() -> None:
    for found in launch(_differences, 2):
        assert len(found) == 8
        # Sums in bfloat16 would be off by 4e-3 of each gradient; a tied parameter has two of them in one pass.
        assert max(found.values()) < 1e-3, found


def test_modules_have_their_parameters_again_after_a_call() -> None:
    model, kinds = _make(), list[torch.dtype]()
    plain = dict(model.named_parameters())
    compute_in(model, POLICY)
    model.blocks[0].mlp.register_forward_pre_hook(lambda module, _: kinds.append(module.up.weight.dtype))
    assert model(_tokens(0)[0]).dtype == torch.bfloat16
    assert kinds == [torch.bfloat16]
    with pytest.raises(RuntimeError):
        model(torch.zeros(1, 2))
    assert all(p is plain[name] for name, p in model.named_parameters())


def test_other_policies_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"expected reduce_dtype torch\.float32.*found None"):
        parallelize(nn.Linear(2, 2), {}, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    with pytest.raises(ConfigError, match=r"expected reduce_dtype torch\.bfloat16.*model\.float\(\)"):
        check_precision(nn.Linear(2, 2).bfloat16(), POLICY)
    with pytest.raises(ConfigError, match="expected no output_dtype"):
        check_precision(
            nn.Linear(2, 2), MixedPrecisionPolicy(torch.bfloat16, torch.float32, output_dtype=torch.float32)
        )
