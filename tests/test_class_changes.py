"""A head for other classes: kept rows bit for bit, new rows, and the state that goes on."""

import gc
import math
import re

import keras
import numpy as np
import pytest
from keras import ops
from registry import CLASSES, DIM, HEADS

import keras_margin as km
from keras_margin import class_changes

WITH_CLASSES = {name: entry for name, entry in HEADS.items() if entry.has_classes}
MARGIN = {"new_margin": 0.25}  # what "ArcFace, per class" needs


def exactly(message):
    return f"^{re.escape(message)}$"


def as_numpy(tensor):
    return ops.convert_to_numpy(tensor)


def trained(head, dim=DIM, steps=3):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(12, dim)).astype("float32")
    for _ in range(steps):
        head.loss(x, np.arange(12) % head.num_classes)
    head.centers.assign(rng.normal(size=head.centers.shape))
    return head


def rows_of(head, classes):
    rows = as_numpy(head.centers)[: head.num_rows]
    return rows.reshape(head.num_classes, head.num_subcenters, -1)[list(classes)]


# Every head


@pytest.mark.parametrize("name", WITH_CLASSES)
@pytest.mark.parametrize(
    ("number", "mapping"),
    [(8, None), (4, None), (CLASSES, None), (6, {0: 5, 4: 0, 2: 2})],
    ids=["grown", "shrunk", "same", "mapped"],
)
def test_kept_rows_are_the_same_numbers(name, number, mapping):
    head = trained(WITH_CLASSES[name].make())
    before = as_numpy(head.centers)
    per_class = MARGIN if name == "ArcFace, per class" else {}
    new = head.resized(number, mapping, **per_class)
    assert type(new) is type(head)
    assert new.num_classes == number
    kept = mapping or {each: each for each in range(min(CLASSES, number))}
    np.testing.assert_array_equal(rows_of(new, kept.values()), rows_of(head, kept))
    np.testing.assert_array_equal(head.centers, before)
    assert np.isfinite(
        as_numpy(new.loss(np.eye(3, DIM, dtype="float32"), [0, 1, number - 1]))
    ).all()
    again = type(new).from_config(new.get_config())
    assert again.get_config() == new.get_config()


@pytest.mark.parametrize("name", WITH_CLASSES)
def test_the_same_number_of_classes_changes_nothing(name):
    head = trained(WITH_CLASSES[name].make())
    new = head.resized(CLASSES)
    x, y = np.random.default_rng(1).normal(size=(6, DIM)).astype("float32"), [0, 1, 2, 3, 4, 0]
    for _ in range(2):
        np.testing.assert_array_equal(new.loss(x, y), head.loss(x, y))
    for one, other in zip(new.variables, head.variables, strict=True):
        np.testing.assert_array_equal(one, other)
    assert {**new.get_config(), "centers_initializer": 0} == {
        **head.get_config(),
        "centers_initializer": 0,
    }


# New rows


def test_new_rows_are_those_of_a_fresh_head():
    head = trained(km.ArcFace(3, seed=7))
    fresh = km.ArcFace(6, seed=7)
    fresh.build((None, DIM))
    new = head.resized(6, {2: 0})
    np.testing.assert_array_equal(new.centers[1:], fresh.centers[1:])
    np.testing.assert_array_equal(new.centers[0], head.centers[2])


def test_new_rows_are_made_by_the_initializer():
    head = trained(km.ArcFace(3, centers_initializer=keras.initializers.Constant(0.5)))
    np.testing.assert_array_equal(head.resized(5).centers[3:], np.full((2, DIM), 0.5))


def only_for_six(shape, dtype=None):
    if tuple(shape) != (6, DIM):
        raise AssertionError(shape)
    return np.ones(shape, dtype)


@pytest.mark.parametrize(
    "initializer",
    [keras.initializers.Constant(np.ones((6, DIM))), only_for_six],
    ids=["array", "function"],
)
def test_an_initializer_for_the_old_number_alone(initializer):
    head = trained(km.ArcFace(6, centers_initializer=initializer, seed=3))
    fresh = km.ArcFace(8, seed=3)
    fresh.build((None, DIM))
    with pytest.warns(UserWarning, match="cannot make 8 centres.*the default one"):
        new = head.resized(8)
    np.testing.assert_array_equal(new.centers[6:], fresh.centers[6:])
    np.testing.assert_array_equal(new.centers[:6], head.centers)
    assert head.resized(4).num_classes == 4  # no new row, nothing to warn of


def shrinking(centers):
    return 0.1 * ops.sum(centers**2)


