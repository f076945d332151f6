"""`examples/train_multihost.py`: several processes train as one."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[1] / "examples" / "train_multihost.py"


def run(*arguments):
    command = [sys.executable, "-W", "ignore", str(SCRIPT), *arguments]
    return subprocess.run(command, capture_output=True, text=True)


def losses_of(folder, *arguments):
    done = run("--epochs", "1", "--out", str(folder), *arguments)
    assert done.returncode == 0, done.stderr
    assert (folder / "encoder.keras").is_file()
    found = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("loss ")]
    return [float(loss) for loss in found]


@pytest.mark.long
def test_two_processes_have_the_losses_of_one(tmp_path):
    """The batch over two processes, the classes over the two devices of each."""
    pytest.importorskip("jax")
    one = losses_of(tmp_path / "one", "--processes", "1", "--mesh", "2", "2")
    two = losses_of(tmp_path / "two", "--processes", "2")
    assert len(one) == 1
    assert two == pytest.approx(one, rel=1e-5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--processes", "0"], "--processes must be at least 1. Received: 0"),
        (["--process-id", "1"], "--coordinator and --process-id belong together"),
        (
            ["--coordinator", "host:5000", "--process-id", "2"],
            "--process-id must be from 0 to 1. Received: 2",
        ),
    ],
)
def test_arguments_that_are_refused(arguments, message):
    done = run(*arguments)
    assert done.returncode == 2
    assert message in done.stderr
