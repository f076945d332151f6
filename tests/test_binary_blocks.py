"""SphereFace2's pass over the classes in blocks: any blocks, run in any way, against float64."""

import functools

import keras
import numpy as np
import pytest
import reference
import tensorflow as tf
from conftest import RUNS

import keras_margin as km
from keras_margin import nontarget
from keras_margin.binary_blocks import Curve, bend, softplus_of_others

BATCH, DIM, BIAS = 5, 3, 0.7
NAMES = ("target", "total", "hardest", "of embeddings", "of centers", "of bias")
SETTINGS = {
    "power 3": {"curve": Curve(8.0, 3.0, 0.3)},
    "power 1": {"curve": Curve(40.0, 1.0, 0.0)},
    "power 1.5": {"curve": Curve(8.0, 1.5, 0.3)},
    "subcenters": {"curve": Curve(8.0, 3.0, 0.3), "num_subcenters": 3},
    "as they are": {"curve": Curve(2.0, 3.0, 0.3), "normalize_centers": False},
}
every_setting = pytest.mark.parametrize("settings", SETTINGS)
BLOCKS = [(11, n) for n in (1, 2, 5, 10, 11, 18)] + [(10, n) for n in (1, 2, 5, 9, 10, 17)]


@pytest.fixture
def compiled_passes(monkeypatch):
    monkeypatch.setattr(nontarget, "COMPILE_FROM", 0)


