"""Reduced precision: the operators of the trunk really work in it, and nothing behind the trunk does."""

from __future__ import annotations

import copy
import functools
import json
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from ml_collections import ConfigDict
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import MappingKey, tree_iter, tree_leaves_with_path

from fastfold.data.features.pipeline import sampler_from_merged
from fastfold.errors import ConfigError
from fastfold.evoformer import precision as precision_module
from fastfold.evoformer.config import is_multimer, model_config
from fastfold.evoformer.model import AlphaFold
from fastfold.evoformer.precision import (
    Precision,
    about_missing_units,
    autocast_trunk,
    choose_precision,
    parameters_to,
    precision_of,
    set_precision,
    trunk_dtype,
)
from fastfold.evoformer.primitives import LayerNorm
from fastfold.evoformer.quantization import least_work
from fastfold.evoformer.triangle_multiplication import TriangleMultiplication
from fastfold.evoformer.weights.checkpoint import load_model
from fastfold.inference.config import PRECISIONS
from fastfold.kernels.cpu import linear, products
from fastfold.parallel.alphafold.workload import dummy_features, one_block_config
from tests.conftest import require_shared
from tests.helpers.networks import folder, random_model


class _Operators(TorchDispatchMode):
    """Dtypes of the first tensor of every call of our own operators, and whether structure is made yet."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, torch.dtype]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "fastfold":
            first = next(x for x in tree_iter(args) if isinstance(x, Tensor))
            self.found.append((func._schema.name.removeprefix("fastfold::"), first.dtype))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ["model_1", "model_1_multimer_v3"])
def test_every_large_operator_of_the_trunk_gets_bfloat16(name: str) -> None:
    """One float32 term in an embedder would make a whole representation float32, and all its operators slow."""
    config = one_block_config(model_config(name))
    network = AlphaFold(config).train()
    autocast_trunk(network, "cpu")
    with _Operators() as operators:
        result = network(dummy_features(config, 6, 3, 4), 0)
    large = {"gated_attention", "transition", "triangle_multiplication", "outer_product_mean", "pair_bias"}
    assert large <= {name for name, _ in operators.found}
    assert {dtype for name, dtype in operators.found if name in large} == {torch.bfloat16}
    positions = result["structure_module"]["final_atom_positions"]
    assert positions.dtype == torch.float32


CPU = torch.device("cpu")


@pytest.mark.parametrize("precision", ["bf16-products", "int8"])
def test_products_of_the_trunk_alone_are_reduced(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many weights are reduced as operators of the trunk have, and the network's numbers stay close."""
    config = one_block_config(model_config("model_1_ptm"))
    network = random_model(config)
    features = {name: value[None] for name, value in dummy_features(config, 6, 3, 4).items()}
    reduced: list[bool] = []
    create = linear.PreparedLinear.__init__

    def counted(
        self: linear.PreparedLinear, *arguments: Tensor, least: linear.Least = "int8x2", **options: Any
    ) -> None:
        create(self, *arguments, least=least, **options)
        if least in ("int8", "int8x2"):
            reduced.append(self.products is not None)

    monkeypatch.setattr(linear.PreparedLinear, "__init__", counted)
    with torch.no_grad():
        plain = network(features, 0)
        assert reduced
        assert not any(reduced)
        reduced.clear()
        assert precision_of(set_precision(network, precision, least_work=0)) == precision
        found = network(features, 0)
        assert all(reduced)
        pair, expected = (x["representations"]["pair"] for x in (found, plain))
        assert 1e-5 < float((pair - expected).norm() / expected.norm()) < 3e-2
        again = network(features, 0)["representations"]["pair"]
        assert torch.equal(again, pair)
        set_precision(network, "fp32")
        assert precision_of(network) == "fp32"
        assert torch.equal(network(features, 0)["representations"]["pair"], expected)


class _Passes:
    """Keeps what each pass leaves to the next."""

    def __init__(self) -> None:
        self.left: dict[int, dict[str, Tensor]] = {}

    def load(self, device: torch.device) -> None:
        """Nothing to go on with."""

    def save(self, cycle: int, limit: int, previous: dict[str, Tensor]) -> None:
        self.left[cycle] = {name: x.clone() for name, x in previous.items()}


