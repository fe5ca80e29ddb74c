"""Templates from the command line and from Python: they are used, said, written, and part of what a fold depends on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import fastfold
from fastfold.data.targets import target_from_sequence
from fastfold.data.templates.options import TemplateOptions
from fastfold.errors import ConfigError
from fastfold.evoformer.config import model_config
from fastfold.inference.models import Network, check_takers
from fastfold.inference.target_templates import TargetTemplates, find_templates, read_templates
from fastfold.protein import read_structure, to_biopython
from tests.helpers.command_line import CommandLine, small_model
from tests.helpers.template_files import HOMOLOGUE, QUERY, entry, sto, write_entries


@pytest.fixture
def entries(tmp_path: Path) -> Path:
    """Two entries, one of which is from 2022."""
    return write_entries(
        tmp_path / "mmcif",
        {"1abc": entry({"A": HOMOLOGUE}), "2new": entry({"A": HOMOLOGUE[::-1]}, dates=("2022-01-01",))},
    )


@pytest.fixture
def msas(tmp_path: Path) -> Path:
    """An alignment and hits in the folder of the target T1."""
    folder = tmp_path / "msas" / "T1"
    folder.mkdir(parents=True)
    (folder / "uniref90_hits.a3m").write_text(f">q\n{QUERY}\n>r\n{HOMOLOGUE}\n")
    hits = {"1abc_A/1-40": HOMOLOGUE, "2new_A/1-40": HOMOLOGUE[::-1]}
    (folder / "pdb_hits.sto").write_text(sto(hits))
    return folder.parent


def scores(cli: CommandLine) -> list[dict]:
    return [cli.load(name) for name in cli.names() if name.endswith("_scores.json")]


def test_structures_of_the_user_are_templates(cli: CommandLine, tmp_path: Path):
    """They change the prediction, which is folded anew; the same ones do not."""
    fasta, own = cli.fasta({"T1": QUERY}), tmp_path / "own.cif"
    own.write_text(entry({"A": HOMOLOGUE}))
    assert cli.infer(fasta).code == 0
    done = cli.infer(fasta, "--templates", own)
    assert "T1: templates: 1 used of 1 found in given structures: own_A" in done.err
    assert done.out.startswith("1 folded")
    with_templates = next(one for one in scores(cli) if "templates" in one)
    assert with_templates["templates"] == [
        {
            "chain": "A",
            "sources": ["given structures"],
            "found": 1,
            "used": [{"name": "own_A", "aligned_residues": 40, "remark": ""}],
            "left_out": [],
        }
    ]
    assert len(scores(cli)) == 2
    assert len({tuple(one["plddt"]) for one in scores(cli)}) == 2
    configs = [cli.load(name) for name in cli.names() if name.endswith("_config.json")]
    assert sorted(str(one.get("templates")) for one in configs) == ["None", "{'A': ['own_A']}"]
    assert cli.infer(fasta, "--templates", own).out.startswith("0 folded, 1 finished before")
    own.write_text(entry({"A": HOMOLOGUE}, shift={20: 1.0}))
    assert cli.infer(fasta, "--templates", own).out.startswith("1 folded")


def test_hits_among_the_alignments_are_never_dropped_in_silence(cli: CommandLine, msas: Path, entries: Path):
    fasta = cli.fasta({"T1": QUERY})
    unused = cli.infer(fasta, "--msa-dir", msas)
    assert (
        f"unused hits of a template search: {msas / 'T1' / 'pdb_hits.sto'}; --template-mmcif-dir"
        in unused.err
    )
    assert all("templates" not in one for one in scores(cli))
    own = cli.folder / "own.cif"
    own.write_text(entry({"A": HOMOLOGUE}, shift={20: 1.0}))
    assert "unused hits of a template search" in cli.infer(fasta, "--msa-dir", msas, "--templates", own).err
    used = cli.infer(
        fasta, "--msa-dir", msas, "--template-mmcif-dir", entries, "--max-template-date", "2021-11-01"
    )
    line = "templates: 1 used of 2 found in pdb_hits.sto: 1abc_A; left out: 2new_A (released on 2022-01-01, after 2021"
    assert line in used.err
    (report,) = next(one["templates"] for one in scores(cli) if "1abc_A" in str(one.get("templates")))
    assert report["left_out"] == [{"name": "2new_A", "reason": "released on 2022-01-01, after 2021-11-01"}]
    later = cli.infer(fasta, "--msa-dir", msas, "--template-mmcif-dir", entries, "--max-templates", "1")
    assert later.out.startswith("0 folded, 1 finished before")  # the same template


def test_the_database_is_searched_where_no_hits_lie(cli: CommandLine, entries: Path):
    database = cli.folder / "pdb_seqres.txt"
    database.write_text(f">1abc_A mol:protein length:40  TEST\n{HOMOLOGUE}\n")
    done = cli.infer(cli.fasta({"T1": QUERY}), "--template-db", database, "--template_mmcif_dir", entries)
    assert "templates: 1 used of 1 found in pdb_seqres.txt: 1abc_A" in done.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--template-db", "x"], "--template-db needs --template-mmcif-dir DIR"),
        (["--template-alignment", "x"], "--template-alignment needs --templates"),
        (
            ["--max-template-date", "2021-11-01"],
            "--max-template-date limits hits, which need --template-mmcif-dir",
        ),
        (["--max-templates", "5", "--templates", "x"], "'5' is not a whole number from 1 to 4"),
        (["--obsolete-pdbs", "x"], "--obsolete-pdbs needs --template-mmcif-dir"),
        (["--templates", "none.cif"], "none.cif: no such file"),
        (["--template-mmcif-dir", "none"], "none: no such folder"),
        (["--template-mmcif-dir", ".", "--template-db", "none"], "none: no such file; give pdb_seqres.txt"),
    ],
)
def test_what_cannot_be_used_is_refused_before_anything_runs(
    cli: CommandLine, arguments: list[str], message: str
):
    done = cli.infer(cli.fasta({"T1": QUERY}), *arguments)
    assert done.code == (1 if message.startswith("none") else 2)  # a missing file is no wrong use
    assert message in done.err
    assert not cli.out.exists() or cli.names() == []


def _network(name: str) -> Network:
    """Return an official network without weights."""
    network = Network.__new__(Network)
    network.path = Path(f"params_{name}.npz")
    network.info = SimpleNamespace(config=model_config(name), multimer="multimer" in name)  # type: ignore[assignment]
    return network


def test_networks_without_templates_say_so(cli: CommandLine, tmp_path: Path, msas: Path, entries: Path):
    (tmp_path / "own.cif").write_text(entry({"A": HOMOLOGUE}))
    done = cli.infer(cli.fasta({"T1": QUERY}), "--templates", tmp_path / "own.cif", weights=["mini"])
    assert done.code == 2
    assert "templates are given, but mini does not use any" in done.err

    networks = [_network(name) for name in ("model_1", "model_3", "model_1_multimer_v3")]
    options = TemplateOptions(structures=(tmp_path / "own.cif",))
    check_takers(options, networks)
    with pytest.raises(
        ConfigError, match="model_3 does not use any; of AlphaFold's networks model_1 and model_2"
    ):
        check_takers(options, networks[1:2])
    target, pair = target_from_sequence(QUERY), target_from_sequence(f"{QUERY}:{HOMOLOGUE}")
    from fastfold.data.templates.source import TemplateFinder

    finder, nothing = TemplateFinder(options), [([], []), ([], [])]
    found = find_templates(finder, target, nothing[:1], networks[:2], None)
    assert found.number == 1
    assert found.lines[-1] == "without templates, which these networks do not use: model_3"
    found = find_templates(finder, pair, nothing, networks[:2], None)
    assert (found.number, found.lines) == (
        0,
        ("without templates, which these networks do not use for a complex: model_1, model_3",),
    )
    found = find_templates(finder, pair, nothing, networks[2:], None)
    assert [one["chain"] for one in found.report] == ["A", "B"]
    assert [line.partition(":")[0] for line in found.lines] == [
        "templates of chain A",
        "templates of chain B",
    ]


def test_templates_of_an_input_give_way_to_those_of_the_command(tmp_path: Path) -> None:
    """A line says so; without others they are used, by networks that take them."""
    from fastfold.data.templates.source import TemplateFinder

    (tmp_path / "own.cif").write_text(entry({"A": HOMOLOGUE}))
    shown = TemplateFinder(TemplateOptions(structures=(tmp_path / "own.cif",)))
    target, nothing = target_from_sequence(f"{QUERY}:{HOMOLOGUE}"), [([], []), ([], [])]
    own = shown.find(target, nothing)[0].features()
    target = replace(target, templates=(own, None))
    networks = [_network(name) for name in ("model_1", "model_1_multimer_v3")]
    found = find_templates(None, target, nothing, networks, None)
    assert found is not None
    assert (found.features, found.number) == ((own, None), 1)
    assert found.lines == (
        "templates of chain A: own_A",
        "without templates, which these networks do not use for a complex: model_1",
    )
    found = find_templates(shown, target, nothing, networks[1:], None)
    assert found is not None
    assert found.features[1] is not None
    assert "the templates of the input are not used, but those of the command" in found.lines


def test_python_takes_files(tmp_path: Path):
    own, other = tmp_path / "own.cif", tmp_path / "other.cif"
    own.write_text(entry({"A": HOMOLOGUE}))
    other.write_text(entry({"A": "W" * 40}))
    model = small_model()
    without = fastfold.predict(QUERY, model, num_recycles=0)
    found = fastfold.predict(QUERY, model, num_recycles=0, templates=[own, other])
    assert np.abs(without.atom_positions - found.atom_positions).max() > 1e-3
    assert without.templates is None
    assert "templates" not in without.scores()
    (report,) = found.scores()["templates"]
    assert [one["name"] for one in report["used"]] == ["own_A"]
    assert [one["name"] for one in report["left_out"]] == ["other_A"]


def test_python_takes_objects_in_place_of_files(tmp_path: Path):
    """Features are those of the file, for single chains and for whole complexes."""
    own = tmp_path / "own.cif"
    own.write_text(entry({"A": HOMOLOGUE}))
    structure = to_biopython(own, "own")
    target, nothing = target_from_sequence(QUERY), [([], [])]
    for given, by_file in (
        (structure, own),
        ([structure[0]["A"]], [own]),
        (read_structure(own), own),
        (TemplateOptions(complexes=(structure,)), TemplateOptions(complexes=(own,))),
    ):
        found = read_templates(target, nothing, given)
        expected = read_templates(target, nothing, by_file)
        assert found is not None
        assert expected is not None
        assert found.features[0].keys() == expected.features[0].keys() != set()
        for key, value in expected.features[0].items():
            np.testing.assert_array_equal(found.features[0][key], value, err_msg=key)


def test_python_takes_files_per_chain(tmp_path: Path):
    (tmp_path / "own.cif").write_text(entry({"A": HOMOLOGUE}))
    pair, nothing = target_from_sequence(f"{QUERY}:{HOMOLOGUE}"), [([], []), ([], [])]
    for given, names in (
        (str(tmp_path / "own.cif"), ["own_A", "own_A"]),
        ([None, [tmp_path / "own.cif"]], [None, "own_A"]),
    ):
        found = read_templates(pair, nothing, given)
        shown = [None if one is None else one["template_domain_names"][0].decode() for one in found.features]
        assert shown == names
    assert read_templates(pair, nothing, None) is None
    for wrong, message in (
        (3, "templates must be files or features, found int"),
        ([3, None], "templates must be files or features, found int"),
        (
            [[tmp_path / "own.cif"], {"template_aatype": []}],
            "files for all chains, or features for all chains",
        ),
        ([[tmp_path / "own.cif"]], "give one list of files per chain|2 chains, but templates for 1"),
    ):
        if message.startswith("give one list"):
            wrong = [[tmp_path / "own.cif"]]
        with pytest.raises(ConfigError, match=message):
            read_templates(pair, nothing, wrong)


@pytest.mark.long
@pytest.mark.parametrize("name", ["model_1_multimer_v3", "model_1_ptm"])
def test_templates_of_complexes_show_the_distance_of_chains(cli: CommandLine, name: str):
    """Moving one chain of the template changes the prediction; both kinds of networks use it, and the page says so."""
    fasta = cli.fasta({"T1": f"{QUERY}:{QUERY[::-1]}"})
    whole = cli.folder / "whole.cif"
    predictions = []
    for shift in (20.0, 27.0):
        text = entry({"A": HOMOLOGUE, "B": QUERY[::-1]})
        lines = [
            f"{' '.join(x[:8])} {float(x[8]) + shift:.3f} {' '.join(x[9:])}"
            if (x := line.split())[:1] == ["ATOM"] and x[-2] == "B"
            else line
            for line in text.splitlines()
        ]
        whole.write_text("\n".join([*lines, ""]))
        done = cli.infer(fasta, "--cross-chain-templates", whole, "--overwrite", weights=[cli.weights(name)])
        assert done.code == 0, done.err
        assert "T1: templates of chain B: 1 used of 1 found in whole complex whole: whole_B" in done.err
        (pdb,) = cli.out.glob("T1_rank_001_*.pdb")
        predictions.append([line[30:54] for line in pdb.read_text().splitlines() if line.startswith("ATOM")])
    assert len(predictions[0]) == len(predictions[1])
    assert predictions[0] != predictions[1]
    again = cli.infer(fasta, "--cross-chain-templates", whole, weights=[cli.weights(name)])
    assert again.out.startswith("0 folded, 1 finished before")


def test_templates_of_complexes_in_python(tmp_path: Path):
    """Options with files give the features of a run; others need the command."""
    whole = tmp_path / "whole.cif"
    whole.write_text(entry({"A": HOMOLOGUE, "B": HOMOLOGUE}))
    target = target_from_sequence(f"{QUERY}:{QUERY}")
    found = read_templates(target, [([], [])] * 2, TemplateOptions(complexes=(whole,), keep_clashes=True))
    assert found is not None
    assert found.is_in_one_frame
    assert [one["template_domain_names"].tolist() for one in found.features if one] == [
        [b"whole_A"],
        [b"whole_B"],
    ]
    with pytest.raises(ConfigError, match="in Python, TemplateOptions has files"):
        read_templates(target, [([], [])] * 2, TemplateOptions(mmcif_dir=tmp_path))


@pytest.mark.parametrize(("numbers", "largest"), [((1, 3), 3), ((2, None, 0), 2), ((None, None), 0), ((), 0)])
def test_a_target_has_the_templates_of_the_chain_with_most(
    numbers: tuple[int | None, ...], largest: int
) -> None:
    features = [None if count is None else {"template_aatype": np.zeros((count, 4, 22))} for count in numbers]
    assert TargetTemplates(tuple(features)).number == largest


def test_templates_of_a_part_are_columns_of_the_whole_chain(tmp_path: Path) -> None:
    """Residues 2 to 4 and 6 of chain A; chain B is whole, and chain C has no template."""
    columns = np.arange(8)
    features = {
        "template_aatype": np.broadcast_to(columns[:, None], (2, 8, 22)),
        "template_all_atom_positions": np.broadcast_to(columns[:, None, None], (2, 8, 37, 3)),
        "template_all_atom_masks": np.ones((2, 8, 37)),
        "template_domain_names": np.array([b"a", b"b"]),
    }
    whole = TargetTemplates((features, features, None))
    chains = [SimpleNamespace(regions=((2, 4), (6, 6)), numbers=[2, 3, 4, 6])]
    chains += [SimpleNamespace(regions=(), numbers=list(range(1, 9)))] * 2
    target: Any = SimpleNamespace(chains=chains)
    cut, same, nothing = whole.cut(target).features
    assert nothing is None
    assert same is features
    assert cut is not None
    assert cut["template_aatype"][:, :, 0].tolist() == [[1, 2, 3, 5]] * 2
    assert cut["template_all_atom_positions"][:, :, 0, 0].tolist() == [[1, 2, 3, 5]] * 2
    assert cut["template_domain_names"].tolist() == [b"a", b"b"]
