"""What all tests share: one seed, and the ways in which the backend runs a function."""

import random

import keras
import numpy as np
import pytest

if keras.backend.backend() == "jax":
    import jax

    RUNS = {"eager": lambda function: function, "jit": jax.jit}
else:
    import tensorflow as tf

    RUNS = {
        "eager": lambda function: function,
        "graph": tf.function,
        "xla": lambda function: tf.function(function, jit_compile=True),
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
    """`run(function)(*arguments)`: eagerly, as a graph, and compiled by XLA."""
    return RUNS[request.param]
