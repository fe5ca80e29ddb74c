"""A report holds what the folder holds, in little room, whatever else is there."""

from __future__ import annotations

import base64
import json
import os
import re
import zlib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from fastfold.cli import main
from fastfold.errors import InputError
from fastfold.inference.report import write as write_module
from fastfold.inference.report import write_report
from fastfold.inference.report.discover import find_predictions
from fastfold.inference.report.encode import pack_json, pack_pae, pack_structure
from fastfold.inference.report.molstar import load_molstar
from fastfold.inference.report.write import is_stale
from fastfold.protein.protein import Protein
from tests.helpers.results import helix_prediction, save_coverage

HOSTILE = "</script><!--<script>&amp;'\"\u2028\u2029"

pytestmark = pytest.mark.usefixtures("no_viewer")


def unpack(text: str) -> bytes:
    return zlib.decompress(base64.b64decode(text))


def meta_of(page: Path) -> dict[str, Any]:
    (found,) = re.findall(
        r'<script type="application/json" id="meta">(.*?)</script>', page.read_text(), re.DOTALL
    )
    return dict(json.loads(found))


def blob(page: Path, number: int) -> bytes:
    (found,) = re.findall(rf'id="blob-{number}">([^<]*)<', page.read_text())
    return unpack(found)


def test_a_row_has_the_best_pair_of_different_partners(tmp_path: Path) -> None:
    """The chains of the bait AB touch each other in every complex of a screen; AC is a complex of its own."""
    for name, partners in (("AB_and_C", "AB AB C"), ("AC_x3", "AC AC AC")):
        paths = helix_prediction(name, 12, 10, 9).save(tmp_path, rank=1, plots=False)
        scores = json.loads(paths["scores"].read_text())
        for pair, ipsae in (("A-B", 0.9), ("A-C", 0.2), ("B-C", 0.3)):
            scores["interfaces"]["pairs"][pair]["ipsae"] = ipsae
        paths["scores"].write_text(json.dumps(scores))
        config = {"chain_names": dict(zip("ABC", partners.split(), strict=True))}
        Path(str(paths["scores"]).replace("_scores", "_config")).write_text(json.dumps(config))
    rows = meta_of(write_report(tmp_path))["rows"]
    shown = {row["target"]: (row["partner_1"], row["partner_2"], row["ipsae"]) for row in rows}
    assert shown == {"AB_and_C": ("AB", "C", 0.3), "AC_x3": ("AC", "AC", 0.9)}


def test_predictions_are_found_by_target_best_first(tmp_path: Path) -> None:
    for rank, seed in ((1, 1), (2, 0), (10, 2)):
        helix_prediction("b", 8, seed=seed).save(tmp_path, rank=rank, plots=False)
    helix_prediction("a", 8).save(tmp_path, plots=False, settings={"x": 1})
    (tmp_path / "b_coverage.json").write_text("{}")
    (tmp_path / "b_rank_001_model_1_multimer_v3_seed_1_relaxed.pdb").write_text("")
    (tmp_path / "summary.tsv").write_text(
        "target\trelaxed_energy\tseconds\tpeak_memory\tfiles\n"
        "b\t-5.5\t\tnan\tb_rank_002_model_1_multimer_v3_seed_0\nshort\n"
    )
    found = find_predictions(tmp_path)
    assert [(one.target, one.rank) for one in found] == [("a", None), ("b", 1), ("b", 2), ("b", 10)]
    assert found[0].stem == "a_model_1_multimer_v3_seed_0"
    assert set(found[0].files) == {".pdb", ".cif", "_scores.json", "_pae.json", "_config.json"}
    assert set(found[1].files) == {
        ".pdb", ".cif", "_scores.json", "_pae.json", "_coverage.json", "_relaxed.pdb"
    }  # fmt: skip
    assert [one.structure.name.split("seed_")[1] for one in found[:2]] == ["0.pdb", "1_relaxed.pdb"]
    assert found[2].listed == {"relaxed_energy": -5.5}
    assert found[3].listed == {}


