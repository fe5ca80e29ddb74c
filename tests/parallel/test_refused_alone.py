"""What one process can see to alone: groups, devices, and models that no plan makes right, refused with the reason."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fastfold.errors import ConfigError
from fastfold.parallel import ParallelMesh, ParallelPlan, init_distributed, parallelize
from fastfold.parallel.checks.plan import check_tied_layers
from fastfold.parallel.comm.groups import Group
from fastfold.parallel.planner.fake_run import fake_mesh
from fastfold.parallel.sequence_parallel.attention import ring_attention
from fastfold.parallel.tensor_parallel.layers import ParallelMLP
from fastfold.utils.module_structure import tied_names


def test_a_gpu_is_named_when_processes_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it the first message guesses the GPU from the rank's number."""
    given: dict[str, object] = {}

    class Met(Exception):
        pass

    def meet(*args: object, **options: object) -> None:
        given.update(options)
        raise Met

    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    monkeypatch.setattr(dist, "rendezvous", lambda *_, **__: iter([(dist.HashStore(), 1, 2)]))
    monkeypatch.setattr(dist, "init_process_group", meet)
    with pytest.raises(Met), init_distributed(ParallelPlan(dp=2), torch.device("cuda")):
        pass
    assert given["device_id"] == torch.device("cuda", 1)


