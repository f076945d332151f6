"""`examples/train_multihost.py`: several processes train as one."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[1] / "examples" / "train_multihost.py"


def run(*arguments):
    command = [sys.executable, "-W", "ignore", str(SCRIPT), *arguments]
    return subprocess.run(command, capture_output=True, text=True)


def losses_of(folder, *arguments):
    """Of the epochs of training, and that of the test."""
    done = run("--out", str(folder), *arguments)
    assert done.returncode == 0, done.stderr
    assert (folder / "encoder.keras").is_file()
    return [float(loss) for loss in re.findall(r"^(?:test )?loss ([\d.]+)", done.stdout, re.M)]


@pytest.mark.long
def test_two_processes_have_the_losses_of_one(tmp_path):
    """The batch over two processes, the classes over the two devices of each.

    4000 images in batches of 96: 41 batches, and one of 64 rows that is filled up.
    """
    pytest.importorskip("jax")
    shared = ["--epochs", "1", "--batch-size", "96"]
    one = losses_of(tmp_path / "one", *shared, "--processes", "1", "--mesh", "2", "2")
    two = losses_of(tmp_path / "two", *shared, "--processes", "2")
    assert len(one) == 2
    assert two == pytest.approx(one, rel=1e-5)


@pytest.mark.long
def test_processes_go_on_from_the_shards_that_other_ones_have_written(tmp_path):
    """Two processes with the classes over both, then one with the batch over its devices.

    Few steps: over hundreds of them rounding in another order would grow.
    """
    shared = ["--batch-size", "500"]
    together = [*shared, "--mesh", "1", "4"]
    alone = [*shared, "--processes", "1", "--mesh", "4", "1"]
    shards = ["--checkpoints", str(tmp_path / "shards")]
    straight = losses_of(tmp_path / "straight", *together, "--epochs", "2")
    first = losses_of(tmp_path / "out", *together, "--epochs", "1", *shards)
    read = losses_of(tmp_path / "out", *alone, "--epochs", "1", *shards)  # nothing left to train
    later = losses_of(tmp_path / "out", *alone, "--epochs", "2", *shards)
    assert [len(losses) for losses in (straight, first, read, later)] == [3, 2, 1, 2]
    assert first[0] == pytest.approx(straight[0], rel=1e-5)
    assert read == pytest.approx(first[1:], rel=1e-5)
    assert later == pytest.approx(straight[1:], rel=1e-4)
    assert sorted(path.name for path in (tmp_path / "shards").iterdir()) == [
        "epoch-0001",
        "epoch-0002",
    ]


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
