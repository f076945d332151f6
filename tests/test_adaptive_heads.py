"""CurricularFace, AdaFace, MagFace and ElasticFace: against the reference, call after call."""

import json
import math
from fractions import Fraction
from typing import NamedTuple

import keras
import numpy as np
import pytest
import reference
import tensorflow as tf

import keras_margin as km

CLASSES, DIM = 5, 4


class Case(NamedTuple):
    make: object  # (**layer arguments) -> head
    slow: object  # the head in reference.py
    settings: dict  # its keyword arguments


MAGFACE = {
    "scale": 20.0,
    "norm_range": (1.0, 20.0),
    "margin_range": (0.2, 0.9),
    "regularizer_weight": 30.0,
}
CASES = {
    "CurricularFace": Case(
        lambda **k: km.CurricularFace(CLASSES, 0.4, 20.0, momentum=0.3, **k),
        reference.curricularface,
        {"margin": 0.4, "scale": 20.0, "momentum": 0.3},
    ),
    "AdaFace": Case(
        lambda **k: km.AdaFace(CLASSES, 0.5, 20.0, h=0.7, momentum=0.4, **k),
        reference.adaface,
        {"margin": 0.5, "scale": 20.0, "h": 0.7, "momentum": 0.4},
    ),
    "AdaFace, h < 0": Case(
        lambda **k: km.AdaFace(CLASSES, 0.5, 20.0, h=-2.0, momentum=0.4, **k),
        reference.adaface,
        {"margin": 0.5, "scale": 20.0, "h": -2.0, "momentum": 0.4},
    ),
    "MagFace": Case(lambda **k: km.MagFace(CLASSES, **MAGFACE, **k), reference.magface, MAGFACE),
}
every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())


def random_batch(rows=8, seed=0, lengths=(0.5, 60.0)):
    rng = np.random.default_rng(seed)
    embeddings = (
        reference.unit(rng.normal(size=(rows, DIM))) * np.geomspace(*lengths, rows)[:, None]
    )
    return embeddings, rng.integers(0, CLASSES, rows)


def built(head, centers=None):
    rng = np.random.default_rng(100)
    rows = head.num_classes * head.num_subcenters
    random_centers = rng.normal(size=(rows, DIM)) * rng.uniform(0.3, 3.0, (rows, 1))
    centers = random_centers if centers is None else np.asarray(centers)
    head.build((None, centers.shape[1]))
    head.centers.assign(centers)
    return head


def wide(head, *arguments, **settings):
    return built(head(CLASSES, *arguments, dtype="float64", **settings))


def slow_loss(case, embeddings, centers, labels, state, ignore_class=None, **settings):
    """The loss with MagFace's regulariser, and the state."""
    logits, state = case.slow(
        embeddings, centers, labels, state, ignore_class=ignore_class, **case.settings, **settings
    )
    loss = reference.softmax_loss(logits, labels, ignore_class)
    if case.slow is reference.magface:
        ranges = {key: MAGFACE[key] for key in ("norm_range", "regularizer_weight")}
        loss = loss + reference.magface_regularizer(
            embeddings, labels, ignore_class=ignore_class, **ranges
        )
    return loss, state


def loss_and_gradients(head, embeddings, labels):
    """Losses, and the gradients of their mean."""
    with tf.GradientTape() as tape:
        x = tf.constant(embeddings)
        tape.watch(x)
        loss = head.loss(x, labels)
        mean = tf.reduce_mean(loss)
    return loss, *tape.gradient(mean, [x, head.centers.value])


def state_of(head):
    """The statistics by the reference's names."""
    named = {"t": "t", "mu": "mu", "sigma": "sigma"}
    return {
        name: float(variable)
        for variable in head.non_trainable_variables
        if (name := named.get(variable.name))
    }


# Against the reference


@every_case
def test_logits_and_state_over_calls(case):
    head, state = built(case.make(dtype="float64")), None
    for seed in range(4):
        embeddings, labels = random_batch(seed=seed)
        want, state = case.slow(embeddings, head.centers.numpy(), labels, state, **case.settings)
        np.testing.assert_allclose(head(embeddings, labels), want, rtol=1e-9, atol=1e-9)
        assert state_of(head) == pytest.approx(state or {}, rel=1e-12)


