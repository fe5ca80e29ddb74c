"""Exported programs: equal to the network, and what is refused."""

from __future__ import annotations

import re
import shutil
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import fastfold
from fastfold.data.features.pipeline import featurize
from fastfold.data.targets import target_from_sequence
from fastfold.errors import ConfigError, InputError
from fastfold.evoformer.config import model_config
from fastfold.evoformer.embedders.input import SequenceConvolution
from fastfold.evoformer.precision import set_precision
from fastfold.products.exporting.export import ExportedNetwork, _own_templates, export, load_exported
from fastfold.products.exporting.network_pass import LengthClass
from tests.helpers.networks import oracle_config, random_model


def tiny(name: str = "synthetic_monomer") -> fastfold.AlphaFold:
    """A network of one block each, without templates."""
    config = oracle_config(name)
    trunk = config.model.embeddings_and_evoformer
    trunk.evoformer_num_block = trunk.extra_msa_stack_num_block = 1
    trunk.template.enabled = trunk.template.embed_torsion_angles = False
    config.model.heads.structure_module.num_layer = 1
    model = random_model(config)
    model.name = "tiny"
    return model


def features_of(model: fastfold.AlphaFold, sequence: str, passes: int) -> list[dict[str, Tensor]]:
    chains = target_from_sequence(sequence).chains
    sampler = featurize(chains, [([], [])] * len(chains), model.config)
    samples = [sampler.sample(cycle) for cycle in range(passes)]
    return [{key: torch.as_tensor(np.asarray(value)) for key, value in one.items()} for one in samples]


@pytest.mark.slow
@pytest.mark.parametrize("package", [False, True])
def test_a_program_of_one_pass_equals_the_network(tmp_path: Path, package: bool):
    if package and shutil.which("g++") is None:
        pytest.skip("needs a C++ compiler")
    model = tiny()
    features = features_of(model, "MKTAYIAKQR", 2)
    (made,) = export(model, tmp_path, residues=16, max_msa=(4, 4), package=package)
    program = load_exported(made.path, trusted=package)
    assert program.shape == made.shape
    assert program.package == package
    found = program(features[1], program(features[0]))
    wanted = model(lambda cycle, member: features[cycle], 1, recycle_tolerance=0.0)
    for ours, theirs in (
        (found["prev_pos"], wanted["structure_module"]["final_atom_positions"]),
        (found["prev_pair"], wanted["representations"]["pair"]),
        (found["single"], wanted["representations"]["single"]),
    ):
        assert ours.shape == theirs.shape
        assert (ours - theirs).norm() / theirs.norm() < 1e-4
    with pytest.raises(InputError, match=r"aatype has shape \[20\], the class \[16\]; export a larger class"):
        program(features_of(model, "MKTAYIAKQR" * 2, 1)[0])
    with pytest.raises(InputError, match="expected the features of 1 passes, found 2"):
        program(features)


@pytest.mark.slow
def test_a_program_in_bf16_is_as_exact_as_the_network(tmp_path: Path):
    """Sums of bf16 products are rounded at other places, so both are compared with float32."""
    exact = tiny()
    model = set_precision(tiny(), "bf16")
    (features,) = features_of(model, "MKTAYIAKQR", 1)
    (program,) = export(model, tmp_path, residues=16, max_msa=(4, 4))
    found = program(features)
    ours, theirs, wanted = (
        found["prev_pair"].float(),
        *(
            each(lambda cycle, member: features, 0)["representations"]["pair"].float()
            for each in (model, exact)
        ),
    )
    limit = 1.5 * (theirs - wanted).norm()
    assert 0 < (ours - wanted).norm() < limit
    assert found["prev_pair"].dtype == torch.bfloat16


@pytest.mark.slow
def test_a_multimer_with_its_recycling_is_one_program(tmp_path: Path):
    """A complex of two chains, which stops after its first stable pass."""
    model = tiny("synthetic_multimer")
    model.config.model.recycle_early_stop_tolerance = 1000.0
    features = features_of(model, "MKTAYI:AKQR", 3)
    (program,) = export(model, tmp_path, residues=12, max_msa=(4, 4), num_recycles=2)
    found = program(features)
    wanted = model(lambda cycle, member: features[cycle], 2)
    assert wanted["num_recycles"] == 1
    theirs = wanted["structure_module"]["final_atom_positions"]
    assert (found["prev_pos"] - theirs).norm() / theirs.norm() < 1e-4


