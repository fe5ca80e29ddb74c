"""Compute the representations of a target, and write them as safetensors, HDF5, Zarr, or for BioEmu."""

from __future__ import annotations

import hashlib
import io
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import load_file

from fastfold._version import __version__
from fastfold.data.targets import safe_stem
from fastfold.errors import ConfigError, OutputError
from fastfold.inference.embedding.config import ENDINGS, EmbedConfig, EmbedFormat, check_format
from fastfold.inference.folding.network import Represent, represent
from fastfold.inference.folding.prediction import TargetFold, input_order
from fastfold.inference.output.file_names import prediction_key, sample_label
from fastfold.inference.output.recycle_state import RecycleState
from fastfold.inference.output.results_folder import TargetResults
from fastfold.inference.planning.planner import FoldPlan
from fastfold.protein.metrics.contacts import sum_contact_bins
from fastfold.utils.atomic_files import prepare_output_directory, write_atomic
from fastfold.utils.tensor_files import tensor_bytes

BIOEMU = "bioemu"  #: Folder with BioEmu's files within the results

_NAMES = {"msa_first_row": "msa_row"}  #: Arrays whose name differs from that of the network
_PAIRS = ("pair", "distogram", "contacts")


@dataclass(frozen=True, eq=False)
class Embedding:
    """Representations of a target by a network."""

    name: str  #: Name of the target
    sequences: tuple[str, ...]  #: One-letter sequence of each folded chain
    model_name: str  #: Network, for example ``model_1_ptm``
    seed: int  #: Random seed
    num_recycles: int  #: Passes after the first
    layer: int | None  #: Evoformer block of the arrays; None for the last
    #: By name, of N residues in the order of the input: ``single [N, c_s]``, ``pair [N, N, c_z]``, ``msa_row [N,
    #: c_m]``, ``structure_module [N, c]``, ``distogram [N, N, bins]`` with ``distogram_edges [bins - 1]`` in Å,
    #: ``contacts [N, N]`` (CB atoms within 8 Å); means lack the axis of residues
    arrays: Mapping[str, np.ndarray]
    sample: Mapping[str, Any] | None = None  #: See :class:`fastfold.inference.output.prediction.Prediction`

    @property
    def about(self) -> dict[str, str]:
        """Origin of the arrays, as texts for a file's metadata."""
        return {
            "target": self.name,
            "sequences": ":".join(self.sequences),
            "model": self.model_name,
            "seed": str(self.seed),
            "num_recycles": str(self.num_recycles),
            "layer": "last" if self.layer is None else str(self.layer),
            "fastfold_version": __version__,
        }

    @property
    def sample_label(self) -> str | None:
        """Method and number of the sample as in file names; None without sampling."""
        return None if self.sample is None else sample_label(self.sample)

    @property
    def key(self) -> str:
        """Network, seed and sample as in file names."""
        return prediction_key(self.model_name, self.seed, sample=self.sample_label)

    def save(self, directory: str | Path, *, file_format: EmbedFormat = "safetensors") -> Path:
        """Write the arrays to ``<name>_<model>_seed_<n>`` with the format's ending, and return the path.

        The folder is created if missing. A ConfigError tells that the format is unknown or its package missing, an
        OutputError that the file cannot be written.
        """
        EmbedConfig(file_format=file_format)
        name = f"{safe_stem(self.name)}_{self.key}{ENDINGS[file_format]}"
        path = prepare_output_directory(directory) / name
        write_atomic(path, embedding_bytes(self.arrays, self.about, file_format))
        return path


