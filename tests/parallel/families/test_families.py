"""``"auto"`` finds layers, stages and attention of models that do not name them, or says what it misses."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from fastfold.errors import ConfigError
from fastfold.parallel import Parallel, ParallelPlan, Pipeline, own_stages, parallelize
from fastfold.parallel.comm.groups import Group
from fastfold.parallel.families import linear_kinds, own_heads
from fastfold.parallel.families.attention_calls import _Positions, spread_attention
from fastfold.parallel.families.block_stages import block_stages
from fastfold.parallel.families.call_trace import trace_call
from fastfold.parallel.families.tensor_layers import find_layers
from fastfold.parallel.mesh import ParallelMesh
from fastfold.parallel.planner.fake_run import fake_mesh
from fastfold.utils.module_structure import tied_names
from tests.helpers.spawn_ranks import launch
from tests.parallel.families.plain_models import (
    LENGTH,
    VOCABULARY,
    Conv1D,
    JointAttention,
    PlannedModel,
    TiedModel,
)

STEPS = 3
MODELS: dict[str, type[nn.Module]] = {"tied": TiedModel, "planned": PlannedModel}


def _make(name: str, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[name](**options).double()


def _tokens(step: int) -> Tensor:
    return torch.randint(VOCABULARY, (4, LENGTH + 1), generator=torch.Generator().manual_seed(step))


def _optimizer(named: Mapping[str, nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(named.values(), lr=0.1, momentum=0.9, weight_decay=0.1)


def _loss(logits: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def _expected(name: str) -> nn.Module:
    model = _make(name)
    optimizer = _optimizer(dict(model.named_parameters()))
    for step in range(STEPS):
        tokens = _tokens(step)
        _loss(model(tokens[:, :-1])["logits"], tokens[:, 1:]).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return model


def _train(name: str, plan: dict[str, int]) -> Parallel:
    parallel = parallelize(_make(name), plan, layers="auto", stages="auto", sequence="auto")
    optimizer = parallel.optimizer(_optimizer)
    pipeline = Pipeline(parallel) if parallel.plan.pp > 1 else None
    for step in range(STEPS):
        tokens = _tokens(step)
        if pipeline is not None:
            parts = tokens.chunk(2)
            inputs = [(x[:, :-1],) for x in parts]
            pipeline.step(inputs, lambda out, i, parts=parts: _loss(out, parts[i][:, 1:]) / 2)
            parallel.reduce_gradients()
        else:
            tokens = tokens[parallel.rows(len(tokens))]
            own, targets = tokens[:, :-1], tokens[:, 1:]
            if parallel.sequence is not None:
                own, targets = parallel.sequence.shard(own), parallel.sequence.shard(targets)
            _loss(parallel(own)["logits"], targets).backward()
        parallel.clip_grad_norm_(0.5)
        optimizer.step()
        optimizer.zero_grad()
    return parallel


def _differences(cases: list[tuple[str, dict[str, int]]]) -> list[tuple[str, float, float]]:
    found = []
    for name, plan in cases:
        expected, parallel = _expected(name), _train(name, plan)
        state = parallel.state_dict()
        assert state.keys() == expected.state_dict().keys()
        apart = max(float((state[key] - x).abs().max()) for key, x in expected.state_dict().items())
        held = sum(p.numel() for p in parallel.module.parameters())
        found.append((f"{name} {plan}", apart, held / sum(p.numel() for p in expected.parameters())))
    return found


@pytest.mark.long
@pytest.mark.parametrize("name", MODELS)
def test_models_train_as_on_one_process(name: str) -> None:
    plans = [{"tp": 2}, {"pp": 2}, {"pp": 2, "zero": 1}] + [{"sp": 2}] * (name == "tied")
    for found in launch(_differences, 2, [(name, plan) for plan in plans]):
        assert len(found) == len(plans)
        for case, apart, share in found:
            assert apart < 1e-12, case
            assert share < 0.75 or "sp" in case, case


def _without_sum() -> float:
    own_stages.SharedParameter.sum_gradients = lambda self: None  # type: ignore[method-assign]
    ((_, apart, _),) = _differences([("tied", {"pp": 2})])
    return apart


@pytest.mark.long
def test_a_tied_gradient_that_is_not_summed_is_noticed() -> None:
    assert min(launch(_without_sum, 2)) > 1e-6


def _with_dropout() -> list[Tensor]:
    """Weights after a step whose dropout draws for separate heads, and then for the whole stream."""
    torch.manual_seed(3)
    parallel = parallelize(_make("tied", dropout=0.3), {"tp": 2}, layers="auto")
    optimizer = parallel.optimizer(_optimizer)
    tokens = _tokens(0)
    _loss(parallel(tokens[:, :-1])["logits"], tokens[:, 1:]).backward()
    optimizer.step()
    return [x for name, x in parallel.state_dict().items() if "ln" in name]


@pytest.mark.long
def test_dropout_of_own_heads_leaves_the_stream_alike() -> None:
    first, second = launch(_with_dropout, 2)
    assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True))


def test_layers_of_a_model_without_a_plan_are_found_by_structure() -> None:
    found = find_layers(TiedModel(), ParallelPlan(tp=2), tied_names(TiedModel()))
    blocks = [f"h.{i}.{name}" for i in range(3) for name in ("attn", "mlp.c_fc", "mlp.c_proj")]
    assert list(found) == [*blocks, "wte", "lm_head"]
    assert found["h.0.attn"] == own_heads.OwnHeads(
        3, {"c_attn": 3}, ("c_proj",), sizes=("num_heads", "split_size")
    )


def test_own_heads_have_the_sizes_of_a_rank_and_become_plain_again() -> None:
    plain = JointAttention(3, 0.0)
    cut = find_layers(TiedModel(), ParallelPlan(tp=2), tied_names(TiedModel()))["h.0.attn"]
    with fake_mesh(ParallelPlan(tp=2), rank=1) as mesh:
        own: Any = cut(copy.deepcopy(plain), mesh)
    assert (own.num_heads, own.split_size, own.head_dim) == (1, 4, 4)
    assert own.c_attn.weight.shape == (12, 12)
    assert isinstance(own, JointAttention)
    alone: Any = cut(plain, ParallelMesh(ParallelPlan()))
    again = alone.to_plain()
    assert type(again) is JointAttention
    assert vars(again).keys() == vars(plain).keys()
    assert all(torch.equal(x, plain.state_dict()[name]) for name, x in again.state_dict().items())


def test_a_transposed_layer_is_cut_and_restored() -> None:
    layer, x = Conv1D(6, 4), torch.randn(2, 4)
    assert linear_kinds.features(layer) == (4, 6)
    own = linear_kinds.cut_linear(layer, ParallelMesh(ParallelPlan()), "first")
    torch.testing.assert_close(own(x), layer(x))
    restored: Any = own.to_plain()
    assert type(restored) is Conv1D
    assert torch.equal(restored.weight, layer.weight)
    assert layer.weight is not None


def test_the_trace_names_calls_and_attention() -> None:
    trace = trace_call(TiedModel(), "stages")
    assert [path for path in trace.called if path.count(".") < 1] == ["", "wte", "wpe", "ln_f", "lm_head"]
    assert trace.attention == {f"h.{i}.attn": JointAttention for i in range(3)}


class _Unplanned(PlannedModel):
    tp_plan: ClassVar = {"lm_head": "sliced"}


class _Experts(TiedModel):
    tp_plan: ClassVar = {"ln_f.weight": "moe_tp_experts"}


class _Backwards(TiedModel):
    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None) -> dict[str, Tensor]:
        hidden = self.wte(input_ids)
        for block in reversed(self.h):
            hidden = block(hidden)
        return {"logits": hidden}


class _Reused(TiedModel):
    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None) -> dict[str, Tensor]:
        logits = super().forward(input_ids)["logits"]
        return {"logits": logits + self.wpe(input_ids).sum()}


class _Held(TiedModel):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))


class _Valued(TiedModel):
    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None) -> dict[str, Tensor]:
        return super().forward(input_ids[: int(input_ids.sum())])


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (_Unplanned, r"lm_head is Linear of style sliced in the tp_plan"),
        (_Experts, r"ln_f\.weight of the tp_plan is a parameter outside of a layer"),
        (lambda: nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4)), "Sequential has no tp_plan, no attention"),
    ],
)
def test_layers_that_are_not_known_are_refused(model: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message + ".*give layers="):
        find_layers(model(), ParallelPlan(tp=2), [])


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (_Backwards, "h are not called once each, in their order"),
        (_Reused, "wpe runs before the blocks h and after them"),
        (_Held, "scale is outside of the modules around h"),
        (_Valued, "calls _Valued once without data, which raises"),
        (lambda: nn.Sequential(nn.Linear(4, 4)), "Sequential has no nn.ModuleList of blocks"),
    ],
)
def test_blocks_that_are_no_stages_are_refused(model: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=f"{message}.*give stages="):
        block_stages(model())


def test_a_model_without_attention_is_refused() -> None:
    class Plain(TiedModel):
        def forward(self, input_ids: Tensor, position_ids: Tensor | None = None) -> dict[str, Tensor]:
            return {"logits": self.wte(input_ids)}

    with pytest.raises(ConfigError, match=r"Plain does not call torch\.nn\.functional\.scaled_dot"):
        spread_attention(Plain())


class _Unnumbered(TiedModel):
    """Takes no positions."""

    def forward(self, input_ids: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        return super().forward(input_ids)


@pytest.mark.parametrize(("model", "is_numbered"), [(TiedModel, True), (_Unnumbered, False)])
def test_a_model_gets_the_positions_of_its_part_where_it_takes_them(model: Any, is_numbered: bool) -> None:
    plain = model()
    sequence = spread_attention(plain)(plain, Group(None))
    hooks = [one for one in sequence.module._forward_pre_hooks.values() if isinstance(one, _Positions)]
    assert len(hooks) == is_numbered
    tokens = _tokens(0)
    for first, is_whole in ((0, False), (5, False), (5, True)):
        add = _Positions(SimpleNamespace(first=first, is_whole=is_whole))  # type: ignore[arg-type]
        own = torch.arange(first, first + tokens.shape[1])[None]
        for args, kwargs in (((tokens,), {}), ((), {"input_ids": tokens, "position_ids": None})):
            added = add(plain, args, kwargs)
            if is_whole:
                assert added is None
            else:
                assert added[0] is args
                assert torch.equal(added[1]["position_ids"], own)
        assert add(plain, (tokens,), {"position_ids": tokens}) is None


class _Offset(TiedModel):
    """Counts positions from 2, as RoBERTa does."""

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None) -> dict[str, Tensor]:
        if position_ids is None:
            position_ids = torch.arange(2, 2 + input_ids.shape[1])[None]
        return super().forward(input_ids, position_ids)


def _own_count() -> float:
    torch.manual_seed(0)
    plain, tokens = _Offset().double(), _tokens(0)
    parallel = parallelize(copy.deepcopy(plain), {"sp": 2}, sequence="auto")
    sequence = parallel.sequence
    with pytest.raises(
        ConfigError, match=r"_Offset gives another result on parts .* count positions from first"
    ):
        parallel(sequence.shard(tokens))
    own, positions = sequence.shard(tokens), sequence.shard(torch.arange(2, 3 + LENGTH)[None])
    logits = parallel(own, position_ids=positions)["logits"]
    return float((logits - sequence.shard(plain(tokens)["logits"], 1)).abs().max())


@pytest.mark.long
def test_a_model_that_counts_positions_in_another_way_needs_them_from_its_caller() -> None:
    assert max(launch(_own_count, 2)) < 1e-12