@pytest.mark.slow
def test_an_unrolled_program_equals_the_network_without_fastfolds_operators(tmp_path: Path):
    model = tiny()
    features = features_of(model, "MKTAYIAKQR", 2)
    (program,) = export(model, tmp_path, residues=[12], max_msa=(4, 4), num_recycles=1)
    assert program.path.name == "tiny_12_residues_1_recycles.pt2"
    found = program(features)
    wanted = model(lambda cycle, member: features[cycle], 1, recycle_tolerance=0.0)
    theirs = wanted["structure_module"]["final_atom_positions"]
    assert (found["prev_pos"] - theirs).norm() / theirs.norm() < 1e-4
    graph = torch.export.load(program.path).graph
    assert not [node for node in graph.nodes if "fastfold" in str(node.target)]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"residues": []}, "residues must be whole numbers from 1, found \\[\\]"),
        ({"residues": 0}, "residues must be whole numbers from 1, found 0"),
        ({"residues": 16.0}, r"residues must be whole numbers from 1, found 16\.0"),
        ({"residues": "16"}, "residues must be whole numbers from 1, found '16'"),
        ({"max_msa": 16}, "max_msa must be two numbers of rows, clusters and extra, found 16"),
        ({"max_msa": (4, 0)}, "max_msa must be from 1 to 100000, found 0"),
        ({"templates": "1"}, "templates must be 0 to 0 for tiny, found '1'"),
        ({"templates": 1}, "templates must be 0 to 0 for tiny, found 1"),
        ({"num_recycles": -1}, "num_recycles must be a whole number from 0, found -1"),
    ],
)
def test_a_wrong_setting_is_named(tmp_path: Path, settings: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        export(tiny(), tmp_path, **({"residues": 16} | settings))


@pytest.mark.parametrize(
    ("multimer", "most", "templates", "shown"),
    [
        (True, 4, None, 4),
        (True, 4, 1, 1),
        (True, 4, 0, None),
        (True, 0, 0, 0),
        (False, 4, 0, 0),
        (False, 4, 5, None),
    ],
)
def test_a_multimer_with_templates_shows_one_at_least(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    multimer: bool,
    most: int,
    templates: int | None,
    shown: int | None,
) -> None:
    model = tiny("synthetic_multimer" if multimer else "synthetic_monomer")
    monkeypatch.setattr("fastfold.products.exporting.export._own_templates", lambda _: most)
    monkeypatch.setattr(
        "fastfold.products.exporting.export._export_class",
        lambda _, folder, shape, *settings: shape.templates,
    )
    if shown is None:
        with pytest.raises(
            ConfigError, match=f"templates must be {int(multimer)} to 4 for tiny, found {templates}"
        ):
            export(model, tmp_path, residues=16, templates=templates)
    else:
        assert export(model, tmp_path, residues=16, templates=templates) == [shown]


@pytest.mark.parametrize("num_recycles", [None, 1])
def test_outputs_have_the_residues_of_the_target_alone(num_recycles: int | None) -> None:
    """Arrays of pairs are cut in both axes, others in their first."""
    shapes = {
        "plddt": (8,),
        "prev_pos": (8, 37, 3),
        "prev_msa_first_row": (8, 4),
        "prev_pair": (8, 8, 4),
        "pae": (8, 8),
    }
    outputs = {name: torch.randn(shape) for name, shape in shapes.items()}
    seen: list[Any] = []

    def run(*tensors: Any) -> dict[str, Tensor]:
        seen.append(tensors)
        return outputs

    sizes = {name: shapes[name] for name in ("prev_pos", "prev_msa_first_row", "prev_pair")}
    program = ExportedNetwork(
        Path("p"), LengthClass(8, 1, 1), num_recycles, False, run, ("aatype",), sizes, False
    )
    one = {"aatype": torch.arange(5)}
    found = program(one if num_recycles is None else [one, one])
    for name, value in outputs.items():
        whole = value[:5, :5] if name in ("prev_pair", "pae") else value[:5]
        assert torch.equal(found[name], whole), name
    first = seen[0][0]["aatype"]
    assert first[..., :5].tolist() == ([0, 1, 2, 3, 4] if num_recycles is None else [[0, 1, 2, 3, 4]] * 2)
    if num_recycles is None:
        assert not any(value.any() for value in seen[0][1].values())
        program(one, found)
        for name, value in seen[1][1].items():
            inner = value[:5, :5] if name == "prev_pair" else value[:5]
            assert torch.equal(inner, found[name]), name
            assert value.count_nonzero() == found[name].count_nonzero(), name


def test_what_cannot_be_exported_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(ConfigError, match="a network in int8 cannot be exported"):
        export(set_precision(tiny(), "int8"), tmp_path, residues=16)
    with pytest.raises(ConfigError, match=r"model must be a network of fastfold\.load_model, found Linear"):
        export(torch.nn.Linear(2, 2), tmp_path, residues=16)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="mini moves residues after its last pass"):
        export(fastfold.load_model("mini"), tmp_path, residues=16, num_recycles=1)
    monkeypatch.setenv("CXX", "ccache mycc -m64")
    monkeypatch.setattr("fastfold.products.exporting.export.shutil.which", lambda name: asked.append(name))
    asked: list[str] = []
    with pytest.raises(ConfigError, match=r"needs a C\+\+ compiler"):
        export(tiny(), tmp_path, residues=16, package=True)
    monkeypatch.delenv("CXX")
    assert asked == ["ccache"]
    with pytest.raises(ConfigError, match=r"needs a C\+\+ compiler"):
        export(tiny(), tmp_path, residues=16, package=True)
    monkeypatch.setattr("fastfold.products.exporting.export.torch.export.export", lambda *_, **__: 1 / 0)
    with pytest.raises(ConfigError, match="tiny cannot be exported: division by zero"):
        export(tiny(), tmp_path, residues=16, max_msa=(4, 4))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("a.pt2", "text", "is truncated or damaged"),
        ("a.pt2", "weights", "is not a program of fastfold.export: it has the member 'a/data.pkl'"),
        ("a.pt2", None, "no such file"),
        ("a.aoti.pt2", "text", "is not a program of fastfold.export: File is not a zip file"),
        ("a.aoti.pt2", "weights", "is not a program of fastfold.export: it has no entry /aotinductor/"),
        ("a.aoti.pt2", None, "no such file"),
    ],
)
def test_another_file_is_refused_in_one_line(
    name: str,
    content: str | None,
    reason: str,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
):
    if content == "text":
        (tmp_path / name).write_bytes(b"no program")
    elif content == "weights":
        torch.save({"weight": torch.zeros(2)}, tmp_path / name)
    with pytest.raises(InputError, match=re.escape(f"{name}: {reason}")):
        load_exported(tmp_path / name, trusted=True)
    assert capfd.readouterr() == ("", "")
    assert caplog.records == []


