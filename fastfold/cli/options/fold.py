"""Options of every command that folds targets, and their conversion to configurations."""

from __future__ import annotations

import argparse
import re
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from fastfold.cli.options.alignment_sources import (
    add_source_options,
    add_worker_option,
    alignment_engines,
    find_databases_of,
    positive_number,
    wants_server_templates,
)
from fastfold.data.templates.options import MAX_TEMPLATES, TemplateOptions
from fastfold.errors import ConfigError
from fastfold.inference.config import (
    PRECISIONS,
    InferConfig,
    OutputFormat,
    RankBy,
    RelaxWhich,
    check_seeds,
    parse_max_msa,
    parse_seeds,
)
from fastfold.inference.ensemble.settings import SampleMethod, Sampling
from fastfold.inference.relax.config import PLATFORMS

if TYPE_CHECKING:
    from fastfold.inference.target_runner import RunOptions

_FASTA = re.compile(r"\.(fa|faa|fas|fasta)(\.gz)?$")


def add_fold_options(parser: Any, *, structures: bool = True) -> None:
    """Add the options of every command that folds targets: folders, weights, searches, sampling, output and machine.

    Args:
        parser: Parser of the command.
        structures: Add the options about predicted structures too.
    """
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder for the results")
    parser.add_argument(
        "--weights",
        nargs="+",
        action="extend",
        type=Path,
        metavar="FILE",
        default=[],
        help="weights files, or monomer, monomer_ptm, multimer (default: mini)",
    )
    parser.add_argument(
        "--num-models",
        type=positive_number,
        metavar="N",
        help="fold by the first N networks of --weights only (default: all)",
    )
    parser.add_argument(
        "--msa-dir", type=Path, metavar="DIR", help="folder of alignments, found by record id"
    )
    add_source_options(parser)
    _add_templates(parser.add_argument_group("templates"))
    parser.add_argument("--complex", action="store_true", help="all records of a file are one complex")
    if structures:
        parser.add_argument(
            "--reference",
            type=Path,
            metavar="PATH",
            help="experimental structure to compare with, or a folder of files named like the targets",
        )
    sampling, output = parser.add_argument_group("sampling"), parser.add_argument_group("output")
    _add_sampling(sampling)
    if structures:
        _add_restraints(sampling)
        _add_structure_output(output)
    else:
        parser.set_defaults(**_NO_STRUCTURES)
    _add_output(output)
    _add_machine(parser.add_argument_group("machine"))


def _add_templates(group: Any) -> None:
    group.add_argument(
        "--templates",
        "--custom-template-path",
        nargs="*",
        action="extend",
        type=Path,
        metavar="PATH",
        help="structures to use as templates: mmCIF or PDB files (.gz too), or folders of them; without any, the MSA "
        "server's template hits (needs hhsearch)",
    )
    group.add_argument(
        "--cross-chain-templates",
        nargs="+",
        action="extend",
        type=Path,
        metavar="FILE",
        default=[],
        help="structures of whole complexes as templates, with the distances between their chains",
    )
    group.add_argument(
        "--superpose-chains",
        nargs="+",
        action="extend",
        type=Path,
        metavar="FILE",
        default=[],
        help="structures of single chains that replace those of --cross-chain-templates, superposed on them",
    )
    group.add_argument(
        "--keep-clashes",
        action="store_true",
        help="keep clashing residues of --cross-chain-templates, which are left free by default",
    )
    group.add_argument(
        "--template-alignment",
        nargs="+",
        action="extend",
        type=Path,
        metavar="FILE",
        default=[],
        help="A3M or FASTA: a chain, then rows called <file>_<chain> that say how --templates are aligned with it",
    )
    group.add_argument(
        "--template-db",
        type=Path,
        metavar="FILE",
        help="search this for templates: pdb_seqres.txt, or an HH-suite database (…/pdb70; needs hhsearch)",
    )
    group.add_argument(
        "--template-mmcif-dir",
        "--template_mmcif_dir",
        "--local-pdb-path",
        type=Path,
        metavar="DIR",
        help="folder of the PDB's mmCIF files, for --template-db and for hits among the alignments",
    )
    group.add_argument(
        "--max-template-date",
        "--max_template_date",
        type=_date,
        metavar="DATE",
        help="use no hits released after this date, YYYY-MM-DD (default: any)",
    )
    group.add_argument(
        "--max-templates",
        type=_count,
        metavar="N",
        help=f"use at most N templates of a chain (default {MAX_TEMPLATES}, as many as the networks take)",
    )
    group.add_argument(
        "--obsolete-pdbs",
        "--obsolete_pdbs_path",
        type=Path,
        metavar="FILE",
        help="the PDB's list of obsolete entries (default: obsolete.dat in the folder of mmCIF files or next to it)",
    )


