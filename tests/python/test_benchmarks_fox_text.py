"""Training on real text: how the corpus is made, and a tiny run of the benchmark on the CPU."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from training_cases import write_text

from tidegate.models import CausalLM, LMConfig

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
TINY = ("--device", "cpu", "--width", 64, "--layers", 1, "--context", 32, "--batch", 2)
READ = ("--length", 64, "--sequences", 4, "--samples", 1, "--needle-lengths", 480)


@pytest.fixture
def load(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module


def run(python: str, *options: object) -> subprocess.CompletedProcess[str]:
    command = [python, str(BENCHMARKS / "fox_text.py"), *map(str, options)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


def test_the_models_have_equal_parameters(load):
    fox_text = load("fox_text")
    sizes = {}
    for name in fox_text.NAMES:
        model = CausalLM(LMConfig(**fox_text.model_fields(name, 384, 6)), device="meta")
        sizes[name] = sum(p.numel() for p in model.parameters())
    assert all(10e6 < size < 11e6 for size in sizes.values())
    assert max(sizes.values()) < 1.005 * min(sizes.values())


def test_the_device_with_the_most_to_do_decides_how_many_steps_there_are(load):
    fox_text = load("fox_text")
    assert fox_text.steps_within(100.0, [[0.5]]) == 180
    assert fox_text.steps_within(100.0, [[0.2, 0.3], [0.4], []]) == 180
    assert fox_text.steps_within(-5.0, [[0.5]]) == 10
    assert fox_text.steps_within(5.0, [[]]) == 10


def test_a_page_becomes_the_text_that_it_shows(load):
    page = (
        "<html><head><title>t</title><style>p {}</style></head><body><nav>Next <a>up</a></nav>"
        "<h1>Gates\n and  states</h1><p>A &amp; B</p><p>forget<script>x()</script>s</p>"
        "<pre>if a:\n    return\n\n\nb</pre></body></html>"
    )
    assert load("text_corpus").page_lines(page) == [
        "Gates and states", "", "A & B", "", "forgets", "", "if a:", "    return", "", "b", "",
    ]  # fmt: skip


def test_a_package_gives_its_texts_or_its_pages(load, tmp_path):
    text_corpus = load("text_corpus")
    for n in range(8):
        shown = f"page {n}" + (", rare" if n < 2 else "")
        (tmp_path / f"{n}.html").write_text(f"<p>Contents of all</p><p>{shown}</p>")
    pages = dict(text_corpus.package_documents(tmp_path))
    assert pages["1.html"] == b"page 1, rare\n"
    assert len(pages) == 8
    words = write_text(tmp_path / "a.rst", 12_000).read_bytes()
    assert dict(text_corpus.package_documents(tmp_path)) == {"a.rst": words}


def test_what_is_kept_and_the_way_back(load, tmp_path):
    text_corpus = load("text_corpus")
    words = b"a line of words that somebody wrote\n" * 40
    assert text_corpus.is_prose(words)
    assert not text_corpus.is_prose(words[:900])
    assert not text_corpus.is_prose(words + b"\xff\xfe")
    assert not text_corpus.is_prose(b"0.123, 4567\n" * 200)
    assert not text_corpus.is_prose(b"abcdefgh" * 1000)
    documents = [("one/a", words), ("two/b", b"x" + words), ("two/c", b" " + words)]
    kept = list(text_corpus.distinct(documents))
    assert [name for name, _ in kept] == ["one/a", "two/b"]
    counts = text_corpus.write(tmp_path / "all.tar.xz", kept)
    assert counts == {"one": (1, len(words)), "two": (1, len(words) + 1)}
    text_corpus.unpack(tmp_path / "all.tar.xz", tmp_path / "all")
    assert (tmp_path / "all" / "two" / "b").read_bytes() == b"x" + words


@pytest.fixture
def corpus(tmp_path) -> Path:
    folder = tmp_path / "text"
    folder.mkdir()
    for n in range(24):
        write_text(folder / f"{n:02}.txt", 300 + 10 * n, seed=n)
    return folder


@pytest.mark.slow
@pytest.mark.xdist_group("ranks")
def test_a_tiny_run_of_two_models(load, tmp_path, corpus, ranks):
    out = tmp_path / "out"
    models = ("--models", "fot-pro", "hgrn2")
    trained = (*TINY, *READ, *models, "--steps", 12, "--commit", "fedcba")
    done = run(ranks.python, corpus, "--out", out, *trained)
    assert done.returncode == 0, done.stderr
    result = json.loads((out / "fox_text.json").read_text())
    assert [row["model"] for row in result["runs"]] == ["fot-pro", "hgrn2"]
    assert (result["commit"], result["context"]) == ("fedcba", 32)
    for row in result["runs"]:
        assert row["failed"] == []
        assert (row["steps"], row["of_steps"], row["tokens"]) == (12, 12, 12 * 64)
        assert row["curve"][-1] == [12 * 64, round(row["bits_per_byte"], 5)]
        assert 0 < row["bits_per_byte"] < 8.5
        assert row["per_token"]["trained_context"] == 32
        assert np.shape(row["needle"]["exact_match"]) == (11, 1)
        files = {path.name for path in (out / row["model"]).iterdir()}
        assert {"per_token.png", "needle.png", "forget_gates.png", "config.json"} <= files
        assert ("attention_maps.png" in files) == (row["model"] == "fot-pro")
        assert f"{row['bits_per_byte']:.4f} bits/byte" in done.stdout
    record = json.loads(json.dumps(result))
    lines = load("report_text").fox_text_section(record)
    first = record["runs"][0]
    scored = f"{first['bits_per_byte']:.4f}"
    assert f"| FoT (Pro) | {first['parameters']:,} | 0.0M | {scored} | {scored} |" in lines[4]
    bits = np.log2(first["per_token"]["perplexity"]["64"])
    assert lines[4].split(" | ")[6] == f"{bits:.4f}"
    assert lines[2].startswith("| model | parameters | bytes read | validation, windows of")
    record["runs"][1]["curve"] = record["runs"][1]["curve"][:-1]  # stopped early
    assert load("report_text").equal_tokens(record["runs"]) == first["curve"][-2][0]
    for name in ("loss", "per_token", "needle"):
        assert (out / f"fox_text_{name}.png").read_bytes().startswith(b"\x89PNG")


def test_one_model_asks_how_many_steps_there_are(load, tmp_path, corpus, monkeypatch):
    fox_text = load("fox_text")
    monkeypatch.setattr(fox_text, "score", lambda arguments, run: [])
    options = [str(corpus), "--out", str(tmp_path / "out"), *map(str, TINY)]
    arguments = fox_text.parse([*options, "--one", "transformer-llama"])
    speeds = []
    row = fox_text.train_one(arguments, lambda speed: speeds.append(speed) or 10)
    assert (row["steps"], row["needle"]) == (10, None)
    assert speeds[0] > 0
    again = fox_text.train_one(arguments, None)  # the folder says it
    assert again["bits_per_byte"] == row["bits_per_byte"]
    assert not (tmp_path / "out" / "transformer-llama.trial").exists()
    late = fox_text.parse([*options, "--one", "fot-llama", "--steps", "5", "--stop-at", "1"])
    with pytest.raises(SystemExit, match="leaves no time to train"):
        fox_text.train_one(late, None)


def test_the_processes_agree_on_steps(load, tmp_path, monkeypatch, capsys):
    """The parent's side, with processes that only say how fast they are."""
    fox_text = load("fox_text")
    program = (
        "import sys, json; name = [a[6:] for a in sys.argv if a.startswith('--one=')][0]\n"
        "if name == 'hgrn2': sys.exit('broken')\n"
        "print({'fot-pro': 640.0, 'fot-llama': 6400.0}[name], flush=True)\n"
        "print(json.dumps({'model': name, 'steps': int(input())}))\n"
    )
    monkeypatch.setattr(fox_text, "worker", lambda arguments: [sys.executable, "-c", program])
    monkeypatch.setattr(fox_text, "describe", str)
    monkeypatch.setattr(fox_text, "summary", lambda arguments, rows, *_: {"runs": list(rows)})
    arguments = SimpleNamespace(
        out=tmp_path, device="cpu", models=["fot-pro", "fot-llama", "hgrn2"], steps=0,
        limit_minutes=10.0, reserve_seconds=500.0, batch=2, context=32,
    )  # fmt: skip
    result = fox_text.run_all(arguments)
    rows = {row["model"]: row["steps"] for row in result["runs"]}
    assert rows == {"fot-pro": rows["fot-pro"], "fot-llama": rows["fot-pro"]}
    assert 450 < rows["fot-pro"] <= 0.92 * 100 / (64 / 640 + 64 / 6400)
    assert "hgrn2 ended with 1: broken" in capsys.readouterr().err


def test_pictures_name_models_that_were_stopped_early(load):
    fox_text = load("fox_text")
    row = {"model": "fot-pro", "steps": 7, "of_steps": 9}
    assert fox_text._label(row) == "FoT (Pro), stopped at step 7 of 9"
    assert fox_text._label({**row, "steps": 9}) == "FoT (Pro)"