@pytest.mark.parametrize(
    ("plan", "count"),
    [
        (ParallelPlan(dp=512), 1),
        (ParallelPlan(dp=64, tp=8), 64 + 8),
        (ParallelPlan(dp=32, dap=16), 32 + 16 + 1),
        (ParallelPlan(dp=8, tp=64, tp_mode="2d"), 64 + 64 + 64 + 8),
    ],
)
def test_axes_of_one_rank_make_no_group(
    plan: ParallelPlan, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[object] = []
    original = dist.distributed_c10d._new_group_with_tag

    def new_group(*args: object, **options: object) -> object:
        made.append(args)
        return original(*args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(dist.distributed_c10d, "_new_group_with_tag", new_group)
    with fake_mesh(plan) as mesh:
        sizes = {name: mesh.group(name).size for name in ("pp", "dp", "sp", "dap", "tp", "replicas")}
    assert sizes == {
        "pp": 1,
        "dp": plan.dp,
        "sp": 1,
        "dap": plan.dap,
        "tp": plan.tp,
        "replicas": plan.dp * plan.dap,
    }
    assert len(made) <= count


def test_the_kind_of_device_is_that_of_the_parameters() -> None:
    assert parallelize(nn.Linear(3, 5), {}).mesh.device_type == "cpu"

    class OnGpu(nn.Module):
        def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
            yield SimpleNamespace(device=torch.device("cuda", 0))  # type: ignore[misc]

    assert parallelize(OnGpu(), {}).mesh.device_type == "cuda"
    assert parallelize(nn.Linear(3, 5).to("meta"), {}).mesh.device_type == "cpu"
    assert parallelize(nn.ReLU(), {}).mesh.device_type == "cpu"
    assert parallelize(nn.Linear(3, 5), {}, device_type="cuda").mesh.device_type == "cuda"


def test_a_query_that_sees_no_key_gets_zeros_and_no_gradient() -> None:
    q, k, v = torch.randn(3, 1, 1, 4, 2, 3, dtype=torch.float64).unbind(0)
    bias = torch.zeros(1, 2, 4, 4, dtype=torch.float64)
    bias[:, :, 1] = -torch.inf
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out = ring_attention(*leaves, bias, group=Group(None))
    assert torch.equal(out[:, :, 1], torch.zeros_like(out[:, :, 1]))
    gradients = torch.autograd.grad(out.sum(), leaves)
    assert all(x.isfinite().all() for x in gradients)
    assert torch.equal(gradients[0][:, :, 1], torch.zeros_like(out[:, :, 1]))


@pytest.mark.parametrize(
    ("activation", "message"),
    [
        (nn.PReLU(), "parameters of its activation PReLU"),
        (nn.Softmax(-1), "Softmax combines several features"),
        (nn.GLU(), "GLU combines several features"),
        (nn.LayerNorm(6, elementwise_affine=False), "LayerNorm combines several features"),
    ],
)
def test_an_activation_that_cannot_be_cut_is_refused(activation: nn.Module, message: str) -> None:
    mlp = nn.Sequential(nn.Linear(3, 6), activation, nn.Linear(6, 3))
    with pytest.raises(ConfigError, match=message):
        ParallelMLP.from_plain(mlp, ParallelMesh(ParallelPlan()))


def test_usual_activations_can_be_cut() -> None:
    for activation in (nn.GELU(), nn.SiLU(), nn.Sequential(nn.ReLU(), nn.Dropout(0.5))):
        mlp = nn.Sequential(nn.Linear(3, 6), activation, nn.Linear(6, 3))
        ParallelMLP.from_plain(mlp, ParallelMesh(ParallelPlan()))


class _Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
        self.head = nn.Linear(4, 4)
        self.head.weight = self.mlp[0].weight


class _Normed(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm, self.layer = norm, nn.Linear(2, 2)


def test_one_parameter_of_which_one_place_is_cut_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"head\.weight and mlp\.0\.weight are one parameter"):
        parallelize(_Tied(), {"tp": 2}, layers={"mlp": ParallelMLP.from_plain})


def test_a_parameter_that_is_cut_in_all_its_places_or_none_is_accepted() -> None:
    assert tied_names(_Tied()) == [["mlp.0.weight", "head.weight"]]
    check_tied_layers(tied_names(_Tied()), ["mlp", "head"])
    check_tied_layers(tied_names(_Tied()), [])


@pytest.mark.parametrize("plan", [{"dp": 2}, {"pp": 2}])
def test_statistics_of_a_batch_that_lies_on_several_ranks_are_refused(plan: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="norm is BatchNorm1d"):
        parallelize(_Normed(nn.BatchNorm1d(2)), plan, stages=lambda model, size: list(model.children()))
    parallelize(_Normed(nn.BatchNorm1d(2)), {})


def test_a_state_with_more_than_the_model_is_refused() -> None:
    parallel = parallelize(nn.Linear(3, 5), {})
    with pytest.raises(ConfigError, match="the state has extra, which is not in the model"):
        parallel.load_state_dict(parallel.state_dict() | {"extra": torch.zeros(1)})
    optimizer = parallel.optimizer(lambda named: torch.optim.AdamW(named.values()))
    optimizer.initialize()
    state = optimizer.state_dict()
    state["state"]["extra"] = {"exp_avg": torch.zeros(1)}
    with pytest.raises(ConfigError, match="has extra, which is not a parameter of the model"):
        optimizer.load_state_dict(state)


def test_errors_of_fsdp2_name_the_rank_and_the_stage_that_works(monkeypatch: pytest.MonkeyPatch) -> None:
    """When it shards, and in its hooks of the forward pass; the model's own errors stay as they are."""
    plan = ParallelPlan(dp=2, zero=3)
    hooks: dict[str, Any] = {"__name__": "torch.distributed.fsdp.hooks"}
    exec("def fail(*_, **__): raise AssertionError('no shard')", hooks)
    with fake_mesh(plan) as mesh:
        parallel = parallelize(nn.Linear(4, 4), mesh)
        with pytest.raises(RuntimeError, match="shapes"):
            parallel(torch.zeros(2, 3))
        parallel.module.register_forward_pre_hook(hooks["fail"])
        with pytest.raises(
            ConfigError, match=r"zero=3 fails in forward on rank 0 \(AssertionError: no shard\)"
        ):
            parallel(torch.zeros(2, 4))
        monkeypatch.setattr("fastfold.parallel.data_parallel.fsdp.fully_shard", hooks["fail"])
        with pytest.raises(ConfigError, match=r"cannot shard Linear on rank 0 of replicas .*: use zero=2"):
            parallelize(nn.Linear(4, 4), mesh)
