"""Margin rules with a margin for each sample: values, draws, and order over the half circle."""

import json
import math
import re

import keras
import numpy as np
import pytest
import reference
import scipy.stats
import tensorflow as tf
from keras.optimizers.schedules import PolynomialDecay

from keras_margin.sample_margins import AdaFaceMargin, ElasticMargin, MagFaceMargin

HALF_CIRCLE = np.linspace(0.0, math.pi, 2000)


def exactly(message):
    return f"^{re.escape(message)}$"


def adaface_rule(mu=20.0, sigma=100.0, dtype="float64", **settings):
    rule = AdaFaceMargin(dtype=dtype, **settings)
    rule.build((None,))
    rule.mu.assign(mu)
    rule.sigma.assign(sigma)
    return rule


# Never rising with the angle


def curves(rule, norms, dtype):
    """Margined cosines (norms, 2000)."""
    cosines = tf.tile(tf.constant(np.cos(HALF_CIRCLE), dtype), [len(norms)])
    norms = tf.repeat(tf.constant(norms, dtype), len(HALF_CIRCLE))
    return rule(cosines, norms=norms).numpy().reshape(-1, len(HALF_CIRCLE))


def assert_never_rises(values, dtype):
    assert np.isfinite(values).all()
    assert np.diff(values, axis=1).max() <= 4 * np.finfo(dtype).eps * max(1, np.abs(values).max())


every_dtype = pytest.mark.parametrize("dtype", ["float32", "float64"])
EXTREME_NORMS = [0.0, 1e-30, 1e-3, 5.0, 19.9, 20.0, 20.1, 60.0, 100.0, 1e4, 1e30]


@every_dtype
@pytest.mark.parametrize("margin", [0.0, 0.4, 1.2, 10.0])
@pytest.mark.parametrize("h", [-5.0, 0.333, 5.0])
@pytest.mark.parametrize(("mu", "sigma"), [(20.0, 100.0), (20.0, 0.0), (1e-3, 0.0), (100.0, 30.0)])
def test_adaface_never_rises_with_the_angle(mu, sigma, h, margin, dtype):
    rule = adaface_rule(mu, sigma, dtype, margin=margin, h=h)
    assert_never_rises(curves(rule, EXTREME_NORMS, dtype), dtype)


@every_dtype
@pytest.mark.parametrize("margin_range", [(0.45, 0.8), (0.0, 2.33), (2.329, 2.33), (1.2, 1.9)])
def test_magface_never_rises_with_the_angle(margin_range, dtype):
    rule = MagFaceMargin(margin_range=margin_range, dtype=dtype)
    assert_never_rises(curves(rule, [*EXTREME_NORMS, 10.0, 109.9, 110.0], dtype), dtype)


@pytest.mark.parametrize("kind", ["angular", "cosine"])
@pytest.mark.parametrize(("margin", "std"), [(0.35, 0.05), (0.0, 10.0), (2.33, 1.0)])
def test_elastic_never_rises_with_the_angle(margin, std, kind):
    """Each of 40 rows has one draw at all angles."""
    rule = ElasticMargin(margin, std=std, kind=kind)
    cosines = tf.constant(np.cos(HALF_CIRCLE), "float32")
    at_all_angles = tf.function(lambda: tf.map_fn(lambda c: rule(tf.fill([40], c)), cosines))
    assert_never_rises(at_all_angles().numpy().T, "float32")


# Values


@pytest.mark.parametrize("h", [0.333, -0.333, 3.0, 0.0])
@pytest.mark.parametrize(("mu", "sigma"), [(20.0, 100.0), (12.0, 0.0), (5.0, 3.0)])
def test_adaface_values(h, mu, sigma):
    theta = np.linspace(0.0, math.pi, 41)
    norms = np.geomspace(1e-5, 1e4, 41)[np.random.default_rng(0).permutation(41)]
    scalers = np.clip(h * (np.clip(norms, 1e-3, 100.0) - mu) / (sigma + 1e-3), -1.0, 1.0)
    want = [
        reference.adaface_target(c, 0.4, g) for c, g in zip(np.cos(theta), scalers, strict=True)
    ]
    rule = adaface_rule(mu, sigma, h=h)
    got = rule(tf.constant(np.cos(theta)), norms=tf.constant(norms))
    np.testing.assert_allclose(got, want, rtol=1e-9, atol=1e-12)


