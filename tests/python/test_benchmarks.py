"""The benchmark scripts: their float64 loops, a dry run, and the tables made from results."""

from __future__ import annotations

import copy
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import tidegate

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = ROOT / "benchmarks"


@pytest.fixture
def scripts(monkeypatch):
    """Imports a script of benchmarks/."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module


def baselines_result(us: float, bytes_moved: int, percent: float) -> dict:
    return {
        "bytes": bytes_moved,
        "error": 1.5e-3,
        "timing": "CUDA graph",
        "us": us,
        "us_low": us - 1,
        "us_high": us + 1,
        "gb_per_s": bytes_moved / us * 1e-3,
        "samples": 60,
        "percent_of_copy": percent,
    }


BASELINES = {
    "kind": "baselines",
    "date": "2026-01-02",
    "commit": "abc123",
    "machine": {"gpu": {"name": "NVIDIA H200", "driver_version": "580", "clocks.sm": "1980 MHz"}},
    "versions": {"torch": "2.11.0", "fla": "0.6.0"},
    "missing": ["accelerated-scan: not timed: it is not installed"],
    "notes": ["a note"],
    "rows": [
        {
            "group": "aims",
            "op": "hgru",
            "complex": False,
            "dtype": "bfloat16",
            "B": 8,
            "T": 2048,
            "D": 2048,
            "direction": "forward",
            "bytes": 201326592,
            "sets": 8,
            "goal_percent": 85,
            "results": {
                "copy_": baselines_result(50.0, 201326592, 100.0),
                "tidegate": baselines_result(57.14, 201326592, 87.5),
                "fla.chunk_hgrn": baselines_result(313.1, 201326592, 16.0),
            },
            "best_baseline": "fla.chunk_hgrn",
            "times_best_baseline": 5.48,
        },
    ],
    "problems": [],
}

CPU = {
    "context": {
        "date": "2026-01-02T03:04:05+00:00",
        "num_cpus": 2,
        "mhz_per_cpu": 2100,
        "load_avg": [0.5, 0.4, 0.3],
    },
    "benchmarks": [
        {
            "name": f"cpu/hgru/forward/{kind}/float32/B4/T2048/D1024/avx512/threads2/iterations:40",
            "threads": 1,  # Google Benchmark's own, not the kernel's
            "GB/s": 21.0,
            "copy_GB/s": 33.0,
            "percent_of_copy": 63.6,
            "cpu_percent_of_copy": 71.4,
        }
        for kind in ("real", "complex")
    ],
}

DEMO = {
    "machine": {"device_name": "a CPU", "threads": 2, "torch": "2.11.0"},
    "commit": "abc123",
    "baselines": {"bz2": 1.62},
    "others": [
        {
            "model": "`torch.nn.GRU`, adamw",
            "parameters": 1_300_000,
            "optimizer": "adamw",
            "seconds": 170.0,
            "bytes_per_second": 9400,
            "bits_per_byte": 1.94,
        }
    ],
}


@pytest.fixture
def checkout(tmp_path):
    """A checkout with results of each kind and an empty README section."""
    results = tmp_path / "benchmarks" / "results"
    results.mkdir(parents=True)
    for name, record in (("baselines_h200", BASELINES), ("cpu_scan", CPU), ("demo", DEMO)):
        (results / f"{name}.json").write_text(json.dumps(record), encoding="utf-8")
    marked = "# x\n\n<!-- benchmarks:begin -->\nold\n<!-- benchmarks:end -->\n\nrest\n"
    (tmp_path / "README.md").write_text(marked, encoding="utf-8")
    return tmp_path


def page_of(checkout: Path, name: str = "benchmarks.md") -> str:
    """A page of docs/ that the report wrote."""
    return (checkout / "docs" / name).read_text(encoding="utf-8")


def run_report(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(BENCHMARKS / "report.py"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_committed_pages_are_what_the_results_say():
    result = run_report("--check")
    assert result.returncode == 0, result.stdout + result.stderr


def test_results_older_than_their_kernels_are_warned_of(checkout):
    def commit(file: str, text: str) -> str:
        path = checkout / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        who = ("-c", "user.name=x", "-c", "user.email=x@x")
        for command in (("init", "-q"), ("add", file), (*who, "commit", "-qm", file)):
            subprocess.run(["git", "-C", checkout, *command], check=True)
        head = ["git", "-C", checkout, "rev-parse", "HEAD"]
        return subprocess.run(head, capture_output=True, text=True, check=True).stdout.strip()

    def warned() -> str:
        return run_report("--root", checkout).stderr

    assert warned() == ""  # no git checkout
    measured = commit("kernels/scan/cuda/hgru.cuh", "1")
    results = checkout / "benchmarks" / "results"
    (results / "baselines_h200.json").write_text(
        json.dumps(BASELINES | {"commit": measured}), "utf-8"
    )
    (results / "demo.json").unlink()
    (results / "cpu_scan.json").unlink()
    assert warned() == ""
    for other in ("scan/cpu/hgru.cpp", "gla/cuda/gla.cu", "common/cpu_simd.h"):
        commit(f"kernels/{other}", "1")
    assert warned() == ""
    commit("kernels/common/cuda/launch.cuh", "1")
    commit("kernels/scan/cuda/hgru.cuh", "2")
    assert warned() == (
        f"report: warning: baselines_h200.json: commits since its own, {measured}, that changed "
        "kernels/common, kernels/scan: 2\n"
    )
    (results / "baselines_h200.json").write_text(json.dumps(BASELINES), "utf-8")
    assert "baselines_h200.json: its commit, abc123, is not in this checkout" in warned()


def test_report_writes_readme_and_page_and_notices_changes(checkout):
    assert run_report("--root", checkout, "--check").returncode == 1
    assert (checkout / "README.md").read_text(encoding="utf-8").count("old") == 1

    written = run_report("--root", checkout)
    assert written.returncode == 0, written.stderr
    readme = (checkout / "README.md").read_text(encoding="utf-8")
    assert readme.startswith("# x\n\n<!-- benchmarks:begin -->\n")
    assert readme.endswith("<!-- benchmarks:end -->\n\nrest\n")
    where = "NVIDIA H200, driver 580, torch 2.11.0, fla 0.6.0, commit abc123, 2026-01-02."
    assert where in readme
    expected = "| `hgru` | bf16 B8 T2048 D2048 | 57.1 us | 88% of a copy | 5.5x (fla) |\n"
    assert expected in readme
    assert readme.count("\n| `") == 1

    page = page_of(checkout)
    assert where in page
    expected = (
        "| `hgru` bf16 B8 T2048 D2048 | forward | 57.1 us | 3523 | 88% | 85% "
        "| fla.chunk_hgrn: 313 us, 643 GB/s, 5.5x |"
    )
    assert expected in page
    assert "CPU of 2100 MHz, 2 cores, load average 0.5, 2026-01-02." in page
    assert "| avx512, 2 threads | 21.0 | 33.0 | 64% | 60% | 71% |" in page
    assert "| `torch.nn.GRU`, adamw | 1.3M | 170 s | 9.4k | 1.94 |" in page
    assert "`hgru` complex fp32 B4 T2048 D1024" in page

    lab = page_of(checkout, "lab/benchmarks.md")
    assert "57.14 (56.14-58.14), error 2e-03" in lab
    assert "- accelerated-scan: not timed" in lab
    for theme in ("light", "dark"):
        assert ">5.5x</text>" in page_of(checkout, f"speed_{theme}.svg")

    assert run_report("--root", checkout, "--check").returncode == 0
    changes = {"README.md": ("57.1", "47.1"), "docs/speed_dark.svg": (">5.5x<", ">6.5x<")}
    for name, (right, wrong) in changes.items():
        text = (checkout / name).read_text(encoding="utf-8")
        (checkout / name).write_text(text.replace(right, wrong), encoding="utf-8")
        stale = run_report("--root", checkout, "--check")
        assert stale.returncode == 1
        assert f"report: {Path(name).name} not what the results say" in stale.stdout
        (checkout / name).write_text(text, encoding="utf-8")


def test_results_with_older_words_read_alike(scripts, checkout):
    """Keys and kind as committed results have them that an earlier version wrote."""
    old = json.dumps(BASELINES | {"notes": ["contenders take turns"], "baseline_problems": ["x"]})
    for new, before in (
        ("best_baseline", "best_peer"),
        ("baseline_problems", "peer_problems"),
        ('"kind": "baselines"', '"kind": "peers"'),
    ):
        old = old.replace(new, before)
    assert "best_baseline" not in old
    found = scripts("report_tables").in_todays_words(json.loads(old))
    expected = {"notes": ["implementations take turns"], "baseline_problems": ["x"]}
    assert found == BASELINES | expected


def test_sweep_names_the_shapes_where_tidegate_is_slower(scripts):
    report = scripts("report_gpu")
    record = copy.deepcopy(BASELINES)
    record["rows"][0]["group"] = "sweep"
    assert "slower" not in report.sweep_line(record)
    assert "takes 5.5 to 5.5 times as long" in report.sweep_line(record)
    record["rows"][0]["times_best_baseline"] = 0.9
    assert "slower in 1 of 1: bf16 B8 T2048 D2048 forward" in report.sweep_line(record)


def test_no_results_says_so(scripts):
    report = scripts("report")
    assert report.readme_section([]) == report.NOTHING
    assert report.NOTHING in report.page([])


def test_a_truncated_result_is_named(checkout):
    (checkout / "benchmarks" / "results" / "baselines_h200.json").write_text("{", encoding="utf-8")
    result = run_report("--root", checkout)
    assert result.returncode == 1
    assert "baselines_h200.json is not JSON" in result.stderr


def test_readme_without_markers_is_refused(scripts):
    with pytest.raises(ValueError, match="benchmarks:begin"):
        scripts("report").with_section("# x\n", "figures")


@pytest.mark.parametrize("turned", [False, True], ids=["real", "complex"])
def test_float64_loops_agree_with_autograd(scripts, turned):
    float64 = scripts("float64")
    torch.manual_seed(0)
    time, channels = 9, 4
    kind = torch.complex128 if turned else torch.float64
    f = torch.randn(time, channels, dtype=torch.float64, requires_grad=True)
    c = torch.randn(time, channels, dtype=kind, requires_grad=True)
    gamma = torch.rand(channels, dtype=torch.float64)
    theta = torch.rand(channels, dtype=torch.float64)
    dh = torch.randn(time, channels, dtype=kind)

    def silu(x):
        return x * torch.sigmoid(x)

    decay = gamma + (1 - gamma) * torch.sigmoid(f)
    value = torch.complex(silu(c.real), silu(c.imag)) if turned else silu(c)
    turn = torch.polar(torch.ones_like(theta), theta) if turned else 1
    state, rows = torch.zeros(channels, dtype=kind), []
    for t in range(time):
        state = decay[t] * turn * state + (1 - decay[t]) * value[t]
        rows.append(state)
    h = torch.stack(rows)
    dc, df = torch.autograd.grad(h, (c, f), dh)

    arrays = [tensor.detach().numpy() for tensor in (c, f, gamma, theta, dh)]
    found = float64.hgru(*arrays[:3], arrays[3] if turned else None, arrays[4])
    for ours, reference in zip(found, (h.detach(), dc, df), strict=True):
        assert float64.relative_error(ours, reference.numpy()) < 1e-13


def test_float64_attention_is_the_recurrence(scripts):
    torch.manual_seed(0)
    q, k, v, logit = (torch.randn(70, 5, dtype=torch.float64) for _ in range(4))
    log_f, h0 = torch.nn.functional.logsigmoid(logit - 5), torch.randn(5, 5, dtype=torch.float64)
    state, rows = h0, []
    for t in range(len(q)):
        state = log_f[t].exp()[:, None] * state + k[t][:, None] * v[t]
        rows.append(q[t] @ state)
    o, final = scripts("float64").gated_linear_attention(q, k, v, log_f, h0)
    torch.testing.assert_close(o, torch.stack(rows), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(final, state, rtol=1e-12, atol=1e-12)


def test_float64_wkv4_is_the_recurrence(scripts):
    torch.manual_seed(0)
    w, u = torch.rand(3, dtype=torch.float64), torch.randn(3, dtype=torch.float64)
    k, v, grad_o = torch.randn(3, 7, 3, dtype=torch.float64).requires_grad_()
    y, z, rows = torch.zeros(3), torch.zeros(3), []
    for t in range(len(k)):
        bonus = (u + k[t]).exp()
        rows.append((y + bonus * v[t]) / (z + bonus))
        y, z = (-w).exp() * y + k[t].exp() * v[t], (-w).exp() * z + k[t].exp()
    o = torch.stack(rows)
    expected = (o, *torch.autograd.grad(o, (k, v), grad_o.detach()))
    arrays = [tensor.detach().numpy() for tensor in (w, u, k, v, grad_o)]
    float64 = scripts("float64")
    for found, exact in zip(float64.wkv4(*arrays), expected, strict=True):
        assert float64.relative_error(found, exact.detach().numpy()) < 1e-13


def test_relative_error_never_passes_nan(scripts):
    float64 = scripts("float64")
    values = torch.ones(3, dtype=torch.float64).numpy()
    assert not float64.relative_error(values * float("nan"), values) < 1
    assert not float64.distance(torch.full((3,), float("nan")), torch.ones(3)) < 1
    assert float64.distance(torch.tensor([1.0, 1.1]), torch.tensor([1.0, 1.0])) > 0.05


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
    reaches = scripts("baselines").reaches_goal
    ours = {"us": 410.0, "percent_of_copy": 84.0}
    assert reaches({"goal_ms": 0.42, "results": {"tidegate": ours}}) is True
    assert reaches({"goal_ms": 0.40, "results": {"tidegate": ours}}) is False
    assert reaches({"goal_percent": 80, "results": {"tidegate": ours}}) is True
    assert reaches({"goal_percent": 85, "results": {"tidegate": ours}}) is False
    assert reaches({"goal_percent": None, "results": {"tidegate": ours}}) is None
    assert reaches({"goal_ms": 0.42, "results": {}}) is None


def test_hgrn2_stands_beside_the_other_library_of_the_same_shape(scripts):
    report = scripts("report_gpu")
    shape = {"group": "gla", "dtype": "bfloat16", "direction": "backward", "goal_ms": 1.2}
    shape |= {"B": 8, "T": 4096, "H": 16, "K": 128, "V": 128}
    ours = baselines_result(1000.0, 939524096, 22.0) | {"peak_bytes": 2**30}
    other = baselines_result(5000.0, 1207959552, 5.0) | {"peak_bytes": 4 * 2**30}
    rows = [
        shape | {"op": "hgrn2", "results": {"tidegate": ours}},
        shape | {"op": "gated_linear_attention", "results": {"fla.chunk_gla": other}},
    ]
    cells = report.gla_row(rows[0], rows)
    assert cells[0] == "`hgrn2` bf16 B8 T4096 H16 K128 V128"
    assert cells[5:] == ["1200 us", "fla.chunk_gla: 5,000 us, 5.0x", "1.00 GiB of 4.00"]
    assert report.gla_row(rows[0] | {"T": 1}, rows)[6] == ""
    assert report.gla_row(rows[1], rows)[2] == "failed"


def run_on_cpu(script: str, *options: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(BENCHMARKS / script), "--device", "cpu", "--tiny"]
    return subprocess.run(
        [*command, *map(str, options)],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )


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


def test_float64_attention_has_the_gradients_that_autograd_finds(scripts):
    float64 = scripts("float64")
    rng = torch.Generator().manual_seed(0)
    q, d_o = (torch.randn(50, 8, dtype=torch.float64, generator=rng) for _ in range(2))
    k, v = (torch.randn(70, 8, dtype=torch.float64, generator=rng) for _ in range(2))
    gates = torch.randn(70, dtype=torch.float64, generator=rng)
    leaves = [q, k, v, torch.nn.functional.logsigmoid(gates)]
    found = float64.forgetting_attention(*leaves, d_o, rows=16)
    leaves = [t.requires_grad_() for t in leaves]
    c = leaves[3].cumsum(0)
    scores = leaves[0] @ leaves[1].T * 8**-0.5 + c[20:, None] - c
    later = torch.ones(50, 70, dtype=torch.bool).triu(21)
    o = scores.masked_fill(later, -torch.inf).softmax(-1) @ leaves[2]
    expected = (o, *torch.autograd.grad(o, leaves, d_o))
    for left, right in zip(found, expected, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-10, atol=1e-12)


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
    command = [sys.executable, str(BENCHMARKS / "copying_step.py"), "--device=cpu", "--dummies=5"]
    command += ["--batch=2", "--rounds=1", "--budget=0.01", "--commit=fedcba", f"--out={out}"]
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