def test_a_file_belongs_to_the_longest_stem(tmp_path: Path) -> None:
    """``seed_1`` and ``seed_1_ab12`` have files of their own."""
    for name in ("t_seed_1", "t_seed_1_ab12"):
        path = helix_prediction("t", 5).save(tmp_path / "made", plots=False)["scores"]
        (tmp_path / f"{name}_scores.json").write_bytes(path.read_bytes())
        (tmp_path / f"{name}.pdb").write_text("")
    files = {one.stem: sorted(path.name for path in one.files.values()) for one in find_predictions(tmp_path)}
    assert files == {
        "t_seed_1": ["t_seed_1.pdb", "t_seed_1_scores.json"],
        "t_seed_1_ab12": ["t_seed_1_ab12.pdb", "t_seed_1_ab12_scores.json"],
    }


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("{", "it is not JSON"),
        ("[" * 100_000, "it is not JSON"),
        ("[]", "expected an object"),
        ('{"name": "x"}', "model is missing or has another type"),
        ('{"name":"x","model":"m","seed":0,"sequences":[],"plddt":[]}', "sequences are not text"),
        ('{"name":"x","model":"m","seed":0,"sequences":["AC"],"plddt":[1]}', "not a number for each residue"),
        (
            '{"name":"x","model":"m","seed":0,"sequences":["A"],"plddt":[NaN]}',
            "not a number for each residue",
        ),
        (
            '{"name":"x","model":"m","seed":0,"sequences":["A"],"plddt":["1"]}',
            "not a number for each residue",
        ),
    ],
)
def test_damaged_and_foreign_files_are_left_out_with_a_line(
    tmp_path: Path, content: str, reason: str
) -> None:
    helix_prediction("good", 6).save(tmp_path, plots=False)
    (tmp_path / "bad_scores.json").write_text(content)
    said: list[str] = []
    page = write_report(tmp_path, say=said.append)
    assert len(said) == 1
    assert said[0].startswith("bad_scores.json: left out of the report")
    assert reason in said[0]
    assert [row["target"] for row in meta_of(page)["rows"]] == ["good"]


def test_what_a_prediction_lacks_or_is_damaged_is_left_out_of_it_alone(tmp_path: Path) -> None:
    paths = helix_prediction("t", 6).save(tmp_path, rank=1, plots=False, settings={"a": 1})
    paths["pdb"].write_text("nonsense")
    paths["pae"].write_text('[{"predicted_aligned_error":[[1]],"max_predicted_aligned_error":31.75}]')
    paths["config"].write_text("[")
    (tmp_path / "t_coverage.json").write_text('{"chain_lengths": [6], "depth_by_identity": 3}')
    said: list[str] = []
    (row,) = meta_of(write_report(tmp_path, say=said.append))["rows"]
    assert "pae" not in row
    assert "structure" not in row
    assert len(said) == 4
    assert all(" left out of the report, " in line for line in said)


def test_numbers_survive_the_packing(tmp_path: Path) -> None:
    prediction = helix_prediction("t", 9, 7)
    prediction.save(tmp_path, rank=1, plots=False, settings={"precision": "fp32"})
    coverage = json.loads(save_coverage(tmp_path, prediction).read_text())
    page = write_report(tmp_path)
    (row,) = meta_of(page)["rows"]
    assert (row["target"], row["rank"], row["length"], row["ptm"]) == ("t", 1, 16, 0.71)
    assert row["ipsae_max"] == pytest.approx(prediction.interface_scores["ipsae_max"], abs=5.1e-5)
    assert row["clashes"] == prediction.interface_scores["clashes"] == 0
    detail = json.loads(blob(page, row["detail"]))
    np.testing.assert_allclose(detail["plddt"], prediction.plddt, atol=0.0551)  # of two decimals, to one
    assert detail["coverage"] == coverage
    assert detail["config"]["settings"] == {"precision": "fp32"}
    assert detail["interfaces"]["pairs"]["A\N{EN DASH}B"]["iptm"] == 0.55
    pae = np.frombuffer(blob(page, row["pae"]["blob"]), np.uint8).reshape(16, 16)
    np.testing.assert_allclose(pae * row["pae"]["step"], prediction.pae, atol=row["pae"]["step"] / 2 + 0.005)

    data = blob(page, row["structure"]["blob"])
    mask = np.unpackbits(np.frombuffer(data[: 16 * 5], np.uint8).reshape(16, 5), axis=1)[:, :37]
    np.testing.assert_array_equal(mask, prediction.atom_mask)
    points = np.frombuffer(data[16 * 5 :], "<i2").reshape(-1, 3) * row["structure"]["step"]
    original = prediction.atom_positions[prediction.atom_mask > 0.5]

    def distances(x: np.ndarray) -> np.ndarray:
        return np.linalg.norm(x[:, None] - x, axis=-1)

    np.testing.assert_allclose(distances(points), distances(original), atol=0.02)
    handed = [np.linalg.det(x[1:4] - x[0]) for x in (points, original.astype(float))]
    assert handed[0] == pytest.approx(handed[1], abs=0.3)
    extent = np.ptp(points, axis=0)
    assert extent[0] > extent[1] > extent[2]


