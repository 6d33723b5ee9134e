"""What training asks of the machine."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from tidegate import cli
from tidegate.training import UserError, runtime


@pytest.mark.parametrize("name", ["bf61", "fp16", ""])
def test_what_is_no_precision_is_refused(name):
    message = rf"precision: expected one of auto, fp32, tf32, bf16, bf16-weights, got '{name}'"
    with pytest.raises(UserError, match=message):
        runtime.resolve_precision(name, torch.device("cpu"))


@pytest.mark.parametrize(
    ("amx", "products", "name", "wanted"),
    [
        (True, True, "Intel(R) Xeon(R) Processor", "bf16"),
        (False, True, "Intel(R) Xeon(R) Processor", "fp32"),
        (False, True, "AMD EPYC 9R14", "bf16"),
        (False, False, "AMD EPYC 7R13", "fp32"),
    ],
)
def test_a_cpu_trains_in_bf16_where_that_is_faster(monkeypatch, amx, products, name, wanted):
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx, raising=False)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: products, raising=False)
    monkeypatch.setattr(runtime, "cpu_name", lambda: name)
    assert runtime.resolve_precision("auto", torch.device("cpu")) == wanted
    assert runtime.resolve_precision("bf16", torch.device("cpu")) == "bf16"


# A process that frees and asks for the same again: the most page faults of a round, once the heap
# has found its places, the worst two of twenty aside. In one process of ten (Python 3.10) a block
# gets a new place once more, as late as in the twelfth round.
FAULTS = """
import resource, sys
import torch
from tidegate._memory import keep_freed_memory

kept = keep_freed_memory() if sys.argv[1] == "keep" else None
faults = []
for _ in range(24):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    tensors = [torch.ones(size << 18) for size in (4, 16, 3, 40, 7)]
    del tensors
    faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
print(kept, sorted(faults[4:])[-3])
"""


def faults_of(mode: str, **environment: str) -> tuple[str, int]:
    plain = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("MALLOC_") and name != "GLIBC_TUNABLES"
    }
    result = subprocess.run(
        [sys.executable, "-c", FAULTS, mode],
        env=plain | environment,
        capture_output=True,
        text=True,
        check=True,
    )
    kept, faults = result.stdout.split()
    return kept, int(faults)


def test_memory_that_is_freed_is_kept():
    kept, faults = faults_of("keep")
    if kept == "False":
        pytest.skip("this C library cannot keep freed memory")
    assert faults < 100  # of 17,920 pages
    assert faults_of("default")[1] > 1000


def test_an_environment_that_sets_malloc_is_left_alone():
    for name, value in (("MALLOC_ARENA_MAX", "1"), ("GLIBC_TUNABLES", "glibc.malloc.check=0")):
        assert faults_of("keep", **{name: value})[0] == "False"


def test_the_command_line_keeps_memory_in_its_own_process_alone(monkeypatch):
    calls = []
    monkeypatch.setattr(cli, "keep_freed_memory", lambda: calls.append(1))
    assert cli.main(["info"]) == 0
    assert not calls
    monkeypatch.setattr(sys, "argv", ["tidegate", "info"])
    assert cli.main() == 0
    assert calls
