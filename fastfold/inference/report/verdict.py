"""One sentence about a prediction by fixed rules, each with the scores that it follows from."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from fastfold.inference.output.score_files import is_number, mapping_of, scored_names
from fastfold.protein.metrics.interface.scores import MAX_CLASHING_ATOMS, MAX_CLASHING_SHARE, pair_keys
from fastfold.protein.metrics.scores import Scale, score

LOW, HIGH = 50.0, 70.0
"""pLDDT below which residues are named as weak, and from which they count as confident (AlphaFold DB)."""

_MOST_RANGES = 3


def _scale(name: str) -> Scale:
    scale = score(name).scale
    assert scale is not None
    return scale


_PTM, _IPTM, _PDOCKQ2 = map(_scale, ("ptm", "iptm", "pdockq2"))


class Verdict(NamedTuple):
    """Sentence about a prediction."""

    tone: str  #: ``good``, ``fair`` or ``poor``
    word: str  #: Conclusion
    text: str  #: Scores that it follows from
    rule: str  #: Rule that leads from the scores to the conclusion


def verdict_of(scores: Mapping[str, Any]) -> dict[str, str]:
    """Return the sentence about the checked content of a scores file; keys are those of :class:`Verdict`.

    A complex is judged by ipTM and the pDockQ2 of its best pair of chains, a chain by pTM and mean pLDDT. Overlapping
    chains and a backbone that is not a protein's come first.
    """
    is_complex = len(scores["sequences"]) > 1
    by_scores = (_complex_verdict(scores) if is_complex else None) or _chain_verdict(scores)
    return (_warning(scores, by_scores.text) or by_scores)._asdict()


def _warning(scores: Mapping[str, Any], text: str) -> Verdict | None:
    """Return the verdict about a structure that cannot be right, with the text about its scores; None if it can."""
    if mapping_of(scores, "interfaces").get("has_clash") is True:
        rule = (
            f"Chains overlap if more than {MAX_CLASHING_ATOMS} atoms, or {MAX_CLASHING_SHARE:.0%} of the atoms, of a "
            "chain clash with another (AlphaFold 3, Abramson et al. 2024)."
        )
        return Verdict("poor", "Chains overlap.", f"Do not rely on this complex. {text}", rule)
    problems = mapping_of(scores, "geometry").get("problems")
    if isinstance(problems, list) and problems:
        rule = "A backbone is not a protein's if a figure of the backbone check is beyond that of 97% of experiments."
        text = f"{'; '.join(map(str, problems[:3]))}. {text}"
        return Verdict("poor", "Not the geometry of a protein.", text, rule)
    return None


def _complex_verdict(scores: Mapping[str, Any]) -> Verdict | None:
    """Return the verdict by ipTM and the best pair; None without ipTM."""
    iptm = scores.get("iptm")
    if iptm is None or not is_number(iptm):
        return None
    pairs = mapping_of(mapping_of(scores, "interfaces"), "pairs")
    ids = scored_names(scores).chain_ids
    of_pairs: list[tuple[tuple[int, int], dict[str, Any]]] = [
        (places, pairs[key]) for places, key in pair_keys(ids).items() if isinstance(pairs.get(key), dict)
    ]
    best, figures = max(of_pairs, key=lambda one: _number(one[1].get("ipsae"), -1.0), default=((0, 0), {}))
    tone = _IPTM.tone(iptm)
    word = {
        "good": "Confident interface.",
        "fair": "Interface uncertain.",
        "poor": "Interface probably wrong.",
    }[tone]
    text = f"ipTM {iptm:.2f}: {_IPTM.word(iptm)} (limits {' and '.join(map(str, _IPTM.cuts))})"
    if tone == "good" and _number(figures.get("pdockq2"), math.inf) < _PDOCKQ2.cuts[0]:
        tone, word = "fair", "Scores disagree."
    shown = (("ipsae", "ipSAE", 2), ("pdockq2", "pDockQ2", 2), ("contacts", "contacts", 0))
    parts = [
        f"{label} {figures[key]:.{digits}f}" for key, label, digits in shown if is_number(figures.get(key))
    ]
    if parts:
        text += f"; {'best pair ' if len(pairs) > 1 else ''}{' with '.join(ids[i] for i in best)}: {', '.join(parts)}"
    rule = (
        f"Confident from ipTM {_IPTM.cuts[1]} and pDockQ2 {_PDOCKQ2.cuts[0]} of the pair with the largest ipSAE; "
        f"probably wrong below ipTM {_IPTM.cuts[0]}. Sources: {_IPTM.source}; {_PDOCKQ2.source}."
    )
    return Verdict(tone, word, f"{text}.", rule)


def _chain_verdict(scores: Mapping[str, Any]) -> Verdict:
    plddt = [float(value) for value in scores["plddt"]]
    mean, ptm = sum(plddt) / len(plddt), _number(scores.get("ptm"), math.nan)
    confident = sum(value >= HIGH for value in plddt)
    has_fold = ptm >= _PTM.cuts[0]
    parts = [f"{confident} of {len(plddt)} residues have a pLDDT of at least {HIGH:.0f}"]
    if not math.isnan(ptm):
        parts.insert(0, f"pTM {ptm:.2f} is {'at least' if has_fold else 'below'} {_PTM.cuts[0]}")
    text = f"{' and '.join(parts)}."
    if weak := list(itertools.islice(_weak_ranges(scores), _MOST_RANGES + 1)):
        more = " and others" if len(weak) > _MOST_RANGES else ""
        text += f" Residues below {LOW:.0f}: {', '.join(weak[:_MOST_RANGES])}{more}."
    rule = (
        f"By pTM (fold, from {_PTM.cuts[0]}: {_PTM.source}) and mean pLDDT (local structure, from {HIGH:.0f}: "
        "AlphaFold DB): both, one or none of them reach their limit."
    )
    if mean >= HIGH and (has_fold or math.isnan(ptm)):
        word = "Fold may be right." if has_fold else "Local structure is confident."
        return Verdict("good", word, text, rule)
    if mean >= HIGH:
        return Verdict("fair", "Local structure only.", text, rule)
    if has_fold:
        return Verdict("fair", "Fold may be right, details uncertain.", text, rule)
    return Verdict("poor", "Low confidence.", text, rule)


def _weak_ranges(scores: Mapping[str, Any]) -> Iterator[str]:
    """Yield the runs of residues of low pLDDT, by chain and number."""
    names = scored_names(scores)
    chains = [number for number, sequence in enumerate(scores["sequences"]) for _ in sequence]
    prefix = [f"{one} " if len(names.chain_ids) > 1 else "" for one in names.chain_ids]
    keyed = itertools.groupby(range(len(chains)), lambda at: (chains[at], float(scores["plddt"][at]) < LOW))
    for (chain, is_weak), places in keyed:
        if is_weak:
            run = list(places)
            first, last = names.numbers[run[0]], names.numbers[run[-1]]
            yield f"{prefix[chain]}{first}" if first == last else f"{prefix[chain]}{first} to {last}"


def _number(value: Any, otherwise: float) -> float:
    return float(value) if is_number(value) else otherwise
