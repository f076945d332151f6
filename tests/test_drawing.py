import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
import pytest

from keras_margin.drawing import COLORS, LINES, line_look, new_axes


@pytest.fixture(autouse=True)
def close_figures():
    yield
    plt.close("all")


def test_every_curve_of_a_family_has_a_line_and_marker_of_its_own():
    looks = [line_look(place, 721) for place in range(42)]
    assert len({(str(look["linestyle"]), look.get("marker")) for look in looks}) == 42
    assert {look["color"] for look in looks} == set(COLORS)
    assert len(set(map(str, LINES))) == len(LINES)


def test_the_first_curves_have_no_markers_and_each_color_is_new():
    looks = [line_look(place, 721) for place in range(6)]
    assert not any("marker" in look for look in looks)
    assert len({look["color"] for look in looks}) == 6


@pytest.mark.parametrize("points", [1, 2, 11, 721])
def test_a_curve_with_markers_shows_some(points):
    ax = plt.figure().add_subplot()
    ax.plot(np.arange(points), np.arange(points), **line_look(8, points))
    ax.figure.canvas.draw()


def test_axes_are_kept_or_made_in_the_size_that_is_asked_for():
    ax = plt.figure().add_subplot()
    assert new_axes(ax, figsize=(9, 5)) is ax
    assert tuple(new_axes(None, figsize=(9, 5)).figure.get_size_inches()) == (9, 5)
