"""``EmbedConfig``: the representations that ``fastfold embed`` writes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from fastfold.errors import ConfigError
from fastfold.utils.option_fields import LARGEST, check_options, option
from fastfold.utils.packages import require_package

EmbedFormat = Literal["safetensors", "hdf5", "zarr", "bioemu"]
"""Formats of files: one file of named arrays, or the two arrays that BioEmu reads."""
EmbedType = Literal["float32", "float16"]
ENDINGS = {"safetensors": ".safetensors", "hdf5": ".h5", "zarr": ".zarr.zip", "bioemu": ".safetensors"}
"""Ending of the file of arrays by format."""
ARRAYS = ("single", "pair", "msa_row", "structure_module", "distogram", "contacts")
"""Names of arrays: the last representations of residues and pairs, the target's row of the MSA, the structure module's
activations, and probabilities of distances and of contacts."""
OF_BLOCKS = ("msa_row", "pair")  #: Arrays that exist after every Evoformer block
BIOEMU_CHANNELS = (384, 128)  #: Channels of single and pair that BioEmu's networks take
_PAIRWISE = ("distogram", "contacts")


@dataclass(frozen=True)
class EmbedConfig:
    """Settings of an embedding; ConfigError for invalid and contradicting ones."""

    layer: int | None = option(
        default=None,
        bounds=(1, LARGEST),
        help="end the last pass after its Nth Evoformer block, for msa_row and pair there (default: all blocks)",
    )
    #: Names of :data:`ARRAYS`; None for ``single`` and ``pair``, after a block ``msa_row`` and ``pair``
    arrays: tuple[str, ...] | None = option(
        default=None,
        parse=lambda text: tuple(text.split(",")),
        metavar="LIST",
        help="names of arrays, joined by commas (default: single,pair; with --layer msa_row,pair)",
    )
    mean: bool = option(default=False, help="average over the residues, and over all pairs")
    dtype: EmbedType = option(
        default="float32", choices=get_args(EmbedType), help="type of the arrays (default float32)"
    )
    #: One of :data:`EmbedFormat`
    file_format: EmbedFormat = option(
        "--format",
        default="safetensors",
        dest="embedding_format",
        choices=get_args(EmbedFormat),
        help="hdf5 needs h5py, zarr needs zarr; bioemu: also bioemu/, a cache_embeds_dir of BioEmu, without recycling",
    )

    def __post_init__(self) -> None:
        check_options(self)
        object.__setattr__(self, "arrays", self._named(self.arrays))
        pairwise = [name for name in self.names if name in _PAIRWISE]
        if self.mean and pairwise:
            raise ConfigError(f"the mean of {pairwise[0]} says nothing; leave out the mean, or {pairwise[0]}")
        is_whole_output = self.layer is None and set(self.names) == {"single", "pair"} and not self.mean
        if self.file_format == "bioemu" and not (is_whole_output and self.dtype == "float32"):
            raise ConfigError(
                "BioEmu reads single and pair of the last layer in float32; leave out other settings"
            )

    def _named(self, arrays: Any) -> tuple[str, ...]:
        if arrays is None:
            return OF_BLOCKS if self.layer is not None else ("single", "pair")
        if not isinstance(arrays, Sequence) or isinstance(arrays, str) or not arrays:
            raise ConfigError(f"arrays must be a list of {', '.join(ARRAYS)}, found {arrays!r}")
        for name in arrays:
            if name not in ARRAYS:
                raise ConfigError(f"arrays: expected {', '.join(ARRAYS)}, found {name!r}")
            if self.layer is not None and name not in OF_BLOCKS:
                raise ConfigError(
                    f"{name} exists after the last layer only; leave out layer, or take {' and '.join(OF_BLOCKS)}"
                )
        return tuple(name for name in ARRAYS if name in arrays)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the arrays, in the order of :data:`ARRAYS`."""
        return self.arrays or ()

    @property
    def ending(self) -> str:
        """Ending of the file of arrays."""
        return ENDINGS[self.file_format]

    @property
    def needs_structure(self) -> bool:
        """True if the structure module runs in the last pass."""
        return "structure_module" in self.names

    @property
    def needs_distogram(self) -> bool:
        """True if the distogram head runs."""
        return any(name in _PAIRWISE for name in self.names)

    def check_network(self, name: str, blocks: int) -> None:
        """Raise ConfigError if a network has fewer Evoformer blocks than the layer's number."""
        if self.layer is not None and self.layer > blocks:
            raise ConfigError(f"layer {self.layer}: {name} has {blocks} Evoformer blocks")

    def check_networks(self, networks: Mapping[str, Any]) -> None:
        """Raise ConfigError if a network, an installed package or BioEmu contradicts the settings.

        ``networks`` are configuration trees by name.
        """
        check_format(self.file_format)
        for name, network in networks.items():
            trunk = network.model.embeddings_and_evoformer
            self.check_network(name, trunk.evoformer_num_block)
            channels = (int(trunk.seq_channel), int(trunk.pair_channel))
            if self.file_format == "bioemu" and channels != BIOEMU_CHANNELS:
                raise ConfigError(
                    f"BioEmu takes {BIOEMU_CHANNELS[0]} and {BIOEMU_CHANNELS[1]} channels of single and pair, "
                    f"{name} has {channels[0]} and {channels[1]}; give `weights=model_3`"
                )
        if self.file_format == "bioemu" and len(networks) > 1:
            raise ConfigError("BioEmu reads one embedding of a sequence: give one network, `weights=model_3`")


def check_format(file_format: str) -> None:
    """Check that the package of a format is installed, or raise ConfigError."""
    if (package := {"hdf5": "h5py", "zarr": "zarr"}.get(file_format)) is not None:
        require_package(package, f"`EmbedConfig.file_format={file_format}`")
