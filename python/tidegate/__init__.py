"""Gated linear recurrences for PyTorch, on hand-written kernels.

``import tidegate`` loads the library, which registers ``torch.ops.tidegate.*``:

- :mod:`tidegate.ops`: the ops as functions;
- :mod:`tidegate.reference`: each op once more from its equation, to read and to compare with;
- :mod:`tidegate.nn`: token mixers, channel mixers, helpers;
- :mod:`tidegate.models`: language models and classifiers, and ``tidegate.Decoder``, a running batch
  that generates with one;
- :mod:`tidegate.training`: the loop behind the command line;
- ``tidegate.compat``: other libraries' calls, backed by these (imported on its own);
- :mod:`tidegate.export`: language models as programs without Python (imported on its own);
- ``tidegate.hf``: the models in Hugging Face's transformers (imported on its own);
- ``tidegate.cpp``: the C++ modules, bound by pybind11 (imported on its own, where it was built).
"""

from tidegate import _library

_library.load()
__path__.append(str(_library.library_dir()))  # tidegate._cpp lies beside libtidegate.so

from tidegate import models, nn, ops, reference  # noqa: E402  (they call the ops that load() registers)

Decoder = models.Decoder

__version__: str = _library.build_info()["version"]
# Where a C++ project finds the package: cmake -DCMAKE_PREFIX_PATH=$(python -c ...); docs/cpp.md.
cmake_prefix_path: str = str(_library.library_dir().parent)
__all__ = ["Decoder", "__version__", "cmake_prefix_path", "models", "nn", "ops", "reference"]
