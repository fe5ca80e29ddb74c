"""Write ModelCIF files: mmCIF with the entities, quality, software and protocol of a predicted structure.

The ``modelcif`` package is imported on first use, because its import takes longer than printing the help of the command
line.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from typing import Any

import numpy as np

from fastfold.errors import OutputError
from fastfold.protein.citations import find_citations
from fastfold.protein.io.atom_rows import atom_rows
from fastfold.protein.io.pairwise_metric import pairwise_dumper, pairwise_metric
from fastfold.protein.labels import AuthorNames
from fastfold.protein.protein import Hydrogens, Protein, chain_name, check_shape, check_writable
from fastfold.utils.transliteration import to_ascii


def to_modelcif(
    protein: Protein,
    *,
    entry_id: str,
    title: str,
    software_version: str,
    model_name: str,
    is_multimer: bool = False,
    plddt: np.ndarray | None,
    pae: np.ndarray | None = None,
    ptm: float | None = None,
    iptm: float | None = None,
    details: str | None = None,
    refinement: str | None = None,
    hydrogens: Hydrogens | None = None,
    names: AuthorNames | None = None,
) -> str:
    """Write a predicted or refined structure as ModelCIF, with the same bytes for equal structures.

    Chains of equal sequence share one entity. The full sequence of each chain is written; residues without atoms count
    as not modelled. The B-factor column holds ``protein.b_factors``.

    Args:
        protein: The structure.
        entry_id: Identifier of the entry; characters other than letters, digits, ``_``, ``.`` and ``-`` become ``_``.
        title: Title of the entry, one line; letters outside ASCII are spelled.
        software_version: Version of FastFold.
        model_name: Network of the model, for example ``model_1_ptm``.
        is_multimer: True for a network of AlphaFold-Multimer's kind, whose paper is cited too.
        plddt: ``[N]``, 0 to 100: the per-residue metric; its mean is the global one. None for a structure that is not a
            prediction, whose file has no prediction step.
        pae: ``[N, N]`` in Å, error at residue j when aligned on i: a metric of pairs of residues with atoms, with two
            decimals.
        ptm: Predicted TM-score, 0 to 1.
        iptm: Predicted interface TM-score, 0 to 1.
        details: Details of the prediction step (seed, recycles).
        refinement: Description of the refinement, as a separate step.
        hydrogens: Hydrogens to write.
        names: Author's names of chains and residues; by default chains are named as in the PDB file, then AA, AB, ...,
            and residues are numbered by ``protein.residue_index``.

    Returns:
        Text of the file, ASCII.

    Raises:
        OutputError: The structure has no atoms, or a position, B-factor or score is not finite.
        ValueError: ``plddt`` or ``pae`` has another number of residues than ``protein``.
    """
    import modelcif
    import modelcif.dumper
    import modelcif.model
    import modelcif.protocol
    import modelcif.qa_metric

    check_writable(protein)
    _check_scores(len(protein), plddt, pae, ptm, iptm)

    system = modelcif.System(title=_plain(title), id=_identifier(entry_id))
    asym_units = _asym_units(protein, names)
    # Declared here, because a chain without any atom is in the entry and not in the assembly.
    system.asym_units.extend(asym_units)
    modeled = [
        unit
        for unit, chain in zip(asym_units, protein.chains, strict=True)
        if (protein.atom_mask[chain] > 0.5).any()
    ]

    class Model(modelcif.model.AbInitioModel):
        """Model whose atoms are made only while they are written."""

        def get_atoms(self) -> Iterator[Any]:
            return _atoms(protein, hydrogens, asym_units)

    if plddt is None:
        Model.model_type, Model.other_details = "Other", "refined structure"

    model = Model(assembly=modelcif.Assembly(modeled, name="Modelled chains"), name=_plain(model_name))
    model.not_modeled_residue_ranges.extend(_not_modeled(protein, asym_units))
    software = modelcif.Software(
        name="FastFold",
        classification="model building",
        description="AlphaFold 2 structure prediction in PyTorch",
        location=None,
        type="package",
        version=_plain(software_version),
    )
    model.qa_metrics.extend(_qa_metrics(protein, asym_units, software, plddt, ptm, iptm))
    dumpers: list[type] = []
    if plddt is not None and pae is not None:
        meaning = "Predicted aligned error of residue 2 when aligned on residue 1, in angstrom"
        errors = pairwise_metric("PAE", modelcif.qa_metric.PAE, meaning, software)
        model.qa_metrics.append(errors)
        present: np.ndarray = np.any(protein.atom_mask > 0.5, axis=1)
        residues = [one for one, there in zip(_residues(protein, asym_units), present, strict=True) if there]
        # Readers look up both residues of a pair among the atoms.
        dumpers.append(pairwise_dumper(errors, residues, pae[np.ix_(present, present)]))

    entities = list(dict.fromkeys(unit.entity for unit in asym_units))
    protocol = modelcif.protocol.Protocol()
    steps: list[tuple[str, type, str | None, list[Any]]] = []
    if plddt is not None:
        used = [software, *_networks(is_multimer)]
        steps.append(("Structure prediction", modelcif.protocol.ModelingStep, details, used))
    if refinement:
        steps.append(("Relaxation", modelcif.protocol.ModelRefinementStep, refinement, [software]))
    for name, step, text, used in steps:
        protocol.steps.append(
            step(
                name=name,
                details=_plain(text) if text else None,
                input_data=modelcif.data.DataGroup(entities),
                output_data=model,
                software=modelcif.SoftwareGroup(used),
            )
        )
    system.protocols.append(protocol)
    system.model_groups.append(modelcif.model.ModelGroup([model], name="All models"))

    out = io.StringIO()
    modelcif.dumper.write(out, [system], dumpers=dumpers)
    return out.getvalue()


_NETWORKS = {"alphafold": "AlphaFold", "multimer": "AlphaFold-Multimer"}


def _networks(is_multimer: bool) -> list[Any]:
    """Return the published networks as software with their papers, whose authors did not make this model."""
    import ihm
    import modelcif

    keys = [key for key in _NETWORKS if key == "alphafold" or is_multimer]
    return [
        modelcif.Software(
            name=_NETWORKS[citation.key],
            classification="model building",
            description=_plain(citation.use),
            location=None,
            type="program",
            version="2",
            citation=ihm.Citation(
                pmid=None,
                title=_plain(citation.title),
                journal=citation.journal,
                volume=citation.volume or None,
                page_range=tuple(citation.pages.split("-")) if citation.pages else None,
                year=citation.year,
                authors=[_plain(name) for name in citation.author_list],
                doi=citation.doi,
            ),
        )
        for citation in find_citations(keys)
    ]


def _check_scores(
    n: int, plddt: np.ndarray | None, pae: np.ndarray | None, ptm: float | None, iptm: float | None
) -> None:
    check_shape("plddt", plddt, (n,))
    check_shape("pae", pae, (n, n))
    for name, value in (("pLDDT", plddt), ("PAE", pae), ("pTM", ptm), ("ipTM", iptm)):
        if value is not None and not np.isfinite(value).all():
            raise OutputError(f"{name} is not finite: the prediction failed and is not written")


def _asym_units(protein: Protein, author: AuthorNames | None) -> list[Any]:
    """Create one asymmetric unit per chain; chains of equal sequence share their entity."""
    import modelcif

    class Polymer(modelcif.Entity):
        """Entity that stays a polymer if its chain has a single residue."""

        def is_polymeric(self) -> bool:
            return True

    names_of: dict[str, list[str]] = {}
    for i, sequence in enumerate(protein.sequences):
        names_of.setdefault(sequence, []).append(chain_name(i))
    entities = {
        sequence: Polymer(
            ["UNK" if letter == "X" else letter for letter in sequence],
            description=f"Protein, {'chain' if len(names) == 1 else 'chains'} {', '.join(names)}",
        )
        for sequence, names in names_of.items()
    }
    units = []
    for i, (sequence, chain) in enumerate(zip(protein.sequences, protein.chains, strict=True)):
        name = chain_name(i)
        numbers: list[Any] = protein.residue_index[chain].tolist()
        if author is not None:
            name = author.chain_ids[i] or name
            numbers = [_auth_number(author, residue) for residue in range(chain.start, chain.stop)]
        units.append(
            modelcif.AsymUnit(
                entities[sequence],
                details=f"Chain {_plain(name)}",
                strand_id=name,
                # The list is indexed by the position in the sequence, counted from 1.
                auth_seq_id_map=[None, *numbers],
            )
        )
    return units


def _auth_number(author: AuthorNames, residue: int) -> Any:
    """Return number and insertion code as the package expects; unknown if the author gives none."""
    import ihm

    if not author.numbers[residue]:
        return ihm.unknown, None
    number, insertion = author.split_number(residue)
    return number, insertion or None


def _atoms(protein: Protein, hydrogens: Hydrogens | None, asym_units: list[Any]) -> Iterator[Any]:
    """Yield the atoms of the model, residue by residue, with coordinates rounded to 0.001 Å."""
    from modelcif.model import Atom

    first = np.array([chain.start for chain in protein.chains])
    seq_id = (np.arange(len(protein)) - first[protein.chain_index] + 1).tolist()
    chain_of = protein.chain_index.tolist()
    for residue, name, x, y, z, b in atom_rows(protein, hydrogens):
        yield Atom(
            asym_unit=asym_units[chain_of[residue]],
            seq_id=seq_id[residue],
            atom_id=name,
            type_symbol=name[0],
            x=x,
            y=y,
            z=z,
            biso=b,
            occupancy=1.0,
        )


def _not_modeled(protein: Protein, asym_units: list[Any]) -> Iterator[Any]:
    from modelcif.model import NotModeledResidueRange

    has_atoms: np.ndarray = np.any(protein.atom_mask > 0.5, axis=1)
    for unit, chain in zip(asym_units, protein.chains, strict=True):
        missing = np.concatenate([[False], ~has_atoms[chain], [False]])
        starts, ends = np.flatnonzero(np.diff(missing.astype(np.int8))).reshape(-1, 2).T
        for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
            yield NotModeledResidueRange(unit, start + 1, end)


def _qa_metrics(
    protein: Protein,
    asym_units: list[Any],
    software: Any,
    plddt: np.ndarray | None,
    ptm: float | None,
    iptm: float | None,
) -> list[Any]:
    """Return global pLDDT, pTM and ipTM, and pLDDT per residue."""
    from modelcif import qa_metric as qa

    def metric(label: str, mode: type, kind: type, text: str) -> Any:
        members = {"name": label, "description": text, "software": software}
        return type(label, (mode, kind), members)

    if plddt is None:
        return []
    values = np.asarray(plddt, np.float64)
    mean = metric("pLDDT", qa.Global, qa.PLDDT, "Mean predicted lDDT of the C-alpha atoms, 0 to 100")
    local = metric("pLDDT", qa.Local, qa.PLDDT, "Predicted lDDT of the C-alpha atom, 0 to 100")
    metrics = [mean(float(values.mean()))]
    if ptm is not None:
        metrics.append(metric("pTM", qa.Global, qa.PTM, "Predicted TM-score, 0 to 1")(float(ptm)))
    if iptm is not None:
        text = "Predicted TM-score of the interfaces, 0 to 1"
        metrics.append(metric("ipTM", qa.Global, qa.IpTM, text)(float(iptm)))
    residues = _residues(protein, asym_units)
    metrics += [local(residue, value) for residue, value in zip(residues, values.tolist(), strict=True)]
    return metrics


def _residues(protein: Protein, asym_units: list[Any]) -> list[Any]:
    return [
        unit.residue(seq_id + 1)
        for unit, chain in zip(asym_units, protein.chains, strict=True)
        for seq_id in range(chain.stop - chain.start)
    ]


def _identifier(text: str) -> str:
    """Convert text to a CIF value that needs no quotes."""
    safe = re.sub(r"[^0-9A-Za-z_.-]", "_", to_ascii(text))[:100].lstrip("_.-")
    return re.sub(r"^(?i:(data|save|loop|stop|global)_)", r"\1-", safe) or "model"


def _plain(text: str) -> str:
    """Convert text to a value that every CIF reader accepts: one line of printable ASCII without quotes."""
    safe = re.sub(r"[^ -~]", "?", to_ascii(" ".join(text.split())))
    safe = re.sub(r"[\"'\\]", "`", safe)[:500]
    # Words such as #1, _x or data_ have another meaning at the start of a value.
    safe = re.sub(r"^[^0-9A-Za-z]+", "", safe)
    return re.sub(r"^(?i:(data|save|loop|stop|global)_)", r"\1-", safe) or "unnamed"