def _template_options(options: argparse.Namespace) -> TemplateOptions:
    """Return the sources of templates that the options name."""
    server = wants_server_templates(options)
    if options.max_template_date is not None and options.template_mmcif_dir is None and not server:
        raise ConfigError(
            "--max-template-date limits hits, which need --template-mmcif-dir; structures of --templates are always "
            "used"
        )
    return TemplateOptions(
        server=server,
        is_optional=getattr(options, "has_optional_templates", False),
        structures=tuple(options.templates or ()),
        alignments=tuple(options.template_alignment),
        complexes=tuple(options.cross_chain_templates),
        chains=tuple(options.superpose_chains),
        keep_clashes=options.keep_clashes,
        database=options.template_db,
        mmcif_dir=options.template_mmcif_dir,
        obsolete=options.obsolete_pdbs,
        max_date=options.max_template_date,
        max_templates=MAX_TEMPLATES if options.max_templates is None else options.max_templates,
    )


def _add_sampling(group: Any) -> None:
    group.add_argument(
        "--num-recycles",
        "--num-recycle",
        type=_count,
        metavar="N",
        help="passes after the first (monomers 3, multimers up to 20)",
    )
    group.add_argument(
        "--recycle-tolerance",
        "--recycle-early-stop-tolerance",
        type=float,
        metavar="Å",
        help="stop recycling when CA distances change less than this (multimers 0.5, monomers 0: never)",
    )
    group.add_argument(
        "--seed", "--random-seed", type=_count, metavar="N", help="seed of everything random (default 0)"
    )
    group.add_argument(
        "--num-seeds", type=_count, metavar="N", help="fold with N seeds, from --seed on (default 1)"
    )
    group.add_argument("--seeds", metavar="LIST", help="fold with these seeds: 0-4, or 1,3,7")
    group.add_argument(
        "--max-msa",
        metavar="CLUSTERS:EXTRA",
        help="alignment rows that the network sees, 512:1024 for example (default: the network's own)",
    )
    group.add_argument(
        "--dropout",
        "--use-dropout",
        action="store_true",
        help="keep dropout on, for more diverse predictions by many seeds",
    )
    group.add_argument(
        "--sample",
        choices=get_args(SampleMethod),
        metavar="METHOD",
        help="predict samples of each target: columns (mask random alignment columns), clusters (of alignment rows, "
        "needs scikit-learn), depth (random alignment rows) or dropout; see fastfold ensemble",
    )
    group.add_argument(
        "--samples",
        type=positive_number,
        metavar="N",
        help="samples per network and seed (default: 10; one of each depth; all clusters)",
    )
    group.add_argument(
        "--sample-fraction",
        type=float,
        metavar="X",
        help="share of the columns that --sample columns masks (default 0.15)",
    )
    group.add_argument(
        "--sample-depths",
        metavar="LIST",
        help="numbers of rows for --sample depth (default 16,32,64,128,256,512,1024,5120)",
    )
    group.add_argument(
        "--num-ensemble",
        type=_count,
        metavar="N",
        help="samples of the alignment averaged in each pass (default 1)",
    )
    group.add_argument(
        "--initial-guess",
        type=Path,
        metavar="FILE",
        help="start from this structure of the target (PDB or mmCIF), as if it were recycled",
    )
    group.add_argument("--cyclic", action="store_true", help="each chain is a ring (cyclic peptides)")
    group.add_argument(
        "--precision",
        choices=PRECISIONS,
        default=InferConfig.precision,
        help="precision of the trunk: bf16 halves the memory and is faster on GPUs; bf16-products (with AMX or "
        "AVX512_BF16) and int8 (with VNNI; products with weights in 8 bits) are faster on CPUs; auto: best for the "
        "device (default: auto on GPUs, fp32 on CPUs)",
    )


