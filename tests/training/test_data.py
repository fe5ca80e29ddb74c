"""Templates among the settings of a run: what is refused, what is said, and that samples follow from their seed."""

from __future__ import annotations

import errno
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from fastfold.data.training.dataset import Dataset, open_dataset
from fastfold.data.training.entry import DISTILLATION, group_complexes
from fastfold.data.training.sample import FEATURES
from fastfold.errors import ConfigError, InputError
from fastfold.evoformer.config import model_config
from fastfold.training.compose import compose_config
from fastfold.training.config import DataConfig
from fastfold.training.data import (
    EntryReader,
    MakeSample,
    build_packed,
    check_templates,
    describe_templates,
    entry_reader,
    sample_settings,
)
from fastfold.training.run import train
from fastfold.training.sets.source import open_source
from fastfold.training.validation import ChainScore, score_entry
from tests.helpers.small_sets import a3m, pdb_text, write
from tests.helpers.template_files import HOMOLOGUE, QUERY, entry, hhr, write_entries
from tests.training.conftest import TINY

IDS = ("1tem", "2tem", "3tem")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two chains of 2010, one of which has hits; the templates are of the years before."""
    for name, sequence in (("5new", QUERY), ("6new", HOMOLOGUE)):
        write(tmp_path / "data" / f"{name}.pdb", pdb_text({"A": sequence}))
        write(tmp_path / "data" / "msas" / name / "uniref90_hits.a3m", a3m(sequence))
    hits = hhr([(f"{name}_A", QUERY, HOMOLOGUE, 50.0) for name in IDS])
    write(tmp_path / "data" / "msas" / "5new" / "pdb_hits.hhr", hits)
    rows = [f"{name}\ttrain\t{seq}\t2010-01-01" for name, seq in (("5new", QUERY), ("6new", HOMOLOGUE))]
    write(tmp_path / "data" / "index.tsv", "\n".join(["name\tsplit\tsequence\trelease_date", *rows, ""]))
    write_entries(tmp_path / "mmcif", {name: entry({"A": HOMOLOGUE}, dates=["2001-01-01"]) for name in IDS})
    (tmp_path / "dates.txt").write_text("".join(f"{name}:2001-01-01\n" for name in IDS))
    return tmp_path


def data_config(folder: Path, **settings: str) -> DataConfig:
    return DataConfig(
        directory=str(folder / "data"),
        template_mmcif_dir=str(folder / "mmcif"),
        crop_size=24,
        max_recycles=0,
        **settings,  # type: ignore[arg-type]
    )


def opened(folder: Path) -> Dataset:
    return open_dataset(folder / "data", split="train")


def shown(sample: dict[str, np.ndarray]) -> int:
    return int(sample[f"{FEATURES}template_mask"][0].sum())


def test_samples_follow_from_seed_and_number(folder: Path) -> None:
    """In another process's copy, after other draws, and through a cache alike."""
    config = data_config(folder, template_release_dates=str(folder / "dates.txt"))
    cached = data_config(folder, cache=str(folder / "cache"))
    tree, chains = model_config("model_1_ptm"), opened(folder)
    makes = [
        MakeSample(entry_reader(each), tree, sample_settings(each), seed=3)
        for each in (config, cached, cached)
    ]
    expected = {number: makes[0](number, chains[number % 2]) for number in range(8)}
    assert {shown(expected[number]) for number in (0, 2, 4, 6)} > {0}
    assert {shown(expected[number]) for number in (1, 3, 5, 7)} == {0}
    makes.append(pickle.loads(pickle.dumps(makes[0])))
    for make in makes:
        for number in (6, 0, 5):
            found = make(number, chains[number % 2])
            assert all(np.array_equal(found[key], expected[number][key]) for key in found)


def test_alignments_of_predicted_structures_are_subsampled(folder: Path) -> None:
    """Those of experimental ones are not; a chain and a complex of it alike."""
    rows = [QUERY[:number] + "W" * (40 - number) for number in range(1, 40)]
    write(folder / "data" / "msas" / "5new" / "uniref90_hits.a3m", a3m(QUERY, *rows))
    config = DataConfig(directory=str(folder / "data"), block_deletion=False, distillation_max_rows=7)
    settings = sample_settings(config)
    chain = opened(folder)[0]
    for preset, make_entry in (
        ("model_3_ptm", lambda entry: entry),
        ("model_3_multimer_v3", lambda entry: group_complexes([entry])[0]),
    ):
        make = MakeSample(
            EntryReader(None, 0.0), model_config(preset), settings, 0, config.distillation_max_rows
        )
        for one, expected in ((chain, 40), (replace(chain, source=DISTILLATION), 7)):
            sample = make(0, make_entry(one))
            assert len(np.unique(sample[f"{FEATURES}true_msa"][0], axis=0)) == expected, preset


