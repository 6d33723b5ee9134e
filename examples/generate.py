"""Continues a prompt with a model that `examples/train.py` has saved.

    python examples/generate.py runs/mine "Once upon a time" --tokens 200

What is shown: `CausalLM.load`, then decoding in its two parts, which `CausalLM.generate` does in
one call. `prefill` reads the prompt in parallel and returns the state; `step` takes one token and
updates the state in place: constant work a token for recurrent mixers, however long the text is.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from tidegate.models import CausalLM


@torch.no_grad()
def continue_prompt(model: CausalLM, prompt: bytes, count: int, temperature: float) -> bytes:
    """`count` bytes, each drawn from the model's distribution after all before it."""
    device = next(model.parameters()).device
    logits, state = model.prefill(torch.tensor([list(prompt)], device=device), capacity=count)
    new = []
    for _ in range(count):
        probabilities = torch.softmax(logits.float() / temperature, -1)
        token = torch.multinomial(probabilities, 1).squeeze(-1)
        new.append(int(token))
        logits = model.step(token, state)
    return bytes(new)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path, help="a folder that examples/train.py wrote")
    parser.add_argument("prompt")
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--temperature", type=float, default=0.8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    model = CausalLM.load(args.model, device=args.device)
    new = continue_prompt(model, args.prompt.encode(), args.tokens, args.temperature)
    print(args.prompt + new.decode("utf-8", errors="replace"))

    # `generate` is both parts in one call, and leaves torch's own generators alone.
    ids = torch.tensor([list(args.prompt.encode())], device=args.device)
    likeliest = model.generate(ids, args.tokens, temperature=0)
    print("likeliest:", bytes(likeliest[0].tolist()).decode("utf-8", errors="replace"))


if __name__ == "__main__":
    main()
