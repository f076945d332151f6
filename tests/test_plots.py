import importlib.util
import re
import sys

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
import pytest
from matplotlib.colors import to_hex

from keras_margin import plots
from keras_margin.margins import CosineMargin
from keras_margin.verification import tar_at_far


def exactly(message):
    return f"^{re.escape(message)}$"


@pytest.fixture(autouse=True)
def close_figures():
    yield
    plt.close("all")


def texts(ax):
    return [text.get_text() for text in ax.get_legend().get_texts()]


def scored(genuines=30, impostors=200, decimals=2):
    """Overlapping scores, rounded so that some tie."""
    rng = np.random.default_rng(0)
    scores = np.concatenate([rng.normal(0.5, 0.2, genuines), rng.normal(0, 0.2, impostors)])
    return scores.round(decimals), np.arange(genuines + impostors) < genuines


def circle(classes=4, per_class=5, dim=2):
    rng = np.random.default_rng(1)
    labels = np.repeat(np.arange(classes), per_class)
    return rng.normal(size=(len(labels), dim)), labels


CALLS = {
    "roc": lambda ax, module=plots: module.roc(*scored(), ax=ax),
    "score_histogram": lambda ax, module=plots: module.score_histogram(*scored(), ax=ax),
    "embeddings": lambda ax, module=plots: module.embeddings(*circle(), ax=ax),
    "target_logits": lambda ax, module=plots: module.target_logits(CosineMargin(0.3), ax=ax),
    "probability": lambda ax, module=plots: module.probability(10, ax=ax),
    "angles": lambda ax, module=plots: module.angles(course(), ax=ax),
}


def course():
    """As `AngleRecorder` writes it."""
    names = [f"{n}_angle{end}" for n in ("target", "nontarget") for end in ("", "_low", "_high")]
    return {name: [90.0, 60.0] for name in names}


@pytest.mark.parametrize("name", CALLS)
def test_draws_on_the_given_axes_and_returns_them(name):
    _, (left, right) = plt.subplots(1, 2)
    figures = plt.get_fignums()
    assert CALLS[name](right) is right
    assert not left.has_data()
    assert right.has_data()
    assert plt.get_fignums() == figures


@pytest.mark.parametrize("name", CALLS)
def test_makes_a_figure_and_names_the_axes(name):
    ax = CALLS[name](None)
    assert isinstance(ax, plt.Axes)
    assert ax.get_xlabel() and ax.get_ylabel()
    ax.figure.canvas.draw()  # layout problems would warn here


@pytest.mark.parametrize("name", CALLS)
def test_without_matplotlib_names_the_install_command(monkeypatch, name):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    spec = importlib.util.find_spec("keras_margin.plots")
    fresh = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(fresh)  # importing needs no matplotlib
    message = 'Pictures need matplotlib: pip install "keras_margin[plot]"'
    with pytest.raises(ImportError, match=exactly(message)):
        CALLS[name](None, fresh)


# roc


@pytest.mark.parametrize("decimals", [1, 2, 8])
def test_roc_reads_as_tar_at_far(decimals):
    scores, genuine = scored(decimals=decimals)
    ax = plots.roc(scores, genuine)
    (line,) = ax.lines
    assert line.get_drawstyle() == "steps-post"
    assert ax.get_xscale() == "log"
    x, y = line.get_data()
    assert (x[0], x[-1], y[-1]) == (1 / 200, 1.0, 1.0)
    fars = np.arange(1, 201) / 200
    drawn = y[np.searchsorted(x, fars, side="right") - 1]
    np.testing.assert_allclose(drawn, tar_at_far(scores, genuine, fars), rtol=1e-12)


def test_roc_of_separable_and_of_constant_scores():
    genuine = np.arange(8) < 4
    x, y = plots.roc(-np.arange(8), genuine).lines[0].get_data()
    np.testing.assert_array_equal([x, y], [[0.25, 1], [1, 1]])
    x, y = plots.roc(np.ones(8), genuine).lines[0].get_data()
    np.testing.assert_array_equal([x[0], y[0], x[-1], y[-1]], [0.25, 0, 1, 1])


