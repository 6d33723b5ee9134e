"""Trains a small language model on a text of yours: your own loop around `tidegate.models`.

    python examples/train.py my_text.txt --out runs/mine
    python examples/train.py my_text.txt --out runs/mine --mixer fox --device cuda --steps 2000

The model reads bytes, so any file will do. What is shown: a configuration, the loss that the model
computes itself (`labels="next"`), torch's optimizer and autocast around it, and `save`, whose files
`examples/generate.py` and the C++ `CausalLM` read. For a training run with schedules, checkpoints
to resume from and plots there is the command `tidegate train` (docs/training.md).
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from tidegate.models import CausalLM, LMConfig


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("text", type=Path)
    parser.add_argument("--out", type=Path, required=True, help="folder for the trained model")
    parser.add_argument("--mixer", default="hgrn2", help="hgrn, hgrn2, gla, lru, rwkv4, fox, ...")
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--context", type=int, default=256, help="tokens a sequence")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--device", default="cpu")
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    torch.manual_seed(0)
    tokens = torch.tensor(list(args.text.read_bytes()), device=args.device)
    if len(tokens) <= args.context:
        raise SystemExit(f"{args.text} has {len(tokens)} bytes: more than --context are needed")

    config = LMConfig(mixer=args.mixer, vocab_size=256, dim=args.dim, layers=args.layers)
    model = CausalLM(config, device=args.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, args.lr, total_steps=args.steps)
    precision = torch.bfloat16 if args.device.startswith("cuda") else torch.float32

    for step in range(args.steps):
        starts = torch.randint(len(tokens) - args.context + 1, (args.batch_size,)).tolist()
        ids = torch.stack([tokens[start : start + args.context] for start in starts])
        with torch.autocast(args.device.split(":")[0], precision, enabled=precision.itemsize == 2):
            loss = model(ids, labels="next").loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 20 == 0 or step == args.steps - 1:
            print(f"step {step}: loss {loss.item():.3f} nats a byte")

    model.save(args.out)
    print(f"saved to {args.out}")


if __name__ == "__main__":
    main()
