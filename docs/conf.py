"""The site's configuration: Sphinx over the Markdown pages, the Python package and the C++ headers.

scripts/docs.sh builds it. The pages read the same on GitHub; what only the site has is in index.md
and api/.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
from pathlib import Path

from sphinx.ext.autodoc.mock import mock

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "python"), str(ROOT / "docs" / "_ext")]


def import_without_library() -> None:
    """Imports tidegate with nothing loaded: docstrings need no ops, and so the site no build."""
    name = "tidegate._library"
    spec = importlib.util.spec_from_file_location(name, ROOT / "python/tidegate/_library.py")
    library = importlib.util.module_from_spec(spec)
    sys.modules[name] = library
    spec.loader.exec_module(library)
    library.load = lambda: None
    library.library_dir = lambda: ROOT / "build" / "lib"
    library.build_info = lambda: {"version": version}
    library.stand_ins = lambda names: {}
    import tidegate  # noqa: F401


# What classes of ours derive from, by its module in the packages that the site is built without.
BASES = {
    "transformers": ("GenerationMixin", "PretrainedConfig", "PreTrainedModel"),
    "transformers.cache_utils": ("CacheLayerMixin", "LinearAttentionLayer"),
    "lm_eval.api.model": ("TemplateLM",),
}


def import_without_others() -> None:
    """Imports the modules over other packages, and over the pybind11 module, with mocks in their
    place: the site is the same wherever it is built, and needs none of their 600 MB."""
    with mock(["transformers", "lm_eval", "tidegate._cpp"]):
        for module, names in BASES.items():
            for name in names:  # plain classes: a mock would hide the signatures of ours
                setattr(importlib.import_module(module), name, type(name, (), {}))
        importlib.import_module("transformers").__version__ = "5"  # tidegate.hf asks for it
        registry = importlib.import_module("lm_eval.api.registry")
        registry.register_model = lambda name: lambda model: model
        for module in ("cpp", "hf", "lm_eval"):
            importlib.import_module(f"tidegate.{module}")


project = "tidegate"
copyright = "the tidegate authors"
version = release = re.search(
    r"project\(tidegate VERSION ([\d.]+)", (ROOT / "CMakeLists.txt").read_text("utf-8")
)[1]
import_without_library()
import_without_others()

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.mathjax",
    "sphinx.ext.viewcode",
    "cpp_headers",
]
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 4  # links to headings, as on GitHub
exclude_patterns = ["_build", "_ext"]
suppress_warnings = ["toc.empty_glob"]  # a folder of pages may be empty

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False
default_role = "code"  # `name` in docstrings

html_theme = "furo"
html_title = f"tidegate {version}"
