"""Templates of training samples: dates decide, the draw is the paper's, and samples follow from their seed alone."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from datetime import date
from pathlib import Path

import numpy as np
import pytest

from fastfold.data.templates.database import MmcifFolder
from fastfold.data.templates.select import choose_templates
from fastfold.data.templates.source import read_hits
from fastfold.data.training.cache import FeatureCache
from fastfold.data.training.dataset import open_dataset
from fastfold.data.training.entry import (
    DISTILLATION,
    ComplexMsas,
    Entry,
    group_complexes,
    read_entry,
)
from fastfold.data.training.sample import FEATURES, SampleSettings, complex_sample, training_sample
from fastfold.data.training.templates import (
    MAX_CANDIDATES,
    TemplateCandidates,
    TrainingTemplates,
    read_candidates,
)
from fastfold.errors import InputError
from fastfold.evoformer.config import model_config
from fastfold.protein.io.read import read_structure
from tests.helpers.networks import oracle_config
from tests.helpers.small_sets import a3m, pdb_text, write
from tests.helpers.template_files import HOMOLOGUE, QUERY, entry, hhr, write_entries

IDS = [f"{number}tem" for number in range(1, 10)]
SETTINGS = SampleSettings(crop_size=24, cycles=1)


def hits(*ids: str) -> str:
    """Hits of one homologue under many names, the first the best."""
    return hhr([(f"{name.upper()}_A Test", QUERY, HOMOLOGUE, 90.0 - i) for i, name in enumerate(ids)])


@pytest.fixture
def entries(tmp_path: Path) -> MmcifFolder:
    """Nine entries, released on the first of January of 2001 to 2009."""
    texts = {
        name: entry({"A": HOMOLOGUE}, dates=[f"200{name[0]}-01-01"], missing=[int(name[0])]) for name in IDS
    }
    return MmcifFolder(write_entries(tmp_path / "mmcif", texts))


@pytest.fixture
def chain(tmp_path: Path) -> Entry:
    """A chain of 2006 with hits of all years beside its alignment; the best hit is itself."""
    write(tmp_path / "data" / "1new.pdb", pdb_text({"A": QUERY}))
    write(tmp_path / "data" / "msas" / "1new" / "uniref90_hits.a3m", a3m(QUERY))
    write(tmp_path / "data" / "msas" / "1new" / "pdb_hits.hhr", hits("1new", *IDS))
    found = open_dataset(tmp_path / "data")[0]
    return replace(found, release_date="2006-02-15")


def names(found: TemplateCandidates) -> list[str]:
    return [hit.pdb_chain[0] for hit in found.hits if hit.pdb_chain is not None]


def candidates_of(one: Entry, templates: TrainingTemplates) -> dict[str, TemplateCandidates]:
    return templates.candidates(one, read_entry(one))


def test_only_structures_of_sixty_days_before_are_candidates(chain: Entry, entries: MmcifFolder) -> None:
    """The chain itself and what came later are not, and neither is what came within sixty days."""
    templates = TrainingTemplates(entries)
    assert names(candidates_of(chain, templates)[QUERY]) == IDS[:5]
    assert names(candidates_of(replace(chain, release_date="2006-03-02"), templates)[QUERY]) == IDS[:6]
    assert names(candidates_of(replace(chain, release_date="2006-03-01"), templates)[QUERY]) == IDS[:5]
    early = TrainingTemplates(entries, max_date=date(2003, 1, 1))
    assert names(candidates_of(chain, early)[QUERY]) == IDS[:3]


def test_an_experimental_structure_without_a_date_has_no_templates(
    chain: Entry, entries: MmcifFolder
) -> None:
    """Predicted ones have no date to keep; the user's limit holds for them."""
    templates = TrainingTemplates(entries)
    assert candidates_of(replace(chain, release_date=""), templates) == {}
    predicted = replace(chain, release_date="", source=DISTILLATION)
    assert names(candidates_of(predicted, templates)[QUERY]) == IDS
    late = TrainingTemplates(entries, max_date=date(2008, 6, 1))
    assert names(candidates_of(predicted, late)[QUERY]) == IDS[:8]


