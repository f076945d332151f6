import re

import matplotlib

matplotlib.use("Agg")

import keras
import matplotlib.pyplot as plt
import numpy as np
import pytest
from registry import HEADS

import keras_margin as km
from keras_margin import plots
from keras_margin.margins import AngularMargin, CosineMargin

DEGREES = np.linspace(0, 180, 721)
THETA = np.radians(DEGREES)


def exactly(message):
    return f"^{re.escape(message)}$"


@pytest.fixture(autouse=True)
def close_figures():
    yield
    plt.close("all")


def curves(ax):
    """{name in the legend: y} of the drawn lines."""
    for line in ax.lines:
        np.testing.assert_allclose(line.get_xdata(), DEGREES)
    return {line.get_label(): np.asarray(line.get_ydata()) for line in ax.lines}


def only_curve(head, **kwargs):
    (values,) = curves(plots.target_logits(head, **kwargs)).values()
    return values


# target_logits


def trained_logits(head, norm, label=0):
    """Target logit / scale as a functional model is trained with it, one training call an angle."""
    values = []
    for theta in np.radians(ANGLES):
        fresh = type(head).from_config(head.get_config())
        fresh.build((None, 2))
        # The centre of the class at angle 0, with length 1; the others opposite.
        centers = np.tile([[-1.0, 0.0]], (fresh.centers.shape[0], 1))
        rows = slice(label * head.num_subcenters, (label + 1) * head.num_subcenters)
        centers[rows] = [1.0, 0.0]
        fresh.centers.assign(centers)
        embedding = norm * np.array([[np.cos(theta), np.sin(theta)]], "float32")
        logits = fresh(embedding, np.array([label]), training=True)
        scale = fresh.scale_policy.scale_of(np.array([norm], "float32"))
        values.append(float(logits[0, label]) / float(np.ravel(scale)[0]))
    return np.array(values)


ANGLES = np.array([0.0, 30.0, 75.0, 120.0, 179.0])
# Compared by other tests: its bias, its draws, statistics that a training call moves first.
COMPARED = [
    name
    for name, entry in HEADS.items()
    if entry.has_classes and not name.startswith(("SphereFace2", "Elastic", "AdaFace", "MagFace"))
]


@pytest.mark.parametrize("name", [name for name in COMPARED if name != "ArcFace, per class"])
def test_draws_what_a_training_call_does(name):
    head = HEADS[name].make()
    drawn = np.interp(ANGLES, DEGREES, only_curve({name: head}))
    # SoftmaxHead has no scale: its logit has the norm in it.
    norm = 1.0 if name == "SoftmaxHead" else 1.5
    np.testing.assert_allclose(drawn, trained_logits(head, norm), atol=2e-3)


@pytest.mark.filterwarnings("ignore:.*norm:UserWarning")  # of norms outside the range
@pytest.mark.parametrize("norm", [1.0, 7.0, 51.0, 90.0])
def test_magface_at_a_norm(norm):
    head = HEADS["MagFace"].make()
    drawn = only_curve(head, norms=norm)
    np.testing.assert_allclose(
        np.interp(ANGLES, DEGREES, drawn), trained_logits(head, norm), atol=2e-3
    )


def test_norms_of_magface_are_the_ends_of_its_range():
    drawn = curves(plots.target_logits(km.MagFace(5)))
    assert list(drawn) == ["MagFace, |x| = 10", "MagFace, |x| = 110"]
    small = THETA < np.pi - 0.9
    for values, margin in zip(drawn.values(), (0.45, 0.8), strict=True):
        np.testing.assert_allclose(values[small], np.cos(THETA + margin)[small], atol=2e-3)


@pytest.mark.parametrize("built", [False, True])
def test_adaface_at_its_mean_norm_and_a_deviation_to_each_side(built):
    head = km.AdaFace(5)
    mu, sigma = 20.0, 100.0  # of the published code, before the first call
    if built:
        head.build((None, 2))
        mu, sigma = 30.0, 5.0
        head.margin_rule.mu.assign(mu)
        head.margin_rule.sigma.assign(sigma)
    drawn = curves(plots.target_logits(head))
    norms = [25.0, 30.0, 35.0] if built else [0.001, 20.0, 100.0]
    assert list(drawn) == [f"AdaFace, m = 0.4, |x| = {norm:g}" for norm in norms]
    for values, norm in zip(drawn.values(), norms, strict=True):
        g = np.clip(0.333 * (norm - mu) / (sigma + 1e-3), -1, 1)
        expected = np.cos(np.clip(THETA - 0.4 * g, 1e-3, np.pi - 1e-3)) - 0.4 * (1 + g)
        np.testing.assert_allclose(values, expected, atol=2e-3)
    assert head.built is built


