"""`tidegate generate`: text from a model."""

from __future__ import annotations

import argparse
from typing import Any


def add(commands: Any) -> None:
    parser = commands.add_parser("generate", help="write text with a trained model")
    parser.add_argument("run", help="run folder or saved model")
    parser.add_argument("--prompt", default="", help="text to go on from")
    parser.add_argument("--tokens", type=int, default=400, help="tokens to write (%(default)s)")
    parser.add_argument("--temperature", type=float, default=0.8, help="0 = the likeliest token")
    parser.add_argument("--top-k", type=int)
    parser.add_argument("--top-p", type=float, default=0.95)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device", default="auto")
    parser.set_defaults(command=run)


def run(options: argparse.Namespace) -> int:
    from ..training.generate import generate_text
    from ..training.trained import load_trained

    text = generate_text(
        load_trained(options.run, options.device),
        options.prompt.encode("utf-8", errors="surrogateescape"),
        options.tokens,
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        seed=options.seed,
    )
    print(text.decode("utf-8", errors="replace"))
    return 0
