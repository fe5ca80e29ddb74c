"""Samples of a target: predictions from changed alignments, or with dropout.

A sample of a seed has its own random numbers for alignment, features and dropout, so more samples never change earlier
ones.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fastfold.data.features.assembly import ComplexLines, complex_lines
from fastfold.data.msa.msa import ChainMsas, Msa
from fastfold.data.msa.sampling import MAX_GAPS, a3m_text, cluster_rows, join_alignments, mask_columns
from fastfold.data.targets import Target
from fastfold.errors import InputError
from fastfold.inference.output.file_names import sample_label
from fastfold.inference.sampling.settings import Sampling

DEFAULT_NUMBER = 10  #: Default number of samples by masked columns or dropout
_SEED_LIMIT = 2**31


@dataclass(frozen=True)
class Sample:
    """Sample of a target for one seed, numbered from 1, with its method and values in JSON's types.

    ``alignments`` are those per chain before sampling. ``rows`` are those of the sample, of a complex its ``lines``;
    None for all.
    """

    number: int
    seed: int
    values: dict[str, Any]
    target: Target = field(repr=False)
    alignments: Sequence[ChainMsas] = field(repr=False)
    rows: np.ndarray | None = field(default=None, repr=False)
    lines: ComplexLines | None = field(default=None, repr=False)

    @property
    def label(self) -> str:
        """Method and number as in file names: ``columns_003``."""
        return sample_label(self.record)

    @property
    def record(self) -> dict[str, Any]:
        """Method, number and values of the sample in JSON's types."""
        return {"number": self.number, **self.values}

    @property
    def draw_seed(self) -> int:
        """Seed of the sample's features and dropout."""
        return int(np.random.SeedSequence([self.seed, self.number]).generate_state(1)[0]) % _SEED_LIMIT

    @property
    def drawn(self) -> list[ChainMsas]:
        """Alignments per chain that the network sees, made at each access because many samples wait at once."""
        if self.rows is not None and self.lines is not None:
            return self.lines.take(self.rows)
        if self.rows is not None:
            ((own, _),) = self.alignments
            joined = join_alignments(own, unique=self.values["method"] == "depth")
            return [([joined.take(self.rows)], [])]
        if self.values["method"] == "columns":
            return self._mask()
        return list(self.alignments)

    def _mask(self) -> list[ChainMsas]:
        rng = np.random.default_rng([self.seed, self.number])
        fraction = self.values["fraction"]
        columns: dict[str, np.ndarray] = {}
        masked: list[ChainMsas] = []
        for chain, (own, paired) in zip(self.target.chains, self.alignments, strict=True):
            # Copies of a chain share the alignment of the first, so they share its masked columns.
            query = chain.sequence
            if query not in columns:
                columns[query] = random_columns(rng, len(query), fraction)
            # Rows of complexes are paired by species or by line, which joined alignments would change.
            if own and not self.target.is_complex:
                own = [join_alignments(own, unique=True)]
            own, paired = (
                [mask_columns(msa, columns[query], query) for msa in group] for group in (own, paired)
            )
            masked.append((own, paired))
        return masked

    def files(self) -> dict[str, str | bytes]:
        """Return the sample's alignments as A3M by ending; none for a sample with the target's own."""
        if self.values["method"] == "dropout":
            return {}
        texts: dict[str, str | bytes] = {}
        for chain, groups in zip(self.target.chains, self.drawn, strict=True):
            for group, kind in zip(groups, ("", "_paired"), strict=True):
                name = f"_{chain.id}" if self.target.is_complex else ""
                if group:
                    joined = join_alignments(group, unique=False)
                    texts[f"_msa{name}{kind}.a3m"] = a3m_text(joined, chain.sequence)
        return texts


def draw_samples(
    sampling: Sampling | None, target: Target, alignments: Sequence[ChainMsas], seed: int
) -> list[Sample | None]:
    """Return the samples of a target for a seed; None is the prediction without sampling.

    An InputError tells that the method refuses the target or its alignment, a ConfigError that scikit-learn is missing.
    """
    if sampling is None:
        return [None]
    method, number = sampling.method, sampling.number or DEFAULT_NUMBER
    lines: ComplexLines | None = None
    drawn: Iterable[tuple[dict[str, Any], np.ndarray | None]]
    if method == "dropout":
        drawn = [({"method": method}, None)] * number
    elif not _has_rows(target, alignments, unique=method != "clusters"):
        raise InputError(
            f"`sample={method}` changes alignment rows below the query, and there is none; search for one, or use "
            "`sample=dropout`",
            record=target.name,
        )
    elif method == "columns":
        _check_columns(sampling.fraction, target)
        drawn = [({"method": method, "fraction": float(sampling.fraction)}, None)] * number
    elif target.is_complex and method == "clusters":
        raise InputError(
            "`sample=clusters` takes the rows of one chain; use `sample=depth`, columns or dropout for a complex, or "
            "fold its chains alone",
            record=target.name,
        )
    elif target.is_complex:
        lines = complex_lines(target.chains, alignments)
        chosen = _random_rows(sampling, lines.number, seed, target)
        top = lines.number_paired
        drawn = [({**values, "paired": int((rows < top).sum())}, rows) for values, rows in chosen]
    else:
        joined = join_alignments(alignments[0][0], unique=method == "depth")
        if method == "depth":
            chosen = _random_rows(sampling, len(joined.sequences) - 1, seed, target)
        else:
            chosen = _clusters(sampling, joined, seed, target)
        drawn = [(values, np.concatenate([[0], 1 + rows])) for values, rows in chosen]
    return [
        Sample(k, seed, values, target, alignments, rows, lines) for k, (values, rows) in enumerate(drawn, 1)
    ]


