"""The models beside the Transformer: benchmarks/models, on the CPU, with models of a few thousand
parameters."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tidegate import _library
from tidegate.models import mixers

ROOT = Path(__file__).resolve().parents[2]
BINARY = Path(_library.library_dir()).parent / "bin" / "bench_models"

pytestmark = [
    pytest.mark.xdist_group("benchmarks_models"),
    pytest.mark.skipif(
        not BINARY.is_file(), reason=f"{BINARY} was not built (scripts/build.sh builds it)"
    ),
]


def bench(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(BINARY), "--device", "cpu", "--size", "tiny", *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )


@pytest.fixture(scope="module")
def everything(tmp_path_factory):
    """What a run over every mixer wrote and printed."""
    path = tmp_path_factory.mktemp("models") / "models.json"
    result = bench("--steps", 3, "--decode-tokens", 3, "--commit", "abc123", "--json", path)
    assert result.returncode == 0, result.stdout + result.stderr
    return json.loads(path.read_text(encoding="utf-8")), result.stdout


def test_every_mixer_trains_and_decodes_beside_the_transformer(everything):
    record, printed = everything
    assert record["kind"] == "models"
    assert record["commit"] == "abc123"
    assert record["machine"]["device"] == "cpu"
    assert record["precision"] == "fp32"
    rows = record["rows"]
    assert {row["mixer"] for row in rows} == set(mixers())
    assert [row["context"] for row in rows] == [16, 32] * len(mixers())
    assert rows[0]["mixer"] == "transformer"
    for row in rows:
        assert "errors" not in row
        assert row["context"] * row["batch"] == record["tokens"] == 64
        assert row["parameters_of_transformer"] == pytest.approx(1, abs=0.02)
        assert row["parameters"] / rows[0]["parameters"] == row["parameters_of_transformer"]
        assert row["mixer"] in printed
        train, decode = row["train"], row["decode"]
        assert train["steps"] == 3
        # A step over the same batch learns it a little.
        assert train["last_loss"] < train["first_loss"]
        assert train["first_loss"] == pytest.approx(math.log(64), rel=0.2)
        parts = [train[f"{part}_ms"] for part in ("forward", "backward", "optimizer")]
        assert 0 < min(parts) < max(parts)  # means of medians of their own
        assert train["tokens_per_s"] == pytest.approx(64e3 / train["step_ms"])
        assert train["peak_bytes"] > 2**20
        assert decode["error"] < 1e-4
        assert decode["state_bytes"] > 0
        assert decode["tokens_per_s"] == pytest.approx(row["batch"] * 1e3 / decode["token_ms"])
        # Two rounds, to and fro, whose means these are.
        assert 0 <= train["step_spread"] <= 2
        assert 0 <= decode["token_spread"] <= 2
    assert record["rounds"] == 2
    assert "mean of 2 rounds" in printed


def test_ratios_are_to_the_transformer_of_the_same_context(everything):
    rows = everything[0]["rows"]
    baselines = {row["context"]: row for row in rows if row["mixer"] == "transformer"}
    for row in rows:
        train, decode = (row[kind] for kind in ("train", "decode"))
        base = baselines[row["context"]]
        ratio = train["tokens_per_s"] / base["train"]["tokens_per_s"]
        assert train["speed_of_transformer"] == pytest.approx(ratio)
        ratio = train["peak_bytes"] / base["train"]["peak_bytes"]
        assert train["memory_of_transformer"] == pytest.approx(ratio)
        ratio = decode["tokens_per_s"] / base["decode"]["tokens_per_s"]
        assert decode["speed_of_transformer"] == pytest.approx(ratio)


def test_forgetting_attention_is_split_in_attention_and_the_rest(everything):
    record, printed = everything
    rows = {(row["mixer"], row["context"]): row for row in record["rows"]}
    pairs = record["pairs"]
    names = [(*pair["mixers"], pair["context"]) for pair in pairs]
    llama, pro = ("fox", "transformer"), ("fox-pro", "transformer-pro")
    assert names == [(*llama, 16), (*llama, 32), (*pro, 16), (*pro, 32)]
    for pair in pairs:
        fox, transformer = (rows[mixer, pair["context"]] for mixer in pair["mixers"])
        assert fox["attention"]["op"] == "forgetting_attention"
        assert transformer["attention"]["op"].startswith("sdpa ")
        step = fox["train"]["step_ms"] - transformer["train"]["step_ms"]
        kernels = fox["attention"]["all_layers_ms"] - transformer["attention"]["all_layers_ms"]
        assert pair["step_ms"] == pytest.approx(step)
        assert pair["attention_ms"] == pytest.approx(kernels)
        assert pair["rest_ms"] == pytest.approx(step - kernels)
        share = 100 * (step - kernels) / transformer["train"]["step_ms"]
        assert pair["rest_percent_of_step"] == pytest.approx(share)
        one = fox["attention"]["forward_ms"] + fox["attention"]["backward_ms"]
        assert fox["attention"]["all_layers_ms"] == pytest.approx(fox["layers"] * one)
    assert "fox - transformer, context 16: step " in printed


def test_a_step_is_split_beside_its_floor(everything):
    record, printed = everything
    assert record["optimizer"] == "AdamW, fused"
    assert min(record["product_operations_per_s"], record["copy_bytes_per_s"]) > 1e6
    for row in record["rows"]:
        split = row["train"]["split"]
        parts = [split[f"{kind}_ms"] for kind in ("products", "ours", "optimizer", "rest")]
        assert min(parts) > 0
        assert split["idle_ms"] >= 0
        attends = row["mixer"].startswith("transformer")
        assert (split["attention_ms"] > 0) == attends
        # The floor counts matrices that every token meets, and all parameters.
        matrices = row["parameters"] - 64 * 32
        floor = 6 * matrices * 64 / record["product_operations_per_s"]
        floor += 28 * row["parameters"] / record["copy_bytes_per_s"]
        assert split["floor_ms"] == pytest.approx(1e3 * floor, rel=0.2)
    assert "transformer, context 16: products " in printed


def test_memory_may_be_saved(tmp_path):
    options = ("--mixers=hgrn2", "--contexts=64", "--steps=1", "--decode-tokens=0")
    options += ("--precision=bf16", "--recompute=blocks", "--residual=bf16")
    result = bench(*options, "--json", tmp_path / "models.json")
    assert result.returncode == 0, result.stdout + result.stderr
    record = json.loads((tmp_path / "models.json").read_text(encoding="utf-8"))
    assert (record["recompute"], record["residual"]) == ("blocks", "bf16")
    assert record["rows"][0]["train"]["last_loss"] > 0
    result = bench("--residual=bf16")
    assert result.returncode == 2
    assert "--residual: expected auto with --precision fp32; got 'bf16'" in result.stderr


def test_ratios_need_the_transformer(tmp_path):
    path = tmp_path / "models.json"
    options = ("--mixers", "lru", "--contexts=16", "--steps=1", "--decode-tokens", 0)
    result = bench(*options, "--json", path)
    assert result.returncode == 0, result.stdout + result.stderr
    (row,) = json.loads(path.read_text(encoding="utf-8"))["rows"]
    assert row["train"]["speed_of_transformer"] is None
    assert row["parameters_of_transformer"] is None
    assert "decode" not in row


def test_a_row_that_fails_leaves_the_others(tmp_path):
    path = tmp_path / "models.json"
    # 2^60 ids have more bytes than an int64 counts; the rows after it are none the worse.
    tokens = 2**60
    options = (
        "--mixers",
        "transformer",
        "--tokens",
        tokens,
        "--contexts",
        f"{tokens},{tokens // 2}",
    )
    result = bench(*options, "--steps", 1, "--decode-tokens", 1, "--json", path)
    assert result.returncode == 1
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
    assert len(rows) == 2
    for row in rows:
        assert [error.split(":")[0] for error in row["errors"]] == [
            "training",
            "attention",
            "decoding",
        ]
    assert "training: " in result.stdout


def test_rows_come_as_they_are_measured(tmp_path):
    """The first one before the others are begun, and then how long those will take."""
    options = ("--mixers=transformer,lru", "--contexts=16", "--steps=1", "--decode-tokens=1")
    result = bench(*options, "--rounds=1", "--dim=16", "--layers=3")
    assert result.returncode == 0, result.stdout + result.stderr
    lines = result.stdout.splitlines()
    assert "custom (3 layers of 16)" in lines[0]
    # Training first, then decoding in the same row; the second mixer has one line. Below a row its
    # steps are taken apart.
    rows = [line.split()[0] for line in lines[2:] if not line.split()[0].endswith(",")]
    assert rows == ["transformer", "transformer", "lru"]
    assert "about 1 minutes to go" in result.stderr


def test_mixers_and_sizes_are_listed():
    printed = bench("--list").stdout.split()
    assert {f"models/{mixer}" for mixer in mixers()} <= set(printed)
    assert {"tiny", "small", "125m", "360m"} <= set(printed)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--mixers", "lru,mamba"), "--mixers: 'mamba' is unknown; available: transformer, fox"),
        (("--size", "7b"), "--size: expected one of tiny, small, 125m, 360m, 756m; got '7b'"),
        (("--contexts", "48"), "--contexts: expected divisors of --tokens 64; got 48"),
        (("--steps", "0"), "--steps: expected an integer >= 1; got '0'"),
        (("--tokens", "many"), "--tokens: expected an integer >= 1; got 'many'"),
        (("--precision", "fp8"), "--precision: expected one of fp32, bf16; got 'fp8'"),
        (("--json",), "--json: expected a value; got none"),
        (("--epochs", "3"), "'--epochs' is unknown; available: --device, --size"),
    ],
)
def test_bad_flags_are_named(arguments, message):
    result = bench(*arguments)
    assert result.returncode == 2
    assert f"bench_models: {message}" in result.stderr


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_report_shows_the_rows(everything, device, tmp_path):
    record = everything[0] | {"machine": everything[0]["machine"] | {"device": device}}
    results = tmp_path / "benchmarks" / "results"
    results.mkdir(parents=True)
    (results / "models.json").write_text(json.dumps(record), encoding="utf-8")
    readme = tmp_path / "README.md"
    readme.write_text("<!-- benchmarks:begin -->\n<!-- benchmarks:end -->\n", encoding="utf-8")
    command = [sys.executable, str(ROOT / "benchmarks" / "report.py"), "--root", str(tmp_path)]
    subprocess.run(command, check=True, capture_output=True)
    page = (tmp_path / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    for row in record["rows"]:
        share = row["parameters_of_transformer"]
        line = f"| `{row['mixer']}` | {row['context']} | 0.0M, {share:.1%} | "
        assert f"{line}{row['train']['tokens_per_s']:,.0f} |" in page
    assert "| `fox` - `transformer` | 16 |" in page
    assert "training step is forward, backward and AdamW, fused, in C++" in page
    assert "| a step's ms | context | matrix products |" in page
    # README's picture has a GPU's longest context.
    picture = tmp_path / "docs" / "speed_light.svg"
    assert picture.exists() == (device == "cuda")
    if device == "cuda":
        text = picture.read_text(encoding="utf-8")
        assert "FoT (LLaMA) model" in text
        assert "context 32; beside a Transformer" in text
