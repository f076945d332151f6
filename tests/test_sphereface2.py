"""SphereFace2 against NumPy: its binary losses, its bias, and its Keras loss for functional use."""

import math
import re

import keras
import numpy as np
import pytest
import reference
import scipy.optimize
import scipy.special
from backends import WIDEST, rounded, value_and_gradients
from keras import ops

import keras_margin as km

CLASSES, DIM = 6, 4
SETTINGS = {
    "defaults": {},
    "large scale": {"scale": 64.0, "margin": 0.5, "positive_weight": 0.8},
    "power 1": {"similarity_power": 1.0, "margin": 0.0, "loss_weight": 3.0},
    "power 2.5": {"similarity_power": 2.5, "scale": 8.0},
}
every_setting = pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS.keys())


def exactly(message):
    return f"^{re.escape(message)}$"


def built(head):
    head.build((None, DIM))
    rng = np.random.default_rng(100)
    rows = head.centers.shape[0]
    head.centers.assign(rng.normal(size=(rows, DIM)) * rng.uniform(0.3, 3.0, (rows, 1)))
    return head


def sphereface2(**settings):
    return built(km.SphereFace2(CLASSES, dtype=WIDEST, **settings))


def random_batch(rows=7):
    rng = np.random.default_rng(0)
    return rng.normal(0.0, 2.0, (rows, DIM)), rng.integers(0, CLASSES, rows)


def slow_logits(cosines, bias, labels=None, *, margin=0.4, scale=40.0, similarity_power=3.0):
    logits = np.zeros(cosines.shape, np.result_type(cosines, bias))
    for i, k in np.ndindex(cosines.shape):
        bent = 2.0 * ((cosines[i, k] + 1.0) / 2.0) ** similarity_power - 1.0
        if labels is not None:
            bent += -margin if k == labels[i] else margin
        logits[i, k] = scale * bent + bias
    return logits


def slow_loss(embeddings, centers, bias, labels, positive_weight=0.7, loss_weight=50.0, **settings):
    """One yes-or-no question after the other; takes complex numbers."""
    logits = slow_logits(reference.cosines(embeddings, centers), bias, labels, **settings)
    losses = np.zeros(len(labels), logits.dtype)
    for i, k in np.ndindex(logits.shape):
        if k == labels[i]:
            losses[i] += positive_weight * np.log1p(np.exp(-logits[i, k]))
        else:
            losses[i] += (1.0 - positive_weight) * np.log1p(np.exp(logits[i, k]))
    return loss_weight / settings.get("scale", 40.0) * losses


def logit_settings(settings):
    names = ("margin", "scale", "similarity_power")
    return {name: settings[name] for name in names if name in settings}


# Values and gradients


@every_setting
def test_logits(settings):
    embeddings, labels = random_batch()
    head = sphereface2(**settings)
    cosines = reference.cosines(embeddings, ops.convert_to_numpy(head.centers))
    bias, own = float(head.bias), logit_settings(settings)
    np.testing.assert_allclose(
        head(embeddings), slow_logits(cosines, bias, **own), rtol=rounded(1e-10)
    )
    want = slow_logits(cosines, bias, labels, **own)
    np.testing.assert_allclose(head(embeddings, labels), want, rtol=rounded(1e-10))
    np.testing.assert_array_equal(head(embeddings, labels, training=False), head(embeddings))


@every_setting
def test_loss_and_gradients(settings):
    embeddings, labels = random_batch()
    head = sphereface2(**settings)
    head.bias.assign(1.3)
    point = [embeddings, ops.convert_to_numpy(head.centers), np.array(1.3)]
    trained = [head.centers, head.bias]
    loss, *got = value_and_gradients(
        lambda x: head.loss(x, labels), [embeddings], trained, [head.steps]
    )
    want = slow_loss(*point, labels, **settings)
    np.testing.assert_allclose(loss, want, rtol=rounded(1e-9), atol=rounded(0.0, 1e-8))
    for i, gradient in enumerate(got):

        def total(moved, i=i):
            return slow_loss(*point[:i], moved, *point[i + 1 :], labels, **settings).sum()

        want = reference.numerical_gradient(total, point[i])
        np.testing.assert_allclose(gradient, want, rtol=rounded(1e-8), atol=rounded(1e-10))


def test_evaluation_asks_the_same_questions_without_margin():
    embeddings, labels = random_batch()
    head = sphereface2()
    point = embeddings, ops.convert_to_numpy(head.centers), float(head.bias)
    want = slow_loss(*point, labels, margin=0.0)
    np.testing.assert_allclose(
        head.loss(embeddings, labels, training=False), want, rtol=rounded(1e-9)
    )


