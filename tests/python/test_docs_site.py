"""The site: what its C++ pages are made of, and that it builds without a warning."""

from __future__ import annotations

import importlib
import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tidegate import reference

ROOT = Path(__file__).resolve().parents[2]
TOOLS = ("sphinx", "myst_parser", "furo")


@pytest.fixture
def header_comments(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "docs" / "_ext"))
    return importlib.import_module("header_comments")


def test_every_op_is_found_in_the_headers(header_comments: ModuleType) -> None:
    found = {
        one.name(): one
        for header in (ROOT / "include" / "tidegate" / "ops").glob("*.h")
        for one in header_comments.declarations(header)
    }
    assert set(reference.__all__) <= set(found)
    assert found["hgru"].comment[0].startswith("HGRN's recurrence")
    assert found["hgru"].code.startswith("std::tuple<at::Tensor, at::Tensor> hgru(")
    assert found["hgru"].code.endswith(";")


def test_declarations_of_a_header(header_comments: ModuleType, tmp_path: Path) -> None:
    header = tmp_path / "tide.h"
    header.write_text(
        """// A file's own comment is not a declaration's.
#pragma once
namespace tidegate {

struct TideOptions {
  explicit TideOptions(int64_t dim) : dim_(dim) {}

  /// Width of x.
  TORCH_ARG(int64_t, dim);
};

/// Turns twice a day.
///
///   h_t = moon(t)
class TideImpl : public torch::nn::Module {
 public:
  /// One step.
  at::Tensor step(const at::Tensor& x,
                  bool reverse = false) const override {
    return x;
  }

 private:
  /// Nobody's business.
  int64_t turns_ = 0;
};

/// How many there are.
int64_t tides(int64_t days);

}  // namespace tidegate
""",
        encoding="utf-8",
    )
    options, tide, tides = header_comments.declarations(header)
    assert (options.name(), options.comment) == ("TideOptions", [])
    assert [member.name() for member in options.members] == ["dim"]
    assert (tide.name(), tide.code) == ("TideImpl", "class TideImpl")
    assert tide.comment == ["Turns twice a day.", "", "  h_t = moon(t)"]
    (step,) = tide.members
    assert " ".join(step.code.split()) == (
        "at::Tensor step(const at::Tensor& x, bool reverse = false) const override"
    )
    assert (tides.name(), tides.code) == ("tides", "int64_t tides(int64_t days);")


@pytest.mark.slow
def test_site_builds_without_a_warning(tmp_path: Path) -> None:
    missing = [name for name in TOOLS if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)} (requirements-docs.txt)")
    command = [sys.executable, "-m", "sphinx", "-b", "html", "-W", "--keep-going", "-q"]
    result = subprocess.run(
        [*command, "-d", tmp_path / "doctrees", ROOT / "docs", tmp_path / "html"],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert result.returncode == 0, result.stderr
    for page in ("index", "ops/hgru", "api/python_reference", "api/cpp_ops"):
        assert (tmp_path / "html" / f"{page}.html").is_file()
