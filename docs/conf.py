"""Configuration of Sphinx for ``make docs``. Warnings are errors."""

from __future__ import annotations

import contextlib
import os
import re
from dataclasses import is_dataclass
from importlib import import_module
from pathlib import Path

from docutils import nodes
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.pycode import ModuleAnalyzer

from fastfold._version import __version__
from fastfold.protein.metrics.scores import definitions_table
from fastfold.utils.option_fields import options_of

project = "FastFold"
author = "The FastFold developers"
copyright = "2026, The FastFold developers"
version = release = __version__

extensions = ["sphinx.ext.autodoc", "sphinx.ext.autosummary", "sphinx.ext.napoleon", "myst_parser"]
source_suffix = {".md": "markdown", ".rst": "restructuredtext"}
templates_path = ["_templates"]
exclude_patterns = ["package_index.md"]  # shown only by the package index

html_theme = "furo"
html_title = f"FastFold {version}"
html_copy_source = False
html_search_scorer = str(Path(__file__).parent / "search_scorer.js")

# Anchors for headings, so that Markdown pages can link to sections of each other.
myst_heading_anchors = 3
myst_enable_extensions = ["deflist"]

# One page for each module, from its docstrings. Modules are found whatever a package exports; the names that a
# package's own page lists come from its __all__.
# Optional packages, whose classes some modules extend.
autodoc_mock_imports = [
    *("accelerate", "lightning", "transformers"),
    *("fastapi", "h11", "prometheus_client", "pydantic", "starlette", "uvicorn"),
]
autosummary_generate = True
autosummary_ignore_module_all = True
autodoc_default_options = {"members": True, "show-inheritance": True}
autodoc_inherit_docstrings = False
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
python_maximum_signature_line_length = 100
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True

# An exported name is documented in its package and in its module; both are valid targets of links.
# The function below cannot be pickled with the configuration.
suppress_warnings = ["ref.python", "config.cache"]
# References to missing modules and names of FastFold are errors. Those of other projects, type variables and private
# names are not checked.
nitpicky = True
nitpick_ignore_regex = [
    ("py:.*", r"(?!fastfold\b).*"),
    ("py:.*", r"fastfold\.(.*\.)?([A-Z]|Result|Params|MaybeTensor|_\w+)"),
]


def exported(package: str) -> list[str]:
    """Return the full names of a package's exports, in the modules that define them."""
    module = import_module(package)
    names = getattr(module, "__all__", ()) if hasattr(module, "__path__") else ()
    return [place for name in names if (place := defined(getattr(module, name))) is not None]


def defined(thing: object) -> str | None:
    """Return the full name of a class or function of FastFold; None for others."""
    module, name = getattr(thing, "__module__", None), getattr(thing, "__qualname__", None)
    return f"{module}.{name}" if name and str(module).startswith("fastfold.") else None


autosummary_context = {"exported": exported}

DOCS = Path(__file__).parent
# Pages whose text is a file outside of this folder.
INCLUDED = {
    "benchmarks": DOCS.parent / "benchmarks" / "README.md",
    "changelog": DOCS.parent / "CHANGELOG.md",
    "contributing": DOCS.parent / "CONTRIBUTING.md",
    "examples": DOCS.parent / "examples" / "README.md",
}
LINK = re.compile(r"(?<!!)\[([^\]]+)\]\((?!\w+://|#)([^)#\s]+)(#[^)\s]*)?\)")


def _text(_: Sphinx, name: str, content: list[str]) -> None:
    """Read included pages, fill in tables, and convert links to pages or to names of files.

    In the repository, a link is relative to its file.
    """
    path = INCLUDED.get(name, DOCS / f"{name}.md")
    if path.suffix != ".md" or not path.is_file():
        return
    if name in INCLUDED:
        content[0] = path.read_text(encoding="utf-8")
    content[0] = content[0].replace("<!-- definitions_table() -->", definitions_table())
    pages = {file.resolve(): f"{page}.md" for page, file in INCLUDED.items()}

    def link(found: re.Match[str]) -> str:
        target = (path.parent / found[2]).resolve()
        inside = target.is_relative_to(DOCS) and target.is_file()
        if target in pages or inside:
            page = pages.get(target) or os.path.relpath(target, DOCS)
            return f"[{found[1]}]({page}{found[3] or ''})"
        # Other files are named and not copied.
        return found[1] if found[1].startswith("`") else f"`{found[1]}`"

    content[0] = LINK.sub(link, content[0])


def _through_package(
    app: Sphinx, env: BuildEnvironment, node: pending_xref, content: nodes.TextElement
) -> nodes.Element | None:
    """Resolve a reference to an exported name to the module that defines it."""
    target = node.get("reftarget", "")
    if node.get("refdomain") != "py" or not target.startswith("fastfold."):
        return None
    package, *names = target.split(".")
    thing = import_module(package)
    for name in names:
        with contextlib.suppress(ImportError):
            package = f"{package}.{name}"
            import_module(package)
        thing = getattr(thing, name, None)
    place = defined(thing)
    if place is None:
        return None
    python = env.get_domain("py")
    return python.resolve_xref(env, node["refdoc"], app.builder, node["reftype"], place, node, content)


def _document_options(_: Sphinx) -> None:
    """Describe fields by the help of their options, where no comment describes them."""
    root = DOCS.parent
    for path in root.glob("fastfold/**/*.py"):
        if "fastfold.utils.option_fields import" not in path.read_text("utf-8"):
            continue
        name = ".".join(path.relative_to(root).with_suffix("").parts)
        analyzer = ModuleAnalyzer.for_module(name)
        analyzer.analyze()
        for kind in filter(is_dataclass, vars(import_module(name)).values()):
            if isinstance(kind, type) and kind.__module__ == name:
                for field, choice in options_of(kind):
                    help = str(choice.help).replace("%%", "%").replace("--", r"\-\-").replace("*", r"\*")
                    # Napoleon takes the words up to the first colon as the type.
                    lines = [f"option ``{choice.names[0]}``: {help}", ""]
                    analyzer.attr_docs.setdefault((kind.__name__, field.name), lines)


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    app.connect("builder-inited", _document_options)
    app.connect("source-read", _text)
    app.connect("missing-reference", _through_package)
