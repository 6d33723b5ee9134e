"""The package as people get it: built tree, pip, cmake --install, and the wrong torch for each."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import tidegate
from tidegate import _library

pytestmark = pytest.mark.xdist_group("packaging")

SOURCE = Path(__file__).resolve().parents[2]
BUILD = _library.library_dir().parent
INFO = _library.build_info()

in_build_tree = pytest.mark.skipif(
    not (BUILD / "CMakeCache.txt").is_file(), reason="tidegate is not run from its build tree"
)


def cache_entry(name: str) -> str:
    """A variable of the build tree's CMakeCache.txt."""
    for line in (BUILD / "CMakeCache.txt").read_text(encoding="utf-8").splitlines():
        if line.startswith(f"{name}:"):
            return line.partition("=")[2]
    raise KeyError(name)


def run(*command: object, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(word) for word in command],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
        timeout=600,
    )


def run_ok(*command: object, **environment: str) -> str:
    result = run(*command, **environment)
    assert result.returncode == 0, f"{command}:\n{result.stdout}\n{result.stderr}"
    return result.stdout


# ---------------------------------------------------------------- import


def test_import_registers_the_ops_and_the_version() -> None:
    assert tidegate.__version__ == INFO["version"]
    assert hasattr(torch.ops.tidegate, "hgru")
    for name in ("ops", "nn", "models"):
        assert getattr(tidegate, name).__name__ == f"tidegate.{name}"


def test_build_info_names_this_torch() -> None:
    assert INFO["torch"].split(".")[:2] == torch.__version__.split(".")[:2]
    assert set(INFO) >= {"cuda", "architectures", "compiler", "commit", "library"}


def test_libraries_need_no_environment_variables() -> None:
    code = "import tidegate; print(tidegate.__version__)"
    assert run_ok(sys.executable, "-c", code, LD_LIBRARY_PATH="").strip() == INFO["version"]


@pytest.mark.parametrize(
    ("version", "cuda", "found"),
    [
        ("2.99.1+cu130", "13.0", "found 2.99.1 (cu130)"),
        (torch.__version__, "11.8", f"found {torch.__version__.split('+')[0]} (cu118)"),
    ],
)
def test_another_torch_is_refused_before_loading(version: str, cuda: str, found: str) -> None:
    code = f"import torch; torch.__version__ = {version!r}; torch.version.cuda = {cuda!r}\n"
    result = run(sys.executable, "-c", code + "import tidegate")
    assert result.returncode != 0
    last = result.stderr.strip().splitlines()[-1]
    assert f"tidegate was built for torch {INFO['torch']} ({INFO['torch_variant']})" in last
    assert found in last
    assert "pip install --no-build-isolation" in last


def test_check_torch_accepts_patch_releases_and_tells_cpu_from_cuda() -> None:
    info = {"torch": "2.11.0", "torch_variant": "cpu"}
    _library.check_torch(info, "2.11.3+cpu", None)
    with pytest.raises(_library.LibraryError, match=r"found 2\.11\.0 \(cu130\)"):
        _library.check_torch(info, "2.11.0+cu130", "13.0")


def test_a_missing_library_is_named() -> None:
    result = run(sys.executable, "-c", "import tidegate", PYTHONPATH=str(SOURCE / "python"))
    if result.returncode == 0:
        pytest.skip("tidegate is installed in this Python too")
    last = result.stderr.strip().splitlines()[-1]
    assert "libtidegate.so is not in" in last
    assert "pip install --no-build-isolation ." in last


def test_an_op_that_a_stale_build_lacks_says_so_when_it_is_called() -> None:
    """As if the library had been built before wkv4 was written."""
    code = """
import torch
found = torch._ops._OpNamespace.__getattr__
def without(namespace, name):
    if namespace.name == "tidegate" and name == "wkv4":
        raise AttributeError(name)
    return found(namespace, name)
torch._ops._OpNamespace.__getattr__ = without
import tidegate
x = torch.ones(1, 3, 4)
tidegate.ops.hgru(x, x)
tidegate.nn.RWKV4(4)(x)
"""
    result = run(sys.executable, "-c", code)
    assert result.returncode != 0
    last = result.stderr.strip().splitlines()[-1]
    assert "tidegate.ops.wkv4: " in last
    assert "libtidegate.so has no such op" in last
    assert "Rebuild: make build" in last


