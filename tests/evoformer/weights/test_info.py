"""What ``fastfold weights info`` says of a file."""

from __future__ import annotations

from pathlib import Path

import torch

from fastfold.evoformer.model import AlphaFold
from fastfold.evoformer.weights.checkpoint import WeightsInfo
from tests.helpers.networks import oracle_arrays, oracle_config


def _model(name: str) -> AlphaFold:
    with torch.device("meta"):
        return AlphaFold(oracle_config(name))


def test_the_facts_are_those_of_the_network() -> None:
    model = _model("synthetic_monomer")
    info = WeightsInfo(Path("a.npz"), "alphafold", model, dtype="float32", preset="model_1_ptm")
    heads = model.config.model.heads
    assert info.parameters == sum(
        array.size for array in oracle_arrays("synthetic_monomer", "params").values()
    )
    assert info.has_ptm == bool(heads.predicted_aligned_error.weight)
    assert info.has_templates == bool(model.config.model.embeddings_and_evoformer.template.enabled)
    assert (info.multimer, info.notes, info.preset) == (False, {}, "model_1_ptm")
    multimer = _model("synthetic_multimer")
    assert WeightsInfo(Path("a"), "alphafold", multimer, dtype="float32", preset=None).multimer


def test_the_description_has_a_line_for_each_fact() -> None:
    model = _model("synthetic_monomer")
    trunk = model.config.model.embeddings_and_evoformer
    info = WeightsInfo(Path("dir/a.pt"), "openfold", model, dtype="bfloat16", preset=None)
    lines = dict(line.split(maxsplit=1) for line in info.describe().splitlines())
    assert lines["file"] == "dir/a.pt"
    assert lines["format"] == "OpenFold checkpoint (.pt)"
    assert lines["model"] == "not an official one"
    assert lines["network"].startswith("monomer, ")
    assert lines["size"].startswith(f"{trunk.evoformer_num_block} Evoformer blocks, ")
    assert lines["channels"].endswith(f"pair {trunk.pair_channel}, single {trunk.seq_channel}")
    assert lines["parameters"] == f"{info.parameters:,} (bfloat16)"


def test_notes_of_a_file_stay_on_their_lines() -> None:
    """A header may hold anything: neither line breaks nor control characters nor books reach the terminal."""
    model = _model("synthetic_monomer")
    notes = {"trained_on": "a\nfile  : /etc/passwd\x1b[31m", "long": "x" * 5000}
    info = WeightsInfo(Path("a"), "fastfold", model, dtype="float32", preset=None, notes=notes)
    plain = WeightsInfo(Path("a"), "fastfold", model, dtype="float32", preset=None)
    added = info.describe().splitlines()[len(plain.describe().splitlines()) :]
    assert added == ["trained on  a file  : /etc/passwd [31m", f"long        {'x' * 200}"]
