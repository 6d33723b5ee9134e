"""The configuration of a model in transformers' form."""

from __future__ import annotations

from typing import Any

from transformers import PretrainedConfig

from ..models import LMConfig
from ..models.registry import mixer_class

# What a saved model's folder says to a transformers that has not imported tidegate.hf, with
# trust_remote_code=True: the file of this name there imports it.
STUB = "modeling_tidegate"
AUTO_MAP = {
    "AutoConfig": f"{STUB}.TidegateConfig",
    "AutoModel": f"{STUB}.TidegateModel",
    "AutoModelForCausalLM": f"{STUB}.TidegateForCausalLM",
    "AutoModelForSequenceClassification": f"{STUB}.TidegateForSequenceClassification",
}
# Fields of LMConfig under the names that transformers has for them.
_THEIR_NAMES = {"hidden_size": "dim", "num_hidden_layers": "layers"}


class TidegateConfig(PretrainedConfig):
    """What `tidegate.models.LMConfig` says, and what transformers asks of a configuration.

    Args are LMConfig's, by name, but for ``tied``, which is transformers' ``tie_word_embeddings``,
    and those of classifiers and images (``num_labels`` is the number of classes). ``hidden_size``
    and ``num_hidden_layers`` are other names of dim and layers. use_cache: whether a forward pass
    in evaluation mode returns a cache where nothing else is asked for. fuse_linear_cross_entropy:
    whether a forward pass in training, with labels, returns the loss without logits.

    Raises ValueError, naming the field, for what LMConfig refuses.
    """

    model_type = "tidegate"
    keys_to_ignore_at_inference = ["past_key_values", "cache"]
    attribute_map = _THEIR_NAMES

    def __init__(
        self,
        mixer: str | list[str] = "hgrn2",
        vocab_size: int = 256,
        dim: int = 256,
        layers: int = 4,
        mixer_options: dict[str, Any] | None = None,
        layer_options: list[dict[str, Any]] | None = None,
        glu_hidden: int | None = None,
        glu_activation: str = "none",
        glu_bias: bool = False,
        norm: str = "layer",
        final_norm: str | None = None,
        norm_eps: float = 1e-5,
        lower_bound: str = "cumulative",
        dropout: float = 0.0,
        scale_embedding: bool | None = None,
        init_std: float | None = None,
        use_cache: bool = True,
        fuse_linear_cross_entropy: bool = True,
        tie_word_embeddings: bool = True,
        pad_token_id: int | None = None,
        bos_token_id: int | None = None,
        eos_token_id: int | list[int] | None = None,
        **kwargs: Any,
    ) -> None:
        if "tied" in kwargs:  # as in the folder of a CausalLM, whose weights have other names, too
            raise ValueError(
                "TidegateConfig: tied: expected tie_word_embeddings, which is transformers' name "
                f"of it; got tied={kwargs['tied']!r}. A folder that CausalLM.save wrote becomes "
                "transformers' by `tidegate convert FOLDER OUT --to hf`"
            )
        self.mixer = mixer
        self.vocab_size = vocab_size
        self.dim = kwargs.pop("hidden_size", dim)
        self.layers = kwargs.pop("num_hidden_layers", layers)
        self.mixer_options = dict(mixer_options or {})
        self.layer_options = [dict(options) for options in layer_options or []]
        self.glu_hidden = glu_hidden
        self.glu_activation = glu_activation
        self.glu_bias = glu_bias
        self.norm = norm
        self.final_norm = final_norm
        self.norm_eps = norm_eps
        self.lower_bound = lower_bound
        self.dropout = dropout
        self.scale_embedding = scale_embedding
        self.init_std = init_std
        self.use_cache = use_cache
        self.fuse_linear_cross_entropy = fuse_linear_cross_entropy
        kwargs.pop("layer_types", None)  # the mixers say them
        self.auto_map = kwargs.pop("auto_map", None) or dict(AUTO_MAP)
        super().__init__(
            tie_word_embeddings=tie_word_embeddings,
            pad_token_id=pad_token_id,
            bos_token_id=bos_token_id,
            eos_token_id=eos_token_id,
            **kwargs,
        )
        self.lm_config()  # raises for what cannot be

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoConfig") -> None:
        """Nothing: transformers would copy this file, which is a package's, beside the weights."""

    @property
    def layer_types(self) -> list[str]:
        """What transformers' caches ask of each layer, "full_attention" where its state grows with
        the tokens and else "linear_attention"."""
        config = self.lm_config()
        names = (config.of_layer(k).mixer for k in range(config.layers))
        grows = (getattr(mixer_class(name), "keeps_tokens", False) for name in names)
        return ["full_attention" if g else "linear_attention" for g in grows]

    def lm_config(self) -> LMConfig:
        """The LMConfig of a `CausalLM` that is the same model."""
        return LMConfig(tied=self.tie_word_embeddings, **{n: getattr(self, n) for n in _FIELDS})

    @classmethod
    def from_lm_config(cls, config: LMConfig, **more: Any) -> TidegateConfig:
        """The configuration of a `CausalLM`; more: what transformers has beside it, such as
        eos_token_id."""
        fields = {name: getattr(config, name) for name in _FIELDS}
        return cls(tie_word_embeddings=config.tied, **fields, **more)


_FIELDS = (
    "mixer",
    "vocab_size",
    "dim",
    "layers",
    "mixer_options",
    "layer_options",
    "glu_hidden",
    "glu_activation",
    "glu_bias",
    "norm",
    "final_norm",
    "norm_eps",
    "lower_bound",
    "dropout",
    "scale_embedding",
    "init_std",
)
