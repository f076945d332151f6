"""The pass over the classes in blocks: any blocks, run in any way, against NumPy float64."""

import functools
import re

import keras
import numpy as np
import pytest
import reference
import tensorflow as tf
from conftest import RUNS
from registry import DIM as REGISTRY_DIM
from registry import HEADS

import keras_margin as km
from keras_margin import binary_blocks, nontarget
from keras_margin.class_blocks import Curriculum
from keras_margin.nontarget import class_statistics, nontarget_logsumexp

BATCH, DIM = 5, 3
ROW_SCALES = np.array([0.0, 64.0, 30.0, 4.0, 0.5])
THRESHOLDS = np.array([-0.3, 0.1, 0.6, -2.0, 2.0])  # none of a row's classes is hard, some, all
NAMES = ("target", "log_b", "total", "hardest", "of embeddings", "of centers", "of scale")

SETTINGS = {
    "30": {"scale": 30.0},
    "scale a row": {"scale": ROW_SCALES},
    "as they are": {"scale": 8.0, "normalize_centers": False},
    "subcenters": {"scale": ROW_SCALES, "num_subcenters": 3},
    "total": {"scale": 30.0, "wants_total": True},
    "curriculum": {"scale": 30.0, "curriculum": 0.4},
    "all": {"scale": ROW_SCALES, "num_subcenters": 3, "wants_total": True, "curriculum": 0.4},
    "all, as they are": {
        "scale": ROW_SCALES / 8,
        "num_subcenters": 2,
        "wants_total": True,
        "curriculum": 0.4,
        "normalize_centers": False,
    },
}
every_setting = pytest.mark.parametrize("settings", SETTINGS)
LONG = pytest.mark.long
BLOCKS = [(11, n) for n in (1, 2, 5, 10, 11, 18)] + [(10, n) for n in (1, 2, 5, 9, 10, 17)]


@pytest.fixture
def compiled_passes(monkeypatch):
    monkeypatch.setattr(nontarget, "COMPILE_FROM", 0)


