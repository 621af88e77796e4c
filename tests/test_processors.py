"""The numeric tests once more, as a processor with fewer instructions would run them."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
LEVELS = {"avx2": ("AVX2", "AVX512"), "default": ("DEFAULT", "AVX2", "AVX512")}
"""What PyTorch can be told to use at most, and on which processors that says something."""


@pytest.mark.parametrize("level", LEVELS)
def test_numbers_hold_with_fewer_instructions(level):
    if torch.backends.cpu.get_cpu_capability() not in LEVELS[level]:
        pytest.skip(f"this processor does not know {level}")
    command = [sys.executable, "-m", "pytest", "-q", "-m", "numeric", "-p", "no:cacheprovider", "tests"]
    environment = os.environ | {"ATEN_CPU_CAPABILITY": level}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:]  # 5 if no test was found
    assert int(re.search(r"(\d+) passed", done.stdout)[1]) >= 10
    assert "skipped" not in done.stdout


@pytest.mark.numeric
def test_the_level_asked_for_is_the_level_used():
    level = os.environ.get("ATEN_CPU_CAPABILITY")
    assert level is None or torch.backends.cpu.get_cpu_capability() == level.upper()