def test_adaface_keeps_the_angle_off_the_ends():
    """g = 1 moves 0.2 by -0.4, g = -1 moves 3 by 0.4: both beyond, where the slope is 0."""
    rule = adaface_rule(mu=50.0, sigma=1.0, h=1.0)
    cosines = tf.constant([math.cos(0.2), math.cos(3.0)], tf.float64)
    with tf.GradientTape() as tape:
        tape.watch(cosines)
        got = rule(cosines, norms=tf.constant([90.0, 10.0], tf.float64))
    np.testing.assert_allclose(got, [math.cos(1e-3) - 0.8, -math.cos(1e-3)], rtol=1e-12)
    np.testing.assert_array_equal(tape.gradient(got, cosines), [0.0, 0.0])


def test_adaface_gradients_are_the_numerical_ones_in_the_cosine():
    rule = adaface_rule(mu=50.0, sigma=40.0, h=1.0)
    norms = tf.constant(np.linspace(5.0, 95.0, 20))
    cosines = tf.constant(np.cos(np.linspace(0.6, 2.6, 20)))
    analytic, numerical = tf.test.compute_gradient(
        lambda c: rule(c, norms=norms), [cosines], delta=1e-6
    )
    np.testing.assert_allclose(analytic[0], numerical[0], rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("norm_range", [(10.0, 110.0), (1.0, 51.0)])
def test_magface_values(norm_range):
    theta = np.linspace(0.0, math.pi, 41)
    norms = np.geomspace(0.1, 1e3, 41)[np.random.default_rng(0).permutation(41)]
    rule = MagFaceMargin(norm_range, (0.3, 0.9), dtype="float64")
    want = []
    for c, norm in zip(np.cos(theta), norms, strict=True):
        length = reference.magface_length(norm, norm_range)
        margin = reference.magface_margin(length, norm_range, (0.3, 0.9))
        want.append(reference.arcface_target(c, margin))
    got = rule(tf.constant(np.cos(theta)), norms=tf.constant(norms))
    np.testing.assert_allclose(got, want, rtol=1e-9, atol=1e-12)


def test_magface_gradients_are_the_numerical_ones_in_cosine_and_norm():
    """Before and beyond pi - m(a), and outside the norms, where none flows."""
    cosines = tf.constant(np.cos([0.5, 1.0, 2.0, 2.9, 3.0, 1.5, 1.5]))
    norms = tf.constant([20.0, 50.0, 80.0, 60.0, 100.0, 5.0, 500.0], tf.float64)
    rule = MagFaceMargin(dtype="float64")
    analytic, numerical = tf.test.compute_gradient(
        lambda c, n: rule(c, norms=n), [cosines, norms], delta=1e-6
    )
    for one, other in zip(analytic, numerical, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-8)
    np.testing.assert_array_equal(np.diag(analytic[1])[5:], [0.0, 0.0])


def test_slopes_at_the_ends_are_finite(run):
    above = np.nextafter(np.float32(1), np.float32(2))
    cosines = tf.constant([1.0, above, -1.0, -above])
    norms = tf.constant([20.0, 90.0, 5.0, 60.0])
    rules = [adaface_rule(dtype="float32"), MagFaceMargin(), ElasticMargin()]

    def values_and_slopes(cosines):
        with tf.GradientTape(persistent=True) as tape:
            tape.watch(cosines)
            values = [rule(cosines, norms=norms) for rule in rules]
        return values, [tape.gradient(value, cosines) for value in values]

    assert np.isfinite(run(values_and_slopes)(cosines)).all()


# AdaFace's statistics


def test_statistics_of_the_rows_that_count():
    rule = adaface_rule(momentum=0.25)
    norms = tf.constant([4.0, math.nan, 10.0, 400.0, 1e9], tf.float64)
    rule.update_state(norms, tf.constant([True, False, True, True, False]))
    kept = [4.0, 10.0, 100.0]
    np.testing.assert_allclose(rule.mu, 15.0 + 0.25 * np.mean(kept), rtol=1e-12)
    np.testing.assert_allclose(rule.sigma, 75.0 + 0.25 * np.std(kept, ddof=1), rtol=1e-12)


@pytest.mark.parametrize("rows", [0, 3])
def test_no_row_that_counts_leaves_the_statistics(run, rows):
    rule = adaface_rule(7.0, 3.0, momentum=0.25)
    run(rule.update_state)(
        tf.fill([rows], tf.constant(math.nan, tf.float64)), tf.fill([rows], False)
    )
    assert [float(rule.mu), float(rule.sigma)] == [7.0, 3.0]


# Elastic draws


def drawn(rule, rows=10**4, dtype="float64"):
    """The margins of a call of kind "cosine"."""
    return -rule(tf.zeros(rows, dtype)).numpy()


def elastic(*arguments, step=0, **settings):
    rule = ElasticMargin(*arguments, kind="cosine", dtype="float64", **settings)
    rule.attach(3, lambda: step)
    return rule


@pytest.mark.parametrize(("mean", "std"), [(0.35, 0.05), (0.5, 0.0175), (2.0, 0.3)])
@pytest.mark.parametrize("step", [0, 1000])
def test_draws_are_normal(mean, std, step):
    margins = drawn(elastic(mean, std=std, seed=5, step=step))
    assert abs(margins.mean() - mean) < 4 * std / 100
    assert abs(margins.std() - std) < 4 * std / math.sqrt(2e4)
    assert scipy.stats.kstest((margins - mean) / std, "norm").pvalue > 1e-4


def test_angular_draws_are_those_of_the_cosine_kind():
    angular = ElasticMargin(0.5, std=0.05, seed=5, dtype="float64")
    cosines = np.cos(np.linspace(0.1, 2.0, 100))
    margins = drawn(elastic(0.5, std=0.05, seed=5), 100)
    want = [reference.arcface_target(c, m) for c, m in zip(cosines, margins, strict=True)]
    np.testing.assert_allclose(angular(tf.constant(cosines)), want, rtol=1e-9)


def test_draws_depend_on_seed_and_step_and_row():
    margins = [drawn(elastic(seed=s, step=t), 50) for s, t in [(0, 0), (0, 1), (1, 0), (1, 1)]]
    assert len(np.unique(margins)) == 200
    np.testing.assert_array_equal(drawn(elastic(seed=1, step=1), 20), margins[3][:20])


def test_draws_are_the_same_in_every_way_of_running(run):
    rule = elastic(seed=2, step=tf.constant(4))
    got = run(rule)(tf.zeros(100, tf.float64))
    np.testing.assert_allclose(-got, drawn(rule, 100), rtol=1e-9)


@pytest.mark.parametrize("mean", [0.0, 0.1])
def test_cosine_draws_are_not_negative(mean):
    margins = drawn(elastic(mean, std=0.2))
    assert margins.min() == 0.0
    np.testing.assert_allclose(
        (margins == 0.0).mean(), scipy.stats.norm.cdf(-mean / 0.2), atol=0.03
    )


def test_angular_draws_stay_where_the_rule_is_monotone():
    rule = ElasticMargin(2.2, std=1.0, dtype="float64")
    got = rule(tf.ones(10**4, tf.float64)).numpy()  # theta = 0: cos(margin)
    margins = np.arccos(got)
    assert margins.min() == 0.0
    assert margins.max() == pytest.approx(2.33)
    np.testing.assert_allclose((margins > 2.3299).mean(), scipy.stats.norm.sf(0.13), atol=0.03)


def test_mean_may_follow_a_schedule(run):
    step = tf.Variable(0)
    rule = ElasticMargin(
        PolynomialDecay(0.0, 4, end_learning_rate=0.4, power=1.0), std=0.0, kind="cosine"
    )
    rule.attach(3, lambda: step)
    now = run(lambda: rule(tf.constant([0.8])))
    for value in (0.8, 0.7, 0.6):
        np.testing.assert_allclose(now(), [value], rtol=1e-6)
        step.assign_add(1)


@pytest.mark.parametrize("kind", ["angular", "cosine"])
def test_schedule_that_leaves_the_range_gives_nan(run, kind):
    end = 5.0 if kind == "angular" else -5.0
    rule = ElasticMargin(PolynomialDecay(0.0, 2, end_learning_rate=end, power=1.0), kind=kind)
    rule.attach(3, lambda: 2)
    assert np.isnan(run(lambda: rule(tf.constant([0.8])))()).all()


# Configuration


RULES = {
    "AdaFaceMargin": (AdaFaceMargin, {"margin": 0.3, "h": -0.5, "momentum": 0.2}),
    "MagFaceMargin": (MagFaceMargin, {"norm_range": (1.0, 51.0), "margin_range": (0.3, 0.7)}),
    "ElasticMargin": (ElasticMargin, {"margin": 0.3, "std": 0.1, "kind": "cosine", "seed": 4}),
}


@pytest.mark.parametrize(("kind", "settings"), RULES.values(), ids=RULES.keys())
def test_config_round_trip(kind, settings):
    rule = kind(**settings, name="mine")
    text = json.dumps(keras.saving.serialize_keras_object(rule))
    again = keras.saving.deserialize_keras_object(json.loads(text))
    assert type(again) is kind
    assert again.get_config() == rule.get_config()
    assert again.name == "mine"
    assert {name: getattr(again, name) for name in settings} == settings


# Refused


@pytest.mark.parametrize("rule", [AdaFaceMargin, MagFaceMargin])
def test_norms_are_needed(rule):
    message = f"{rule.__name__} needs `norms`. Received: norms=None"
    with pytest.raises(ValueError, match=re.escape(message)):
        rule()(tf.constant([0.5]))


@pytest.mark.parametrize("margin", [-0.1, math.nan, math.inf])
@pytest.mark.parametrize("make", [AdaFaceMargin, lambda m: ElasticMargin(m, kind="cosine")])
def test_margins_below_zero(make, margin):
    message = f"`margin` must be finite and at least 0. Received: margin={margin!r}"
    with pytest.raises(ValueError, match=exactly(message)):
        make(margin)


@pytest.mark.parametrize("margin", [-0.1, 2.34, 28.6, math.nan])
def test_angular_means_that_would_not_be_monotone(margin):
    message = f"`margin` must be from 0 to 2.33 radians. Received: margin={margin!r}"
    with pytest.raises(ValueError, match=exactly(message)):
        ElasticMargin(margin)


@pytest.mark.parametrize("margin_range", [(0.45, 2.34), (0.45, 28.6)])
def test_magface_margins_that_would_not_be_monotone(margin_range):
    message = (
        f"`margin_range` must be from 0 to 2.33 radians. Received: margin_range={margin_range!r}"
    )
    with pytest.raises(ValueError, match=exactly(message)):
        MagFaceMargin(margin_range=margin_range)


@pytest.mark.parametrize("name", ["norm_range", "margin_range"])
@pytest.mark.parametrize(
    "values",
    [
        (0.8, 0.45),
        (0.5, 0.5),
        (-0.1, 0.5),
        (0.1, math.inf),
        (math.nan, 1.0),
        (0.1,),
        0.5,
        None,
        "19",
        {1.0, 2.0},
        (True, 2.0),
        (1.0, [2.0, 3.0]),
        (1.0, 10**400),
    ],
    ids=lambda value: str(value)[:20],
)
def test_ranges_that_do_not_increase(name, values):
    message = f"`{name}` must be (low, high) with 0 <= low < high. Received: {name}={values!r}"
    with pytest.raises(ValueError, match=exactly(message)):
        MagFaceMargin(**{name: values})


@pytest.mark.parametrize("norm_range", [(0.0, 110.0), (1e-40, 1.0), (10.0, 1e200)])
def test_norms_whose_squares_float32_does_not_hold(norm_range):
    message = (
        "`norm_range` must begin above 0 and lie between 1e-15 and 1e15: MagFace divides by the "
        f"norm and by its square. Received: norm_range={norm_range!r}"
    )
    with pytest.raises(ValueError, match=exactly(message)):
        MagFaceMargin(norm_range)


@pytest.mark.parametrize("kind", ["arc", "Angular", None, 1, ["angular"], {}])
def test_kind_of_elastic(kind):
    message = f'`kind` must be "angular" or "cosine". Received: kind={kind!r}'
    with pytest.raises(ValueError, match=exactly(message)):
        ElasticMargin(kind=kind)


@pytest.mark.parametrize("std", [-0.1, math.nan, math.inf])
def test_std_of_elastic(std):
    message = f"`std` must be a finite number, at least 0. Received: std={std!r}"
    with pytest.raises(ValueError, match=exactly(message)):
        ElasticMargin(std=std)


@pytest.mark.parametrize("h", [math.nan, math.inf, "0.3"])
def test_h_of_adaface(h):
    message = f"`h` must be a finite number. Received: h={h!r}"
    with pytest.raises(ValueError, match=exactly(message)):
        AdaFaceMargin(h=h)
