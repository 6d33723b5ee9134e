"""flash-linear-attention's own tests of the ops that tidegate.compat.fla has, run on these.

    python tests/run_fla_tests.py FLA_CHECKOUT [--keep NAME ...] [PYTEST_ARGUMENT ...]

FLA_CHECKOUT is a clone of fla-org/flash-linear-attention, of whose tests/ops the files of HGRN, GLA
and forgetting attention run; the installed fla-core supplies everything but the functions under
test, which are replaced before the tests import them. --keep leaves a function fla's own: its
test_chunk compares chunk_gla with fused_recurrent_gla, so with --keep fused_recurrent_gla ours is
held against fla's kernel. Needs a CUDA device. The exit code is pytest's.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from support.signatures import FLA_OPS

FILES = ("test_hgrn.py", "test_gla.py", "test_forgetting_attn.py")


def replace(keep: list[str]) -> list[str]:
    """Puts our functions in the place of fla's, everywhere that these are found; their names."""
    from tidegate.compat import fla

    names = [name for name in FLA_OPS if name not in keep]
    for name in names:
        theirs = getattr(importlib.import_module(FLA_OPS[name]), name)
        for module in [m for n, m in sys.modules.items() if n.split(".")[0] == "fla"]:
            if getattr(module, name, None) is theirs:
                setattr(module, name, getattr(fla, name))
    return names


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--keep", nargs="*", default=[], choices=list(FLA_OPS), metavar="NAME")
    options, more = parser.parse_known_args()
    for module in FLA_OPS.values():
        importlib.import_module(module)
    print("replaced:", ", ".join(replace(options.keep)))
    files = [str(options.checkout / "tests" / "ops" / name) for name in FILES]
    own = ["-q", "-p", "no:cacheprovider", "--rootdir", str(options.checkout)]
    return pytest.main([*own, *files, *more])


if __name__ == "__main__":
    sys.exit(main())
