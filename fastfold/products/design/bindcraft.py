"""Presets of designs, and BindCraft's settings files (``settings_target`` and ``settings_advanced``)."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fastfold.errors import ConfigError, InputError, suggest
from fastfold.products.design.config import SHORTEST_BINDER, DesignConfig, Flexible
from fastfold.utils.foreign_text import parse_json, read_settings_text, shown

PRESETS = ("colabdesign", "bindcraft")
"""Settings of another program by its name; ColabDesign's are the defaults."""

_MAX_BYTES = 1 << 20

DEFAULTS: dict[str, Any] = {
    "omit_AAs": "C", "design_algorithm": "4stage", "sample_models": True, "rm_template_seq_design": False,
    "rm_template_sc_design": False, "soft_iterations": 75, "temporary_iterations": 45, "hard_iterations": 5,
    "greedy_iterations": 15, "greedy_percentage": 1, "weights_plddt": 0.1, "weights_pae_intra": 0.4,
    "weights_pae_inter": 0.1, "weights_con_intra": 1.0, "weights_con_inter": 1.0, "intra_contact_distance": 14.0,
    "inter_contact_distance": 20.0, "intra_contact_number": 2, "inter_contact_number": 2, "weights_helicity": -0.3,
    "random_helicity": False, "use_i_ptm_loss": True, "weights_iptm": 0.05, "use_rg_loss": True, "weights_rg": 0.3,
    "use_termini_distance_loss": False, "weights_termini_loss": 0.1, "num_recycles_design": 1,
    "num_recycles_validation": 3, "optimise_beta": True, "optimise_beta_extra_soft": 0, "optimise_beta_extra_temp": 0,
    "optimise_beta_recycles_design": 3,
}  # fmt: skip
"""Keys of an advanced file that designs use, with the values of BindCraft's ``default_4stage_multimer.json``."""

PROGRAM: dict[str, Any] = {
    "mpnn_fix_interface": True, "num_seqs": 20, "sampling_temp": 0.1, "mpnn_weights": "soluble",
}  # fmt: skip
"""Keys of an advanced file for the program of ``--mpnn``, with the values of the same file."""

_WHOLE = tuple(
    key for key, value in (DEFAULTS | PROGRAM).items() if type(value) is int and key != "greedy_percentage"
)
"""Keys with whole numbers."""

_FIXED = {
    "sample_models": True, "random_helicity": False, "optimise_beta_extra_soft": 0, "optimise_beta_extra_temp": 0,
}  # fmt: skip
"""Keys with one value that designs support."""

_ADVANCED_ABSENT = (
    "force_reject_AA", "use_multimer_design", "rm_template_seq_predict", "rm_template_sc_predict",
    "predict_initial_guess", "predict_bigbang", "save_design_animations", "save_design_trajectory_plots",
    "enable_mpnn", "max_mpnn_sequences", "max_tm-score_filter", "max_seq-similarity_filter", "sample_seq_parallel",
    "backbone_noise", "model_path", "save_mpnn_fasta", "optimise_beta_recycles_valid", "remove_unrelaxed_trajectory",
    "remove_unrelaxed_complex", "remove_binder_monomer", "zip_animations", "zip_plots", "save_trajectory_pickle",
    "max_trajectories", "enable_rejection_check", "acceptance_rate", "start_monitoring", "af_params_dir", "dssp_path",
    "dalphaball_path",
)  # fmt: skip
"""Keys of an advanced file that belong to other parts of BindCraft, or to options of the command."""

_TARGET = ("starting_pdb", "chains", "target_hotspot_residues", "lengths", "number_of_final_designs")
"""Keys of a target file that designs use."""
_TARGET_ABSENT = ("design_path", "binder_name")


@dataclass(frozen=True)
class TargetSettings:
    """Target of a binder in BindCraft's form."""

    structure: Path  #: PDB file
    chains: str  #: Chain names with commas
    hotspots: str  #: Residues; empty for any
    length: str  #: Length or range, such as ``65-150``
    until: int | None = None  #: Accepted sequences that end a campaign; None for any number


