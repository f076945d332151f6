"""`benchmarks/scaling.py`: what XLA says of a compiled step."""

import csv
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[1] / "benchmarks" / "scaling.py"


@pytest.mark.long
def test_what_a_device_holds_and_sends(tmp_path):
    """4 devices, 8192 and 16 384 classes of 32 dimensions; 2 MB are 16 384 x 32 float32."""
    pytest.importorskip("jax")
    command = [sys.executable, "-W", "ignore", str(SCRIPT), "--out", str(tmp_path)]
    command += ["--classes", "8192", "16384", "--devices", "4", "--batch", "64", "--dim", "32"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    with open(tmp_path / "scaling.csv") as file:
        rows = list(csv.DictReader(file))
    small, large = rows[:4], rows[4:]
    everywhere, sampled, shared_out, _ = large
    assert float(everywhere["held_mb"]) == pytest.approx(4.2, abs=0.1)  # centres and momentum
    assert float(everywhere["sent_mb"]) == pytest.approx(2.1, abs=0.1)  # the gradient, once
    assert float(sampled["sent_mb"]) < 0.5  # of a tenth of the rows
    assert float(shared_out["held_mb"]) == pytest.approx(4.2 / 4, abs=0.1)
    assert float(shared_out["sent_mb"]) < 0.1
    assert shared_out["sent_mb"] == small[2]["sent_mb"]  # whatever the number of classes
