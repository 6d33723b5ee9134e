"""Whole models over the token mixers: configurations, presets, files.

`tidegate.models.loaders` reads weights published for other implementations.
"""

from . import loaders
from .block import Block, Output
from .causal_lm import CausalLM
from .classifiers import ImageClassifier, SequenceClassifier
from .config import LMConfig
from .presets import presets
from .registry import mixers

__all__ = [
    "Block",
    "CausalLM",
    "ImageClassifier",
    "LMConfig",
    "Output",
    "SequenceClassifier",
    "loaders",
    "mixers",
    "presets",
]
