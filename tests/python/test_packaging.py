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
from tidegate import _library, export

pytestmark = pytest.mark.xdist_group("packaging")

SOURCE = Path(__file__).resolve().parents[2]
BUILD = _library.library_dir().parent
INFO = _library.build_info()

in_build_tree = pytest.mark.skipif(
    not (BUILD / "CMakeCache.txt").is_file(), reason="tidegate is not run from its build tree"
)
# Without them a library fits every variant of its torch.
with_cuda_kernels = pytest.mark.skipif(
    not INFO["architectures"], reason="tidegate was built without CUDA kernels"
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
        pytest.param(
            torch.__version__,
            "11.8",
            f"found {torch.__version__.split('+')[0]} (cu118)",
            marks=with_cuda_kernels,
        ),
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
    info = {"torch": "2.11.0", "torch_variant": "cu130", "architectures": "sm_80"}
    _library.check_torch(info, "2.11.3+cu130", "13.0")
    with pytest.raises(_library.LibraryError, match=r"found 2\.11\.0 \(cpu\)"):
        _library.check_torch(info, "2.11.0+cpu", None)


def test_without_cuda_kernels_every_variant_fits() -> None:
    info = {"torch": "2.11.0", "torch_variant": "cpu", "architectures": ""}
    _library.check_torch(info, "2.11.0+cu130", "13.0")
    with pytest.raises(_library.LibraryError, match=r"found 2\.12\.0 \(cpu\)"):
        _library.check_torch(info, "2.12.0+cpu", None)


def test_the_release_builds_wheels_for_the_versions_that_were_tried() -> None:
    cmake = (SOURCE / "cmake" / "TidegateTorch.cmake").read_text("utf-8")
    tried = re.search(r"^set\(TIDEGATE_TORCH_TRIED (.*)\)$", cmake, re.M)[1].split()
    workflow = (SOURCE / ".github" / "workflows" / "wheels.yml").read_text("utf-8")
    assert sorted(set(re.findall(r"torch: ([\d.]+),", workflow))) == tried


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


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that pip installed the package into, from the objects of this build tree."""
    pytest.importorskip("scikit_build_core")
    pip = [sys.executable, "-m", "pip", "install", "--no-build-isolation", "--no-deps"]
    target = tmp_path_factory.mktemp("site")
    run_ok(*pip, "--no-index", "--target", target, f"--config-settings=build-dir={BUILD}", SOURCE)
    return target


@in_build_tree
def test_pip_installs_the_tree_that_is_built(site: Path) -> None:
    """The torch that is here stays."""
    assert sorted(p.name for p in site.glob("tidegate/lib/libtidegate*")) == ["libtidegate.so"]
    assert not (site / "tidegate" / "csrc").exists()
    wheel = next(site.glob("tidegate-*.dist-info")) / "WHEEL"
    assert "Tag: py3-none-linux" in wheel.read_text(encoding="utf-8")
    code = (
        "import tidegate, torch; x = torch.ones(1, 3, 4); h, s = tidegate.ops.hgru(x, x);"
        "print(tidegate._library.build_info()['library'], tuple(h.shape));"
        "print(tidegate.cmake_prefix_path)"
    )
    printed = run_ok(sys.executable, "-c", code, PYTHONPATH=str(site)).splitlines()
    assert printed == [f"{site}/tidegate/lib/libtidegate.so (1, 3, 4)", f"{site}/tidegate"]
    if (BUILD / "bin" / "bench_models").exists():
        code = "import sys, tidegate.cli as c; sys.exit(c.main(['bench', '--models', '--help']))"
        assert "--mixers" in run_ok(sys.executable, "-c", code, PYTHONPATH=str(site))


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
    """Where `cmake --install` put the package, moved to another folder afterwards."""
    folder = tmp_path_factory.mktemp("prefix")
    cmake = cache_entry("CMAKE_COMMAND")
    run_ok(cmake, "--install", BUILD, "--prefix", folder / "first")
    return (folder / "first").rename(folder / "moved")


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


@pytest.fixture(scope="module")
def static_libstdcxx(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the static libstdc++ alone, as beside compilers that were moved. Before the
    system's folders, -lstdc++ finds it: what is linked so has a libstdc++ of its own, beside the
    shared one of torch, unless that is asked for by its own name."""
    folder = tmp_path_factory.mktemp("static")
    library = run_ok("g++", "-print-file-name=libstdc++.a").strip()
    (folder / "libstdc++.a").symlink_to(library)
    return folder


@pytest.fixture(scope="module")
def consumer(
    prefix: Path, static_libstdcxx: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A folder with the programs of examples/cpp, built against the installed package."""
    build = tmp_path_factory.mktemp("consumer")
    # --as-needed is Ubuntu's default.
    linking = f"-DCMAKE_EXE_LINKER_FLAGS=-Wl,--as-needed -L{static_libstdcxx}"
    # A debug build as a user's, but without debug information, which nothing here looks at; g++
    # looks for garbage as rarely as in our own build (CMakeLists.txt).
    flags = "-O0 --param=ggc-min-heapsize=1048576" if INFO["compiler"].startswith("GNU") else "-O0"
    debug = ("-DCMAKE_BUILD_TYPE=Debug", f"-DCMAKE_CXX_FLAGS_DEBUG={flags}")
    run_ok(*configure_consumer(prefix, build, *debug, linking))
    run_ok(cache_entry("CMAKE_COMMAND"), "--build", build)
    return build


def run_programs(build: Path, folder: Path) -> None:
    """Runs what needs no other file than a text, in `folder`."""
    plain = {"LD_LIBRARY_PATH": "", "OMP_NUM_THREADS": "1"}
    assert "forward and backward of HGRU" in run_ok(build / "tidegate_example", **plain)
    assert "found" in run_ok(build / "consumer_dispatcher", **plain)
    assert run_ok(build / "tidegate_embed", **plain).endswith("one sample at a time: the same\n")
    text, model = folder / "tide.txt", folder / "model"
    text.write_text("the tide turns twice a day. " * 40, encoding="utf-8")
    small = ["--steps", 30, "--dim", 32, "--layers", 1, "--context", 32, "--lr", 0.02]
    printed = run_ok(build / "tidegate_train", text, model, *small, "--prompt", "the ", **plain)
    losses = [float(loss) for loss in re.findall(r"([\d.]+) nats a byte", printed)]
    assert losses[-1] < 1.0
    assert printed.splitlines()[-1].startswith("the ")
    assert tidegate.models.CausalLM.load(model).config.dim == 32


@in_build_tree
def test_consumer_project_compiles_links_and_runs(consumer: Path, tmp_path: Path) -> None:
    # Debian 12's CMake is enough for a program, and for a library without CUDA kernels.
    for project in ("examples/cpp", "tests/consumer", "."):
        text = (SOURCE / project / "CMakeLists.txt").read_text(encoding="utf-8")
        assert "cmake_minimum_required(VERSION 3.25)" in text
    run_programs(consumer, tmp_path)
    served_is_what_python_generates(consumer / "tidegate_serve", tmp_path / "served")
    result = run(consumer / "tidegate_train", tmp_path / "none.txt", tmp_path / "model")
    assert result.returncode == 2
    assert "none.txt: cannot be read" in result.stderr


def served_is_what_python_generates(program: Path, folder: Path) -> None:
    """More prompts than the server has slots, greedily."""
    config = tidegate.models.LMConfig(mixer="hgrn2", vocab_size=256, dim=32, layers=2)
    model = tidegate.models.CausalLM(config)
    with torch.no_grad():
        model.embedding.weight.add_(torch.randn_like(model.embedding.weight))
    model.save(folder)
    prompts = [f"prompt {k}".encode() for k in range(11)]
    served = subprocess.run(
        [program, folder, "6", "0"],
        input=b"\n".join(prompts),
        capture_output=True,
        check=True,
        env={**os.environ, "LD_LIBRARY_PATH": ""},
    ).stdout
    for number, prompt in enumerate(prompts, start=1):
        ids = model.generate(torch.tensor([list(prompt)]), 6, temperature=0.0)
        assert b"%d: %s" % (number, bytes(ids[0].tolist())) in served


def same_files(one: Path, other: Path) -> bool:
    """Whether two folders hold the same files."""
    names = [sorted(p.relative_to(f) for p in f.rglob("*.h")) for f in (one, other)]
    return names[0] == names[1] and all(
        (one / name).read_bytes() == (other / name).read_bytes() for name in names[0]
    )


@in_build_tree
def test_consumer_project_finds_what_pip_installed(
    site: Path, prefix: Path, consumer: Path, tmp_path: Path
) -> None:
    """By tidegate.cmake_prefix_path. The headers are the same, so what was compiled with those of
    the other install is linked."""
    assert same_files(site / "tidegate" / "include", prefix / "include")
    build = tmp_path / "build"
    run_ok(*configure_consumer(site / "tidegate", build, f"-DOBJECTS_FROM={consumer}"))
    run_ok(cache_entry("CMAKE_COMMAND"), "--build", build)
    assert f"{site}/tidegate/lib" in run_path(build / "tidegate_example")
    run_programs(build, tmp_path)


@in_build_tree
@pytest.mark.slow
def test_an_exported_model_is_served_without_python(
    consumer: Path, static_libstdcxx: Path, tmp_path: Path
) -> None:
    """In tidegate_serve_exported, which says what the model does; a mixer of each kind of state."""
    torch.manual_seed(0)
    config = tidegate.models.LMConfig(
        ["rwkv4", "fox"], vocab_size=256, dim=32, layers=2, init_std=0.3
    )
    model = tidegate.models.CausalLM(config).eval()
    compiler = tmp_path / "g++"
    compiler.write_text(f'#!/bin/sh\nexec g++ -L{static_libstdcxx} "$@"\n', encoding="utf-8")
    compiler.chmod(0o755)
    options = {
        "aot_inductor.compile_wrapper_opt_level": "O0",  # quickly
        "cpp.cxx": (None, str(compiler)),
    }
    package = export.package(model, tmp_path / "model.pt2", capacity=64, options=options)
    served = subprocess.run(
        [consumer / "tidegate_serve_exported", package, "the tide", "12"],
        capture_output=True,
        env={"PATH": "/nowhere", "OMP_NUM_THREADS": "1"},
        timeout=600,
    )
    assert served.returncode == 0, served.stderr
    ids = torch.tensor([list(b"the tide")])
    assert served.stdout[:-1] == bytes(model.generate(ids, 12, temperature=0.0)[0].tolist())
    programs = export.load(package)
    assert set(programs) == {"prefill", "step"}
    with torch.no_grad():
        logits = programs["prefill"](ids)[0]
        torch.testing.assert_close(logits, model.prefill(ids, capacity=64)[0])


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
        pytest.param("2.11.0+cu118", "11.8", "found 2.11.0 (cu118)", marks=with_cuda_kernels),
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