@every_case
@pytest.mark.parametrize("settings", [{}, {"num_subcenters": 2}], ids=["", "sub-centres"])
def test_losses_and_gradients_over_calls(case, settings):
    head, state = built(case.make(dtype="float64", **settings)), None
    centers = head.centers.numpy()
    for seed in range(2):
        embeddings, labels = random_batch(seed=seed)
        got = loss_and_gradients(head, embeddings, labels)

        def loss(x, w, labels=labels, state=state):
            return slow_loss(case, x, w, labels, state, **settings)[0]

        want = loss(embeddings, centers), *reference.gradients(loss, embeddings, centers)
        for one, other in zip(got, want, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-7, atol=1e-9)
        _, state = slow_loss(case, embeddings, centers, labels, state, **settings)


@every_case
def test_ignored_rows_are_in_no_statistic(case):
    embeddings, labels = random_batch()
    labels[[0, 3, 7]] = -1
    head = built(case.make(dtype="float64", ignore_class=-1))
    want, state = slow_loss(case, embeddings, head.centers.numpy(), labels, None, ignore_class=-1)
    np.testing.assert_allclose(head.loss(embeddings, labels), want, rtol=1e-9)
    assert state_of(head) == pytest.approx(state or {}, rel=1e-12)


@every_case
def test_batch_of_one_moves_the_state_to_finite_values(case):
    """The sample standard deviation of one number is 0 / 0."""
    embeddings, labels = random_batch(1, lengths=(5.0, 5.0))
    head = built(case.make(dtype="float64"))
    want, state = slow_loss(case, embeddings, head.centers.numpy(), labels, None)
    np.testing.assert_allclose(head.loss(embeddings, labels), want, rtol=1e-9)
    assert state_of(head) == pytest.approx(state or {}, rel=1e-12)
    assert np.isfinite(list(state_of(head).values())).all()


# CurricularFace


def on_the_circle(*angles):
    return np.stack([np.cos(angles), np.sin(angles)], axis=1)


def curricularface(t, momentum=0.0, centers=((1.0, 0.0), (0.0, 1.0)), margin=0.5):
    head = built(
        km.CurricularFace(2, margin, 10.0, momentum=momentum, dtype="float64"), np.array(centers)
    )
    head.t.assign(t)
    return head


def test_t_is_the_running_mean_of_the_target_cosines():
    head = curricularface(0.0, momentum=0.25)
    head.loss(on_the_circle(0.3, 0.7), np.array([0, 0]))
    first = 0.25 * (math.cos(0.3) + math.cos(0.7)) / 2
    np.testing.assert_allclose(head.t, first, rtol=1e-12)
    head(on_the_circle(0.3, 0.7), np.array([1, 1]))
    second = 0.25 * (math.sin(0.3) + math.sin(0.7)) / 2 + 0.75 * first
    np.testing.assert_allclose(head.t, second, rtol=1e-12)


@pytest.mark.parametrize("t", [0.0, 0.6])
def test_hard_class_is_weighed_by_t_and_itself(t):
    """x at 0.6 from its centre, the other one at sin(0.6) = .565 > cos(0.6 + .5) = .454."""
    logits = curricularface(t)(on_the_circle(0.6), np.array([0]))
    hard = math.sin(0.6) * (t + math.sin(0.6))
    np.testing.assert_allclose(logits, [[10 * math.cos(1.1), 10 * hard]], rtol=1e-12)


def test_easy_class_stays_as_it_is():
    """sin(0.3) = .296 < cos(0.8) = .697."""
    logits = curricularface(0.6)(on_the_circle(0.3), np.array([0]))
    np.testing.assert_allclose(logits, [[10 * math.cos(0.8), 10 * math.sin(0.3)]], rtol=1e-12)


def test_class_is_hard_by_the_cosine_without_the_fallback():
    """theta = 3, margin .5: cos(3.5) = -.936, the fallback -1.230; the other class at -.95."""
    other = 3.0 + math.acos(-0.95)
    head = curricularface(0.6, centers=on_the_circle(0.0, other))
    logits = head(on_the_circle(3.0), np.array([0]))
    fallback = math.cos(3.0) - 0.5 * math.sin(0.5)
    np.testing.assert_allclose(logits, [[10 * fallback, 10 * -0.95]], rtol=1e-12)
    hard = on_the_circle(0.0, 3.0 + math.acos(-0.93))
    logits = curricularface(0.6, centers=hard)(on_the_circle(3.0), np.array([0]))
    np.testing.assert_allclose(logits, [[10 * fallback, 10 * -0.93 * (0.6 - 0.93)]], rtol=1e-12)