@functools.cache
def problem(num_classes, num_subcenters=1):
    """Embeddings, centers, labels, and upstream gradients of target and total."""
    rng = np.random.default_rng(num_classes)
    embeddings = reference.unit(rng.normal(size=(BATCH, DIM)))
    centers = reference.unit(rng.normal(size=(num_classes * num_subcenters, DIM)))
    centers *= rng.uniform(0.2, 0.95, (len(centers), 1))
    labels = np.array([0, num_classes - 1, 4, num_classes // 2, 4], "int32")
    return embeddings, centers, labels, rng.normal(size=(2, BATCH))


def softplus(z):
    near = np.where(z.real > 0, -z, z)
    return np.where(z.real > 0, z, 0.0) + np.log(1.0 + np.exp(near))


def slow(embeddings, centers, bias, labels, *, curve, num_subcenters=1, normalize_centers=True):
    """Target, total and hardest from the whole matrix of cosines, complex or not."""
    centers = reference.unit(centers) if normalize_centers else centers
    rows = (embeddings @ centers.T).reshape(len(embeddings), -1, num_subcenters)
    best = rows.real.argmax(axis=2)[:, :, None]
    cosines = np.take_along_axis(rows, best, axis=2)[:, :, 0]
    is_other = labels[:, None] != np.arange(cosines.shape[1])
    half = np.where(cosines.real < -1.0, 0.0, (cosines + 1.0) / 2.0)
    bent = 2.0 * half**curve.power - 1.0
    terms = softplus(curve.scale * (bent + curve.margin) + bias)
    return (
        cosines[~is_other],
        np.where(is_other, terms, 0.0).sum(axis=1),
        np.where(is_other, cosines.real, -np.inf).max(axis=1),
    )


@functools.cache
def expected(num_classes, name):
    """The values, and the gradients of embeddings, centers and bias, by complex steps."""
    settings = SETTINGS[name]
    embeddings, centers, labels, upstream = problem(num_classes, settings.get("num_subcenters", 1))

    def total(x, w, b):
        values = slow(x, w, b, labels, **settings)
        return sum(of @ value for of, value in zip(upstream, values[:2], strict=True))

    bias = np.array(BIAS)
    return (
        *slow(embeddings, centers, bias, labels, **settings),
        reference.numerical_gradient(lambda x: total(x, centers, bias), embeddings),
        reference.numerical_gradient(lambda w: total(embeddings, w, bias), centers),
        reference.numerical_gradient(lambda b: total(embeddings, centers, b), bias),
    )


def values_and_gradients(embeddings, centers, bias, labels, upstream, **settings):
    settings = {
        "num_subcenters": 1,
        "normalize_centers": True,
        "chunk_size": None,
        "product_dtype": None,
        **settings,
    }
    with tf.GradientTape() as tape:
        tape.watch([embeddings, centers, bias])
        values = softplus_of_others(embeddings, centers, labels, bias, **settings)
        total = sum(tf.reduce_sum(of * value) for of, value in zip(upstream, values, strict=False))
    return *values, *tape.gradient(total, [embeddings, centers, bias])


def computed(num_classes, name, chunk_size, dtype="float64", run=RUNS["eager"]):
    settings = {**SETTINGS[name], "chunk_size": chunk_size}
    embeddings, centers, labels, upstream = problem(num_classes, settings.get("num_subcenters", 1))
    tensors = [tf.constant(each, dtype) for each in (embeddings, centers, BIAS)]
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


def test_any_run(run):
    got = computed(11, "subcenters", 4, run=run)
    assert_close(got, expected(11, "subcenters"), 1e-12)


@pytest.mark.parametrize(("settings", "chunk_size"), [("power 1.5", 11), ("subcenters", 4)])
def test_compiled_passes(compiled_passes, settings, chunk_size):
    got = computed(11, settings, chunk_size, "float32")
    assert_close(got, expected(11, settings), 1e-5)


def test_compiled_passes_in_compiled_code(compiled_passes):
    got = computed(11, "subcenters", 4, "float32", RUNS["xla"])
    assert_close(got, expected(11, "subcenters"), 1e-5)


def test_passes_are_compiled_once_for_each_form(compiled_passes, monkeypatch):
    made = []
    monkeypatch.setattr(nontarget, "compiled", lambda function: made.append(1) or function)
    nontarget._compiled.cache_clear()
    for settings, chunk_size in (("power 3", 3), ("power 3", 3), ("power 1", 3), ("power 3", 3)):
        computed(11, settings, chunk_size)
    nontarget._compiled.cache_clear()
    assert len(made) == 4  # two curves, forward and backward


LONG = pytest.mark.long


@pytest.mark.parametrize(
    ("settings", "keep"), [pytest.param({}, 2**25, marks=LONG), ({"num_subcenters": 2}, 0)]
)
def test_blocks_that_were_not_asked_for(monkeypatch, settings, keep):
    """Many classes: the same numbers from 3 blocks, whether their cosines are kept or not."""
    rng = np.random.default_rng(0)
    rows = 2500 * settings.get("num_subcenters", 1)
    tensors = [reference.unit(rng.normal(size=(3, DIM))), rng.normal(size=(rows, DIM)), BIAS]
    tensors = [tf.constant(each, tf.float64) for each in tensors]
    labels, upstream = np.array([833, 834, 2499], "int32"), rng.normal(size=(2, 3))
    settings = {**settings, "curve": Curve(8.0, 3.0, 0.3)}
    whole = values_and_gradients(*tensors, labels, upstream, **settings)
    monkeypatch.setattr(nontarget, "COMPILE_FROM", 0)
    monkeypatch.setattr(nontarget, "KEEP", keep)
    monkeypatch.setattr(nontarget, "BLOCK", 3)
    got = values_and_gradients(*tensors, labels, upstream, **settings)
    assert_close(got, whole, 1e-12)


# Odd batches


@pytest.mark.parametrize("chunk_size", [4, None])
def test_batches_of_unknown_length(chunk_size):
    signature = [
        tf.TensorSpec((None, DIM), tf.float64),
        tf.TensorSpec((None,), tf.int32),
        tf.TensorSpec((2, None), tf.float64),
    ]
    _, centers, _, _ = problem(11)
    curve = Curve(8.0, 3.0, 0.3)

    def of(x, labels, upstream):
        inputs = x, tf.constant(centers), tf.constant(BIAS, tf.float64), labels
        upstream = tf.unstack(upstream)
        return values_and_gradients(*inputs, upstream, curve=curve, chunk_size=chunk_size)

    run = tf.function(of, input_signature=signature)
    rng = np.random.default_rng(1)
    for rows in (4, 1, 0):
        x = reference.unit(rng.normal(size=(rows, DIM)))
        labels, upstream = np.arange(rows, dtype="int32"), rng.normal(size=(2, rows))
        got = run(x, labels, upstream)
        assert [value.shape for value in got[:4]] == [(rows,)] * 3 + [(rows, DIM)]
        if rows == 0:
            np.testing.assert_array_equal(got[4], np.zeros((11, DIM)))
            np.testing.assert_array_equal(got[5], 0.0)
        else:
            assert_close(got[:3], slow(x, centers, BIAS, labels, curve=curve), 1e-12)
            assert_close(got, of(*map(tf.constant, (x, labels, upstream))), 1e-12)


def all_blocks(embeddings, centers, labels, curve, bias=BIAS):
    """Values, and gradients of the sum of target and total, for several sizes of blocks."""
    tensors = [tf.constant(each, "float32") for each in (embeddings, centers, bias)]
    upstream = [tf.ones(len(labels))] * 2
    for size in (1, 4, len(centers)):
        yield values_and_gradients(*tensors, labels, upstream, curve=curve, chunk_size=size)


def by_complex_steps(embeddings, centers, labels, curve):
    return reference.numerical_gradient(
        lambda w: sum(slow(embeddings, w, BIAS, labels, curve=curve)[:2]).sum(), centers
    )


def test_zero_centers():
    embeddings, centers, labels, _ = problem(11)
    centers, curve = centers.copy(), Curve(8.0, 3.0, 0.3)
    centers[[0, 3, 7]] = 0.0
    want = slow(embeddings, centers, BIAS, labels, curve=curve)
    want_of_centers = by_complex_steps(embeddings, centers, labels, curve)
    for *values, _, of_centers, _ in all_blocks(embeddings, centers, labels, curve):
        assert_close(values, want, 1e-5)
        largest = np.abs(want_of_centers).max()
        np.testing.assert_allclose(of_centers, want_of_centers, 1e-5, 1e-5 * largest)


@pytest.mark.parametrize("power", [1.0, 1.5, 3.0])
def test_cosines_of_1_and_minus_1(power):
    """Rounding leads beyond -1, where a power would be NaN."""
    x = np.array([[0.6, -0.8], [0.1, 0.3]])
    x /= np.linalg.norm(x, axis=1, keepdims=True)
    centers = np.concatenate([x, -x, 3.0 * x, -0.7 * x])
    labels = np.array([0, 1], "int32")
    curve = Curve(8.0, power, 0.3)
    want = slow(x, centers, BIAS, labels, curve=curve)
    for target, total, hardest, *gradients in all_blocks(x, centers, labels, curve):
        np.testing.assert_allclose(target, [1.0, 1.0], rtol=1e-6)
        np.testing.assert_allclose(hardest, [1.0, 1.0], rtol=1e-6)
        np.testing.assert_allclose(total, want[1], rtol=1e-5)
        assert all(np.isfinite(each).all() for each in gradients)


@pytest.mark.parametrize("bias", [-1e4, 1e4])
def test_logits_of_any_size(bias):
    embeddings, centers, labels, _ = problem(11)
    curve = Curve(64.0, 3.0, 0.3)
    want = slow(embeddings, centers, bias, labels, curve=curve)[1]
    for _, total, _, *gradients in all_blocks(embeddings, centers, labels, curve, bias):
        np.testing.assert_allclose(total, want, rtol=1e-5)
        assert all(np.isfinite(each).all() for each in gradients)
        np.testing.assert_allclose(gradients[2], 50.0 * (bias > 0), rtol=1e-6)


def test_bend():
    np.testing.assert_allclose(bend(tf.constant([-1.0, 0.0, 1.0]), 3.0), [-1.0, -0.75, 1.0])
    np.testing.assert_array_equal(bend(tf.constant([-1.0001]), 1.5), [-1.0])


# Products in half precision


HALF = {"bfloat16": 1e-2, "float16": 2e-3}
every_half = pytest.mark.parametrize(("half", "relative"), HALF.items(), ids=HALF)


def many_classes(dtype, upstream=1.0, **settings):
    """Values and gradients, divided by `upstream` where that makes sense, of 128 classes."""
    rng = np.random.default_rng(0)
    x, w = reference.unit(rng.normal(size=(8, 16))), rng.normal(size=(128, 16))
    labels, of = rng.integers(0, 128, 8).astype("int32"), rng.uniform(0.5, 1.0, size=(2, 8))
    tensors = [tf.constant(each, dtype) for each in (x, w, BIAS)]
    of = [tf.constant(each, dtype) * upstream for each in of]
    settings = {"curve": Curve(8.0, 3.0, 0.3), **settings}
    got = values_and_gradients(*tensors, labels, of, **settings)
    assert {each.dtype for each in got} == {tf.as_dtype(dtype)}
    divisor = upstream if 0.0 < upstream < np.inf else 1.0
    return [*got[:3], *(np.asarray(each, "float64") / divisor for each in got[3:])]


@functools.cache
def many_classes_exactly():
    return many_classes("float64")


def errors(got):
    return [
        np.linalg.norm(np.asarray(value) - want) / np.linalg.norm(want)
        for value, want in zip(got, many_classes_exactly(), strict=True)
    ]


@every_half
def test_half_precision(compiled_passes, half, relative):
    """In 64 blocks as well as in one: what they add is added in float32."""
    one, many = (
        errors(many_classes("float32", chunk_size=size, product_dtype=half)) for size in (128, 2)
    )
    assert max(one) < relative
    assert max(many) < min(relative, 1.5 * max(one))
    assert min(*one[3:5], *many[3:5]) > relative / 40  # the products do round


@every_half
@pytest.mark.parametrize("upstream", [1e-8, 1e-25, 1e6])
def test_half_precision_of_small_and_large_gradients(compiled_passes, half, relative, upstream):
    got = many_classes("float32", upstream, chunk_size=2, product_dtype=half)
    assert max(errors(got)) < relative


def test_half_precision_of_no_gradient(compiled_passes):
    got = many_classes("float32", 0.0, chunk_size=2, product_dtype="float16")
    for gradient in got[3:]:
        np.testing.assert_array_equal(gradient, 0.0)


def test_half_precision_does_not_hide_an_overflow(compiled_passes):
    """Loss scaling looks for what is not finite."""
    got = many_classes("float32", np.inf, chunk_size=2, product_dtype="float16")
    assert not np.isfinite(got[4]).any()


def test_half_precision_where_it_does_not_pay():
    """Few classes are multiplied in float32 whatever the policy."""
    for got, want in zip(
        many_classes("float32", product_dtype="bfloat16"), many_classes("float32"), strict=True
    ):
        np.testing.assert_array_equal(got, want)


# The head


def batch(rows=16):
    rng = np.random.default_rng(0)
    return rng.normal(size=(rows, 4)).astype("float32"), rng.integers(0, 5, rows)


def test_mixed_precision_of_many_classes(compiled_passes):
    x, labels = batch()
    settings = {"seed": 0, "chunk_size": 2}
    plain = km.SphereFace2(5, **settings).loss(x, labels).numpy()
    for policy in ("mixed_bfloat16", "mixed_float16"):
        got = km.SphereFace2(5, dtype=policy, **settings).loss(x, labels).numpy()
        assert got.dtype == "float32"
        assert not np.array_equal(got, plain)
        np.testing.assert_allclose(got, plain, rtol=5 * HALF[policy[6:]])


def fitted(jit_compile, chunk_size):
    x, labels = batch()
    backbone = keras.Sequential(
        [keras.Input((4,)), keras.layers.Dense(3, kernel_initializer="identity")]
    )
    head = km.SphereFace2(5, 0.3, 8.0, num_subcenters=2, seed=0, chunk_size=chunk_size)
    model = km.EmbeddingModel(backbone, head)
    model.compile(keras.optimizers.SGD(0.01, momentum=0.9), jit_compile=jit_compile)
    model.fit(x, labels, batch_size=8, epochs=2, shuffle=False, verbose=0)
    return model.get_weights()


@functools.cache
def fitted_whole():
    return fitted(False, None)


@pytest.mark.parametrize(
    ("jit_compile", "compile_from"),
    [(False, 0), pytest.param(False, 4096, marks=LONG), pytest.param(True, 0, marks=LONG)],
)
def test_fit_in_blocks(monkeypatch, jit_compile, compile_from):
    want = fitted_whole()
    monkeypatch.setattr(nontarget, "COMPILE_FROM", compile_from)
    for got, other in zip(fitted(jit_compile, 2), want, strict=True):
        np.testing.assert_allclose(got, other, 1e-5, 1e-5)
