"""The Python API: :func:`load_model`, :func:`predict` and their results."""

from __future__ import annotations

import html
import itertools
import logging
import os
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fastfold.data.msa.find import ChainMsas, load_alignments, read_msa
from fastfold.data.msa.keyed import pair_by_keys
from fastfold.data.msa.msa import Msa, check_query, parse_a3m
from fastfold.data.targets import Target, target_from_sequence
from fastfold.data.templates.options import TemplateOptions
from fastfold.errors import ConfigError, InputError, suggest
from fastfold.evoformer.model import AlphaFold
from fastfold.evoformer.precision import choose_precision, set_precision
from fastfold.evoformer.weights.checkpoint import load_model as load_weights
from fastfold.evoformer.weights.published import one_weights_file, weights_files
from fastfold.inference.config import FoldSettings, InferConfig, ManyFoldSettings
from fastfold.inference.embedding.compute import Embedding
from fastfold.inference.embedding.config import EmbedConfig
from fastfold.inference.folding.batch import Answer, BatchFolder, Request, group_by_length
from fastfold.inference.folding.predictor import TargetPredictor
from fastfold.inference.folding.schedule import Awaited, Schedule
from fastfold.inference.models import check_settings, network_name, refuse_without_atoms
from fastfold.inference.output.prediction import Prediction
from fastfold.inference.output.writer import listed_scores, ranking_scores, stops
from fastfold.inference.planning.cuda_graph import KeptGraph
from fastfold.inference.sampling.samples import draw_samples
from fastfold.inference.setting_values import BatchSize, check_batch, check_seeds
from fastfold.inference.target_templates import TargetTemplates, read_templates
from fastfold.utils.device import choose_device, own_settings
from fastfold.utils.option_fields import check_kind

if TYPE_CHECKING:
    from typing_extensions import Unpack

_log = logging.getLogger(__name__)

AnyMsa = str | Path | Msa  #: A3M or Stockholm file, folder of alignments, or parsed alignment
_NOT_FOR_PYTHON = {
    "plots": "Prediction.save(folder, plots=True) draws them",
    "checkpoint_after": "fastfold infer keeps the state of folds in its folder",
    "parallel": "only fastfold infer folds on several devices",
    "seeds": "predict takes seed=, predict_many seeds=",
    "msas": "predict takes msa=, predict_many msas=",
    "models": "predict takes one model, predict_many models=",
    "precision": "load_model(path, precision=...) sets it",
    "relax": "fastfold.inference.relax.relax_prediction(prediction) relaxes one",
    "num_relax": "fastfold.inference.relax.relax_prediction(prediction) relaxes one",
    "relax_platform": "fastfold.inference.relax.relax_prediction(prediction, RelaxConfig(platform=...)) takes it",
}
"""Settings that a function here does not take, each with its replacement."""
Templates = str | Path | Mapping[str, np.ndarray] | Sequence[str | Path] | TemplateOptions
"""Templates of a chain: structure files (mmCIF or PDB, also ``.gz``) or folders of them, raw features as in
:func:`fastfold.data.features.raw.template_features`, or options with the structures of whole complexes."""


class Predictions(dict[str, list[Prediction]]):
    """Predictions by the name of their sequence, best first."""

    def table(self) -> list[dict[str, Any]]:
        """Return a row per prediction: ``name``, ``rank`` and scores; ``pandas.DataFrame`` takes the rows."""
        return [
            {"name": name, "rank": rank, **listed_scores(prediction)}
            for name, predictions in self.items()
            for rank, prediction in enumerate(predictions, 1)
        ]

    def _repr_html_(self) -> str:
        rows = self.table()
        if not rows:
            return "<p>no predictions</p>"
        head = "".join(f"<th>{html.escape(name)}</th>" for name in rows[0])
        body = "".join(
            f"<tr>{''.join(f'<td>{html.escape(_shown(value))}</td>' for value in row.values())}</tr>"
            for row in rows
        )
        return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _shown(value: Any) -> str:
    return "" if value is None else f"{value:.3g}" if isinstance(value, float) else str(value)