@pytest.mark.parametrize("kind", ["angular", "cosine"])
def test_elasticface_at_the_mean_of_its_draws(kind):
    head = km.ElasticFace(5, margin=0.3, std=0.2, kind=kind)
    same = {"angular": km.ArcFace, "cosine": km.CosFace}[kind](5, margin=0.3)
    np.testing.assert_array_equal(only_curve(head), only_curve(same))


def test_sphereface2_without_its_bias():
    head = km.SphereFace2(5, 0.3, similarity_power=2.0)
    expected = 2 * ((np.cos(THETA) + 1) / 2) ** 2 - 1 - 0.3
    np.testing.assert_allclose(only_curve(head), expected, atol=1e-5)
    assert not head.built


def test_annealing_and_schedules_are_drawn_at_the_step_that_is_named():
    head = km.SphereFace(5, 4)
    assert list(curves(plots.target_logits(head))) == ["SphereFace, m = 4, λ = 893 at step 0"]
    head.build((None, 2))
    head.steps.assign(10_000)
    (name, values), *_ = curves(plots.target_logits(head)).items()
    assert name == "SphereFace, m = 4, λ = 5 at step 10000"
    assert values[-1] == pytest.approx((5 * -1 - 7) / 6, abs=1e-5)
    (name,) = curves(plots.target_logits(km.SphereFace(5, 4, lambda_base=0, lambda_min=2)))
    assert name == "SphereFace, m = 4, λ = 2"  # a constant

    warm = HEADS["ArcFace, warm-up"].make()
    assert list(curves(plots.target_logits(warm))) == ["ArcFace at step 0"]
    np.testing.assert_allclose(only_curve(warm), only_curve(AngularMargin(0.1)), atol=1e-6)
    warm.build((None, 2))
    warm.steps.assign(9)
    np.testing.assert_allclose(only_curve(warm), only_curve(AngularMargin(0.4)), atol=1e-6)


def test_margins_per_class_show_the_smallest_and_the_largest():
    drawn = curves(plots.target_logits(km.ArcFace(4, margin=[0.3, 0.9, 0.1, 0.5])))
    assert list(drawn) == ["ArcFace, class 1", "ArcFace, class 2"]
    for values, margin in zip(drawn.values(), (0.9, 0.1), strict=True):
        np.testing.assert_array_equal(values, only_curve(AngularMargin(margin)))
    assert list(curves(plots.target_logits(CosineMargin([0.2, 0.2])))) == ["CosineMargin, class 0"]


@pytest.mark.parametrize("built", [False, True])
@pytest.mark.parametrize("name", [name for name in HEADS if HEADS[name].has_classes])
def test_no_state_moves(name, built):
    head = HEADS[name].make()
    if built:
        head.build((None, 4))
    before = [np.array(variable) for variable in head.variables]
    plots.target_logits(head)
    assert head.built is built
    assert len(head.variables) == len(before)
    for old, new in zip(before, head.variables, strict=True):
        np.testing.assert_array_equal(old, new)
    if not built:
        head.build((None, 4))  # nothing is in the way
    assert np.isfinite(head.loss(np.eye(5, 4), np.arange(5))).all()


def test_names_come_from_the_class_or_the_dictionary():
    heads = [km.CosFace(5), km.MarginHead(5, AngularMargin(0.2)), km.MarginHead(5), km.AdaCos(5)]
    names = ["CosFace, m = 0.35", "AngularMargin, m = 0.2", "MarginHead", "AdaCos"]
    assert list(curves(plots.target_logits(heads))) == names
    assert list(curves(plots.target_logits({"mine": heads[1]}))) == ["mine"]


def test_many_curves_are_told_apart_beside_their_legend():
    ax = plots.target_logits([CosineMargin(m / 20) for m in range(20)])
    assert len({(str(line.get_linestyle()), line.get_marker()) for line in ax.lines}) >= 6
    box = ax.get_legend().get_window_extent()
    assert box.x0 >= ax.get_window_extent().x1  # no curve is under it
    ax.figure.canvas.draw()


def test_draws_on_given_axes_after_what_is_there():
    _, ax = plt.subplots()
    assert plots.target_logits(CosineMargin(0.1), ax) is ax
    plots.target_logits(CosineMargin(0.2), ax)
    assert ax.lines[0].get_color() != ax.lines[1].get_color()
    assert "degrees" in ax.get_xlabel() and ax.get_ylabel()
    assert len(ax.get_legend().get_texts()) == 2


