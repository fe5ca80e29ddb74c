"""Every number of an ensemble's files, computed again from the files of its predictions, without the package."""

from __future__ import annotations

import shutil
from importlib.util import find_spec
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest

from fastfold.products.ensemble.write import write_ensembles
from tests.helpers.results import helix_prediction
from tests.helpers.written_numbers import ca_of, check_cells, motion_of, read_rows, read_values, superposed
from tests.products.ensemble.conftest import NUMBER, save_two_states

pytestmark = pytest.mark.skipif(find_spec("sklearn") is None, reason="needs scikit-learn")

LENGTHS = (30, 20)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Results of two states, other pLDDT in each, and their ensemble with the last one as a reference."""
    folder = save_two_states(tmp_path_factory.mktemp("numbers"))
    draws = np.random.default_rng(3)
    for path in folder.glob("*_scores.json"):
        text = path.read_text()
        plddt = draws.uniform(40, 90, sum(LENGTHS)).round(2).tolist()
        old = str(read_values(path)["plddt"])
        assert old in text
        path.write_text(text.replace(old, str(plddt)))
    (reference,) = folder.glob(f"*rank_{NUMBER:03d}*.cif")
    shutil.copy(reference, folder.parent / "state.cif")
    write_ensembles(folder, references=[folder.parent / "state.cif"], plots=False)
    return folder


def _samples(folder: Path) -> list[np.ndarray]:
    return [ca_of(path) for path in sorted(folder.glob("*rank_*.cif"))]


def _rmsd(first: np.ndarray, second: np.ndarray) -> float:
    return float(np.sqrt(np.square(superposed(first, second) - second).sum(-1).mean()))


def test_pairs_have_the_scores_of_superposed_structures(written: Path) -> None:
    """RMSDs are exact; a TM-score is at least that of the superposition with the smallest RMSD."""
    values, ca = read_values(written / "helices_ensemble.json"), _samples(written)
    scores, distances = np.array(values["tm_score"]), np.array(values["rmsd"])
    for matrix, of_itself in ((scores, 1), (distances, 0)):
        assert (matrix == matrix.T).all()
        assert (np.diag(matrix) == of_itself).all()
    d0 = 1.24 * (sum(LENGTHS) - 15) ** (1 / 3) - 1.8
    for i, j in combinations(range(NUMBER), 2):
        assert distances[i, j] == pytest.approx(_rmsd(ca[i], ca[j]), abs=6e-4)
        starts = [superposed(ca[i], ca[j])]
        for part in (slice(0, LENGTHS[0]), slice(LENGTHS[0], None)):  # one chain on the other's
            rotation, shift = motion_of(ca[i][part], ca[j][part])
            starts.append(ca[i] @ rotation + shift)
        best = max(np.mean(1 / (1 + (np.linalg.norm(one - ca[j], axis=-1) / d0) ** 2)) for one in starts)
        assert best - 1e-4 <= scores[i, j] <= 1.0
        assert scores[i, j] == pytest.approx(best, abs=0.05)


def test_clusters_are_those_of_average_linkage(written: Path) -> None:
    hierarchy = pytest.importorskip("scipy.cluster.hierarchy")
    values = read_values(written / "helices_ensemble.json")
    scores = np.array(values["tm_score"])
    tree = hierarchy.linkage((1.0 - scores)[np.triu_indices(NUMBER, 1)], "average")
    labels = hierarchy.fcluster(tree, 0.2, "distance")
    groups = sorted(
        (np.flatnonzero(labels == one) for one in set(labels)), key=lambda one: (-len(one), one[0])
    )
    expected = [next(k for k, one in enumerate(groups, 1) if i in one) for i in range(NUMBER)]
    assert values["clusters"] == expected
    names = [one[np.argmax(scores[one][:, one].mean(1))] for one in groups]
    assert values["representatives"] == [values["samples"][i] for i in names]


def test_components_and_fluctuations_are_those_of_superposed_structures(written: Path) -> None:
    """Components are the singular vectors of deviations from the mean, up to their signs."""
    values, ca = read_values(written / "helices_ensemble.json"), _samples(written)
    mean = ca[0]
    for _ in range(20):
        mean = np.mean([superposed(one, mean) for one in ca], 0)
    moved = np.array([superposed(one, mean) for one in ca])
    deviations = moved - moved.mean(0)
    assert values["fluctuation"] == pytest.approx(
        np.sqrt(np.square(deviations).sum(-1).mean(0)).tolist(), abs=2e-3
    )
    left, lengths, _ = np.linalg.svd(deviations.reshape(NUMBER, -1), full_matrices=False)
    shares = np.square(lengths) / np.square(lengths).sum()
    assert values["variance"] == pytest.approx(shares[:5].tolist(), abs=2e-4)
    components = np.array(values["components"])
    assert components.shape == (NUMBER, 5)
    expected = left[:, 0] * lengths[0] / np.sqrt(sum(LENGTHS))
    assert np.abs(components[:, 0]) == pytest.approx(np.abs(expected), abs=2e-3)
    assert values["residues"] == list(range(1, sum(LENGTHS) + 1))
    # Representatives are moved onto the centered mean without a reflection.
    shown = []
    for motion, name in zip(values["motions"], values["representatives"], strict=True):
        number, rotation = values["samples"].index(name), np.array(motion["rotation"])
        assert np.linalg.det(rotation) == pytest.approx(1.0, abs=1e-5)
        shown.append((number, ca[number] @ rotation.T + motion["translation"]))
        assert np.abs(shown[-1][1].mean(0)).max() < 1e-3
    (first, one), (second, other) = shown
    apart = np.linalg.norm(moved[first] - moved[second], axis=-1)
    assert np.abs(np.linalg.norm(one - other, axis=-1) - apart).max() < 1e-2


def test_tables_have_a_line_for_each_sample_and_residue(written: Path) -> None:
    values, ca = read_values(written / "helices_ensemble.json"), _samples(written)
    rows = read_rows(written / "helices_ensemble.tsv")
    state = values["states"]["state.cif"]
    all_plddt = []
    for k, (row, name) in enumerate(zip(rows, values["samples"], strict=True)):
        scores = read_values(written / f"{name}_scores.json")
        all_plddt.append(scores["plddt"])
        assert state["rmsd"][k] == pytest.approx(_rmsd(ca[k], ca[-1]), abs=6e-4)
        assert state["tm_score"][k] == pytest.approx(values["tm_score"][k][-1], abs=0.02)
        assert state["chain_mapping"][k] == {"A": "A", "B": "B"}
        expected = {
            "files": name,
            "model": scores["model"],
            "seed": float(scores["seed"]),
            "sample": f"columns_{scores['sample']['number']:03d}",
            "cluster": float(values["clusters"][k]),
            "representative": "yes" if name in values["representatives"] else "no",
            "tm_score state.cif": state["tm_score"][k],
            **{f"component_{i}": value for i, value in enumerate(values["components"][k], 1)},
        }
        check_cells(row, expected, places=4)
        check_cells(row, {"plddt": np.mean(scores["plddt"])}, places=2)
        check_cells(row, {"rmsd state.cif": state["rmsd"][k]}, places=3)
        assert set(row) == {*expected, "plddt", "rmsd state.cif"}
    sequences = helix_prediction("helices", *LENGTHS).sequences
    places = [
        (chain, str(i), letter)
        for chain, one in zip("AB", sequences, strict=True)
        for i, letter in enumerate(one, 1)
    ]
    residues = read_rows(written / "helices_ensemble_residues.tsv")
    for row, place, fluctuation, plddt in zip(
        residues, places, values["fluctuation"], np.mean(all_plddt, 0), strict=True
    ):
        assert (row["chain"], row["residue"], row["letter"]) == place
        check_cells(row, {"fluctuation": fluctuation}, places=3)
        check_cells(row, {"plddt": plddt}, places=2)
