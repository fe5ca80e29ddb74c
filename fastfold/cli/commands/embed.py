"""``fastfold embed``: write representations of sequences."""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any, get_args

from fastfold.cli.options.fold import add_fold_options, add_inputs, infer_request
from fastfold.cli.options.help_all import finish_command
from fastfold.cli.process import orderly_termination, print_summary
from fastfold.errors import ConfigError
from fastfold.inference.embed.config import ARRAYS, EmbedConfig, EmbedFormat

_DESCRIPTION = f"""\
Write the representations of every record of the files, which are as for fastfold infer. For each network and seed DIR
gets <id>_<model>_seed_<n>.safetensors with named arrays, and <id>_<model>_seed_<n>_config.json with settings and
versions. Arrays are {", ".join(ARRAYS)};
single and pair by default. The last pass runs no heads, and the structure module only for structure_module.
"""


def add_embed_command(commands: Any) -> None:
    """Add the subcommand to the ``fastfold`` parser's subparsers."""
    parser = commands.add_parser(
        "embed",
        help="write representations of sequences",
        usage="fastfold embed INPUT [INPUT ...] --out DIR [--weights FILE ...] [options]",
        description=_DESCRIPTION,
    )
    add_inputs(parser)
    group = parser.add_argument_group("representations")
    group.add_argument(
        "--arrays",
        metavar="LIST",
        help="names of arrays, joined by commas (default: single,pair; with --layer msa_row,pair)",
    )
    group.add_argument(
        "--layer",
        type=int,
        metavar="N",
        help="end the last pass after its Nth Evoformer block, for msa_row and pair there (default: all blocks)",
    )
    group.add_argument("--mean", action="store_true", help="average over the residues, and over all pairs")
    group.add_argument(
        "--dtype",
        choices=("float32", "float16"),
        default="float32",
        help="type of the arrays (default float32)",
    )
    group.add_argument(
        "--format",
        dest="embedding_format",
        choices=get_args(EmbedFormat),
        default="safetensors",
        help="hdf5 needs h5py, zarr needs zarr; bioemu: also bioemu/, a cache_embeds_dir of BioEmu, without recycling",
    )
    add_fold_options(parser, structures=False)
    finish_command(parser, run_embed)


def run_embed(options: argparse.Namespace) -> int:
    """Run the subcommand; return the exit code.

    Raises:
        ConfigError: An option is invalid, or the request is impossible.
    """
    request = infer_request(options)
    if not request.inputs:
        raise ConfigError("no input given; fastfold embed --help explains the command")
    from fastfold.inference.runner import run

    arrays = None if options.arrays is None else tuple(options.arrays.split(","))
    embed = EmbedConfig(options.layer, arrays, options.mean, options.dtype, options.embedding_format)
    config = replace(request.config, embed=embed, plots=False)
    with orderly_termination():
        summary = run(replace(request, config=config))
    return print_summary(summary, request.output, done="embedded")
