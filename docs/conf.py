"""How Sphinx builds the documentation: ``make docs``. Warnings are errors."""

from __future__ import annotations

from fastfold._version import __version__

project = "FastFold"
author = "The FastFold developers"
copyright = "2026, The FastFold developers"
version = release = __version__

extensions = ["sphinx.ext.autodoc", "sphinx.ext.autosummary", "sphinx.ext.napoleon", "myst_parser"]
source_suffix = {".md": "markdown", ".rst": "restructuredtext"}
templates_path = ["_templates"]
exclude_patterns = ["_build"]

html_theme = "furo"
html_title = f"FastFold {version}"
html_copy_source = False

# Anchors for headings, so that Markdown pages can link to sections of each other.
myst_heading_anchors = 3
myst_enable_extensions = ["deflist"]

# One page for each module, from its docstrings.
autosummary_generate = True
autosummary_ignore_module_all = (
    True  # so that the modules of a package are found; its names come from __all__
)
autodoc_default_options = {"members": True, "show-inheritance": True}
autodoc_inherit_docstrings = False
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
python_maximum_signature_line_length = 100
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
# A name that a package exports is documented there and where it is defined; either place will do for a link.
suppress_warnings = ["ref.python"]
# A reference to a module or name of ours that does not exist is an error; those of other projects are not looked up,
# nor are type variables and private names.
nitpicky = True
nitpick_ignore_regex = [("py:.*", r"(?!fastfold\b).*"), ("py:.*", r"fastfold\.(.*\.)?(T|Result|_\w+)")]
# Modules whose name a function of their package has as well: only the function is a target for links.
autosummary_context = {
    "shadowed": [
        "fastfold.cli.main",
        "fastfold.parallel.parallelize",
        "fastfold.parallel.alphafold.grid_parallel",
    ]
}
