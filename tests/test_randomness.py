"""Random numbers out of a counter: pinned, uniform, independent, the same however they are run."""

import itertools

import numpy as np
import pytest
import scipy.stats
import tensorflow as tf

from keras_margin.randomness import random_bits, random_normal

MASK = 2**32 - 1


def bits(seed, step, number):
    return random_bits(seed, step, tf.range(number)).numpy()


def normals(seed, step, number, dtype="float32"):
    return random_normal(seed, step, tf.range(number), dtype).numpy()


# The same numbers for ever: a resumed training goes on with the draws of the interrupted one


def slow_mixed(x):
    """lowbias32, in Python's whole numbers."""
    x ^= x >> 16
    x = x * 0x7FEB352D & MASK
    x ^= x >> 15
    x = x * 0x846CA68B & MASK
    return x ^ x >> 16


def slow_bits(seed, step, index):
    state = slow_mixed((seed + 0x9E3779B9) & MASK)
    state = slow_mixed(((state ^ step) + 0x85EBCA6B) & MASK)
    return slow_mixed(slow_mixed(index) ^ state)


@pytest.mark.parametrize("seed", [0, -1, 2**40 + 3])
@pytest.mark.parametrize("step", [0, 2**31 - 1])
def test_bits_are_pinned(run, seed, step):
    got = run(lambda step: random_bits(seed, step, tf.range(20)))(tf.constant(step))
    assert got.dtype == tf.uint32
    assert got.numpy().tolist() == [slow_bits(seed & MASK, step, index) for index in range(20)]


def test_normals_are_pinned(run):
    """Box and Muller's transform of two hashes each, the upper 23 bits of them."""
    got = run(lambda: random_normal(5, tf.constant(3), tf.range(20), "float64"))()
    first, second = (
        [((slow_bits(5, 3, 2 * index + part) >> 9) + 0.5) / 2**23 for index in range(20)]
        for part in (0, 1)
    )
    want = np.sqrt(-2.0 * np.log(first)) * np.cos(2.0 * np.pi * np.array(second))
    np.testing.assert_allclose(got, want, rtol=1e-12)


def test_normals_do_not_depend_on_the_way_they_are_run(run):
    got = run(lambda step: random_normal(5, step, tf.range(1000), "float32"))(tf.constant(3))
    np.testing.assert_allclose(got, normals(5, 3, 1000, "float64"), rtol=1e-4, atol=1e-6)


def test_step_may_be_a_python_number():
    np.testing.assert_array_equal(bits(2, 3, 10), bits(2, tf.constant(3), 10))


@pytest.mark.parametrize("dtype", ["int32", "int64", "uint32"])
def test_any_integer_indices(dtype):
    indices = tf.range(10, dtype="int64")
    np.testing.assert_array_equal(random_bits(2, 3, tf.cast(indices, dtype)), bits(2, 3, 10))


def test_number_of_a_row_depends_on_its_index_alone():
    """Each replica draws for its own rows of the global batch."""
    share = random_normal(2, 3, tf.constant([7, 2, 5]), "float32")
    np.testing.assert_allclose(share, normals(2, 3, 10)[[7, 2, 5]], rtol=1e-6)


def test_no_index_gives_no_number():
    assert random_normal(0, 0, tf.range(0), "float32").shape == (0,)


# Uniform


def test_no_two_indices_share_their_bits():
    assert len(np.unique(bits(0, 0, 10**5))) == 10**5


def test_each_bit_is_set_half_of_the_time():
    drawn = bits(1, 2, 10**5)
    for place in range(32):
        share = (drawn >> np.uint32(place) & np.uint32(1)).mean()
        assert abs(share - 0.5) < 5 * 0.5 / np.sqrt(10**5)


@pytest.mark.parametrize(("seed", "step"), [(0, 0), (0, 1), (1, 0), (123, 456)])
def test_bits_fill_the_range_evenly(seed, step):
    counts = np.bincount(bits(seed, step, 2**16) >> np.uint32(24), minlength=256)
    assert scipy.stats.chisquare(counts).pvalue > 1e-4


@pytest.mark.parametrize("what", ["seed", "step", "index"])
@pytest.mark.parametrize("place", [0, 1, 7, 16, 30])
def test_one_bit_of_the_input_turns_half_of_the_result(what, place):
    one = {"seed": 11, "step": 22, "index": 77 * np.arange(500)}
    other = {**one, what: one[what] ^ 1 << place}
    drawn = [
        random_bits(each["seed"], each["step"], tf.constant(each["index"])).numpy()
        for each in (one, other)
    ]
    turned = np.bitwise_count(drawn[0] ^ drawn[1])
    assert abs(turned.mean() - 16.0) < 5 * np.sqrt(8.0 / 500)


# Normal


@pytest.mark.parametrize(("seed", "step"), [(0, 0), (0, 1), (1, 0), (123, 456)])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_normals_are_normal(seed, step, dtype):
    drawn = normals(seed, step, 10**4, dtype)
    assert drawn.dtype == dtype
    assert np.isfinite(drawn).all()
    assert abs(drawn.mean()) < 4 / np.sqrt(10**4)
    assert abs(drawn.var() - 1.0) < 4 * np.sqrt(2.0 / 10**4)
    assert scipy.stats.kstest(drawn, "norm").pvalue > 1e-4


# Independent


STREAMS = {
    "steps": [(0, step) for step in range(20)],
    "seeds": [(seed, 0) for seed in range(20)],
    "seed and step exchanged": list(itertools.product(range(4), range(5))),
}
every_stream = pytest.mark.parametrize("streams", STREAMS.values(), ids=STREAMS.keys())


@every_stream
def test_streams_are_not_correlated(streams):
    drawn = np.stack([normals(*stream, 5000) for stream in streams])
    correlation = np.corrcoef(drawn)
    np.fill_diagonal(correlation, 0.0)
    assert np.abs(correlation).max() < 5 / np.sqrt(5000)


def test_neighbours_are_not_correlated():
    drawn = normals(3, 4, 10**4)
    for lag in range(1, 10):
        assert abs(np.corrcoef(drawn[:-lag], drawn[lag:])[0, 1]) < 5 / np.sqrt(10**4)
    shifted = normals(3, 5, 10**4)  # no step is another one a few places on
    for lag in range(1, 10):
        assert abs(np.corrcoef(drawn[:-lag], shifted[lag:])[0, 1]) < 5 / np.sqrt(10**4)


@every_stream
def test_streams_hardly_meet(streams):
    """20 000 numbers out of 2^32 meet 0.05 times on average."""
    drawn = np.concatenate([bits(*stream, 1000) for stream in streams])
    assert len(drawn) - len(np.unique(drawn)) <= 2
