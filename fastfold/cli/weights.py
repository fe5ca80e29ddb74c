"""``fastfold weights``: tell what a weights file is, or convert it."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any


def add_weights_command(commands: Any) -> None:
    """Add the subcommand to the ``fastfold`` parser's subparsers."""
    weights = commands.add_parser("weights", help="tell what a weights file is, or convert it")
    actions = weights.add_subparsers(title="actions", metavar="ACTION", required=True)
    info = actions.add_parser("info", help="tell what a weights file is")
    info.add_argument("file", type=Path, metavar="FILE")
    info.set_defaults(run=_weights_info)
    convert = actions.add_parser(
        "convert",
        help="write the parameters in another format",
        description="Convert a weights file. The ending of OUT says the format: .safetensors (FastFold's own, with "
        "the configuration inside) or .npz (AlphaFold's).",
    )
    convert.add_argument("source", type=Path, metavar="IN")
    convert.add_argument("target", type=Path, metavar="OUT")
    convert.set_defaults(run=_weights_convert)


def _weights_info(options: argparse.Namespace) -> int:
    from fastfold.evoformer.weights.checkpoint import weights_info

    print(weights_info(options.file).describe())
    return 0


def _weights_convert(options: argparse.Namespace) -> int:
    from fastfold.evoformer.weights.checkpoint import convert

    info = convert(options.source, options.target)
    print(f"wrote {options.target}: {info.parameters:,} parameters from {options.source}")
    return 0
