"""Every setting of the data either chooses the entries of a packed set, or is free of it."""

from __future__ import annotations

from dataclasses import fields

from fastfold.training.config import DataConfig
from fastfold.training.sets import source

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


def test_what_a_scan_does_not_depend_on_is_free_or_useless() -> None:
    assert set(source._NOT_SCANNED) <= {*FREE.split(), *source._USELESS}
