"""tidegate.hf under transformers' Trainer: the loss falls, a run resumes, packed batches train."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.hf_models import config

transformers = pytest.importorskip("transformers", minversion="5.0", reason="needs tidegate[hf]")
pytest.importorskip("accelerate", reason="transformers' Trainer needs accelerate")
from transformers import (  # noqa: E402
    DataCollatorWithFlattening,
    Trainer,
    TrainingArguments,
)

from tidegate import hf  # noqa: E402


class Cycles(torch.utils.data.Dataset):
    """Rows that count upwards modulo 12 from somewhere: learnt in a few steps."""

    def __init__(self, rows: int, uneven: bool = False) -> None:
        self.rows, self.uneven = rows, uneven

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, k: int) -> dict[str, list[int]]:
        ids = [1 + (k + t) % 12 for t in range(12 + (k % 5 if self.uneven else 0))]
        return {"input_ids": ids, "labels": list(ids)}


def trainer(out: Path, steps: int, model: Any = None, **more: Any) -> Trainer:
    torch.manual_seed(0)
    model = hf.TidegateForCausalLM(config("hgrn2", layers=1)) if model is None else model
    settings = {
        "output_dir": str(out),
        "max_steps": steps,
        "per_device_train_batch_size": 4,
        "learning_rate": 2e-2,
        "lr_scheduler_type": "constant",
        "logging_steps": 1,
        "save_steps": 10,
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        "seed": 3,
    }
    collator = more.pop("data_collator", None)
    data = more.pop("train_dataset", None) or Cycles(64)
    arguments = TrainingArguments(**{**settings, **more})
    return Trainer(model, arguments, train_dataset=data, data_collator=collator)


def losses(run: Trainer) -> list[float]:
    return [line["loss"] for line in run.state.log_history if "loss" in line]


def test_the_loss_falls_and_a_run_resumes(tmp_path: Path) -> None:
    whole = trainer(tmp_path / "whole", 20)
    whole.train()
    assert losses(whole)[0] > 3.0
    assert losses(whole)[-1] < 1.0
    first = trainer(tmp_path / "cut", 10)
    first.train()
    assert (tmp_path / "cut" / "checkpoint-10" / "model.safetensors").is_file()
    second = trainer(tmp_path / "cut", 20)
    second.train(resume_from_checkpoint=True)
    assert losses(second) == losses(whole)
    for a, b in zip(whole.model.parameters(), second.model.parameters(), strict=True):
        assert torch.equal(a, b)
    found = hf.TidegateForCausalLM.from_pretrained(tmp_path / "cut" / "checkpoint-20")
    prompt = torch.tensor([[3, 4, 5]])
    assert found.generate(prompt, max_new_tokens=4, do_sample=False)[0, 3:].tolist() == [6, 7, 8, 9]


@pytest.mark.parametrize("with_bounds", [False, True])
def test_packed_batches_train(with_bounds: bool, tmp_path: Path) -> None:
    """The collator's positions, or its cu_seq_lens: the same losses."""
    collator = DataCollatorWithFlattening(return_flash_attn_kwargs=with_bounds)
    run = trainer(
        tmp_path, 20, data_collator=collator, train_dataset=Cycles(64, uneven=True),
        gradient_checkpointing=True, save_strategy="no",
    )  # fmt: skip
    run.train()
    assert losses(run)[-1] < 1.0


def test_gradients_accumulate_over_tokens(tmp_path: Path) -> None:
    """Two batches of four are one of eight, whose loss is a mean over its tokens."""
    runs = []
    for size, times in ((8, 1), (4, 2)):
        run = trainer(
            tmp_path / str(times), 3, per_device_train_batch_size=size,
            gradient_accumulation_steps=times, save_strategy="no",
        )  # fmt: skip
        run.train()
        runs.append(losses(run))
    assert runs[0] == pytest.approx(runs[1], rel=1e-3)
