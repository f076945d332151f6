"""`MirroredStrategy` against the joined batch for heads that sample their classes.

The replicas have a process of their own, as in test_distribution.py.
"""

import multiprocessing
import random
from concurrent.futures import ProcessPoolExecutor

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_margin as km
from keras_margin.sampling import rows_of_step

pytestmark = pytest.mark.long

FEATURES, CLASSES, BATCH, REPLICAS = 4, 40, 12, 2

# Even; all rows of the first replica ignored; uneven; one row for all replicas; all ignored; even.
SIZES = (12, 12, 5, 1, 6, 12)

strategy = None  # of the process that `start` has prepared


def start():
    """Gives this process logical devices and its one strategy."""
    global strategy
    (cpu,) = tf.config.list_physical_devices("CPU")
    devices = [tf.config.LogicalDeviceConfiguration()] * REPLICAS
    tf.config.set_logical_device_configuration(cpu, devices)
    strategy = tf.distribute.MirroredStrategy([f"CPU:{i}" for i in range(REPLICAS)])


@pytest.fixture(scope="module")
def remote():
    """`remote(function, *arguments)` runs one of the functions below in the prepared process."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawn, initializer=start) as pool:
        yield lambda function, *arguments: pool.submit(function, *arguments).result()


# What runs in the prepared process


SAMPLED = {"sample_rate": 0.35, "seed": 2, "ignore_class": -1}  # 14 of 40 classes
FEW = {**SAMPLED, "sample_rate": 0.05}  # 2, or as many as there are rows in the global batch
# Each replica clips its own gradient: no clipping here. With the default epsilon Adam would take
# the rounding of a gradient that is nearly 0 for a direction.
HEADS = {
    "ArcFace": (
        lambda: km.ArcFace(CLASSES, 0.3, 8.0, **FEW),
        lambda: keras.optimizers.SGD(0.05, momentum=0.9, weight_decay=0.1),
    ),
    "AdaCos": (
        lambda: km.AdaCos(CLASSES, **SAMPLED),
        lambda: keras.optimizers.Adam(0.01, epsilon=0.1),
    ),
    "sub-centers": (
        lambda: km.CosFace(CLASSES, 0.2, 8.0, num_subcenters=2, label_smoothing=0.1, **SAMPLED),
        lambda: keras.optimizers.AdamW(0.01, epsilon=0.1),
    ),
    "SphereFace2": (
        lambda: km.SphereFace2(CLASSES, 0.2, 8.0, **SAMPLED),
        lambda: keras.optimizers.SGD(0.01, momentum=0.9, nesterov=True),
    ),
}


def model_of(head):
    random.seed(0)
    make_head, make_optimizer = HEADS[head]
    backbone = keras.Sequential([keras.Input((FEATURES,)), keras.layers.Dense(3)])
    model = km.EmbeddingModel(backbone, make_head())
    model.compile(make_optimizer())
    return model


def batches():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(sum(SIZES), FEATURES)).astype("float32")
    y = rng.integers(0, CLASSES, len(x))
    y[12:18] = y[30:36] = -1
    ends = np.cumsum(SIZES)
    return [(x[end - n : end], y[end - n : end]) for end, n in zip(ends, SIZES, strict=True)]


def copies(variables):
    """Each replica's copy of each variable."""
    found = [strategy.experimental_local_results(variable.value) for variable in variables]
    return [[copy.numpy() for copy in each] for each in found]


def steps(model):
    """For each batch: the rows that may move, what is reported, centers and slots, and weights."""
    found = []

    def variables():
        centers = model.head.centers
        return [v for v in (centers, *model.optimizer.variables) if v.shape == centers.shape]

    def ask(batch, logs):
        if batch == len(SIZES):  # Keras asks before it sees that the data is at its end
            return
        model.optimizer.build(model.trainable_variables)
        rows = rows_of_step(model.head, batches()[batch][1]).numpy()
        found.append([rows, copies(variables())])

    def look(batch, logs):
        reported = {name: float(value) for name, value in model.get_metrics_result().items()}
        found[-1] += [copies(variables()), copies(model.weights), reported]

    x, y = (tf.constant(np.concatenate(parts)) for parts in zip(*batches(), strict=True))
    ends = np.cumsum(SIZES)
    # Not from_generator: its iterator, collected as garbage, can wait for a thread that needs the
    # lock of the interpreter that is collecting.
    dataset = tf.data.Dataset.from_tensor_slices((ends - SIZES, ends))
    dataset = dataset.map(lambda start, end: (x[start:end], y[start:end]))
    callback = keras.callbacks.LambdaCallback(on_train_batch_begin=ask, on_train_batch_end=look)
    model.fit(dataset, verbose=0, callbacks=[callback])
    return found


def joined_and_replicated(head):
    plain = model_of(head)
    plain.run_eagerly = True
    with strategy.scope():
        model = model_of(head)
    return steps(plain), steps(model)


# The tests


LONG = ("sub-centers", "SphereFace2")


@pytest.mark.parametrize(
    "head", [pytest.param(n, marks=[pytest.mark.long] * (n in LONG)) for n in HEADS]
)
def test_every_step_equals_the_joined_batch(remote, head):
    """The same sample on every replica; the other rows stay there, bit for bit."""
    plain, replicated = remote(joined_and_replicated, head)
    assert len(plain) == len(replicated) == len(SIZES)
    for wanted, got, batch in zip(plain, replicated, batches(), strict=True):
        rows, before, after, weights, reported = got
        np.testing.assert_array_equal(rows, wanted[0])
        assert len(rows) == (max(2, len(batch[1])) if head == "ArcFace" else len(rows))
        assert reported == pytest.approx(wanted[4], rel=1e-5)
        for copies_of, (variable,) in zip(weights, wanted[3], strict=True):
            assert len(copies_of) == REPLICAS
            for copy in copies_of:
                np.testing.assert_array_equal(copy, copies_of[0])
                np.testing.assert_allclose(copy, variable, rtol=1e-5, atol=1e-5)

        others = np.delete(np.arange(len(after[0][0])), rows)
        for now, then, (variable,) in zip(after, before, wanted[2], strict=True):
            for replica in range(REPLICAS):
                np.testing.assert_array_equal(now[replica], now[0])
                np.testing.assert_array_equal(now[replica][others], then[replica][others])
                np.testing.assert_allclose(now[replica], variable, rtol=1e-5, atol=1e-5)
        if (batch[1] >= 0).any():
            assert (after[0][0] != before[0][0])[rows].any(axis=1).mean() > 0.8