def _add_restraints(group: Any) -> None:
    group.add_argument(
        "--stop-at-score",
        type=float,
        metavar="X",
        help="make no more predictions of a target after one of this mean pLDDT (complexes: 100 times 0.8 ipTM + 0.2 "
        "pTM)",
    )
    group.add_argument(
        "--restraints",
        type=Path,
        metavar="FILE",
        help="distances that the structure should have: CSV, Chai's CSV or Boltz' YAML",
    )
    group.add_argument(
        "--restraint-steps",
        type=int,
        default=InferConfig.restraint_steps,
        metavar="N",
        help=f"largest number of gradient steps towards the restraints (default {InferConfig.restraint_steps})",
    )


def _add_structure_output(group: Any) -> None:
    group.add_argument(
        "--rank",
        choices=get_args(RankBy),
        default=InferConfig.rank,
        help="rank by mean pLDDT, pTM, ipTM, or 0.8 ipTM + 0.2 pTM (default: the last for complexes, else pLDDT)",
    )
    group.add_argument(
        "--pae",
        choices=("auto", "yes", "no"),
        default="auto",
        help="write the predicted aligned error of all pairs of residues (default: of targets up to 5,000 residues; "
        "pTM and ipTM are computed anyway)",
    )
    group.add_argument(
        "--output-format",
        choices=get_args(OutputFormat),
        default="fastfold",
        help="colabfold: name files like ColabFold, with its scores files, and make a folder per target like "
        "AlphaFold, for programs that read these (default fastfold)",
    )
    group.add_argument("--no-plots", action="store_true", help="write no plots")
    group.add_argument(
        "--skip-output", metavar="LIST", help="leave out kinds of files, joined by commas: plots, pae_json"
    )
    group.add_argument(
        "--zip",
        dest="zip_results",
        action="store_true",
        help="pack the files of each target into <id>.result.zip, too",
    )
    group.add_argument(
        "--num-relax",
        type=_count,
        metavar="N",
        help="relax the N best predictions of each target (default: as --relax says)",
    )
    group.add_argument(
        "--relax",
        nargs="?",
        choices=get_args(RelaxWhich),
        const="best",
        default=InferConfig.relax,
        help="relax the best prediction of each target, or all, in the Amber force field (default none)",
    )
    group.add_argument(
        "--relax-platform",
        choices=("auto", *PLATFORMS),
        default=InferConfig.relax_platform,
        help="OpenMM's platform for relaxation (default: the fastest that works)",
    )
    group.add_argument(
        "--save-representations",
        action="store_true",
        help="write single, pair and structure module's activations",
    )
    group.add_argument(
        "--save-distogram", action="store_true", help="write the probabilities of distances of all pairs"
    )
    group.add_argument("--save-recycles", action="store_true", help="write the structure after each pass")


_NO_STRUCTURES = {
    "reference": None,
    "stop_at_score": None,
    "restraints": None,
    "restraint_steps": InferConfig.restraint_steps,
    "rank": InferConfig.rank,
    "pae": "auto",
    "output_format": "fastfold",
    "no_plots": True,
    "skip_output": None,
    "zip_results": False,
    "num_relax": None,
    "relax": InferConfig.relax,
    "relax_platform": InferConfig.relax_platform,
    "save_representations": False,
    "save_distogram": False,
    "save_recycles": False,
}
"""Values of the options about structures for commands without them."""


def _add_output(group: Any) -> None:
    group.add_argument(
        "--jobname-prefix",
        metavar="TEXT",
        help="name targets TEXT_0, TEXT_1 and so on (default: by their records)",
    )
    group.add_argument(
        "--overwrite",
        "--overwrite-existing-results",
        action="store_true",
        help="fold finished targets again, and remove their other predictions in DIR",
    )
    group.add_argument(
        "--skip-bad-weights", action="store_true", help="leave out weights files that cannot be used"
    )
    group.add_argument("--quiet", action="store_true", help="print only warnings and errors")


