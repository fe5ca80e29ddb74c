"""Packed sets: samples equal those of the folders they were built from, and other settings are refused."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fastfold.cli import main
from fastfold.data.training.packed.records import RecordFile, is_packed
from fastfold.errors import ConfigError, InputError
from fastfold.evoformer.config import model_config
from fastfold.training.config import DataConfig
from fastfold.training.data import MakeSample, build_packed, describe_templates, entry_reader, sample_settings
from fastfold.training.sets.source import open_source
from tests.helpers.small_sets import a3m, pdb_text, write
from tests.helpers.template_files import HOMOLOGUE, QUERY, entry, hhr, write_entries

IDS = ("1tem", "2tem", "3tem")
VALIDATE = 4


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two complexes of 2010 with alignments and hits, one that is damaged, and a predicted chain."""
    for name in ("5new", "6new"):
        write(tmp_path / "data" / f"{name}.pdb", pdb_text({"A": QUERY, "B": HOMOLOGUE, "C": QUERY}))
        for chain, sequence in (("A", QUERY), ("B", HOMOLOGUE), ("C", QUERY)):
            place = tmp_path / "data" / "msas" / f"{name}_{chain}"
            write(place / "uniref90_hits.a3m", a3m(sequence, "W" + sequence[1:], sequence[:-3] + "aaa---"))
            write(place / "uniprot_hits.a3m", a3m(sequence, sequence[::-1]))
            hits = hhr([(f"{one}_A", sequence, HOMOLOGUE, 50.0 - i) for i, one in enumerate(IDS)])
            write(place / "pdb_hits.hhr", hits)
    write(tmp_path / "data" / "msas" / "7bad_A" / "uniref90_hits.a3m", "no alignment")
    write(tmp_path / "data" / "7bad.pdb", pdb_text({"A": QUERY}))
    rows = [
        f"{name}\ttrain\t{chain}\t2010-01-01" for name, chain in (("5new", ""), ("6new", ""), ("7bad", "A"))
    ]
    write(tmp_path / "data" / "index.tsv", "\n".join(["name\tsplit\tchain\trelease_date", *rows, ""]))
    write(tmp_path / "data" / "msas" / "7bad.a3m", "no alignment")
    write(tmp_path / "predicted" / "pre.pdb", pdb_text({"A": HOMOLOGUE}, b_factors={3: 20.0}))
    write_entries(tmp_path / "mmcif", {one: entry({"A": HOMOLOGUE}, dates=["2001-01-01"]) for one in IDS})
    return tmp_path


def config_of(folder: Path) -> DataConfig:
    return DataConfig(
        directory=str(folder / "data"),
        distillation=str(folder / "predicted"),
        distillation_min_length=1,
        distillation_min_rows=0,
        template_mmcif_dir=str(folder / "mmcif"),
        valid_split="train",
        crop_size=50,
        max_recycles=0,
        workers=0,
    )


@pytest.mark.parametrize("complexes", [False, True])
def test_samples_equal_those_of_the_folders(folder: Path, complexes: bool) -> None:
    """Draw by draw, with templates and masked residues; nothing but template structures is read any more."""
    plain = config_of(folder)
    out, said = folder / "sets" / "set.packed", []
    build_packed(plain, out, validate_chains=VALIDATE, complexes=complexes, say=said.append)
    assert is_packed(out)
    assert any(line.startswith("left out: 7bad") for line in said)
    tree = model_config("model_1_multimer_v3" if complexes else "model_1_ptm")
    sources = open_source(plain, VALIDATE, complexes=complexes)
    unpacked = MakeSample(entry_reader(plain), tree, sample_settings(plain), seed=1)
    names = [one.id for one in sources.train.entries if not one.id.startswith("7bad")]
    expected = {
        (one.id, number): unpacked(number, one)
        for one in (*sources.train.entries, *(sources.distillation.entries if sources.distillation else ()))
        for number in range(3)
        if not one.id.startswith("7bad")
    }
    shutil.rmtree(folder / "data")
    shutil.rmtree(folder / "predicted")
    packed = replace(plain, directory=str(out), distillation=None)
    found = open_source(packed, VALIDATE, complexes=complexes)
    assert [one.id for one in found.train.entries] == names
    assert found.distillation is not None
    assert [name for name, _ in found.unreadable if name.startswith("7bad")]
    reader = entry_reader(packed)
    make = MakeSample(reader, tree, sample_settings(packed), seed=1)
    templates = 0
    for one in (*found.train.entries, *found.distillation.entries):
        for number in range(3):
            sample = make(number, one)
            other = expected[one.id, number]
            assert sample.keys() == other.keys()
            assert all(np.array_equal(sample[key], other[key]) for key in sample)
            templates += int(sample["features/template_aatype"].any())
    assert templates > 2
    assert f"{len(names)} of {len(names)} checked entries have hits" in describe_templates(
        reader, found.train.entries
    )
    assert [one.id for one in found.valid] == [one.id for one in sources.valid if "7bad" not in one.id]
    assert not open_source(replace(packed, valid_split=None), 99, complexes=complexes).valid


