"""Tokens name users, and a file that others can read or that is invalid is refused."""

from __future__ import annotations

import base64
import hashlib
from pathlib import Path

import pytest

from fastfold.errors import InputError
from fastfold.products.serve.tokens import read_tokens

ADA, BOB = "a" * 16, "b" * 20


def write(folder: Path, text: str, mode: int = 0o600) -> Path:
    path = folder / "tokens.txt"
    path.write_text(text)
    path.chmod(mode)
    return path


def test_users_are_found_by_token_or_its_hash(tmp_path: Path):
    digest = hashlib.sha256(BOB.encode()).hexdigest()
    tokens = read_tokens(write(tmp_path, f"# lab\nada {ADA}\nbob sha256:{digest}  # hashed\n"))
    assert tokens.user(f"Bearer {ADA}") == "ada"
    assert tokens.user(f"bearer {BOB}") == "bob"
    assert tokens.user(f"Basic {base64.b64encode(f'any:{BOB}'.encode()).decode()}") == "bob"
    assert tokens.user(f"Basic {base64.b64encode(b'any:wrong').decode()}") is None
    assert tokens.user("Basic \u00e9") is None
    for header in (None, "", ADA, f"Basic {ADA}", f"Bearer {ADA}x", "Bearer ", f"Bearer sha256:{digest}"):
        assert tokens.user(header) is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ada short", "tokens.txt:1: the token has fewer than 16"),
        (f"\nada {ADA} x", "tokens.txt:2: expected a user and a token"),
        (f"../ada {ADA}", "expected a user and a token"),
        ("ada sha256:12", "expected 64 hexadecimal digits"),
        (f"ada {ADA}\nbob {ADA}", "tokens.txt:2: the token is on an earlier line"),
        ("# none\n", "found none"),
    ],
)
def test_an_invalid_file_is_refused_with_its_line(tmp_path: Path, text: str, message: str):
    with pytest.raises(InputError, match=message):
        read_tokens(write(tmp_path, text))


def test_a_file_that_all_may_read_is_refused(tmp_path: Path):
    with pytest.raises(InputError, match="chmod o-rwx"):
        read_tokens(write(tmp_path, f"ada {ADA}\n", 0o644))
