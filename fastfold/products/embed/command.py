"""``fastfold embed``: write representations of sequences."""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any

from fastfold.errors import ConfigError
from fastfold.inference.command_line.fold_options import add_fold_options, add_inputs, infer_request
from fastfold.inference.command_line.printing import print_summary
from fastfold.inference.embedding.config import ARRAYS, EmbedConfig
from fastfold.utils.command_line.from_fields import add_field_options, from_options
from fastfold.utils.command_line.help_all import finish_command

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
    add_field_options({"": parser.add_argument_group("representations")}, EmbedConfig)
    add_fold_options(parser, structures=False)
    finish_command(parser, run_embed)


def run_embed(options: argparse.Namespace) -> int:
    """Run the subcommand; return the exit code, or raise FastFoldError."""
    request = infer_request(options)
    if not request.inputs:
        raise ConfigError("no input given; fastfold embed --help explains the command")
    from fastfold.inference.runner import run

    config = replace(request.config, embed=from_options(EmbedConfig, options), plots=False)
    summary = run(replace(request, config=config))
    return print_summary(summary, request.output, done="embedded")
