"""Which nvcc the build takes, and what it says where there is none that fits."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from test_packaging import SOURCE, cache_entry, fake_torch, in_build_tree

pytestmark = pytest.mark.xdist_group("packaging")

DETECTION = """
cmake_minimum_required(VERSION 3.28)
project(detection LANGUAGES NONE)
include(TidegateTorch)
_tidegate_torch_version(${TIDEGATE_TORCH_DIR})
include(TidegateCuda)
tidegate_enable_cuda()
message(STATUS "with CUDA: ${TIDEGATE_WITH_CUDA}, architectures: '${TIDEGATE_CUDA_ARCHITECTURES}'")
"""
VARIABLES = ("CUDACXX", "CUDA_HOME", "CUDA_PATH", "PATH")


def fake_nvcc(folder: Path, release: str | None) -> Path:
    """A script in `folder` that names its version as nvcc does, and compiles nothing; one that only
    fails where there is none."""
    folder.mkdir(parents=True, exist_ok=True)
    nvcc = folder / "nvcc"
    says = f"Cuda compilation tools, release {release}, V{release}.1"
    version = "" if release is None else f'[ "$1" = --version ] && echo "{says}" && exit 0\n'
    nvcc.write_text(f"#!/bin/sh\n{version}exit 1\n", encoding="utf-8")
    nvcc.chmod(0o755)
    return nvcc


def configured(
    folder: Path, project: str, environment: dict[str, str], **entries: object
) -> subprocess.CompletedProcess[str]:
    """Has CMake configure a project of one file, with these cache entries, in this environment."""
    (folder / "CMakeLists.txt").write_text(project, encoding="utf-8")
    command = [
        cache_entry("CMAKE_COMMAND"),
        *("-S", folder, "-B", folder / "build", "-G", cache_entry("CMAKE_GENERATOR")),
        f"-DCMAKE_MAKE_PROGRAM={cache_entry('CMAKE_MAKE_PROGRAM')}",
        f"-DCMAKE_MODULE_PATH={SOURCE / 'cmake'}",
        *(f"-D{name}={value}" for name, value in entries.items()),
    ]
    return subprocess.run(
        [str(word) for word in command],
        capture_output=True,
        text=True,
        env=environment,
        timeout=600,
    )


def detect(
    folder: Path, torch_cuda: str | None = "13.0", cuda: str = "AUTO", **environment: str
) -> subprocess.CompletedProcess[str]:
    """Configures a project that only looks for CUDA, where nvcc is what `environment` names."""
    torch_dir = fake_torch(folder / "torch", "2.11.0", torch_cuda)
    (folder / "empty").mkdir()
    kept = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    seen = {**kept, "PATH": str(folder / "empty"), **environment}
    return configured(folder, DETECTION, seen, TIDEGATE_TORCH_DIR=torch_dir, TIDEGATE_CUDA=cuda)


def said_of_cuda(result: subprocess.CompletedProcess[str]) -> str:
    """Why the build is a CPU build, from the one line that says so."""
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    (line,) = [line for line in result.stdout.splitlines() if "tidegate:" in line]
    head, _, why = line.partition("-- tidegate: CUDA kernels: off, a CPU build: ")
    assert head == ""
    assert "-- with CUDA: OFF, architectures: ''" in result.stdout
    return why


@in_build_tree
def test_without_nvcc_the_build_is_a_cpu_build(tmp_path: Path) -> None:
    why = "no nvcc in CUDACXX, CUDA_HOME or PATH (torch's CUDA is 13.0)"
    if Path("/usr/local/cuda/bin/nvcc").exists():
        why += "; /usr/local/cuda has one: CUDA_HOME=/usr/local/cuda uses it"
    assert said_of_cuda(detect(tmp_path)) == why


@in_build_tree
@pytest.mark.parametrize(
    ("release", "torch_cuda", "why"),
    [
        ("12.7", "12.7", "nvcc 12.7 is older than 12.8 ({nvcc})"),
        ("9.2", "13.0", "nvcc 9.2 is older than 12.8 ({nvcc})"),
        (
            "12.9",
            "13.0",
            "nvcc 12.9 does not fit torch's CUDA 13.0: the major version must be the same ({nvcc})",
        ),
        (
            "13.0",
            "12.8",
            "nvcc 13.0 does not fit torch's CUDA 12.8: the major version must be the same ({nvcc})",
        ),
        (None, "13.0", "{nvcc} --version does not run"),
        ("13.0", None, "torch 2.11.0 is a CPU-only build"),
    ],
)
def test_an_nvcc_that_does_not_fit_is_told(
    tmp_path: Path, release: str | None, torch_cuda: str | None, why: str
) -> None:
    nvcc = fake_nvcc(tmp_path / "toolkit", release)
    said = said_of_cuda(detect(tmp_path, torch_cuda, CUDACXX=str(nvcc)))
    assert said == why.format(nvcc=nvcc)


@in_build_tree
@pytest.mark.parametrize(("release", "torch_cuda"), [("12.8", "12.9"), ("13.1", "13.0")])
def test_an_nvcc_of_a_fitting_version_is_tried(
    tmp_path: Path, release: str, torch_cuda: str
) -> None:
    """Here it compiles nothing, as where it refuses the g++ that is here."""
    nvcc = fake_nvcc(tmp_path / "toolkit", release)
    why = f"{nvcc} cannot compile a test program (see CMakeFiles/CMakeConfigureLog.yaml)"
    assert said_of_cuda(detect(tmp_path, torch_cuda, CUDACXX=str(nvcc))) == why


@in_build_tree
@pytest.mark.parametrize("first", range(len(VARIABLES)))
def test_where_nvcc_is_looked_for(tmp_path: Path, first: int) -> None:
    """CUDACXX before CUDA_HOME before CUDA_PATH before PATH: the first of those there are."""
    environment = {}
    for name in VARIABLES[first:]:
        folder = tmp_path / name
        if name == "CUDACXX":
            environment[name] = str(fake_nvcc(folder, "11.8"))
        else:
            nvcc = fake_nvcc(folder / "bin", "11.8")
            environment[name] = str(nvcc.parent if name == "PATH" else folder)
    bin_folder = "" if first == 0 else "bin"
    found = tmp_path / VARIABLES[first] / bin_folder / "nvcc"
    assert said_of_cuda(detect(tmp_path, **environment)) == (
        f"nvcc 11.8 is older than 12.8 ({found})"
    )


@in_build_tree
@pytest.mark.parametrize(
    ("torch_cuda", "release", "why"),
    [
        ("13.0", None, "no nvcc in CUDACXX, CUDA_HOME or PATH (torch's CUDA is 13.0)"),
        ("13.0", "12.4", "nvcc 12.4 is older than 12.8 ("),
        (None, "13.0", "torch 2.11.0 is a CPU-only build"),
        ("13.0", "13.0", "cannot compile a test program"),
    ],
)
def test_asking_for_cuda_that_cannot_be_built_is_an_error(
    tmp_path: Path, torch_cuda: str | None, release: str | None, why: str
) -> None:
    given = {} if release is None else {"CUDACXX": str(fake_nvcc(tmp_path / "toolkit", release))}
    result = detect(tmp_path, torch_cuda, "ON", **given)
    assert result.returncode != 0
    message = " ".join(result.stderr.split())  # CMake wraps lines
    assert "tidegate: TIDEGATE_CUDA=ON, but " in message
    assert why in message


@in_build_tree
def test_cuda_can_be_left_out(tmp_path: Path) -> None:
    nvcc = fake_nvcc(tmp_path / "toolkit", "12.4")
    assert said_of_cuda(detect(tmp_path, "12.8", "OFF", CUDACXX=str(nvcc))) == "TIDEGATE_CUDA=OFF"


SM80 = """
cmake_minimum_required(VERSION 3.25)
project(sm80 LANGUAGES NONE)
include(TidegateCuda)
_tidegate_choose_sm80(chosen)
message(STATUS "chosen: ${chosen}")
"""


def choose_sm80(folder: Path, asked: str, says: str | None) -> subprocess.CompletedProcess[str]:
    """What TIDEGATE_CUDA_SM80=`asked` comes to where nvidia-smi prints `says`; None: it fails."""
    smi = folder / "bin" / "nvidia-smi"
    smi.parent.mkdir()
    printed = "exit 9" if says is None else f"printf '{says}'"
    smi.write_text(f"#!/bin/sh\n{printed}\n", encoding="utf-8")
    smi.chmod(0o755)
    return configured(
        folder, SM80, {**os.environ, "PATH": str(smi.parent)}, TIDEGATE_CUDA_SM80=asked
    )


@in_build_tree
@pytest.mark.parametrize(
    ("asked", "says", "chosen"),
    [
        ("AUTO", "8.6\\n", "ON"),
        ("AUTO", "9.0\\n8.0\\n", "ON"),
        ("AUTO", "9.0\\n", "OFF"),
        ("AUTO", "10.8\\n12.0\\n", "OFF"),
        ("AUTO", "", "OFF"),
        ("ON", "9.0\\n", "ON"),
        ("OFF", "8.0\\n", "OFF"),
    ],
)
def test_machine_code_for_8_x_where_there_is_such_a_gpu(
    tmp_path: Path, asked: str, says: str, chosen: str
) -> None:
    result = choose_sm80(tmp_path, asked, says)
    assert result.returncode == 0, result.stderr
    assert f"-- chosen: {chosen}\n" in result.stdout


@in_build_tree
def test_a_gpu_that_cannot_be_asked_may_be_an_8_x(tmp_path: Path) -> None:
    has_gpu = any(Path("/dev").glob("nvidia[0-9]*")) or Path("/dev/dxg").exists()
    chosen = "ON" if has_gpu else "OFF"
    assert f"-- chosen: {chosen}\n" in choose_sm80(tmp_path, "AUTO", None).stdout


@in_build_tree
def test_another_word_for_8_x_is_an_error(tmp_path: Path) -> None:
    result = choose_sm80(tmp_path, "native", "9.0\\n")
    assert result.returncode != 0
    message = " ".join(result.stderr.split())
    assert "tidegate: TIDEGATE_CUDA_SM80 must be AUTO, ON or OFF, given 'native'" in message


# ---------------------------------------------------------------- the wall


def test_kernels_include_no_torch() -> None:
    for path in (SOURCE / "kernels").rglob("*"):
        if path.suffix in {".h", ".cpp", ".cu", ".cuh"}:
            text = path.read_text(encoding="utf-8")
            for header in ("<torch/", "<ATen/", "<c10/", '"torch/', '"ATen/', '"c10/'):
                assert f"#include {header}" not in text, f"{path} includes {header}"
