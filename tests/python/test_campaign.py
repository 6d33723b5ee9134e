"""The beginning of the campaign (tests/campaign.py): faults at file events, broken files, calls."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from training_cases import environment

CAMPAIGN = Path(__file__).parents[1] / "campaign.py"


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler for the faults' library")
def test_the_beginning_of_the_campaign():
    result = subprocess.run(
        [sys.executable, CAMPAIGN, "--seconds=20", "--seed=1"],
        capture_output=True,
        text=True,
        env=environment(),
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    counts = result.stdout.splitlines()[-1]
    assert counts.endswith("; 0 failures")
    assert " calls," in counts
    assert " file," in counts