def test_a_regularizer_goes_on():
    head = trained(km.ArcFace(3, centers_regularizer=shrinking))
    new = head.resized(4)
    (loss,) = new.losses
    np.testing.assert_allclose(loss, 0.1 * np.sum(as_numpy(new.centers) ** 2), rtol=1e-6)


# State


@pytest.mark.parametrize("number", [3, 8, 30])
def test_adacos_scale_keeps_its_ratio_to_the_fixed_scale(number):
    head = trained(km.AdaCos(CLASSES))
    head.scale_policy.scale.assign(2.5)
    got = float(head.resized(number).current_scale)
    fixed = km.scales.fixed_adacos_scale
    assert got == pytest.approx(2.5 * fixed(number) / fixed(CLASSES), rel=1e-6)
    assert got == pytest.approx(2.5 * math.log(number - 1) / math.log(CLASSES - 1), rel=1e-6)


def test_adacos_bounds():
    """The default one follows the classes, and a scale at it stays there; a given one stays."""
    head = trained(km.AdaCos(CLASSES))
    head.scale_policy.scale.assign(head.scale_policy.largest_scale)
    new = head.resized(100)
    assert new.scale_policy.largest_scale == 4.0 * km.scales.fixed_adacos_scale(100)
    assert float(new.current_scale) == pytest.approx(new.scale_policy.largest_scale, rel=1e-6)
    head = trained(km.AdaCos(CLASSES, max_scale=2.0))
    head.scale_policy.scale.assign(2.0)
    assert float(head.resized(100).current_scale) == 2.0


def test_fixed_adacos_scale_is_that_of_the_new_number():
    head = trained(km.AdaCos(CLASSES, dynamic=False))
    got = float(head.resized(100).current_scale)
    assert got == np.float32(km.scales.fixed_adacos_scale(100))


def test_a_policy_for_the_classes_is_made_anew():
    head = trained(km.MarginHead(CLASSES, None, km.scales.AdaCosScale(CLASSES, max_scale=5.0)))
    policy = head.resized(9).scale_policy
    assert (policy.num_classes, policy.max_scale) == (9, 5.0)


def test_adacos_needs_three_classes():
    with pytest.raises(ValueError, match="`num_classes` of at least 3"):
        trained(km.AdaCos(CLASSES)).resized(2)


@pytest.mark.parametrize(
    ("name", "names"),
    [
        ("AdaFace", ["mu", "sigma", "steps"]),
        ("CurricularFace", ["t", "steps"]),
        ("SphereFace2", ["bias", "steps"]),
        ("MarginHead, learned scale", ["log_scale", "steps"]),
        ("ArcFace, warm-up", ["steps"]),
    ],
)
def test_statistics_and_counters_go_on(name, names):
    head = trained(WITH_CLASSES[name].make())
    for variable in head.trainable_variables:
        variable.assign(variable + 0.125)
    new = head.resized(9)
    found = {variable.name: variable for variable in new.variables}
    for variable in head.variables:
        if variable.name in names:
            np.testing.assert_array_equal(found[variable.name], variable)
    assert int(new.steps) == 3


def test_a_schedule_goes_on():
    warm_up = keras.optimizers.schedules.PolynomialDecay(0.0, 10, end_learning_rate=0.5)
    head = trained(km.ArcFace(CLASSES, warm_up))
    margin = head.resized(9).margin_rule.setting("margin", "float32")
    assert float(margin) == pytest.approx(0.15)


@pytest.mark.parametrize(
    "make",
    [
        lambda margins: km.ArcFace(3, margins),
        lambda margins: km.CosFace(3, margins),
        lambda margins: km.MarginHead(3, km.margins.CosineMargin(margins)),
    ],
    ids=["ArcFace", "CosFace", "rule"],
)
def test_margins_per_class_go_with_their_classes(make):
    head = trained(make([0.1, 0.2, 0.3]))
    new = head.resized(4, {2: 0, 0: 3}, new_margin=0.05)
    np.testing.assert_allclose(new.margin_rule.margin, [0.3, 0.05, 0.05, 0.1])
    assert head.resized(2).margin_rule.margin == [0.1, 0.2]
    message = (
        "The head has one margin per class: give the new classes theirs with `new_margin`, a "
        "number. Received: new_margin=None"
    )
    with pytest.raises(ValueError, match=exactly(message)):
        head.resized(4)


def test_a_margin_that_no_class_needs():
    message = (
        "`new_margin` is for a head with one margin per class; this one has the same for all. "
        "Received: new_margin=0.1"
    )
    with pytest.raises(ValueError, match=exactly(message)):
        trained(km.ArcFace(3)).resized(4, new_margin=0.1)


