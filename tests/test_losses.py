"""The loss of a row against NumPy's cross-entropy of whole logits."""

import math

import numpy as np
import pytest
from backends import DTYPES, float64_only, jacobians, value_and_gradients
from keras import ops

from keras_margin.losses import margin_loss

CLASSES = 5
SMOOTHING = [0.0, 0.1, 0.9]
GAMMA = [0.0, 0.5, 2.0]


def random_logits(spread=3.0, rows=9):
    rng = np.random.default_rng(0)
    return spread * rng.normal(size=(rows, CLASSES)), rng.integers(0, CLASSES, rows)


def slow(logits, labels, smoothing=0.0, gamma=0.0):
    """-sum of q log p times (1 - p_y)^gamma, one row at a time."""
    losses = []
    for row, y in zip(logits, labels, strict=True):
        p = np.exp(row - row.max())
        p /= p.sum()
        q = np.full(len(row), smoothing / len(row))
        q[y] += 1.0 - smoothing
        losses.append(-(q * np.log(p)).sum() * (1.0 - p[y]) ** gamma)
    return np.array(losses)


def parts(logits, labels):
    """What the pass over the classes gives: z_y, log B, the sum of the others."""
    target = logits[np.arange(len(labels)), labels]
    others = np.array([np.delete(row, y) for row, y in zip(logits, labels, strict=True)])
    return target, np.log(np.exp(others).sum(axis=1)), others.sum(axis=1)


def fast(logits, labels, dtype="float64", **settings):
    numbers = [ops.convert_to_tensor(part, dtype) for part in parts(logits, labels)]
    return margin_loss(*numbers, num_classes=logits.shape[1], **settings)


@pytest.mark.parametrize("gamma", GAMMA)
@pytest.mark.parametrize("smoothing", SMOOTHING)
@pytest.mark.parametrize("dtype", DTYPES)
def test_values(run, smoothing, gamma, dtype):
    logits, labels = random_logits()
    settings = {"label_smoothing": smoothing, "focal_gamma": gamma}
    got = run(lambda: fast(logits, labels, dtype, **settings))()
    assert got.dtype == dtype
    tolerance = 2e-6 if dtype == "float32" else 1e-12
    np.testing.assert_allclose(got, slow(logits, labels, smoothing, gamma), tolerance, tolerance)


@float64_only
@pytest.mark.parametrize("gamma", GAMMA)
@pytest.mark.parametrize("smoothing", SMOOTHING)
def test_gradients_are_the_numerical_ones(smoothing, gamma):
    def loss(*numbers):
        settings = {"label_smoothing": smoothing, "focal_gamma": gamma}
        return margin_loss(*numbers, num_classes=CLASSES, **settings)

    analytic, numerical = jacobians(loss, parts(*random_logits()), delta=1e-6)
    for one, other in zip(analytic, numerical, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-8)


def test_smoothing_keeps_its_share_of_the_mass_on_every_class():
    """All logits 0: log C, whatever epsilon. One logit z: log(e^z + 1) - (1 - eps/2) z for two."""
    flat = margin_loss(
        ops.convert_to_tensor([0.0]),
        ops.convert_to_tensor([math.log(4.0)]),
        ops.convert_to_tensor([0.0]),
        num_classes=5,
        label_smoothing=0.3,
    )
    np.testing.assert_allclose(flat, [math.log(5.0)], rtol=1e-6)
    z, zero = 1.5, ops.convert_to_tensor([0.0])
    two = margin_loss(ops.convert_to_tensor([z]), zero, zero, num_classes=2, label_smoothing=0.2)
    np.testing.assert_allclose(two, [math.log(math.exp(z) + 1.0) - 0.9 * z], rtol=1e-6)


def test_focal_factor_of_even_odds():
    """p = 1/2: (1/2)^2 log 2."""
    zero = ops.convert_to_tensor([0.0])
    loss = margin_loss(zero, zero, zero, num_classes=2, focal_gamma=2.0)
    np.testing.assert_allclose(loss, [0.25 * math.log(2.0)], rtol=1e-6)


@pytest.mark.parametrize("gamma", GAMMA)
def test_hopeless_and_certain_rows_are_finite(run, gamma):
    """p is 0 and 1 in float32: the loss is log B - z_y, and exp of it to the power 1 + gamma."""
    target, log_b = (
        ops.convert_to_tensor([-128.0, 80.0, 0.0]),
        ops.convert_to_tensor([64.0, 60.0, -24.0]),
    )

    def loss_of(target, log_b):
        return margin_loss(target, log_b, ops.zeros(3), num_classes=3, focal_gamma=gamma)

    loss, *gradients = run(lambda *x: value_and_gradients(loss_of, x))(target, log_b)
    assert np.isfinite([loss, *gradients]).all()
    np.testing.assert_allclose(loss[0], 192.0, rtol=1e-6)
    np.testing.assert_allclose(loss[1:], np.exp(np.array([-20.0, -24.0]) * (1 + gamma)), rtol=1e-4)
    np.testing.assert_allclose([g[0] for g in gradients], [-1.0, 1.0], rtol=1e-6)
