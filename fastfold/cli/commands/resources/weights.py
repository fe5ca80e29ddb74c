"""``fastfold weights``: download AlphaFold's parameters; describe, convert, or merge weights files."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from fastfold.inference.progress import print_line
from fastfold.utils.command_line.from_fields import add_field_options, from_options
from fastfold.utils.option_fields import argument, option

_SETS = ("monomer", "monomer_ptm", "multimer", "all")

_DOWNLOAD = """\
Fetch the parameters that DeepMind publishes for AlphaFold 2.3 under CC BY 4.0:

  monomer       model_1 ... model_5, as in CASP14
  monomer_ptm   the same with pTM and predicted aligned error
  multimer      model_1_multimer_v3 ... model_5_multimer_v3, for complexes
  all           all 15

or one network of these by its name (model_1_ptm). A file has about 373 MB. Files are kept in the folder
FASTFOLD_WEIGHTS (an environment variable; default: fastfold/weights in the user's cache folder), where --weights
multimer finds them.
Run the same command again to continue after an interruption. Files in the folder are compared with their recorded
SHA-256 and not fetched again.
"""


_DTYPE: dict[str, Any] = {
    "default": "float32",
    "choices": ("float32", "float16", "bfloat16"),
    "help": "element type in the file; parameters are float32 again when it is read (default float32). .npz has no "
    "bfloat16",
}


@dataclass(frozen=True)
class WeightsDownload:
    """Published networks to download."""

    names: Sequence[str] = argument(
        nargs="+", metavar="NAME", help=f"{', '.join(_SETS)}, or a network's name"
    )
    mirror: str | None = option(
        default=None,
        metavar="URL|DIR",
        help="source of the files: the address of the archive or of its folder, or a folder that has it or its files",
    )
    quiet: bool = option(default=False, help="print only the files")


@dataclass(frozen=True)
class WeightsFile:
    """Weights file to describe."""

    file: Path = argument(parse=Path, metavar="FILE", help=None)


@dataclass(frozen=True)
class WeightsConversion:
    """Weights file to write in another format."""

    source: Path = argument(parse=Path, metavar="IN", help=None)
    target: Path = argument(parse=Path, metavar="OUT", help=None)
    dtype: str = option(**_DTYPE)


@dataclass(frozen=True)
class AdapterMerge:
    """Adapter to add to the weights that it was trained on."""

    base: Path = argument(parse=Path, metavar="BASE", help="weights that the adapter was trained on")
    adapter: Path = argument(
        parse=Path, metavar="ADAPTER", help="folder with adapter_config.json, adapter_model.safetensors"
    )
    target: Path = argument(parse=Path, metavar="OUT", help="as of fastfold weights convert")
    dtype: str = option(**_DTYPE)


def add_weights_command(commands: Any) -> None:
    """Add the subcommand to the ``fastfold`` parser's subparsers."""
    weights = commands.add_parser(
        "weights", help="download AlphaFold's weights; describe, convert, or merge files"
    )
    actions = weights.add_subparsers(title="actions", metavar="ACTION", required=True)
    download = actions.add_parser(
        "download", help="fetch the parameters that DeepMind publishes", description=_DOWNLOAD
    )
    add_field_options({"": download}, WeightsDownload)
    download.set_defaults(run=_weights_download)
    info = actions.add_parser("info", help="describe a weights file")
    add_field_options({"": info}, WeightsFile)
    info.set_defaults(run=_weights_info)
    convert = actions.add_parser(
        "convert",
        help="write the parameters in another format",
        description="Convert a weights file. The ending of OUT says the format: .safetensors (FastFold's own, with "
        "the configuration inside), .npz (AlphaFold's) or .pt (OpenFold's). IN may also be a checkpoint of Lightning, "
        "DeepSpeed or an average of weights, under OpenFold's names or FastFold's.",
        formatter_class=argparse.HelpFormatter,
    )
    add_field_options({"": convert}, WeightsConversion)
    convert.set_defaults(run=_weights_convert)
    merge = actions.add_parser(
        "merge",
        help="add a LoRA adapter to the weights that it was trained on",
        description="Add a LoRA adapter to the weights that it was trained on. The adapter is the folder adapter of a "
        "run with finetune=lora, or one of Hugging Face's PEFT.",
        formatter_class=argparse.HelpFormatter,
    )
    add_field_options({"": merge}, AdapterMerge)
    merge.set_defaults(run=_weights_merge)


def _weights_download(namespace: argparse.Namespace) -> int:
    from fastfold.errors import ConfigError
    from fastfold.evoformer.weights.download import download_weights
    from fastfold.evoformer.weights.published import LICENSE, published_networks

    options = from_options(WeightsDownload, namespace)
    networks: dict[str, None] = {}
    for name in options.names:
        published = published_networks(name)
        if not published:
            raise ConfigError(
                f"{name!r} is not published: give {', '.join(_SETS)}, or a network such as model_1_multimer_v3"
            )
        networks |= dict.fromkeys(published)

    say = partial(print_line, quiet=options.quiet)
    say(LICENSE)
    with download_bar(options.quiet) as progress:
        paths = download_weights(list(networks), mirror=options.mirror, say=say, progress=progress)
    for path in paths:
        print(path)
    return 0


@contextmanager
def download_bar(quiet: bool) -> Iterator[Callable[[str, int, int], None]]:
    """Yield a function that shows a file's progress: a bar on a terminal, else a line per finished file."""
    if quiet:
        yield lambda name, done, total: None
        return
    if not sys.stderr.isatty():

        def line(name: str, done: int, total: int) -> None:
            if done == total:
                print_line(f"{name}: {total:,} bytes")

        yield line
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=Console(file=sys.stderr)) as bar:
        tasks: dict[str, Any] = {}

        def update(name: str, done: int, total: int) -> None:
            if name not in tasks:
                tasks[name] = bar.add_task(name, total=total)
            bar.update(tasks[name], completed=done)

        yield update


def _weights_info(namespace: argparse.Namespace) -> int:
    from fastfold.evoformer.weights.checkpoint import weights_info
    from fastfold.evoformer.weights.published import one_weights_file

    options = from_options(WeightsFile, namespace)
    print(weights_info(one_weights_file(options.file)).describe())
    return 0


def _weights_convert(namespace: argparse.Namespace) -> int:
    import torch

    from fastfold.evoformer.weights.checkpoint import convert
    from fastfold.evoformer.weights.published import one_weights_file

    options = from_options(WeightsConversion, namespace)
    dtype = getattr(torch, options.dtype)
    info = convert(one_weights_file(options.source), options.target, dtype=dtype)
    print(f"wrote {options.target}: {info.parameters:,} parameters from {options.source}")
    return 0


def _weights_merge(namespace: argparse.Namespace) -> int:
    import torch

    from fastfold.evoformer.weights.adapters import merge_adapter, read_adapter
    from fastfold.evoformer.weights.checkpoint import read_weights, write_weights
    from fastfold.evoformer.weights.published import one_weights_file

    options = from_options(AdapterMerge, namespace)
    adapter = read_adapter(options.adapter)
    base = one_weights_file(options.base)
    info, state = read_weights(base)
    write_weights(options.target, merge_adapter(state, adapter), info, dtype=getattr(torch, options.dtype))
    print(f"wrote {options.target}: {base} with {len(adapter.updates)} layers of {options.adapter}")
    return 0
