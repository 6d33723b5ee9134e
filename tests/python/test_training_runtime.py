"""What training asks of the machine."""

from __future__ import annotations

import pytest
import torch

from tidegate.training import runtime


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
