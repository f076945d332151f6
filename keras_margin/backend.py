"""What `keras.ops` does not unify between TensorFlow and JAX. Replicas are in `distribution.py`."""

import functools
import warnings

import keras
from keras import ops

TRAINS_ON = ("tensorflow", "jax")


def warn_of_backend():
    """Says at import what another backend is good for."""
    if keras.backend.backend() not in TRAINS_ON:
        warnings.warn(
            f"Keras runs on the {keras.backend.backend()} backend. There keras_margin has "
            "`verification`, `retrieval` and `plots`; heads, EmbeddingModel, callbacks and "
            "checkpoints need KERAS_BACKEND=tensorflow or jax, set before Keras is imported.",
            stacklevel=3,
        )


def check_backend():
    """Raises `RuntimeError` where heads cannot be trained."""
    if keras.backend.backend() not in TRAINS_ON:
        raise RuntimeError(
            "Heads and EmbeddingModel need Keras' TensorFlow or JAX backend: set KERAS_BACKEND "
            f"before Keras is imported. Received: backend={keras.backend.backend()!r}"
        )


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


def compiled(function):
    """`function` of tensors, compiled by XLA also inside code that is not.

    TensorFlow's own loops hold several blocks at once and take 1.6 times as long.
    """
    backend = keras.backend.backend()
    if backend == "tensorflow":
        import tensorflow as tf

        return tf.function(function, jit_compile=True, autograph=False)
    if backend == "jax":
        import jax

        return jax.jit(function)
    return function


def product(one, other, dtype):
    """The matrix product of what `dtype` keeps of two matrices, summed and given in their dtype.

    `ops.matmul` would round a float16 product to float16: at scale 64 a step of 0.06 in the logit.
    """
    backend, wide = keras.backend.backend(), keras.backend.standardize_dtype(one.dtype)
    if dtype == wide:
        return ops.matmul(one, other)
    one, other = ops.cast(one, dtype), ops.cast(other, dtype)
    if backend == "tensorflow":
        import tensorflow as tf

        return tf.matmul(one, other, output_type=wide)
    if backend == "jax":
        import jax

        return jax.numpy.matmul(one, other, preferred_element_type=wide)
    return ops.matmul(ops.cast(one, wide), ops.cast(other, wide))


def read(variable):
    """The variable's value as a tensor: TensorFlow's custom gradients refuse variables."""
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        return tf.convert_to_tensor(variable)
    return ops.convert_to_tensor(variable)


def copy_of(variable):
    """The variable's value in memory of its own: JAX frees the arrays that a step is given."""
    return ops.copy(read(variable))


def take_rows(variable, rows):
    """`variable[rows]`, whose gradient holds these rows alone on TensorFlow.

    Reading the whole variable first would cost a copy of it each time that rows are written.
    """
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        return tf.gather(variable.value, rows)
    return ops.take(ops.convert_to_tensor(variable), rows, axis=0)


def holds(dtype):
    """Whether the backend has tensors of `dtype`: JAX makes 32 bits of 64 unless told otherwise."""
    if keras.backend.backend() == "jax":
        import jax

        return jax.dtypes.canonicalize_dtype(dtype) == dtype
    return True


def is_concrete(tensor):
    """Whether the values are there to look at: false while a function is being compiled."""
    backend = keras.backend.backend()
    if backend == "tensorflow":
        return hasattr(tensor, "numpy")
    if backend == "jax":
        import jax

        return not isinstance(tensor, jax.core.Tracer)
    return True
