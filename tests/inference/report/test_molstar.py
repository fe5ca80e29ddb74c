"""Only the known files of the viewer go into a page."""

from __future__ import annotations

import hashlib
import importlib
import re
import sys
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from fastfold.inference.report import molstar, write_report
from fastfold.inference.report.encode import pack
from tests.conftest import REPOSITORY
from tests.helpers.results import helix_prediction

SCRIPT, STYLE = "'use strict';\r\nwindow.viewer = 1;\n", "body { margin: 0 }\n"


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder of a viewer's files in a package of the viewer's name, whose sums are the known ones."""
    folder = tmp_path / "site" / "small_viewer" / "static" / "molstar"
    folder.mkdir(parents=True)
    (tmp_path / "site" / "small_viewer" / "__init__.py").write_text("")
    for name, content in (
        ("molstar.js", SCRIPT),
        ("molstar.css", STYLE),
        ("LICENSE.molstar", "licence"),
        ("VERSION", "1.2.3\n"),
    ):
        (folder / name).write_bytes(content.encode())
    monkeypatch.setattr(sys, "path", [str(tmp_path / "site"), *sys.path])
    monkeypatch.setattr(molstar, "PACKAGE", "small-viewer")
    sums = {
        name: hashlib.sha256(text.encode()).hexdigest()
        for name, text in (("molstar.js", SCRIPT), ("molstar.css", STYLE))
    }
    monkeypatch.setattr(molstar, "SHA256", sums)
    monkeypatch.setattr(molstar, "_packed", {})
    monkeypatch.setattr(molstar, "_pending", [])
    return folder


def page_of(tmp_path: Path, said: list[str]) -> str:
    helix_prediction("t", 6).save(tmp_path / "results", plots=False)
    return write_report(tmp_path / "results", say=said.append).read_text()


def test_known_files_are_taken_byte_for_byte(package: Path, tmp_path: Path) -> None:
    found = molstar.load_molstar()
    assert found == molstar.Molstar(SCRIPT, STYLE, "licence", "1.2.3")
    said: list[str] = []
    assert "with the viewer Mol* 1.2.3" in page_of(tmp_path, said)
    assert not said


def test_another_process_packs_the_viewer_once(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Future[Any]] = []

    def submit(call: Callable[[], Any]) -> Future[Any]:
        calls.append(Future())
        calls[-1].set_result(call())
        return calls[-1]

    molstar.pack_ahead(submit)
    monkeypatch.setattr(molstar, "_pack_viewer", lambda: pytest.fail("packed here too"))
    for _ in range(2):
        assert molstar.packed_viewer() == (pack(SCRIPT.encode()), pack(STYLE.encode()))
        molstar.pack_ahead(submit)
    assert len(calls) == 1


def test_forks_of_a_process_that_packed_the_viewer_do_not_pack_it(
    package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "fastfold.inference.report.server_viewer", raising=False)
    importlib.import_module("fastfold.inference.report.server_viewer")
    monkeypatch.setattr(molstar, "load_molstar", lambda: pytest.fail("packed again"))
    assert molstar._pack_viewer() == {
        hashlib.sha256(text.encode()).hexdigest(): pack(text.encode()) for text in (SCRIPT, STYLE)
    }


def test_a_changed_file_does_not_end_the_server(package: Path) -> None:
    (package / "molstar.js").write_bytes(b"changed")
    molstar.pack_for_forks()
    with pytest.raises(ValueError, match="unknown SHA-256"):
        molstar._pack_viewer()


def test_the_viewer_is_packed_here_if_another_process_cannot(package: Path) -> None:
    def submit(call: Callable[[], Any]) -> Future[Any]:
        failed: Future[Any] = Future()
        failed.cancel()
        return failed

    molstar.pack_ahead(submit)
    assert molstar.packed_viewer() == (pack(SCRIPT.encode()), pack(STYLE.encode()))


@pytest.mark.parametrize("name", ["molstar.js", "molstar.css"])
def test_a_changed_file_is_left_out_and_the_page_says_why(package: Path, tmp_path: Path, name: str) -> None:
    changed = (package / name).read_bytes() + b"/* changed */"
    (package / name).write_bytes(changed)
    found = hashlib.sha256(changed).hexdigest()
    said: list[str] = []
    page = page_of(tmp_path, said)
    assert len(said) == 1
    assert said[0].startswith(f"the 3D view: left out of the report, {name} of the package ")
    assert said[0].endswith(f"found {found}")
    assert re.search(rf'data-refused="{name} of the package [^"]*found {found}"', page)
    assert "with the viewer" not in page
    assert "unsafe-eval" not in page


def test_the_pinned_version_is_the_one_whose_sums_are_known() -> None:
    assert '"molstar-cli==0.0.1"' in (REPOSITORY / "pyproject.toml").read_text()
    assert "molstar-cli==0.0.1" in (REPOSITORY / "constraints.txt").read_text().splitlines()
    try:
        assert molstar.load_molstar() is not None
    except ValueError as error:
        pytest.fail(str(error))


@pytest.mark.parametrize("name", ["molstar.js", "molstar.css"])
def test_a_file_that_is_not_packed_is_packed_with_the_other(package: Path, name: str) -> None:
    """Nothing is started in another process if both are there."""
    started: list[Any] = []
    molstar._packed[molstar.SHA256[name]] = pack(b"earlier")
    molstar.pack_ahead(lambda run: started.append(run) or Future())
    assert len(started) == len(molstar._pending) == 1
    molstar._pending.clear()
    assert molstar.packed_viewer() == (pack(SCRIPT.encode()), pack(STYLE.encode()))
    molstar.pack_ahead(lambda run: started.append(run) or Future())
    assert len(started) == 1