def test_what_has_no_target_logit_is_refused():
    message = (
        "`heads` must be heads with a logit for the target, or margin rules. Received: {} for {!r}"
    )
    triplet = km.SemiHardTriplet()
    for given, head, name in (
        ({"triplet": triplet}, triplet, "triplet"),
        ([3], 3, "int"),
        (None, None, "NoneType"),
        (km.ArcFace, km.ArcFace, "type"),
    ):
        with pytest.raises(TypeError, match=exactly(message.format(repr(head), name))):
            plots.target_logits(given)


@pytest.mark.parametrize("heads", [[], {}])
def test_no_heads_are_refused(heads):
    message = f"`heads` must hold at least one head. Received: heads={heads!r}"
    with pytest.raises(ValueError, match=exactly(message)):
        plots.target_logits(heads)


def test_two_curves_of_one_name_are_refused():
    message = (
        "`heads` must have a name each: give a dictionary from name to head. "
        "Received: heads named ['AdaCos', 'AdaCos']"
    )
    with pytest.raises(ValueError, match=exactly(message)):
        plots.target_logits([km.AdaCos(5), km.AdaCos(9)])


def test_a_margin_that_is_nan_now_is_refused():
    falls = keras.optimizers.schedules.PolynomialDecay(-1.0, 5, 0.5)
    with pytest.raises(ValueError, match="Received: NaN for 'ArcFace at step 0'"):
        plots.target_logits(km.ArcFace(5, margin=falls))
    assert not plt.get_fignums()


@pytest.mark.parametrize("norms", [-1.0, [3.0, np.nan], "long"])
def test_norms_are_checked(norms):
    with pytest.raises(ValueError, match="^`norms` must be a finite number, at least 0"):
        plots.target_logits(km.MagFace(5), norms=norms)


# probability


def expected_probability(classes, scale, margin=0.0):
    target = np.exp(scale * np.cos(THETA + margin))
    return target / (target + classes - 1)


def test_a_family_of_scales():
    drawn = curves(plots.probability(2000, scales=[1, 10, 30], adacos=False))
    assert list(drawn) == ["s = 1", "s = 10", "s = 30"]
    for values, scale in zip(drawn.values(), (1, 10, 30), strict=True):
        np.testing.assert_allclose(values, expected_probability(2000, scale), atol=1e-5)


def test_a_family_of_margins_at_scale_30():
    ax = plots.probability(2000, margins=[0.0, 0.3, 0.5])
    drawn = curves(ax)
    assert ax.get_legend().get_title().get_text() == "2,000 classes, s = 30"
    assert list(drawn) == ["m = 0", "m = 0.3", "m = 0.5", "AdaCos, fixed: s = 10.7, m = 0"]
    for values, margin in zip(drawn.values(), (0.0, 0.3, 0.5), strict=False):
        inside = THETA + margin < np.pi
        expected = expected_probability(2000, 30, margin)
        np.testing.assert_allclose(values[inside], expected[inside], atol=1e-4)
        assert (np.diff(values) <= 1e-7).all()  # beyond pi - m it does not rise again


def test_scales_at_one_margin():
    ax = plots.probability(100, scales=(5, 20), margins=0.2, adacos=False)
    assert ax.get_legend().get_title().get_text() == "100 classes, m = 0.2"
    assert len({str(line.get_linestyle()) for line in ax.lines}) == 2
    inside = THETA + 0.2 < np.pi
    expected = expected_probability(100, 20, 0.2)[inside]
    np.testing.assert_allclose(curves(ax)["s = 20"][inside], expected, atol=1e-4)


def test_adacos_is_one_half_at_45_degrees_and_dashed_on_top():
    ax = plots.probability(20_000)
    assert len(ax.lines) == 6  # the default scales
    line = ax.lines[-1]
    assert line.get_linestyle() == "--"
    assert (line.get_color(), line.get_linewidth()) == ("black", 2.5)
    assert len({other.get_color() for other in ax.lines}) == 6
    assert np.interp(45, DEGREES, line.get_ydata()) == pytest.approx(0.5, abs=1e-6)


def test_two_classes_have_no_adacos():
    assert list(curves(plots.probability(2, scales=4))) == ["s = 4"]


