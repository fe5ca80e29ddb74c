"""The Python API: :func:`load_model` and :func:`predict`."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from fastfold.data.msa.find import ChainMsas, read_msa
from fastfold.data.msa.msa import Msa, check_query
from fastfold.data.targets import Target, target_from_sequence
from fastfold.errors import ConfigError
from fastfold.evoformer.model import AlphaFold
from fastfold.evoformer.precision import Precision, set_precision
from fastfold.evoformer.weights.checkpoint import load_model as load_weights
from fastfold.inference.config import InferConfig
from fastfold.inference.folding import predict_target
from fastfold.inference.models import network_name, weights_path
from fastfold.inference.output.prediction import Prediction
from fastfold.utils.device import choose_device

_log = logging.getLogger(__name__)

AnyMsa = str | Path | Msa
"""An A3M or Stockholm file, or an alignment that was read before."""
Templates = Mapping[str, np.ndarray]
"""Raw template features of one chain, as :func:`fastfold.data.features.raw.template_features` describes them."""


def load_model(path: str | Path, *, device: str = "auto", precision: Precision = "fp32") -> AlphaFold:
    """Load a network.

    Args:
        path: Official ``params_model_*.npz``, OpenFold ``.pt``, FastFold ``.safetensors``, or ``mini``, the small
            network that ships with the package.
        device: ``auto`` (CUDA where there is one), ``cpu`` or ``cuda``.
        precision: ``fp32``, or ``bf16`` for a trunk in bfloat16.

    Returns:
        The network in evaluation mode; its ``name`` is the file's without ``params_`` and ending.

    Raises:
        WeightsError: The file is missing, damaged, unsafe, or not of this network family.
        ConfigError: The device cannot be used.
    """
    where = choose_device(device)
    path = weights_path(path)
    model = set_precision(load_weights(path), precision)
    model.name = network_name(Path(path))
    return model.to(where)


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
) -> Prediction:
    """Fold a sequence.

    Args:
        sequence: One letter per residue; ``:`` joins the chains of a complex, which needs a multimer network.
        model: A network from :func:`load_model`, or a path for it.
        msa: An alignment (A3M or Stockholm file, or parsed) whose first row is the sequence; for a complex one per
            chain, None where a chain has none. Without, the network sees the sequence alone.
        templates: Raw features of the templates (``template_aatype`` and so on); for a complex one mapping per
            chain, None where a chain has none.
        num_recycles: Extra passes; by default the network's own number.
        seed: Seed of everything random: the same seed gives the same prediction.
        name: Name for files and scores.
        memory_budget: What the fold may take, ``24GiB`` for example; by default what the device has free. The sizes
            of all blocks follow from it.
        pae: Whether the prediction has aligned errors of all pairs; by default it has them up to 5,000 residues.

    Returns:
        The prediction, plain values; :meth:`~fastfold.inference.output.prediction.Prediction.save` writes it.

    Raises:
        InputError: The sequence, an alignment or templates cannot be used, or the target does not fit into memory.
        ConfigError: A complex was given to a monomer network, or settings contradict.
        OutputError: The network's numbers are not finite.
    """
    target = target_from_sequence(sequence, name)
    config = InferConfig(num_recycles=num_recycles, seed=seed, pae=pae, memory_budget=memory_budget)
    alignments = _alignments(target, msa)
    network = model if isinstance(model, AlphaFold) else load_model(model)
    (prediction,) = predict_target(
        target,
        [network],
        alignments,
        config,
        device=next(network.parameters()).device,
        templates=[templates] if isinstance(templates, Mapping) else templates,
        say=_log.warning,
    )
    return prediction


def _alignments(target: Target, msa: AnyMsa | Sequence[AnyMsa | None] | None) -> list[ChainMsas]:
    """What was given as ``msa``, read and checked, per chain as :func:`featurize` takes it."""
    if msa is None:
        return [([], []) for _ in target.chains]
    given = [msa] if isinstance(msa, (str, Path, Msa)) else list(msa)
    if len(given) != len(target.chains):
        raise ConfigError(
            f"{len(target.chains)} chains, but {len(given)} alignments: give a list of one per chain, None for "
            "a chain that has none"
        )
    alignments: list[ChainMsas] = []
    for chain, one in zip(target.chains, given, strict=True):
        if isinstance(one, Msa):
            check_query(one, chain.sequence)
        elif one is not None:
            one = read_msa(one, query=chain.sequence)
        alignments.append(([one] if one else [], []))
    return alignments
