"""Which classes take part in a step, and what a head makes of them, against NumPy."""

import re
import warnings

import keras
import numpy as np
import pytest
import reference
import scipy.stats
import tensorflow as tf
from jax_process import on_jax
from registry import CLASSES, DIM, HEADS

import keras_margin as km
from keras_margin.randomness import random_permutation
from keras_margin.sampling import rows_of_step, sample_size, sampled_ids


def drawn(ids, num_classes, rate, seed=0, step=0, counted=None):
    ids = tf.convert_to_tensor(ids, tf.int32)
    counted = tf.ones_like(ids, tf.bool) if counted is None else tf.constant(counted)
    return sampled_ids(ids, counted, num_classes, rate, seed, step)


def many_steps(steps, *arguments, **settings):
    """(steps, S)."""
    run = tf.function(lambda step: drawn(*arguments, step=step, **settings))
    return np.stack([run(tf.constant(step)) for step in range(steps)])


# How many


@pytest.mark.parametrize(
    ("num_classes", "rate", "batch", "size"),
    [
        (10, 0.5, 3, 5),
        (10, 0.05, 8, 8),  # every class of the batch finds a place
        (10, 0.05, 20, 10),
        (10, 0.11, 1, 2),
        (70, 0.1, 5, 7),  # 0.1 * 70 is 7.000000000000001
        (3, 1 / 3, 1, 2),  # one class would have no other
        (10**6, 1e-3, 512, 1000),
        (10, 0.9999, 1, 10),
        (10, 0.3, 0, 3),
    ],
)
def test_sample_size(num_classes, rate, batch, size):
    assert sample_size(num_classes, rate, batch) == size
    assert int(sample_size(num_classes, rate, tf.constant(batch))) == size
    ids = np.arange(batch) % num_classes
    assert drawn(ids, num_classes, rate).shape == (size,)


# Which


@pytest.mark.parametrize("num_classes", [2, 10, 64, 1000])
@pytest.mark.parametrize("rate", [0.01, 0.3, 0.7])
@pytest.mark.parametrize("batch", [0, 1, 8])
def test_the_batch_and_others_each_once(num_classes, rate, batch):
    rng = np.random.default_rng(0)
    for step in range(3):
        ids = rng.integers(0, num_classes, batch)
        got = drawn(ids, num_classes, rate, step=step)
        assert got.dtype == tf.int32
        assert (np.diff(got) > 0).all()
        assert set(ids) <= set(got.numpy())
        assert got.numpy().min(initial=0) >= 0
        assert got.numpy().max(initial=0) < num_classes


@pytest.mark.parametrize("ids", [[7] * 8, [0] * 8, [9] * 8, list(range(8)), [9, 0, 9, 0]])
def test_repeated_classes(ids):
    for step in range(5):
        got = drawn(ids, 10, 0.4, step=step).numpy()
        assert len(got) == max(4, len(ids))
        assert len(set(got)) == len(got)
        assert set(ids) <= set(got)


def test_a_batch_of_all_classes():
    np.testing.assert_array_equal(drawn([4, 2, 0, 1, 3, 3], 5, 0.1), np.arange(5))


