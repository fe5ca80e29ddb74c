"""Every setting of the data either chooses the entries of a packed set, or is free of it."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path

import pytest

from fastfold.errors import ConfigError
from fastfold.training.config import DataConfig
from fastfold.training.sets import source
from tests.helpers.small_sets import a3m, pdb_text, write

FREE = """
    directory layout template_mmcif_dir obsolete_pdbs template_release_dates max_template_date
    distillation_probability distillation_min_plddt distillation_max_rows
    crop_size spatial_crop_probability max_chains unknown_resolution coevolution_dropout coevolution_subsets
    single_sequence_probability block_deletion unclamped_probability max_recycles workers prefetch order
"""
"""What samples are made with, and where from: none of them chooses which entries there are."""


def test_every_setting_is_fixed_useless_or_free() -> None:
    groups = [set(source._FIXED), set(source._USELESS), set(FREE.split())]
    assert sum(map(len, groups)) == len(set.union(*groups))
    assert set.union(*groups) == {field.name for field in fields(DataConfig)}


def test_predicted_structures_have_filters_of_their_own(tmp_path: Path) -> None:
    """200 to 1,024 residues and 200 rows, as in the paper (supplement, section 1.3)."""
    lengths = {"short": 199, "first": 200, "last": 1024, "long": 1025, "shallow": 300}
    for name, length in lengths.items():
        sequence = ("ACDEFGHIKLMNPQRSTVWY" * 52)[:length]
        for folder in ("predicted", "data"):
            write(tmp_path / folder / f"{name}.pdb", pdb_text({"A": sequence}))
        rows = 199 if name == "shallow" else 200
        write(tmp_path / "predicted" / "msas" / f"{name}.a3m", a3m(sequence, *[sequence] * (rows - 1)))
    config = DataConfig(
        directory=str(tmp_path / "data"), distillation=str(tmp_path / "predicted"), valid_split=None
    )
    found = source.open_source(config, 0)
    assert found.distillation is not None
    assert [entry.id for entry in found.distillation.entries] == ["first", "last"]
    assert [entry.id for entry in found.train.entries] == sorted(lengths)
    looser = replace(config, distillation_min_length=1, distillation_max_length=None, distillation_min_rows=0)
    everything = source.open_source(looser, 0).distillation
    assert everything is not None
    assert len(everything.entries) == 5
    none = replace(config, distillation_min_rows=201)
    with pytest.raises(
        ConfigError, match=r"data\.distillation: .*alignment rows >= 201.*data\.distillation_min_rows"
    ):
        source.open_source(none, 0)


def test_what_a_scan_does_not_depend_on_is_free_or_useless() -> None:
    assert set(source._NOT_SCANNED) <= {*FREE.split(), *source._USELESS}
