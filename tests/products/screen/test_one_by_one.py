"""A screen's structures have the bytes of ``fastfold infer`` on each complex alone."""

from __future__ import annotations

import itertools

import pytest

from tests.helpers.command_line import QUICK, CommandLine

CHAINS = {"A": "MKTAYIAKQR", "B": "GSHMLEDPVY", "C": "AWLK"}


@pytest.mark.long
def test_pairs_are_folded_as_infer_folds_each(cli: CommandLine):
    weights = cli.weights("model_1_multimer_v3")
    screened = cli.out / "screen"
    settings = ("--weights", weights, "--seeds", "0-1", *QUICK)
    pairs = cli.fasta(CHAINS)
    done = cli.run("screen", "--all-vs-all", pairs, "--out", screened, "--workers", "2", *settings)
    assert done.code == 0, done.err
    for first, second in itertools.combinations(CHAINS, 2):
        name = f"{first}_and_{second}"
        alone = cli.out / name
        query = cli.fasta({name: f"{CHAINS[first]}:{CHAINS[second]}"}, f"{name}.fasta")
        assert cli.run("infer", query, "--out", alone, *settings).code == 0
        structures = sorted(alone.glob("*.pdb"))
        assert len(structures) == 2
        for structure in structures:
            assert (screened / structure.name).read_bytes() == structure.read_bytes()
    assert len(list(screened.glob("*.pdb"))) == 2 * 3