NO_RECORD = "a record of its relaxation is missing from the scores file"


@pytest.mark.parametrize(
    ("record", "has_file", "relaxed", "not_relaxed"),
    [
        ({"relaxed": True, "reason": ""}, True, True, None),
        ({"relaxed": True, "reason": ""}, False, False, None),
        ({"relaxed": False, "reason": f"it clashes {HOSTILE}"}, True, False, f"it clashes {HOSTILE}"),
        ({"relaxed": False, "reason": "the minimiser failed"}, False, False, "the minimiser failed"),
        ({"relaxed": False}, True, False, "no reason is recorded"),
        ({"relaxed": "yes"}, True, False, NO_RECORD),
        ([], True, False, NO_RECORD),
        (None, True, False, NO_RECORD),
        (None, False, False, None),
    ],
)
def test_a_structure_is_called_relaxed_by_its_record_alone(
    tmp_path: Path, record: object, has_file: bool, relaxed: bool, not_relaxed: str | None
) -> None:
    paths = helix_prediction("t", 6).save(tmp_path, rank=1, plots=False)
    scores = json.loads(paths["scores"].read_text())
    if record is not None:
        paths["scores"].write_text(json.dumps(scores | {"relaxation": record}))
    if has_file:
        minimized = paths["pdb"].with_name(f"{paths['pdb'].stem}_relaxed.pdb")
        minimized.write_bytes(paths["pdb"].read_bytes())
    page = write_report(tmp_path)
    (row,) = meta_of(page)["rows"]
    detail = json.loads(blob(page, row["detail"]))
    assert (detail["relaxed"], detail["not_relaxed"]) == (relaxed, not_relaxed)


def test_large_aligned_errors_become_means_of_squares(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    pae = rng.integers(0, 32, (641, 641))
    path = tmp_path / "pae.json"
    path.write_text(
        json.dumps([{"predicted_aligned_error": pae.tolist(), "max_predicted_aligned_error": 31.75}])
    )
    layout, packed = pack_pae(path, 641)
    assert (layout["side"], layout["stride"]) == (214, 3)
    found = np.frombuffer(unpack(packed), np.uint8).reshape(214, 214) * layout["step"]
    assert found[10, 20] == pytest.approx(pae[30:33, 60:63].mean(), abs=0.126)
    assert found[213, 213] == pytest.approx(pae[639:, 639:].mean(), abs=0.126)


def test_unknown_residues_and_chains_without_atoms_keep_their_place(tmp_path: Path) -> None:
    """A chain of X alone has no atoms: the chains after it are still theirs."""
    prediction = helix_prediction("t", 5, 3, 5)
    mask, aatype = prediction.atom_mask.copy(), prediction.aatype.copy()
    mask[5:8], aatype[5:8] = 0.0, 20
    sequences = (prediction.sequences[0], "XXX", prediction.sequences[2])
    changed = helix_prediction("t", 5, 3, 5, atom_mask=mask, aatype=aatype, sequences=sequences)
    paths = changed.save(tmp_path, plots=False)
    for kind in ("pdb", "cif"):
        _, packed = pack_structure(paths[kind], sequences)
        found = np.unpackbits(np.frombuffer(unpack(packed)[: 13 * 5], np.uint8).reshape(13, 5), axis=1)
        np.testing.assert_array_equal(found[:, :37], mask)
    with pytest.raises(ValueError, match="differ from those of the scores"):
        pack_structure(paths["pdb"], ("W" * 5, "XXX", "W" * 5))
    assert isinstance(changed.protein, Protein)


def test_views_are_centered_with_the_longest_axes_in_their_plane(tmp_path: Path) -> None:
    """Extents are centered, and variances along x, y and z are the eigenvalues of the atoms' covariance."""
    prediction = helix_prediction("t", 12, 5)
    layout, packed = pack_structure(prediction.save(tmp_path, plots=False)["cif"], prediction.sequences)
    atoms = prediction.atom_positions[prediction.atom_mask > 0]
    assert layout["atoms"] == len(atoms)
    points = np.frombuffer(unpack(packed)[17 * 5 :], "<i2").reshape(-1, 3) * layout["step"]
    np.testing.assert_allclose(points.min(0), -points.max(0), atol=0.011)
    variances = np.linalg.svd(atoms - atoms.mean(0), compute_uv=False) ** 2 / len(atoms)
    np.testing.assert_allclose(points.var(0), variances, rtol=0.01)
    turn = np.array([[0.0, -1, 0], [1, 0, 0], [0, 0, 1]])
    _, moved = pack_structure(
        tmp_path / Path(prediction.save(tmp_path, plots=False)["cif"]).name,
        prediction.sequences,
        motion=(turn, np.array([1.0, 2, 3])),
    )
    points = np.frombuffer(unpack(moved)[17 * 5 :], "<i2").reshape(-1, 3) * layout["step"]
    np.testing.assert_allclose(points, atoms @ turn.T + [1, 2, 3], atol=0.02)


@pytest.mark.parametrize(
    ("content", "factor"), [("structure", lambda n: 2**14 * n), ("pae", lambda n: 2**5 * n**2)]
)
def test_files_with_more_bytes_than_their_residues_need_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str, factor: Callable[[int], int]
) -> None:
    """16 KiB for a residue of a structure and 32 bytes for a pair's error, in addition to the room of any file."""
    helix_prediction("t", 12, 5).save(tmp_path, plots=False)
    (found,) = find_predictions(tmp_path)
    path = found.structure if content == "structure" else found.files["_pae.json"]
    assert path is not None
    size = path.stat().st_size
    for less, is_left_out in ((0, False), (1, True)):
        monkeypatch.setattr(write_module, "_ROOM", size - factor(17) - less)
        said: list[str] = []
        assert (content in write_module._heavy(found, said.append)) != is_left_out
        lines = [line for line in said if path.name in line]
        assert len(lines) == is_left_out
        assert all(f"expected at most {size - 1:,} bytes, found {size:,}" in line for line in lines)


