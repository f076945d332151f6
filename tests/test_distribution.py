"""`MirroredStrategy` against the joined batch: the same weights, scale, loss and accuracy.

Each number of replicas has a process of its own: the devices of a process are fixed once TensorFlow
runs, and two strategies over the same devices in one process collide.
"""

import multiprocessing
import random
import warnings
from concurrent.futures import ProcessPoolExecutor

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import keras_margin as km
from keras_margin import distribution

FEATURES, CLASSES, BATCH = 4, 5, 12

strategy = None  # of a process that `start` has prepared


def start(replicas):
    """Gives this process logical devices and its one strategy."""
    global strategy
    (cpu,) = tf.config.list_physical_devices("CPU")
    tf.config.set_logical_device_configuration(
        cpu, [tf.config.LogicalDeviceConfiguration()] * replicas
    )
    strategy = tf.distribute.MirroredStrategy([f"CPU:{i}" for i in range(replicas)])


@pytest.fixture(scope="module", params=[2, pytest.param(3, marks=pytest.mark.long)])
def replicas(request):
    return request.param


@pytest.fixture(scope="module")
def remote(replicas):
    """`remote(function, *arguments)` runs one of the functions below in the prepared process."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawn, initializer=start, initargs=(replicas,)) as pool:
        yield lambda function, *arguments: pool.submit(function, *arguments).result()


# What runs in the prepared process


HEADS = {
    "ArcFace": lambda: km.ArcFace(CLASSES, 0.3, 8.0, ignore_class=-1),
    "AdaCos": lambda: km.AdaCos(CLASSES, ignore_class=-1),
    "regularized": lambda: km.AdaCos(CLASSES, centers_regularizer=keras.regularizers.L2(0.01)),
}


def data(rows):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(rows, FEATURES)).astype("float32")
    return x, rng.integers(0, CLASSES, rows), rng.uniform(0.0, 2.0, rows)


def model_of(head, **compiled):
    random.seed(0)
    penalty = keras.regularizers.L2(0.05) if head == "regularized" else None
    parts = [layers.Dense(6, "tanh", kernel_regularizer=penalty), layers.Dense(3)]
    model = km.EmbeddingModel(keras.Sequential([keras.Input((FEATURES,)), *parts]), HEADS[head]())
    model.compile(keras.optimizers.SGD(0.05, momentum=0.9), **compiled)
    return model


def trained(model, x, y, weights=None, epochs=2):
    """(history, evaluation, weights by path) after training."""
    settings = {"batch_size": BATCH, "sample_weight": weights, "verbose": 0}
    history = model.fit(x, y, epochs=epochs, shuffle=False, **settings).history
    evaluation = model.evaluate(x, y, return_dict=True, **settings)
    return history, evaluation, model.get_weights()


def both(head, x, y, weights=None):
    """`trained` on the joined batches, and on the replicas."""
    plain = trained(model_of(head, run_eagerly=True), x, y, weights)
    with strategy.scope():
        model = model_of(head)
    return plain, trained(model, x, y, weights)


def copies_after_training(head, x, y):
    """The values of every non-trainable variable of the head on each replica."""
    with strategy.scope():
        model = model_of(head)
    model.fit(x, y, batch_size=BATCH, verbose=0)
    return [
        [copy.numpy() for copy in strategy.experimental_local_results(variable.value)]
        for variable in model.head.variables
    ]


def saved_and_loaded(head, path, x, y):
    """The weights saved on the replicas, loaded there and elsewhere, and the next epoch of each."""
    with strategy.scope():
        model = model_of(head)
    trained(model, x, y)
    model.save(path)
    with strategy.scope():
        again = keras.saving.load_model(path)
    alone = keras.saving.load_model(path)
    weights = [m.get_weights() for m in (model, again, alone)]
    return weights, [trained(m, x, y, epochs=1) for m in (model, again, alone)]


def in_replicas(name, shares):
    """A function of the module run on one share of rows a replica; every replica's result."""
    values = [tf.constant(share, "float32") for share in shares]
    share = strategy.experimental_distribute_values_from_function(
        lambda context: values[context.replica_id_in_sync_group]
    )
    function = getattr(distribution, name)
    result = tf.function(lambda share: strategy.run(function, (share,)))(share)
    return [value.numpy() for value in strategy.experimental_local_results(result)]


def replicas_seen():
    return distribution.num_replicas(), [
        int(number)
        for number in strategy.experimental_local_results(
            strategy.run(lambda: tf.constant(distribution.num_replicas()))
        )
    ]


# The tests


def assert_close(got, want, relative=1e-5):
    for value, expected in zip(got, want, strict=True):
        largest = np.abs(expected).max(initial=0.0)
        np.testing.assert_allclose(value, expected, rtol=relative, atol=relative * largest)


