"""Every number of a table of mutants, computed again from the files of the predictions, without the package."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fastfold.data.targets import Target, target_from_sequence
from fastfold.inference.config import InferConfig
from fastfold.inference.output.results_folder import ResultsFolder
from fastfold.inference.output.writer import write_result
from fastfold.products.mutate.mutations import mutant_targets, read_variants
from fastfold.products.mutate.table import write_results
from tests.helpers.results import helix_prediction
from tests.helpers.written_numbers import ca_of, check_cells, read_rows, read_values, superposed

LENGTHS = (12, 9)
SEEDS = (0, 3)


def _save(folder: ResultsFolder, target: Target, draws: np.random.Generator) -> list[str]:
    """Write a prediction of a target for each seed, with random numbers; return their ids."""
    ids = []
    for seed in SEEDS:
        one = helix_prediction(target.name, *LENGTHS, seed=seed)
        n = sum(LENGTHS)
        prediction = replace(
            one,
            sequences=tuple(chain.sequence for chain in target.chains),
            aatype=np.zeros(n, np.int64),
            atom_positions=one.atom_positions
            + draws.normal(0, 0.3, one.atom_positions.shape).astype(np.float32),
            plddt=draws.uniform(30, 95, n),
            pae=draws.uniform(0.2, 31, (n, n)),
            ptm=float(draws.uniform(0.3, 0.9)),
            iptm=float(draws.uniform(0.3, 0.9)),
        )
        files = prediction.files(plots=False)
        digest = hashlib.sha256(f"{target.name} {seed}".encode()).hexdigest()
        about = {"input_hash": digest}
        ids.append(write_result(folder.target(target), about, prediction, {}, InferConfig(), files=files).id)
    return ids


def _fold(folder: Path, name: str, seed: int) -> tuple[dict, np.ndarray, np.ndarray]:
    """Scores, aligned errors and CA atoms of a prediction in its files."""
    (path,) = folder.glob(f"{name}_rank_*_seed_{seed}_scores.json")
    stem = str(path).removesuffix("_scores.json")
    (pae,) = read_values(Path(f"{stem}_pae.json"))
    errors = np.array(pae["predicted_aligned_error"], np.float64)
    return read_values(path), errors, ca_of(Path(f"{stem}.cif"))


def _strain(first: list[np.ndarray], second: list[np.ndarray]) -> np.ndarray:
    """Effective strain ``[N]`` of McBride et al. 2023 by loops over residues."""
    values = []
    for i in range(len(first[0])):
        distances = [np.linalg.norm(ca - ca[i], axis=-1) for ca in (*first, *second)]
        near = [j for j in range(len(first[0])) if j != i and all(apart[j] <= 13.0 for apart in distances)]

        def mean_vectors(group: list[np.ndarray], place: int = i, others: list[int] = near) -> np.ndarray:
            vectors = [np.vstack([np.zeros(3), ca[others] - ca[place]]) for ca in group]
            return np.mean([vectors[0], *(_turned(one, vectors[0]) for one in vectors[1:])], 0)

        old, new = mean_vectors(first), mean_vectors(second)
        change = np.linalg.norm(_turned(new, old) - old, axis=-1)[1:] / np.linalg.norm(old, axis=-1)[1:]
        values.append(change.mean() if near else np.nan)
    return np.array(values)


def _turned(moving: np.ndarray, fixed: np.ndarray) -> np.ndarray:
    """Vectors from a residue turned onto others: their mirror images about it keep it in place."""
    return superposed(np.vstack([moving, -moving]), np.vstack([fixed, -fixed]))[: len(moving)]


@pytest.mark.parametrize("mutants", ["A:{0}2W", "A:{0}2W+B:{1}9C,B:{1}9D"])
def test_a_table_of_mutants_has_the_numbers_of_their_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mutants: str
) -> None:
    own = helix_prediction("t", *LENGTHS).sequences
    target = replace(target_from_sequence(":".join(own)), name="t", record="t")
    variants = read_variants(target, mutants.format(own[0][1], own[1][8]))
    targets = [target, *mutant_targets(target, [([], []), ([], [])], variants)]
    folder, draws = ResultsFolder(tmp_path), np.random.default_rng(1)
    predictions = {one.name: _save(folder, one, draws) for one in targets}
    monkeypatch.setattr("fastfold.products.mutate.table._picture", lambda *_: b"png")
    for has_picture in (True, False):  # a picture of an earlier table is removed
        write_results(targets, variants, predictions, tmp_path, has_picture=has_picture)
        assert (tmp_path / "mutations.png").exists() == has_picture
    rows = read_rows(tmp_path / "mutations.tsv")
    assert [row["mutations"] for row in rows] == mutants.format(own[0][1], own[1][8]).split(",")
    names = [f"A:{letter}{i}" for i, letter in enumerate(own[0], 1)]
    names += [f"B:{letter}{i}" for i, letter in enumerate(own[1], 1)]
    wild = [_fold(tmp_path, "t", seed) for seed in SEEDS]
    for row, one, variant in zip(rows, targets[1:], variants, strict=True):
        sites = [mutation.number - 1 + (len(own[0]) if "B" in mutation.prefix else 0) for mutation in variant]
        mutant = [_fold(tmp_path, one.name, seed) for seed in SEEDS]
        pairs = list(zip(wild, mutant, strict=True))
        plddt = np.array([np.subtract(new[0]["plddt"], old[0]["plddt"]) for old, new in pairs])
        pae = np.array([new[1] - old[1] for old, new in pairs])
        is_changed = np.isin(np.arange(pae.shape[1]), sites)
        strain = _strain([old[2] for old in wild], [new[2] for new in mutant])
        expected = {
            "plddt": np.mean([new[0]["plddt"] for new in mutant]),
            "ptm": np.mean([new[0]["ptm"] for new in mutant]),
            "dplddt": plddt.mean(),
            "dplddt_site": plddt[:, sites].mean(),
            "dpae": pae.mean(),
            "dpae_site": pae[:, is_changed[:, None] | is_changed].mean(),
            "dptm": np.mean([new[0]["ptm"] - old[0]["ptm"] for old, new in pairs]),
            "diptm": np.mean([new[0]["iptm"] - old[0]["iptm"] for old, new in pairs]),
            "strain": np.nanmean(strain),
            "strain_site": np.nanmean(strain[sites]),
            "predictions": 2.0,
            "name": one.name,
        }
        check_cells(row, expected, places=4)
        largest, at = row["largest_strain"].split(" at ")
        assert (float(largest), at) == (
            pytest.approx(np.nanmax(strain), abs=1e-4),
            names[int(np.nanargmax(strain))],
        )
        assert set(row) == {"mutations", "largest_strain", *expected}
