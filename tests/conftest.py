"""What all tests share: one seed, and the ways in which the backend runs a function."""

import random

import numpy as np
import pytest
from backends import ON_JAX, jit

if ON_JAX:
    RUNS = {"eager": lambda function, state=(): function, "jit": jit}
else:
    import tensorflow as tf

    RUNS = {
        "eager": lambda function, state=(): function,
        "graph": lambda function, state=(): tf.function(function),
        "xla": lambda function, state=(): tf.function(function, jit_compile=True),
    }


@pytest.fixture(autouse=True)
def seed():
    """Keras draws the seeds of its initializers from `random`.

    `keras.utils.set_random_seed` would empty TensorFlow's cache of kernels too: eager tests would
    take twice the time.
    """
    random.seed(0)
    np.random.seed(0)


@pytest.fixture(params=RUNS)
def run(request):
    """`run(function)(*arguments)`: eagerly, as a graph, and compiled by XLA.

    Variables that `function` reads at each call, or moves, are its `state`: `run(function, state)`.
    """
    return RUNS[request.param]