def test_other_settings_are_refused(folder: Path) -> None:
    plain, out = replace(config_of(folder), distillation=None), folder / "set.packed"
    build_packed(plain, out, validate_chains=VALIDATE, complexes=False, say=lambda line: None)
    packed = replace(plain, directory=str(out))
    assert len(open_source(replace(packed, crop_size=3), VALIDATE).train.entries) == 6
    for changed, complexes, message in (
        ({"max_resolution": 4.0}, False, r"data\.max_resolution: 9\.0, now 4\.0"),
        ({"oversample": {"5new": 2.0}}, False, r"data\.oversample: {}, now {'5new': 2\.0}"),
        ({"valid_split": "valid"}, False, r"data\.valid_split: train, now valid"),
        ({}, True, "model: a monomer network, now a multimer network"),
    ):
        with pytest.raises(ConfigError, match=f"was built with other settings.*{message}"):
            open_source(replace(packed, **changed), VALIDATE, complexes=complexes)
    with pytest.raises(ConfigError, match=r"trainer\.validate_chains: 4, now 5"):
        open_source(packed, 5)
    for name in ("cache", "index", "distillation", "alignments"):
        with pytest.raises(
            ConfigError, match=rf"data\.{name} has no effect on the packed set in data\.directory"
        ):
            open_source(replace(packed, **{name: "x"}), VALIDATE)
    with pytest.raises(ConfigError, match="found the packed set"):
        build_packed(packed, folder / "other", validate_chains=VALIDATE, complexes=False)


def test_a_damaged_record_is_an_error_of_its_sample(folder: Path) -> None:
    """Which goes to the quarantine; the other samples can be made."""
    plain, out = replace(config_of(folder), distillation=None), folder / "set.packed"
    build_packed(plain, out, validate_chains=VALIDATE, complexes=False, say=lambda line: None)
    file = RecordFile(out)
    content = bytearray(out.read_bytes())
    content[int(file.array("samples/start")[2]) + 9] ^= 1
    out.write_bytes(content)
    packed = replace(plain, directory=str(out))
    source = open_source(packed, VALIDATE)
    make = MakeSample(entry_reader(packed), model_config("model_1_ptm"), sample_settings(packed), seed=1)
    make(0, source.train.entries[1])
    with pytest.raises(InputError, match="record 2 of 'samples' is damaged"):
        make(0, source.train.entries[2])


def test_the_command(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = folder / "new" / "set.packed"
    arguments = [f"data.directory={folder / 'data'}", "data.workers=0", "data.valid_split=null"]
    assert main(["data", "build", "--out", str(out), *arguments]) == 0
    printed = capsys.readouterr().out
    assert "train: 6 of 7 entries are packed" in printed
    assert f"train on it with data.directory={out}" in printed
    assert RecordFile(out).count("train") == 6
    assert main(["data", "build", "--out", str(out), "data.directory=none"]) == 2
    assert "the data folder 'none' does not exist" in capsys.readouterr().err
