"""The configuration of a whole model, and its JSON form."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ..nn._common import (
    GLU_ACTIVATIONS,
    LOWER_BOUND_MODES,
    MAX_IMAGE_CHANNELS,
    MAX_LAYERS,
    MAX_PATCH_SIZE,
    MAX_VOCAB_SIZE,
    MAX_WIDTH,
    NORMS,
)
from ._json import JsonError, parse_json, shown
from .registry import check_mixer_options, option_names, type_problem

# The most that each size may be, in the order in which they are checked.
_SIZES = {
    "dim": MAX_WIDTH,
    "layers": MAX_LAYERS,
    "image_channels": MAX_IMAGE_CHANNELS,
    "vocab_size": MAX_VOCAB_SIZE,
    "glu_hidden": MAX_WIDTH,
    "num_classes": MAX_VOCAB_SIZE,
    "patch_size": MAX_PATCH_SIZE,
}
_OPTION = (bool, int, float, str, type(None))


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

    Raises ValueError, naming the field, for values that cannot be: of another type (True is no
    number, 1 is no switch), out of range, or more than `tidegate` builds (nn/choices.json).
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
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        _check_types(values, option_types=(*_OPTION, tuple, list))
        for name, most in _SIZES.items():
            self._check_size(name, most)
        _check_choice("glu_activation", self.glu_activation, GLU_ACTIVATIONS)
        _check_choice("norm", self.norm, NORMS)
        _check_choice("final_norm", self.final_norm, (None, *NORMS))
        _check_choice("lower_bound", self.lower_bound, LOWER_BOUND_MODES)
        for name in ("dropout", "norm_eps", "init_std"):
            if getattr(self, name) is not None:
                setattr(self, name, float(getattr(self, name)))
        p = self.dropout
        _expect(0.0 <= p < 1.0, "dropout", "0 <= p < 1", shown(p))
        for name in ("norm_eps", "init_std"):
            value = getattr(self, name)
            fits = value is None or 0.0 < value < math.inf
            _expect(fits, name, "a positive number", shown(value))
        self.mixer_options = _plain(self.mixer_options)  # copies made by replace() share nothing
        self._check_layers()

    def _check_size(self, name: str, most: int) -> None:
        size = getattr(self, name)
        if size is not None:
            _expect(size >= 1, name, "a positive integer", shown(size))
            _expect(size <= most, name, f"at most {most}", shown(size))

    def _check_layers(self) -> None:
        names, options = self.mixer, self.layer_options
        is_name = isinstance(names, str)
        _expect(
            is_name or len(names) == self.layers,
            "mixer",
            f"a name, or a list of one for each of the {self.layers} layers",
            f"{1 if is_name else len(names)} names",
        )
        _expect(
            len(options) <= self.layers,
            "layer_options",
            f"a list of at most {self.layers} dictionaries, one a layer",
            str(len(options)),
        )
        self.mixer = names if is_name else list(names)
        self.layer_options = [_plain(o) for o in options]
        # Layers beyond those that are listed are all alike.
        different = min(self.layers, len(options) + 1) if is_name else self.layers
        for layer in range(different):
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
        _check_names(values)
        return cls(**values)

    def to_json(self) -> str:
        """JSON text, one field a line."""
        return json.dumps(self.to_dict(), indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str) -> LMConfig:
        """The reverse of to_json(); ValueError when the text is not such JSON."""
        try:
            values = parse_json(text)
        except JsonError as error:
            raise ValueError(f"LMConfig: {error}") from error
        _check_names(values)
        _check_types(values, option_types=_OPTION)
        return cls(**values)


def _plain(options: dict[str, Any]) -> dict[str, Any]:
    """A copy in which ``("long", 2, 256)`` is "long:2:256", as C++ and files have it."""
    return {
        name: ":".join(map(str, value)) if isinstance(value, (tuple, list)) else value
        for name, value in options.items()
    }


def _check_names(values: object) -> None:
    """Raises ValueError unless `values` is a dictionary of fields."""
    _expect(isinstance(values, dict), "JSON", "an object", shown(values))
    known = [f.name for f in dataclasses.fields(LMConfig)]
    for key in values:
        if key not in known:
            raise ValueError(f"LMConfig: unknown key {shown(key)}; known: {', '.join(known)}")


def _check_types(values: dict[str, Any], option_types: tuple[type, ...]) -> None:
    """Raises ValueError for the first field, in their order, whose value is of another type.

    option_types: those of a mixer's option, whichever it is; files have no lists there.
    """
    for f in dataclasses.fields(LMConfig):
        if f.name not in values:
            continue
        value = values[f.name]
        if f.name == "mixer":
            fits = isinstance(value, str) or _is_list_of(str, value)
            _expect(fits, "mixer", "a name, or a list of names", shown(value))
        elif f.name == "mixer_options":
            _check_options("mixer_options", value, option_types)
        elif f.name == "layer_options":
            fits = isinstance(value, (list, tuple))
            _expect(fits, "layer_options", "a list of dictionaries", shown(value))
            for options in value:
                _check_options("layer_options", options, option_types)
        else:
            kind, _, other = f.type.partition(" | ")
            expected = "" if other and value is None else type_problem(kind, value)
            if kind == "int" and expected:
                expected = "a positive integer"
            _expect(not expected, f.name, expected, shown(value))


def _check_options(name: str, options: object, types: tuple[type, ...]) -> None:
    _expect(isinstance(options, dict), name, "a dictionary", shown(options))
    expected = "a number, a string, True, False or None"
    for option, value in options.items():
        _expect(isinstance(value, types), f"{name}: {shown(option)}", expected, shown(value))


def _is_list_of(kind: type, value: object) -> bool:
    return isinstance(value, (list, tuple)) and all(isinstance(item, kind) for item in value)


def _check_choice(name: str, value: object, allowed: Sequence[object]) -> None:
    names = ", ".join(map(repr, allowed))
    _expect(value in allowed, name, f"one of {names}", shown(value))


def _expect(holds: bool, name: str, wanted: str, given: str) -> None:
    if not holds:
        raise ValueError(f"LMConfig: {name}: expected {wanted}; got {given}")
