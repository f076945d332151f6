"""What the tests that run on TensorFlow and on JAX need of either."""

import functools

import keras
import pytest

ON_JAX = keras.backend.backend() == "jax"
# On JAX Keras computes float64 in float32.
DTYPES = ["float32"] if ON_JAX else ["float32", "float64"]
WIDEST = DTYPES[-1]

tensorflow_only = pytest.mark.skipif(ON_JAX, reason="about TensorFlow")
float64_only = pytest.mark.skipif(WIDEST != "float64", reason="float64 is float32 on JAX")


def rounded(tolerance, to=1e-5):
    """`tolerance`, which is that of float64, or where the test runs in float32 `to`."""
    return tolerance if WIDEST == "float64" else to


def gradients(function, tensors, variables=(), state=()):
    """Of the sum of `function(*tensors)`, with respect to the tensors and the variables.

    Args:
        function: returns a tensor.
        tensors, variables: what the sum is differentiated by.
        state: variables that the call may move; they move once.

    Returns:
        The gradients as NumPy arrays; zeros where there is no path.
    """
    _, *found = value_and_gradients(function, tensors, variables, state)
    return [keras.ops.convert_to_numpy(gradient) for gradient in found]


def value_and_gradients(function, tensors, variables=(), state=(), upstream=1.0):
    """What `function(*tensors)` returns, and its `gradients`, as tensors; `run` compiles it.

    Args:
        upstream: the weights of the sum.

    Returns:
        A list: the value, a gradient for each tensor and each variable. Where `function` returns a
        tuple, the sum is that of its first tensor.
    """
    of = _on_jax if ON_JAX else _on_tensorflow
    tensors = [keras.ops.convert_to_tensor(tensor) for tensor in tensors]
    return of(function, tensors, list(variables), list(state), upstream)


def jit(function, state=()):
    """`jax.jit` that reads the variables in `state` at each call and moves them.

    TensorFlow does so by itself, for every variable.
    """
    import jax

    @jax.jit
    def stateless(values, *arguments, **named):
        mapping = list(zip(state, values, strict=True))
        with keras.StatelessScope(state_mapping=mapping) as scope:
            result = function(*arguments, **named)
        return result, [scope.get_current_value(variable) for variable in state]

    @functools.wraps(function)
    def stateful(*arguments, **named):
        values = [variable.value for variable in state]
        result, moved = stateless(values, *arguments, **named)
        for variable, value in zip(state, moved, strict=True):
            variable.assign(value)
        return result

    return stateful


def jacobians(function, arrays, delta):
    """TensorFlow's (analytic, numerical) Jacobians of a function of float64 arrays."""
    import tensorflow as tf

    return tf.test.compute_gradient(function, [tf.constant(each) for each in arrays], delta=delta)


def _weighted_sum(value, upstream):
    first = value[0] if isinstance(value, tuple) else value
    return keras.ops.sum(first * keras.ops.cast(upstream, first.dtype))


def _on_tensorflow(function, tensors, variables, state, upstream):
    import tensorflow as tf

    with tf.GradientTape() as tape:
        for tensor in tensors:
            tape.watch(tensor)
        value = function(*tensors)
        total = _weighted_sum(value, upstream)
    sources = [*tensors, *(variable.value for variable in variables)]
    zero = tf.UnconnectedGradients.ZERO
    found = tape.gradient(total, sources, unconnected_gradients=zero)
    return [value, *(tf.convert_to_tensor(gradient) for gradient in found)]


def _on_jax(function, tensors, variables, state, upstream):
    import jax

    def total(tensors, values):
        # Eager assignments would keep tracers.
        mapping = [*zip(variables, values, strict=True), *((each, each.value) for each in state)]
        with keras.StatelessScope(state_mapping=mapping) as scope:
            value = function(*tensors)
            result = _weighted_sum(value, upstream)
        return result, (value, [scope.get_current_value(each) for each in state])

    values = [variable.value for variable in variables]
    differentiated = jax.grad(total, argnums=(0, 1), has_aux=True)
    (of_tensors, of_variables), (value, moved) = differentiated(tensors, values)
    for variable, new in zip(state, moved, strict=True):
        variable.assign(new)
    return [value, *of_tensors, *of_variables]
