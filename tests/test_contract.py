"""The shapes that other people's scripts rely on, checked from outside, where the check is at hand."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

CHECK = Path(__file__).resolve().parents[2] / "shared/checks/contract_check.py"
SERVECAST = Path(sys.executable).with_name("servecast")


@pytest.mark.skipif(not CHECK.exists(), reason="the contract's check is not here (../shared/checks)")
@pytest.mark.skipif(not SERVECAST.exists(), reason="servecast is not installed beside this Python")
def test_the_contract_is_kept(tmp_path: Path) -> None:
    command = [sys.executable, str(CHECK), str(SERVECAST)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].endswith(" passed, 0 failed")