class _Last(_Passes):
    """Makes one pass the only one."""

    def __init__(self, cycle: int, previous: dict[str, Tensor]) -> None:
        super().__init__()
        self._cycle, self._previous = cycle, previous

    def load(self, device: torch.device) -> Any:
        return self._cycle, self._cycle, {name: x.clone() for name, x in self._previous.items()}


def _recorded_run(directory: Path) -> tuple[AlphaFold, dict[str, Tensor]]:
    """The network of a recorded run, and its features."""
    config = ConfigDict(json.loads((directory / "config.json").read_text()))
    with np.load(directory / "features.npz") as archive:
        features = {name: archive[name] for name in archive.files}
    if is_multimer(config):
        cycles = config.model.num_recycle + 1
        features = sampler_from_merged(features, config, deterministic=True).stack(cycles)
    network = load_model(directory / "params.npz", config=config)
    return network, {name: torch.as_tensor(x) for name, x in features.items()}


def _outputs(tree: dict[str, Any]) -> dict[str, Tensor]:
    """Numbers of a result tree by their paths."""
    found = {}
    for path, leaf in tree_leaves_with_path(tree):
        name = "/".join(str(key.key) for key in path if isinstance(key, MappingKey))
        # Violations are counts, and the breaks between bins are none of the network's.
        if isinstance(leaf, Tensor) and leaf.is_floating_point() and "violations" not in name:
            found[name] = leaf.double()
    return found


def _errors(exact: dict[str, Tensor], found: dict[str, Tensor]) -> dict[str, float]:
    """How far each output is from that of float32, as a share of its size."""
    return {x: float((found[x] - exact[x]).norm() / exact[x].norm().clamp(min=1e-9)) for x in exact}


_SIDECHAINS = "structure_module/sidechains"


