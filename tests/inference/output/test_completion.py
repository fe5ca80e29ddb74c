"""Digests are stable, and nothing unfinished passes for finished."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastfold.errors import OutputError
from fastfold.inference.output.completion import CompletionMarker
from fastfold.utils.atomic_files import write_atomic


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def run(folder: Path, digest: str, contents: dict[str, str]) -> None:
    """What the runner does for a target: its files, then the marker."""
    for name, text in contents.items():
        write_atomic(folder / name, text)
    CompletionMarker.mark_complete(folder, "t", digest, [folder / name for name in contents])


OLD = {"t_rank_001_m_seed_0.pdb": "old!", "t_rank_001_m_seed_0.cif": "old", "t_scores.json": "{}"}
NEW = {"t_rank_001_m_seed_0.pdb": "new!", "t_rank_001_m_seed_1.cif": "new"}


def test_a_target_is_complete_for_its_own_digest_and_name_only(tmp_path):
    assert not CompletionMarker.is_complete(tmp_path, "t", "d")
    run(tmp_path, "d", OLD)
    assert CompletionMarker.is_complete(tmp_path, "t", "d")
    assert not CompletionMarker.is_complete(tmp_path, "t", "other")
    assert not CompletionMarker.is_complete(tmp_path, "u", "d")
    assert not CompletionMarker.is_complete(tmp_path / "missing", "t", "d")


@pytest.mark.parametrize("damage", ["remove", "truncate", "same size", "folder"])
def test_a_target_whose_files_changed_is_not_complete(tmp_path, damage):
    run(tmp_path, "d", OLD)
    path = tmp_path / "t_scores.json"
    if damage == "same size":
        path.write_text("[]")
    elif damage == "truncate":
        path.write_text("")
    else:
        path.unlink()
        if damage == "folder":
            path.mkdir()
    assert not CompletionMarker.is_complete(tmp_path, "t", "d")


def test_files_of_an_earlier_run_go_when_the_new_ones_are_there(tmp_path):
    (tmp_path / "t_notes.txt").write_text("the user's own")
    run(tmp_path, "old", OLD)
    run(tmp_path, "new", NEW)
    assert names(tmp_path) == sorted([*NEW, "t_complete.json", "t_notes.txt"])
    assert CompletionMarker.is_complete(tmp_path, "t", "new")
    assert not CompletionMarker.is_complete(tmp_path, "t", "old")


def test_a_crash_anywhere_leaves_nothing_that_passes_for_finished(tmp_path, monkeypatch):
    """Stops the second run at each of its operations in turn and looks at what is left."""

    class Crash(BaseException):
        pass

    def crash_at(operation: int) -> None:
        calls = 0
        for name in ("replace", "unlink"):
            original = getattr(os, name)

            def counted(*args: object, original: object = original, **options: object) -> None:
                nonlocal calls
                calls += 1
                if calls == operation:
                    raise Crash
                original(*args, **options)

            patch.setattr(os, name, counted)

    for operation in range(1, 20):
        folder = tmp_path / str(operation)
        folder.mkdir()
        run(folder, "old", OLD)
        with monkeypatch.context() as patch:
            crash_at(operation)
            try:
                run(folder, "new", NEW)
                finished = True
            except Crash:
                finished = False
        assert CompletionMarker.is_complete(folder, "t", "new") == finished
        untouched = {name: (folder / name).read_text() for name in OLD if (folder / name).exists()} == OLD
        assert CompletionMarker.is_complete(folder, "t", "old") == (untouched and not finished)
        if not finished:
            # Nothing of the old run goes before the new one is whole.
            if any(not (folder / name).exists() for name in OLD):
                assert {name: (folder / name).read_text() for name in NEW} == NEW
            run(folder, "new", NEW)
        assert CompletionMarker.is_complete(folder, "t", "new")
        assert names(folder) == sorted([*NEW, "t_complete.json"])
        if finished:
            break
    assert operation > len(NEW) + 2  # every write, both removals and the marker were hit


def test_a_process_killed_between_two_files_is_not_finished(tmp_path):
    script = f"""
import os
from pathlib import Path
from fastfold.utils.atomic_files import write_atomic
write_atomic(Path({str(tmp_path)!r}) / "t_a.pdb", "new!")
os.kill(os.getpid(), 9)
"""
    run(tmp_path, "old", {"t_a.pdb": "old!", "t_b.cif": "old"})
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == -9
    assert not CompletionMarker.is_complete(tmp_path, "t", "new")
    assert not CompletionMarker.is_complete(tmp_path, "t", "old")


def test_a_missing_file_cannot_be_marked_complete(tmp_path):
    with pytest.raises(OutputError, match="cannot finish the target"):
        CompletionMarker.mark_complete(tmp_path, "t", "d", [tmp_path / "t_a.pdb"])
    assert names(tmp_path) == []


def test_files_of_other_folders_cannot_be_marked_complete(tmp_path):
    with pytest.raises(ValueError, match="not a file of the folder"):
        CompletionMarker.mark_complete(tmp_path, "t", "d", [tmp_path / "sub" / "t_a.pdb"])


def test_a_marker_from_elsewhere_removes_nothing_but_files_of_its_target(tmp_path):
    (tmp_path / "out").mkdir()
    kept = [tmp_path / "secret", tmp_path / "t_secret", tmp_path / "out" / "u_rank_001.pdb"]
    for path in kept:
        path.write_text("x")
    (tmp_path / "out" / "t_..").mkdir()  # makes t_../../../secret lead out of the folder
    names = [str(kept[0]), "../secret", "../t_secret", "t_../../../secret", "u_rank_001.pdb", "..", "t_x"]
    files = [{"name": name, "bytes": 1, "sha256": ""} for name in names]
    for listed in (files, *([file] for file in files)):
        marker = {"schema_version": 1, "digest": "d", "files": listed}
        (tmp_path / "out" / "t_complete.json").write_text(json.dumps(marker))
        run(tmp_path / "out", "new", {"t_a.pdb": "x"})
    assert all(path.exists() for path in kept)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 2) | st.floats() | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["schema_version", "digest", "files", "name", "bytes", "sha256"]),
            inner,
            max_size=6,
        )
    ),
    max_leaves=10,
)


@settings(max_examples=100, deadline=None)
@given(JSON.map(json.dumps) | st.text(max_size=30) | st.just("[" * 100_000))
def test_any_other_marker_counts_as_none(tmp_path_factory, text):
    folder = tmp_path_factory.mktemp("marker")
    (folder / "t_complete.json").write_text(text, encoding="utf-8")
    assert not CompletionMarker.is_complete(folder, "t", "d")
    run(folder, "d", {"t_a.pdb": "x"})
    assert CompletionMarker.is_complete(folder, "t", "d")


def test_marker_names_never_leave_the_folder(tmp_path):
    for name in ("../../x", "/etc/passwd", "a/b", "n" * 5000, "\0", "."):
        path = CompletionMarker.path(tmp_path, name)
        assert path.parent == tmp_path
        CompletionMarker.mark_complete(tmp_path, name, "d", [])
        assert CompletionMarker.is_complete(tmp_path, name, "d")