def test_a_chain_is_no_template_of_itself_whatever_the_dates(chain: Entry, tmp_path: Path) -> None:
    """Also under the id that it had before."""
    texts = {name: entry({"A": HOMOLOGUE}, dates=["1990-01-01"]) for name in ("1new", "2new")}
    folder = write_entries(tmp_path / "own", texts)
    (folder / "obsolete.dat").write_text("OBSLTE    31-JUL-94 1OLD     1NEW\n")
    write(tmp_path / "data" / "msas" / "1new" / "pdb_hits.hhr", hits("1new", "1old", "2new"))
    found = candidates_of(chain, TrainingTemplates(MmcifFolder(folder)))
    assert names(found[QUERY]) == ["2new"]


def test_the_twenty_best_are_kept(chain: Entry, tmp_path: Path) -> None:
    """By their sums of probabilities, not by their order; hits without a file take nobody's place."""
    ids = [f"{i // 10}{i % 10}te" for i in range(10, 40)]
    texts = {name: entry({"A": HOMOLOGUE}, dates=["1990-01-01"]) for name in ids[5:]}
    rows = [(f"{name}_A", QUERY, HOMOLOGUE, 90.0 - i) for i, name in enumerate(ids)]
    write(tmp_path / "data" / "msas" / "1new" / "pdb_hits.hhr", hhr(rows[::-1]))
    found = candidates_of(chain, TrainingTemplates(MmcifFolder(write_entries(tmp_path / "many", texts))))
    assert names(found[QUERY]) == ids[5 : 5 + MAX_CANDIDATES]


def test_the_number_of_templates_is_the_papers(chain: Entry, entries: MmcifFolder) -> None:
    """min(Uniform[0, n], 4) of n = 5 hits: none to three in a sixth of the draws each, four in a third."""
    found = candidates_of(chain, TrainingTemplates(entries))[QUERY]
    drawn = [found.draw(np.random.default_rng(seed)) for seed in range(600)]
    counts = Counter(len(one.get("template_aatype", ())) for one in drawn)
    assert sorted(counts) == [0, 1, 2, 3, 4]
    for number, share in zip(range(5), (1, 1, 1, 1, 2), strict=True):
        assert abs(counts[number] - 100 * share) < 40, counts
    shown = Counter(name for one in drawn for name in one.get("template_domain_names", ()))
    assert set(shown) == {f"{name}_A".encode() for name in IDS[:5]}
    assert max(shown.values()) < 1.3 * min(shown.values())
    first = {one["template_domain_names"][0] for one in drawn if one}
    assert len(first) == 5
    assert [name.decode() for name in found.best()["template_domain_names"]] == [f"{x}_A" for x in IDS[:4]]


def test_the_best_are_those_of_a_prediction_up_to_that_date(chain: Entry, entries: MmcifFolder) -> None:
    found = candidates_of(chain, TrainingTemplates(entries))[QUERY]
    path = chain.template_hits(read_entry(chain).chains)[QUERY]
    expected = choose_templates(
        read_hits(path, QUERY), QUERY, entries, max_date=date(2005, 12, 17)
    ).features()
    best = found.best()
    assert best.keys() == expected.keys()
    assert all(np.array_equal(best[key], expected[key]) for key in best)


def test_a_hit_that_cannot_be_used_gives_its_place_to_another(tmp_path: Path, chain: Entry) -> None:
    """Three of four structures lack the chain; what is left is taken whenever any template is drawn."""
    texts = {name: entry({"B": "W" * 40}, dates=["2001-01-01"]) for name in IDS[:3]}
    texts[IDS[3]] = entry({"A": HOMOLOGUE}, dates=["2001-01-01"])
    folder = MmcifFolder(write_entries(tmp_path / "few", texts))
    found = candidates_of(chain, TrainingTemplates(folder))[QUERY]
    assert len(found.hits) == 4
    numbers = [len(found.draw(np.random.default_rng(i)).get("template_aatype", ())) for i in range(40)]
    assert set(numbers) == {0, 1}
    assert sum(numbers) > 20


