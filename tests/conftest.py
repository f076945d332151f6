"""What all tests share: one seed, and the three ways in which TensorFlow runs a function."""

import keras
import pytest
import tensorflow as tf

RUNS = {
    "eager": lambda function: function,
    "graph": tf.function,
    "xla": lambda function: tf.function(function, jit_compile=True),
}


@pytest.fixture(autouse=True)
def seed():
    keras.utils.set_random_seed(0)


@pytest.fixture(params=RUNS)
def run(request):
    """`run(function)(*arguments)`: eagerly, as a graph, and compiled by XLA."""
    return RUNS[request.param]
