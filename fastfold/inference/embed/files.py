"""Files of embeddings: safetensors, HDF5, zipped Zarr, and BioEmu's cache of embeddings."""

from __future__ import annotations

import hashlib
import io
import tempfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save

from fastfold.errors import ConfigError
from fastfold.inference.embed.config import check_format
from fastfold.inference.output.results_folder import TargetResults
from fastfold.utils.atomic_files import prepare_output_directory, write_atomic

BIOEMU = "bioemu"  #: Folder with BioEmu's files within the results


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
    return save(dict(arrays), metadata=dict(about))


def write_bioemu(results: TargetResults) -> None:
    """Write the embedding of a target under the names that BioEmu looks up.

    BioEmu reads ``<sha>_single.npy`` and ``<sha>_pair.npy`` from its ``cache_embeds_dir``, with the SHA-256 of the
    sequence. The results are those of a single chain, with one embedding as safetensors.

    Raises:
        ConfigError: The target has several embeddings.
        WriteError: A file cannot be written.
    """
    records = [record for record in results.records() if ".safetensors" in record.files]
    if len(records) != 1:
        raise ConfigError(
            f"BioEmu reads one embedding of a sequence, and the folder has {len(records)}; give another --out"
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
