"""Archives that would run code when PyTorch reads them are refused before."""

from __future__ import annotations

import io
import json
import os
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fastfold
from fastfold.errors import InputError
from fastfold.products.exporting.foreign_program import check_program

Members = dict[str, bytes]


class Scale(nn.Module):
    """Module with a parameter and a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * x + torch.tensor([1.0, 2.0])


class Touch:
    """Object whose pickle makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


@pytest.fixture(scope="module")
def members() -> Members:
    file = io.BytesIO()
    program = torch.export.export(Scale(), (torch.zeros(2),)).run_decompositions({})
    torch.export.save(program, file, extra_files={"fastfold.json": "{}"})
    with zipfile.ZipFile(file) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def pack(path: Path, members: Members) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return path


def saved(content: object) -> bytes:
    file = io.BytesIO()
    torch.save(content, file)
    return file.getvalue()


def test_a_program_passes(members: Members, tmp_path: Path) -> None:
    check_program(pack(tmp_path / "a.pt2", members))


def edit_json(members: Members, ending: str, edit: Callable[[dict[str, Any]], object]) -> None:
    (name,) = (name for name in members if name.endswith(ending))
    content = json.loads(members[name])
    edit(content)
    members[name] = json.dumps(content).encode()


def first_weight(table: dict[str, Any]) -> dict[str, Any]:
    return next(iter(table["config"].values()))


def first_node(program: dict[str, Any]) -> dict[str, Any]:
    return program["graph_module"]["graph"]["nodes"][0]


GRAPH_EDITS: dict[str, tuple[str, Callable[[dict[str, Any]], object], str]] = {
    "weights": (
        "model_weights_config.json",
        lambda table: first_weight(table).update(use_pickle=True),
        "data/weights/model_weights_config.json names a pickle",
    ),
    "constants": (
        "model_constants_config.json",
        lambda table: first_weight(table).update(use_pickle=1),
        "data/constants/model_constants_config.json names a pickle",
    ),
    "operator": (
        "model.json",
        lambda graph: first_node(graph).update(target="torch.load"),
        "its graph has the operator 'torch.load'",
    ),
    "library": (
        "model.json",
        lambda graph: first_node(graph).update(target="torch.ops.load_library"),
        "its graph has the operator 'torch.ops.load_library'",
    ),
    "expression": (
        "model.json",
        lambda graph: first_node(graph).update(inputs=[{"arg": {"as_expr": {"expr_str": "f()"}}}]),
        "its graph has as_expr",
    ),
    "symbols": (
        "model.json",
        lambda graph: graph["range_constraints"].update(s0={}),
        "its graph has range_constraints",
    ),
    "guards": (
        "model.json",
        lambda graph: graph.update(guards_code=["f()"]),
        "its graph has guards_code",
    ),
}


@pytest.mark.parametrize("case", GRAPH_EDITS)
def test_tables_that_name_code_are_refused(case: str, members: Members, tmp_path: Path) -> None:
    ending, edit, message = GRAPH_EDITS[case]
    changed = dict(members)
    edit_json(changed, ending, edit)
    with pytest.raises(InputError, match=f"a.pt2: is not a program of fastfold.export: {message}"):
        check_program(pack(tmp_path / "a.pt2", changed))


def test_a_pickle_of_objects_never_runs(members: Members, tmp_path: Path) -> None:
    made = tmp_path / "made"
    (name,) = (name for name in members if "sample_inputs" in name)
    path = pack(tmp_path / "a.pt2", members | {name: saved({"a": Touch(made)})})
    with pytest.raises(InputError, match=r"sample_inputs/model\.pt is not a pickle of tensors alone"):
        fastfold.load_exported(path)
    assert not made.exists()
    torch.load(io.BytesIO(saved({"a": Touch(made)})), weights_only=False)
    assert made.exists()


@pytest.mark.parametrize(
    "name",
    [
        "data/aotinductor/model/a.so",
        "data/constants/custom_obj_0",
        "data/weights/WEIGHT_0",
        "serialized_state_dict.pt",
        "data/weights/../../x",
    ],
)
def test_other_members_are_refused(name: str, members: Members, tmp_path: Path) -> None:
    folder = next(iter(members)).partition("/")[0]
    with pytest.raises(InputError, match="it has the member"):
        check_program(pack(tmp_path / "a.pt2", members | {f"{folder}/{name}": b""}))
    with pytest.raises(InputError, match="it has the member"):
        check_program(pack(tmp_path / "b.pt2", members | {name: b""}))


def test_missing_members_and_damage_are_named(members: Members, tmp_path: Path) -> None:
    for ending in ("extra/fastfold.json", "models/model.json"):
        rest = {name: content for name, content in members.items() if not name.endswith(ending)}
        with pytest.raises(InputError, match=f"it has no entry {ending}"):
            check_program(pack(tmp_path / "a.pt2", rest))
    path = pack(tmp_path / "a.pt2", members)
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(InputError, match=r"a\.pt2: is truncated or damaged"):
        check_program(path)


def test_a_package_needs_trust(tmp_path: Path) -> None:
    (tmp_path / "a.aoti.pt2").write_bytes(b"")
    with pytest.raises(InputError, match="is a compiled library, which can run any code; pass trusted=True"):
        fastfold.load_exported(tmp_path / "a.aoti.pt2")