@functools.cache
def problem(num_classes, num_subcenters=1):
    """Embeddings, centers, labels, and upstream gradients of target, log B and total."""
    rng = np.random.default_rng(num_classes)
    embeddings = reference.unit(rng.normal(size=(BATCH, DIM)))
    centers = rng.normal(size=(num_classes * num_subcenters, DIM))
    centers *= rng.uniform(0.2, 3.0, (len(centers), 1))
    labels = np.array([0, num_classes - 1, 4, num_classes // 2, 4], "int32")
    return embeddings, centers, labels, rng.normal(size=(3, BATCH))


def slow(
    embeddings,
    centers,
    scale,
    labels,
    *,
    num_subcenters=1,
    normalize_centers=True,
    curriculum=None,
    wants_total=False,
):
    """Target, log B, total and hardest from the whole matrix of cosines, complex or not."""
    centers = reference.unit(centers) if normalize_centers else centers
    rows = (embeddings @ centers.T).reshape(len(embeddings), -1, num_subcenters)
    best = rows.real.argmax(axis=2)[:, :, None]
    cosines = np.take_along_axis(rows, best, axis=2)[:, :, 0]
    is_other = labels[:, None] != np.arange(cosines.shape[1])
    others = cosines
    if curriculum is not None:
        is_hard = cosines.real > THRESHOLDS[:, None]
        others = np.where(is_hard, cosines * (curriculum + cosines), cosines)
    logits = np.broadcast_to(scale, len(embeddings))[:, None] * others
    peak = np.where(is_other, logits.real, -np.inf).max(axis=1)
    mass = np.where(is_other, np.exp(logits - peak[:, None]), 0.0).sum(axis=1)
    return (
        cosines[~is_other],
        peak + np.log(mass),
        np.where(is_other, others, 0.0).sum(axis=1) * wants_total,
        np.where(is_other, cosines.real, -np.inf).max(axis=1),
    )


@functools.cache
def expected(num_classes, name):
    """The values, and the gradients of embeddings, centers and scale, by complex steps."""
    settings = dict(SETTINGS[name])
    scale = np.asarray(settings.pop("scale"))
    embeddings, centers, labels, upstream = problem(num_classes, settings.get("num_subcenters", 1))

    def total(x, w, s):
        values = slow(x, w, s, labels, **settings)
        return sum(of @ value for of, value in zip(upstream, values[:3], strict=True))

    return (
        *slow(embeddings, centers, scale, labels, **settings),
        reference.numerical_gradient(lambda x: total(x, centers, scale), embeddings),
        reference.numerical_gradient(lambda w: total(embeddings, w, scale), centers),
        reference.numerical_gradient(lambda s: total(embeddings, centers, s), scale),
    )


def values_and_gradients(embeddings, centers, scale, labels, upstream, curriculum=None, **settings):
    if curriculum is not None:
        numbers = THRESHOLDS, curriculum
        curriculum = Curriculum(*(tf.constant(each, embeddings.dtype) for each in numbers))
    with tf.GradientTape() as tape:
        tape.watch([embeddings, centers, scale])
        values = class_statistics(
            embeddings, centers, labels, scale, curriculum=curriculum, **settings
        )
        total = sum(tf.reduce_sum(of * value) for of, value in zip(upstream, values, strict=False))
    gradients = tape.gradient(
        total, [embeddings, centers, scale], unconnected_gradients=tf.UnconnectedGradients.ZERO
    )
    return *values, *gradients


def computed(num_classes, name, chunk_size, dtype="float64", run=RUNS["eager"]):
    settings = {**SETTINGS[name], "chunk_size": chunk_size}
    scale = settings.pop("scale")
    embeddings, centers, labels, upstream = problem(num_classes, settings.get("num_subcenters", 1))
    tensors = [tf.constant(each, dtype) for each in (embeddings, centers, scale)]
    upstream = [tf.constant(each, dtype) for each in upstream]
    function = functools.partial(values_and_gradients, labels=labels, upstream=upstream, **settings)
    return run(lambda *inputs: function(*inputs))(*tensors)


def assert_close(got, want, relative):
    for i, (value, other) in enumerate(zip(got, want, strict=True)):
        largest = np.abs(other).max()
        np.testing.assert_allclose(value, other, relative, relative * largest, err_msg=NAMES[i])


@every_setting
@pytest.mark.parametrize(("num_classes", "chunk_size"), BLOCKS)
def test_any_blocks(settings, num_classes, chunk_size):
    got = computed(num_classes, settings, chunk_size)
    assert_close(got, expected(num_classes, settings), 1e-12)


@every_setting
@pytest.mark.parametrize("chunk_size", [2, 11])
def test_float32(settings, chunk_size):
    got = computed(11, settings, chunk_size, "float32")
    assert {value.dtype for value in got} == {tf.float32}
    assert_close(got, expected(11, settings), 1e-5)


@pytest.mark.parametrize(
    ("settings", "chunk_size"), [("30", 11), ("curriculum", 4), ("all, as they are", 4)]
)
def test_compiled_passes(compiled_passes, settings, chunk_size):
    got = computed(11, settings, chunk_size, "float32")
    assert_close(got, expected(11, settings), 1e-5)


def test_any_run(run):
    assert_close(computed(11, "all", 2, run=run), expected(11, "all"), 1e-12)


def test_any_run_of_compiled_passes(compiled_passes, run):
    assert_close(computed(11, "all", 5, run=run), expected(11, "all"), 1e-12)


def test_passes_are_compiled_once_for_each_form(compiled_passes, monkeypatch):
    made = []
    monkeypatch.setattr(nontarget, "compiled", lambda function: made.append(1) or function)
    nontarget._compiled.cache_clear()
    for chunk_size in (3, 3, 7, 3):
        computed(11, "30", chunk_size)
    nontarget._compiled.cache_clear()
    assert len(made) == 4  # two forms, forward and backward


def test_few_classes_are_not_compiled(monkeypatch):
    made = []
    monkeypatch.setattr(nontarget, "compiled", lambda function: made.append(1) or function)
    computed(11, "30", 3)
    assert made == []


def test_no_gradient_of_a_scale_that_needs_none():
    settings = {"wants_scale_gradient": False, "wants_total": True, "chunk_size": 4}
    embeddings, centers, labels, upstream = problem(11)
    tensors = [tf.constant(each) for each in (embeddings, centers, 30.0)]
    got = values_and_gradients(*tensors, labels, upstream, **settings)
    want = expected(11, "total")
    assert_close(got[:6], want[:6], 1e-12)
    np.testing.assert_array_equal(got[6], 0.0)


@pytest.mark.parametrize(("settings", "keep"), [({}, 2**25), ({"num_subcenters": 2}, 0)])
def test_blocks_that_were_not_asked_for(monkeypatch, settings, keep):
    """Many classes: the same numbers from 3 blocks, whether their cosines are kept or not."""
    rng = np.random.default_rng(0)
    rows = 2500 * settings.get("num_subcenters", 1)
    tensors = [reference.unit(rng.normal(size=(3, DIM))), rng.normal(size=(rows, DIM)), 30.0]
    tensors = [tf.constant(each) for each in tensors]
    labels, upstream = np.array([833, 834, 2499], "int32"), rng.normal(size=(3, 3))
    settings = {**settings, "wants_total": True}
    whole = values_and_gradients(*tensors, labels, upstream, **settings)
    monkeypatch.setattr(nontarget, "COMPILE_FROM", 0)
    monkeypatch.setattr(nontarget, "KEEP", keep)
    monkeypatch.setattr(nontarget, "BLOCK", 3)
    got = values_and_gradients(*tensors, labels, upstream, **settings)
    assert_close(got, whole, 1e-12)


# Odd batches


@pytest.mark.parametrize(("chunk_size", "compile_from"), [(4, 0), (None, 4096)])
def test_batches_of_unknown_length(monkeypatch, chunk_size, compile_from):
    monkeypatch.setattr(nontarget, "COMPILE_FROM", compile_from)
    signature = [
        tf.TensorSpec((None, DIM), tf.float64),
        tf.TensorSpec((None,), tf.int32),
        tf.TensorSpec((3, None), tf.float64),
    ]
    _, centers, _, _ = problem(11)

    def of(x, labels, upstream):
        inputs = x, tf.constant(centers), tf.constant(30.0, tf.float64)
        settings = {"wants_total": True, "chunk_size": chunk_size}
        return values_and_gradients(*inputs, labels, tf.unstack(upstream), **settings)

    run = tf.function(of, input_signature=signature)
    rng = np.random.default_rng(1)
    for rows in (4, 1, 0):
        x = reference.unit(rng.normal(size=(rows, DIM)))
        labels, upstream = np.arange(rows, dtype="int32"), rng.normal(size=(3, rows))
        got = run(x, labels, upstream)
        assert [value.shape for value in got[:5]] == [(rows,)] * 4 + [(rows, DIM)]
        if rows == 0:
            np.testing.assert_array_equal(got[5], np.zeros((11, DIM)))
        else:
            assert_close(got[:4], slow(x, centers, 30.0, labels, wants_total=True), 1e-12)
            assert_close(got, of(*map(tf.constant, (x, labels, upstream))), 1e-12)


def all_blocks(embeddings, centers, labels, scale, **settings):
    """log B, the largest cosine and the gradients of sum(log B), for several sizes of blocks."""
    tensors = [tf.constant(each, "float32") for each in (embeddings, centers, scale)]
    for chunk_size in (1, 4, len(centers)):
        with tf.GradientTape() as tape:
            tape.watch(tensors)
            values = nontarget_logsumexp(
                *tensors[:2], labels, tensors[2], chunk_size=chunk_size, **settings
            )
        yield *values, *tape.gradient(values[0], tensors)


def test_zero_centers():
    """Cosine 0, and the gradient of a vector of length 1."""
    embeddings, centers, labels, _ = problem(11)
    centers = centers.copy()
    centers[[0, 3, 7]] = 0.0
    want = slow(embeddings, centers, 30.0, labels)
    by_complex_steps = reference.numerical_gradient(
        lambda w: slow(embeddings, w, 30.0, labels)[1].sum(), centers
    )
    for log_b, hardest, _, of_centers, _ in all_blocks(embeddings, centers, labels, 30.0):
        np.testing.assert_allclose(log_b, want[1], rtol=2e-6)
        np.testing.assert_allclose(hardest, want[3], rtol=1e-5, atol=1e-7)
        largest = np.abs(by_complex_steps).max()
        np.testing.assert_allclose(of_centers, by_complex_steps, rtol=1e-5, atol=1e-5 * largest)


def test_scale_of_0_counts_the_other_classes():
    embeddings, centers, labels, _ = problem(11)
    cosines = reference.cosines(embeddings, centers)
    others = (cosines.sum(axis=1) - cosines[np.arange(BATCH), labels]) / 10
    for log_b, _, of_x, of_w, of_scale in all_blocks(embeddings, centers, labels, np.zeros(BATCH)):
        np.testing.assert_allclose(log_b, np.full(BATCH, np.log(10.0)), rtol=1e-6)
        np.testing.assert_array_equal(of_x, 0.0)
        np.testing.assert_array_equal(of_w, 0.0)
        np.testing.assert_allclose(of_scale, others, rtol=1e-5, atol=1e-7)


def test_all_cosines_near_1():
    """Ten of eleven classes at cosine .99 and scale 64: no digits are lost to e^63."""
    around = 2 * np.pi * np.arange(11) / 11
    sine = np.sqrt(1 - 0.99**2)
    centers = np.stack([0.99 + 0 * around, sine * np.cos(around), sine * np.sin(around)], axis=1)
    embeddings = np.tile([1.0, 0.0, 0.0], (BATCH, 1))
    labels = np.arange(BATCH)
    by_complex_steps = reference.numerical_gradient(
        lambda w: slow(embeddings, w, 64.0, labels)[1].sum(), centers
    )
    for log_b, hardest, _, of_centers, of_scale in all_blocks(embeddings, centers, labels, 64.0):
        np.testing.assert_allclose(log_b, np.full(BATCH, 64 * 0.99 + np.log(10)), rtol=1e-6)
        np.testing.assert_allclose(hardest, np.full(BATCH, 0.99), rtol=1e-6)
        np.testing.assert_allclose(of_scale, 0.99 * BATCH, rtol=1e-5)
        # Shares of e^(64 * .99): a rounding step of the exponent is one of 4e-6.
        largest = np.abs(by_complex_steps).max()
        np.testing.assert_allclose(of_centers, by_complex_steps, rtol=5e-5, atol=5e-5 * largest)


def test_logits_far_apart():
    """One class at cosine 1, the others at -1: what they add is 0, and nothing overflows."""
    centers = np.concatenate([[[1.0, 0.0]], np.tile([[-1.0, 0.0]], (10, 1))])
    for log_b, hardest, *gradients in all_blocks([[1.0, 0.0]], centers, [5], 1e4):
        np.testing.assert_allclose(log_b, [1e4], rtol=1e-6)
        np.testing.assert_array_equal(hardest, [1.0])
        assert all(np.isfinite(each).all() for each in gradients)
    for log_b, _, *gradients in all_blocks([[1.0, 0.0]], centers, [0], 1e4):
        np.testing.assert_allclose(log_b, [-1e4 + np.log(10)], rtol=1e-6)
        assert all(np.isfinite(each).all() for each in gradients)


def test_labels_out_of_range(run, compiled_passes):
    """NaN in their rows, and the gradients of the other rows as without them."""
    embeddings, centers, _, _ = problem(11)
    good, bad = [0, 4], [1, 2, 3]
    labels = tf.constant([10, -1, 11, 2**40, 3], tf.int64)

    def of(x, w, y, rows):
        with tf.GradientTape() as tape:
            tape.watch([x, w])
            log_b, hardest = nontarget_logsumexp(x, w, y, 30.0, chunk_size=4)
            total = tf.reduce_sum(tf.gather(log_b, rows))
        return log_b, hardest, *tape.gradient(total, [x, w])

    x, w = tf.constant(embeddings), tf.constant(centers)
    log_b, hardest, of_x, of_w = run(lambda x, w, y: of(x, w, y, good))(x, w, labels)
    want = of(tf.gather(x, good), w, tf.gather(labels, good), [0, 1])
    assert np.isnan(log_b.numpy()[bad]).all()
    assert np.isnan(hardest.numpy()[bad]).all()
    got = [tf.gather(each, good) for each in (log_b, hardest, of_x)]
    assert_close([*got, of_w], want, 1e-12)


# Products in half precision


HALF = {"bfloat16": 1e-2, "float16": 2e-3}
every_half = pytest.mark.parametrize(("half", "relative"), HALF.items(), ids=HALF)


def many_classes(dtype, upstream=1.0, **settings):
    """Values and gradients, the latter divided by `upstream`, of 128 classes."""
    rng = np.random.default_rng(0)
    x, w = reference.unit(rng.normal(size=(8, 16))), rng.normal(size=(128, 16))
    labels, of = rng.integers(0, 128, 8).astype("int32"), rng.normal(size=(3, 8))
    tensors = [tf.constant(each, dtype) for each in (x, w, np.full(8, 30.0))]
    of = [tf.constant(each * upstream, dtype) for each in of]
    got = values_and_gradients(*tensors, labels, of, wants_total=True, **settings)
    assert {each.dtype for each in got} == {tf.as_dtype(dtype)}
    return [*got[:4], *(np.asarray(each, "float64") / upstream for each in got[4:])]


@functools.cache
def many_classes_exactly():
    return many_classes("float64")


def errors(got):
    return [
        np.linalg.norm(np.asarray(value) - want) / np.linalg.norm(want)
        for value, want in zip(got, many_classes_exactly(), strict=True)
    ]


@every_half
@pytest.mark.parametrize("chunk_size", [128, 3])
def test_half_precision(compiled_passes, half, relative, chunk_size):
    found = errors(many_classes("float32", chunk_size=chunk_size, product_dtype=half))
    assert max(found) < relative
    assert min(found[4:6]) > relative / 40  # the products do round


@every_half
def test_half_precision_does_not_grow_worse_with_blocks(compiled_passes, half, relative):
    """64 blocks: gradients of the embeddings add up in float32."""
    one, many = (
        errors(many_classes("float32", chunk_size=size, product_dtype=half)) for size in (128, 2)
    )
    assert max(many) < 1.5 * max(one)


@every_half
@pytest.mark.parametrize("upstream", [1e-8, 1e-25, 1e6])
def test_half_precision_of_small_and_large_gradients(compiled_passes, half, relative, upstream):
    """1e-8 / 128 is nothing in float16, and loss scaling brings what is infinite there."""
    got = many_classes("float32", upstream, chunk_size=128, product_dtype=half)
    assert max(errors(got)) < relative


@pytest.mark.parametrize("chunk_size", [128, 3])
def test_half_precision_of_no_gradient(compiled_passes, chunk_size):
    x, w = (
        tf.random.stateless_normal((8, 16), (1, 2)),
        tf.random.stateless_normal((128, 16), (3, 4)),
    )
    zeros, labels = [tf.zeros(8)] * 3, np.arange(8, dtype="int32")
    settings = {"wants_total": True, "product_dtype": "float16", "chunk_size": chunk_size}
    for gradient in values_and_gradients(x, w, tf.fill(8, 30.0), labels, zeros, **settings)[4:]:
        np.testing.assert_array_equal(gradient, 0.0)


def test_half_precision_does_not_hide_an_overflow(compiled_passes):
    """Loss scaling looks for what is not finite."""
    x, w = (
        tf.random.stateless_normal((8, 16), (1, 2)),
        tf.random.stateless_normal((128, 16), (3, 4)),
    )
    upstream, labels = [tf.fill(8, np.inf)] * 3, np.arange(8, dtype="int32")
    settings = {"wants_total": True, "product_dtype": "float16", "chunk_size": 128}
    got = values_and_gradients(x, w, tf.fill(8, 30.0), labels, upstream, **settings)
    assert not np.isfinite(got[5]).any()


@every_half
def test_half_precision_sums_in_float32(compiled_passes, half, relative):
    """n + 1 is no number of that dtype, the product with a row of ones is: three times."""
    n = {"bfloat16": 256.0, "float16": 2048.0}[half]
    settings = {"normalize_centers": False, "product_dtype": half, "chunk_size": 1}

    x, w = tf.constant([[n, 1.0]]), tf.constant([[0.0, 0.0], [1.0, 1.0]])
    labels = np.array([0], "int32")
    values = class_statistics(x, w, labels, 1.0, **settings)
    np.testing.assert_array_equal(values.log_b, [n + 1])

    x, w = tf.constant([[n], [1.0]]), tf.constant([[0.0], [0.01]])
    upstream = [tf.zeros(2), tf.ones(2), tf.zeros(2)]
    labels = np.array([0, 0], "int32")
    gradients = values_and_gradients(x, w, tf.ones(2), labels, upstream, **settings)[4:]
    np.testing.assert_array_equal(gradients[1], [[0.0], [n + 1]])

    x, w = tf.constant([[0.5]]), tf.constant([[n], [1.0]])
    upstream = [tf.ones(1)] * 3
    labels = np.array([0], "int32")
    gradients = values_and_gradients(x, w, tf.ones(1), labels, upstream, **settings)[4:]
    np.testing.assert_array_equal(gradients[0], [[n + 1]])


def test_half_precision_where_it_does_not_pay():
    """Few classes are multiplied in float32 whatever the policy."""
    for got, want in zip(
        many_classes("float32", product_dtype="bfloat16"), many_classes("float32"), strict=True
    ):
        np.testing.assert_array_equal(got, want)


# The heads


CLASSIFIERS = {name: entry for name, entry in HEADS.items() if entry.has_classes}
every_classifier = pytest.mark.parametrize("entry", CLASSIFIERS.values(), ids=CLASSIFIERS)


def built(entry, **kwargs):
    head = entry.make(**kwargs)
    head.build((None, REGISTRY_DIM))
    values = np.sin(np.arange(np.prod(head.centers.shape))).reshape(head.centers.shape)
    head.centers.assign(values)
    return head


def rows(number=12):
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 5, number)
    labels[:5] = np.arange(5)
    return rng.normal(0.0, 3.0, (number, REGISTRY_DIM)).astype("float32"), labels


def trained_once(head):
    """Losses, cosines, gradients and state of a training call."""
    x, labels = rows()
    x = tf.constant(x)
    trained = [variable.value for variable in head.trainable_variables]
    with tf.GradientTape() as tape:
        tape.watch(x)
        results = head.loss_and_cosines(x, labels)
    gradients = tape.gradient(results[0], [x, *trained])
    return [*results, *gradients, *head.non_trainable_variables]


@every_classifier
@pytest.mark.parametrize("chunk_size", [1, 2])
def test_every_head_takes_a_chunk_size(entry, chunk_size):
    head, whole = built(entry, chunk_size=chunk_size), built(entry)
    assert head.get_config()["chunk_size"] == chunk_size
    for got, want in zip(trained_once(head), trained_once(whole), strict=True):
        want = np.asarray(want)
        np.testing.assert_allclose(got, want, 1e-5, 1e-5 * max(1.0, np.abs(want).max(initial=0)))


def test_a_pass_for_statistics_alone_keeps_nothing():
    """AdaCos' scale comes from a pass of its own, which costs one product and no memory."""
    rng = np.random.default_rng(0)
    x, w = (tf.constant(rng.normal(size=(rows, DIM)), tf.float32) for rows in (3, 11))
    shared = {"num_subcenters": 1, "product_dtype": None, "normalize_centers": True}
    for chunk_size in (None, 11, 99):
        for wants_gradient in (True, False):
            form, _ = nontarget.choose_form(
                x, w, chunk_size=chunk_size, wants_gradient=wants_gradient, **shared
            )
            assert form.keeps_cosines is wants_gradient
            assert form.size == 11
    labels = np.array([0, 3, 10], "int32")
    for got, want in zip(
        class_statistics(x, w, labels, 8.0, wants_gradient=False),
        class_statistics(x, w, labels, 8.0),
        strict=True,
    ):
        np.testing.assert_allclose(got, want, rtol=1e-6)


@pytest.mark.parametrize("num_classes", [8192, 131_072, 1_000_000])
def test_blocks_chosen_by_themselves_do_not_have_rows_of_whole_cache_pages(num_classes):
    """Where 4096 floats follow each other, a column of them shares few lines of the cache."""
    w = keras.KerasTensor((num_classes, DIM), "float32")
    shared = {"num_subcenters": 1, "product_dtype": None, "normalize_centers": True}
    for rows in (1024, 4096):
        x = keras.KerasTensor((rows, DIM), "float32")
        form, _ = nontarget.choose_form(x, w, chunk_size=None, **shared)
        assert form.keeps_cosines is (rows * num_classes <= 2**25)
        assert 1024 <= form.size < num_classes
        assert form.size % 512
    form, _ = nontarget.choose_form(x, w, chunk_size=4096, **shared)
    assert form.size <= 4096  # never more than was asked for


@every_classifier
def test_every_head_hands_its_chunk_size_on(monkeypatch, entry):
    """Each pass over the classes, in training and in evaluation."""
    seen = []
    for module in (nontarget, binary_blocks):
        choose = module.choose_form
        spy = functools.partial(spied, seen, choose)
        monkeypatch.setattr(module, "choose_form", spy)
    head = built(entry, chunk_size=2)
    for training in (True, False):
        head.loss(*rows(), training=training)
    assert len(seen) >= 2
    assert set(seen) == {2}


def spied(seen, function, *inputs, chunk_size, **form):
    seen.append(chunk_size)
    return function(*inputs, chunk_size=chunk_size, **form)


@every_classifier
def test_every_head_evaluates_in_blocks(entry):
    x, labels = rows()
    head, whole = built(entry, chunk_size=2), built(entry)
    for got, want in zip(
        head.loss_and_cosines(x, labels, training=False),
        whole.loss_and_cosines(x, labels, training=False),
        strict=True,
    ):
        np.testing.assert_allclose(got, want, 1e-5, 1e-6)


@pytest.mark.parametrize("options", [{"label_smoothing": 0.2}, {"focal_gamma": 2.0}])
@pytest.mark.parametrize("make", [km.ArcFace, km.CurricularFace])
def test_options_of_the_loss_in_blocks(make, options):
    settings = {"num_subcenters": 2, "seed": 0, **options}
    blocks, whole = (make(5, 0.3, 8.0, chunk_size=size, **settings) for size in (2, None))
    blocks.build((None, REGISTRY_DIM))
    whole.build((None, REGISTRY_DIM))
    for got, want in zip(trained_once(blocks), trained_once(whole), strict=True):
        np.testing.assert_allclose(got, want, 1e-5, 1e-6)


@pytest.mark.parametrize(
    ("chunk_size", "must"),
    [
        (0, "be at least 1. Received: chunk_size=0"),
        (-3, "be at least 1. Received: chunk_size=-3"),
        (1.5, "be a whole number. Received: chunk_size=1.5"),
        ("2", "be a whole number. Received: chunk_size='2'"),
        (True, "be a whole number. Received: chunk_size=True"),
    ],
)
def test_chunk_sizes_out_of_range(chunk_size, must):
    message = f"^{re.escape(f'`chunk_size` must {must}')}$"
    for make in (km.ArcFace, km.SphereFace2, km.SoftmaxHead):
        with pytest.raises(ValueError, match=message):
            make(5, chunk_size=chunk_size)
    with pytest.raises(ValueError, match=message):
        nontarget_logsumexp(tf.eye(2), tf.eye(2), [0, 1], chunk_size=chunk_size)


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
def test_mixed_precision_of_many_classes(compiled_passes, policy):
    x, labels = rows()
    plain = km.ArcFace(5, 0.3, 8.0, seed=0, chunk_size=2)
    mixed = km.ArcFace(5, 0.3, 8.0, seed=0, chunk_size=2, dtype=policy)
    got, want = mixed.loss(x, labels).numpy(), plain.loss(x, labels).numpy()
    assert got.dtype == "float32"
    assert not np.array_equal(got, want)
    np.testing.assert_allclose(got, want, rtol=HALF[policy[6:]])


def fitted(jit_compile, chunk_size):
    x, labels = rows(16)
    backbone = keras.Sequential(
        [keras.Input((REGISTRY_DIM,)), keras.layers.Dense(3, kernel_initializer="identity")]
    )
    head = km.ArcFace(5, 0.3, 8.0, num_subcenters=2, seed=0, chunk_size=chunk_size)
    model = km.EmbeddingModel(backbone, head)
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), jit_compile=jit_compile)
    model.fit(x, labels, batch_size=8, epochs=2, shuffle=False, verbose=0)
    return model.get_weights()


@functools.cache
def fitted_whole():
    return fitted(False, None)


@pytest.mark.parametrize(
    ("jit_compile", "compile_from"),
    [
        (True, 4096),
        (False, 0),
        pytest.param(True, 0, marks=LONG),
        pytest.param(False, 4096, marks=LONG),
        pytest.param("auto", 0, marks=LONG),
    ],
)
def test_fit_in_blocks(monkeypatch, jit_compile, compile_from):
    want = fitted_whole()
    monkeypatch.setattr(nontarget, "COMPILE_FROM", compile_from)
    for got, other in zip(fitted(jit_compile, 2), want, strict=True):
        np.testing.assert_allclose(got, other, 1e-5, 1e-5)