def compute_embedding(
    one: TargetFold,
    plan: FoldPlan | None = None,
    *,
    run: Represent = represent,
    state: RecycleState | None = None,
) -> Embedding:
    """Run a fold's network for the representations that its settings select, or raise OutputError.

    Arguments are those of :func:`fastfold.inference.folding.network.represent`, which ``run`` replaces.
    """
    model, target, embed = one.model, one.target, one.config.embed or EmbedConfig()
    blocks = len(model.evoformer.blocks) if embed.layer is None else embed.layer
    representations, num_recycles = run(
        model,
        one.source(),
        replace(one.passes, distogram=embed.needs_distogram),
        one.on_cycle,
        stop_after_block=None if embed.needs_structure else blocks,
        plan=plan,
        state=state,
    )
    return Embedding(
        name=target.shown_name,
        sequences=tuple(chain.sequence for chain in target.chains),
        model_name=model.name,
        seed=one.seed,
        num_recycles=num_recycles,
        layer=embed.layer,
        arrays=_arrays(representations, embed, input_order(one.sampler), target.name),
    )


def _arrays(
    representations: dict[str, torch.Tensor], embed: EmbedConfig, order: np.ndarray, name: str
) -> dict[str, np.ndarray]:
    tensors = {_NAMES.get(key, key): value for key, value in representations.items()}
    if "distogram" in tensors:
        both = ("distogram", "distogram_edges")
        probabilities, edges = (tensors[key].float().cpu().numpy() for key in both)
        tensors["contacts"] = torch.from_numpy(sum_contact_bins(probabilities, edges))
    arrays = {}
    for key in embed.names:
        values = tensors[key].detach().float().cpu().numpy()
        if embed.mean:
            axes = (0, 1) if key in _PAIRS else (0,)
            values = values.mean(axes, dtype=np.float64).astype(np.float32)
        elif not np.array_equal(order, np.arange(len(order))):
            values = values[np.ix_(order, order)] if key in _PAIRS else values[order]
        if not np.isfinite(values).all():
            raise OutputError(f"{name}: {key} is not finite; try `precision=fp32` and check the weights")
        arrays[key] = np.ascontiguousarray(values.astype(embed.dtype, copy=False))
        if key == "distogram":
            arrays["distogram_edges"] = edges
    return arrays


def embedding_bytes(arrays: Mapping[str, np.ndarray], about: Mapping[str, str], file_format: str) -> bytes:
    """Format named arrays as a file; ``bioemu`` is kept as safetensors. Errors are those of :func:`.check_format`.

    Metadata are those of the file (safetensors), or attributes of its root.
    """
    check_format(file_format)
    if file_format == "hdf5":
        import h5py

        file = io.BytesIO()
        with h5py.File(file, "w") as root:
            for name, values in arrays.items():
                root.create_dataset(name, data=values)
            root.attrs.update(about)
        return file.getvalue()
    if file_format == "zarr":
        import zarr

        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "file.zip"
            store = zarr.storage.ZipStore(path, mode="w")
            group = zarr.create_group(store, attributes=dict(about))
            for name, values in arrays.items():
                group.create_array(name, data=values)
            store.close()
            return path.read_bytes()
    return tensor_bytes({name: torch.from_numpy(values) for name, values in arrays.items()}, about)


def write_bioemu(results: TargetResults) -> None:
    """Write the embedding of a target under the names that BioEmu looks up.

    BioEmu reads ``<sha>_single.npy`` and ``<sha>_pair.npy`` from its ``cache_embeds_dir``, with the SHA-256 of the
    sequence. The results are those of a single chain; a ConfigError tells that they are not one file of safetensors.
    """
    records = [record for record in results.records() if ".safetensors" in record.files]
    if len(records) != 1:
        raise ConfigError(
            f"BioEmu reads one embedding of a sequence, and the folder has {len(records)}; give another `out`"
        )
    (record,) = records
    sequence = str(record.scores["sequence"])
    digest = hashlib.sha256(sequence.encode("ascii")).hexdigest()
    folder = prepare_output_directory(results.parent.path / BIOEMU)
    arrays = load_file(results.path(record, ".safetensors"))
    for name in ("single", "pair"):
        file = io.BytesIO()
        np.save(file, arrays[name])
        write_atomic(folder / f"{digest}_{name}.npy", file.getvalue())
    write_atomic(folder / f"{digest}.fasta", f">{digest}\n{sequence}\n")