def test_the_best_come_first_where_there_is_not_room_for_all(tmp_path: Path) -> None:
    for name in ("a", "b"):
        for rank in (1, 2):
            helix_prediction(name, 30, seed=rank).save(tmp_path, rank=rank, plots=False)
    rows = meta_of(write_report(tmp_path))["rows"]
    sizes = [
        len(blob_text)
        for blob_text in re.findall(r'id="blob-\d+">([^<]*)<', (tmp_path / "report.html").read_text())
    ][:-1]  # without the page's program
    half = sum(sizes[:4]) + sum(sizes[4:]) // 2 + 200
    assert all("structure" in row for row in rows)
    rows = meta_of(write_report(tmp_path, max_embedded=half))["rows"]
    assert [(row["target"], row["rank"], "structure" in row) for row in rows] == [
        ("a", 1, True), ("a", 2, False), ("b", 1, True), ("b", 2, False)
    ]  # fmt: skip
    assert [row.get("omitted", False) for row in rows] == [False, True, False, True]


@pytest.mark.parametrize(
    ("limit", "shown", "left"),
    [(96, [2, 3, 1, 0], 1), (95, [2, 3, 1], 3), (92, [2, 3, 1], 0), (91, [2, 3, 0], 36)],
)
def test_arrays_are_read_until_less_than_a_twentieth_of_the_room_is_left(
    limit: int, shown: list[int], left: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An earlier blob has two letters; a prediction without a rank counts as a best one."""
    letters = {3: "a" * 3, 2: "b" * 40, 1: "c" * 20, None: "d" * 30}
    predictions: list[Any] = [SimpleNamespace(rank=rank) for rank in letters]
    monkeypatch.setattr(write_module, "_heavy", lambda one, _: {"structure": ({"n": 1}, letters[one.rank])})
    rows: list[dict[str, Any]] = [{} for _ in predictions]
    blobs = ["zz"]
    assert write_module._embed_arrays(predictions, rows, blobs, print, limit) == left
    assert blobs == ["zz", *(letters[predictions[number].rank] for number in shown)]
    for number, row in enumerate(rows):
        if number in shown:
            assert row == {"structure": {"n": 1, "blob": 1 + shown.index(number)}}
        else:
            assert row == {"omitted": True}


def test_no_text_ends_its_element(tmp_path: Path) -> None:
    """The browser tests show that it is shown; here, that the page has the elements that it should have."""
    folder = tmp_path / HOSTILE.replace("/", "")
    helix_prediction(HOSTILE, 6, model_name=HOSTILE).save(folder, plots=False, settings={HOSTILE: HOSTILE})
    page = write_report(folder)
    text = page.read_text()
    row = meta_of(page)["rows"][0]
    assert row["model"] == HOSTILE
    assert json.loads(blob(page, row["detail"]))["name"] == HOSTILE
    assert text.count("<script") == text.count("</script>") == 2 + len(re.findall(r'id="blob-', text))
    assert "<!--" not in text
    assert "\u2028" not in text.split("<title>")[1].split("</title>")[1].split("<footer>")[1]
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', text)
    assert policy is not None
    assert policy[1].startswith("default-src &#x27;none&#x27;; script-src &#x27;sha256-")
    assert "unsafe-eval" not in policy[1]
    assert "unsafe-inline" not in policy[1].split("style-src")[0]
    assert "http" not in policy[1]


def test_names_that_are_not_text_do_no_harm(tmp_path: Path) -> None:
    folder = tmp_path / os.fsdecode(b"r\xff")
    try:
        folder.mkdir()
    except OSError:
        pytest.skip("needs a file system that takes any name")
    paths = helix_prediction("t", 6).save(folder, plots=False)
    os.link(paths["pdb"], f"{paths['pdb'].with_suffix('')}_{os.fsdecode(bytes([255]))}.pdb")
    page = write_report(folder)
    assert "<title>Results in r?</title>" in page.read_text()
    names = json.loads(blob(page, 0))["files"]
    assert sorted(names) == sorted(path.name for path in paths.values())


def test_the_same_folder_gives_the_same_page_and_one_without_results_a_clear_error(tmp_path: Path) -> None:
    helix_prediction("t", 6).save(tmp_path / "made", plots=False)
    first = write_report(tmp_path / "made").read_bytes()
    assert write_report(tmp_path / "made").read_bytes() == first
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="expected a prediction in this folder"):
        write_report(tmp_path / "empty")
    with pytest.raises(InputError, match="No such file"):
        write_report(tmp_path / "absent")
    with pytest.raises(ValueError, match="not JSON compliant"):
        pack_json(float("nan"))


def test_a_page_is_stale_if_a_file_that_it_shows_is_newer(tmp_path: Path) -> None:
    helix_prediction("t", 6).save(tmp_path, plots=False)
    assert is_stale(tmp_path)
    page = write_report(tmp_path)
    assert not is_stale(tmp_path)
    written = page.stat().st_mtime_ns
    (tmp_path / "msas").mkdir()
    for name, stale in (("log.txt", False), ("t_reference.json", True), ("msas/t.a3m", True)):
        path = tmp_path / name
        path.write_text("{}")
        os.utime(path, ns=(written + 10**9, written + 10**9))
        assert is_stale(tmp_path) == stale
        path.unlink()


def test_the_command_makes_the_page_and_says_what_it_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    helix_prediction("t", 6).save(tmp_path, plots=False)
    (tmp_path / "x_scores.json").write_text("{}")
    assert main(["report", str(tmp_path)]) == 0
    done = capsys.readouterr()
    assert done.out == f"wrote {tmp_path / 'report.html'}\n"
    assert done.err.startswith("warning: x_scores.json: left out")
    assert main(["report", str(tmp_path / "absent")]) == 1
    assert "fastfold: " in capsys.readouterr().err


def test_the_viewer_is_taken_from_its_package_with_its_licence() -> None:
    found = load_molstar()
    if found is None:
        pytest.skip("needs the package molstar-cli")
    assert "Permission is hereby granted" in found.license
    assert re.fullmatch(r"\d+\.\d+\.\d+", found.version)
    assert "molstar" in found.script[:200]


def test_a_package_without_the_files_counts_as_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fastfold.inference.report.molstar.PACKAGE", "fastfold")
    assert load_molstar() is None
    monkeypatch.setattr("fastfold.inference.report.molstar.PACKAGE", "no-such-package")
    assert load_molstar() is None


def test_files_outside_the_folder_are_never_read(tmp_path: Path) -> None:
    folder, secret = tmp_path / "results", tmp_path / "secret_config.json"
    secret.write_text('{"token": 1}')
    path = helix_prediction("a", 6).save(folder, plots=False)["scores"]
    scores = json.loads(path.read_text())
    (folder / "a_model_scores.json").write_text(json.dumps(scores | {"name": "../secret"}))
    (folder / "a_model_config.json").symlink_to(secret)
    os.mkfifo(folder / "summary.tsv")
    said: list[str] = []
    found = find_predictions(folder, said.append)
    assert len(found) == 2
    assert all(
        file.parent == folder and not file.is_symlink() for one in found for file in one.files.values()
    )
    assert said == [
        f"{name}: left out of the report, it is not a regular file"
        for name in ("a_model_config.json", "summary.tsv")
    ]
