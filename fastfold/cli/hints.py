"""Command-line parser that knows the options of other programs, and the nearest of its own."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

from fastfold.errors import ConfigError, suggest
from fastfold.utils.command_line.config_file import CONFIG, config_text, expand_config
from fastfold.utils.command_line.help_all import without_rare

OTHER_PROGRAMS = {
    # ColabFold
    "--af3-json": "leave it out: inputs of AlphaFold 3 are read, not written",
    "--amber": "use --relax best, or --relax all",
    "--calc-extra-ptm": "leave it out: scores of chains and interfaces are always computed",
    "--data": "use --weights; 'fastfold weights download' fetches them",
    "--debug-logging": "set FASTFOLD_DEBUG=1 in the environment",
    "--host-url": "use --msa-server URL",
    "--max-extra-seq": "use --max-msa CLUSTERS:EXTRA, with this number after the colon",
    "--max-seq": "use --max-msa CLUSTERS:EXTRA, with this number before the colon",
    "--max-template-hits": "use --max-templates N",
    "--model-order": "use --weights with the files in that order",
    "--model-type": "use --weights monomer, monomer_ptm or multimer",
    **dict.fromkeys(
        ("--compile-mode", "--disable-unified-memory", "--recompile-padding", "--use-pallas"),
        "leave it out: nothing is compiled for a length, and folds fit the memory",
    ),
    **dict.fromkeys(
        ("--relax-max-iterations", "--relax-max-outer-iterations", "--relax-stiffness", "--relax-tolerance"),
        "leave it out: a relaxation has AlphaFold's values",
    ),
    "--save-all": "use --save-representations and --save-recycles",
    "--save-single-representations": "use --save-representations",
    "--save-pair-representations": "use --save-representations",
    "--use-gpu-relax": "use --relax-platform CUDA",
    # AlphaFold
    "--benchmark": "leave it out: nothing is compiled before a fold",
    "--db-preset": "use --databases DIR, or --db with the files of the databases",
    "--fasta-paths": "give the files without an option, before all options",
    "--model-preset": "use --weights monomer, monomer_ptm or multimer",
    "--models-to-relax": "use --relax best, all or none",
    "--num-multimer-predictions-per-model": "use --num-seeds N",
    "--output-dir": "use --out DIR",
    "--pdb-seqres-database-path": "use --template-db FILE",
    "--use-precomputed-msas": "use --msa-dir DIR",
    "--uniref90-database-path": "use --databases DIR, or --db uniref90=FILE",
    "--mgnify-database-path": "use --databases DIR, or --db mgnify=FILE",
    "--bfd-database-path": "use --databases DIR, or --db bfd=FILE",
    "--small-bfd-database-path": "use --databases DIR, or --db small_bfd=FILE",
    "--uniref30-database-path": "use --databases DIR, or --db uniref30=FILE",
    "--uniprot-database-path": "use --databases DIR, or --db uniprot=FILE",
    # Boltz and Chai
    "--out-dir": "use --out DIR",
    "--recycling-steps": "use --num-recycles N",
    "--num-trunk-recycles": "use --num-recycles N",
    "--use-msa-server": "use --msa-server URL",
    "--use-msa-server-url": "use --msa-server URL",
}
"""Options of other programs for the same task, by the name with hyphens."""


OTHER_COMMANDS = {"fold": "infer", "predict": "infer", "batch": "infer"}
"""Commands of other programs for the same task."""


class CommandParser(argparse.ArgumentParser):
    """Parser whose errors show the usage of the command that was given, and say what to write instead."""

    has_full_help = False

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **{"formatter_class": argparse.RawDescriptionHelpFormatter} | settings)

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        """Parse as argparse does; refuse unknown options of a command with the usage of that command."""
        self._given = list(sys.argv[1:] if args is None else args)
        if CONFIG in self._option_string_actions:
            full = "--help-all" if "--help-all" in self._option_string_actions else "--help"
            try:
                self._given = expand_config(self._given, self._actions, help_command=f"{self.prog} {full}")
            except ConfigError as error:
                self.error(str(error))
        options, unknown = super().parse_known_args(self._given, namespace)
        if not unknown and getattr(options, "print_config", False) and CONFIG in self._option_string_actions:
            print(config_text(options, self._actions), end="", flush=True)
            self.exit()
        if unknown and self._subparsers is None:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return options, unknown

    def format_help(self) -> str:
        """Return the help, without rarely used options where ``--help-all`` lists them."""
        if self.has_full_help or "--help-all" not in self._option_string_actions:
            return super().format_help()
        with without_rare(self._actions):
            return super().format_help()

    def _print_message(self, message: str, file: Any = None) -> None:
        """Print help and versions without argparse's silence about a full disk or a closed pipe."""
        if file is sys.stdout:
            print(message, end="", flush=True)
        else:
            super()._print_message(message, file)

    def error(self, message: str) -> NoReturn:
        """Print usage, message and hints; exit with code 2."""
        arguments = getattr(self, "_given", [])
        if unknown := re.match(r"argument COMMAND: invalid choice: '([^']*)' \(choose from (.*)\)", message):
            commands = unknown[2].replace("'", "").split(", ")
            hint = suggest(unknown[1], commands, meant=OTHER_COMMANDS.get(unknown[1]), otherwise="")
            message = f"unknown command {unknown[1]!r}; {hint or 'the commands are ' + ', '.join(commands)}"
        hints = [] if self._subparsers is not None else option_hints(arguments, self._option_string_actions)
        if "required: --out" in message:
            hints.append("--out: the folder for the results, as in fastfold infer INPUT --out DIR")
        if "." in message.partition("argument --relax: invalid choice: ")[2].partition("(")[0]:
            hints.append("--relax: put the inputs first, or write --relax best before them")
        super().error("\n  ".join([message, *hints]))


def option_hints(arguments: Iterable[str], known: Iterable[str]) -> list[str]:
    """Return a line for each option of a command that is not ``known``, with what to write in its place.

    There are lines for options of other programs, and for those that are near a known one.
    """
    options, lines = list(known), []
    for name in dict.fromkeys(text.partition("=")[0] for text in arguments if text.startswith("--")):
        hyphens = name.replace("_", "-").lower()
        abbreviated = [option for option in options if option.startswith(name)]
        if name in options or (abbreviated and (len(abbreviated) == 1 or hyphens not in OTHER_PROGRAMS)):
            continue
        translated = None if hyphens in options else OTHER_PROGRAMS.get(hyphens)
        if hint := translated or suggest(hyphens, options, otherwise=""):
            lines.append(f"{name}: {hint}")
    return lines
