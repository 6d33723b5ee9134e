"""tidegate's models in Hugging Face's transformers: ``pip install tidegate[hf]``.

Importing this registers them: ``AutoConfig``, ``AutoModel``, ``AutoModelForCausalLM`` and
``AutoModelForSequenceClassification`` then know "tidegate". ``import tidegate`` alone imports none
of it.
"""

try:
    import transformers
except ImportError as error:
    raise ImportError(
        "tidegate.hf: transformers is not installed: pip install 'tidegate[hf]'"
    ) from error

if int(transformers.__version__.split(".")[0]) < 5:
    raise ImportError(
        f"tidegate.hf: transformers 5 is needed, got {transformers.__version__}: "
        "pip install 'tidegate[hf]'"
    )

from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from .cache import AttentionStateLayer, RecurrentStateLayer
from .config import TidegateConfig
from .model import (
    TidegateForCausalLM,
    TidegateForSequenceClassification,
    TidegateModel,
    TidegatePreTrainedModel,
)

__all__ = [
    "AttentionStateLayer",
    "RecurrentStateLayer",
    "TidegateConfig",
    "TidegateForCausalLM",
    "TidegateForSequenceClassification",
    "TidegateModel",
    "TidegatePreTrainedModel",
]

AutoConfig.register("tidegate", TidegateConfig, exist_ok=True)
AutoModel.register(TidegateConfig, TidegateModel, exist_ok=True)
AutoModelForCausalLM.register(TidegateConfig, TidegateForCausalLM, exist_ok=True)
# register() writes nothing here, where Trainer looks for the models whose labels label smoothing
# has to shift: it would otherwise train this one to repeat its input.
MODEL_FOR_CAUSAL_LM_MAPPING_NAMES["tidegate"] = TidegateForCausalLM.__name__
AutoModelForSequenceClassification.register(
    TidegateConfig, TidegateForSequenceClassification, exist_ok=True
)
