"""Passes from a CUDA graph: the same results, from static memory, in order; refused where a graph cannot work."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cache
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

import fastfold
from benchmarks.kernels.recording import without_launches
from fastfold.errors import ConfigError, InputError
from fastfold.evoformer.embedders.input import EXTRA_MSA_FEATURES
from fastfold.evoformer.embedders.templates import TemplateEmbedder
from fastfold.evoformer.execution import set_policy
from fastfold.evoformer.model import AlphaFold
from fastfold.inference import prepare
from fastfold.inference.config import InferConfig
from fastfold.inference.folding import predictor
from fastfold.inference.folding.network import NetworkPasses, run_network
from fastfold.inference.planning import cuda_graph
from fastfold.inference.planning.cuda_graph import PassGraph, check_cuda_graphs
from fastfold.inference.planning.fit import FoldMemory, plan_target
from fastfold.inference.planning.planner import FOLDING_POLICY, Planner
from tests.helpers.command_line import ORACLES, CommandLine
from tests.helpers.host_reads import HostRead
from tests.helpers.networks import random_model
from tests.helpers.recorded_graph import record
from tests.parallel.alphafold.axial_networks import monomer_sample, multimer_sample, small_network

CPU, GPU = torch.device("cpu"), torch.device("cuda")
PASSES = 3


@cache
def _made(name: str) -> tuple[AlphaFold, dict[str, Tensor]]:
    sample = monomer_sample(11, 5, 4) if name == "synthetic_monomer" else multimer_sample()
    return small_network(name), sample.features


def _network(name: str) -> tuple[AlphaFold, Callable[[int, int], Mapping[str, Tensor]]]:
    """A network, and features of which each pass and each ensemble member has others."""
    model, sample = _made(name)

    def features(cycle: int, member: int) -> dict[str, Tensor]:
        return {key: value[(cycle + member) % 2].clone() for key, value in sample.items()}

    return copy.deepcopy(model), features


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[PassGraph]:
    """The stand-in in the place of CUDA graphs; gives those that folds made."""
    made: list[PassGraph] = []

    def make(**options: Any) -> PassGraph:
        made.append(PassGraph(**options))
        return made[-1]

    if not torch.cuda.is_available():
        monkeypatch.setattr(cuda_graph, "capture_graph", record)
    monkeypatch.setattr(cuda_graph, "PassGraph", make)
    return made


def _run(
    model: AlphaFold,
    features: Callable[[int, int], Mapping[str, Tensor]],
    *,
    passes: int = PASSES,
    ensemble: int = 1,
    graph: bool,
) -> dict[str, Tensor]:
    """Positions after every pass, and what the last one gives."""
    found = {}

    def watch(cycle: int, shown: dict[str, Any]) -> None:
        found[f"pass {cycle}"] = shown["atom_positions"]  # not copied: a later pass must leave it as it is

    settings = NetworkPasses(
        passes - 1,
        num_ensemble=ensemble,
        is_complex=model.multimer,
        cuda_graph=cuda_graph.KeptGraph() if graph else None,
    )
    result, scores = run_network(model, features, settings, watch)
    return found | scores | result["representations"]


@pytest.mark.long
@pytest.mark.parametrize("ensemble", [1, 2])
@pytest.mark.parametrize("name", ["synthetic_monomer", "synthetic_multimer"])
def test_a_replay_gives_what_a_pass_gives(name: str, ensemble: int, graphs: list[PassGraph]) -> None:
    """Bit by bit in every pass, each of which has other features and starts from the one before."""
    model, features = _network(name)
    expected = _run(model, features, ensemble=ensemble, graph=False)
    found = _run(model, features, ensemble=ensemble, graph=True)
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert torch.equal(found[key], value), key
    positions = [expected[f"pass {cycle}"] for cycle in range(PASSES)]
    assert all((a - b).abs().max() > 1e-3 for a, b in pairwise(positions))
    (graph,) = graphs
    assert (graph.captures, graph.replays) == (1, PASSES - 1)


@pytest.mark.parametrize("shown", [(), (1,), (0, 1)])
def test_templates_that_are_hidden_are_not_embedded(shown: tuple[int, ...], graphs: list[PassGraph]) -> None:
    """Which are shown is found before a pass is recorded, which must not look at their mask."""
    model, features = _network("synthetic_monomer")
    assert isinstance(model.template_embedder, TemplateEmbedder)
    embedded: list[int] = []
    model.template_embedder.stack.register_forward_hook(lambda *_: embedded.append(1))

    def masked(cycle: int, member: int) -> dict[str, Tensor]:
        found = dict(features(cycle, member))
        mask = torch.zeros_like(found["template_mask"])
        mask[..., list(shown)] = 1.0
        return found | {"template_mask": mask}

    expected = _run(model, masked, graph=False)
    embedded.clear()
    found = _run(model, masked, graph=True)
    assert len(embedded) == 2 * len(shown)  # of the first pass, and of the one that was recorded
    assert all(torch.equal(found[key], value) for key, value in expected.items())


def _cut(features: Mapping[str, Tensor], cycle: int) -> dict[str, Tensor]:
    """From the third pass on, a row less of the extra MSA."""
    names = {*EXTRA_MSA_FEATURES, "extra_msa_mask"} if cycle > 1 else set()
    return {key: x[..., :-1, :] if key in names else x for key, x in features.items()}


@pytest.mark.long
def test_a_change_of_shape_is_captured_anew(graphs: list[PassGraph]) -> None:
    model, features = _network("synthetic_monomer")

    def changing(cycle: int, member: int) -> dict[str, Tensor]:
        return _cut(features(cycle, member), cycle)

    expected = _run(model, changing, passes=4, graph=False)
    found = _run(model, changing, passes=4, graph=True)
    assert all(torch.equal(found[key], value) for key, value in expected.items())
    assert (graphs[0].captures, graphs[0].replays) == (2, 2)


@pytest.mark.parametrize("change", ["replaced", "in place", "buffer"])
def test_changed_parameters_are_read_by_the_next_replay(change: str) -> None:
    """A graph reads its own copies of parameters and buffers, which hold the values of the last replay."""
    model, features = _network("synthetic_monomer")
    set_policy(model.eval(), FOLDING_POLICY)
    weight = model.single_projection.weight
    if change == "buffer":
        del model.single_projection.weight
        model.single_projection.register_buffer("weight", weight.detach())
    graph = PassGraph(record)

    def run() -> Tensor:
        with torch.inference_mode():
            result = model(features, 2, run_pass=graph.of(model))
        positions: Tensor = result["structure_module"]["final_atom_positions"]
        return positions

    before = run()
    assert (graph.captures, graph.replays) == (1, 2)
    if change == "replaced":
        weight.data = weight.data * 1.5
    else:
        with torch.no_grad():
            model.single_projection.weight.mul_(1.5)
    found = run()
    assert (graph.captures, graph.replays) == (1, 5)
    assert not torch.equal(found, before)
    with torch.inference_mode():
        expected = model(features, 2)["structure_module"]["final_atom_positions"]
    assert torch.equal(found, expected)


def _others(model: AlphaFold, number: int) -> list[AlphaFold]:
    """Networks of the same structure with other parameters."""
    others = [copy.deepcopy(model) for _ in range(number)]
    for seed, other in enumerate(others):
        random = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for x in other.parameters():
                x.mul_(1 + 0.1 * torch.rand(x.shape, generator=random))
    return others


def test_networks_of_one_structure_share_a_capture() -> None:
    """Two targets by three networks: one plain pass, one capture, and each result is its own network's."""
    model, features = _network("synthetic_monomer")
    set_policy(model.eval(), FOLDING_POLICY)
    networks = [model, *_others(model, 2)]
    networks[1].config.model.num_recycle += 1
    networks[1].config.model.embeddings_and_evoformer.num_extra_msa = 7
    values = [[x.clone() for x in network.parameters()] for network in networks]
    graph = PassGraph(record)
    with torch.inference_mode():
        for network in (*networks, *networks):
            expected = network(features, 1)["structure_module"]["final_atom_positions"]
            found = network(features, 1, run_pass=graph.of(network))["structure_module"]
            assert torch.equal(found["final_atom_positions"], expected)
    assert (graph.captures, graph.replays) == (1, 2 * 2 * len(networks) - 1)
    for network, before in zip(networks, values, strict=True):
        assert all(map(torch.equal, network.parameters(), before))


