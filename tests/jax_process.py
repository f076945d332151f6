"""Runs code on Keras' JAX backend: a process has one backend."""

import json
import subprocess
import sys
import textwrap

import pytest


def on_jax(code, given, folder, **environment):
    """What `code` prints as JSON; it finds `given` in given.json. Skipped where JAX is missing.

    `environment`: further variables of the process.
    """
    pytest.importorskip("jax")
    (folder / "given.json").write_text(json.dumps(given))
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(code)],
        env={
            "KERAS_BACKEND": "jax",
            "JAX_PLATFORMS": "cpu",
            "PYTHONPATH": ":".join(sys.path),
            **environment,
        },
        cwd=folder,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
