"""The papers' configurations by name.

Papers: HGRN (NeurIPS 2023), HGRN2 (COLM 2024), FoT: Forgetting Transformer (ICLR 2025).
"""

from __future__ import annotations

import difflib
import functools
import json
from pathlib import Path
from typing import Any

from .config import LMConfig


@functools.cache
def _fields() -> dict[str, dict[str, Any]]:
    """What presets.json says; the C++ library is built with the same file."""
    return json.loads(Path(__file__).with_name("presets.json").read_text(encoding="utf-8"))


class _NoSuchPreset(KeyError):
    __str__ = Exception.__str__  # a sentence; KeyError would quote it


class _Presets(dict[str, LMConfig]):
    """Says which names there are when asked for another."""

    def __missing__(self, name: object) -> LMConfig:
        near = difflib.get_close_matches(str(name).lower(), self, n=3)
        expected = f"{' or '.join(map(repr, near))}" if near else f"one of {', '.join(self)}"
        raise _NoSuchPreset(f"presets: expected {expected}; got {name!r}")


def presets() -> dict[str, LMConfig]:
    """Fresh configurations by name; `LMConfig.replace` changes one.

    ==================== ============================================ =============
    name                 what                                         parameters
    ==================== ============================================ =============
    hgrn-44m             HGRN, WikiText-103 (HGRN Table 1)            46,248,448
    hgrn-real-d          real HGRN, state d (HGRN2 Table 1)           46,239,232
    hgrn-real-2d         real HGRN, state 2d (HGRN2 Table 1)          45,462,016
    hgrn-150m            HGRN on the Pile (HGRN Table 4)              153,647,616
    hgrn-350m            the same; the shape of hgrn-379m             378,683,392
    hgrn-379m            HGRN of HGRN2 Table 3                        378,683,392
    hgrn-1b              HGRN on the Pile (HGRN Tables 3 and 4)       1,084,497,920
    hgrn2-44m            HGRN2, WikiText-103 (HGRN2 Table 5)          44,661,244
    hgrn2-150m           HGRN2 on the Pile (HGRN2 Tables 7 and 13)    144,788,736
    hgrn2-385m           the same (HGRN2 Tables 3 and 13)             385,476,608
    hgrn2-1b             the same (HGRN2 Tables 7 and 13)             1,027,837,952
    hgrn2-2.9b           the same (HGRN2 Tables 8 and 13)             2,983,536,640
    hgrn2-756m           HGRN2 of FoT Table 4, fla's (*)              756,820,992
    transformer-386m     Transformer++ (HGRN2 Table 3)                385,504,256
    transformer-756m     Transformer (LLaMA) of FoT Table 4 (*)       756,747,264
    fox-757m             FoT (LLaMA), the same (*)                    757,189,920
    transformer-pro-757m Transformer (Pro), the same (*)              757,675,008
    fox-pro-758m         FoT (Pro), the same (*)                      758,117,664
    transformer-360m     Transformer (LLaMA) of FoT Table 3 (*)       359,794,688
    fox-360m             FoT (LLaMA), the same (*)                    359,991,488
    transformer-pro-360m Transformer (Pro), the same (*)              366,900,224
    fox-pro-360m         FoT (Pro), the same (*)                      366,706,880
    transformer-125m     Transformer (LLaMA), FoT Figure 5 (*)        123,551,232
    fox-125m             FoT (LLaMA), the same (*)                    123,606,600
    transformer-pro-125m Transformer (Pro), the same (*)              123,783,168
    fox-pro-125m         FoT (Pro), the same (*)                      123,729,480
    pese-lr-4            HGRN, state 4d, low rank (HGRN2 Table 3)     385,236,992
    pese-lr-8            the same, state 8d                           385,822,720
    pese-glt-4           group linear transformation (HGRN2 Table 3)  385,556,480
    pese-glti-4          the same with interaction                    385,557,728
    pese-krp-4           Khatri-Rao product                           385,875,968
    pese-kp-4            Kronecker product                            385,556,792
    hgrn-vit-tiny        HGRN in DeiT-tiny's frame (HGRN Table 7)     6,107,560
    hgrn-vit-small       HGRN in DeiT-small's frame (HGRN Table 7)    23,715,688
    demo                 byte-level model that two CPU cores train    2,698,752
    ==================== ============================================ =============

    The papers state parameters and losses, not every size: layers and widths of hgrn-150m and
    hgrn-1b are those that HGRN2 Table 13 gives for 0.15 and 1 billion parameters, with GLUs of
    twice the width, and hgrn-350m's are inferred with hgrn-379m's. For HGRN2, Table 13 gives layers
    and widths; the GLUs are 8/3 of the width, rounded up to a multiple of 256, which is the 2816 of
    the 385M model. FoT counts the head, but not the input embedding, and so do the lines with (*).
    It prints neither the GLUs nor the heads of its 125M models: the GLUs follow from flash-linear-
    attention's rule, the heads are as wide as in its other models.

    HGRN's and HGRN2's larger models follow the published training code (preset "official"): no
    biases, RMSNorm without weight, and the gate after the norm; of all choices this one gives
    HGRN2's 379M to the printed unit. FoT's models (section 4.1 and appendix B) have the LLaMA
    frame, untied, with RMSNorm as flash-linear-attention has it; their GLUs are 8/3 of the width,
    and 7/3 of it where an output gate takes the rest, rounded up to a multiple of 256. The pese
    models are HGRN1 with an expanded state in the frame of HGRN2's 385M model: Table 3 prints n and
    the parameters; the ranks, like the projection in krp, follow from them.
    """
    return _Presets({name: LMConfig.from_dict(fields) for name, fields in _fields().items()})