def test_networks_of_other_structures_are_captured_themselves() -> None:
    """A constant of the configuration is part of a recorded pass."""
    model, features = _network("synthetic_monomer")
    other = copy.deepcopy(model)
    other.config.model.embeddings_and_evoformer.prev_pos.max_bin += 1.0
    graph = PassGraph(record)
    for network in (model, other):
        set_policy(network.eval(), FOLDING_POLICY)
        with torch.inference_mode():
            network(features, 2, run_pass=graph.of(network))
    assert (graph.captures, graph.replays) == (2, 4)


def test_a_failed_capture_leaves_the_network_its_parameters() -> None:
    model, features = _network("synthetic_monomer")
    set_policy(model.eval(), FOLDING_POLICY)
    own = list(model.parameters())

    def fail(function: Callable[[], Any], device: torch.device) -> Any:
        assert all(one is not other for one, other in zip(model.parameters(), own, strict=False))
        raise ConfigError("no capture")

    with torch.inference_mode(), pytest.raises(ConfigError, match="no capture"):
        model(features, 2, run_pass=PassGraph(fail).of(model))
    assert all(one is other for one, other in zip(model.parameters(), own, strict=True))


@pytest.mark.long
def test_another_way_to_carry_out_the_network_is_captured_anew() -> None:
    """As where memory ended, and the fold goes on in smaller pieces."""
    model, features = _network("synthetic_monomer")
    graph = PassGraph(record)
    model.eval()
    for blocks, made in ((FOLDING_POLICY.block_elements, (1, 2)), (1024, (2, 4))):
        set_policy(model, replace(FOLDING_POLICY, block_elements=blocks))
        with torch.inference_mode():
            model(features, 2, run_pass=graph.of(model))
        assert (graph.captures, graph.replays) == made