@dataclass(frozen=True)
class AdvancedSettings:
    """Optimisation in BindCraft's form."""

    values: Mapping[str, Any] = field(default_factory=lambda: DEFAULTS)  #: Values of :data:`DEFAULTS` by key

    @property
    def flexible(self) -> Flexible:
        """Parts of the target's template that are left out."""
        if self.values["rm_template_seq_design"]:
            return "backbone"
        return "sidechains" if self.values["rm_template_sc_design"] else "none"

    @property
    def fold_recycles(self) -> int:
        """Extra passes of the folds of finished designs."""
        return int(self.values["num_recycles_validation"])

    def program(self, *, has_weights: bool) -> dict[str, Any]:
        """Return options of ``--mpnn`` by name; with ``has_weights``, the choice of its weights too."""
        get = {**PROGRAM, **self.values}
        return {
            "mpnn_sequences": int(get["num_seqs"]),
            "mpnn_temperature": float(get["sampling_temp"]),
            "mpnn_keep_interface": get["mpnn_fix_interface"],
            "mpnn_soluble": has_weights and get["mpnn_weights"] == "soluble",
        }

    def design(self) -> dict[str, Any]:
        """Return values of :class:`~fastfold.products.design.config.DesignConfig` by name."""
        get = self.values
        weights = {
            "plddt": get["weights_plddt"],
            "pae": get["weights_pae_intra"],
            "i_pae": get["weights_pae_inter"],
            "con": get["weights_con_intra"],
            "i_con": get["weights_con_inter"],
            "helix": get["weights_helicity"],
            "i_ptm": get["weights_iptm"] if get["use_i_ptm_loss"] else 0.0,
            "rg": get["weights_rg"] if get["use_rg_loss"] else 0.0,
            "NC": get["weights_termini_loss"] if get["use_termini_distance_loss"] else 0.0,
        }
        return {
            **self._stages(),
            "tries_percent": float(get["greedy_percentage"]),
            "recycles": get["num_recycles_design"],
            "networks": 1,
            "weights": {name: float(weight) for name, weight in weights.items()},
            "con": f"num={get['intra_contact_number']},cutoff={get['intra_contact_distance']},seqsep=9",
            "i_con": f"num={get['inter_contact_number']},cutoff={get['inter_contact_distance']}",
            "forbid": get["omit_AAs"] or "",
            "check_binder": True,
        }

    def _stages(self) -> dict[str, Any]:
        """Return the settings that depend on the algorithm; the last stage of ``4stage`` draws residues evenly."""
        get, algorithm = self.values, self.values["design_algorithm"]
        is_screened, has_logits = algorithm == "4stage", algorithm != "greedy"
        screen = _SCREEN if is_screened else 0
        is_sharpened = algorithm in ("3stage", "4stage")
        favors_strands = is_screened and get["optimise_beta"]
        return {
            "screen_steps": screen,
            "soft_steps": max(get["soft_iterations"] - screen, 0) if has_logits else 0,
            "temperature_steps": get["temporary_iterations"] if is_sharpened else 0,
            "hard_steps": get["hard_iterations"] if is_sharpened else 0,
            "mutation_steps": get["greedy_iterations"] if algorithm != "3stage" else 0,
            "profile_mutations": algorithm == "2stage" and get["soft_iterations"] > 0,
            "ramp_recycles": not is_screened,
            "strand_recycles": get["optimise_beta_recycles_design"] if favors_strands else None,
            "all_networks": algorithm == "3stage",
            "give_up_below": 65.0 if is_screened else 0.0,
        }


_ALGORITHMS = ("2stage", "3stage", "4stage", "greedy")
_SCREEN = 50  #: Steps after which BindCraft judges a design first


def read_target(path: Path, say: Callable[[str], None]) -> TargetSettings:
    """Read a ``settings_target`` file, or raise InputError; ``say`` gets a line about keys without a meaning here."""
    content = _read(path)
    if "binder_redesign" in content:
        raise InputError(
            "binder_redesign: sequences without a structure are not supported; remove it and give lengths, or "
            "redesign a chain of a complex with `redesign`",
            path=path,
        )
    if unknown := sorted(set(content) - {*_TARGET, *_TARGET_ABSENT}):
        raise InputError(
            f"unknown key {unknown[0]}; known are {', '.join((*_TARGET, *_TARGET_ABSENT))}", path=path
        )
    for key in ("starting_pdb", "lengths"):
        if key not in content:
            raise InputError(f"{key} is missing; BindCraft's target files have it", path=path)
    lengths = content["lengths"]
    whole = isinstance(lengths, list) and lengths and all(type(one) is int for one in lengths)
    if not whole or min(lengths) < SHORTEST_BINDER:
        raise InputError(
            f"lengths: expected numbers from {SHORTEST_BINDER} on such as [65, 150], found {shown(lengths)}",
            path=path,
        )
    chains = _text(content.get("chains") or "", "chains", path).replace(" ", "")
    hotspots = _text(content.get("target_hotspot_residues") or "", "target_hotspot_residues", path)
    structure = Path(_text(content["starting_pdb"], "starting_pdb", path))
    if not structure.exists():
        # BindCraft's files name structures from its own folder, which is the one above theirs.
        beside, above = (folder / structure for folder in (path.parent, path.parent.parent))
        structure = above if above.exists() and not beside.exists() else beside
    until = content.get("number_of_final_designs")
    if until is not None and (type(until) is not int or until < 1):
        raise InputError(
            f"number_of_final_designs: expected a number such as 100, found {shown(until)}", path=path
        )
    _announce_absent(path, [key for key in content if key in _TARGET_ABSENT], say)
    return TargetSettings(
        structure, chains, hotspots.replace(" ", ""), f"{min(lengths)}-{max(lengths)}", until
    )


