"""``fastfold mutate``: fold a wild type and its mutants from one alignment."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fastfold.data.msa.find import ChainMsas, target_rows
from fastfold.data.search.settings import SearchSources, select_rows
from fastfold.data.targets import Target, safe_stem
from fastfold.data.templates.options import TemplateOptions
from fastfold.data.templates.source import open_templates
from fastfold.errors import ConfigError, InputError
from fastfold.inference.alignment_search import AlignmentSearch
from fastfold.inference.models import check_takers, requested_networks, suitable
from fastfold.inference.prepare import check_request
from fastfold.inference.request import InferRequest
from fastfold.inference.runner import Summary, run
from fastfold.inference.target_templates import find_templates
from fastfold.products.mutate.mutations import Variant, mutant_targets, read_variants
from fastfold.products.mutate.table import write_results


def run_mutations(request: InferRequest, *, mutations: str = "all", positions: str | None = None) -> Summary:
    """Fold a target and its mutants, and compare them; the summary counts the wild type as well.

    All mutants have the wild type's alignments, with the mutant in the query's row, and its templates. Mutations and
    positions are those of :func:`~fastfold.products.mutate.mutations.read_variants`.

    Raises:
        FastFoldError: The run cannot start: not one target, a mutation does not fit it, or see
            :func:`fastfold.inference.runner.run`.
    """
    if request.config.initial_guess is not None:
        raise ConfigError(
            "an initial guess has the sequence of one target, and mutants have others; leave it out"
        )
    if request.config.pae is False:
        raise ConfigError(
            "differences of the aligned error need it; leave out `pae=no` and `skip_output=pae_json`"
        )
    targets: list[Target] = []
    variants: list[Variant] = []

    def read() -> tuple[list[Target], list[InputError]]:
        """Read and prepare the targets, on the first of several processes alone."""
        check_request(request.config, request.options)
        target = _wild_type(request)
        variants[:] = read_variants(target, mutations, positions)
        target, alignments = _prepared(target, request)
        targets[:] = [target, *mutant_targets(target, alignments, variants)]
        return list(targets), []

    plain = replace(
        request.options, sources=SearchSources(), msa_dir=None, templates=TemplateOptions(), name_prefix=None
    )
    summary = run(replace(request, inputs=read, options=plain))
    if targets and summary.predictions.get(targets[0].name):
        write_results(
            targets, variants, summary.predictions, request.output, has_picture=request.config.plots
        )
    return summary


def _wild_type(request: InferRequest) -> Target:
    targets, errors = request.read_targets()
    if errors:
        raise errors[0]
    if len(targets) != 1:
        names = ", ".join(target.name for target in targets[:3])
        raise InputError(
            f"expected one target to mutate, found {len(targets)}: {names}; give a file with one record, or "
            "`RunOptions.complex_`"
        )
    if targets[0].has_forced_templates:
        raise InputError(
            "its input forces a template, which mutants would not keep to; remove 'force' from the input",
            record=targets[0].name,
        )
    if request.options.name_prefix is None:
        return targets[0]
    return replace(targets[0], name=safe_stem(request.options.name_prefix))


def _prepared(target: Target, request: InferRequest) -> tuple[Target, Sequence[ChainMsas]]:
    """Return the wild type with alignments and templates, and the alignments of its whole chains."""
    options, msa_dir = request.options, request.options.msa_dir
    if options.sources.wanted:
        msa_dir = request.msa_dir
        _, errors = AlignmentSearch.of(request).run([target])
        if errors:
            raise errors[0]
    alignments, files = target_rows(msa_dir, target)
    templates, warnings = target.templates, list(target.warnings)
    if msa_dir is not None:
        for index, (chain, groups) in enumerate(zip(target.chains, alignments, strict=True)):
            has_rows = any(msa.sequences for group in groups for msa in group)
            if not has_rows and not target.has_alignment(index):
                warnings.append(f"no alignment of chain {chain.id} in {msa_dir}; only its sequence is used")
    if options.templates.wanted:
        networks = requested_networks(request.weights, options.num_models)
        check_takers(options.templates, networks)
        finder = open_templates(options.templates)
        rows = select_rows(alignments, options.pair_mode) if target.is_complex else alignments
        shown = find_templates(finder, target, rows, suitable(networks, target), msa_dir)
        if shown is not None and shown.number:
            templates = shown.features
        elif shown is not None:
            warnings += shown.lines
    wild_type = replace(
        target,
        alignments=tuple(alignments),
        alignment_files=files,
        templates=templates,
        warnings=tuple(warnings),
    )
    return wild_type, alignments
