"""What a `fit` over many classes holds at most, in a process of its own."""

import json
import subprocess
import sys
import textwrap

import pytest

CLASSES, DIM, BATCH = 200_000, 16, 512
LOGITS = BATCH * CLASSES * 4  # bytes

# VmHWM, the largest resident size so far, is what the kernel has seen.
FIT = """
    import json, sys
    import keras
    import numpy as np
    import keras_margin as km

    def status(name):
        (line,) = [line for line in open("/proc/self/status") if line.startswith(name)]
        return int(line.split()[1]) * 1024

    classes, dim, batch, settings = json.loads(sys.argv[1])
    rng = np.random.default_rng(0)
    x = rng.normal(size=(3 * batch, dim)).astype("float32")
    labels = rng.integers(0, classes, len(x))
    # Before building: what that frees again, TensorFlow keeps and would fill without a trace.
    before = status("VmRSS")
    backbone = keras.Sequential([keras.Input((dim,)), keras.layers.Dense(dim)])
    model = km.EmbeddingModel(backbone, km.ArcFace(classes, seed=0, **settings))
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9))
    history = model.fit(x, labels, batch_size=batch, verbose=0).history
    print(json.dumps([status("VmHWM") - before, history["loss"][0], int(model.head.steps.value)]))
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc/self/status")
@pytest.mark.parametrize(
    "settings", [{}, pytest.param({"sample_rate": 0.1}, marks=pytest.mark.long)]
)
def test_fit_holds_less_than_the_logits(settings):
    given = json.dumps([CLASSES, DIM, BATCH, settings])
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(FIT), given],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    growth, loss, steps = json.loads(done.stdout)
    assert steps == 3
    assert 0.0 < loss < 100.0
    assert growth < LOGITS