SEQUENCES = {"a": "MKTAYIAKQR", "b": "GSHMLEDPVA", "longer": "MKTAYIAKQRQ", "c": "MKTAYIAKQW"}


@pytest.mark.long
def test_predictions_of_one_length_share_a_graph(
    graphs: list[PassGraph], monkeypatch: pytest.MonkeyPatch
) -> None:
    """From its second pass on the first records and replays, and the others replay all passes."""
    monkeypatch.setattr(predictor, "check_cuda_graphs", lambda wanted, device: None)
    model = small_network("synthetic_monomer").float().eval()
    settings: dict[str, Any] = {"num_recycles": 1, "seeds": (0, 1)}
    expected = fastfold.predict_many(SEQUENCES, model, **settings)
    found = fastfold.predict_many(SEQUENCES, model, cuda_graphs=True, **settings)
    for name in SEQUENCES:
        for one, other in zip(found[name], expected[name], strict=True):
            assert np.array_equal(one.atom_positions, other.atom_positions)
            assert np.array_equal(one.plddt, other.plddt)
    # Of a and b, of the longer one, and of c, whose graph is gone by then.
    assert [(graph.captures, graph.replays) for graph in graphs] == [(1, 7), (1, 3), (1, 3)]


@pytest.mark.slow
def test_networks_in_turn_share_their_graph(graphs: list[PassGraph], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two targets by two networks, the first pass of the first network runs without a graph."""
    monkeypatch.setattr(predictor, "check_cuda_graphs", lambda wanted, device: None)
    models = [fastfold.load_model(ORACLES / "synthetic_monomer" / "params.npz") for _ in range(2)]
    sequences = {name: SEQUENCES[name] for name in ("a", "b")}
    fastfold.predict_many(sequences, models, cuda_graphs=True, num_recycles=2)
    assert [(graph.captures, graph.replays) for graph in graphs] == [(1, 2 * 2 * 3 - 1)]


def test_what_a_graph_cannot_hold_is_noticed_while_it_is_recorded() -> None:
    model, features = _network("synthetic_monomer")
    set_policy(model.eval(), FOLDING_POLICY)

    def read(module: nn.Module, given: Any, found: Any) -> None:
        found[0].sum().item()

    model.evoformer.register_forward_hook(read)
    with torch.inference_mode(), pytest.raises(HostRead):
        model(features, 2, run_pass=PassGraph(record).of(model))


class _FromTheHost(TorchDispatchMode):
    """Refuses operators between tensors of the host and of a device, numbers apart: those wait for the host."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = [x for x in tree_iter((args, kwargs)) if isinstance(x, Tensor)]
        found = func(*args, **(kwargs or {}))
        made = [x for x in tree_iter(found) if isinstance(x, Tensor)]
        there = any(x.device.type == "meta" for x in (*tensors, *made))
        if there and any(x.device.type == "cpu" for x in tensors if x.dim()):
            raise HostRead(f"{func} copies from the host")
        return found


class _NoConstants(TorchFunctionMode):
    """Refuses tensors made of Python's numbers, lists as indices too, which are copied to the device."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func in (torch.tensor, torch.as_tensor) and found.device.type != "cpu":
            raise HostRead(f"{func.__name__} of numbers of the host")
        if func in (Tensor.__getitem__, Tensor.__setitem__):
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            if args[0].device.type != "cpu" and any(isinstance(x, (list, np.ndarray)) for x in index):
                raise HostRead("a list as index")
        return found


def _refuses(make: Callable[[Tensor], object]) -> bool:
    with _NoConstants(), _FromTheHost():
        try:
            make(torch.empty(3, device="meta"))
        except HostRead:
            return True
    return False


def test_copies_from_the_host_are_noticed() -> None:
    assert _refuses(lambda x: x[[0, 2]])
    assert _refuses(lambda x: x[..., [0, 2]])
    assert _refuses(lambda x: torch.tensor([1.0, 0.0], device=x.device))
    assert _refuses(lambda x: x + torch.ones(3).to(x.device))
    assert not _refuses(lambda x: (x * 2.0 + torch.zeros_like(x))[1:])


@pytest.mark.long
@pytest.mark.parametrize("placeholder", [False, True])
@pytest.mark.parametrize("name", ["synthetic_monomer", "synthetic_multimer"])
def test_a_pass_takes_nothing_from_the_host(name: str, placeholder: bool) -> None:
    """On tensors without contents: no value can be read, and no copy of the host's memory is a launch."""
    model, features = _network(name)
    model.config.model.global_config.zero_init = not placeholder
    model = random_model(model.config).eval().to("meta")
    set_policy(model, replace(FOLDING_POLICY, templates=(0, 1)))

    def inputs() -> tuple[list[dict[str, Tensor]], dict[str, Tensor]]:
        member = {
            key: value.to("meta", torch.float32 if value.is_floating_point() else value.dtype)
            for key, value in features(0, 0).items()
        }
        return [member], model.first_previous(member)

    with torch.inference_mode(), without_launches():
        model.iterate(*inputs())  # the first pass runs without a graph, and takes tables to the device
        given = inputs()
        with _NoConstants(), _FromTheHost():
            model.iterate(*given)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"parallel": "dap=2"}, "cuda_graphs and parallel exclude each other"),
        ({"dropout": True}, "cuda_graphs and dropout exclude each other"),
        ({"host_memory": "1GiB"}, "cuda_graphs and host_memory exclude each other"),
        ({"offload_dir": "."}, "cuda_graphs and offload_dir exclude each other"),
    ],
)
def test_settings_that_no_graph_can_hold_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        InferConfig(cuda_graphs=True, **settings)
    InferConfig(**settings)


