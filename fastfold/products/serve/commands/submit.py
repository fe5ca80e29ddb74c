"""``fastfold submit``: fold on a server of ``fastfold serve``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastfold.errors import ConfigError, InputError
from fastfold.inference.command_line.fold_options import add_inputs
from fastfold.inference.progress import print_line
from fastfold.inference.request import RunOptions
from fastfold.products.serve.options import DEFAULT_PORT
from fastfold.utils.command_line.from_fields import add_field_options, from_options
from fastfold.utils.option_fields import option

if TYPE_CHECKING:
    from fastfold.data.targets import Target
    from fastfold.products.serve.client import Client, Job

_SERVER = f"http://127.0.0.1:{DEFAULT_PORT}"
_SUBMIT = """\
Fold sequences on a server of 'fastfold serve', wait for the answers, and download the results. FASTA files may have
several records, each a job; an A3M file is a target with its alignment. Run with --no-wait to submit only, and with
--job ID to wait for jobs and download them later.

  fastfold submit protein.fasta --server http://127.0.0.1:8470 --out results
  fastfold submit --sequence MKTAYIAKQR --out results
  fastfold submit protein.a3m --server https://fold.example.org --set num_recycles=6 seeds=0-4 --out results
"""

_EPILOG = """\
The token is that of --token, or of the environment variable FASTFOLD_TOKEN, which other users of this machine cannot
see. exit code: 0 all jobs folded; 1 at least one failed or was refused; 2 wrong use of the command.
"""


@dataclass(frozen=True)
class SubmitOptions:
    """Options of the command other than its files."""

    sequence: str | None = option(default=None, metavar="LETTERS", help="a sequence; ':' joins chains")
    job: Sequence[str] = option(default=(), nargs="+", metavar="ID", help="jobs that were submitted before")
    server: str = option(default=_SERVER, metavar="URL", help=f"default {_SERVER}")
    token: str | None = option(
        default=None, metavar="TEXT", is_secret=True, help="token of the user (default: FASTFOLD_TOKEN)"
    )
    out: Path | None = option(
        default=None, parse=Path, metavar="DIR", help="folder for the results, one for each job"
    )
    templates: Sequence[Path] = option(
        default=(), nargs="+", parse=Path, metavar="FILE", help="mmCIF or PDB files to send"
    )
    settings: Sequence[str] = option(
        "--set",
        default=(),
        nargs="+",
        metavar="NAME=VALUE",
        dest="settings",
        help="settings of the fold: num_recycles=6 seeds=0-4 relax=best",
    )
    priority: int = option(default=0, bounds=(-10, 10), help="-10 to 10 (default 0)")
    no_wait: bool = option(default=False, help="print the jobs' ids and end")
    quiet: bool = option(default=False, help="print only the results")


def add_submit_command(commands: Any) -> None:
    """Add the subcommand to the ``fastfold`` parser's subparsers."""
    submit = commands.add_parser(
        "submit",
        help="fold on a server of fastfold serve",
        usage="fastfold submit [INPUT ...] [--server URL] [--out DIR] [options]",
        description=_SUBMIT,
        epilog=_EPILOG,
    )
    add_inputs(submit, "FASTA, A3M or CSV files")
    add_field_options({"": submit}, SubmitOptions)
    add_field_options({"targets": submit}, RunOptions)
    submit.set_defaults(run=run_submit)


def run_submit(options: argparse.Namespace) -> int:
    """Run the subcommand; return the exit code, or raise FastFoldError."""
    chosen = from_options(SubmitOptions, options)
    if not (options.inputs or chosen.sequence or chosen.job):
        raise ConfigError("no input given: give files, --sequence, or --job with the id of a job")
    if chosen.out is None and not chosen.no_wait:
        raise ConfigError("give a folder for the results with --out, or submit only with --no-wait")
    from fastfold.products.serve.client import Client, RefusedError, read_templates

    client = Client(chosen.server, chosen.token, say=partial(print_line, quiet=chosen.quiet))
    settings = parse_settings(chosen.settings)
    templates = read_templates(chosen.templates)
    jobs, has_failed = [client.job(job) for job in chosen.job], False
    for submission in _inputs(options):
        try:
            jobs.append(
                client.submit(**submission, templates=templates, settings=settings, priority=chosen.priority)
            )
        except RefusedError as error:
            has_failed = True
            print_line(f"error: {submission.get('name') or 'the sequence'}: {error}")
    if chosen.out is None or chosen.no_wait:
        for job in jobs:
            print(f"{job['id']}\t{job['name']}")
        return int(has_failed)
    for job in jobs:
        has_failed |= not _fetch(client, job, chosen.out, quiet=chosen.quiet)
    return int(has_failed)


