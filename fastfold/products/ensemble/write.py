"""Write the analysis of an ensemble: tables, pictures, and superposed representatives."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fastfold.errors import ConfigError
from fastfold.inference.output.score_files import lines_json, rounded
from fastfold.inference.output.summary import tab_separated
from fastfold.inference.report.groups import ENDING
from fastfold.inference.sampling.settings import SIMILARITY
from fastfold.products.ensemble.analysis import Analysis, analyze, motion_onto_mean, superposed_protein
from fastfold.products.ensemble.members import Ensemble, read_ensembles
from fastfold.products.ensemble.pictures import fluctuation_png, landscape_png, pairs_png, states_png
from fastfold.protein.io.pdb_writer import PdbLimitError, to_pdb
from fastfold.utils.atomic_files import write_atomic
from fastfold.utils.packages import require_package

_log = logging.getLogger(__name__)

SCHEMA_VERSION = 1
_MANY = 200  #: Number of samples whose comparison takes long enough to be announced
MAX_MODELS = 100  #: Largest number of representatives whose superposed structures are written


def write_ensembles(
    directory: Path,
    *,
    target: str | None = None,
    references: Sequence[Path] = (),
    similarity: float = SIMILARITY,
    num_clusters: int | None = None,
    min_plddt: float = 0.0,
    plots: bool = True,
    say: Callable[[str], None] = lambda line: None,
) -> dict[str, Analysis]:
    """Analyse the ensembles of a folder of results and write them there; return the analyses by target.

    Per target: ``_ensemble.json`` with all numbers, ``_ensemble.tsv`` with a line per sample,
    ``_ensemble_residues.tsv``, ``_ensemble.pdb`` with the superposed representatives as models, and pictures
    ``_ensemble_pairs.png``, ``_ensemble_landscape.png``, ``_ensemble_residues.png`` and, with references,
    ``_ensemble_states.png``. Arguments and errors are those of
    :func:`fastfold.products.ensemble.members.read_ensembles` and :func:`fastfold.products.ensemble.analysis.analyze`.
    ``say`` gets a line about each target. A ConfigError also names a missing package.
    """
    require_package("scikit-learn", "fastfold ensemble")
    if plots:
        require_package("matplotlib", "Pictures of an ensemble")
    if not 0 < similarity <= 1:
        raise ConfigError(f"`similarity` must be over 0 and at most 1, found {similarity:g}")
    names = [path.name for path in references]
    if repeated := next((name for name in names if names.count(name) > 1), None):
        raise ConfigError(f"`reference`: two files are named {repeated}; rename one")
    analyses = {}
    for ensemble in read_ensembles(directory, target=target, min_plddt=min_plddt):
        number = len(ensemble.members)
        if num_clusters is not None and num_clusters > number:
            raise ConfigError(f"`clusters={num_clusters}`: {ensemble.target} has only {number} predictions")
        if number > _MANY:
            say(f"{ensemble.target}: comparing {number * (number - 1) // 2:,} pairs of samples")
        analysis = analyze(ensemble, similarity=similarity, num_clusters=num_clusters, references=references)
        for name, content in _files(ensemble, analysis, plots=plots).items():
            write_atomic(directory / f"{ensemble.target}{name}", content)
        analyses[ensemble.target] = analysis
        say(f"{ensemble.target}: {_conclusion(analysis)}")
    return analyses


def _files(ensemble: Ensemble, analysis: Analysis, *, plots: bool) -> dict[str, str | bytes]:
    files: dict[str, str | bytes] = {
        ENDING: lines_json(_numbers(ensemble, analysis)),
        "_ensemble.tsv": _samples_table(ensemble, analysis),
        "_ensemble_residues.tsv": _residues_table(ensemble, analysis),
    }
    try:
        files["_ensemble.pdb"] = _models_pdb(ensemble, analysis)
    except PdbLimitError as error:
        _log.warning("%s: no PDB file is written: %s", ensemble.target, error)
    if plots:
        title = f"Ensemble of {ensemble.target[:100]}"
        files["_ensemble_pairs.png"] = pairs_png(analysis, title=title)
        files["_ensemble_landscape.png"] = landscape_png(analysis, title=title)
        files["_ensemble_residues.png"] = fluctuation_png(ensemble, analysis, title=title)
        if analysis.states:
            plddt = np.array([member.mean_plddt for member in ensemble.members])
            files["_ensemble_states.png"] = states_png(analysis, analysis.states, plddt, title=title)
    return files


def _numbers(ensemble: Ensemble, analysis: Analysis) -> dict[str, Any]:
    shown = (motion_onto_mean(ensemble, analysis, k) for k in analysis.representatives[:MAX_MODELS])
    return {
        "schema_version": SCHEMA_VERSION,
        "target": ensemble.target,
        "samples": [member.name for member in ensemble.members],
        "chains": [member.chains for member in ensemble.members],
        "clusters": analysis.clusters.tolist(),
        "representatives": [ensemble.members[member].name for member in analysis.representatives],
        "motions": [{"rotation": rounded(r, 7), "translation": rounded(t, 4)} for r, t in shown],
        "components": rounded(analysis.components, 4),
        "variance": rounded(analysis.variance, 4),
        "tm_score": rounded(analysis.tm_score, 4),
        "rmsd": rounded(analysis.rmsd, 3),
        "residues": (ensemble.present + 1).tolist(),
        "fluctuation": rounded(analysis.fluctuation, 3),
        "states": {
            state.name: {
                "tm_score": rounded(state.tm_score, 4),
                "rmsd": rounded(state.rmsd, 3),
                "chain_mapping": state.chain_mapping,
            }
            for state in analysis.states
        },
    }


def _models_pdb(ensemble: Ensemble, analysis: Analysis) -> str:
    lines = []
    for number, member in enumerate(analysis.representatives[:MAX_MODELS], 1):
        text = to_pdb(superposed_protein(ensemble, analysis, member), title="", names=ensemble.names)
        lines.append(f"REMARK   1 MODEL {number}: {ensemble.members[member].name}"[:80])
        lines.append(f"MODEL     {number:4d}")
        lines += [line for line in text.splitlines() if line.startswith(("ATOM", "TER"))]
        lines.append("ENDMDL")
    return "\n".join([*lines, "END", ""])


def _samples_table(ensemble: Ensemble, analysis: Analysis) -> str:
    components = range(1, analysis.components.shape[1] + 1)
    head = ["files", "model", "seed", "sample", "plddt", "cluster", "representative"]
    head += [f"component_{k}" for k in components]
    for state in analysis.states:
        head += [f"tm_score {state.name}", f"rmsd {state.name}"]
    lines: list[list[Any]] = [head]
    for k, member in enumerate(ensemble.members):
        scores = member.prediction.scores
        line = [member.name, scores["model"], scores["seed"], member.sample, f"{member.mean_plddt:.2f}"]
        line += [analysis.clusters[k], "yes" if k in analysis.representatives else "no"]
        line += [f"{value:.4f}" for value in analysis.components[k]]
        for state in analysis.states:
            line += [f"{state.tm_score[k]:.4f}", f"{state.rmsd[k]:.3f}"]
        lines.append(line)
    return tab_separated(lines)


def _residues_table(ensemble: Ensemble, analysis: Analysis) -> str:
    protein = ensemble.members[0].protein
    plddt = np.mean([member.plddt for member in ensemble.members], axis=0)
    letters, names = "".join(protein.sequences), ensemble.names
    lines: list[list[Any]] = [["chain", "residue", "letter", "fluctuation", "plddt"]]
    for place, value in zip(ensemble.present, analysis.fluctuation, strict=True):
        chain, number = names.chain_ids[protein.chain_index[place]], names.numbers[place]
        lines.append([chain, number, letters[place], f"{value:.3f}", f"{plddt[place]:.2f}"])
    return tab_separated(lines)


def _conclusion(analysis: Analysis) -> str:
    sizes = np.bincount(analysis.clusters)[1:].tolist()
    upper = analysis.tm_score[np.triu_indices(len(analysis.tm_score), 1)]
    text = f"{len(analysis.clusters)} samples, {len(sizes)} cluster{'s' if len(sizes) > 1 else ''} "
    text += f"({', '.join(map(str, sizes[:10]))}{', …' if len(sizes) > 10 else ''}), "
    text += f"TM-score of pairs {upper.min():.2f} to {upper.max():.2f}"
    for state in analysis.states:
        text += f"; {state.name}: best TM-score {state.tm_score.max():.3f}, RMSD {state.rmsd.min():.1f} Å"
    return text