def load_model(
    path: str | Path, *, device: str | torch.device = "auto", precision: str = "fp32"
) -> AlphaFold:
    """Load a network.

    Args:
        path: Official ``params_model_*.npz``, OpenFold ``.pt``, FastFold ``.safetensors``; ``mini``, the small network
            that ships with the package; or the name of a downloaded network, for example ``model_1_ptm``.
        device: ``auto`` (CUDA if available), ``cpu``, ``cuda``, ``cuda:1`` or a :class:`torch.device`.
        precision: Precision of the trunk: ``fp32``, ``bf16``, ``int8`` or ``bf16-products`` (see
            :data:`fastfold.evoformer.precision.Precision`), or ``auto`` for the device's default.

    Returns:
        Network in evaluation mode; its ``name`` is the file's name without ``params_`` and suffix. Several threads may
        call it at the same time.

    Raises:
        WeightsError: The file is missing, damaged, unsafe, or not of this network family.
        ConfigError: The device is not available, or does not support this precision.

    Example:
        >>> import fastfold
        >>> fastfold.load_model("mini", device="cpu").name
        'mini'
    """
    target = choose_device(str(device))
    _is_path(path)
    file = one_weights_file(path)
    with own_settings(target):
        model = set_precision(load_weights(file), choose_precision(precision, target)[0])
        model.name = network_name(file)
        return model.to(target)


def predict(
    sequence: str,
    model: AlphaFold | str | Path,
    *,
    msa: AnyMsa | Sequence[AnyMsa | None] | None = None,
    templates: Templates | Sequence[Templates | None] | None = None,
    num_recycles: int | None = None,
    seed: int = 0,
    name: str = "query",
    memory_budget: str | int | None = None,
    pae: bool | None = None,
    device: str | torch.device | None = None,
    **settings: Unpack[FoldSettings],
) -> Prediction:
    """Fold a sequence.

    Args:
        sequence: One letter per residue; ``:`` joins the chains of a complex, which needs a multimer network.
        model: Network from :func:`load_model`, or a path or name. Of several networks (``multimer``), the best
            prediction is returned.
        msa: Alignment whose first row is the sequence: an A3M or Stockholm file, an :class:`Msa`, or rows of an A3M
            file as text or as an array of letters. For a complex, a list of one per chain, with None for none; copies
            of a chain share one. Or a folder of alignments, for example of ``fastfold.search``, with some under
            ``name``. Without it, the network sees only the sequence.
        templates: Structure files or folders of them, which are aligned with each chain by sequence; or raw features
            (``template_aatype`` and others). For a complex, files for all chains, a list of one of these per chain,
            with None for none, or ``TemplateOptions(complexes=(file, ...))`` for templates that span the chains.
        num_recycles: Passes after the first; None for the network's default.
        seed: Random seed; equal seeds give equal predictions.
        name: Name for files and scores.
        memory_budget: Memory of the fold, for example ``24GiB`` or a number of bytes; None for the device's free
            memory. It determines the sizes of all blocks.
        pae: Keep the aligned errors of all pairs; None for targets of up to 5,000 residues.
        device: Device of a network given by a path or name; None for CUDA if available.
        settings: Further fields of :class:`~fastfold.inference.config.InferConfig`, those of
            :class:`~fastfold.inference.config.FoldSettings`.

    Returns:
        The prediction; :meth:`~fastfold.inference.output.prediction.Prediction.save` writes it.

    Raises:
        InputError: The sequence, an alignment or a template is invalid, or the target exceeds the memory.
        ConfigError: A complex with a monomer network, or an argument of the wrong type or value.
        OutputError: The network's results are not finite.

    Example:
        >>> import fastfold
        >>> prediction = fastfold.predict("MTYKLILNGKTLKGETTTEA", "mini", num_recycles=0)
        >>> prediction.atom_positions.shape, prediction.plddt.shape
        ((20, 37, 3), (20,))
        >>> prediction.save("results")["pdb"].name
        'query_mini_seed_0.pdb'
    """
    if isinstance(seed, (list, tuple, range)):
        raise ConfigError("seed is one number; fastfold.predict_many takes several seeds")
    check_kind("sequence", sequence, str, "text")
    _refuse_others(settings)
    (predictions,) = predict_many(
        {name: sequence},
        model,
        seeds=seed,
        msas={name: msa},
        templates={name: templates},
        num_recycles=num_recycles,
        memory_budget=memory_budget,
        pae=pae,
        device=device,
        **settings,
    ).values()
    return predictions[0]