def _fetch(client: Client, job: Job, out: Path, *, quiet: bool) -> bool:
    """Wait for a job and download its files; return False if it was not folded."""
    from fastfold.data.targets import safe_stem

    show = partial(print_line, quiet=quiet)
    if job["state"] == "queued" and job["position"]:
        show(f"{job['name']}: {job['position']} jobs precede it")
    answered = client.wait(job["id"], show)
    if answered["state"] != "done":
        print_line(f"error: {answered['text']}")
        return False
    folder = out / f"{safe_stem(answered['name'])}_{answered['id'][:8]}"
    client.download(answered, folder)
    print(f"{answered['name']}: {answered['text']}; results in {folder}")
    return True


def _inputs(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the arguments of a submission for each target, or raise InputError."""
    submissions: list[dict[str, Any]] = [{"sequence": options.sequence}] if options.sequence else []
    if not options.inputs:
        return submissions
    from fastfold.data.queries.read import read_targets
    from fastfold.utils.text_files import read_text_bytes

    alignments = [path for path in options.inputs if path.name.removesuffix(".gz").endswith(".a3m")]
    for path in alignments:
        text = read_text_bytes(path, limit=1 << 30).decode("utf-8", "replace")
        submissions.append({"a3m": text, "name": path.name.removesuffix(".gz").removesuffix(".a3m")})
    others = [path for path in options.inputs if path not in alignments]
    targets, errors = read_targets(others, complex_=options.complex, allow_download=options.allow_download)
    if errors:
        raise errors[0]
    for target in targets:
        letters = [chain.letters or chain.sequence for chain in target.chains]
        check_sendable(target, letters)
        for warning in target.warnings:
            print_line(f"{target.record}: {warning}")
        submissions.append({"sequence": ":".join(letters), "name": target.record})
    return submissions


def check_sendable(target: Target, letters: Sequence[str]) -> None:
    """Refuse a target that the letters of its chains do not describe, or raise InputError."""
    from fastfold.data.targets import make_chains

    parts = {
        "alignments": target.alignments is not None,
        "templates": target.brings_templates or target.has_forced_templates,
        "seeds": bool(target.seeds),
        "names, numbers or ranges of residues": target.chains != make_chains(letters),
    }
    if lost := " and ".join(name for name, is_there in parts.items() if is_there):
        raise InputError(
            f"a server would fold this input without its {lost}, because it gets the sequences alone; fold it by "
            "`fastfold infer`, or send a FASTA or A3M file, with `templates` and `set`",
            path=target.source or None,
            record=target.record,
        )


def parse_settings(texts: Sequence[str]) -> dict[str, Any]:
    """Parse settings ``name=value``, JSON, a range of seeds such as ``0-4``, or text; or raise ConfigError."""
    from fastfold.inference.setting_values import parse_max_msa, parse_seeds
    from fastfold.utils.foreign_text import parse_json

    settings: dict[str, Any] = {}
    for text in texts:
        name, separator, value = text.partition("=")
        if not separator or not name.isidentifier():
            raise ConfigError(f"--set {text[:60]}: expected NAME=VALUE, for example num_recycles=6")
        if name == "seeds":
            settings[name] = list(parse_seeds(value))
        elif name == "max_msa":
            settings[name] = list(parse_max_msa(value))
        else:
            try:
                settings[name] = parse_json(value, "--set")
            except InputError:
                settings[name] = value
    return settings
