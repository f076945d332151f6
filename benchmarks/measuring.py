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

    Args:
        job: the configuration, see `head_step.py`.
        reply: called with a dict for the parent process.
        make_companions: called after the memory has been read, so that what it builds does not
            count: returns {name: function}. Each function is timed after each step, and once
            before the first one.
    """

    def __init__(self, job, reply, make_companions=dict):
        self.loss = None  # of the first step
        self._job = job
        self._reply = reply
        self._make_companions = make_companions
        self._done = 0
        self._start = None
        self._extra_memory = None

    def built(self):
        """To be called when weights, optimizer slots and inputs are there."""
        self._extra_memory = watch_memory()

    def between_steps(self):
        """Ends a step and begins the next one.

        Raises:
            Enough: there is no next one.
        """
        seconds = time.perf_counter() - self._start if self._done else None
        if self._done >= self._job["warm_up"]:
            if self._done == self._job["warm_up"]:
                answer = {"extra_mb": self._extra_memory(), "loss": self.loss}
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


def watch_memory():
    """Starts to watch the resident memory.

    Returns:
        A function: the most that was held since then, less what is held now, in MB (10^6 bytes);
        None where the system does not tell.
    """
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)  # what is free already must not hide what is taken later
    before = _status("VmRSS")
    # Sets VmHWM back to VmRSS: building may have held more for a moment than the steps do.
    with contextlib.suppress(OSError), open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    return lambda: None if before is None else (_status("VmHWM") - before) * 1024 / 1e6


def _status(name):
    """A line of /proc/self/status in KiB; None where there is no such file."""
    return _kib("/proc/self/status", name)


def available_gb():
    """Memory that is free or can be made so, in GB; infinite where the system does not tell."""
    kib = _kib("/proc/meminfo", "MemAvailable")
    return float("inf") if kib is None else kib * 1024 / 1e9


def _kib(path, name):
    try:
        with open(path) as file:
            return next(int(line.split()[1]) for line in file if line.startswith(name))
    except OSError:
        return None


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
