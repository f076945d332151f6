"""How variables start."""

import keras
import numpy as np
from keras import ops


def default_centers_initializer(seed=None):
    """Directions uniform on the sphere, lengths about 1.

    The gradient of a centre goes with 1 / |w|, so with unit lengths a learning rate means the same
    angle whatever the number of classes and dimensions.
    """
    return keras.initializers.VarianceScaling(
        1.0, mode="fan_out", distribution="untruncated_normal", seed=seed
    )


def exact_constant(value):
    """An initializer: Keras' own `Constant` rounds a Python number to float32 under float64."""
    return lambda shape, dtype=None: ops.convert_to_tensor(np.full(shape, value), dtype=dtype)