# AdaFace


def adaface(target, **settings):
    """(logits of the target at pi/2, head) of rows with these lengths, after one call."""
    head = built(
        km.AdaFace(2, scale=1.0, dtype="float64", **settings), np.array([[1.0, 0.0], [0.0, 1.0]])
    )
    embeddings = np.array(target)[:, None] * np.array([[0.0, 1.0]])
    return head(embeddings, np.zeros(len(target), int)).numpy()[:, 0], head


def test_statistics_take_norms_within_their_bounds():
    """1e-6 counts as 1e-3, and 500 as 100; start 20 and 100."""
    _, head = adaface([1e-6, 500.0, 50.0, 20.0], momentum=0.1)
    norms = [1e-3, 100.0, 50.0, 20.0]
    np.testing.assert_allclose(head.margin_rule.mu, 18.0 + 0.1 * np.mean(norms), rtol=1e-12)
    sigma = 90.0 + 0.1 * np.std(norms, ddof=1)
    np.testing.assert_allclose(head.margin_rule.sigma, sigma, rtol=1e-12)


@pytest.mark.parametrize("number", [1, 6])
@pytest.mark.parametrize("h", [0.333, -0.333])
def test_equal_norms_leave_the_cosine_margin(number, h):
    """Their deviation is 0, and so is (n - mu) / (sigma + 1e-3): cos(theta) - margin."""
    target, head = adaface([7.3] * number, momentum=1.0, h=h)
    np.testing.assert_allclose([head.margin_rule.mu, head.margin_rule.sigma], [7.3, 0], atol=1e-12)
    np.testing.assert_allclose(target, np.full(number, -0.4), atol=1e-12)


@pytest.mark.parametrize(("h", "good", "poor"), [(100.0, 1, 0), (-100.0, 0, 1)])
def test_sign_of_h_says_which_norms_get_the_cosine_margin(h, good, poor):
    """g = 1: cos(theta - m) - 2 m. g = -1: cos(theta + m), ArcFace. Here theta = pi / 2."""
    target, _ = adaface([5.0, 80.0], h=h, momentum=1.0)
    np.testing.assert_allclose(target[good], math.sin(0.4) - 0.8, rtol=1e-12)
    np.testing.assert_allclose(target[poor], -math.sin(0.4), rtol=1e-12)


def test_h_of_zero_is_cosface():
    embeddings, labels = random_batch()
    head = wide(km.AdaFace, 0.3, 9.0, h=0.0)
    logits, _ = reference.cosface(embeddings, head.centers.numpy(), labels, margin=0.3, scale=9.0)
    want = reference.softmax_loss(logits, labels)
    np.testing.assert_allclose(head.loss(embeddings, labels), want, rtol=1e-9)


def test_no_gradient_of_adaface_changes_the_norms():
    embeddings, labels = random_batch()
    _, gradient, _ = loss_and_gradients(wide(km.AdaFace), embeddings, labels)
    np.testing.assert_allclose((gradient * embeddings).numpy().sum(axis=1), 0.0, atol=1e-9)
    assert np.abs(gradient).max() > 1e-3


# MagFace


def magface(theta, lengths, **settings):
    """Target logits (scale 1) of rows at the angle theta."""
    head = built(
        km.MagFace(2, scale=1.0, dtype="float64", **settings), np.array([[1.0, 0.0], [0.0, 1.0]])
    )
    embeddings = np.array(lengths)[:, None] * on_the_circle(*[theta] * len(lengths))
    return head(embeddings, np.zeros(len(lengths), int)).numpy()[:, 0]


def test_margin_grows_with_the_norm_within_the_range():
    """5 counts as 10 and 500 as 110."""
    got = magface(1.0, [5.0, 35.0, 60.0, 90.0, 500.0])
    np.testing.assert_allclose(got, np.cos([1.45, 1.5375, 1.625, 1.73, 1.8]), rtol=1e-12)


def test_fallback_begins_where_the_margin_of_the_row_says():
    """theta = 2.5: 2.5 + .45 < pi < 2.5 + .8."""
    got = magface(2.5, [10.0, 110.0])
    want = [math.cos(2.95), math.cos(2.5) - 0.8 * math.sin(0.8)]
    np.testing.assert_allclose(got, want, rtol=1e-12)