def _without_short_torsions(exact: dict[str, Tensor], outputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Outputs with torsion angles by the exact length of their vectors, and without the frames made from them alone.

    After a slightly different recycled pair, a short vector points elsewhere in float32 too.
    """
    lengths = exact[f"{_SIDECHAINS}/unnormalized_angles_sin_cos"].norm(dim=-1, keepdim=True)
    angles = f"{_SIDECHAINS}/angles_sin_cos"
    others = {name: x for name, x in outputs.items() if name != f"{_SIDECHAINS}/frames/rotation"}
    return others | {angles: outputs[angles] * lengths}


@functools.cache
def _exact_run(name: str) -> tuple[AlphaFold, dict[str, Tensor], _Passes, list[dict[str, Tensor]]]:
    """Network and features of a recorded run, what its passes leave, and outputs in float32.

    Outputs are those of the first pass alone, of each later one alone, and of all together.
    """
    directory = folder(name) if name.startswith("synthetic") else require_shared("oracles", name)
    network, features = _recorded_run(directory)
    passes = _Passes()
    with torch.no_grad():
        whole = network(features, state=passes)
        alone = [
            network(features, 0),
            *(network(features, state=_Last(*kept)) for kept in passes.left.items()),
        ]
    return network, features, passes, [_outputs(result) for result in (*alone, whole)]


RUNS = (
    "synthetic_monomer",
    *(
        pytest.param(x, marks=pytest.mark.slow)
        for x in ("synthetic_multimer", "monomer_ptm", "monomer_deep_msa", "multimer_homodimer")
    ),
)


@pytest.mark.long
@pytest.mark.parametrize("units", [True, False])
@pytest.mark.parametrize("precision", ["bf16-products", "int8"])
@pytest.mark.parametrize("name", RUNS)
def test_reduced_products_change_recorded_runs_by_less_than_three_percent(
    name: str, precision: str, units: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every output of all passes together, and of each by itself, made from what the one before left in float32.

    Without units for bfloat16, products of ``int8`` are in 8 bits.
    """
    if not units:
        monkeypatch.setattr(linear, "multiplies_bfloat16", lambda: False)
    elif not linear.multiplies_bfloat16():
        pytest.skip("this processor has no units for bfloat16")
    recorded, features, passes, exact = _exact_run(name)
    network = set_precision(copy.deepcopy(recorded), precision, least_work=0)
    with torch.no_grad():
        found = [
            network(features, 0),
            *(network(features, state=_Last(*kept)) for kept in passes.left.items()),
            network(features),
        ]
    found = [_outputs(result) for result in found]
    first, *later = map(_errors, exact[:-1], found[:-1])
    whole = _errors(*(_without_short_torsions(exact[-1], outputs) for outputs in (exact[-1], found[-1])))
    assert len(later) == network.config.model.num_recycle > 0
    # All passes together take steps in the bins that recycled distances are sorted into. Without units, bfloat16
    # changes the bins of 40 of 784 distances of the recorded monomer, 8 bits those of 26.
    limit = 4e-2 if precision == "bf16-products" and not units else 3e-2
    for errors in (first, *later, whole):
        assert len(errors) >= 3
        assert max(errors.values()) > 1e-4
        assert {x: error for x, error in errors.items() if not error < limit} == {}
    for errors in (first, *later):
        assert max(errors.values()) < 1.5e-2


@pytest.mark.parametrize("precision", ["bf16-products", "int8"])
def test_small_representations_stay_in_float32(precision: str) -> None:
    """By the elements of MSA and pair times their channels."""
    config = one_block_config(model_config("model_1"))
    network = random_model(config)
    block = network.evoformer
    arguments = torch.randn(2, 6, 256), torch.randn(6, 6, 128), torch.ones(2, 6), torch.ones(6, 6)
    work = 2 * 6 * 256**2 + 6 * 6 * 128**2
    with torch.no_grad():
        plain = block(*arguments)
        for least, same in ((work + 1, True), (work, False)):
            set_precision(network, precision, least_work=least)
            found = block(*arguments)
            assert torch.equal(found[0], plain[0]) is same
            assert torch.equal(found[1], plain[1]) is same


@pytest.mark.parametrize("precision", ["bf16-products", "int8"])
def test_reduced_products_are_refused_where_gradients_are_recorded(precision: str) -> None:
    config = one_block_config(model_config("model_1"))
    network = set_precision(AlphaFold(config), precision)
    with pytest.raises(ConfigError, match=f"precision {precision} is for inference only"):
        network(dummy_features(config, 6, 3, 4), 0)


@pytest.mark.parametrize(
    ("units", "expected"),
    [
        ({"amx_tile", "avx512_bf16", "vnni"}, ("bf16-products", "the processor has AMX")),
        ({"avx512_bf16", "vnni"}, ("bf16-products", "the processor has AVX512_BF16")),
        ({"vnni"}, ("int8", "the processor has VNNI")),
        (set(), ("fp32", "the processor has none of AMX, AVX512_BF16, VNNI")),
    ],
)
def test_auto_takes_what_the_processor_has(
    units: set[str], expected: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("amx_tile", "avx512_bf16", "vnni"):
        monkeypatch.setattr(torch.cpu, f"_is_{name}_supported", lambda name=name: name in units)
    assert choose_precision("auto", CPU) == expected


@pytest.mark.parametrize(
    ("units", "slow"),
    [
        ({"bfloat16", "vnni"}, set()),
        ({"bfloat16"}, set()),
        ({"vnni"}, {"bf16", "bf16-products"}),
        (set(), {"bf16", "bf16-products", "int8"}),
    ],
)
def test_a_precision_without_units_is_told(
    units: set[str], slow: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(products, "multiplies_bfloat16", lambda: "bfloat16" in units)
    monkeypatch.setattr(torch.cpu, "_is_vnni_supported", lambda: "vnni" in units)
    lines = {name: about_missing_units(name, CPU) for name in get_args(Precision)}
    assert {name for name, line in lines.items() if line} == slow
    assert not any(about_missing_units(name, torch.device("cuda")) for name in lines)
    if "bf16" in slow:
        missing = "the processor has none of AMX, AVX512_BF16"
        assert lines["bf16"].endswith(f"several times slower than fp32: {missing}")
        assert lines["bf16-products"].endswith(f"precision bf16-products is float32 here: {missing}")
    if "int8" in slow:
        assert lines["int8"].endswith("the processor has none of AMX, AVX512_BF16, VNNI")


@pytest.mark.parametrize("name", ["bf16-products", "int8"])
def test_products_without_units_are_those_of_float32(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also for representations from which on fewer bits are faster with units."""
    monkeypatch.setattr(products, "multiplies_bfloat16", lambda: False)
    monkeypatch.setattr(torch.cpu, "_is_vnni_supported", lambda: False)
    monkeypatch.setattr(least_work, "CERTAIN_WORK", 0)
    config = one_block_config(model_config("model_1_ptm"))
    network = random_model(config)
    features = {name: value[None] for name, value in dummy_features(config, 6, 3, 4).items()}
    with torch.no_grad():
        exact = network(features, 0)["representations"]["pair"]
        reduced = set_precision(network, name)(features, 0)["representations"]["pair"]
        assert torch.equal(reduced, exact)
        forced = set_precision(network, name, least_work=0)(features, 0)["representations"]["pair"]
    assert not torch.equal(forced, exact)


@pytest.mark.quick
@pytest.mark.parametrize("name", ["mini", "model_1"])
def test_bfloat16_gates_triangles_without_units_for_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "multiplies_bfloat16", lambda: False)
    trunk = model_config(name).model.embeddings_and_evoformer
    c_z, config = trunk.pair_channel, trunk.evoformer.triangle_multiplication_outgoing
    torch.manual_seed(0)
    layer = TriangleMultiplication(config, c_z, zero_init=False).eval()
    pair, mask = torch.randn(12, 12, c_z).to(torch.bfloat16), torch.ones(12, 12)
    with torch.no_grad():
        exact = layer(pair.float(), mask) - pair.float()
        narrow = parameters_to(layer, torch.bfloat16)(pair, mask.to(torch.bfloat16)) - pair
    assert (narrow.float() - exact).norm() < 0.03 * exact.norm()


def test_int8_is_refused_where_its_sums_overflow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "_int_mm", lambda a, b: (a.int() @ b.int()).clamp(-(2**15), 2**15 - 1))
    precision_module.adds_int8_exactly.cache_clear()
    try:
        with pytest.raises(ConfigError, match="int8 sums overflow on this processor"):
            choose_precision("int8", CPU)
        monkeypatch.setattr(torch.cpu, "_is_vnni_supported", lambda: True)
        for name in ("amx_tile", "avx512_bf16"):
            monkeypatch.setattr(torch.cpu, f"_is_{name}_supported", lambda: False)
        assert choose_precision("auto", CPU)[0] == "fp32"
    finally:
        precision_module.adds_int8_exactly.cache_clear()


@pytest.mark.parametrize("name", ["bf16-products", "int8"])
def test_reduced_products_are_for_cpus(name: str) -> None:
    with pytest.raises(ConfigError, match=f"precision {name} runs on CPUs only; on cuda use bf16 or fp32"):
        choose_precision(name, torch.device("cuda"))


def test_settings_know_every_precision() -> None:
    assert ("auto", *get_args(Precision)) == PRECISIONS
    for name in get_args(Precision):
        assert choose_precision(name, CPU) == (name, "as requested")
    with pytest.raises(ConfigError, match=r"found Sequential; fastfold\.quantize\(model, 'int8'\)"):
        set_precision(torch.nn.Sequential(torch.nn.Linear(2, 2)), "int8")  # type: ignore[arg-type]
    for function in (lambda: choose_precision("fp8", CPU), lambda: set_precision(None, "fp8")):
        with pytest.raises(ConfigError, match=r"expected a precision .*, found 'fp8'"):
            function()


@pytest.mark.parametrize("name", ["model_1", "model_1_multimer_v3"])
def test_bfloat16_keeps_normalisations_in_float32_and_nothing_else_of_the_trunk(name: str) -> None:
    config = one_block_config(model_config(name))
    network = set_precision(random_model(config), "bf16")
    assert (precision_of(network), trunk_dtype(network)) == ("bf16", torch.bfloat16)
    norms = {
        id(x) for module in network.modules() if isinstance(module, LayerNorm) for x in module.parameters()
    }
    for child in (network.input_embedder, network.extra_msa_stack, network.evoformer):
        parameters = list(child.parameters())
        assert {x.dtype for x in parameters if id(x) in norms} <= {torch.float32}
        assert {x.dtype for x in parameters if id(x) not in norms} == {torch.bfloat16}
    features = {name: value[None] for name, value in dummy_features(config, 6, 3, 4).items()}
    with torch.no_grad(), _Operators() as operators:
        network(features, 0)
    trunk = {"gated_attention", "transition", "triangle_multiplication", "outer_product_mean", "pair_bias"}
    assert {dtype for name, dtype in operators.found if name in trunk} == {torch.bfloat16}
