"""The parent's side: benchmark processes that make a step when they are told to."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path


class Failed(Exception):
    """A benchmark process ended before its time, or says that it cannot run."""


class Child:
    """A fresh process for one job, warmed up when this returns.

    Attributes:
        first: its first answer: extra memory, loss, what runs beside it.

    Raises:
        Failed: see the message.
    """

    def __init__(self, job, python):
        environment = {
            "TF_CPP_MIN_LOG_LEVEL": "2",
            # torch's threads spin where they wait, and one may keep another from its core.
            "OMP_WAIT_POLICY": "PASSIVE",
            **os.environ,
            "KERAS_BACKEND": "tensorflow",
            "CUDA_VISIBLE_DEVICES": "-1",  # the peers are measured on the CPU, so all are
        }
        self._errors = tempfile.TemporaryFile()
        self._process = subprocess.Popen(
            [python, str(Path(__file__).with_name("head_step.py")), "--child", json.dumps(job)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            bufsize=1,
            env=environment,
        )
        try:
            self.first = self._answer()
            if "note" in self.first:
                raise Failed(self.first["note"])
        except BaseException:
            self.close()
            raise

    def step(self):
        """One more step: {"seconds": ..., what runs beside it: ...}."""
        try:
            print(file=self._process.stdin)
        except BrokenPipeError:
            pass  # the answer says why
        return self._answer()

    def _answer(self):
        line = self._process.stdout.readline()
        if line:
            return json.loads(line)
        status = self._process.wait()
        if status == -9:
            raise Failed("killed by the system: out of memory?")
        self._errors.seek(0)
        errors = self._errors.read().decode(errors="replace")
        lines = errors.strip().splitlines() or ["no message"]
        print(*lines[-20:], sep="\n", file=sys.stderr)
        raise Failed(f"failed with status {status}: {lines[-1][:200]}")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def close(self):
        """Ends the process."""
        self._process.kill()
        self._process.wait()
        self._process.stdin.close()
        self._process.stdout.close()
        self._errors.close()
