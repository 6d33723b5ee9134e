"""lm_eval's command line with these models registered."""

import contextlib

import tidegate.lm_eval

with contextlib.suppress(ImportError):  # without transformers there is no --model hf
    import tidegate.hf  # noqa: F401

from lm_eval.__main__ import cli_evaluate

if __name__ == "__main__":
    cli_evaluate()
