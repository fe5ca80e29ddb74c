"""Modules under a budget give what they give without one, and the simulated device sees that they stay under it."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastfold.errors import ConfigError
from fastfold.memory import BudgetError, ChunkedModule, ChunkPlan, SearchLimit, autochunk
from fastfold.memory.chunking import api
from fastfold.memory.chunking.search import Chosen, Search


class CausalBlock(nn.Module):
    """A block of GPT: attention to what comes before, written out or by PyTorch's operator, and a perceptron."""

    def __init__(self, c: int, heads: int, fused: bool) -> None:
        super().__init__()
        self.heads, self.fused = heads, fused
        self.norm, self.norm_2 = nn.LayerNorm(c), nn.LayerNorm(c)
        self.qkv, self.out = nn.Linear(c, 3 * c), nn.Linear(c, c)
        self.up, self.down = nn.Linear(c, 4 * c), nn.Linear(4 * c, c)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, c = x.shape
        q, k, v = self.qkv(self.norm(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        if self.fused:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            later = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
            scores = q @ k.transpose(-1, -2) / math.sqrt(c / self.heads)
            y = scores.masked_fill(later, float("-inf")).softmax(-1) @ v
        x = x + self.out(y.transpose(1, 2).reshape(batch, length, c))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class VisionTransformer(nn.Module):
    """Patches, a class token, two encoder layers, a head."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 16, 4, 4)
        self.token = nn.Parameter(torch.randn(1, 1, 16))
        self.place = nn.Parameter(torch.randn(1, 65, 16))
        layer = nn.TransformerEncoderLayer(16, 2, 64, 0.1, F.gelu, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(16, 10)

    def forward(self, image: Tensor) -> Tensor:
        x = self.patches(image).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.place
        return self.head(self.layers(x)[:, 0])


def check(module: nn.Module, args: tuple[Any, ...], share: float) -> ChunkPlan:
    """Run a module in a share of its peak, and compare."""
    with pytest.raises(BudgetError) as refused:
        autochunk(module, args, 1)
    whole = autochunk(module, args, 1 << 40).plan
    budget = max(refused.value.smallest, int(share * whole.peak_before))
    chunked = autochunk(module, args, budget)
    with torch.no_grad():
        found, expected = chunked(*args), module(*args)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    assert not whole.regions
    assert chunked.plan.regions
    assert chunked.plan.peak <= budget < whole.peak == whole.peak_before
    return chunked.plan


# Queries of the fused operator cannot be cut: their numbers say which keys they see. Sequences and heads can.
@pytest.mark.long
@pytest.mark.parametrize(("fused", "share"), [(False, 0.4), (True, 0.6)])
def test_a_block_of_gpt(fused: bool, share: float) -> None:
    module = CausalBlock(16, 2, fused).double().eval()
    plan = check(module, (torch.randn(2, 96, 16, dtype=torch.float64),), share)
    assert plan.peak < share * plan.peak_before


@pytest.mark.slow
def test_a_vision_transformer() -> None:
    plan = check(VisionTransformer().double().eval(), (torch.randn(2, 3, 32, 32, dtype=torch.float64),), 0.5)
    assert plan.peak < 0.5 * plan.peak_before


def test_the_smallest_budget_works_and_no_smaller_one() -> None:
    module, x = nn.Sequential(nn.Linear(8, 256), nn.ReLU(), nn.Linear(256, 8)), torch.randn(32, 8)
    with pytest.raises(BudgetError, match=r"smallest budget that works.*donate=True") as refused:
        autochunk(module, x, "1KiB")
    assert autochunk(module, x, refused.value.smallest).plan.peak == refused.value.smallest
    with pytest.raises(BudgetError):
        autochunk(module, x, refused.value.smallest - 1)


def test_regions_of_the_smallest_peak_run_in_as_few_chunks_as_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    module, x = nn.Sequential(nn.Linear(8, 256), nn.ReLU(), nn.Linear(256, 8)), torch.randn(512, 8)
    with pytest.raises(BudgetError) as refused:
        autochunk(module, x, 1)
    smallest = refused.value.smallest
    choose, measured_peak = Search.choose, api._measured_peak

    def choose_smallest(search: Search, target: int, steps: Any = None) -> Chosen:
        """A search that gets stuck above every budget but the smallest."""
        return search.unchunked() if target else choose(search, 0)

    # Estimates miss half of the bytes above the smallest peak.
    monkeypatch.setattr(Search, "choose", choose_smallest)
    monkeypatch.setattr(api, "_measured_peak", lambda *graph: 2 * measured_peak(*graph) - smallest)
    budget = 2 * smallest
    plan = autochunk(module, x, budget).plan
    assert 0.95 * budget < plan.peak <= budget
    assert [region.size for region in plan.regions] == [9]


def test_inputs_that_may_be_overwritten_hold_the_result() -> None:
    module, x = nn.Sequential(nn.Linear(8, 256), nn.ReLU(), nn.Linear(256, 8)), torch.randn(32, 8)
    with torch.no_grad():
        expected = module(x)
        budget = 2 * x.nbytes + 2 * 256 * 4 * 2
        kept = autochunk(module, x, budget + x.nbytes)
        before = x.clone()
        torch.testing.assert_close(kept(x), expected)
        assert torch.equal(x, before)
        donated = autochunk(module, x, budget, donate=True)
        result = donated(x)
        torch.testing.assert_close(result, expected)
        assert result.data_ptr() == x.data_ptr()
        with pytest.raises(ConfigError, match="strides"):
            donated(torch.randn(8, 32).t())


def test_arguments_by_name_and_nested_results() -> None:
    class Named(nn.Module):
        def forward(self, x: Tensor, *, factor: Tensor, power: int) -> dict[str, Any]:
            y = (x.unsqueeze(-1) * x.unsqueeze(-2)) ** power
            return {"sum": y.sum(-1), "parts": (x * factor, x)}

    example = {"x": torch.randn(6, 40), "factor": torch.tensor(2.0), "power": 3}
    module = Named()
    chunked = autochunk(module, example, 3 * 6 * 40 * 40 * 4 // 2)
    assert chunked.plan.regions
    found, expected = chunked(factor=example["factor"], x=example["x"], power=3), module(**example)
    torch.testing.assert_close(found, expected)
    with pytest.raises(ConfigError, match=r"power is 2, and was 3"):
        chunked(**{**example, "power": 2})
    with pytest.raises(ConfigError, match="differ from the example"):
        chunked(example["x"], factor=example["factor"], power=3)


def test_calls_that_would_be_wrong_are_refused() -> None:
    module, x = nn.Sequential(nn.Linear(8, 64), nn.Dropout(0.5), nn.Linear(64, 8)).eval(), torch.randn(32, 8)
    chunked = autochunk(module, x, 6000)
    assert isinstance(chunked, ChunkedModule)
    with pytest.raises(ConfigError, match=r"does not record gradients.*torch\.no_grad"):
        chunked(x)
    with torch.no_grad():
        with pytest.raises(ConfigError, match=r"\[16, 8\].*\[32, 8\].*call autochunk again"):
            chunked(x[:16])
        with pytest.raises(ConfigError, match="expected a tensor"):
            chunked(3)
        with torch.autocast("cpu", torch.bfloat16), pytest.raises(ConfigError, match="autocast"):
            chunked(x)
        with torch.no_grad():
            module[0].weight.fill_(0.5)
        torch.testing.assert_close(chunked(x), module(x))  # weights are read at each call
        chunked.train()
        with pytest.raises(ConfigError, match="the mode of the module"):
            chunked(x)
        chunked.eval()
        module.double()
        with pytest.raises(ConfigError, match=r"the shape, dtype or device of 0.weight"):
            chunked(x)
    for budget in ("much", 0):
        with pytest.raises(ConfigError, match="memory"):
            autochunk(module, x, budget)


def test_a_plan_can_be_printed() -> None:
    plan = autochunk(nn.Sequential(nn.Linear(8, 256), nn.ReLU(), nn.Linear(256, 8)), torch.randn(32, 8), 9000)
    (region,) = plan.plan.regions
    assert (region.first, region.last, region.operations) == ("aten::linear", "aten::linear", 3)
    assert region.chunks == -(-32 // region.size)
    text = str(plan.plan)
    assert f"peak {plan.plan.peak:,} bytes of a budget of 9,000" in text
    assert (
        f"3 operations, aten::linear to aten::linear [32, 8]: dimension 0 in {region.chunks} chunks" in text
    )


def test_a_search_reports_its_regions_and_ends_with_the_best_so_far() -> None:
    module = nn.Sequential(
        *(nn.Sequential(nn.Linear(8, 256), nn.GELU(), nn.Linear(256, 8)) for _ in range(3))
    )
    x, lines = torch.randn(64, 8), []
    whole = autochunk(module, x, 1 << 40).plan.peak_before
    chunked = autochunk(module, x, whole // 4, report=lines.append)
    assert len(lines) >= 3
    assert all(f"of a budget of {whole // 4:,} after" in line for line in lines)
    with pytest.raises(SearchLimit, match=r"in 0 s of processor time.*seconds=.*attribute best") as ended:
        autochunk(module, x, whole // 4, seconds=0)
    best = ended.value.best
    assert best.plan.peak == ended.value.smallest == whole
    with torch.no_grad():
        torch.testing.assert_close(best(x), module(x))
        torch.testing.assert_close(chunked(x), module(x))


def test_the_search_of_a_repeated_layer_is_short() -> None:
    """A fifth of the memory of layers of attention: one region for each peak, of a few operations."""
    module = nn.Sequential(*(CausalBlock(16, 2, fused=False) for _ in range(3))).eval()
    x, lines = torch.randn(2, 96, 16), []
    whole = autochunk(module, x, 1 << 40).plan.peak_before
    plan = autochunk(module, x, whole // 4, report=lines.append).plan
    assert plan.peak <= whole // 4
    assert len(lines) <= 12
    assert max(region.operations for region in plan.regions) <= 16
