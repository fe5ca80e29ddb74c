"""Old import paths give the modules of the new ones, with a warning."""

from __future__ import annotations

import importlib
import re
import sys

import pytest

from fastfold.utils.lazy import MovedModules

OLD_PATHS = {
    "fastfold.inference.design": "fastfold.products.design",
    "fastfold.inference.design.results.table": "fastfold.products.design.results.table",
    "fastfold.inference.ensemble.settings": "fastfold.inference.sampling.settings",
    "fastfold.inference.screen.options": "fastfold.inference.workers.options",
    "fastfold.inference.screen.targets": "fastfold.products.screen.targets",
    "fastfold.inference.serve": "fastfold.products.serve",
    "fastfold.inference.score.run": "fastfold.products.score.run",
    "fastfold.inference.embed.config": "fastfold.inference.embedding.config",
    "fastfold.inference.verify": "fastfold.products.verify",
}


@pytest.mark.parametrize(("old", "new"), OLD_PATHS.items(), ids=OLD_PATHS)
def test_a_moved_module_is_one(old: str, new: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (old, old.rpartition(".")[0]):
        if ".inference." in name:
            monkeypatch.delitem(sys.modules, name, raising=False)
    with pytest.warns(FutureWarning, match=f"{re.escape(old)} is {re.escape(new)} now"):
        found = importlib.import_module(old)
    assert found is importlib.import_module(new)
    assert found.__name__ == new
    assert found.__spec__ is not None
    assert found.__spec__.name == new


def test_the_longest_path_counts() -> None:
    finder = MovedModules({"a": "json", "a.b": "email"})
    with pytest.warns(FutureWarning, match=r"a\.b\.mime is email\.mime now"):
        assert finder.find_spec("a.b.mime") is not None
    assert finder.find_spec("ab") is None


def test_an_unknown_path_is_an_error() -> None:
    with pytest.raises(ModuleNotFoundError, match="no_such_room"):
        importlib.import_module("fastfold.inference.no_such_room")
