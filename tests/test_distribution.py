"""`MirroredStrategy` against the joined batch: the same weights, scale, loss and accuracy.

Each number of replicas has a process of its own: the devices of a process are fixed once TensorFlow
runs, and two strategies over the same devices in one process collide.
"""

import multiprocessing
import random
import warnings
from concurrent.futures import ProcessPoolExecutor
from functools import partial

import keras
import numpy as np
import pytest
import registry
import tensorflow as tf
from keras import layers

import keras_margin as km
from keras_margin import distribution

FEATURES, CLASSES, BATCH = 4, 5, 12

# Even; all rows of the first replica ignored; uneven; one row for all replicas; all ignored; even.
SIZES = (12, 12, 5, 1, 6, 12)

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


def grown(x, y):
    """(history, weights) of a run whose head is replaced, on the joined batches and replicas."""

    def run(model):
        settings = {"batch_size": BATCH, "shuffle": False, "verbose": 0}
        model.fit(x, y, epochs=2, **settings)
        head = model.head.resized(CLASSES + 2)  # outside the scope
        head.imprint(model.predict(x[:9], verbose=0), [CLASSES] * 9)
        model.replace_head(head)
        history = model.fit(x, y + 2, epochs=2, **settings).history
        return history, model.get_weights()

    plain = run(model_of("AdaCos", run_eagerly=True))
    with strategy.scope():
        model = model_of("AdaCos")
    replicated = run(model)
    other = km.ArcFace(CLASSES)
    other.build((None, 3))
    try:
        model.replace_head(other)
        message = ""
    except ValueError as error:
        message = str(error)
    return plain, replicated, message


def schedule(start, end):
    return keras.optimizers.schedules.PolynomialDecay(start, decay_steps=4, end_learning_rate=end)


IGNORE = {"ignore_class": -1}
EVERY_HEAD = {
    **{name: partial(entry.make, **IGNORE) for name, entry in registry.HEADS.items()},
    "ArcFace, schedules": lambda **k: km.ArcFace(
        CLASSES, schedule(0.1, 0.4), schedule(5.0, 20.0), **IGNORE, **k
    ),
}


def linear_model(make):
    """Norms of the embeddings are about 6, in MagFace's range of the registry."""
    random.seed(0)
    parts = [keras.Input((FEATURES,)), layers.Dense(4)]
    model = km.EmbeddingModel(keras.Sequential(parts), make())
    model.compile(keras.optimizers.SGD(0.01, momentum=0.9))
    return model


def uneven_batches():
    x, y, _ = data(sum(SIZES))
    x, ends = 3.0 * x, np.cumsum(SIZES)
    y[12:18] = y[30:36] = -1
    return [(x[end - n : end], y[end - n : end]) for end, n in zip(ends, SIZES, strict=True)]


def steps(model):
    """After each batch: (reported, [[each replica's copy] of each variable])."""
    after = []

    def look(batch, logs):
        copies = [strategy.experimental_local_results(v.value) for v in model.weights]
        reported = {name: float(value) for name, value in model.get_metrics_result().items()}
        after.append((reported, [[copy.numpy() for copy in each] for each in copies]))

    signature = (tf.TensorSpec((None, FEATURES)), tf.TensorSpec((None,), tf.int64))
    batches = tf.data.Dataset.from_generator(uneven_batches, output_signature=signature)
    callback = keras.callbacks.LambdaCallback(on_train_batch_end=look)
    model.fit(batches, verbose=0, callbacks=[callback])
    return after


