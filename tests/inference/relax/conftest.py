"""Settings of the tests of relaxation."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import pytest


@pytest.fixture(scope="session", autouse=True)
def force_fields_are_read_once() -> Iterator[None]:
    """pdbfixer reads its force field for each structure, which takes longer than to relax a peptide."""
    pdbfixer = pytest.importorskip("pdbfixer.pdbfixer")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pdbfixer.app, "ForceField", cache(pdbfixer.app.ForceField))
        yield