def test_sample_has_the_templates_of_its_crop_and_follows_from_its_seed(
    chain: Entry, entries: MmcifFolder
) -> None:
    data = read_entry(chain)
    found = candidates_of(chain, TrainingTemplates(entries))[QUERY]
    tree = model_config("model_1_ptm")
    assert tree.data.common.use_templates

    def sample(seed: int, candidates: TemplateCandidates | None = found) -> dict[str, np.ndarray]:
        rng = np.random.default_rng(seed)
        return training_sample(data.chain, data.alignments, tree, SETTINGS, rng, templates=candidates)

    numbers = set()
    for seed in range(8):
        one, again = sample(seed), sample(seed)
        assert all(np.array_equal(one[key], again[key]) for key in one)
        mask = one[f"{FEATURES}template_mask"][0]
        numbers.add(int(mask.sum()))
        positions = one[f"{FEATURES}template_all_atom_positions"][0]
        residues = one[f"{FEATURES}residue_index"][0]
        assert positions.shape == (4, 24, 37, 3)
        for row in np.flatnonzero(mask):
            present = one[f"{FEATURES}template_all_atom_masks"][0][row, :, 1] > 0
            # On the helix of the test's entries CA lies at 1.5 Å per residue, counted from 1.
            expected = 1.5 * (residues - data.chain.residue_index[0] + 1)
            np.testing.assert_allclose(positions[row, present, 1, 2], expected[present], atol=2e-3)
            assert present.sum() >= 23
    assert len(numbers) > 2
    assert not sample(0, None)[f"{FEATURES}template_mask"].any()


def test_copies_of_a_chain_share_the_templates_of_a_complex(tmp_path: Path, entries: MmcifFolder) -> None:
    """Hits of either chain are found by OpenFold's names; the partner has none."""
    partner = "GSWWHHKKPPMMRRDDEEAA"
    root = tmp_path / "complex"
    write(root / "mmcifs" / "5new.pdb", pdb_text({"A": QUERY, "B": partner, "C": QUERY}))
    for name in "AB":
        write(
            root / "alignments" / f"5new_{name}" / "uniref90_hits.a3m", a3m(QUERY if name == "A" else partner)
        )
    write(root / "alignments" / "5new_A" / "pdb70_hits.hhr", hits(*IDS))
    (whole,) = group_complexes(open_dataset(root, layout="openfold").entries)
    assert whole.has_template_hits
    chains = read_structure(whole.structure).chains
    data = replace(read_entry(whole), release_date="2030-01-01")
    found = TrainingTemplates(entries).candidates(whole, data)
    assert list(found) == [QUERY]
    settings = replace(SETTINGS, crop_size=200)
    tree = oracle_config("synthetic_multimer")
    tree.model.embeddings_and_evoformer.template.enabled = True
    alignments = [ComplexMsas()] * 3
    seen = set()
    for seed in range(6):
        sample = complex_sample(
            chains, alignments, tree, settings, np.random.default_rng(seed), templates=found
        )
        asym = sample[f"{FEATURES}asym_id"][0]
        mask = sample[f"{FEATURES}template_all_atom_mask"][0]
        np.testing.assert_array_equal(mask[:, asym == 1], mask[:, asym == 2])
        assert not mask[:, asym == 3].any()
        seen.add(int(mask[:, asym == 1].any(axis=(1, 2)).sum()))
    assert len(seen) > 2


def test_hits_through_the_cache_equal_the_parsed_ones(chain: Entry, tmp_path: Path) -> None:
    """HHsearch's and hmmsearch's; a changed file is read again, and those of another chain are refused."""
    path = chain.template_hits(read_entry(chain).chains)[QUERY]
    cache = FeatureCache(tmp_path / "cache")
    expected = read_candidates(path, QUERY)
    assert len(expected) == 10
    assert [cache.template_hits(path, QUERY) for _ in range(2)] == [expected] * 2
    assert (cache.hits, cache.misses) == (1, 1)
    write(path, hits(*IDS[:3]))
    assert len(cache.template_hits(path, QUERY)) == 3
    with pytest.raises(InputError, match="another sequence"):
        cache.template_hits(path, QUERY[::-1])


def test_folder_has_hits(chain: Entry, tmp_path: Path) -> None:
    assert chain.has_template_hits
    (tmp_path / "data" / "msas" / "1new" / "pdb_hits.hhr").unlink()
    assert not chain.has_template_hits
    assert not replace(chain, alignment_dir=None).has_template_hits
