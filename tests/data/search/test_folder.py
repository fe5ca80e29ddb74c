"""Results appear where --msa-dir finds them, and files of others are never touched."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fastfold.data.msa.find import load_alignments
from fastfold.data.search.store import FOLDER, SearchKey, SearchStore, chain_places, publish
from fastfold.data.targets import Target, target_from_sequence
from fastfold.errors import OutputError

KEY = SearchKey("uniref90", {"E": 1e-4})


def _alignment(*rows: str) -> bytes:
    return b"".join(f">r{number}\n{row}\n".encode() for number, row in enumerate(rows))


def _put(folder: Path, target: Target, key: SearchKey, sequence: str, name: str, content: bytes) -> Path:
    files = SearchStore(folder / FOLDER).add(sequence, key, {name: content})
    place = folder / chain_places(target)[sequence]
    publish(place, key, files)
    return place / name


def test_a_chain_is_found_under_its_name(tmp_path: Path) -> None:
    target = target_from_sequence("MKV", "protein")
    path = _put(tmp_path, target, KEY, "MKV", "uniref90_hits.a3m", _alignment("MKV", "MRV"))
    assert path == tmp_path / "protein/uniref90_hits.a3m"
    (((msa,), paired),) = load_alignments(tmp_path, target)
    assert (msa.sequences, paired) == (("MKV", "MRV"), [])


def test_chains_of_a_complex_have_a_folder_each_and_copies_share_it(tmp_path: Path) -> None:
    target = target_from_sequence("MKV:MAU:MKV", "dimer")
    assert chain_places(target) == {"MKV": "dimer/A", "MAU": "dimer/B"}
    _put(tmp_path, target, KEY, "MKV", "uniref90_hits.a3m", _alignment("MKV", "MRV"))
    _put(tmp_path, target, KEY, "MAU", "uniref90_hits.a3m", _alignment("MAU", "MAC"))
    uniprot = SearchKey("uniprot", {})
    _put(tmp_path, target, uniprot, "MKV", "uniprot_hits.a3m", _alignment("MKV", "MKK"))
    _put(tmp_path, target, uniprot, "MAU", "uniprot_hits.a3m", _alignment("MAU"))
    first, second, third = load_alignments(tmp_path, target)
    assert first[0][0].sequences == third[0][0].sequences == ("MKV", "MRV")
    assert second[0][0].sequences == ("MAU", "MAC")
    assert first[1][0].sequences == ("MKV", "MKK")


def test_the_same_sequence_under_two_names_is_one_file(tmp_path: Path) -> None:
    paths = [
        _put(tmp_path, target_from_sequence("MKV", name), KEY, "MKV", "uniref90_hits.a3m", _alignment("MKV"))
        for name in ("one", "two")
    ]
    assert paths[0].samefile(paths[1])


def test_a_file_system_without_links_gets_copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError("no links")

    monkeypatch.setattr(os, "link", refuse)
    path = _put(
        tmp_path, target_from_sequence("MKV"), KEY, "MKV", "uniref90_hits.a3m", _alignment("MKV", "MRV")
    )
    assert path.read_bytes() == _alignment("MKV", "MRV")


def test_a_new_result_replaces_the_old_one_of_its_name_alone(tmp_path: Path) -> None:
    target = target_from_sequence("MKV", "x")
    mgnify = _put(tmp_path, target, SearchKey("mgnify", {}), "MKV", "mgnify_hits.a3m", _alignment("MKV"))
    old = _put(tmp_path, target, KEY, "MKV", "uniref90_hits.a3m", _alignment("MKV", "MRV"))
    other = SearchKey("uniref90", {"E": 10.0})
    new = _put(tmp_path, target, other, "MKV", "uniref90_hits.sto", b"# STOCKHOLM 1.0\n\nq MKV\n//\n")
    assert (mgnify.exists(), old.exists(), new.exists()) == (True, False, True)
    again = _put(tmp_path, target, KEY, "MKV", "uniref90_hits.a3m", _alignment("MKV", "MRV"))
    assert (again.exists(), new.exists()) == (True, False)


@pytest.mark.parametrize("edited", [False, True])
def test_a_file_of_somebody_else_is_not_replaced(tmp_path: Path, edited: bool) -> None:
    target = target_from_sequence("MKV", "x")
    path = tmp_path / "x/uniref90_hits.a3m"
    if edited:
        _put(tmp_path, target, KEY, "MKV", path.name, _alignment("MKV", "MRV"))
        path.unlink()
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(_alignment("MKV", "MAV"))
    with pytest.raises(OutputError, match=r"uniref90_hits\.a3m: exists already, and is not from a search"):
        _put(tmp_path, target, SearchKey("uniref90", {"E": 1.0}), "MKV", path.name, _alignment("MKV"))
    assert path.read_bytes() == _alignment("MKV", "MAV")


def test_an_interruption_between_record_and_file_is_taken_up_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = target_from_sequence("MKV", "x")
    path = _put(tmp_path, target, KEY, "MKV", "uniref90_hits.a3m", _alignment("MKV", "MRV"))
    with monkeypatch.context() as patch:
        patch.setattr("fastfold.data.search.store._link", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            _put(tmp_path, target, SearchKey("uniref90", {"E": 1.0}), "MKV", path.name, _alignment("MKV"))
    assert path.read_bytes() == _alignment("MKV", "MRV")
    _put(tmp_path, target, SearchKey("uniref90", {"E": 2.0}), "MKV", path.name, _alignment("MKV", "MKK"))
    assert path.read_bytes() == _alignment("MKV", "MKK")
