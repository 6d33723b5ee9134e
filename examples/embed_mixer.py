"""One mixer in a model of your own, trained by torch's optimizer.

    python examples/embed_mixer.py
    python examples/embed_mixer.py --steps 500 --device cuda

The model reads numbers and marks, and predicts at every position the number that stood at the mark
last seen: it has to hold a value for as long as no new mark comes. What is shown: a token mixer
(`tidegate.nn.HGRU`) as a layer among torch's own, with a norm and a residual; training in parallel
over time; then the trained model run one token at a time with the mixer's state, which gives what
the parallel pass gives.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn

import tidegate


class HoldLast(nn.Module):
    """[B, T, 2] of numbers and marks -> [B, T] predictions."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.embed = nn.Linear(2, dim)
        self.norm = nn.LayerNorm(dim)
        self.mixer = tidegate.nn.HGRU(dim, complex=False)
        self.head = nn.Linear(dim, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        mixed, _ = self.mixer(self.norm(x))  # training ignores the final state
        return self.head(x + mixed).squeeze(-1)

    def step(self, x: Tensor, state: Tensor) -> Tensor:
        """One token: [B, 2] -> [B]; the state is updated in place."""
        x = self.embed(x)
        return self.head(x + self.mixer.step(self.norm(x), state)).squeeze(-1)


def batch(size: int, time: int, device: str) -> tuple[Tensor, Tensor]:
    """Numbers with marks, and the number at the last mark (the first token is always marked)."""
    numbers = torch.rand(size, time, device=device)
    marks = (torch.rand(size, time, device=device) < 0.1).float()
    marks[:, 0] = 1
    at = torch.where(marks > 0, torch.arange(time, device=device), 0).cummax(1).values
    return torch.stack([numbers, marks], -1), numbers.gather(1, at)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--dim", type=int, default=32)
    parser.add_argument("--time", type=int, default=64)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()

    torch.manual_seed(0)
    model = HoldLast(args.dim).to(args.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(args.steps):
        x, target = batch(32, args.time, args.device)
        loss = (model(x) - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 0 or step == args.steps - 1:
            print(f"step {step}: squared error {loss.item():.4f}")

    x, _ = batch(4, args.time, args.device)
    with torch.no_grad():
        state = model.mixer.init_state(batch=4, device=args.device)
        one_by_one = torch.stack([model.step(x[:, t], state) for t in range(args.time)], 1)
        torch.testing.assert_close(one_by_one, model(x), rtol=1e-3, atol=1e-4)
    print("one token at a time gives the same predictions")


if __name__ == "__main__":
    main()
