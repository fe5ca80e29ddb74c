"""``--precision auto``: chosen before anything is computed, said, and kept with the prediction."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from fastfold.errors import ConfigError
from fastfold.evoformer.model import AlphaFold
from fastfold.evoformer.precision import precision_of
from fastfold.evoformer.quantization import least_work
from fastfold.evoformer.weights import checkpoint
from fastfold.inference.config import InferConfig
from fastfold.inference.models import open_networks
from fastfold.inference.prepare import about_device, about_kernels, with_precision
from fastfold.kernels.cpu import products
from tests.helpers.command_line import QUICK, CommandLine

CPU = torch.device("cpu")


@pytest.fixture
def only_vnni(monkeypatch: pytest.MonkeyPatch) -> None:
    """A processor that multiplies 8 bits and not bfloat16."""
    for name in ("amx_tile", "avx512_bf16", "vnni"):
        monkeypatch.setattr(torch.cpu, f"_is_{name}_supported", lambda name=name: name == "vnni")


def test_auto_is_chosen_and_said(only_vnni: None, cli: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    # A measurement without VNNI takes half a minute.
    monkeypatch.setattr(least_work, "measure_least_work", lambda trunk, kind: least_work.CERTAIN_WORK)
    fasta, weights = cli.fasta({"a": "MKTAYIAKQR"}), cli.weights()
    arguments = ("infer", fasta, "--out", cli.out, "--weights", weights, *QUICK)
    done = cli.run(*arguments, "--precision", "auto")
    assert done.code == 0, done.err
    assert "precision int8: the processor has VNNI" in done.err
    assert cli.config("a")["settings"]["precision"] == "int8"
    # Named, it is the same prediction; another precision is one of its own.
    assert cli.run(*arguments, "--precision", "int8").out.startswith("0 folded, 1 finished before")
    again = cli.run(*arguments)
    assert again.out.startswith("1 folded")
    assert "precision" not in again.err


def test_a_precision_that_is_slow_here_is_told_once(
    cli: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(products, "multiplies_bfloat16", lambda: False)
    fasta, weights = cli.fasta({"a": "MKTAYIAKQR", "b": "MKTAYIAKQ"}), cli.weights()
    arguments = ("infer", fasta, "--weights", weights, *QUICK, "--precision")
    done = cli.run(*arguments, "bf16", "--out", cli.out / "bf16")
    assert done.code == 0, done.err
    warning = "warning: precision bf16 halves the memory and is several times slower than fp32"
    assert done.err.count(warning) == 1
    assert "slower" not in cli.run(*arguments, "fp32", "--out", cli.out / "fp32").err


def test_several_processes_refuse_what_one_alone_can(only_vnni: None) -> None:
    config = InferConfig(precision="auto", parallel="dap=2")
    with pytest.raises(ConfigError, match="several processes fold in fp32 or bf16, not in int8"):
        with_precision(config, CPU)
    assert with_precision(InferConfig(precision="bf16", parallel="dap=2"), CPU)[1] == ""


def test_a_cluster_s_machines_need_its_name(cli: CommandLine) -> None:
    done = cli.run(
        "screen", cli.fasta({"a": "MKT"}), "--out", cli.out, "--ray", "local", "--precision", "auto"
    )
    assert done.code == 2
    assert "set the precision (--precision) instead of auto" in done.err


@pytest.mark.parametrize(
    ("device", "has_bfloat16", "named", "precision", "line"),
    [
        ("cpu", False, None, "fp32", ""),
        ("cuda", True, None, "bf16", "precision bf16: the GPU has bfloat16"),
        ("cuda:1", False, None, "fp32", "precision fp32: the GPU has no bfloat16"),
        ("cuda", True, "fp32", "fp32", ""),
    ],
)
def test_a_gpu_folds_in_bfloat16_unless_a_precision_is_named(
    device: str,
    has_bfloat16: bool,
    named: str | None,
    precision: str,
    line: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: has_bfloat16)
    config, said = with_precision(InferConfig(precision=named), torch.device(device))
    assert (config.precision, said) == (precision, line)


def test_kernels_to_compile_are_announced_where_there_are_none_yet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("FASTFOLD_KERNELS", raising=False)
    line = f"the first fold compiles about 30 kernels for this GPU, which are kept in {tmp_path}"
    assert about_kernels(torch.device("cuda")) == line
    assert about_kernels(CPU) == ""
    (tmp_path / "kernel").mkdir()
    assert about_kernels(torch.device("cuda")) == ""


def test_a_device_on_which_operators_run_otherwise_is_described(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", None)
    assert about_device(CPU) == about_device(torch.device("cuda")) == ""
    assert "on the CPU where Metal lacks them or float64" in about_device(torch.device("mps"))
    monkeypatch.setattr(torch.version, "hip", "7.0")
    monkeypatch.delenv("FASTFOLD_KERNELS", raising=False)
    assert about_device(torch.device("cuda")).startswith("ROCm 7.0: operators run in PyTorch")
    assert about_kernels(torch.device("cuda")) == ""


def test_a_network_is_built_once_and_again_only_where_it_was_rounded(
    cli: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    built: list[str] = []

    def counted(config: Mapping[str, Any], origin: str) -> AlphaFold:
        built.append(origin)
        return build(config, origin)

    build = checkpoint._network
    monkeypatch.setattr(checkpoint, "_network", counted)
    (network,) = open_networks([cli.weights()])
    exact = copy.deepcopy(network.load("fp32").state_dict())
    rounded = network.load("bf16")
    assert rounded is network.load("bf16")
    assert (precision_of(rounded), len(built)) == ("bf16", 1)
    again = network.load(None).state_dict()
    assert len(built) == 2
    assert all(torch.equal(again[key], value) for key, value in exact.items())