def test_loss_and_cosines():
    embeddings, labels = random_batch()
    head = sphereface2()
    loss, target, hardest = head.loss_and_cosines(embeddings, labels)
    cosines = reference.cosines(embeddings, ops.convert_to_numpy(head.centers))
    rows = np.arange(len(labels))
    np.testing.assert_array_equal(loss, head.loss(embeddings, labels))
    np.testing.assert_allclose(target, cosines[rows, labels], rtol=rounded(1e-12))
    cosines[rows, labels] = -2.0
    np.testing.assert_allclose(hardest, cosines.max(axis=1), rtol=rounded(1e-12))


def test_subcenters():
    embeddings, labels = random_batch()
    head = sphereface2(num_subcenters=3)
    cosines = reference.cosines(embeddings, ops.convert_to_numpy(head.centers), 3)
    want = slow_logits(cosines, float(head.bias), labels)
    np.testing.assert_allclose(head(embeddings, labels), want, rtol=rounded(1e-10))


def test_ignored_rows():
    embeddings, labels = random_batch()
    want = np.array(sphereface2().loss(embeddings, labels))
    labels[[1, 4]] = -1
    want[[1, 4]] = 0.0
    head = sphereface2(ignore_class=-1)
    np.testing.assert_allclose(head.loss(embeddings, labels), want, rtol=rounded(1e-12))
    assert int(head.steps) == 1
    head.loss(embeddings, np.full(7, -1))
    assert int(head.steps) == 1


@pytest.mark.parametrize("power", [1.5, 3.0])
def test_cosine_of_minus_one_is_finite(run, power):
    """0 to a power, and a rounding step under it, where the power would be NaN."""
    head = built(km.SphereFace2(CLASSES, similarity_power=power))
    rows = reference.unit(np.random.default_rng(3).normal(size=(CLASSES, DIM))).astype("float32")
    head.centers.assign(rows)

    def loss_and_gradients(embeddings, labels):
        return value_and_gradients(
            lambda x: head.loss(x, labels), [embeddings], [head.centers], [head.steps]
        )

    below = np.nextafter(np.float32(-1), np.float32(-2))
    assert np.isfinite(head._logits(ops.convert_to_tensor([below, -1.0]))).all()
    labels = np.concatenate([np.arange(CLASSES), np.roll(np.arange(CLASSES), 1)])
    compiled = run(loss_and_gradients, state=head.variables)
    got = compiled(np.concatenate([-rows, -rows]), labels)
    assert all(np.isfinite(value).all() for value in got)


# The bias


@pytest.mark.parametrize(("num_classes", "bias"), [(10, 12.950), (1000, 7.943), (85742, 3.488)])
def test_bias_of_the_published_code(num_classes, bias):
    assert km.SphereFace2(num_classes).initial_bias() == pytest.approx(bias, abs=5e-4)


@every_setting
@pytest.mark.parametrize("num_classes", [6, 1000])
def test_loss_has_no_slope_in_the_bias_when_all_cosines_are_0(num_classes, settings):
    weight, scale = settings.get("positive_weight", 0.7), settings.get("scale", 40.0)
    margin, power = settings.get("margin", 0.4), settings.get("similarity_power", 3.0)
    bent = 2.0 * 0.5**power - 1.0

    def slope(b):
        positive = weight * scipy.special.expit(-(scale * (bent - margin) + b))
        negative = (1.0 - weight) * scipy.special.expit(scale * (bent + margin) + b)
        return (num_classes - 1) * negative - positive

    want = scipy.optimize.brentq(slope, -200.0, 200.0, xtol=1e-13)
    head = km.SphereFace2(num_classes, dtype=WIDEST, **settings)
    head.build((None, DIM))
    np.testing.assert_allclose(head.bias, want, rtol=1e-6)
    assert head.bias.trainable


# As the final layer of a functional model


def keras_loss(weight, scale, loss_weight):
    """The loss that the docstring states."""

    def loss(one_hot, z):
        binary = keras.losses.binary_crossentropy(
            one_hot[..., None], z[..., None], from_logits=True
        )
        weights = one_hot * weight + (1 - one_hot) * (1 - weight)
        return loss_weight / scale * keras.ops.sum(weights * binary, axis=-1)

    return loss


def test_documented_keras_loss_of_the_logits_is_the_loss():
    embeddings, labels = random_batch()
    head = sphereface2(positive_weight=0.6, scale=20.0, loss_weight=7.0)
    one_hot = ops.convert_to_tensor(np.eye(CLASSES)[labels])
    got = keras_loss(0.6, 20.0, 7.0)(one_hot, head(embeddings, labels))
    np.testing.assert_allclose(got, head.loss(embeddings, labels), rtol=rounded(1e-9))