def test_any_scale_is_safe():
    drawn = curves(plots.probability(3, scales=[1e-30, 1e6, 1e38]))
    assert all(np.isfinite(values).all() for values in drawn.values())
    np.testing.assert_allclose(drawn["s = 1e-30"], 1 / 3, rtol=1e-12)
    expected = np.where(DEGREES < 90, 1.0, 0.0)
    expected[DEGREES == 90] = 1 / 3
    np.testing.assert_allclose(drawn["s = 1e+38"], expected, rtol=1e-12)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"scales": [1, 2], "margins": [0.1, 0.2]}, "Either `scales` or `margins` may be several"),
        ({"scales": []}, r"`scales` must be a number or several. Received: scales=\[\]"),
        ({"scales": 0}, r"`scales` must be greater than 0. Received: scales=\[0.0\]"),
        ({"scales": [np.inf]}, "`scales` must be a finite number"),
        ({"margins": -0.1}, "`margins` must be a finite number, at least 0"),
        ({"margins": 2.5}, "`margin` must be from 0 to 2.33 radians. Received: margin=2.5"),
        ({"margins": "wide"}, "`margins` must be a finite number"),
    ],
)
def test_probability_refuses(kwargs, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        plots.probability(10, **kwargs)
    assert not plt.get_fignums()


@pytest.mark.parametrize("classes", [1, 2.5])
def test_probability_needs_two_classes(classes):
    with pytest.raises(ValueError, match="^`num_classes` must be"):
        plots.probability(classes)


# angles


def recorded(number=3, scale=True):
    names = [f"{n}_angle{e}" for n in ("target", "nontarget") for e in ("", "_low", "_high")]
    found = {name: [90.0 + 2 * k - n for n in range(number)] for k, name in enumerate(names)}
    return found | ({"scale": [5.0, 4.0, 3.0][:number]} if scale else {})


class Recorder:
    def __init__(self, history, epoch=None):
        self.history = history
        if epoch is not None:
            self.epoch = epoch


def test_angles_over_the_epochs():
    ax = plots.angles(recorded())
    target, others = ax.lines
    np.testing.assert_array_equal(target.get_data(), [[1, 2, 3], [90, 89, 88]])
    np.testing.assert_array_equal(others.get_data(), [[1, 2, 3], [96, 95, 94]])
    assert len(ax.collections) == 2  # the bands
    assert ax.get_xlabel() == "Epoch" and "degrees" in ax.get_ylabel()
    right = ax.figure.axes[1]
    np.testing.assert_array_equal(right.lines[0].get_data(), [[1, 2, 3], [5, 4, 3]])
    assert right.get_ylabel() == "Scale s"
    names = [text.get_text() for text in ax.get_legend().get_texts()]
    assert names == ["own centre", "other centres", "scale"]
    ax.figure.canvas.draw()
    assert ax.get_legend().get_window_extent().y0 >= ax.get_window_extent().y1


def test_angles_over_the_steps_of_a_recorder():
    ax = plots.angles(Recorder(recorded() | {"step": [0, 5, 12]}))
    np.testing.assert_array_equal(ax.lines[0].get_xdata(), [0, 5, 12])
    assert ax.get_xlabel() == "Training step"


def test_angles_of_a_history_that_was_gone_on_with():
    ax = plots.angles(Recorder(recorded(), epoch=[4, 5, 6]))
    np.testing.assert_array_equal(ax.lines[0].get_xdata(), [5, 6, 7])


def test_angles_without_a_scale_have_one_axis_and_one_record_shows():
    _, ax = plt.subplots()
    assert plots.angles(recorded(1, scale=False), ax) is ax
    assert len(ax.figure.axes) == 1
    assert ax.lines[0].get_marker() == "o"


def test_angles_needs_the_record():
    message = (
        "`history` must hold the angles that callbacks.AngleRecorder records: list it in the "
        "callbacks of `fit`. Received: history without 'target_angle'"
    )
    with pytest.raises(ValueError, match=exactly(message)):
        plots.angles({"loss": [1.0]})


@pytest.mark.parametrize("history", [None, 3, [1.0]])
def test_angles_of_something_else(history):
    with pytest.raises(TypeError, match=f"Received: {re.escape(f'history={history!r}')}$"):
        plots.angles(history)


@pytest.mark.parametrize("values", [[], [1.0], [1.0, np.nan, 2.0]])
def test_angles_refuses_uneven_or_undefined_numbers(values):
    with pytest.raises(ValueError, match=r"Received: history\['nontarget_angle'\]="):
        plots.angles(recorded() | {"nontarget_angle": values})
    assert not plt.get_fignums()


def test_numbers_may_be_an_array():
    found = curves(plots.probability(100, np.array([10.0, 20.0])))
    wanted = curves(plots.probability(100, [10.0, 20.0]))
    assert found.keys() == wanted.keys()
    for name, values in found.items():
        np.testing.assert_array_equal(values, wanted[name])
