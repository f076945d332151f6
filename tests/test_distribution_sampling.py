"""`MirroredStrategy` against the joined batch for heads that sample their classes.

Each number of replicas has a process of its own, as in test_distribution.py.
"""

import multiprocessing
import random
from concurrent.futures import ProcessPoolExecutor
from functools import partial

import keras
import numpy as np
import pytest
import registry
import tensorflow as tf

import keras_margin as km
from keras_margin.sampling import rows_of_step

pytestmark = pytest.mark.long

FEATURES, CLASSES = 4, 40

# Even; all rows of the first replica ignored; uneven; one row for all replicas; all ignored; even.
SIZES = (12, 12, 5, 1, 6, 12)

strategy = None  # of the process that `start` has prepared


def start(replicas):
    """Gives this process logical devices and its one strategy."""
    global strategy
    (cpu,) = tf.config.list_physical_devices("CPU")
    devices = [tf.config.LogicalDeviceConfiguration()] * replicas
    tf.config.set_logical_device_configuration(cpu, devices)
    strategy = tf.distribute.MirroredStrategy([f"CPU:{i}" for i in range(replicas)])


@pytest.fixture(scope="module", params=[1, 2, 3])
def replicas(request):
    return request.param


@pytest.fixture(scope="module")
def remote(replicas):
    """`remote(function, *arguments)` runs one of the functions below in the prepared process."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawn, initializer=start, initargs=(replicas,)) as pool:
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


SHARES = {
    1: ((3,), (3,), (3,), (3,)),
    2: ((2, 1), (3, 0), (0, 3), (1, 2)),
    3: ((1, 1, 1), (2, 0, 1), (0, 1, 2), (0, 3, 0)),
}


def small_model(head):
    """In float64, where rounding hides nothing; a step uses 3 of the 5 classes."""
    random.seed(0)
    backbone = keras.Sequential(
        [keras.Input((FEATURES,), dtype="float64"), keras.layers.Dense(4, dtype="float64")]
    )
    make = registry.HEADS[head].make
    model = km.EmbeddingModel(backbone, make(sample_rate=0.4, ignore_class=-1, dtype="float64"))
    model.compile(keras.optimizers.SGD(0.01, momentum=0.9, weight_decay=0.1))
    model.optimizer.build(model.trainable_variables)
    return model


def gradients_and_updates(model, shares, run):
    """For each step: (the replicas' losses and gradients, the weights and slots after it)."""
    rng = np.random.default_rng(0)
    x = tf.constant(3.0 * rng.normal(size=(np.sum(shares), FEATURES)))
    y = tf.constant([0, 1, 1, 4, -1, 2, 3, 0, 3, 2, 2, 4])

    def step(start, end):
        with tf.GradientTape() as tape:
            embeddings = model(x[start:end], training=True)
            loss = model.compute_loss(y=y[start:end], y_pred=embeddings)
        gradients = tape.gradient(loss, model.trainable_variables)
        model.optimizer.apply(gradients, model.trainable_variables)
        return [loss, *map(tf.convert_to_tensor, gradients)]

    run, ends = tf.function(partial(run, step)), np.cumsum(shares).reshape(np.shape(shares))
    for start, end in zip(ends - shares, ends, strict=True):
        results = run((per_replica(start), per_replica(end)))
        results = [strategy.experimental_local_results(result) for result in results]
        variables = [*model.weights, *model.optimizer.variables]
        yield [[copy.numpy() for copy in each] for each in results], copies(variables)


def per_replica(numbers):
    if len(numbers) == 1:
        return tf.constant(numbers[0])
    return strategy.experimental_distribute_values_from_function(
        lambda context: tf.constant(numbers[context.replica_id_in_sync_group])
    )


def small_steps(head, shares):
    """`gradients_and_updates` of the joined batches, and of the replicas."""
    joined = np.sum(shares, axis=1, keepdims=True)
    plain = gradients_and_updates(small_model(head), joined, lambda step, rows: step(*rows))
    with strategy.scope():
        model = small_model(head)
    replicated = gradients_and_updates(model, shares, strategy.run)
    return list(plain), list(replicated)


# The tests


@pytest.mark.parametrize("head", HEADS)
def test_every_step_equals_the_joined_batch(remote, replicas, head):
    """The same sample on every replica; the other rows stay there, bit for bit."""
    plain, replicated = remote(joined_and_replicated, head)
    assert len(plain) == len(replicated) == len(SIZES)
    for wanted, got, batch in zip(plain, replicated, batches(), strict=True):
        rows, before, after, weights, reported = got
        np.testing.assert_array_equal(rows, wanted[0])
        assert len(rows) == (max(2, len(batch[1])) if head == "ArcFace" else len(rows))
        assert reported == pytest.approx(wanted[4], rel=1e-5)
        for copies_of, (variable,) in zip(weights, wanted[3], strict=True):
            assert len(copies_of) == replicas
            for copy in copies_of:
                np.testing.assert_array_equal(copy, copies_of[0])
                np.testing.assert_allclose(copy, variable, rtol=1e-5, atol=1e-5)

        others = np.delete(np.arange(len(after[0][0])), rows)
        for now, then, (variable,) in zip(after, before, wanted[2], strict=True):
            for replica in range(replicas):
                np.testing.assert_array_equal(now[replica], now[0])
                np.testing.assert_array_equal(now[replica][others], then[replica][others])
                np.testing.assert_allclose(now[replica], variable, rtol=1e-5, atol=1e-5)
        if (batch[1] >= 0).any():
            assert (after[0][0] != before[0][0])[rows].any(axis=1).mean() > 0.8


EVERY_HEAD = [name for name, entry in registry.HEADS.items() if entry.has_classes]
PAIRS = [(number, head) for number in (1, 2) for head in ("AdaCos", "AdaFace")]
PAIRS += [(3, head) for head in EVERY_HEAD]


@pytest.mark.parametrize(("replicas", "head"), PAIRS, indirect=["replicas"])
def test_gradients_and_updates_do_not_depend_on_the_number_of_replicas(remote, replicas, head):
    """Even, uneven and empty shares."""
    plain, replicated = remote(small_steps, head, np.array(SHARES[replicas]))
    assert len(plain) == len(replicated) == len(SHARES[replicas])
    for (wanted, variables), (got, each_copy) in zip(plain, replicated, strict=True):
        matrices = [gradient for (gradient,) in wanted if gradient.ndim == 2]
        assert any(not gradient.any(axis=1).all() for gradient in matrices)  # of the centres
        for (value,), parts in zip(wanted, got, strict=True):
            assert len(parts) == replicas
            np.testing.assert_allclose(sum(parts), value, rtol=1e-6, atol=1e-6)
        for (variable,), parts in zip(variables, each_copy, strict=True):
            for part in parts:
                np.testing.assert_array_equal(part, parts[0])
                np.testing.assert_allclose(part, variable, rtol=1e-6, atol=1e-6)
