"""Text of any script in ASCII, for files and formats that hold nothing else."""

# ruff: noqa: RUF001 (letters of other scripts are the subject of this file)

from __future__ import annotations

import re
import unicodedata

_CYRILLIC = "а б в г д е ж з и к л м н о п р с т у ф х ц ч ш щ ъ ы ь э ю я"
_CYRILLIC_IN_LATIN = "a b v g d e zh z i k l m n o p r s t u f kh ts ch sh shch ' y ' e yu ya"
_SPELLINGS = {
    **{"æ": "ae", "ð": "d", "œ": "oe", "ß": "ss", "þ": "th"},
    **{"−": "-", "×": "x", "⁄": "/", "·": "."},
    **dict(zip(_CYRILLIC.split(), _CYRILLIC_IN_LATIN.split(), strict=True)),
}
"""Usual spelling of lower-case letters and signs whose names in Unicode would read worse."""

_MARKS = {"Pd": "-", "Zs": " ", "Zl": " ", "Zp": " "}
"""Replacements by category of Unicode: dashes and spaces."""
_NAMED = re.compile(r"\b(?:LETTER|LIGATURE|SYLLABLE|VOWEL SIGN) (.+?)(?: WITH .+)?$")


def to_ascii(text: str) -> str:
    """Return a text in ASCII that keeps every letter: ``Žídek`` as ``Zidek``, ``TNFα`` as ``TNFalpha``.

    Accents are left out. Letters that are more than a base and an accent have their usual spelling (``ß`` as ``ss``),
    or the name that Unicode gives them (``α`` as ``alpha``, ``Ω`` as ``Omega``). Others are written as their number,
    ``U86CB``. ASCII stays as it is.

    Example:
        >>> from fastfold.utils.transliteration import to_ascii
        >>> to_ascii("β2-microglobulin by Žídek, Łukasz and Weiß")
        'beta2-microglobulin by Zidek, Lukasz and Weiss'
    """
    if text.isascii():
        return text
    return "".join(map(_spelled, unicodedata.normalize("NFKD", text)))


def _spelled(letter: str) -> str:
    """Spell one letter of a decomposed text."""
    if letter.isascii():
        return letter
    if unicodedata.combining(letter) and unicodedata.name(letter, "").startswith("COMBINING"):
        return ""
    category = unicodedata.category(letter)
    if category == "Cf":  # invisible marks of direction and joining
        return ""
    if category in _MARKS:
        return _MARKS[category]
    name = unicodedata.name(letter, "")
    if "QUOTATION MARK" in name or "PRIME" in name:
        return '"' if "DOUBLE" in name else "'"
    spelled = _SPELLINGS.get(letter.lower()) or _name_of(name) or f"U{ord(letter):04X}"
    return spelled.capitalize() if category == "Lu" else spelled


def _name_of(name: str) -> str:
    """Return a letter's own part of its name in Unicode, in lower case; empty for other characters."""
    match = _NAMED.search(name)
    words = match[1].split() if match else []
    return words[-1].lower() if words and words[-1].isalpha() else ""