class TripletsOfShares(km.SemiHardTriplet):
    """Joined batches, but triplets within the share of a replica only."""

    def loss(self, embeddings, labels, **kwargs):
        share = -(-len(labels) // strategy.num_replicas_in_sync)
        starts = range(0, len(labels), share)
        shares = [(embeddings[i : i + share], labels[i : i + share]) for i in starts]
        return keras.ops.concatenate([km.SemiHardTriplet.loss(self, *rows) for rows in shares])


def both_step_by_step(head):
    """`steps` of the joined batches, and of the replicas."""
    make = EVERY_HEAD[head]
    plain = linear_model(partial(TripletsOfShares, 0.3, **IGNORE) if "Triplet" in head else make)
    plain.run_eagerly = True
    with strategy.scope():
        model = linear_model(make)
    return steps(plain), steps(model)


def model_without_backbone(head):
    """In float64, where rounding hides nothing."""
    random.seed(0)
    parts = [keras.Input((FEATURES,), dtype="float64"), layers.Identity(dtype="float64")]
    return km.EmbeddingModel(keras.Sequential(parts), EVERY_HEAD[head](dtype="float64"))


def loss_and_gradients(model, x, y):
    weights = [variable.value for variable in model.trainable_variables]
    with tf.GradientTape() as tape:
        tape.watch(x)
        loss = model.compute_loss(y=y, y_pred=model(x, training=True))
    of_x, *of_weights = tape.gradient(loss, [x, *weights])
    return of_x, [loss, *of_weights]


def gradients(head, x, y, shares):
    """(of x, [loss, of each weight]) of the joined batch, and of the replicas together."""
    x = x.astype("float64")
    wanted = loss_and_gradients(model_without_backbone(head), tf.constant(x), tf.constant(y))

    ends = np.cumsum(shares)
    pieces = [(x[end - n : end], y[end - n : end]) for end, n in zip(ends, shares, strict=True)]
    with strategy.scope():
        model = model_without_backbone(head)
    share = strategy.experimental_distribute_values_from_function(
        lambda context: [tf.constant(part) for part in pieces[context.replica_id_in_sync_group]]
    )
    run = tf.function(lambda share: strategy.run(partial(loss_and_gradients, model), share))
    of_x, others = run(share)
    of_x = np.concatenate(strategy.experimental_local_results(of_x))
    others = [sum(strategy.experimental_local_results(each)).numpy() for each in others]
    return (wanted[0].numpy(), [each.numpy() for each in wanted[1]]), (of_x, others)


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


def test_a_head_that_is_replaced(remote):
    x, y, _ = data(29)
    plain, replicated, message = remote(grown, x, y)
    assert replicated[0].keys() == plain[0].keys()
    assert_close([replicated[0][key] for key in plain[0]], plain[0].values())
    assert_close(replicated[1], plain[1])
    assert "must be built in the scope of the model's `tf.distribute` strategy" in message


HAVE_STATE = (
    "AdaCos",
    "AdaFace",
    "ArcFace, schedules",
    "ArcFace, sub-centres",
    "CurricularFace",
    "ElasticFace",
    "LSoftmax",
    "MagFace",
    "MarginHead",
    "MarginHead, learned scale",
    "SemiHardTriplet",
    "SphereFace",
    "SphereFace2",
)
every_head = pytest.mark.parametrize(
    "head", [pytest.param(n, marks=[pytest.mark.long] * (n not in HAVE_STATE)) for n in EVERY_HEAD]
)


@every_head
def test_every_step_equals_the_joined_batch(remote, replicas, head):
    plain, replicated = remote(both_step_by_step, head)
    assert len(plain) == len(replicated) == len(SIZES)
    for (wanted, variables), (reported, copies) in zip(plain, replicated, strict=True):
        assert reported == pytest.approx(wanted, rel=1e-5)
        for (variable,), each in zip(variables, copies, strict=True):
            assert len(each) == replicas
            for copy in each:
                np.testing.assert_array_equal(copy, each[0])
                np.testing.assert_allclose(copy, variable, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("head", HAVE_STATE)
@pytest.mark.parametrize("first", [5, pytest.param(7, marks=pytest.mark.long)])
def test_gradients_do_not_depend_on_the_number_of_replicas(remote, replicas, head, first):
    """7 rows, `first` of them on the first replica. Triplets lie within the share of a replica."""
    x, y, _ = data(7)
    y[1] = -1
    if head == "SemiHardTriplet":
        first = 7
    shares = np.full(replicas, (7 - first) // (replicas - 1))
    shares[0] = first
    (of_x, others), (got_of_x, got_others) = remote(gradients, head, 3.0 * x, y, shares)
    assert_close([got_of_x, *got_others], [of_x, *others], 1e-9)
    np.testing.assert_array_equal(got_of_x[1], 0.0)


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
