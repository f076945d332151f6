"""Pictures of scores, embeddings and heads.

matplotlib is optional and imported only to make axes.
"""

from collections.abc import Mapping

import numpy as np

from keras_margin.drawing import BLUE, COLORS, GREY, MARKERS, VERMILION, new_axes
from keras_margin.head_plots import angles, probability, target_logits
from keras_margin.retrieval import check_labels, unit_rows
from keras_margin.score_checks import check_scores
from keras_margin.verification import roc_points

__all__ = ["angles", "embeddings", "probability", "roc", "score_histogram", "target_logits"]

# A legend with more classes than this hides the picture.
LEGEND_CLASSES = 12


def roc(scores, genuine, ax=None, label=None):
    """Verification curve: true accept rate over false accept rate.

    FAR is on a logarithmic axis, as the rates that matter are small. The curve is a staircase,
    since between two operating points nothing better than the left one can be had: it reads as
    `verification.tar_at_far` computes. It begins at one false accept, 1 / impostors, the smallest
    rate that the pairs can show.

        y(far) = max { TAR(t) : FAR(t) <= far }

    Args:
        scores: (pairs,) real array, the larger the more alike.
        genuine: (pairs,) bool, or 0 and 1, with both kinds present.
        ax: matplotlib Axes to draw on; None makes a figure.
        label: Name of the curve in the legend, for several curves on one `ax`.

    Returns:
        The Axes.

    Raises:
        ValueError: shapes, types or values that do not fit; only one kind of pair.
        ImportError: matplotlib is not installed.

    Example:
        >>> from keras_margin import plots
        >>> ax = plots.roc([0.9, 0.8, 0.7, 0.6, 0.3, 0.1], [1, 1, 0, 1, 0, 0])
        >>> ax.get_xlabel()
        'False accept rate (FAR)'

    Reference:
        See `keras_margin.verification.tar_at_far`.
    """
    scores, genuine = check_scores(scores, genuine)
    genuines = np.count_nonzero(genuine)
    impostors = genuine.size - genuines
    if not genuines or not impostors:
        raise ValueError(
            "`genuine` must hold genuine and impostor pairs. "
            f"Received: {genuines} genuine, {impostors} impostor pairs"
        )
    fars, tars, _ = roc_points(scores, genuine)
    start = 1 / impostors
    # Of a staircase only the points where it rises are needed.
    rises = (np.diff(tars, prepend=0.0) > 0) & (fars > start)
    x = np.concatenate([[start], fars[rises], [1.0]])
    y = np.concatenate([tars[fars <= start][-1:], tars[rises], [1.0]])

    ax = new_axes(ax)
    color = COLORS[len(ax.lines) % len(COLORS)]
    ax.plot(x, y, drawstyle="steps-post", color=color, label=label, linewidth=2)
    ax.set(xscale="log", ylim=(0, 1.02))
    ax.set(xlabel="False accept rate (FAR)", ylabel="True accept rate (TAR)")
    ax.grid(alpha=0.3)
    if label is not None:
        ax.legend(loc="lower right")
    return ax


def score_histogram(scores, genuine, ax=None):
    """Densities of the genuine and of the impostor scores.

    The less they overlap, the better pairs can be told apart. Both are densities over the same
    bins, so that the few genuine pairs of a set are seen beside its many impostors.

        height = share of its pairs in the bin / width of the bin

    Args:
        scores: (pairs,) real array, the larger the more alike.
        genuine: (pairs,) bool, or 0 and 1. A kind without pairs is left out.
        ax: matplotlib Axes to draw on; None makes a figure.

    Returns:
        The Axes.

    Raises:
        ValueError: shapes, types or values that do not fit; no pairs at all.
        ImportError: matplotlib is not installed.

    Example:
        >>> from keras_margin import plots
        >>> ax = plots.score_histogram([0.9, 0.8, 0.7, 0.3, 0.1], [1, 1, 0, 0, 0])
        >>> [text.get_text() for text in ax.get_legend().get_texts()]
        ['genuine (2 pairs)', 'impostor (3 pairs)']

    Reference:
        Deng, Guo, Xue, Zafeiriou: ArcFace. 2019, arXiv:1801.07698 (there: angles).
    """
    scores, genuine = check_scores(scores, genuine)
    if not scores.size:
        raise ValueError("`scores` must hold at least one pair. Received: scores.shape=(0,)")
    ax = new_axes(ax)
    scores = scores.astype(np.float64)
    kinds = [("genuine", scores[genuine], BLUE), ("impostor", scores[~genuine], VERMILION)]
    kinds = [kind for kind in kinds if kind[1].size]
    # About the square root of the rarer kind: fewer bins hide its shape, more show its noise.
    rarer = min(values.size for _, values, _ in kinds)
    edges = np.histogram_bin_edges(scores, bins=int(np.clip(np.sqrt(rarer), 10, 80)))
    for name, values, color in kinds:
        ax.hist(
            values,
            bins=edges,
            density=True,
            histtype="stepfilled",
            facecolor=(color, 0.35),
            edgecolor=color,
            linewidth=1.5,
            label=f"{name} ({values.size:,} pairs)",
        )
    ax.margins(y=0.3)  # room for the legend
    ax.set(xlabel="Similarity score", ylabel="Density")
    ax.legend()
    return ax


