"""The benchmark scripts: dry runs on the CPU, whose results the report reads."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys

import pytest
import torch
from benchmarks_cases import BENCHMARKS, fill_checkout, page_of, run_report
from support.programs import run_here

import tidegate


@pytest.fixture
def scripts(monkeypatch):
    """Imports a script of benchmarks/."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module


@pytest.fixture
def checkout(tmp_path):
    return fill_checkout(tmp_path)


def test_bytes_are_each_tensor_once(scripts):
    work = scripts("scan_baselines").Work
    assert work("hgru", 1, 1, 1, "extra").bytes("forward") == 6
    assert work("hgru", 1, 1, 1, "extra").bytes("backward") == 12
    assert work("hgru", 1, 1, 1, "extra", complex=True).bytes("forward") == 10
    assert work("hgru", 1, 1, 1, "extra", complex=True).bytes("backward") == 20
    assert work("linear_scan", 1, 1, 1, "extra").bytes("forward") == 6
    assert work("linear_scan", 1, 1, 1, "extra").bytes("backward") == 10
    assert work("wkv4", 1, 1, 1, "extra").bytes("forward") == 6
    assert work("wkv4", 1, 1, 1, "extra").bytes("backward") == 10
    assert work("hgru", 1, 1, 1, "extra", dtype=torch.float32).bytes("backward") == 24


def test_bytes_of_attention_are_each_tensor_once(scripts):
    work = scripts("gla_baselines").GlaWork
    assert work("hgrn2", 1, 1, 1).bytes("forward") == 4 * 256
    assert work("hgrn2", 1, 1, 1).bytes("backward") == 7 * 256
    assert work("gated_linear_attention", 1, 1, 1).bytes("forward") == 5 * 256
    assert work("gated_linear_attention", 1, 1, 1).bytes("backward") == 9 * 256
    assert work("hgrn2_step", 1, 1, 1).bytes("forward") == 4 * 256 + 2 * 4 * 128 * 128


def test_aims_are_percents_or_milliseconds(scripts):
    reaches = scripts("report_tables").reaches_goal
    ours = {"us": 410.0, "percent_of_copy": 84.0}
    assert reaches({"goal_ms": 0.42, "results": {"tidegate": ours}}) is True
    assert reaches({"goal_ms": 0.40, "results": {"tidegate": ours}}) is False
    assert reaches({"goal_percent": 80, "results": {"tidegate": ours}}) is True
    assert reaches({"goal_percent": 85, "results": {"tidegate": ours}}) is False
    assert reaches({"goal_percent": None, "results": {"tidegate": ours}}) is None
    assert reaches({"goal_ms": 0.42, "results": {}}) is None


def run_on_cpu(script: str, *options: object) -> subprocess.CompletedProcess[str]:
    return run_here(BENCHMARKS / script, "--device", "cpu", "--tiny", *options)


def test_attention_dry_runs_write_results_that_the_report_reads(checkout):
    results = checkout / "benchmarks" / "results"
    timed = run_on_cpu(
        *("baselines.py", "--groups", "gla", "--rounds", 1, "--budget", 0, "--commit", "fedcba"),
        *("--out", results / "baselines_gla_h200.json"),
    )
    assert timed.returncode == 0, timed.stdout + timed.stderr
    record = json.loads((results / "baselines_gla_h200.json").read_text(encoding="utf-8"))
    assert [(row["op"], row["direction"]) for row in record["rows"]] == [
        ("hgrn2", "forward"),
        ("hgrn2", "backward"),
        ("gated_linear_attention", "forward"),
        ("gated_linear_attention", "backward"),
        ("hgrn2_step", "forward"),
    ]
    for row in record["rows"]:
        assert 0 < row["results"]["tidegate"]["error"] < 1e-2
    measured = run_on_cpu("gla_errors.py", "--out", results / "gla_errors_h200.json")
    assert measured.returncode == 0, measured.stdout + measured.stderr
    assert (
        "fla: not timed, it needs a GPU"
        in json.loads((results / "gla_errors_h200.json").read_text(encoding="utf-8"))["missing"]
    )
    assert run_report("--root", checkout).returncode == 0
    page = page_of(checkout)
    assert "| `hgrn2` bf16 B2 T37 H2 K16 V16 | forward |" in page
    assert "| sigmoid(N - 5) | 130 | 0.1" in page
    assert "| sigmoid(N - 5) | 50 |" in page


def test_wrong_results_are_not_timed(scripts):
    baselines, implementations = scripts("baselines"), scripts("scan_baselines")
    bench = baselines.Bench(torch.device("cpu"), {}, None)
    good = implementations.Implementation([lambda: torch.ones(3)], 12, lambda _: 0.001, 0.01)
    assert bench.prepared(good)[1] == 0.001
    bad = good._replace(error=lambda _: float("nan"))
    with pytest.raises(baselines.WrongResult, match="relative error nan, allowed 1e-02"):
        bench.prepared(bad)


