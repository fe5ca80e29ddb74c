"""``fastfold infer``: fold the sequences of FASTA files."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any

from fastfold.cli.commands.resources.search import search_alone
from fastfold.errors import ConfigError
from fastfold.inference.command_line.fold_options import add_fold_options, add_inputs, infer_request
from fastfold.inference.command_line.printing import announce, is_first_process, print_summary
from fastfold.utils.command_line.from_fields import add_field_options, from_options
from fastfold.utils.command_line.help_all import finish_command
from fastfold.utils.lazy import imports_without_collection
from fastfold.utils.option_fields import option

_INFER = """\
Fold every record of the files: FASTA, A3M (one target with its alignment), CSV (id,sequence), folders of these, or -
for the standard input. Several chains joined by ':' in one record are a complex; with --complex all records of a file
are one. For each prediction DIR gets, best first,

  <id>_rank_001_<model>_seed_<n>.pdb, .cif   structure; pLDDT (0-100) is in the B-factor column
  <id>_rank_001_..._scores.json              pLDDT per residue, mean pLDDT, pTM, ipTM, ranking confidence
  <id>_rank_001_..._pae.json                 predicted aligned error, as AlphaFold DB has it
  <id>_rank_001_....png                      plots of both
  <id>_rank_001_..._config.json              settings, versions, input hash
  <id>_rank_001_..._relaxed.pdb, .cif        the structure relaxed in a force field, with hydrogens (--relax)

and summary.tsv, a table of all of them. --output-format colabfold names these files like ColabFold. Results add up:
another seed, network or setting adds predictions to those that are there, and all predictions of a target are ranked
together. Finished predictions are not folded again, so run the same command again to continue. Several processes may
work in one folder.
"""


_INFER_EPILOG = """\
alignments:
  The prediction is far better with an alignment. --msa-dir DIR is searched for <id>.a3m, <id>.a3m.gz, <id>.sto, and
  for *.a3m and *.sto in <id>/ (as OpenFold and AlphaFold lay them out; chains of a complex: <id>_A/, <id>/A/).
  --db FASTA ... searches databases first; fastfold search --help lists databases and more settings. The alignments go
  to --msa-dir, or to alignments/ among the results; with --msa-only nothing is folded.

templates:
  Known structures of similar proteins, which model_1, model_2 and the multimer networks take (mini takes none).
  --templates gives structures of your own, which are aligned with each chain by the profile of its alignment.
  --template-mmcif-dir gives a folder of the PDB's mmCIF files (1abc.cif, 1abc.cif.gz, also in ab/): pdb_hits.sto,
  pdb_hits.hhr, hmm_output.sto or pdb70_hits.hhr in the folder of a target's alignments are then used, or with
  --template-db the database is searched. _scores.json says which templates were used and why others were not.

weights:
  Official AlphaFold files (params_model_1.npz ... params_model_5_multimer_v3.npz), OpenFold checkpoints (.pt) and
  FastFold files (.safetensors). 'fastfold weights download multimer' fetches AlphaFold's; --weights multimer (monomer,
  monomer_ptm, model_1_ptm) then selects them. With several, each target is folded by every suitable network
  (complexes by multimer networks, single chains by monomer networks) and the predictions are ranked. The default is
  the small network that ships with FastFold (mini), which is for first trials.

MSA servers:
  --msa-server URL sends the sequences of targets without an alignment to a server that speaks ColabFold's protocol, and
  waits for alignments. The server's owner can read and keep the sequences. Nothing is sent without this option. The
  alignments go to --msa-dir, or to alignments/ among the results; existing ones are not requested again.

exit code: 0 all targets folded or finished before; 1 at least one failed, or nothing could be done; 2 wrong use of
the command; 130 stopped by Ctrl-C. With FASTFOLD_DEBUG=1 in the environment failures show their traceback.
"""


@dataclass(frozen=True)
class InferOptions:
    """Options of the command other than those of all commands that fold."""

    msa_only: bool = option(default=False, help="stop after the search; no weights are needed")


def add_infer_command(commands: Any) -> None:
    """Add the subcommand to the ``fastfold`` parser's subparsers."""
    infer = commands.add_parser(
        "infer",
        help="fold sequences",
        usage="fastfold infer INPUT [INPUT ...] --out DIR [--weights FILE ...] [options]",
        description=_INFER,
        epilog=_INFER_EPILOG,
    )
    add_inputs(infer)
    add_field_options({"": infer}, InferOptions)
    add_fold_options(infer, has_order=True)
    finish_command(infer, run_infer)


def run_infer(options: argparse.Namespace) -> int:
    """Run the subcommand; return the exit code, or raise FastFoldError."""
    request = infer_request(options)
    if not request.inputs:
        raise ConfigError(
            "no input given; put the inputs first, because every name after --db is a database"
            if options.db
            else "no input given; fastfold infer --help explains the command"
        )
    if from_options(InferOptions, options).msa_only:
        if not request.options.sources.wanted:
            raise ConfigError(
                "--msa-only searches and stops; say where to search: --db FASTA or --msa-server URL"
            )
        return search_alone(request, needed_alone=True)

    announce(options)
    from fastfold.inference.folding.background import start_ahead

    if is_first_process():
        start_ahead(request.config)
    with imports_without_collection():
        from fastfold.inference.runner import run

    summary = run(request)
    return print_summary(summary, request.output)
