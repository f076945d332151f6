"""The measuring side of a benchmark process: seconds a step, peak memory, taking turns.

A process builds one contender, runs it `warm_up` times, reads its peak memory, and then makes one
step for each line on its standard input, which it answers with a line of JSON.
"""

import contextlib
import ctypes
import gc
import json
import os
import sys
import time

import numpy as np


class Enough(Exception):
    """No more steps are wanted."""


class Turns:
    """Times the steps of a contender and waits between them.

    To be made before the contender is built: what is resident then is what memory is counted from.

    Args:
        job: the configuration, see `grid.py`.
        reply: called with a dict for the parent process.
    """

    def __init__(self, job, reply):
        self.loss = None  # of the first step
        self._job = job
        self._reply = reply
        self._done = 0
        self._start = None
        self._before = resident_mb()

    def built(self, megabytes, make_companions=dict):
        """To be called when weights, optimizer slots and inputs are there.

        Args:
            megabytes: their size. It is counted, not measured: TensorFlow keeps what building
                leaves free, and then a step takes memory that is resident already.
            make_companions: called after the memory has been read, so that what it builds does not
                count: returns {name: function}. Each is timed after each step, and once before
                the first.
        """
        self._before += megabytes
        self._make_companions = make_companions
        forget_peak()

    def between_steps(self):
        """Ends a step and begins the next one.

        Raises:
            Enough: there is no next one.
        """
        seconds = time.perf_counter() - self._start if self._done else None
        if self._done >= self._job["warm_up"]:
            if self._done == self._job["warm_up"]:
                answer = {"extra_mb": peak_mb() - self._before, "loss": self.loss}
                self._companions = self._make_companions()
                for companion in self._companions.values():
                    companion()  # traces it
            else:
                answer = {"seconds": seconds}
            for name, companion in self._companions.items():
                answer[name] = seconds_of(companion)
            self._reply(answer)
            if not sys.stdin.readline():
                raise Enough
        self._done += 1
        self._start = time.perf_counter()

    def run(self, step):
        """Runs `step`, which returns the loss, until there are enough."""
        while True:
            self.between_steps()
            loss = step()
            self.loss = loss if self.loss is None else self.loss


def seconds_of(function):
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def forget_peak():
    """Lets the peak begin at what is held now: building may have held more for a moment."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
    with contextlib.suppress(OSError), open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # VmHWM becomes VmRSS


def resident_mb():
    """What this process holds, in MB of 10^6 bytes; NaN where the system does not tell."""
    return _kib("/proc/self/status", "VmRSS") * 1024 / 1e6


def peak_mb():
    """The most that it has held."""
    return _kib("/proc/self/status", "VmHWM") * 1024 / 1e6


def available_gb():
    """Memory that is free or can be made so; NaN where the system does not tell."""
    return _kib("/proc/meminfo", "MemAvailable") * 1024 / 1e9


def _kib(path, name):
    try:
        with open(path) as file:
            return next(int(line.split()[1]) for line in file if line.startswith(name))
    except OSError:
        return float("nan")


def number_of_cores():
    """Those that this process may use."""
    known = getattr(os, "sched_getaffinity", None)
    return len(known(0)) if known else os.cpu_count()


def inputs_of(job):
    """The same embeddings (batch, dim), centres (classes, dim) and labels for every contender."""
    random = np.random.default_rng(0)
    x = random.standard_normal((job["batch"], job["dim"]), "float32")
    w = random.standard_normal((job["classes"], job["dim"]), "float32")
    return x, w, random.integers(0, job["classes"], job["batch"], "int32")


def run_child(text):
    """What a benchmark process does: `text` is its job as JSON."""
    job = json.loads(text)
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever libraries print does not mix with the answers

    def reply(answer):
        print(json.dumps(answer), file=answers)

    with contextlib.suppress(Enough):
        if not job["contender"].startswith("torch"):
            import contenders_tensorflow

            return contenders_tensorflow.run(job, reply)
        try:
            import contenders_torch

            contenders_torch.run(job, reply)
        except ImportError as error:
            reply({"note": f"not installed ({error})"})