def predict_many(
    sequences: Mapping[str, str] | Sequence[str],
    models: AlphaFold | str | Path | Sequence[AlphaFold | str | Path],
    *,
    seeds: int | Sequence[int] = 0,
    msas: Mapping[str, AnyMsa | Sequence[AnyMsa | None] | None] | None = None,
    templates: Mapping[str, Templates | Sequence[Templates | None] | None] | None = None,
    device: str | torch.device | None = None,
    batch: BatchSize = 1,
    **settings: Unpack[ManyFoldSettings],
) -> Predictions:
    """Fold several sequences by every network with every seed; errors are those of :func:`predict`.

    Args:
        sequences: Sequences by name, or a list of sequences, which are named ``query_1``, ``query_2`` and so on.
        models: One or several networks, or paths or names.
        seeds: One or several random seeds.
        msas: Alignments by name; see :func:`predict`.
        templates: Templates by name; see :func:`predict`.
        device: See :func:`predict`.
        batch: Largest number of sequences of similar length in a pass; ``auto`` where it is faster. The results are
            those of single folds, up to rounding.
        settings: Further fields of :class:`~fastfold.inference.config.InferConfig`, for example ``num_recycles``,
            ``rank``, ``stop_at_score`` and ``sample``.

    Returns:
        Predictions by name, the best first; ``table()`` lists their scores.

    Example:
        >>> import fastfold
        >>> sequences = {"first": "MTYKLILNGK", "second": "GSHMKRAL"}
        >>> predictions = fastfold.predict_many(sequences, "mini", seeds=(0, 1), num_recycles=0)
        >>> [(row["name"], row["rank"], row["length"]) for row in predictions.table()]
        [('first', 1, 10), ('first', 2, 10), ('second', 1, 8), ('second', 2, 8)]
    """
    config, batch = _config(seeds, settings), check_batch(batch)
    if config.embed is not None:
        raise ConfigError("embed is not a setting here: fastfold.embed computes representations")
    named = _named(sequences)
    targets = {name: target_from_sequence(sequence, name) for name, sequence in named.items()}
    _, errors = refuse_without_atoms(list(targets.values()))
    if errors:
        raise errors[0]
    alignments = {name: _alignments(target, (msas or {}).get(name)) for name, target in targets.items()}
    for what, of_names in (("msas", msas), ("templates", templates)):
        if unknown := sorted(set(of_names or ()) - set(targets)):
            raise ConfigError(f"{what} has {unknown[0]!r}, which is not a name of a sequence")
    has_several = isinstance(models, Iterable) and not isinstance(models, str)
    sources: list[Any] = list(models) if has_several else [models]  # type: ignore[arg-type]
    if not sources:
        raise ConfigError("models is empty; give at least one network")
    networks = [
        _network(each, device)
        for one in sources
        for each in ([one] if isinstance(one, AlphaFold) else weights_files(_is_path(one)))
    ]
    check_settings(config, [network.config for network in networks])
    folded = Predictions({name: [] for name in targets})
    graph, folder = KeptGraph(is_required=bool(config.cuda_graphs)), BatchFolder(_log.warning)
    where = next(networks[0].parameters()).device
    names = list(targets)

    def predictor_of(name: str) -> TargetPredictor:
        target, rows = targets[name], alignments[name]
        return TargetPredictor(
            *(target, networks, rows, config),
            device=where,
            templates=_templates(target, rows, (templates or {}).get(name)),
            say=_log.warning,
            graph=graph,
        )

    for group in group_by_length([one.num_residues for one in targets.values()], batch, where):
        predictors = {names[index]: predictor_of(names[index]) for index in group}
        schedule: Schedule[str, list[Prediction]] = Schedule(folder, None)
        started = [(name, _predictions(predictor, networks)) for name, predictor in predictors.items()]
        for name, predictions in schedule.fold(started):
            if isinstance(predictions, Exception):
                raise predictions
            numbers = ranking_scores(config.rank, list(map(listed_scores, predictions)))
            order = sorted(range(len(numbers)), key=lambda i: -numbers[i])
            folded[name] = [predictions[i] for i in order]
    return folded


