"""tidegate.hf on a GPU: what a CPU's model says and generates, blocks on two GPUs, the Trainer."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.hf_models import MIXERS, causal_lm, config, left_padded

transformers = pytest.importorskip("transformers", minversion="5.0", reason="needs tidegate[hf]")
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments  # noqa: E402

from tidegate import hf  # noqa: E402

pytestmark = pytest.mark.gpu
WAYS = {"greedy": {}, "beams": {"num_beams": 2}, "static": {"cache_implementation": "static"}}
HOW = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}


@pytest.mark.parametrize("name", sorted(MIXERS))
def test_what_the_cpu_says(name: str) -> None:
    """Logits of padded rows, and what each way to choose tokens makes of them."""
    model = causal_lm(name).float()
    ids, mask = left_padded(3, 7, 5)
    with torch.no_grad():
        logits = model(ids, attention_mask=mask).logits
    texts = {
        way: model.generate(ids, attention_mask=mask, **HOW, **more) for way, more in WAYS.items()
    }
    model, ids, mask = model.cuda(), ids.cuda(), mask.cuda()
    with torch.no_grad():
        found = model(ids, attention_mask=mask).logits.cpu()
    real = mask.cpu().bool()
    scale = logits.std().item()
    torch.testing.assert_close(found[real], logits[real], rtol=0, atol=2e-3 * scale)
    for way, more in WAYS.items():
        text = model.generate(ids, attention_mask=mask, **HOW, **more)
        assert torch.equal(text.cpu(), texts[way]), way


@pytest.mark.parametrize("name", sorted(MIXERS))
def test_blocks_on_two_gpus(name: str, tmp_path: Path) -> None:
    """A device map puts each block, its state and its part of the cache on a GPU of its own."""
    pytest.importorskip("accelerate")
    if torch.cuda.device_count() < 2:
        pytest.skip(f"takes two GPUs, found {torch.cuda.device_count()}")
    model = causal_lm(name).float()
    model.save_pretrained(tmp_path)
    parts = [n for n, m in model.named_modules() if n.count(".") == 1 and n != "model.blocks"]
    places = dict.fromkeys([*parts, "model.blocks.0", "lm_head"], 0) | {"model.blocks.1": 1}
    divided = AutoModelForCausalLM.from_pretrained(tmp_path, device_map=places)
    assert divided.model.blocks[1].glu.in_proj.weight.device.index == 1
    model = model.cuda()
    ids, mask = (each.cuda() for each in left_padded(6, 2, 4))
    with torch.no_grad():
        wanted = model(ids, attention_mask=mask).logits
        found = divided(ids, attention_mask=mask).logits
    torch.testing.assert_close(found.to(wanted.device), wanted)
    text = divided.generate(ids, attention_mask=mask, **HOW)
    assert torch.equal(text, model.generate(ids, attention_mask=mask, **HOW))


@pytest.mark.parametrize("name", ["hgrn2", "fox"])
def test_the_trainer_trains_in_bf16(name: str, tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="transformers' Trainer needs accelerate")
    rows = [[1 + (k + t) % 12 for t in range(12)] for k in range(64)]
    data = [{"input_ids": row, "labels": row} for row in rows]
    torch.manual_seed(0)
    arguments = TrainingArguments(
        output_dir=str(tmp_path),
        max_steps=30,
        per_device_train_batch_size=8,
        learning_rate=2e-2,
        lr_scheduler_type="constant",
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        bf16=True,
        seed=3,
    )
    run = Trainer(hf.TidegateForCausalLM(config(name)), arguments, train_dataset=data)
    run.train()
    losses = [line["loss"] for line in run.state.log_history if "loss" in line]
    assert losses[0] > 3.0
    assert losses[-1] < 1.0