@pytest.mark.parametrize(
    ("settings", "device", "residues", "passes", "expected"),
    [
        ({}, GPU, 256, 4, True),
        ({}, GPU, 257, 4, False),
        ({}, GPU, 256, 3, False),
        ({}, CPU, 100, 20, False),
        ({"cuda_graphs": False}, GPU, 100, 20, False),
        ({"cuda_graphs": True}, GPU, 3000, 1, True),
        ({"dropout": True}, GPU, 100, 20, False),
        ({"host_memory": "1GiB"}, GPU, 100, 20, False),
        ({"restraints": "r.tsv"}, GPU, 100, 20, False),
    ],
)
def test_short_targets_have_graphs_by_default(
    settings: dict[str, Any],
    device: torch.device,
    residues: int,
    passes: int,
    expected: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On NVIDIA's GPUs, with several passes, and without settings that exclude graphs."""
    monkeypatch.setattr(torch.version, "hip", None)
    config = InferConfig(**settings)
    assert cuda_graph.uses_cuda_graphs(config, device, residues, passes) == expected
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert cuda_graph.uses_cuda_graphs(config, device, residues, passes) == bool(config.cuda_graphs)


def test_a_graph_that_is_not_required_may_fail() -> None:
    """All passes of the fold then run normally."""
    model, features = _network("synthetic_monomer")
    set_policy(model.eval(), FOLDING_POLICY)
    tried: list[int] = []

    def fail(function: Callable[[], Any], device: torch.device) -> Any:
        tried.append(1)
        raise ConfigError("no capture")

    graph = PassGraph(fail, is_required=False)
    with torch.inference_mode():
        expected = model(features, 2)["structure_module"]["final_atom_positions"]
        found = model(features, 2, run_pass=graph.of(model))["structure_module"]["final_atom_positions"]
    assert torch.equal(found, expected)
    assert (len(tried), graph.captures, graph.replays) == (1, 0, 0)


@pytest.mark.parametrize("fits", [True, False])
def test_a_default_graph_needs_memory_to_spare(
    fits: bool, graphs: list[PassGraph], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A target whose plan with a graph does not fit is folded without one."""
    model = small_network("synthetic_monomer").float().eval()
    monkeypatch.setattr(predictor, "uses_cuda_graphs", lambda *arguments: True)
    if not fits:
        fit = predictor.fit_target

        def refuse(*arguments: Any, cuda_graph: bool, **options: Any) -> Any:
            if cuda_graph:
                raise InputError("no room")
            return fit(*arguments, cuda_graph=cuda_graph, **options)

        monkeypatch.setattr(predictor, "fit_target", refuse)
    fastfold.predict("MKTAYIAKQR", model, num_recycles=2)
    assert [graph.captures for graph in graphs] == ([1] if fits else [])


def test_no_gpu_is_refused_before_anything_is_read(cli: CommandLine) -> None:
    done = cli.run(
        "infer", cli.folder / "nothing.fasta", "--out", cli.out, "--device", "cpu", "--cuda-graphs"
    )
    assert done.code == 2
    assert "cuda_graphs needs a GPU, and the device is cpu: leave out --cuda-graphs" in done.err
    with pytest.raises(ConfigError, match="cuda_graphs needs a GPU"):
        fastfold.predict("MKT", ORACLES / "synthetic_monomer" / "params.npz", cuda_graphs=True)
    check_cuda_graphs(False, CPU)
    check_cuda_graphs(True, GPU)


def test_the_command_folds_the_same_and_says_so(
    cli: CommandLine, graphs: list[PassGraph], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (predictor, prepare):
        monkeypatch.setattr(module, "check_cuda_graphs", lambda wanted, device: None)
    host: list[int | None] = []

    def here(device: torch.device, *, host_memory: int | None, offload_dir: Any) -> FoldMemory:
        host.append(host_memory)
        return FoldMemory.here(device, host_memory=host_memory, offload_dir=offload_dir)

    monkeypatch.setattr(predictor, "FoldMemory", SimpleNamespace(here=here))
    fasta, written = cli.fasta({"T1": "MKTAYIAKQR"}), []
    for options in ((), ("--cuda-graphs",)):
        cli.out = cli.folder / f"out{len(options)}"
        done = cli.infer(fasta, "--num-recycles", "3", *options)
        assert done.code == 0, done.err
        assert ("CUDA graphs: the second pass of a length" in done.err) == bool(options)
        (path,) = cli.out.glob("*.pdb")
        written.append(path.read_bytes())
    assert written[0] == written[1]
    assert host == [None, 0]  # nothing that is replayed may wait on the host
    assert (graphs[0].captures, graphs[0].replays) == (1, 3)


def _planner(model: AlphaFold, **settings: Any) -> Planner:
    return Planner(model.config, 8, "cuda", rows=9, **settings)


def test_the_planner_counts_what_a_graph_takes() -> None:
    """The copies of its inputs, and the pair that it leaves; nothing goes to the host, and what is refused says why."""
    model, features = _network("synthetic_monomer")
    set_policy(model.eval(), FOLDING_POLICY)
    graph = PassGraph(record)
    with torch.inference_mode():
        result = model(features, 2, run_pass=graph.of(model))
    assert graph._graph is not None
    inputs = graph._graph.inputs
    held = [x for tree in inputs for x in tree.values()] + [result["representations"]["pair"]]
    plain, graphed = (_planner(model, cuda_graph=wanted) for wanted in (False, True))
    counted = graphed.smallest(11) - plain.smallest(11)
    trunk = sum(x.numel() * 8 for x in held if x.dim() >= 3)
    assert counted >= 0.9 * trunk

    assert graphed.plan(2000, 80 << 30).policy.contraction.host is None
    with pytest.raises(InputError, match="without cuda_graphs= it takes less"):
        plan_target(graphed, 2000, 2 << 30)


def _weights_on_a_gpu() -> Iterator[AlphaFold]:
    yield fastfold.load_model(ORACLES / "synthetic_monomer" / "params.npz", device="cuda")
    yield fastfold.load_model(ORACLES / "synthetic_multimer" / "params.npz", device="cuda")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_replays_what_it_computes(graphs: list[PassGraph]) -> None:
    for model in _weights_on_a_gpu():
        expected, found = (
            fastfold.predict("MKTAYIAKQR", model, num_recycles=4, cuda_graphs=wanted)
            for wanted in (False, True)
        )
        np.testing.assert_allclose(found.atom_positions, expected.atom_positions, atol=1e-2)
        np.testing.assert_allclose(found.plddt, expected.plddt, atol=1e-2)
    assert [(graph.captures, graph.replays) for graph in graphs] == [(1, 4), (1, 4)]