def test_regularizer_is_part_of_the_loss_in_training_only():
    embeddings, labels = random_batch(6, lengths=(2.0, 250.0))
    lengths = np.clip(reference.norms(embeddings), 10.0, 110.0)
    with_it, without = wide(km.MagFace), wide(km.MagFace, regularizer_weight=35.0)
    without.regularizer_weight = 0.0
    term = with_it.loss(embeddings, labels) - without.loss(embeddings, labels)
    np.testing.assert_allclose(term, 35.0 * (lengths / 110.0**2 + 1.0 / lengths), rtol=1e-9)
    plain = reference.softmax_loss(with_it(embeddings).numpy(), labels)
    got = with_it.loss(embeddings, labels, training=False)
    np.testing.assert_allclose(got, plain, rtol=1e-9, atol=1e-12)


def test_gradient_of_magface_changes_norms_within_the_range_only():
    embeddings, labels = random_batch(4)
    embeddings = reference.unit(embeddings) * np.array([[5.0], [60.0], [500.0], [80.0]])
    _, gradient, _ = loss_and_gradients(wide(km.MagFace), embeddings, labels)
    along = (gradient * reference.unit(embeddings)).numpy().sum(axis=1)
    np.testing.assert_allclose(along[[0, 2]], 0.0, atol=1e-12)
    assert np.abs(along[[1, 3]]).min() > 1e-3


# ElasticFace


@pytest.mark.parametrize(
    ("kind", "slow", "margin"),
    [("angular", reference.arcface, 0.5), ("cosine", reference.cosface, 0.35)],
)
def test_without_deviation_elasticface_is_the_head_of_its_kind(kind, slow, margin):
    embeddings, labels = random_batch()
    head = wide(km.ElasticFace, std=0.0, kind=kind)
    want, _ = slow(embeddings, head.centers.numpy(), labels, margin=margin)
    np.testing.assert_allclose(head(embeddings, labels), want, rtol=1e-9, atol=1e-9)


def margins_of(head, embeddings, labels, **settings):
    """The cosine margins of a call, from its target logits at scale 2."""
    plain = head(embeddings).numpy()
    rows = np.arange(len(labels))
    return (plain - head(embeddings, labels, **settings).numpy())[rows, labels] / 2.0


def elastic(**settings):
    return wide(km.ElasticFace, 0.35, 2.0, kind="cosine", **settings)


def test_margins_differ_between_rows_and_steps_and_seeds():
    embeddings, labels = random_batch()
    head = elastic(seed=3)
    drawn = np.concatenate([margins_of(head, embeddings, labels) for _ in range(3)])
    other = margins_of(elastic(seed=4), embeddings, labels)
    assert len(np.unique(np.concatenate([drawn, other]))) == 4 * len(labels)
    np.testing.assert_array_equal(drawn[:8], margins_of(elastic(seed=3), embeddings, labels))


def test_loss_without_a_change_of_state_has_the_draw_of_the_next_call():
    embeddings, labels = random_batch()
    head = elastic()
    want = head.loss(embeddings, labels, update_state=False)
    np.testing.assert_array_equal(head.loss(embeddings, labels), want)
    assert np.abs(head.loss(embeddings, labels) - want).min() > 0


def test_draws_of_a_loaded_model_go_on(tmp_path):
    embeddings, labels = random_batch(8, lengths=(1.0, 3.0))
    tower = keras.Sequential([keras.Input((DIM,)), keras.layers.Dense(DIM)])
    model = km.EmbeddingModel(tower, km.ElasticFace(CLASSES, seed=3))
    model.head.loss(embeddings, labels)
    model.save(tmp_path / "model.keras")
    again = keras.saving.load_model(tmp_path / "model.keras")
    for _ in range(2):
        want = model.head.loss(embeddings, labels)
        np.testing.assert_array_equal(again.head.loss(embeddings, labels), want)


def test_elasticface_evaluates_without_a_draw():
    embeddings, labels = random_batch()
    head = wide(km.ElasticFace)
    want = reference.softmax_loss(head(embeddings).numpy(), labels)
    got = head.loss(embeddings, labels, training=False)
    np.testing.assert_allclose(got, want, rtol=1e-9, atol=1e-12)


# Defaults, configuration