def _add_machine(group: Any) -> None:
    group.add_argument(
        "--device",
        type=_device,
        default=InferConfig.device,
        metavar="DEVICE",
        help="auto, cpu, cuda, or cuda:1 for the second GPU (default: a GPU where there is one)",
    )
    add_memory_options(group)
    group.add_argument(
        "--offload-dir",
        type=Path,
        metavar="DIR",
        help="folder on a fast disk for tensors beyond --host-memory (default: none)",
    )
    group.add_argument(
        "--cuda-graphs",
        action="store_true",
        help="on a GPU, record one pass as a CUDA graph and replay it for the others, for short targets whose passes "
        "wait for the host",
    )
    group.add_argument(
        "--batch",
        default="1",
        metavar="N",
        help="fold up to N targets of similar length in one pass, for short targets; auto: where it is faster "
        "(default 1)",
    )
    group.add_argument(
        "--checkpoint-after",
        type=float,
        default=InferConfig.checkpoint_after,
        metavar="SECONDS",
        help="save the state after each pass that takes at least this long, so that a killed fold can continue "
        "(default 180)",
    )
    add_worker_option(group)


def add_memory_options(group: Any) -> None:
    """Add the memory of a device and of its host, for folds and designs."""
    group.add_argument(
        "--memory-budget",
        metavar="SIZE",
        help="memory that a fold or a gradient may take, 24GiB for example (default: free memory of the device); the "
        "sizes of all blocks and the recomputation follow from it",
    )
    group.add_argument(
        "--host-memory",
        metavar="SIZE",
        help="memory of this machine for tensors offloaded from a GPU (default: most of the free memory; 0 for none)",
    )


def _seeds(options: argparse.Namespace) -> tuple[int, ...]:
    """Return the seeds, from a list or from the first seed and their number."""
    if options.seeds is not None:
        if options.seed is not None or options.num_seeds is not None:
            raise ConfigError("--seeds names all seeds; leave out --seed and --num-seeds")
        return parse_seeds(options.seeds)
    first = options.seed or 0
    number = 1 if options.num_seeds is None else options.num_seeds
    return check_seeds(range(first, first + number))


def _count(text: str) -> int:
    """Parse a whole number of at least zero; an argument type."""
    if not (text.isascii() and text.isdigit() and len(text) <= 10 and int(text) < 2**31):
        raise argparse.ArgumentTypeError(f"{text[:20]!r} is not a whole number from 0 to 2147483647")
    return int(text)


def _date(text: str) -> date:
    """Parse a date; an argument type."""
    try:
        if not re.fullmatch(r"\d{4}-\d\d-\d\d", text, re.ASCII):
            raise ValueError
        return date.fromisoformat(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text[:20]!r} is not a date such as 2021-11-01") from None


def _device(text: str) -> str:
    """Check the name of a device; an argument type."""
    if re.fullmatch(r"auto|cpu|cuda(:\d{1,3})?", text, re.ASCII) is None:
        raise argparse.ArgumentTypeError(f"{text[:20]!r} is not a device: auto, cpu, cuda, cuda:1")
    return text


def infer_config(options: argparse.Namespace) -> InferConfig:
    """Return the folding configuration from the options of :func:`add_fold_options`.

    Raises:
        ConfigError: An option is invalid; names it.
    """
    skipped = _skipped_outputs(options)
    return InferConfig(
        num_recycles=options.num_recycles,
        seeds=_seeds(options),
        precision=options.precision,
        plots=not options.no_plots and "plots" not in skipped,
        pae=False if "pae_json" in skipped else {"auto": None, "yes": True, "no": False}[options.pae],
        device=options.device,
        parallel=options.parallel,
        memory_budget=options.memory_budget or None,
        host_memory=options.host_memory,
        offload_dir=options.offload_dir,
        checkpoint_after=options.checkpoint_after,
        max_msa=None if options.max_msa is None else parse_max_msa(options.max_msa),
        cuda_graphs=options.cuda_graphs,
        dropout=options.dropout,
        sample=_sampling(options),
        recycle_tolerance=options.recycle_tolerance,
        stop_at_score=options.stop_at_score,
        num_ensemble=options.num_ensemble,
        rank=options.rank,
        save_representations=options.save_representations,
        save_recycles=options.save_recycles,
        save_distogram=options.save_distogram,
        initial_guess=options.initial_guess,
        restraints=options.restraints,
        restraint_steps=options.restraint_steps,
        cyclic=options.cyclic,
        **_relaxation(options),
        relax_platform=options.relax_platform,
    )