def test_functional_model_trains_to_the_same_weights():
    embeddings, labels = random_batch(12)
    one_hot = np.eye(CLASSES, dtype="float32")[labels]
    functional_head, head = (built(km.SphereFace2(CLASSES)) for _ in range(2))
    x, y = keras.Input((DIM,)), keras.Input((), dtype="int32")
    dense = keras.layers.Dense(DIM, kernel_initializer="identity")
    functional = keras.Model([x, y], functional_head(dense(x), y))
    tower = keras.layers.Dense(DIM, kernel_initializer="identity")
    model = km.EmbeddingModel(keras.Sequential([keras.Input((DIM,)), tower]), head)
    functional.compile(keras.optimizers.SGD(0.01), keras_loss(0.7, 40.0, 50.0), jit_compile=False)
    model.compile(keras.optimizers.SGD(0.01), jit_compile=False)
    settings = {"batch_size": 6, "epochs": 2, "shuffle": False, "verbose": 0}
    got = functional.fit([embeddings, labels], one_hot, **settings).history["loss"]
    want = model.fit(embeddings, labels, **settings).history["loss"]
    np.testing.assert_allclose(got, want, rtol=1e-5)
    for one, other in zip(functional.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


# Configuration and bounds


def test_defaults_are_those_of_the_published_code():
    config = km.SphereFace2(10).get_config()
    names = ("margin", "scale", "positive_weight", "similarity_power", "loss_weight")
    assert [config[name] for name in names] == [0.4, 40.0, 0.7, 3.0, 50.0]


@pytest.mark.parametrize(
    ("argument", "value", "words"),
    [
        ("margin", -0.1, "at least 0"),
        ("scale", -1.0, "at least 0"),
        ("scale", math.inf, "at least 0"),
        ("scale", km.scales.FixedScale(9.0), "at least 0"),
        ("positive_weight", -0.1, "at least 0, less than 1"),
        ("positive_weight", 1.0, "at least 0, less than 1"),
        ("similarity_power", 0.5, "at least 1"),
        ("similarity_power", math.nan, "at least 1"),
        ("loss_weight", -1.0, "at least 0"),
    ],
)
def test_arguments_out_of_range(argument, value, words):
    message = f"`{argument}` must be a finite number, {words}. Received: {argument}={value!r}"
    with pytest.raises(ValueError, match=exactly(message)):
        km.SphereFace2(10, **{argument: value})


def test_scale_and_positive_weight_of_zero():
    message = "`scale` must be finite and greater than 0 in float32. Received: scale=0.0"
    with pytest.raises(ValueError, match=exactly(message)):
        km.SphereFace2(10, scale=0.0)
    message = "`positive_weight` must be greater than 0 in float32. Received: positive_weight=0.0"
    with pytest.raises(ValueError, match=exactly(message)):
        km.SphereFace2(10, positive_weight=0.0)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("scale", {"scale": 1e39}),
        ("margin", {"margin": 1e39}),
        ("loss_weight", {"loss_weight": 1e39}),
        ("scale * (1 + margin)", {"scale": 1e20, "margin": 1e20}),
    ],
)
def test_numbers_beyond_float32(name, settings):
    with pytest.raises(ValueError, match=re.escape(f"`{name}` must be at most 3.4e38 in size")):
        km.SphereFace2(10, **settings)


@pytest.mark.parametrize("name", ["focal_gamma", "label_smoothing"])
def test_arguments_of_the_softmax(name):
    message = f"SphereFace2 has no softmax for `{name}` to act on. Received: {name}=0.1"
    with pytest.raises(ValueError, match=exactly(message)):
        km.SphereFace2(10, **{name: 0.1})
    assert km.SphereFace2(10, **{name: 0.0}).num_classes == 10


@pytest.mark.parametrize(
    ("classes", "settings", "bias"),
    [
        (2, {}, 46.2877),
        (2, {"scale": 64.0}, 73.8877),
        (3, {"scale": 64.0, "positive_weight": 0.8}, 73.6),
        (50, {"scale": 64.0, "positive_weight": 0.99}, 73.6202),
        # As many odds: b = -scale g(0), whatever the margin.
        (2, {"positive_weight": 0.5, "margin": 10.0}, 30.0),
        (2, {"positive_weight": 0.5, "scale": 1000.0}, 750.0),
        (2, {"positive_weight": 0.5, "scale": 1.0, "margin": 0.0}, 0.75),
        # Far from there the margin decides: log(odds / (1 - odds)) - scale (g(0) + margin).
        (10, {"scale": 1000.0}, 350.0 + math.log(7.0 / 20.0)),
    ],
)
def test_bias_of_few_classes(classes, settings, bias):
    """Positives outweigh the negatives: the root of the quadratic must not cancel."""
    head = km.SphereFace2(classes, **settings)
    head.build((None, 3))
    np.testing.assert_allclose(float(head.bias), bias, atol=1e-4)


def test_loss_builds_the_head():
    assert np.isfinite(km.SphereFace2(5).loss(np.eye(2, 3, dtype="float32"), [0, 1])).all()


def test_ignored_rows_keep_plain_logits():
    head = km.SphereFace2(4, ignore_class=-1)
    x = np.eye(2, 3, dtype="float32")
    np.testing.assert_array_equal(head(x, np.array([-1, 1]))[0], head(x)[0])