def _templates(
    target: Target, alignments: Sequence[ChainMsas], templates: Templates | Sequence[Templates | None] | None
) -> TargetTemplates | None:
    shown = read_templates(target, alignments, templates)
    for line in () if shown is None else shown.lines:
        _log.log(logging.INFO if shown and shown.number else logging.WARNING, "%s: %s", target.name, line)
    return shown


def _predictions(
    predictor: TargetPredictor, networks: Sequence[AlphaFold]
) -> Generator[Awaited, Answer, list[Prediction]]:
    target, config = predictor.target, predictor.config
    drawn = [
        (seed, sample)
        for seed in config.seeds
        for sample in draw_samples(config.sample, target, predictor.alignments, seed)
    ]
    predictions: list[Prediction] = []
    for model, (seed, sample) in itertools.product(networks, drawn):
        answer = yield Request(predictor, model, seed, sample=sample)
        predictions.append(answer.prediction)
        if stops(config, listed_scores(predictions[-1]), target):
            break
    return predictions


def embed(
    sequence: str,
    model: AlphaFold | str | Path,
    *,
    msa: AnyMsa | Sequence[AnyMsa | None] | None = None,
    templates: Templates | Sequence[Templates | None] | None = None,
    seed: int = 0,
    name: str = "query",
    layer: int | None = None,
    arrays: Sequence[str] | None = None,
    mean: bool = False,
    device: str | torch.device | None = None,
    **settings: Unpack[ManyFoldSettings],
) -> Embedding:
    """Compute representations of a sequence, without heads or structure module where they are not needed.

    Other arguments and errors are those of :func:`predict`. The last pass ends after the Evoformer block ``layer``,
    from 1; None for all. ``arrays`` are names of :data:`fastfold.inference.embedding.config.ARRAYS`, by default
    ``single`` and ``pair``, after a block ``msa_row`` and ``pair``; with ``mean``, their averages over the residues or
    pairs.

    Example:
        >>> import fastfold
        >>> embedding = fastfold.embed("MTYKLILNGK", "mini")
        >>> embedding.arrays["single"].shape[0], embedding.arrays["pair"].shape[:2]
        (10, (10, 10))
    """
    chosen = EmbedConfig(layer=layer, arrays=None if arrays is None else tuple(arrays), mean=mean)
    config = _config(seed, {**settings, "embed": chosen})
    if config.sample is not None:
        raise ConfigError("sample is for fastfold.predict_many and fastfold embed; leave it out")
    network = _network(model, device)
    check_settings(config, [network.config])
    chosen.check_network(network.name, len(network.evoformer.blocks))
    target = target_from_sequence(sequence, name)
    alignments = _alignments(target, msa)
    predictor = TargetPredictor(
        target,
        [network],
        alignments,
        config,
        device=next(network.parameters()).device,
        templates=read_templates(target, alignments, templates),
        say=_log.warning,
    )
    return predictor.embed(network, config.seeds[0])


def _config(seeds: int | Sequence[int], settings: Mapping[str, Any]) -> InferConfig:
    known = {field.name for field in fields(InferConfig)} - set(_NOT_FOR_PYTHON) - {"device"}
    _refuse_others(settings)
    for name in settings:
        if name not in known:
            raise ConfigError(f"unknown setting {name!r}; {suggest(name, known)}")
    return InferConfig(seeds=check_seeds(seeds), **settings)


def _refuse_others(settings: Mapping[str, Any]) -> None:
    for name in settings:
        if name in _NOT_FOR_PYTHON:
            raise ConfigError(f"{name} is not a setting here: {_NOT_FOR_PYTHON[name]}")


