"""Random numbers out of a counter: the same on every backend, replica and after a resume.

keras.random differs between backends, and a `.keras` file does not store a SeedGenerator's state.
Here a number is a hash of (seed, step, index), written in 32-bit integer operations.
"""

import math

from keras import ops


def random_bits(seed, step, indices):
    """Hashes (seed, step, index) to 32 uniform bits each.

    Args:
        seed: whole number.
        step: whole number or integer scalar tensor.
        indices: integer tensor (n,).

    Returns:
        uint32 tensor (n,).
    """
    state = _mixed(_uint32(seed & 0xFFFFFFFF) + _uint32(0x9E3779B9))
    state = _mixed(ops.bitwise_xor(state, ops.cast(step, "uint32")) + _uint32(0x85EBCA6B))
    return _mixed(ops.bitwise_xor(_mixed(ops.cast(indices, "uint32")), state))


def random_normal(seed, step, indices, dtype):
    """Standard normal numbers, one for each index, by the Box-Muller transform.

    Args:
        seed, step, indices: as in `random_bits`.
        dtype: of the result.

    Returns:
        Tensor (n,).
    """
    indices = ops.cast(indices, "uint32")
    first = _uniform(random_bits(seed, step, indices * _uint32(2)), dtype)
    second = _uniform(random_bits(seed, step, indices * _uint32(2) + _uint32(1)), dtype)
    return ops.sqrt(-2.0 * ops.log(first)) * ops.cos(2.0 * math.pi * second)


def _uniform(bits, dtype):
    """24 bits -> the middles of 2^24 equal parts of (0, 1): never 0, exact in float32."""
    return (ops.cast(ops.right_shift(bits, _uint32(8)), dtype) + 0.5) / 2.0**24


def _mixed(x):
    """A bijection of 32 bits in which each bit of x changes half of the bits of the result.

    C. Wellons' "lowbias32" constants, found by search for the least bias.
    """
    x = ops.bitwise_xor(x, ops.right_shift(x, _uint32(16)))
    x = x * _uint32(0x7FEB352D)
    x = ops.bitwise_xor(x, ops.right_shift(x, _uint32(15)))
    x = x * _uint32(0x846CA68B)
    return ops.bitwise_xor(x, ops.right_shift(x, _uint32(16)))


def _uint32(value):
    return ops.convert_to_tensor(value, dtype="uint32")