def check_structure(target: TargetSettings, path: Path) -> None:
    """Check chains and hotspots of a target file against its structure, or raise InputError with the key."""
    from fastfold.products.design.tasks.given import residue_places  # NumPy is slow to import
    from fastfold.protein.io.observed import BINDING_SITE, read_observed

    names = tuple(name for name in target.chains.split(",") if name)
    key = "starting_pdb"
    try:
        if names and target.structure.exists():
            key = "chains"
        structure = read_observed(target.structure, BINDING_SITE, chain_ids=names)
        key = "target_hotspot_residues"
        residue_places(target.hotspots, structure.chains, target.structure)
    except InputError as error:
        raise InputError(f"{key}: {error}", path=path) from error


def read_advanced(path: Path, say: Callable[[str], None], *, has_program: bool = False) -> AdvancedSettings:
    """Read a ``settings_advanced`` file, or raise InputError.

    Args:
        path: The file.
        say: Called with lines about keys that are not used.
        has_program: True if there is a program of ``--mpnn``, which uses the keys of :data:`PROGRAM`.
    """
    content = _read(path)
    known = {**DEFAULTS, **PROGRAM} if has_program else DEFAULTS
    absent_keys = _ADVANCED_ABSENT if has_program else (*_ADVANCED_ABSENT, *PROGRAM)
    used = {key: value for key, value in content.items() if key in known}
    absent = [key for key in content if key in absent_keys]
    if not used and not absent:
        raise InputError(
            f"has none of the keys of BindCraft's settings_advanced files, such as {next(iter(DEFAULTS))}",
            path=path,
        )
    for key, value in used.items():
        _check_value(key, value, path)
        _check_design({key: value}, f"{key}: ", path)
    _check_design(used, "", path)
    _announce_absent(path, absent, say)
    if unknown := [key for key in content if key not in (*known, *absent_keys)]:
        hints = (f"{key} ({suggest(key, known, otherwise='check the spelling')})" for key in unknown)
        say(f"{path.name}: unknown keys, not used: {', '.join(hints)}")
    return AdvancedSettings({**DEFAULTS, **used})


def _check_design(values: Mapping[str, Any], prefix: str, path: Path) -> None:
    """Raise InputError if values, with the defaults for all others, make no design."""
    design = AdvancedSettings({**DEFAULTS, **values}).design()
    try:
        DesignConfig(**design)
    except ConfigError as error:
        raise InputError(f"{prefix}{error}", path=path) from error
    if not any(design["weights"].values()):
        raise InputError("all losses have the weight 0; set one such as weights_con_inter", path=path)


def _check_value(key: str, value: Any, path: Path) -> None:
    """Raise InputError for a value of another kind than the default's, or one that is not supported."""
    default = {**DEFAULTS, **PROGRAM}[key]
    if key == "omit_AAs":
        fits = value is None or value is False or isinstance(value, str)
    elif isinstance(default, bool):
        fits = isinstance(value, bool)
    elif isinstance(default, int | float):
        fits = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        fits = fits and (key.startswith("weights_") or value >= 0)
    else:
        fits = isinstance(value, str)
    if fits and isinstance(value, float) and key in _WHOLE:
        fits = value.is_integer()
    if not fits:
        raise InputError(
            f"{key}: expected a value such as {json.dumps(default)}, found {shown(value)}", path=path
        )
    if key == "design_algorithm" and value not in _ALGORITHMS:
        raise InputError(f"{key}: expected {', '.join(_ALGORITHMS)}, found {value!r}", path=path)
    if key == "mpnn_weights" and value not in ("original", "soluble"):
        raise InputError(f"{key}: expected original or soluble, found {value!r}", path=path)
    if key == "num_seqs" and value < 1:
        raise InputError(f"{key}: expected a whole number from 1, found {value}", path=path)
    if key in _FIXED and value != _FIXED[key]:
        raise InputError(
            f"{key}: only {json.dumps(_FIXED[key])} is supported, found {json.dumps(value)}", path=path
        )


def _read(path: Path) -> dict[str, Any]:
    content = parse_json(read_settings_text(path, limit=_MAX_BYTES), path)
    if not isinstance(content, dict) or not content:
        raise InputError("expected BindCraft's settings, found no JSON object with keys", path=path)
    return content


def _text(value: Any, key: str, path: Path) -> str:
    if not isinstance(value, str):
        raise InputError(f"{key}: expected a text, found {shown(value)}", path=path)
    return value


def _announce_absent(path: Path, keys: list[str], say: Callable[[str], None]) -> None:
    if keys:
        say(f"{path.name}: not used: {', '.join(keys)}")
