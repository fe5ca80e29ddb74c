"""Text in ASCII keeps every letter."""

# ruff: noqa: RUF001 (letters of other scripts are the subject of this file)

from __future__ import annotations

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastfold.utils.transliteration import to_ascii


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Žídek, A.", "Zidek, A."),
        ("Weiß, Østergård, Łukasz, Đorđević, Þór", "Weiss, Ostergard, Lukasz, Dordevic, Thor"),
        ("Cœur, Ærø, İstanbul, ılık", "Coeur, Aero, Istanbul, ilik"),
        ("TNFα, β2-microglobulin, Ωmega, µ", "TNFalpha, beta2-microglobulin, Omegamega, mu"),
        ("Жуков, Щукин", "Zhukov, Shchukin"),
        ("chain’s “a” – 1…2", 'chain\'s "a" - 1...2'),
        ("蛋A", "U86CBA"),
        ("a\u200bb", "ab"),
        ("plain | text\t#1", "plain | text\t#1"),
    ],
)
def test_letters_are_spelled(text: str, expected: str):
    assert to_ascii(text) == expected


@given(st.text())
def test_every_letter_and_number_leaves_a_letter_or_number(text: str):
    found = to_ascii(text)
    assert found.isascii()
    assert to_ascii(found) == found
    for letter in text:
        if letter.isalnum():
            assert any(one.isalnum() for one in to_ascii(letter)) or letter in "ъьЪЬ"


@given(st.text())
def test_composed_and_decomposed_forms_read_alike(text: str):
    forms = {to_ascii(unicodedata.normalize(form, text)) for form in ("NFC", "NFD")}
    assert len(forms) == 1
