"""Gradients on TensorFlow and on JAX, for the tests that run on both."""

import keras


def gradients(function, tensors, variables=(), state=()):
    """Of the sum of `function(*tensors)`, with respect to the tensors and the variables.

    Args:
        function: returns a tensor.
        tensors, variables: what the sum is differentiated by.
        state: variables that the call may move; they move once.

    Returns:
        The gradients as NumPy arrays; zeros where there is no path.
    """
    of = _on_jax if keras.backend.backend() == "jax" else _on_tensorflow
    found = of(function, list(tensors), list(variables), list(state))
    return [keras.ops.convert_to_numpy(gradient) for gradient in found]


def _on_tensorflow(function, tensors, variables, state):
    import tensorflow as tf

    with tf.GradientTape() as tape:
        for tensor in tensors:
            tape.watch(tensor)
        total = tf.reduce_sum(function(*tensors))
    sources = [*tensors, *(variable.value for variable in variables)]
    zero = tf.UnconnectedGradients.ZERO
    found = tape.gradient(total, sources, unconnected_gradients=zero)
    return [tf.convert_to_tensor(gradient) for gradient in found]


def _on_jax(function, tensors, variables, state):
    import jax

    def total(tensors, values):
        # Eager assignments would keep tracers.
        mapping = [*zip(variables, values, strict=True), *((each, each.value) for each in state)]
        with keras.StatelessScope(state_mapping=mapping) as scope:
            result = keras.ops.sum(function(*tensors))
        return result, [scope.get_current_value(each) for each in state]

    values = [variable.value for variable in variables]
    differentiated = jax.grad(total, argnums=(0, 1), has_aux=True)
    (of_tensors, of_variables), moved = differentiated(tensors, values)
    for variable, value in zip(state, moved, strict=True):
        variable.assign(value)
    return [*of_tensors, *of_variables]