def assert_same_training(plain, replicated):
    assert replicated[0].keys() == plain[0].keys()
    for got, want in zip(replicated[:2], plain[:2], strict=True):
        assert_close([got[key] for key in want], want.values())
    assert_close(replicated[2], plain[2])


@pytest.mark.parametrize(("head", "rows"), [("ArcFace", 29), ("AdaCos", 29), ("AdaCos", 25)])
def test_training_equals_the_joined_batch(remote, head, rows):
    """29 rows are batches of 12, 12 and 5; of 25 rows the last is 1: replicas without any row."""
    x, y, _ = data(rows)
    assert_same_training(*remote(both, head, x, y))


def test_regularizers_and_weights_count_once(remote):
    assert_same_training(*remote(both, "regularized", *data(29)))


def test_rows_that_count_are_those_of_all_replicas(remote):
    """In the first batch none of the first replica's share counts."""
    x, y, _ = data(29)
    y[:6] = y[14] = y[28] = -1
    assert_same_training(*remote(both, "AdaCos", x, y))


def test_every_replica_holds_the_same_values(remote, replicas):
    x, y, _ = data(29)
    for copies in remote(copies_after_training, "AdaCos", x, y):
        assert len(copies) == replicas
        for copy in copies[1:]:
            np.testing.assert_array_equal(copy, copies[0])


def test_save_and_load(remote, tmp_path):
    x, y, _ = data(24)
    weights, next_epochs = remote(saved_and_loaded, "AdaCos", tmp_path / "model.keras", x, y)
    for loaded in weights[1:]:
        for got, want in zip(loaded, weights[0], strict=True):
            np.testing.assert_array_equal(got, want)
    assert_same_training(next_epochs[0], next_epochs[1])
    assert_same_training(next_epochs[0], next_epochs[2])


def test_gather_rows_of_uneven_shares(remote, replicas):
    shares = [np.arange(2.0 * i).reshape(i, 2) + 10 * i for i in range(replicas)]
    gathered = remote(in_replicas, "gather_rows", shares)
    assert len(gathered) == replicas
    for rows in gathered:
        np.testing.assert_array_equal(rows, np.concatenate(shares))


def test_global_sum(remote, replicas):
    sums = remote(in_replicas, "global_sum", [10.0**i for i in range(replicas)])
    assert sums == [sum(10.0**i for i in range(replicas))] * replicas


def test_num_replicas(remote, replicas):
    assert remote(replicas_seen) == (1, [replicas] * replicas)


@pytest.mark.parametrize("function", [distribution.gather_rows, distribution.global_sum])
def test_without_a_strategy_there_is_nothing_to_do_and_no_gradient(function):
    rows = tf.constant([[1.0, 2.0], [3.0, 4.0]])
    with tf.GradientTape() as tape:
        tape.watch(rows)
        result = function(rows)
    np.testing.assert_array_equal(result, rows)
    assert tape.gradient(result, rows) is None
    assert distribution.num_replicas() == 1


# Shares without rows


def dataset(rows, batch, **kwargs):
    return tf.data.Dataset.range(rows).batch(batch, **kwargs)


@pytest.mark.parametrize(
    ("x", "batch_size", "replicas", "can_be_empty"),
    [
        (np.zeros(12), 6, 3, False),
        (np.zeros(13), 6, 3, True),  # one row for three
        (np.zeros(16), 6, 3, True),  # 2 + 2 + 0
        (np.zeros(17), 6, 3, False),  # 2 + 2 + 1
        (np.zeros(7), 6, 2, True),
        ({"a": np.zeros(7), "b": np.zeros(7)}, 6, 2, True),
        (lambda: dataset(7, 6), None, 2, True),
        (lambda: dataset(7, 6, drop_remainder=True), None, 2, False),
    ],
)
def test_shares_can_be_empty(x, batch_size, replicas, can_be_empty):
    x = x() if callable(x) else x  # TensorFlow may not run yet when this module is imported
    assert distribution.shares_can_be_empty(x, batch_size, replicas) is can_be_empty


def fit_with_batch_normalization(rows, batch):
    """The warnings of a fit whose backbone has batch statistics."""
    x, y, _ = data(rows)
    with strategy.scope():
        parts = [keras.Input((FEATURES,)), layers.Dense(3), layers.BatchNormalization()]
        model = km.EmbeddingModel(keras.Sequential(parts), km.AdaCos(CLASSES))
        model.compile("sgd")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.fit(x, y, batch_size=batch, verbose=0)
    return [str(warning.message) for warning in caught if "replicas" in str(warning.message)]


def test_batch_normalization_with_empty_shares_warns(remote, replicas):
    (message,) = remote(fit_with_batch_normalization, 2 * BATCH + 1, BATCH)
    assert message.startswith(f"The last batch can leave one of the {replicas} replicas without")
    assert "drop_remainder=True" in message
    assert remote(fit_with_batch_normalization, 2 * BATCH, BATCH) == []