# ---------------------------------------------------------------- pip


@in_build_tree
def test_pip_installs_the_tree_that_is_built(tmp_path: Path) -> None:
    """The wheel is made from the objects of this build tree; the torch that is here stays."""
    pytest.importorskip("scikit_build_core")
    pip = [sys.executable, "-m", "pip", "install", "--no-build-isolation", "--no-deps"]
    target = tmp_path / "site"
    run_ok(*pip, "--no-index", "--target", target, f"--config-settings=build-dir={BUILD}", SOURCE)

    assert sorted(p.name for p in target.glob("tidegate/lib/libtidegate*")) == ["libtidegate.so"]
    assert not (target / "tidegate" / "csrc").exists()
    wheel = next(target.glob("tidegate-*.dist-info")) / "WHEEL"
    assert "Tag: py3-none-linux" in wheel.read_text(encoding="utf-8")
    code = (
        "import tidegate, torch; x = torch.ones(1, 3, 4); h, s = tidegate.ops.hgru(x, x);"
        "print(tidegate._library.build_info()['library'], tuple(h.shape))"
    )
    printed = run_ok(sys.executable, "-c", code, PYTHONPATH=str(target)).strip()
    assert printed == f"{target}/tidegate/lib/libtidegate.so (1, 3, 4)"


def test_pip_says_at_once_that_there_is_no_torch(tmp_path: Path) -> None:
    """Before it downloads what tidegate depends on, torch among it, and fails then."""
    pytest.importorskip("scikit_build_core")
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n', encoding="utf-8")
    bare.chmod(0o755)
    code = (
        f"import sys; sys.path.insert(0, {str(SOURCE / 'scripts' / 'pip')!r})\n"
        "import tidegate_build;"
        "tidegate_build._check_torch(); print('there is one', flush=True);"
        f"sys.executable = {str(bare)!r}; tidegate_build.prepare_metadata_for_build_wheel('x')"
    )
    result = run(sys.executable, "-c", code)
    assert result.stdout == "there is one\n"
    assert result.returncode == 1
    assert f"{bare} -m pip install torch" in result.stderr
    assert "Traceback" not in result.stderr


# ---------------------------------------------------------------- cmake --install


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("prefix")
    cmake = cache_entry("CMAKE_COMMAND")
    run_ok(cmake, "--install", BUILD, "--prefix", folder)
    return folder


def configure_consumer(prefix: Path, build: Path, *arguments: str) -> list[object]:
    return [
        cache_entry("CMAKE_COMMAND"),
        "-S",
        SOURCE / "tests" / "consumer",
        "-B",
        build,
        "-G",
        cache_entry("CMAKE_GENERATOR"),
        f"-DCMAKE_MAKE_PROGRAM={cache_entry('CMAKE_MAKE_PROGRAM')}",
        f"-DCMAKE_PREFIX_PATH={prefix}",
        *arguments,
    ]


def run_path(file: Path) -> list[str]:
    """The folders of the file's DT_RPATH."""
    printed = run_ok("readelf", "-dW", file)
    (path,) = re.findall(r"\(RPATH\).*\[(.*)\]", printed)
    return path.split(":")


@in_build_tree
def test_run_paths_are_whole_and_the_same_after_installing(prefix: Path) -> None:
    """An empty entry would mean the current folder."""
    built = [*BUILD.glob("lib/*.so"), *BUILD.glob("bin/*")]
    assert BUILD / "lib" / "libtidegate.so" in built
    for file in built:
        assert all(entry.startswith(("/", "$ORIGIN")) for entry in run_path(file)), file
    installed = next(prefix.glob("lib*/libtidegate.so"))
    assert run_path(installed) == run_path(BUILD / "lib" / "libtidegate.so")


