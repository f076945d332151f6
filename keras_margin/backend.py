"""What `keras.ops` does not unify between TensorFlow and JAX. Replicas are in `distribution.py`."""

import functools

import keras
from keras import ops


def custom_gradient(function):
    """`keras.ops.custom_gradient` for functions of tensors whose gradient takes them as arguments.

    `function(*tensors)` returns its output or a tuple of outputs, and `gradient(*upstream)`.
    TensorFlow hands the upstream gradients over as one argument an output, JAX as one tuple.
    """

    @functools.wraps(function)
    def with_one_convention(*tensors):
        outputs, gradient = function(*tensors)
        several = isinstance(outputs, tuple)

        def of_either_backend(*arguments, upstream=None):
            upstream = arguments if upstream is None else (upstream,)
            if several and len(upstream) == 1:
                upstream = upstream[0]
            return gradient(*upstream)

        return outputs, of_either_backend

    return ops.custom_gradient(with_one_convention)


def read(variable):
    """The variable's value as a tensor: TensorFlow's custom gradients refuse variables."""
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        return tf.convert_to_tensor(variable)
    return ops.convert_to_tensor(variable)


def is_concrete(tensor):
    """Whether the values are there to look at: false while a function is being compiled."""
    backend = keras.backend.backend()
    if backend == "tensorflow":
        return hasattr(tensor, "numpy")
    if backend == "jax":
        import jax

        return not isinstance(tensor, jax.core.Tracer)
    return True