def _named(sequences: Any) -> dict[str, str]:
    if isinstance(sequences, str):
        raise ConfigError("sequences must be a mapping or a list; fastfold.predict takes one sequence")
    if isinstance(sequences, Mapping):
        named = dict(sequences)
    elif isinstance(sequences, Sequence):
        named = {f"query_{number}": sequence for number, sequence in enumerate(sequences, 1)}
    else:
        raise ConfigError(f"sequences must be a mapping or a list, found {type(sequences).__name__}")
    for name, sequence in named.items():
        if not isinstance(name, str) or not isinstance(sequence, str):
            raise ConfigError(
                f"sequences: names and sequences must be text, found {name!r}: {sequence!r}"[:200]
            )
    return named


def _network(model: AlphaFold | str | Path, device: str | torch.device | None) -> AlphaFold:
    """Return a network, loaded to a device if it is given by its path or name."""
    if not isinstance(model, AlphaFold):
        return load_model(_is_path(model), device=device or "auto")
    if device is not None:
        raise ConfigError(
            "device= is for networks by path or name; load_model(path, device=...) moves others"
        )
    return model


def _is_path(model: Any) -> str | Path:
    if isinstance(model, (str, Path)):
        return model
    raise ConfigError(f"model must be a network or a path, found {type(model).__name__}")


def _alignments(target: Target, msa: Any) -> list[ChainMsas]:
    """Read and check ``msa`` per chain, as :func:`featurize` takes it."""
    if msa is None:
        return [([], []) for _ in target.chains]
    if isinstance(msa, str) and "\n" in msa:
        raise ConfigError(
            "msa must be a file, an alignment, or rows of letters, found a text of several lines; save it as an .a3m "
            "file, or pass fastfold.data.msa.msa.parse_a3m(text)"
        )
    if isinstance(msa, (str, Path)) and os.path.isdir(msa):
        alignments = load_alignments(msa, target)
        if not any(unpaired or paired for unpaired, paired in alignments):
            raise InputError(f"contains no alignment of {target.record!r}", path=msa)
        return alignments
    # A list of text is the rows of one alignment for a single chain, and a list of files for several chains.
    is_list = isinstance(msa, (list, tuple))
    is_rows = is_list and not target.is_complex and all(isinstance(one, str) for one in msa)
    per_chain = list(msa) if is_list and not is_rows else [msa]
    if len(per_chain) != len(target.chains):
        raise ConfigError(
            f"{len(target.chains)} chains, but {len(per_chain)} alignments: give a list of one per chain, with None "
            "for a chain without alignment"
        )
    rows: dict[str, Msa] = {}
    for chain, one in zip(target.chains, per_chain, strict=True):
        if one is None:
            continue
        read = _read_alignment(one, chain.sequence)
        first = rows.setdefault(chain.sequence, read)
        if first.sequences != read.sequences or not np.array_equal(first.deletions, read.deletions):
            raise ConfigError(
                f"msa: chain {chain.id} has the sequence of an earlier chain, and another alignment; copies of a chain "
                "share one: give it once, with None for the others"
            )
    sequences = [chain.sequence for chain in target.chains]
    return pair_by_keys(sequences, [([rows[one]] if one in rows else [], []) for one in sequences])


def _read_alignment(msa: Any, query: str) -> Msa:
    """Read an alignment from a path, a list of rows, or an ``Msa``, or raise ConfigError or InputError."""
    if isinstance(msa, Msa):
        check_query(msa, query)
        return msa
    if isinstance(msa, (str, Path)):
        return read_msa(msa, query=query)
    if isinstance(msa, np.ndarray) and msa.ndim == 2:
        msa = ["".join(map(str, row)) for row in msa]
    if not isinstance(msa, (list, tuple, np.ndarray)) or not all(isinstance(row, str) for row in msa):
        raise ConfigError(
            f"msa must be a file, an alignment, or rows of letters, found {type(msa).__name__}: give one per chain"
        )
    if any(set(row) & set("\r\n>") for row in msa):
        raise InputError("expected the letters of one sequence as a row of msa, found a line end or '>'")
    read = parse_a3m("".join(f">row_{number}\n{row}\n" for number, row in enumerate(msa, 1)))
    check_query(read, query)
    return read
