"""The public headers: each includes what it names. (test_packaging.py compiles them all, without a
warning, in the programs of examples/cpp.)"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

INCLUDE = Path(__file__).resolve().parents[2] / "include"
HEADERS = sorted(str(path.relative_to(INCLUDE)) for path in INCLUDE.rglob("*.h"))
TENSOR = r"(ATen|torch)/.*"
# What a header may name, and the headers of which one declares it.
DECLARED_IN = {
    r"std::optional|std::nullopt": r"optional",
    r"std::tuple": r"tuple",
    r"std::vector": r"vector",
    r"std::string\b": r"string",
    r"std::map\b": r"map",
    r"std::variant|std::monostate": r"variant",
    r"std::pair|std::move": r"utility",
    r"std::shared_ptr|std::unique_ptr|std::make_shared": r"memory",
    r"std::ostream": r"ostream|iosfwd|iostream",
    r"std::function": r"functional",
    r"std::array|std::span": r"array|span",
    r"\bu?int(8|16|32|64)_t\b": rf"cstdint|{TENSOR}",
    r"at::Tensor|torch::Tensor": TENSOR,
    r"torch::nn::Linear\b": r"torch/nn/modules/linear\.h",
    r"torch::nn::Embedding\b": r"torch/nn/modules/embedding\.h",
    r"torch::nn::ModuleList\b": r"torch/nn/modules/container/modulelist\.h",
    r"torch::nn::Cloneable": r"torch/nn/cloneable\.h",
    r"TORCH_MODULE|TORCH_ARG": r"torch/.*",
    r"at::Device|c10::Device": rf"c10/core/Device\.h|{TENSOR}",
}


@cache
def code(header: str) -> str:
    """The header without comments."""
    text = (INCLUDE / header).read_text("utf-8")
    return re.sub(r"//.*?$|/\*.*?\*/", "", text, flags=re.M | re.S)


@cache
def includes(header: str) -> frozenset[str]:
    """What it includes, by itself and through other headers of ours."""
    found = set()
    for name in re.findall(r'^#include [<"]([^>"]+)[>"]', code(header), re.M):
        found.add(name)
        if name in HEADERS:
            found |= includes(name)
    return frozenset(found)


@pytest.mark.parametrize("header", HEADERS)
def test_a_header_includes_what_it_names(header: str) -> None:
    body = re.sub(r"^#include .*$", "", code(header), flags=re.M)
    for names, declared_in in DECLARED_IN.items():
        if re.search(names, body):
            pattern = re.compile(declared_in)
            assert any(pattern.fullmatch(name) for name in includes(header)), (names, declared_in)
    assert code(header).lstrip().startswith("#pragma once")


def test_the_whole_is_everything() -> None:
    listed = set(re.findall(r"^#include <([^>]+)>", code("tidegate/tidegate.h"), re.M))
    own = {header for header in HEADERS if header != "tidegate/tidegate.h"}
    assert listed == own | {"tidegate/version.h"}
