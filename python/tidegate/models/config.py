"""The configuration of a whole model, and its JSON form."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from typing import Any

from ..nn._common import (
    GLU_ACTIVATIONS,
    LOWER_BOUND_MODES,
    NORMS,
    check_choice,
    check_positive,
)
from .registry import check_mixer_options, option_names


@dataclass
class LMConfig:
    """What a `CausalLM`, `SequenceClassifier` or `ImageClassifier` is made of.

    Attributes:
        mixer: the token mixer's name, see `tidegate.models.mixers()`; or a list of names, one a
            layer.
        vocab_size: number of token ids; None for image models.
        dim: width of the residual stream.
        layers: number of blocks.
        mixer_options: further keyword arguments of the mixers' classes.
        layer_options: options of single layers, over mixer_options: one dictionary a layer from
            the first on; layers beyond the last have none.
        glu_hidden: hidden width of the channel mixer; None = 2 * dim.
        glu_activation: "none" (HGRN's language models) or "silu".
        glu_bias: biases in the channel mixer.
        norm: the two norms of a block: "layer", "rms" or "rms_no_weight".
        final_norm: the norm before the head; None = `norm`.
        norm_eps: epsilon of all norms.
        lower_bound: mode of `LowerBounds`: "cumulative", "none", "independent", "decreasing";
            ignored by mixers without a lower bound. "gla", "fox", "lru" (with gate="data"),
            "gated-rnn" and "gated-linear-rnn" have one only with mixer_options={"lower_bound":
            True}.
        dropout: after the embedding and after each mixer and GLU, in training.
        tied: whether the head is the embedding's transpose (language models).
        scale_embedding: multiply embeddings by sqrt(dim); None = as `tied`.
        num_classes: classes of a classifier.
        patch_size: side of an image patch in pixels.
        image_channels: channels of an image.
        init_std: spread of the normal numbers that the matrices of projections, embedding and head
            start with, biases then zero, but for those that gate_init or theta says otherwise of;
            None = each module's own start.

    Raises ValueError, naming the field, for values that cannot be.
    """

    mixer: str | list[str] = "hgrn2"
    vocab_size: int | None = 256
    dim: int = 256
    layers: int = 4
    mixer_options: dict[str, Any] = field(default_factory=dict)
    layer_options: list[dict[str, Any]] = field(default_factory=list)
    glu_hidden: int | None = None
    glu_activation: str = "none"
    glu_bias: bool = False
    norm: str = "layer"
    final_norm: str | None = None
    norm_eps: float = 1e-5
    lower_bound: str = "cumulative"
    dropout: float = 0.0
    tied: bool = True
    scale_embedding: bool | None = None
    num_classes: int | None = None
    patch_size: int | None = None
    image_channels: int = 3
    init_std: float | None = None

    def __post_init__(self) -> None:
        for name in ("dim", "layers", "image_channels"):
            check_positive("LMConfig", name, getattr(self, name))
        for name in ("vocab_size", "glu_hidden", "num_classes", "patch_size"):
            if getattr(self, name) is not None:
                check_positive("LMConfig", name, getattr(self, name))
        check_choice("LMConfig", "glu_activation", self.glu_activation, GLU_ACTIVATIONS)
        check_choice("LMConfig", "norm", self.norm, NORMS)
        check_choice("LMConfig", "final_norm", self.final_norm, (None, *NORMS))
        check_choice("LMConfig", "lower_bound", self.lower_bound, LOWER_BOUND_MODES)
        for name in ("glu_bias", "tied"):
            check_choice("LMConfig", name, getattr(self, name), (True, False))
        check_choice("LMConfig", "scale_embedding", self.scale_embedding, (None, True, False))
        number = (int, float)
        p, eps, options = self.dropout, self.norm_eps, self.mixer_options
        _expect(isinstance(p, number) and 0.0 <= p < 1.0, "dropout", "0 <= p < 1", p)
        _expect(isinstance(eps, number) and eps > 0.0, "norm_eps", "a positive number", eps)
        std = self.init_std
        fits = std is None or isinstance(std, number) and std > 0.0
        _expect(fits, "init_std", "a positive number", std)
        _expect(isinstance(options, dict), "mixer_options", "a dictionary", options)
        self.mixer_options = _plain(options)  # copies made by replace() share nothing
        self._check_layers()

    def _check_layers(self) -> None:
        names, options = self.mixer, self.layer_options
        is_list = isinstance(names, (list, tuple)) and all(isinstance(n, str) for n in names)
        _expect(
            isinstance(names, str) or (is_list and len(names) == self.layers),
            "mixer",
            f"a name, or a list of one for each of the {self.layers} layers",
            names,
        )
        is_list = isinstance(options, (list, tuple)) and all(isinstance(o, dict) for o in options)
        _expect(
            is_list and len(options) <= self.layers,
            "layer_options",
            f"a list of at most {self.layers} dictionaries, one a layer",
            options,
        )
        self.mixer = names if isinstance(names, str) else list(names)
        self.layer_options = [_plain(o) for o in options]
        for layer in range(self.layers):
            check_mixer_options(*self._of_layer(layer))

    def _of_layer(self, layer: int) -> tuple[str, dict[str, Any]]:
        """The mixer's name and options in a layer."""
        name = self.mixer if isinstance(self.mixer, str) else self.mixer[layer]
        own = self.layer_options[layer] if layer < len(self.layer_options) else {}
        return name, {**self.mixer_options, **own}

    def of_layer(self, layer: int) -> LMConfig:
        """The configuration with this layer's mixer and options everywhere: what `Block` takes.

        A mixer with an option `depth` that is not set gets where the layer stands:
        ``layer / (layers - 1)``, 0 the first and 1 the last.
        """
        name, options = self._of_layer(layer)
        if "depth" in option_names(name):
            options.setdefault("depth", layer / max(self.layers - 1, 1))
        return self.replace(mixer=name, mixer_options=options, layer_options=[])

    def replace(self, **changes: Any) -> LMConfig:
        """A copy with some fields changed."""
        return dataclasses.replace(self, **changes)

    def to_dict(self) -> dict[str, Any]:
        """All fields as plain values."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> LMConfig:
        """The reverse of to_dict(); missing keys take their defaults, unknown ones raise."""
        _expect(isinstance(values, dict), "JSON", "an object", values)
        known = [f.name for f in dataclasses.fields(cls)]
        unknown = [key for key in values if key not in known]
        if unknown:
            raise ValueError(
                f"LMConfig: unknown key {', '.join(map(repr, unknown))}; known: {', '.join(known)}"
            )
        return cls(**values)

    def to_json(self) -> str:
        """JSON text, one field a line."""
        return json.dumps(self.to_dict(), indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str) -> LMConfig:
        """The reverse of to_json(); ValueError when the text is not such JSON."""
        try:
            values = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"LMConfig: not valid JSON: {error}") from error
        return cls.from_dict(values)


def _plain(options: dict[str, Any]) -> dict[str, Any]:
    """A copy in which ``("long", 2, 256)`` is "long:2:256", as C++ and files have it."""
    return {
        name: ":".join(map(str, value)) if isinstance(value, (tuple, list)) else value
        for name, value in options.items()
    }


def _expect(holds: bool, name: str, wanted: str, given: object) -> None:
    if not holds:
        raise ValueError(f"LMConfig: {name}: expected {wanted}; got {given!r}")
