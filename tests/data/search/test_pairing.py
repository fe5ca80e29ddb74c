"""UniProt's hits of the chains of a complex are paired by species, from the database to the features."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fastfold.data.features.merging import pair_rows, rows_by_species
from fastfold.data.features.raw import msa_features
from fastfold.data.msa.find import load_alignments
from fastfold.data.search.local import search
from fastfold.data.targets import target_from_sequence
from tests.helpers.sequence_databases import queries, relative

SPECIES = ("HUMAN", "MOUSE", "YEAST", "ECOLI", "BOVIN")


@pytest.mark.parametrize("file_format", ["sto", "a3m"])
def test_rows_of_one_species_stand_in_one_line(tmp_path: Path, file_format: str) -> None:
    rng = np.random.default_rng(0)
    first, second = queries().values()
    # The second chain has no relative in one of the species.
    owners = [(first, species) for species in SPECIES] + [(second, species) for species in SPECIES[1:]]
    with (tmp_path / "db.fasta").open("w") as file:
        for number in rng.permutation(len(owners)):
            sequence, species = owners[number]
            name = f"tr|A0A{number:03d}|A0A{number:03d}_{species}"
            file.write(f">{name} Made-up protein OS=x\n{relative(rng, sequence, 0.3)}\n")
    folder = search(
        {"x": f"{first}:{second}"},
        f"uniprot={tmp_path / 'db.fasta'}",
        tmp_path / "out",
        file_format=file_format,
    )
    chains = []
    for sequence, (unpaired, paired) in zip(
        (first, second), load_alignments(folder, target_from_sequence(f"{first}:{second}", "x")), strict=True
    ):
        assert unpaired == []
        chains.append(msa_features(paired, sequence))
    lines = pair_rows([rows_by_species(chain["msa"], chain["msa_species_identifiers"]) for chain in chains])
    found = [
        {chain["msa_species_identifiers"][row].decode() for chain, row in zip(chains, line, strict=True)}
        for line in lines[1:]
    ]
    assert sorted(map(sorted, found)) == [[species] for species in sorted(SPECIES[1:])]