def test_defaults_are_the_papers():
    def settings(head, *names):
        return [head.get_config()[name] for name in names]

    common = ("margin", "scale")
    assert settings(km.CurricularFace(9), *common, "momentum") == [0.5, 64.0, 0.01]
    assert settings(km.AdaFace(9), *common, "h", "momentum") == [0.4, 64.0, 0.333, 0.01]
    magface = settings(km.MagFace(9), "scale", "norm_range", "margin_range", "regularizer_weight")
    assert magface == [64.0, (10.0, 110.0), (0.45, 0.8), 35.0]
    assert settings(km.ElasticFace(9), "scale", "std", "kind") == [64.0, 0.05, "angular"]
    state = state_of(built(km.AdaFace(CLASSES)))
    assert state == {"mu": 20.0, "sigma": 100.0}
    assert state_of(built(km.CurricularFace(CLASSES))) == {"t": 0.0}


@pytest.mark.parametrize("kind", ["angular", "cosine"])
def test_margin_of_elasticface_stays_the_default_of_its_kind(kind):
    text = json.dumps(keras.saving.serialize_keras_object(km.ElasticFace(9, kind=kind)))
    again = keras.saving.deserialize_keras_object(json.loads(text))
    assert again.margin is None
    assert again.margin_rule.margin == {"angular": 0.5, "cosine": 0.35}[kind]


@pytest.mark.parametrize("policy", ["float32", "mixed_float16"])
@pytest.mark.parametrize("make", [km.CurricularFace, km.AdaFace])
def test_statistics_are_float32_and_those_of_the_global_batch(make, policy):
    head = built(make(CLASSES, dtype=policy))
    statistics = [v for v in head.non_trainable_variables if v.name in ("t", "mu", "sigma")]
    assert statistics
    for variable in statistics:
        assert variable.dtype == "float32"
        assert not variable.trainable
        assert variable.aggregation == "only_first_replica"


@pytest.mark.parametrize("momentum", [-0.1, 1.1, math.nan])
@pytest.mark.parametrize("make", [km.CurricularFace, km.AdaFace])
def test_momentum_out_of_range(make, momentum):
    with pytest.raises(ValueError, match="`momentum` must be a finite number, at least 0, at most"):
        make(CLASSES, momentum=momentum)


def test_regularizer_weight_out_of_range():
    with pytest.raises(
        ValueError, match="`regularizer_weight` must be a finite number, at least 0"
    ):
        km.MagFace(CLASSES, regularizer_weight=-1.0)


# Arguments at the door


@pytest.mark.parametrize("kind", [["angular"], {}], ids=str)
def test_kind_of_elastic_that_is_no_string(kind):
    with pytest.raises(ValueError, match='`kind` must be "angular" or "cosine"'):
        km.ElasticFace(CLASSES, kind=kind)


@pytest.mark.parametrize(
    ("make", "arguments"),
    [
        (km.AdaFace, {"margin": 1e39}),
        (km.MagFace, {"regularizer_weight": 1e39}),
        (km.CurricularFace, {"scale": 1e39}),
        (km.CurricularFace, {"focal_gamma": 1e39}),
    ],
)
def test_numbers_beyond_float32(make, arguments):
    (name,) = arguments
    with pytest.raises(ValueError, match=f"`{name}` must be at most 3.4e38 in size"):
        make(CLASSES, **arguments)


QUARTER = Fraction(1, 4)


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (km.CurricularFace, ("margin", "scale", "momentum")),
        (km.AdaFace, ("margin", "scale", "h", "momentum")),
        (km.ElasticFace, ("margin", "scale", "std")),
        (km.MagFace, ("scale", "regularizer_weight")),
        (km.SphereFace2, ("margin", "scale", "positive_weight", "loss_weight")),
    ],
)
def test_fractions_are_stored_as_floats(make, names):
    config = make(CLASSES, **dict.fromkeys(names, QUARTER)).get_config()
    assert json.loads(json.dumps({name: config[name] for name in names})) == dict.fromkeys(
        names, 0.25
    )


@pytest.mark.parametrize("seed", [np.int64(3), 3.0])
@pytest.mark.parametrize("make", [km.CurricularFace, km.ElasticFace])
def test_whole_number_of_any_kind_is_a_seed(make, seed):
    head, same = make(CLASSES, seed=seed), make(CLASSES, seed=3)
    head.build((None, DIM))
    same.build((None, DIM))
    np.testing.assert_array_equal(head.centers, same.centers)
    assert head.get_config()["seed"] == 3


def test_seed_of_more_than_32_bits():
    with pytest.raises(ValueError, match=r"`seed` must be less than 2\*\*32"):
        km.CurricularFace(CLASSES, seed=2**70)
