"""tidegate's models in EleutherAI's lm-evaluation-harness: ``pip install tidegate[lm-eval]``.

    python -m tidegate.lm_eval --model tidegate --model_args path=runs/mine --tasks wikitext
    python -m tidegate.lm_eval --model hf --model_args pretrained=my-model --tasks wikitext

are lm_eval's own command, which knows no models but its own: the module registers ``tidegate``,
and, where transformers is installed, imports `tidegate.hf` for ``--model hf``. Everything else is
lm_eval's. In Python, importing this makes ``lm_eval.simple_evaluate(model="tidegate", ...)`` work.
"""

try:
    import lm_eval
except ImportError as error:
    raise ImportError(
        "tidegate.lm_eval: lm-eval is not installed: pip install 'tidegate[lm-eval]'"
    ) from error

from .model import TidegateLM
from .tasks import run_tasks

__all__ = ["TidegateLM", "run_tasks"]

del lm_eval