def _sampling(options: argparse.Namespace) -> Sampling | None:
    """Return the settings of samples; None without ``--sample``."""
    given = {
        "number": options.samples,
        "fraction": options.sample_fraction,
        "depths": None if options.sample_depths is None else _depths(options.sample_depths),
    }
    if options.sample is None:
        used = next((name for name, value in given.items() if value is not None), None)
        if used is not None:
            option = {"number": "--samples", "fraction": "--sample-fraction", "depths": "--sample-depths"}[
                used
            ]
            raise ConfigError(f"{option} needs a method of sampling; give one with --sample")
        return None
    for name, method in (("fraction", "columns"), ("depths", "depth")):
        if given[name] is not None and options.sample != method:
            raise ConfigError(f"--sample-{name} is for --sample {method}; leave it out")
    return Sampling(options.sample, **{name: value for name, value in given.items() if value is not None})


def _depths(text: str) -> tuple[int, ...]:
    """Parse numbers of rows joined by commas."""
    if re.fullmatch(r"\d{1,7}(,\d{1,7})*", text, re.ASCII) is None:
        raise ConfigError(f"--sample-depths: expected numbers of rows such as 16,64,256, found {text[:40]!r}")
    return tuple(map(int, text.split(",")))


def _skipped_outputs(options: argparse.Namespace) -> set[str]:
    """Return the kinds of files that are left out."""
    skipped = {name.strip() for name in (options.skip_output or "").split(",")} - {""}
    if "msa" in skipped:
        raise ConfigError(
            "--skip-output msa: alignments stay in the folder alignments, by which a run continues; remove it "
            "afterwards"
        )
    if unknown := sorted(skipped - {"plots", "pae_json"}):
        raise ConfigError(f"--skip-output: expected plots or pae_json, found {unknown[0]!r}")
    if "pae_json" in skipped and options.pae == "yes":
        raise ConfigError("--skip-output pae_json and --pae yes exclude each other; leave out one of them")
    return skipped


def _relaxation(options: argparse.Namespace) -> dict[str, Any]:
    """Return which predictions are relaxed."""
    if options.num_relax is None:
        return {"relax": options.relax}
    if options.relax != InferConfig.relax:
        raise ConfigError("--relax and --num-relax both choose predictions to relax; give one of them")
    return {"relax": "best", "num_relax": options.num_relax} if options.num_relax else {}


def run_options(options: argparse.Namespace) -> RunOptions:
    """Return the options of a run other than the model's, from those of :func:`add_fold_options`.

    Raises:
        FastFoldError: A database cannot be used, or options contradict each other.
    """
    from fastfold.inference.folding.batch import check_batch
    from fastfold.inference.target_runner import RunOptions

    return RunOptions(
        msa_dir=options.msa_dir,
        pair_mode=options.pair_mode or RunOptions.pair_mode,
        engines=alignment_engines(options),
        templates=_template_options(options),
        complex_=options.complex,
        num_models=options.num_models,
        name_prefix=options.jobname_prefix,
        zip_results=options.zip_results,
        reference=options.reference,
        skip_bad_weights=options.skip_bad_weights,
        overwrite=options.overwrite,
        batch=check_batch(options.batch),
        sort=options.sort,
        quiet=options.quiet,
        output_format=options.output_format,
    )


def complete_options(options: argparse.Namespace) -> None:
    """Make FASTA files after ``--templates`` inputs, because templates are structures, and find ``--databases``.

    Raises:
        ConfigError: A FASTA file follows ``--weights``, or options contradict each other.
        InputError: The folder of databases has none.
    """
    find_databases_of(options)
    if options.templates:
        options.inputs += [path for path in options.templates if _FASTA.search(path.name)]
        options.templates = [path for path in options.templates if not _FASTA.search(path.name)]
    misplaced = [path for path in options.weights if _FASTA.search(path.name)]
    if misplaced:
        raise ConfigError(
            f"{misplaced[0]}: every name after --weights is a weights file; put FASTA files first"
        )