# What is refused


@pytest.mark.parametrize(
    ("mapping", "error", "message"),
    [
        ({3: 0}, ValueError, "`mapping` must name old ids from 0 to 2. Received: 3: 0"),
        ({-1: 0}, ValueError, "`mapping` must name old ids from 0 to 2. Received: -1: 0"),
        ({0: 4}, ValueError, "`mapping` must name new ids from 0 to 3. Received: 0: 4"),
        (
            {0: 1, 2: 1},
            ValueError,
            "`mapping` must give each class an id of its own. Received: 0: 1 and 2: 1",
        ),
        (
            {"0": 1},
            TypeError,
            "`mapping` must hold whole numbers {old id: new id}. Received: '0': 1",
        ),
        (
            {0: 1.0},
            TypeError,
            "`mapping` must hold whole numbers {old id: new id}. Received: 0: 1.0",
        ),
        (
            {True: 1},
            TypeError,
            "`mapping` must hold whole numbers {old id: new id}. Received: True: 1",
        ),
        (
            [0, 1],
            TypeError,
            "`mapping` must be a dict {old id: new id}. Received: mapping of type list",
        ),
    ],
    ids=str,
)
def test_mappings_that_are_none(mapping, error, message):
    with pytest.raises(error, match=exactly(message)):
        trained(km.ArcFace(3)).resized(4, mapping)


def test_numpy_ids():
    head = trained(km.ArcFace(3))
    new = head.resized(4, dict(zip(np.arange(3), np.int32([3, 1, 0]), strict=True)))
    np.testing.assert_array_equal(ops.take(new.centers, [3, 1, 0], axis=0), head.centers)


@pytest.mark.parametrize("number", [1, 0, 2.5, "4", None])
def test_numbers_of_classes_that_are_none(number):
    with pytest.raises(ValueError, match="`num_classes` must be"):
        trained(km.ArcFace(3)).resized(number)


def test_an_ignored_label_may_not_become_a_class():
    head = trained(km.ArcFace(3, ignore_class=3))
    with pytest.raises(ValueError, match="ignore_class=3 would be one of the 4 classes"):
        head.resized(4)
    assert head.resized(2).ignore_class == 3


def test_heads_without_centers():
    with pytest.raises(ValueError, match="SemiHardTriplet has no classes, and so no centres"):
        km.SemiHardTriplet().resized(4)
    with pytest.raises(ValueError, match="has no centres yet"):
        km.ArcFace(3).resized(4)


# Where rows come from


def test_sources_of_a_chain_of_heads():
    head = trained(km.ArcFace(3, num_subcenters=2))
    one = head.collapsed([1, 0, 1])
    two = one.resized(4, {2: 0, 0: 1})
    assert class_changes.sources_of(one, head).tolist() == [1, 2, 5]
    assert class_changes.sources_of(two, one).tolist() == [2, 0, -1, -1]
    assert class_changes.sources_of(two, head).tolist() == [5, 1, -1, -1]
    assert class_changes.sources_of(head, one) is None
    np.testing.assert_array_equal(two.centers[:2], as_numpy(head.centers)[[5, 1]])
    del one
    gc.collect()
    assert class_changes.sources_of(two, head).tolist() == [5, 1, -1, -1]


# Files


def test_weights_of_another_number_of_classes_are_refused(tmp_path):
    def model(classes):
        backbone = keras.Sequential([keras.Input((4,)), keras.layers.Dense(DIM)])
        return km.EmbeddingModel(backbone, km.ArcFace(classes))

    model(5).save_weights(tmp_path / "five.weights.h5")
    message = (
        r"must hold centres of shape \(7, 4\).*`model.replace_head\(model.head.resized\("
        r"num_classes\)\)`. Received: centers.shape=\(5, 4\) in the file"
    )
    seven = model(7)
    before = [as_numpy(variable) for variable in seven.variables]
    with pytest.raises(ValueError, match=message):
        seven.load_weights(tmp_path / "five.weights.h5")
    for variable, value in zip(seven.variables, before, strict=True):
        np.testing.assert_array_equal(variable, value, err_msg=variable.path)
    head = km.ArcFace(7)
    head.build((None, 4))
    before = as_numpy(head.centers)
    with pytest.raises(ValueError, match=message):
        head.load_own_variables({"0": np.zeros((5, 4)), "1": np.zeros(())})
    np.testing.assert_array_equal(head.centers, before)
    head.load_own_variables({"0": np.ones((7, 4)), "1": np.zeros(())})
    np.testing.assert_array_equal(head.centers, np.ones((7, 4)))
