"""Gated linear recurrences and forgetting attention for PyTorch, on hand-written kernels.

``import tidegate`` loads the library, which registers ``torch.ops.tidegate.*``:

- :mod:`tidegate.ops`: the ops as functions;
- :mod:`tidegate.nn`: token mixers, channel mixers, helpers;
- :mod:`tidegate.models`: language models and classifiers;
- ``tidegate.cpp``: the C++ modules, bound by pybind11 (only where it was built).
"""

import importlib
from typing import Any

from tidegate import _library

_library.load()
__path__.append(str(_library.library_dir()))  # tidegate.cpp lies beside libtidegate.so

__version__: str = _library.build_info()["version"]
__all__ = ["__version__", "models", "nn", "ops"]

_SUBMODULES = ("compat", "cpp", "models", "nn", "ops", "plots", "training")


def __getattr__(name: str) -> Any:
    if name in _SUBMODULES:
        return importlib.import_module(f"tidegate.{name}")
    raise AttributeError(f"module 'tidegate' has no attribute {name!r}")