def test_roc_legend_only_with_labels_and_a_color_each():
    ax = plots.roc(*scored())
    assert ax.get_legend() is None
    plots.roc(*scored(), ax=ax, label="ArcFace")
    plots.roc(*scored(), ax=ax, label="CosFace")
    assert texts(ax) == ["ArcFace", "CosFace"]
    assert len({line.get_color() for line in ax.lines}) == 3


@pytest.mark.parametrize("genuine", [[0, 0], [1, 1]])
def test_roc_needs_both_kinds(genuine):
    message = (
        "`genuine` must hold genuine and impostor pairs. "
        f"Received: {sum(genuine)} genuine, {2 - sum(genuine)} impostor pairs"
    )
    with pytest.raises(ValueError, match=exactly(message)):
        plots.roc([0.1, 0.2], genuine)


# score_histogram


def test_histogram_shows_both_densities_over_the_same_bins():
    scores, genuine = scored(genuines=400, impostors=3000)
    ax = plots.score_histogram(scores, genuine)
    assert texts(ax) == ["genuine (400 pairs)", "impostor (3,000 pairs)"]
    assert [to_hex(patch.get_edgecolor()).upper() for patch in ax.patches] == ["#0072B2", "#D55E00"]
    edges = np.linspace(scores.min(), scores.max(), 21)  # 20 = sqrt(400)
    for patch, kind in zip(ax.patches, [scores[genuine], scores[~genuine]], strict=True):
        density = np.histogram(kind, edges)[0] / len(kind) / np.diff(edges)
        assert patch.get_xy()[:, 1].max() == pytest.approx(density.max(), rel=1e-9)
    assert ax.get_ylim()[1] > 1.2 * ax.dataLim.ymax  # the legend has room


@pytest.mark.parametrize("kind", [0, 1])
def test_histogram_leaves_out_a_kind_without_pairs(kind):
    ax = plots.score_histogram([0.1, 0.2, 0.3], [kind] * 3)
    assert texts(ax) == [["impostor (3 pairs)", "genuine (3 pairs)"][kind]]


def test_histogram_of_constant_scores():
    ax = plots.score_histogram(np.full(4, 0.3, np.float32), [1, 0, 1, 0])
    assert len(ax.patches) == 2
    assert np.isfinite(ax.dataLim.bounds).all()


def test_histogram_needs_a_pair():
    message = "`scores` must hold at least one pair. Received: scores.shape=(0,)"
    with pytest.raises(ValueError, match=exactly(message)):
        plots.score_histogram([], [])


def test_scores_are_checked():
    message = "`scores` must be finite. Received: scores[0]=nan"
    for plot in (plots.roc, plots.score_histogram):
        with pytest.raises(ValueError, match=exactly(message)):
            plot([np.nan, 0.1], [0, 1])


# embeddings


def drawn(ax, label):
    (line,) = [line for line in ax.lines if line.get_label() == label]
    return np.stack(line.get_data_3d() if ax.name == "3d" else line.get_data(), axis=-1)


@pytest.mark.parametrize("dim", [2, 3])
def test_embeddings_lie_at_length_one_in_their_direction(dim):
    rows, labels = circle(dim=dim)
    ax = plots.embeddings(rows, labels)
    assert texts(ax) == ["0", "1", "2", "3"]
    for label in range(4):
        expected = [row / np.sqrt(np.sum(row * row)) for row in rows[labels == label]]
        np.testing.assert_allclose(drawn(ax, str(label)), expected, rtol=1e-12)
    ax.figure.canvas.draw()


@pytest.mark.parametrize("dim", [2, 3])
def test_embeddings_at_their_own_length(dim):
    rows, labels = circle(dim=dim)
    ax = plots.embeddings(7 * rows, labels, np.eye(dim), normalize=False)
    for label in range(4):
        np.testing.assert_array_equal(drawn(ax, str(label)), 7 * rows[labels == label])
    longest = np.linalg.norm(7 * rows, axis=1).max()
    stars = [line for line in ax.lines if line.get_marker() == "*"][:dim]
    for star, direction in zip(stars, np.eye(dim), strict=True):
        ends = star.get_data_3d() if dim == 3 else star.get_data()
        np.testing.assert_allclose(np.ravel(ends), longest * direction)
    assert not any(line.get_color() == "0.75" for line in ax.lines)  # no circle
    assert ax.get_xlabel() == "dimension 1"
    ax.figure.canvas.draw()


