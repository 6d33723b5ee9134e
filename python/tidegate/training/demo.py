"""`tidegate demo`: a byte-level HGRN learns the Python standard library's sources in minutes."""

from __future__ import annotations

import sys

from .baselines import baselines
from .generate import generate_text
from .report import finish, plot_run, table
from .runs import prepare_run
from .trained import load_trained

PROMPT = b"def "
SAMPLE_TOKENS = 500


def run_demo(out: str, *, seconds: float | None = None, seed: int | None = None) -> bool:
    """Trains the `demo` recipe into the folder `out` and reports; False when it was stopped early.

    seconds: another wall-time budget of training. A folder that holds a finished demo is reported
    again without training; one that was interrupted goes on.
    """
    asked = {"seconds": seconds, "seed": seed}
    explicit = {name: value for name, value in asked.items() if value is not None}
    run = prepare_run(out, explicit, {}, recipe="demo")
    trainer, corpus, config = run.trainer, run.corpus, run.config
    parameters = sum(p.numel() for p in trainer.model.parameters())
    _say(
        f"text: the Python standard library's own sources, {len(corpus.train) / 1e6:.1f} MB to "
        f"train on, {len(corpus.valid) / 1e6:.2f} MB of other files to validate on"
    )
    _say(
        f"model: HGRN, {run.model_config.layers} layers of {run.model_config.dim}, "
        f"{parameters / 1e6:.1f}M parameters; {config.seconds:.0f} s of training on "
        f"{trainer.device}, {config.precision}"
    )
    if trainer.progress() >= 1.0:
        _say(f"{out} holds a finished demo; delete it to train again")
    elif run.resumed:
        _say(f"going on at step {trainer.position.step} of the run in {out}")
    if not trainer.run():
        _say(f"stopped; run the same command to go on from step {trainer.position.step}")
        return False
    _say("scoring the whole validation split ...")
    score = finish(run)
    others = baselines(corpus.train, corpus.valid)
    files = plot_run(out, baselines=others)
    sample = generate_text(load_trained(out), PROMPT, SAMPLE_TOKENS)
    print("\nA sample that the model wrote (temperature 0.8):\n")
    print("    " + sample.decode("utf-8", errors="replace").replace("\n", "\n    "))
    position = trainer.position
    print(f"\nValidation, bits per byte over {corpus.valid_bytes:,} bytes (lower is better):\n")
    print(table([(f"HGRN after {position.seconds:.0f} s", score.bits_per_byte), *others.items()]))
    speed = position.tokens / position.seconds
    print(f"\n{position.step} steps, {position.tokens:,} bytes read, {speed:,.0f} bytes/s")
    print(f"In {out}: {', '.join(['config.json', 'metrics.jsonl', *(f.name for f in files)])},")
    print(f"checkpoint.pt, model/. More text: tidegate generate {out} --prompt 'class '")
    return True


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