@pytest.mark.parametrize("ending", ["5new.pdb", "uniref90_hits.a3m", "pdb_hits.hhr", "tem.cif"])
def test_files_that_a_disk_fails_to_give_are_read_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch, ending: str
) -> None:
    """Structures of templates too: which templates a sample has never depends on a failure that passes."""
    waited: list[float] = []
    monkeypatch.setattr("fastfold.data.loading.loader.time.sleep", waited.append)
    config = data_config(folder, template_release_dates=str(folder / "dates.txt"))
    chain, tree = opened(folder)[0], model_config("model_1_ptm")
    expected = MakeSample(entry_reader(config), tree, sample_settings(config), seed=3)(6, chain)
    assert shown(expected)
    make, plain, failures = MakeSample(entry_reader(config), tree, sample_settings(config), seed=3), open, [2]

    def fails(path: Any, *arguments: Any, **options: Any) -> Any:
        if failures[0] and str(path).endswith(ending):
            failures[0] -= 1
            raise OSError(errno.EIO, "Input/output error")
        return plain(path, *arguments, **options)

    monkeypatch.setattr("fastfold.utils.text_files.open", fails, raising=False)
    found = make(6, chain)
    assert waited == [1.0, 4.0]
    assert all(np.array_equal(found[key], expected[key]) for key in found)
    failures[0] = 3
    with pytest.raises(InputError, match=rf"{ending}: cannot be read: Input/output error"):
        MakeSample(entry_reader(config), tree, sample_settings(config), seed=3)(6, chain)


@pytest.mark.parametrize("complexes", [False, True])
def test_an_index_gives_what_a_scan_gives(
    folder: Path, monkeypatch: pytest.MonkeyPatch, complexes: bool
) -> None:
    """Entries, draws and what the filters say; from then on without a look at the structures."""
    for name, plddt in (("7pre", 90.0), ("8pre", 95.0)):
        write(
            folder / "predicted" / f"{name}.pdb", pdb_text({"A": QUERY, "B": HOMOLOGUE}, b_factors={1: plddt})
        )
    settings = {
        "directory": str(folder / "data"),
        "distillation": str(folder / "predicted"),
        "distillation_min_length": 1,
        "distillation_min_rows": 0,
        "valid_split": "train",
        "max_single_residue": 0.1,
        "oversample": {"6new": 3.0},
    }
    scanned = open_source(DataConfig(**settings), 5, complexes=complexes)
    index = DataConfig(**settings, index=str(folder / "index"), workers=0)
    first = open_source(index, 5, complexes=complexes)
    monkeypatch.setattr("fastfold.training.sets.source.open_dataset", None)
    for found in (first, open_source(replace(index, crop_size=7), 5, complexes=complexes)):
        assert tuple(found.valid) == tuple(scanned.valid)
        assert found.unreadable == scanned.unreadable
        for one, other in ((found.train, scanned.train), (found.distillation, scanned.distillation)):
            assert one is not None
            assert other is not None
            assert tuple(one.entries) == tuple(other.entries)
            assert (one.removed, one.unreadable, one.summary()) == (
                other.removed,
                other.unreadable,
                other.summary(),
            )
        mine, theirs = (source.order(index, seed=4) for source in (found, scanned))
        assert [mine(number) for number in range(20)] == [theirs(number) for number in range(20)]
    with pytest.raises(TypeError):
        open_source(replace(index, max_single_residue=0.2), 5, complexes=complexes)