def left_out_depths(sampling: Sampling | None, samples: Sequence[Sample | None]) -> list[int]:
    """Return the requested depths beyond the alignment, for which no sample is drawn."""
    if sampling is None or sampling.method != "depth":
        return []
    # Samples take the depths in turn, so a depth below the largest drawn one is only beyond their number.
    deepest = max(sample.values["depth"] for sample in samples if sample is not None)
    beyond = [depth for depth in sampling.depths if depth > deepest]
    return beyond if sampling.number is None or sampling.number > len(sampling.depths) - len(beyond) else []


def _has_rows(target: Target, alignments: Sequence[ChainMsas], *, unique: bool) -> bool:
    """Return True if the network sees an alignment row below the query of a chain."""
    if target.is_complex:
        return any(len(msa.sequences) > 1 for own, paired in alignments for msa in (*own, *paired))
    ((own, _),) = alignments  # rows to pair are not used without another chain
    return bool(own) and len(join_alignments(own, unique=unique).sequences) > 1


def _check_columns(fraction: float, target: Target) -> None:
    """Refuse a share of columns that masks none or all of them in every chain."""
    lengths = [len(chain.sequence) for chain in target.chains]
    masked = [int(length * fraction) for length in lengths]
    longest = max(lengths)
    if not any(masked):
        raise InputError(
            f"`sample=columns` masks none of {longest} columns at a fraction of {fraction:g}; give at least "
            f"{math.ceil(1000 / longest) / 1000:g} with `Sampling.fraction`",
            record=target.name,
        )
    if masked == lengths:
        raise InputError(
            f"`sample=columns` masks all of {longest} columns at a fraction of {fraction:g}, which leaves nothing of "
            "the alignment; give less with `Sampling.fraction`, or use `sample=dropout`",
            record=target.name,
        )


def random_columns(rng: Any, length: int, fraction: float) -> np.ndarray:
    """Draw a share of the columns, rounded down, that a sample masks, as AFsample2 does: ``[K]`` from 0, each once."""
    return np.asarray(rng.choice(length, size=int(length * fraction), replace=False))


def _random_rows(
    sampling: Sampling, available: int, seed: int, target: Target
) -> Iterator[tuple[dict[str, Any], np.ndarray]]:
    """Yield values of each sample, and its rows, counted from 0 below the query."""
    depths = [depth for depth in sampling.depths if depth < available]
    if not depths:
        raise InputError(
            f"`sample=depth`: the alignment has {available} rows besides the query, not more than the smallest depth "
            f"{sampling.depths[0]}; give smaller numbers with `Sampling.depths`",
            record=target.name,
        )
    for k in range(1, (sampling.number or len(depths)) + 1):
        depth = depths[(k - 1) % len(depths)]
        rng = np.random.default_rng([seed, k])
        yield ({"method": "depth", "depth": depth}, np.sort(rng.choice(available, size=depth, replace=False)))


def _clusters(
    sampling: Sampling, joined: Msa, seed: int, target: Target
) -> Iterator[tuple[dict[str, Any], np.ndarray]]:
    clusters = cluster_rows(joined, np.random.default_rng([seed, 0]))
    if not clusters.rows:
        total, left_out = len(joined.sequences) - 1, clusters.left_out
        reason, remedy = "", "a deeper alignment"
        if left_out:
            number = "all" if left_out == total else str(left_out)
            reason = f", {number} left out for {MAX_GAPS:.0%} gaps or more"
            remedy = "an alignment whose rows cover more of the query"
        raise InputError(
            f"`sample=clusters`: no clusters among {total} alignment rows{reason}; use {remedy}, or `sample=columns`",
            record=target.name,
        )
    by_size = sorted(range(len(clusters.rows)), key=lambda label: -len(clusters.rows[label]))
    for label in by_size[: sampling.number]:
        rows = clusters.rows[label]
        yield {"method": "clusters", "eps": clusters.eps, "label": label, "depth": len(rows)}, rows - 1
