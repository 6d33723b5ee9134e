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


def test_packed_batches_train(tmp_path: Path) -> None:
    """The collator's positions, its cu_seq_lens, or its seq_idx alone: the same losses."""
    found = []
    for kind in ("position_ids", "flash_attn_kwargs", "seq_idx"):
        says = {f"return_{k}": k == kind for k in ("position_ids", "flash_attn_kwargs", "seq_idx")}
        run = trainer(
            tmp_path / kind, 20, data_collator=DataCollatorWithFlattening(**says),
            train_dataset=Cycles(64, uneven=True), gradient_checkpointing=True, save_strategy="no",
        )  # fmt: skip
        run.train()
        assert losses(run)[-1] < 1.0
        found.append(losses(run))
    assert found[1] == found[0]
    assert found[2] == found[0]


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


def test_label_smoothing_is_of_the_next_token(tmp_path: Path) -> None:
    run = trainer(tmp_path, 1, label_smoothing_factor=0.1, save_strategy="no")
    batch = run.data_collator([run.train_dataset[k] for k in range(4)])
    logits = run.model(batch["input_ids"]).logits[:, :-1].flatten(0, 1)
    wanted = torch.nn.functional.cross_entropy(
        logits, batch["labels"][:, 1:].flatten(), label_smoothing=0.1
    )
    torch.testing.assert_close(run.compute_loss(run.model, dict(batch)), wanted)


class LargestTensor(torch.utils._python_dispatch.TorchDispatchMode):
    """The most elements that a result of any op has."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for t in torch.utils._pytree.tree_leaves(result):
            self.numel = max(self.numel, t.numel() if isinstance(t, torch.Tensor) else 0)
        return result


def rows() -> dict[str, torch.Tensor]:
    ids = torch.randint(1, 40, (2, 50), generator=torch.Generator().manual_seed(4))
    labels = ids.clone()
    labels[0, :7] = -100
    return {"input_ids": ids, "labels": labels}


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    "more",
    [{}, {"num_items_in_batch": torch.tensor(30)}, {"num_items_in_batch": 30, "ignore_index": 5}],
    ids=["mean", "items", "ignored"],
)
def test_a_loss_without_logits_is_the_loss(tied: bool, more: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = hf.TidegateForCausalLM(config("hgrn2", tie_word_embeddings=tied)).train()
    given = rows()
    if "ignore_index" in more:
        given["labels"][given["labels"] == -100] = 5
    fused, whole = model(**given, **more), model(**given, **more, skip_logits=False)
    assert fused.logits is None
    assert whole.logits.shape == (2, 50, 40)
    torch.testing.assert_close(fused.loss, whole.loss)
    parameters = list(model.parameters())
    found, wanted = (
        torch.autograd.grad(out.loss, parameters, allow_unused=True) for out in (fused, whole)
    )
    for a, b in zip(found, wanted, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b)
    assert model(**given, **more, return_dict=False)[0] == fused.loss


def test_no_tensor_of_tokens_times_vocabulary_is_made() -> None:
    vocab, tokens = 30_000, 3000
    model = hf.TidegateForCausalLM(config("hgrn2", vocab_size=vocab, layers=1))
    ids = torch.randint(1, 40, (1, tokens))
    with LargestTensor() as largest:
        model(input_ids=ids, labels=ids).loss.backward()
    assert largest.numel < vocab * tokens // 2


def test_when_logits_come() -> None:
    model = hf.TidegateForCausalLM(config("hgrn2", layers=1))
    given = rows()
    assert model.train()(**given).logits is None
    assert model(given["input_ids"]).logits is not None
    assert model.eval()(**given).logits is not None
    assert model(**given, skip_logits=True).logits is None
    with pytest.raises(ValueError, match="skip_logits: expected labels with it; got None"):
        model(given["input_ids"], skip_logits=True)
    model.train()
    with pytest.raises(ValueError, match="skip_logits: expected None or False with logits_to_keep"):
        model(**given, logits_to_keep=3, skip_logits=True)
    model.loss_function = lambda logits, labels, **_: logits.mean()
    assert model(**given).logits is not None
    model = hf.TidegateForCausalLM(config("hgrn2", layers=1, fuse_linear_cross_entropy=False))
    assert model(**given).logits is not None
    assert hf.TidegateConfig.from_dict(model.config.to_dict()).fuse_linear_cross_entropy is False
    model = hf.TidegateForCausalLM(config("hgrn2", layers=1))
    model.lm_head.register_forward_hook(lambda module, args, out: out * 0)
    assert model(**given).logits is not None  # the hook's


@pytest.mark.parametrize("loss_only", [True, False])
def test_evaluation_beside_training(loss_only: bool, tmp_path: Path) -> None:
    """Trainer's metrics see logits though training has none."""
    seen: list[tuple[int, ...]] = []

    def metrics(prediction: Any) -> dict[str, float]:
        seen.append(prediction.predictions.shape)
        right = prediction.predictions[:, :-1].argmax(-1) == prediction.label_ids[:, 1:]
        return {"right": float(right.mean())}

    run = trainer(tmp_path, 20, save_strategy="no", prediction_loss_only=loss_only)
    run.compute_metrics = None if loss_only else metrics
    run.train()
    found = run.evaluate(Cycles(16))
    assert found["eval_loss"] < 1.0
    if not loss_only:
        assert seen == [(16, 12, 40)]
        assert found["eval_right"] > 0.8