def test_one_line_says_what_the_template_stack_is_trained_on(folder: Path) -> None:
    chains = opened(folder).entries
    reader = entry_reader(data_config(folder))
    assert describe_templates(reader, chains) == (
        f"templates from {folder / 'mmcif'}: 1 of 2 checked entries have hits"
    )
    line = describe_templates(reader, chains[1:])
    assert "the template stack trains on masks; found hits (pdb_hits.sto," in line
    without = entry_reader(DataConfig(directory=str(folder / "data")))
    assert "trains on masks; to use hits, set data.template_mmcif_dir=DIR" in describe_templates(
        without, chains
    )


def test_a_run_trains_and_validates_with_templates(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And says so."""
    stack = "model.overrides.model.embeddings_and_evoformer.template.template_pair_stack.num_block=1"
    tiny = ["model=model_1_ptm" if setting == "model=model_3_ptm" else setting for setting in TINY]
    folded = []

    def score(*arguments: Any, **options: Any) -> ChainScore:
        folded.append(options["templates"])
        return score_entry(*arguments, **options)

    monkeypatch.setattr("fastfold.training.validation.score_entry", score)
    monkeypatch.setattr("fastfold.training.sets.source._LONG_SCAN_S", 0.0)
    settings = [f"data.directory={folder / 'data'}", f"data.template_mmcif_dir={folder / 'mmcif'}"]
    settings += ["data.crop_size=16", "data.valid_split=train", "data.max_recycles=0", "trainer.steps=1"]
    train(compose_config([*tiny, stack, *settings, f"trainer.out={tmp_path / 'out'}"]))
    said = capsys.readouterr()
    assert "1 of 2 checked entries have hits" in said.out + said.err
    assert "data.index=FOLDER keeps the result" in said.out
    assert [sorted(templates) for templates in folded] == [[QUERY], []]
    assert len(folded[0][QUERY]["template_aatype"]) == 3


@pytest.mark.slow
def test_neither_workers_nor_a_resume_nor_packing_change_a_run_with_templates(
    folder: Path, tmp_path: Path
) -> None:
    """The weights at the end are equal bit for bit."""
    stack = "model.overrides.model.embeddings_and_evoformer.template.template_pair_stack.num_block=1"
    tiny = ["model=model_1_ptm" if setting == "model=model_3_ptm" else setting for setting in TINY]
    common = [*tiny, stack, f"data.template_mmcif_dir={folder / 'mmcif'}", "data.crop_size=20"]
    plain, packed = f"data.directory={folder / 'data'}", f"data.directory={tmp_path / 'set.packed'}"
    config = compose_config([*common, plain, "trainer.out=."])
    build_packed(config.data, tmp_path / "set.packed", validate_chains=100, complexes=False, say=print)

    def weights(name: str, *starts: list[str]) -> dict[str, torch.Tensor]:
        for settings in starts:
            train(compose_config([*common, *settings, f"trainer.out={tmp_path / name}"]))
        return load_file(tmp_path / name / "mini.safetensors")

    expected = weights("plain", [plain, "trainer.steps=4"])
    for name, starts in {
        "resumed": ([plain, "trainer.steps=2"], [plain, "trainer.steps=4", "data.workers=1"]),
        "index": ([plain, "trainer.steps=4", f"data.index={tmp_path / 'index'}"],),
        "packed": ([packed, "trainer.steps=2", "data.workers=2"], [packed, "trainer.steps=4"]),
    }.items():
        found = weights(name, *starts)
        assert all(torch.equal(found[key], expected[key]) for key in expected), name


def test_settings_that_say_nothing_are_refused(folder: Path) -> None:
    tree = model_config("model_3_ptm")
    with pytest.raises(ConfigError, match="the network does not read templates; AlphaFold's model_1"):
        check_templates(data_config(folder), tree)
    check_templates(data_config(folder), model_config("model_1_multimer_v3"))
    check_templates(DataConfig(), tree)
    for name in ("obsolete_pdbs", "template_release_dates", "max_template_date"):
        with pytest.raises(ConfigError, match=rf"data\.{name} needs templates; set"):
            DataConfig(**{name: "2018-04-30"})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"must be a date such as 2018-04-30, not '30\.4\.2018'"):
        data_config(folder, max_template_date="30.4.2018")
    with pytest.raises(
        ConfigError, match=r"data\.max_release_date must be a date such as .*, not '20180430'"
    ):
        data_config(folder, max_release_date="20180430")
    with pytest.raises(InputError, match="no such folder"):
        entry_reader(DataConfig(template_mmcif_dir=str(folder / "none")))
