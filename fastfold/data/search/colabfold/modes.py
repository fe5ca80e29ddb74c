"""Modes of a search by ColabFold's pipeline, under ColabFold's names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from fastfold.data.msa.msa import ChainMsas

MsaMode = Literal["mmseqs2_uniref_env", "mmseqs2_uniref_env_envpair", "mmseqs2_uniref", "single_sequence"]
PairMode = Literal["unpaired_paired", "paired", "unpaired"]
PairStrategy = Literal["greedy", "complete"]

PUBLIC_SERVER = "https://api.colabfold.com"
"""Address of ColabFold's public MSA server; requests go there only if a user names it."""
PUBLIC_SERVER_TERMS = (
    f"--msa-server {PUBLIC_SERVER} asks ColabFold's public server, which sees the sequences and allows one query at a "
    "time from one address"
)


@dataclass(frozen=True)
class ColabFoldModes:
    """Databases that are searched, and rows that a complex gets."""

    #: UniRef30 with or without environmental sequences; ``envpair`` pairs chains in both
    msa_mode: MsaMode = "mmseqs2_uniref_env"
    #: Rows of a complex: each chain's own, those that pair chains, or both
    pair_mode: PairMode = "unpaired_paired"
    #: ``greedy`` pairs rows of a species in two chains or more, ``complete`` in all chains
    pair_strategy: PairStrategy = "greedy"
    templates: bool = False  #: Fetch the structures of the server's template hits

    @property
    def has_environment(self) -> bool:
        """True if environmental sequences are searched."""
        return self.msa_mode in ("mmseqs2_uniref_env", "mmseqs2_uniref_env_envpair")

    @property
    def has_environment_pairs(self) -> bool:
        """True if environmental sequences are paired, too."""
        return self.msa_mode == "mmseqs2_uniref_env_envpair"


def select_rows(alignments: Sequence[ChainMsas], pair_mode: PairMode) -> list[ChainMsas]:
    """Keep the rows of a complex that a pair mode selects.

    Args:
        alignments: Own and paired alignments of each chain.
        pair_mode: ``unpaired`` keeps of paired alignments the query alone; ``paired`` drops each chain's own.
    """
    if pair_mode == "paired":
        return [([], paired) for _, paired in alignments]
    if pair_mode == "unpaired":
        return [(own, [msa.take([0]) for msa in paired]) for own, paired in alignments]
    return list(alignments)