def test_a_library_has_one_entry_of_the_compiler_among_others(tmp_path: Path):
    path = tmp_path / "a.aoti.pt2"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a/version", "1")
        archive.writestr("a/data/aotinductor/x.so", "no library")
    with pytest.raises(InputError, match=r"is not a program of fastfold.export: (?!it has no entry)"):
        load_exported(path, trusted=True)


def test_a_network_with_a_convolution_is_not_padded(tmp_path: Path):
    """Its outputs at the last residues would depend on the padding."""
    shape = LengthClass(16, 4, 4)
    network = ExportedNetwork(
        tmp_path / "mini.pt2", shape, None, False, lambda *_: {}, ("aatype",), {}, has_exact_length=True
    )
    with pytest.raises(InputError, match="its program takes exactly 16 residues, found 10"):
        network({"aatype": torch.zeros(10, dtype=torch.int32)})
    assert network({"aatype": torch.zeros(16, dtype=torch.int32)}) == {}
    mini = fastfold.load_model("mini")
    assert any(isinstance(part, SequenceConvolution) for part in mini.modules())


@pytest.mark.parametrize(
    ("name", "templates"), [("model_1_ptm", 4), ("model_3", 0), ("model_1_multimer_v3", 4), ("mini", 0)]
)
def test_official_networks_are_exported_with_the_templates_that_they_take(name: str, templates: int) -> None:
    with torch.device("meta"):
        assert _own_templates(fastfold.AlphaFold(model_config(name), name=name)) == templates