def embeddings(embeddings, labels, centers=None, ax=None, names=None, *, normalize=True):
    """Embeddings of two or three dimensions on the unit circle or sphere, by class.

    Cosine heads see directions only, so every row is drawn at length 1. Class centres are rays
    from the origin that end in a star.

        point = x / |x|

    `SoftmaxHead`, `LSoftmax` and `SphereFace` see the lengths too: `normalize=False` draws them.
    Centres are directions then as well, and their rays as long as the longest embedding.

    Args:
        embeddings: (samples, dim) real array with dim 2 or 3.
        labels: (samples,) or (samples, 1) integers (whole floats mean the same).
        centers: (num_classes, dim) real array, row c for class c, or None.
        ax: matplotlib Axes to draw on, with a 3-D projection for dim 3; None makes a figure.
        names: Names of the classes for the legend: a sequence from class 0 on, or a
            dictionary from label to name. None writes the labels themselves.
        normalize: False draws every row at its own length, and no circle.

    Returns:
        The Axes. With more than 12 classes it has no legend.

    Raises:
        ValueError: shapes, types or values that do not fit; another dimension; a class that
            `names` lacks.
        ImportError: matplotlib is not installed.

    Example:
        >>> import numpy as np
        >>> from keras_margin import plots
        >>> rows = np.array([[1.0, 0.1], [0.9, -0.1], [0.1, 2.0], [-0.2, 1.0]])
        >>> ax = plots.embeddings(rows, [0, 0, 1, 1], centers=np.eye(2), names=["cat", "dog"])
        >>> [text.get_text() for text in ax.get_legend().get_texts()]
        ['cat', 'dog', 'class centre']

    Reference:
        Wang, Cheng, Liu, Liu: Additive Margin Softmax for Face Verification. 2018,
        arXiv:1801.05599.
    """
    points = unit_rows(embeddings, "embeddings")
    radius = 1.0
    if not normalize:
        points = np.asarray(embeddings, np.float64)
        radius = float(np.linalg.norm(points, axis=1).max(initial=0.0)) or 1.0
    labels = check_labels(labels, len(points), "labels")
    dim = points.shape[1]
    if dim not in (2, 3):
        raise ValueError(
            f"`embeddings` must have 2 or 3 columns. Received: embeddings.shape={points.shape}"
        )
    if centers is None:
        centers = np.empty((0, dim))
    centers = radius * unit_rows(centers, "centers")
    if centers.shape[1] != dim:
        raise ValueError(
            "`centers` must have as many columns as `embeddings`. "
            f"Received: centers.shape={centers.shape}, embeddings.shape={points.shape}"
        )
    classes = sorted({int(label) for label in labels} | set(range(len(centers))))
    captions = [_class_name(names, label) for label in classes]

    ax = new_axes(ax, projection="3d" if dim == 3 else None)
    if dim == 3 and ax.name != "3d":
        raise ValueError(
            "`ax` must have a 3-D projection for embeddings of 3 columns. "
            f"Received: ax with projection {ax.name!r}"
        )
    if normalize:
        _draw_sphere(ax, dim)
    ax.set_aspect("equal")
    ax.set(**{f"{axis}label": f"dimension {place}" for place, axis in enumerate("xyz"[:dim], 1)})
    for place, (label, caption) in enumerate(zip(classes, captions, strict=True)):
        color = COLORS[place % len(COLORS)]
        # The marker goes on to the next shape once the colours are used up.
        marker = MARKERS[place // len(COLORS) % len(MARKERS)]
        ax.plot(
            *points[labels == label].T,
            linestyle="",
            marker=marker,
            markersize=4,
            alpha=0.5,
            color=color,
            label=caption,
        )
        if label in range(len(centers)):
            _draw_center(ax, centers[label], color)
    if len(centers):
        ax.plot(*np.empty((dim, 0)), color="0.3", marker="*", markersize=11, label="class centre")
    if len(classes) <= LEGEND_CLASSES:
        beside = (1.02 if dim == 2 else 1.12, 0.5)
        legend = ax.legend(loc="center left", bbox_to_anchor=beside, frameon=False)
        for handle in legend.legend_handles:
            handle.set_alpha(1)
    return ax


def _class_name(names, label):
    if names is None:
        return str(label)
    by_label = names if isinstance(names, Mapping) else dict(enumerate(names))
    if label not in by_label:
        raise ValueError(f"`names` must name every class. Received: names without class {label}")
    return str(by_label[label])


def _draw_sphere(ax, dim):
    around = np.linspace(0, 2 * np.pi, 61)
    if dim == 2:
        ax.plot(np.cos(around), np.sin(around), color=GREY, linewidth=1, zorder=1)
    else:
        down = np.linspace(0, np.pi, 13)[:, None]
        ax.plot_wireframe(
            np.sin(down) * np.cos(around),
            np.sin(down) * np.sin(around),
            np.cos(down) * np.ones_like(around),
            color=GREY,
            linewidth=0.4,
        )
    ax.set(**{f"{axis}ticks": [-1, 0, 1] for axis in "xyz"[:dim]})


def _draw_center(ax, center, color):
    ray = np.stack([np.zeros_like(center), center], axis=-1)  # (dim, 2)
    ax.plot(*ray, color=color, linewidth=1.5)
    ax.plot(
        *center[:, None],
        color=color,
        marker="*",
        markersize=14,
        markeredgecolor="black",
        zorder=3,
    )