def test_a_million_classes():
    rng = np.random.default_rng(0)
    ids = rng.integers(0, 10**6, 512)
    got = drawn(ids, 10**6, 0.005, seed=3, step=7).numpy()
    assert len(got) == 5000
    assert (np.diff(got) > 0).all()
    assert np.isin(ids, got).all()
    counts = np.bincount(got // 10**5, minlength=10)
    assert scipy.stats.chisquare(counts).pvalue > 1e-4


def test_classes_of_ignored_rows_need_not_be_there():
    """Class 3 is as likely as any other."""
    got = many_steps(300, [3, 5], 20, 0.2, counted=[False, True])
    assert (got == 5).any(axis=1).all()
    share = (got == 3).any(axis=1).mean()
    assert abs(share - 3 / 19) < 4 * np.sqrt(3 / 19 * 16 / 19 / 300)


def test_nobody_counts():
    got = many_steps(50, [3, 5], 20, 0.2, counted=[False, False])
    assert got.shape == (50, 4)
    assert (np.diff(got) > 0).all()


@pytest.mark.parametrize(("num_classes", "rate"), [(40, 0.25), (64, 0.5), (1000, 0.1)])
def test_others_are_equally_likely(num_classes, rate):
    positives = [0, 17, 33]
    got = many_steps(800, positives, num_classes, rate, seed=1)
    others = np.delete(np.bincount(got.ravel(), minlength=num_classes), positives)
    share = (got.shape[1] - 3) / (num_classes - 3)
    # Draws without replacement: the counts' variance is that of share (1 - share) a step.
    squares = (others - 800 * share) ** 2 / (800 * share * (1 - share))
    total = squares.sum() * (len(others) - 1) / len(others)
    assert scipy.stats.chi2(len(others) - 1).sf(total) > 1e-3


def test_pairs_are_equally_likely():
    """No two classes come together more often than others, however far apart their ids are."""
    got = many_steps(1500, [], 1000, 0.1)
    taken = np.zeros((1500, 1000), bool)
    np.put_along_axis(taken, got, True, axis=1)
    together = 100 * 99 / (1000 * 999)
    for distance in (1, 2, 3, 4, 7, 8, 16, 64, 100, 128, 256, 500, 512):
        pairs = (taken[:, :-distance] & taken[:, distance:]).sum()
        want = 1500 * (1000 - distance) * together
        assert abs(pairs - want) < 4 * np.sqrt(want)


def test_steps_are_independent():
    got = many_steps(1000, [], 1000, 0.1)
    shared = [len(np.intersect1d(*pair)) for pair in zip(got[:-1], got[1:], strict=True)]
    want = scipy.stats.hypergeom(1000, 100, 100)
    assert abs(np.mean(shared) - want.mean()) < 4 * want.std() / np.sqrt(999)
    assert abs(np.std(shared) / want.std() - 1) < 0.1


def test_steps_and_seeds_differ():
    samples = {
        tuple(drawn([1, 2], 1000, 0.02, seed, step).numpy())
        for seed in range(5)
        for step in range(5)
    }
    assert len(samples) == 25


# The same for ever: a resumed training goes on with the samples of the interrupted one


# (ids, num_classes, rate, seed, step, counted) and the sample.
PINNED = [
    (([3, 17, 3], 20, 0.3, 0, 0, None), [2, 3, 6, 13, 17, 19]),
    (([3, 17, 3], 20, 0.3, 0, 1, None), [1, 3, 4, 12, 14, 17]),
    (([3, 17, 3], 20, 0.3, 1, 0, None), [3, 4, 10, 14, 16, 17]),
    (([3, 17, 3], 20, 0.3, 7, 2**31 - 1, None), [3, 4, 8, 16, 17, 19]),
    (
        ([0, 99999, 5], 100000, 8e-5, 123456789, 41, None),
        [0, 5, 28174, 28525, 43929, 45599, 96775, 99999],
    ),
    (([4, 4], 64, 0.1, 2**40 + 3, 5, [True, False]), [4, 17, 31, 40, 47, 50, 61]),
    (([], 10, 0.35, 0, 0, None), [0, 1, 5, 8]),
]


def test_samples_are_pinned(run):
    def samples(steps):
        for arguments, step in zip(PINNED, steps, strict=True):
            ids, num_classes, rate, seed, _, counted = arguments[0]
            yield drawn(ids, num_classes, rate, seed, step, counted)

    steps = [tf.constant(arguments[4]) for arguments, _ in PINNED]
    got = run(lambda steps: list(samples(steps)))(steps)
    assert [each.numpy().tolist() for each in got] == [sample for _, sample in PINNED]


def test_order_and_repetition_in_the_batch_do_not_matter():
    want = drawn([3, 17, 3, 9], 20, 0.3, 5, 6)
    np.testing.assert_array_equal(drawn([9, 17, 17, 3], 20, 0.3, 5, 6), want)


def test_batches_of_unknown_length():
    run = tf.function(
        lambda ids: drawn(ids, 20, 0.3), input_signature=[tf.TensorSpec((None,), tf.int32)]
    )
    for ids in ([3, 17, 3], [5], [], list(range(9))):
        np.testing.assert_array_equal(run(np.array(ids, "int32")), drawn(ids, 20, 0.3))


def test_samples_on_jax(tmp_path):
    code = """
        import json
        import jax, jax.numpy as jnp
        from keras_margin.sampling import sampled_ids

        found = []
        for ids, num_classes, rate, seed, step, counted in json.load(open("given.json")):
            ids = jnp.array(ids, "int32")
            counted = jnp.ones(ids.shape, bool) if counted is None else jnp.array(counted)
            step = jnp.array(step, "int32")
            draw = lambda ids, counted, step: sampled_ids(
                ids, counted, num_classes, rate, seed, step
            )
            found.append([each(ids, counted, step).tolist() for each in (draw, jax.jit(draw))])
        print(json.dumps(found))
    """
    found = on_jax(code, [arguments for arguments, _ in PINNED], tmp_path)
    assert found == [[sample, sample] for _, sample in PINNED]


# The permutation that draws


@pytest.mark.parametrize(
    "size", [1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 33, 100, 4095, 4096, 4097]
)
def test_permutation_is_a_bijection(size):
    for seed, step in ((0, 0), (0, 1), (1, 0), (2**40, 2**31 - 1)):
        got = random_permutation(seed, tf.constant(step), tf.range(size), size)
        assert got.dtype == tf.int32
        np.testing.assert_array_equal(np.sort(got), np.arange(size))


@pytest.mark.parametrize("size", [2**20 + 1, 2**31 - 1, 2**31])
def test_permutation_of_many(run, size):
    got = run(lambda step: random_permutation(9, step, tf.range(5000), size))(tf.constant(3))
    assert len(np.unique(got)) == 5000
    assert got.numpy().min() >= 0
    assert got.numpy().max() < size
    assert scipy.stats.kstest(got.numpy() / size, "uniform").pvalue > 1e-4


def test_permutation_is_pinned(run):
    got = run(lambda step: random_permutation(0, step, tf.range(10), 10))
    assert got(tf.constant(0)).numpy().tolist() == [5, 0, 8, 1, 9, 3, 4, 7, 6, 2]
    assert got(tf.constant(1)).numpy().tolist() == [1, 4, 7, 3, 2, 6, 5, 8, 9, 0]


def test_image_depends_on_the_index_alone():
    whole = random_permutation(0, 0, tf.range(100), 100).numpy()
    some = random_permutation(0, 0, tf.constant([70, 3, 3]), 100)
    np.testing.assert_array_equal(some, whole[[70, 3, 3]])


@pytest.mark.parametrize("size", [8, 10, 33])
def test_every_image_is_equally_likely(size):
    run = tf.function(lambda step: random_permutation(1, step, tf.range(size), size))
    images = np.stack([run(tf.constant(step)) for step in range(800)])
    for image in images.T:
        assert scipy.stats.chisquare(np.bincount(image, minlength=size)).pvalue > 1e-4


# A head on a sample, in NumPy


def rows(number=4, seed=0):
    rng = np.random.default_rng(seed)
    return rng.normal(0.0, 3.0, (number, DIM)).astype("float32"), rng.integers(0, 20, number)


def twenty_classes(make, **settings):
    """A head and its centers in float64."""
    head = make(20, seed=3, **settings)
    head.build((None, DIM))
    centers = np.random.default_rng(7).normal(size=head.centers.shape).astype("float32")
    head.centers.assign(centers)
    return head, centers.astype("float64")


def sample_of(head, labels):
    """The ids of the next training call, and each row's place among them."""
    ids = rows_of_step(head, labels).numpy()[:: head.num_subcenters] // head.num_subcenters
    return ids, np.searchsorted(ids, labels)


def rows_of(ids, num_subcenters):
    return (ids[:, None] * num_subcenters + np.arange(num_subcenters)).ravel()


ADACOS = {"max_scale": 4.0 * reference.fixed_adacos_scale(20)}
IN_NUMPY = {
    "NormFace": ({"scale": 8.0}, {"scale": 8.0}),
    "CosFace": ({"scale": 8.0}, {"scale": 8.0}),
    "ArcFace": ({"scale": 8.0}, {"scale": 8.0}),
    "SoftmaxHead": ({}, {}),
    "SphereFace": ({}, {}),
    "LSoftmax": ({}, {}),
    "AdaCos": ({}, ADACOS),
    "CurricularFace": ({"scale": 8.0, "momentum": 0.3}, {"scale": 8.0, "momentum": 0.3}),
    "AdaFace": ({"scale": 8.0}, {"scale": 8.0}),
}


@pytest.mark.parametrize("name", IN_NUMPY)
def test_loss_and_cosines_are_those_of_the_sampled_centers(name):
    settings, in_numpy = IN_NUMPY[name]
    head, centers = twenty_classes(getattr(km, name), sample_rate=0.3, **settings)
    state = {"scale": reference.fixed_adacos_scale(20)} if name == "AdaCos" else None
    for step in range(3):
        x, labels = rows(seed=step)
        ids, places = sample_of(head, labels)
        assert len(ids) == 6
        loss, target, hardest = head.loss_and_cosines(x, labels)
        wide = x.astype("float64")
        logits, state = reference.HEADS[name](wide, centers[ids], places, state, **in_numpy)
        np.testing.assert_allclose(loss, reference.softmax_loss(logits, places), rtol=2e-5)
        similarity = reference.cosines(wide, centers[ids])
        if name == "SoftmaxHead":
            similarity = wide @ centers[ids].T
        if name == "LSoftmax":
            similarity = reference.unit(wide) @ centers[ids].T
        np.testing.assert_allclose(target, similarity[np.arange(4), places], rtol=2e-5, atol=1e-6)
        similarity[np.arange(4), places] = -np.inf
        np.testing.assert_allclose(hardest, similarity.max(axis=1), rtol=2e-5, atol=1e-6)
    if name == "AdaCos":
        assert float(head.current_scale) == pytest.approx(state["scale"], rel=1e-5)
    if name == "CurricularFace":
        assert float(head.t.value) == pytest.approx(state["t"], rel=1e-5)


def test_sphereface2_on_a_sample():
    head, centers = twenty_classes(km.SphereFace2, margin=0.2, scale=8.0, sample_rate=0.3)
    x, labels = rows()
    ids, places = sample_of(head, labels)
    cosine = reference.cosines(x.astype("float64"), centers[ids])
    is_target = places[:, None] == np.arange(6)
    z = 8.0 * (2.0 * ((cosine + 1.0) / 2.0) ** 3 - 1.0) + float(head.bias.value)
    terms = np.where(is_target, 0.7 * np.logaddexp(0, -(z - 1.6)), 0.3 * np.logaddexp(0, z + 1.6))
    np.testing.assert_allclose(head.loss(x, labels), 50.0 / 8.0 * terms.sum(axis=1), rtol=2e-5)


def test_label_smoothing_spreads_over_the_sample():
    head, centers = twenty_classes(km.CosFace, scale=8.0, sample_rate=0.3, label_smoothing=0.2)
    x, labels = rows()
    ids, places = sample_of(head, labels)
    logits, _ = reference.cosface(x.astype("float64"), centers[ids], places, scale=8.0)
    log_p = np.log(np.stack([reference.softmax(row) for row in logits]))
    want = -0.8 * log_p[np.arange(4), places] - 0.2 * log_p.mean(axis=1)
    np.testing.assert_allclose(head.loss(x, labels), want, rtol=1e-5)


def test_margins_per_class_are_those_of_the_label():
    margins = np.linspace(0.1, 0.5, 20)
    head, centers = twenty_classes(km.CosFace, margin=margins.tolist(), scale=8.0, sample_rate=0.3)
    x, labels = rows()
    ids, places = sample_of(head, labels)
    cosine = reference.cosines(x.astype("float64"), centers[ids])
    cosine[np.arange(4), places] -= margins[labels]
    want = reference.softmax_loss(8.0 * cosine, places)
    np.testing.assert_allclose(head.loss(x, labels), want, rtol=1e-5)


def test_gradients_on_a_sample(run):
    """Those of the sampled rows, and no gradient but theirs is ever made."""
    num_subcenters = 3
    head, centers = twenty_classes(
        km.ArcFace,
        scale=8.0,
        sample_rate=0.3,
        num_subcenters=num_subcenters,
        chunk_size=4,
        dtype="float64",
    )
    x, labels = rows()
    x = x.astype("float64")
    ids, places = sample_of(head, labels)
    sampled = rows_of(ids, num_subcenters)

    def of(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.reduce_mean(head.loss(x, labels, update_state=False))
        of_x, of_centers = tape.gradient(loss, [x, head.centers.value])
        return of_x, of_centers.indices, of_centers.values

    of_x, indices, values = run(of)(tf.constant(x))
    np.testing.assert_array_equal(indices, sampled)

    def loss(x, w):
        logits, _ = reference.arcface(x, w, places, scale=8.0, num_subcenters=num_subcenters)
        return reference.softmax_loss(logits, places)

    want_of_x, want = reference.gradients(loss, x, centers[sampled])
    np.testing.assert_allclose(of_x, want_of_x, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(values, want, rtol=1e-9, atol=1e-12)


def test_a_sampled_loss_is_below_the_whole_one():
    """The softmax misses classes: in every row, and the less the more are drawn."""
    x, labels = rows()
    whole, _ = twenty_classes(km.NormFace, scale=8.0)
    want = whole.loss(x, labels).numpy()
    means = []
    for rate in (0.2, 0.5, 0.8):
        head, _ = twenty_classes(km.NormFace, scale=8.0, sample_rate=rate)
        losses = np.stack([head.loss(x, labels) for _ in range(20)])
        assert (losses <= want * (1 + 1e-6)).all()
        means.append(losses.mean())
    assert means[0] < means[1] < means[2] < want.mean()


def test_ignored_rows():
    head, _ = twenty_classes(km.ArcFace, sample_rate=0.1, ignore_class=-1)
    x, labels = rows(3)
    ids, _ = sample_of(head, np.array([-1, labels[1], -1]))
    x[0] = np.nan
    losses = head.loss(x, [-1, labels[1], -1]).numpy()
    assert len(ids) == 3
    assert losses[0] == losses[2] == 0.0
    assert losses[1] > 0.0


def test_labels_out_of_range_in_compiled_code():
    head, _ = twenty_classes(km.ArcFace, sample_rate=0.3)
    x, labels = rows(3)
    good = head.loss(x, labels, update_state=False).numpy()
    bad = np.array([labels[0], 20, -3])
    losses = tf.function(lambda y: head.loss(x, y, update_state=False))(tf.constant(bad)).numpy()
    assert np.isfinite(losses[0])
    assert np.isnan(losses[1:]).all()
    assert np.isfinite(good).all()


@pytest.mark.parametrize(
    ("make", "settings", "jit_compile"),
    [
        (km.AdaCos, {"num_subcenters": 3}, False),
        (km.SphereFace2, {"scale": 8.0, "chunk_size": 4}, True),
    ],
)
def test_training_calls_of_unknown_length(make, settings, jit_compile):
    """6 classes take part, or as many as there are rows."""
    compiled, eager = (twenty_classes(make, sample_rate=0.3, **settings)[0] for _ in range(2))

    def of(head, x, labels):
        with tf.GradientTape() as tape:
            tape.watch(x)
            results = head.loss_and_cosines(x, labels)
        of_x, of_centers = tape.gradient(results[0], [x, head.centers.value])
        return *results, of_x, of_centers.indices, of_centers.values

    signature = [tf.TensorSpec((None, DIM), tf.float32), tf.TensorSpec((None,), tf.int64)]
    run = tf.function(lambda *batch: of(compiled, *batch), signature, jit_compile=jit_compile)
    for number in (4, 1, 9):
        x, labels = map(tf.constant, rows(number))
        for got, want in zip(run(x, labels), of(eager, x, labels), strict=True):
            np.testing.assert_allclose(got, want, 1e-5, 1e-5 * np.abs(want).max())
    assert int(compiled.steps.value) == 3


@pytest.mark.parametrize("shape", ["one-hot", "column", "float"])
def test_labels_of_any_kind(shape):
    x, labels = rows()
    given = {
        "one-hot": np.eye(20, dtype="int32")[labels],
        "column": labels[:, None],
        "float": labels.astype("float32"),
    }[shape]
    head, _ = twenty_classes(km.ArcFace, sample_rate=0.3)
    want = head.loss(x, labels, update_state=False)
    np.testing.assert_array_equal(rows_of_step(head, given), rows_of_step(head, labels))
    np.testing.assert_array_equal(head.loss(x, given, update_state=False), want)


# The steps of a head


def test_a_training_call_moves_to_the_next_sample():
    head, _ = twenty_classes(km.ArcFace, sample_rate=0.3)
    x, labels = rows()
    first = rows_of_step(head, labels).numpy()
    want = drawn(labels, 20, 0.3, seed=3, step=0)
    np.testing.assert_array_equal(first, want)
    head.loss(x, labels, update_state=False)
    head.loss(x, labels, training=False)
    head(x)
    np.testing.assert_array_equal(rows_of_step(head, labels), first)
    head.loss(x, labels)
    np.testing.assert_array_equal(
        rows_of_step(head, labels), drawn(labels, 20, 0.3, seed=3, step=1)
    )


def test_seed_of_a_head():
    samples = []
    for seed in (None, 0, 1):
        head = km.ArcFace(100, sample_rate=0.1, seed=seed)
        head.build((None, DIM))
        samples.append(rows_of_step(head, [1]).numpy().tolist())
    assert samples[0] == samples[1] != samples[2]


def test_rows_of_subcenters():
    head = km.ArcFace(20, sample_rate=0.2, num_subcenters=3)
    head.build((None, DIM))
    ids = drawn([6, 1], 20, 0.2).numpy()
    np.testing.assert_array_equal(rows_of_step(head, [6, 1]), rows_of(ids, 3))


def embedding_model(head, **compiled):
    backbone = keras.Sequential(
        [keras.Input((DIM,)), keras.layers.Dense(DIM, kernel_initializer="identity")]
    )
    model = km.EmbeddingModel(backbone, head)
    model.compile(keras.optimizers.SGD(0.01, momentum=0.9), **compiled)
    return model


def test_a_file_goes_on_with_the_next_sample(tmp_path):
    x, labels = rows(12)
    model = embedding_model(km.ArcFace(20, 0.3, 8.0, sample_rate=0.3, seed=5))
    model.fit(x, labels, batch_size=4, verbose=0)
    model.save(tmp_path / "model.keras")
    again = keras.saving.load_model(tmp_path / "model.keras")
    assert again.head.sample_rate == 0.3
    want = drawn(labels[:4], 20, 0.3, seed=5, step=3)
    np.testing.assert_array_equal(rows_of_step(again.head, labels[:4]), want)
    for each in (model, again):
        each.fit(x, labels, batch_size=4, shuffle=False, verbose=0)
    for got, other in zip(again.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_array_equal(got, other)


# All classes


CLASSIFIERS = {name: entry for name, entry in HEADS.items() if entry.has_classes}
every_classifier = pytest.mark.parametrize("entry", CLASSIFIERS.values(), ids=CLASSIFIERS)


def built(entry, **kwargs):
    head = entry.make(**kwargs)
    head.build((None, DIM))
    values = np.sin(np.arange(np.prod(head.centers.shape))).reshape(head.centers.shape)
    head.centers.assign(values)
    return head


def few_rows(number, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(0.0, 3.0, (number, DIM)).astype("float32")
    return x, rng.integers(0, CLASSES, number)


def trained_once(head, x, labels):
    x = tf.constant(x)
    trained = [variable.value for variable in head.trainable_variables]
    with tf.GradientTape() as tape:
        tape.watch(x)
        results = head.loss_and_cosines(x, labels)
    gradients = tape.gradient(results[0], [x, *trained])
    gradients = [tf.convert_to_tensor(each) for each in gradients]
    return [*results, *gradients, *head.non_trainable_variables]


@every_classifier
def test_a_sample_of_all_classes_is_the_whole_head(entry):
    """6 rows: a place for each of the 5 classes."""
    x, labels = few_rows(6)
    got = trained_once(built(entry, sample_rate=0.2), x, labels)
    for one, other in zip(got, trained_once(built(entry), x, labels), strict=True):
        largest = np.abs(other).max(initial=1.0)
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-6 * largest)


@pytest.mark.parametrize("make", [km.ArcFace, km.AdaCos, km.SphereFace2])
def test_a_rate_of_1_is_the_whole_head_bit_for_bit(make):
    x, labels = rows()
    heads = [twenty_classes(make, **settings)[0] for settings in ({"sample_rate": 1.0}, {})]
    for _ in range(2):
        losses = [head.loss(x, labels) for head in heads]
        np.testing.assert_array_equal(*losses)


@every_classifier
def test_logits_and_evaluation_see_all_classes(entry):
    x, labels = few_rows(2)
    sampled, whole = built(entry, sample_rate=0.2), built(entry)
    np.testing.assert_array_equal(sampled(x), whole(x))
    np.testing.assert_array_equal(
        sampled.loss(x, labels, training=False), whole.loss(x, labels, training=False)
    )
    np.testing.assert_array_equal(
        sampled(x, labels, training=False), whole(x, labels, training=False)
    )


def test_a_sample_has_another_class():
    """One row and a rate of one class: with the row's class alone the loss would be 0."""
    head = km.AdaCos(7, sample_rate=0.1, seed=0)
    x = np.ones((1, DIM), "float32")
    loss, target, hardest = head.loss_and_cosines(x, np.array([3]))
    assert float(loss[0]) > 0.0
    assert -1.0 <= float(hardest[0]) <= 1.0
    assert float(target[0]) <= 1.0


@every_classifier
def test_every_head_trains_on_samples(entry):
    """2 rows a step, 2 of 5 classes."""
    x, labels = few_rows(4)
    head = built(entry, sample_rate=0.4)
    model = embedding_model(head, run_eagerly=True)
    history = model.fit(x, labels, batch_size=2, verbose=0).history
    assert np.isfinite([history[name] for name in history]).all()
    for value in model.get_weights():
        assert np.isfinite(value).all()
    assert int(head.steps.value) == 2
    evaluated = model.evaluate(x, labels, verbose=0, return_dict=True)
    assert np.isfinite(list(evaluated.values())).all()


def test_fewer_places_than_rows():
    """C = 10, rate .05, a batch of 8: the classes of the batch and no more than 8."""
    head = km.ArcFace(10, 0.3, 8.0, sample_rate=0.05, seed=0)
    x = np.random.default_rng(0).normal(size=(40, DIM)).astype("float32")
    labels = np.arange(40) % 10
    model = embedding_model(head)
    history = model.fit(x, labels, batch_size=8, epochs=2, shuffle=False, verbose=0).history
    assert np.isfinite(history["loss"]).all()
    np.testing.assert_array_equal(rows_of_step(head, np.arange(8)), np.arange(8))
    assert len(rows_of_step(head, [3] * 8)) == 8


@pytest.mark.parametrize("jit_compile", [True, pytest.param(False, marks=pytest.mark.long)])
def test_fit_equals_eager_code(jit_compile):
    x, labels = rows(12)
    models = []
    for compiled in ({"run_eagerly": True}, {"jit_compile": jit_compile}):
        head = km.AdaCos(20, sample_rate=0.3, seed=5, num_subcenters=2)
        models.append(embedding_model(head, **compiled))
        models[-1].fit(x, labels, batch_size=6, epochs=2, shuffle=False, verbose=0)
    for got, want in zip(models[1].get_weights(), models[0].get_weights(), strict=True):
        np.testing.assert_allclose(got, want, 1e-5, 1e-6)


# Refused, and warned of


@pytest.mark.parametrize(
    ("rate", "must"),
    [
        (0, "be greater than 0. Received: sample_rate=0"),
        (-0.1, "be a finite number, at least 0, at most 1. Received: sample_rate=-0.1"),
        (1.01, "be a finite number, at least 0, at most 1. Received: sample_rate=1.01"),
        (np.nan, "be a finite number, at least 0, at most 1. Received: sample_rate=nan"),
        (True, "be a finite number, at least 0, at most 1. Received: sample_rate=True"),
        ("0.1", "be a finite number, at least 0, at most 1. Received: sample_rate='0.1'"),
    ],
)
def test_rates_out_of_range(rate, must):
    for make in (km.ArcFace, km.SphereFace2):
        with pytest.raises(ValueError, match=f"^{re.escape(f'`sample_rate` must {must}')}$"):
            make(5, sample_rate=rate)


def test_a_regularizer_would_move_all_rows():
    with pytest.raises(ValueError, match="`centers_regularizer` moves them all") as error:
        km.ArcFace(5, sample_rate=0.5, centers_regularizer="l2")
    assert "sample_rate=0.5, centers_regularizer='l2'" in str(error.value)
    assert km.ArcFace(5, sample_rate=1.0, centers_regularizer="l2").centers_regularizer is not None


def test_config():
    head = km.SphereFace2(5, sample_rate=0.25, seed=3)
    again = km.SphereFace2.from_config(head.get_config())
    assert (again.sample_rate, again.seed) == (0.25, 3)


@pytest.mark.parametrize("make", [km.ArcFace, km.SphereFace2, km.LSoftmax])
def test_logits_to_train_with_warn_once(make):
    head = make(5, sample_rate=0.5)
    x, labels = few_rows(2)
    head(x)
    head(x, labels, training=False)
    message = (
        "Only `head.loss`, as in EmbeddingModel, applies sample_rate; the logits of a functional "
        "model do not have it. Received: sample_rate=0.5"
    )
    with pytest.warns(UserWarning, match=f"^{re.escape(message)}$"):
        logits = head(x, labels)
    assert logits.shape == (2, 5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        head(x, labels)
        head.loss(x, labels)
