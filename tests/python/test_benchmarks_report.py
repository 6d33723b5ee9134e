"""benchmarks/report.py: the pages and pictures made from results."""

from __future__ import annotations

import copy
import importlib
import json
import re
import subprocess
from pathlib import Path

import pytest
from benchmarks_cases import (
    BASELINES,
    BENCHMARKS,
    ROOT,
    baselines_result,
    fill_checkout,
    page_of,
    run_report,
)


@pytest.fixture
def scripts(monkeypatch):
    """Imports a script of benchmarks/."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module


@pytest.fixture
def checkout(tmp_path):
    return fill_checkout(tmp_path)


def test_committed_pages_are_what_the_results_say():
    result = run_report("--check")
    assert result.returncode == 0, result.stdout + result.stderr


def test_readme_shows_both_pictures():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    shown = re.findall(r'(?:src|srcset)="(docs/[^"]+)"', readme)
    assert shown == ["docs/speed_dark.svg", "docs/speed_light.svg"]
    assert all((ROOT / path).exists() for path in shown)
    assert len(readme.splitlines()) <= 130


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
    assert "on one NVIDIA H200." in readme
    assert "(docs/benchmarks.md)" in readme  # which says driver, versions and commits
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