def fails(_):
    raise RuntimeError("out of memory")


@pytest.mark.parametrize(
    ("name", "error", "status"),
    [
        ("fla.chunk_hgrn", lambda _: 1.0, 0),
        ("fla.chunk_hgrn", fails, 1),  # no result at all: that may be ours
        ("tidegate", lambda _: 1.0, 1),
        ("copy_", lambda _: 1.0, 1),
    ],
)
def test_a_baselines_wrong_result_is_left_out_and_fails_no_run(
    scripts, monkeypatch, checkout, capsys, name, error, status
):
    baselines, implementations = scripts("baselines"), scripts("scan_baselines")
    made = baselines.Bench.implementations
    wrong = implementations.Implementation([lambda: torch.ones(3)], 12, error, 0.01)

    def with_a_wrong_one(self, work, direction, sets):
        return made(self, work, direction, sets) | {name: lambda: wrong}

    monkeypatch.setattr(baselines.Bench, "implementations", with_a_wrong_one)
    out = checkout / "benchmarks" / "results" / "baselines_sweep_h200.json"
    options = ["--device", "cpu", "--tiny", "--groups", "sweep", "--rounds", "1", "--budget", "0"]
    monkeypatch.setattr(sys, "argv", ["baselines.py", *options, "--out", str(out)])
    assert baselines.main() == status
    record = json.loads(out.read_text(encoding="utf-8"))
    problems, of_baselines = record["problems"], record["baseline_problems"]
    found = problems if status else of_baselines
    assert (len(problems), len(of_baselines)) == ((2, 0) if status else (0, 2))
    assert found[0].startswith(f"hgru bf16 B1 T40 D12 forward, {name}: "), found
    rows = record["rows"]
    assert [row["direction"] for row in rows] == ["forward", "backward"]
    expected = {"copy_", "tidegate"} - {name}
    assert all(set(row["results"]) == expected for row in rows)
    last = capsys.readouterr().out.splitlines()[-3:-1]
    assert last == [("PROBLEM " if status else "BASELINE PROBLEM ") + line for line in found]
    assert run_report("--root", checkout).returncode == 0
    page = (checkout / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    title = "Problems:" if status else "Wrong results of other libraries, left out of their rows:"
    assert f"{title}\n\n- {found[0]}\n- {found[1]}\n" in page


def test_rows_before_a_failure_are_kept(scripts, monkeypatch, tmp_path, capsys):
    baselines = scripts("baselines")
    run, done = baselines.Bench.run, []

    def fail_at_the_third(self, work, direction):
        done.append(work)
        if len(done) == 3:
            raise RuntimeError("CUDA error\nand more")
        run(self, work, direction)

    monkeypatch.setattr(baselines.Bench, "run", fail_at_the_third)
    out = tmp_path / "baselines.json"
    options = ["--device", "cpu", "--tiny", "--rounds", "1", "--budget", "0", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["baselines.py", *options])
    assert baselines.main() == 1
    record = json.loads(out.read_text(encoding="utf-8"))
    assert len(record["rows"]) == 2
    assert record["problems"][0].endswith("the run ends here: RuntimeError: CUDA error")
    assert "PROBLEM" in capsys.readouterr().out


def test_forgetting_attention_dry_run_writes_a_result_that_the_report_reads(checkout):
    out = checkout / "benchmarks" / "results" / "baselines_attention_h200.json"
    options = ("--groups", "attention", "--rounds", 1, "--budget", 0, "--out", out)
    timed = run_on_cpu("baselines.py", *options)
    assert timed.returncode == 0, timed.stdout + timed.stderr
    record = json.loads(out.read_text(encoding="utf-8"))
    assert "forgetting-transformer: not timed, it needs a GPU" in record["missing"]
    assert [(row["op"], row["direction"], "prune" in row) for row in record["rows"]] == [
        ("forgetting_attention", "forward", False),
        ("forgetting_attention", "backward", False),
        ("forgetting_attention", "deterministic backward", False),
        ("forgetting_attention", "forward", True),
        ("forgetting_attention", "backward", True),
        ("forgetting_attention_step", "forward", False),
    ]
    for row in record["rows"]:
        assert 0 < row["results"]["tidegate"]["error"] < 1e-2
    assert run_report("--root", checkout).returncode == 0
    page = page_of(checkout)
    assert "| `forgetting_attention` bf16 B2 T70 H2 D32 | deterministic backward |" in page
    assert "| `forgetting_attention_step` bf16 B3 T40 H4 Hkv2 D16 | forward |" in page


def test_cpu_attention_writes_a_result_that_the_report_reads(checkout, scripts, monkeypatch):
    script = scripts("attention_cpu")
    out = checkout / "benchmarks" / "results" / "cpu_attention.json"
    options = ["--tiny", "--rounds", "1", "--threads", "1", "--json", str(out)]
    monkeypatch.setattr(sys, "argv", ["attention_cpu.py", *options])
    monkeypatch.setattr(script, "memory_of", lambda name, options: len(name) * 2**20)
    threads = torch.get_num_threads()
    try:
        assert script.main() == 0
    finally:
        torch.set_num_threads(threads)
    record = json.loads(out.read_text(encoding="utf-8"))
    for result in record["results"].values():
        assert 0 < result["error"] < 1e-5
        assert result["ms"] >= result["best_ms"] > 0
    assert run_report("--root", checkout).returncode == 0
    page = page_of(checkout)
    assert "`forgetting_attention fp32 B2 T70 H2 D16`, forward and backward" in page
    assert "| SDPA, bias given |" in page
    assert script.grown(script.TINY, "tidegate") >= 0


def test_cpu_loops_writes_a_result_that_the_report_reads(checkout, scripts, monkeypatch):
    script = scripts("cpu_loops")
    out = checkout / "benchmarks" / "results" / "cpu_loops.json"
    options = ["--tiny", "--rounds", "1", "--threads", "1", "--json", str(out)]
    monkeypatch.setattr(sys, "argv", ["cpu_loops.py", *options])
    threads = torch.get_num_threads()
    try:
        assert script.main() == 0
    finally:
        torch.set_num_threads(threads)
    rows = json.loads(out.read_text(encoding="utf-8"))["results"]
    names = [row["work"].split()[0] for row in rows]
    assert len(names) == 8
    stepped = {name.removesuffix("_step") for name in tidegate.ops.__all__ if "_step" in name}
    assert set(names) == stepped - {"forgetting_attention"}
    for row in rows:
        assert all(0 < found["error"] < 1e-5 for found in row["results"].values())
    assert run_report("--root", checkout).returncode == 0
    page = page_of(checkout)
    assert "| `wkv4 fp32 B2 T12 D8` |" in page
    right = script.linear_scan
    work = script.works(script.TINY, 8, 2)[0]
    with pytest.raises(SystemExit, match="cpu_loops: tidegate of .* is wrong by"):
        script.measure(work._replace(loop=wrong_loop(right)), 1)


def wrong_loop(right):
    """A loop whose op is another one's."""

    def linear_scan(x, a):
        return 1.001 * right(x, a)

    return linear_scan


def test_gated_rnn_dry_run_writes_a_result_that_the_report_reads(checkout):
    out = checkout / "benchmarks" / "results" / "gated_rnn_h200.json"
    options = ("--rounds", 1, "--budget", 0.01, "--commit", "fedcba", "--out", out)
    result = run_on_cpu("gated_rnn.py", *options)
    assert result.returncode == 0, result.stdout + result.stderr
    record = json.loads(out.read_text(encoding="utf-8"))
    assert (record["kind"], record["commit"]) == ("gated_rnn", "fedcba")
    assert [row["dtype"] for row in record["rows"]] == ["float32", "bfloat16"]
    for row in record["rows"]:
        assert set(row["results"]) == {"tidegate", "torch loop"}
        assert row["error"] < 1e-2
        assert all(result["ms"] > 0 for result in row["results"].values())
    assert run_report("--root", checkout).returncode == 0
    page = page_of(checkout)
    assert "`gated_rnn` fp32 B3 T9 D24" in page


def test_copying_step_dry_run_writes_a_result_that_the_report_reads(checkout):
    out = checkout / "benchmarks" / "results" / "copying_step_h200.json"
    options = ["--device=cpu", "--dummies=5", "--batch=2", "--rounds=1", "--budget=0.01"]
    options += ["--commit=fedcba", f"--out={out}"]
    command = [sys.executable, BENCHMARKS / "copying_step.py", *options]  # one as a user runs it
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    record = json.loads(out.read_text(encoding="utf-8"))
    assert (record["kind"], record["commit"], record["T"]) == ("copying_step", "fedcba", 25)
    assert record["error"] < 1e-4
    assert all(implementation["ms"] > 0 for implementation in record["results"].values())
    assert run_report("--root", checkout).returncode == 0
    assert "6 x 128, B2 T25, fp32" in page_of(checkout)


def test_baselines_dry_run_writes_a_result_that_the_report_reads(checkout):
    out = checkout / "benchmarks" / "results" / "baselines_h200.json"
    options = ("--rounds", 2, "--budget", 0.01, "--commit", "fedcba", "--out", out)
    result = run_on_cpu("baselines.py", *options)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "fla: not timed, it needs a GPU" in result.stdout
    record = json.loads(out.read_text(encoding="utf-8"))
    assert record["commit"] == "fedcba"
    assert record["problems"] == []
    ops = {"hgru", "linear_scan", "hgru_step", "lru_scan", "wkv4"}
    assert {row["op"] for row in record["rows"]} == ops
    for row in record["rows"]:
        assert set(row["results"]) == {"copy_", "tidegate"}
        assert row["results"]["tidegate"]["us"] > 0
        assert row["results"]["tidegate"]["error"] < 1e-2
    assert run_report("--root", checkout).returncode == 0
    assert "commit fedcba" in page_of(checkout)
