"""Parts of proteins are folded with the numbers, alignments and templates of the whole proteins."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest

from fastfold.data.features.pipeline import featurize
from fastfold.data.queries import read
from fastfold.data.queries.pairs import _cut_chain
from fastfold.data.targets import Target, target_from_sequence
from fastfold.evoformer.config import model_config
from fastfold.inference.config import InferConfig
from fastfold.inference.folding.prediction import add_settings
from fastfold.inference.folding.prediction_jobs import target_digest
from fastfold.inference.target_templates import TargetTemplates
from tests.helpers.command_line import CommandLine

WHOLE = target_from_sequence("MKVLAAGITGSH:AWLPEK", "t")
PARTS = (_cut_chain(replace(WHOLE.chains[0], record="P"), [(2, 4), (8, 11)]), WHOLE.chains[1])
CUT = Target("t", PARTS, "", "t", ())


@pytest.mark.parametrize("weights", ["model_1_multimer_v3", "model_1_ptm"])
def test_all_files_have_the_numbers_of_the_whole_protein(
    cli: CommandLine, monkeypatch: pytest.MonkeyPatch, weights: str
) -> None:
    monkeypatch.setattr(read, "read_targets", lambda inputs, complex_, **settings: ([CUT], []))
    msas = cli.folder / "msas"
    msas.mkdir()
    (msas / "P.a3m").write_text(">P\nMKVLAAGITGSH\n>x\nMKVLAAGITGSW\n>y\nM---AAG----H\n")
    (msas / "t_B.a3m").write_text(">B\nAWLPEK\n")
    done = cli.infer(cli.fasta({"t": "MK"}), "--msa-dir", msas, weights=[cli.weights(weights)])
    assert done.code == 0, done.err
    numbers = [2, 3, 4, 8, 9, 10, 11]
    (pdb,) = cli.out.glob("t_rank_001_*.pdb")
    rows = {(line[21], int(line[22:26])) for line in pdb.read_text().splitlines() if line.startswith("ATOM")}
    assert rows == {*(("A", number) for number in numbers), *(("B", number) for number in range(1, 7))}
    (cif,) = cli.out.glob("t_rank_001_*.cif")
    scheme = cif.read_text().partition("_pdbx_poly_seq_scheme")[2]
    assert re.findall(r"^A \d+ \d+ \w+ (\d+) ", scheme, re.MULTILINE) == [str(number) for number in numbers]
    scores = cli.scores("t")
    assert scores["sequences"] == ["KVLITGS", "AWLPEK"]
    assert scores["residue_ranges"] == [[[2, 4], [8, 11]], [[1, 6]]]
    assert cli.config("t")["alignment_rows"] == [[2, 0], [1, 0]]  # row y has no residue in the parts
    assert cli.config("t")["residue_ranges"] == {"A": [[2, 4], [8, 11]], "B": []}
    assert cli.load("t_coverage.json")["residue_ranges"] == scores["residue_ranges"]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("model_1_multimer_v3", [1, 2, 3, 7, 8, 9, 10, 0, 1, 2, 3, 4, 5]),
        ("model_1_ptm", [0, 1, 2, 6, 7, 8, 9, 210, 211, 212, 213, 214, 215]),
    ],
)
def test_networks_see_the_gap_between_two_parts(name: str, expected: list[int]) -> None:
    sampler = featurize(CUT.chains, [([], []), ([], [])], model_config(name), join=True)
    add_settings(sampler, CUT, cyclic=False, guess=None)
    assert sampler.static["residue_index"].tolist() == expected
    assert sampler.static["residue_index"].dtype == np.int32


def test_templates_are_those_of_the_whole_chains() -> None:
    features = {
        "template_aatype": np.zeros((1, 12, 22), np.float32),
        "template_all_atom_positions": np.arange(12, dtype=np.float32)[None, :, None, None]
        * np.ones((1, 1, 37, 3)),
        "template_all_atom_masks": np.ones((1, 12, 37), np.float32),
        "template_sum_probs": np.ones((1, 1), np.float32),
    }
    first, second = TargetTemplates((features, None)).cut(CUT).features
    assert first is not None
    assert first["template_all_atom_positions"][0, :, 0, 0].tolist() == [1, 2, 3, 7, 8, 9, 10]
    assert first["template_sum_probs"].shape == (1, 1)
    assert second is None


def test_other_parts_with_the_same_letters_are_another_input() -> None:
    chain = target_from_sequence("MKMK", "t").chains[0]
    targets = [Target("t", (_cut_chain(chain, regions),), "", "t", ()) for regions in ([(1, 2)], [(3, 4)])]
    digests = {target_digest(target, [([], [])], InferConfig()) for target in targets}
    assert [target.chains[0].sequence for target in targets] == ["MK", "MK"]
    assert len(digests) == 2


def test_rings_of_parts_are_refused(cli: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read, "read_targets", lambda inputs, complex_, **settings: ([CUT], []))
    done = cli.infer(cli.fasta({"t": "MK"}), "--cyclic", weights=[cli.weights("model_1_multimer_v3")])
    assert done.code == 1
    assert "--cyclic closes whole chains, and chain A lacks residues" in done.err