def test_embeddings_that_are_all_zero_have_rays_of_length_one():
    ax = plots.embeddings(np.zeros((2, 2)), [0, 1], 3 * np.eye(2), normalize=False)
    star = next(line for line in ax.lines if line.get_marker() == "*")
    np.testing.assert_array_equal(np.ravel(star.get_data()), [1, 0])


@pytest.mark.parametrize("dim", [2, 3])
def test_centers_are_rays_of_their_class_color(dim):
    rows, labels = circle(dim=dim)
    centers = 3 * np.eye(dim)
    ax = plots.embeddings(rows, labels, centers)
    assert texts(ax)[-1] == "class centre"
    colors = {line.get_label(): line.get_color() for line in ax.lines}
    for c in range(dim):
        unit = np.eye(dim)[c]
        stars = [line for line in ax.lines if line.get_marker() == "*"]
        assert stars[c].get_color() == colors[str(c)]
        ends = stars[c].get_data_3d() if dim == 3 else stars[c].get_data()
        np.testing.assert_array_equal(np.ravel(ends), unit)


def test_center_without_samples_is_drawn():
    ax = plots.embeddings([[1.0, 0.0]], [1], centers=np.eye(2))
    assert texts(ax) == ["0", "1", "class centre"]


def test_classes_differ_in_color_or_marker():
    rows, labels = circle(classes=30)
    ax = plots.embeddings(rows, labels)
    assert ax.get_legend() is None
    points = [line for line in ax.lines if line.get_linestyle() == "None"]
    assert len({(line.get_color(), line.get_marker()) for line in points}) == 30


@pytest.mark.parametrize("names", [["cat", "dog"], {0: "cat", 1: "dog"}])
def test_names_replace_labels(names):
    assert texts(plots.embeddings(*circle(classes=2), names=names)) == ["cat", "dog"]


@pytest.mark.parametrize("names", [["cat"], {0: "cat"}])
def test_names_must_cover_the_classes(names):
    message = "`names` must name every class. Received: names without class 1"
    with pytest.raises(ValueError, match=exactly(message)):
        plots.embeddings(*circle(classes=2), names=names)


def test_labels_may_be_a_column_of_any_integers():
    rows, labels = circle(classes=2)
    column = np.array([-5, 70000])[labels][:, None]
    assert texts(plots.embeddings(rows, column)) == ["-5", "70000"]


def test_sequence_of_names_does_not_reach_negative_labels():
    message = "`names` must name every class. Received: names without class -1"
    with pytest.raises(ValueError, match=exactly(message)):
        plots.embeddings([[1.0, 0.0]], [-1], names=["cat"])


@pytest.mark.parametrize("dim", [1, 4])
def test_other_dimensions_are_refused(dim):
    figures = plt.get_fignums()
    message = f"`embeddings` must have 2 or 3 columns. Received: embeddings.shape=(5, {dim})"
    with pytest.raises(ValueError, match=exactly(message)):
        plots.embeddings(*circle(classes=1, dim=dim))
    assert plt.get_fignums() == figures  # none was opened for nothing


def test_centers_of_another_dimension_are_refused():
    message = (
        "`centers` must have as many columns as `embeddings`. "
        "Received: centers.shape=(3, 3), embeddings.shape=(20, 2)"
    )
    with pytest.raises(ValueError, match=exactly(message)):
        plots.embeddings(*circle(), centers=np.eye(3))


def test_flat_axes_are_refused_for_three_dimensions():
    message = (
        "`ax` must have a 3-D projection for embeddings of 3 columns. "
        "Received: ax with projection 'rectilinear'"
    )
    with pytest.raises(ValueError, match=exactly(message)):
        plots.embeddings(*circle(dim=3), ax=plt.figure().add_subplot())