@in_build_tree
def test_consumer_project_compiles_links_and_runs(prefix: Path, tmp_path: Path) -> None:
    as_needed = "-DCMAKE_EXE_LINKER_FLAGS=-Wl,--as-needed"  # Ubuntu's default
    # A debug build as a user's, but without debug information, which nothing here looks at.
    debug = ("-DCMAKE_BUILD_TYPE=Debug", "-DCMAKE_CXX_FLAGS_DEBUG=-O0")
    run_ok(*configure_consumer(prefix, tmp_path, *debug, as_needed))
    # Debian 12's CMake is enough for a program, and for a library without CUDA kernels.
    for project in ("examples/cpp", "tests/consumer", "."):
        text = (SOURCE / project / "CMakeLists.txt").read_text(encoding="utf-8")
        assert "cmake_minimum_required(VERSION 3.25)" in text
    run_ok(cache_entry("CMAKE_COMMAND"), "--build", tmp_path)
    assert "forward and backward of HGRU" in run_ok(tmp_path / "consumer", LD_LIBRARY_PATH="")
    assert "found" in run_ok(tmp_path / "consumer_dispatcher", LD_LIBRARY_PATH="")


def fake_torch(folder: Path, version: str, cuda: str | None) -> Path:
    """What TidegateTorch.cmake looks at in a torch package."""
    (folder / "include" / "ATen").mkdir(parents=True)
    (folder / "include" / "ATen" / "ATen.h").touch()
    (folder / "lib").mkdir()
    text = f"__version__ = {version!r}\ncuda: Optional[str] = {cuda!r}\n"
    (folder / "version.py").write_text(text, encoding="utf-8")
    return folder


@in_build_tree
@pytest.mark.parametrize(
    ("version", "cuda", "found"),
    [
        ("2.99.0+cu130", "13.0", "found 2.99.0 (cu130)"),
        ("2.11.0+cu118", "11.8", "found 2.11.0 (cu118)"),
    ],
)
def test_consumer_with_another_torch_is_told(
    prefix: Path, tmp_path: Path, version: str, cuda: str, found: str
) -> None:
    torch_dir = fake_torch(tmp_path / "torch", version, cuda)
    command = configure_consumer(prefix, tmp_path / "build", f"-DTIDEGATE_TORCH_DIR={torch_dir}")
    result = run(*command)
    assert result.returncode != 0
    message = " ".join(result.stderr.split())  # CMake wraps lines
    assert f"tidegate was built for torch {INFO['torch']} ({INFO['torch_variant']})" in message
    assert found in message


# ---------------------------------------------------------------- finding nvcc


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


def detect(
    folder: Path, torch_cuda: str | None = "13.0", cuda: str = "AUTO", **environment: str
) -> subprocess.CompletedProcess[str]:
    """Configures a project that only looks for CUDA, where nvcc is what `environment` names."""
    (folder / "CMakeLists.txt").write_text(DETECTION, encoding="utf-8")
    torch_dir = fake_torch(folder / "torch", "2.11.0", torch_cuda)
    (folder / "empty").mkdir()
    kept = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    command = [
        cache_entry("CMAKE_COMMAND"),
        *("-S", folder, "-B", folder / "build", "-G", cache_entry("CMAKE_GENERATOR")),
        f"-DCMAKE_MAKE_PROGRAM={cache_entry('CMAKE_MAKE_PROGRAM')}",
        f"-DCMAKE_MODULE_PATH={SOURCE / 'cmake'}",
        f"-DTIDEGATE_TORCH_DIR={torch_dir}",
        f"-DTIDEGATE_CUDA={cuda}",
    ]
    return subprocess.run(
        [str(word) for word in command],
        capture_output=True,
        text=True,
        env={**kept, "PATH": str(folder / "empty"), **environment},
        timeout=600,
    )


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


# ---------------------------------------------------------------- the wall


def test_kernels_include_no_torch() -> None:
    for path in (SOURCE / "kernels").rglob("*"):
        if path.suffix in {".h", ".cpp", ".cu", ".cuh"}:
            text = path.read_text(encoding="utf-8")
            for header in ("<torch/", "<ATen/", "<c10/", '"torch/', '"ATen/', '"c10/'):
                assert f"#include {header}" not in text, f"{path} includes {header}"
