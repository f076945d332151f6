"""Random numbers out of a counter: the same on every backend, replica and after a resume.

keras.random differs between backends, and a `.keras` file does not store a SeedGenerator's state.
Here a number is a hash of (seed, step, index), written in 32-bit integer operations.
"""

import math

from keras import ops

_ROUNDS = 6


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


def random_permutation(seed, step, indices, size):
    """Where a random permutation of 0 .. size - 1, one for each (seed, step), takes the indices.

    The images of 0 .. n - 1 are n numbers drawn without replacement, at the cost of n.

    Args:
        seed, step: as in `random_bits`.
        indices: integer tensor (n,), in 0 .. size - 1.
        size: how many numbers are permuted, at most 2^31.

    Returns:
        int32 tensor (n,).
    """
    # A bijection of the next power of two, taken again and again until it falls inside: numbers
    # that start inside come back inside, at different places ("cycle walking").
    bits = max((size - 1).bit_length(), 1)
    keys = ops.unstack(random_bits(seed, step, ops.arange(_ROUNDS, dtype="int32")), _ROUNDS)

    def moved(x):
        for key in keys:
            x = _keep(x + key, bits)
            x = ops.bitwise_xor(x, ops.right_shift(x, _uint32((bits + 1) // 2)))
            x = _keep(x * _uint32(0x7FEB352D), bits)
        return x

    def is_outside(x):
        return ops.cast(x, "int32") > size - 1

    x = moved(ops.cast(indices, "uint32"))
    if size < 2**bits:
        (x,) = ops.while_loop(
            lambda x: ops.any(is_outside(x)),
            lambda x: (ops.where(is_outside(x), moved(x), x),),
            (x,),
        )
    return ops.cast(x, "int32")


def _keep(x, bits):
    return ops.bitwise_and(x, _uint32(2**bits - 1))


def _uniform(bits, dtype):
    """23 bits -> the middles of 2^23 equal parts of (0, 1): never 0 or 1, exact in float32."""
    return (ops.cast(ops.right_shift(bits, _uint32(9)), dtype) + 0.5) / 2.0**23


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
