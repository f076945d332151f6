"""Pictures of heads: what a margin does to the target, what a scale does to the probability.

Part of `keras_margin.plots`. A curve is the head's own margin rule, called: not its formula again.
"""

import math
from collections.abc import Mapping

import keras
import numpy as np
from keras import ops

from keras_margin.checks import are_numbers, checked_count, checked_number, is_number
from keras_margin.drawing import BLUE, VERMILION, line_look, new_axes
from keras_margin.margins import AngularMargin, MarginRule
from keras_margin.scales import fixed_adacos_scale

DEGREES = np.linspace(0.0, 180.0, 721)
COSINES = np.sin(np.radians(90.0 - DEGREES))  # of the angles; exactly 0 at 90 degrees
ANGLE_LABEL = "Angle to the own class centre θ (degrees)"
# A legend with more lines stands beside the picture.
LEGEND_INSIDE = 6

SCALES = (5.0, 10.0, 20.0, 30.0, 64.0)
SCALE_OF_MARGINS = 30.0  # of AdaCos' fig. 3


def target_logits(heads, ax=None, *, norms=None):
    """The target's logit over its angle, divided by the scale: what each margin asks for.

    The lower a curve, the closer a sample must come to its centre for the same logit.

        y(theta) = margin(cos(theta))

    It is the rule that training applies, as it stands now: a margin that moves in training is drawn
    at the head's step, which the legend names. No state moves, and a head need not be built.
    Logits with lengths in them are divided by these too, `SphereFace2` is drawn without its bias,
    `ElasticFace` at the mean of its draws, a margin per class for the classes with the smallest and
    the largest.

    Args:
        heads: a head or a rule of `keras_margin.margins`; a sequence of them; or a dictionary from
            the name in the legend to one.
        ax: matplotlib Axes to draw on; None makes a figure.
        norms: lengths of embeddings, for heads that read them, a curve each. None: the ends of
            MagFace's range; AdaFace's mean norm, and one standard deviation to each side.

    Returns:
        The Axes.

    Raises:
        TypeError: something that has no target logit, such as `SemiHardTriplet`.
        ValueError: no heads, two curves of one name, a margin that is NaN now.
        ImportError: matplotlib is not installed.

    Example:
        >>> from keras_margin import ArcFace, NormFace, plots
        >>> ax = plots.target_logits([NormFace(10), ArcFace(10)])
        >>> [text.get_text() for text in ax.get_legend().get_texts()]
        ['NormFace', 'ArcFace, m = 0.5']

    Reference:
        Deng et al., ArcFace, 2019, arXiv:1801.07698, fig. 4 b (there: up to 90 degrees).
    """
    norms = None if norms is None else _numbers("norms", norms)
    curves = [curve for name, head in _named(heads) for curve in _curves(name, head, norms)]
    captions = [caption for caption, _ in curves]
    if len(set(captions)) < len(captions):
        raise ValueError(
            "`heads` must have a name each: give a dictionary from name to head. "
            f"Received: heads named {captions}"
        )
    for caption, values in curves:
        if not np.isfinite(values).all():
            raise ValueError(
                "`heads` must have a margin that is a number now; a schedule that leaves the range "
                f"of its rule gives NaN. Received: NaN for {caption!r}"
            )
    ax = new_axes(ax, figsize=None if len(curves) <= LEGEND_INSIDE else (9.6, 5.4))
    for caption, values in curves:
        ax.plot(DEGREES, values, label=caption, **line_look(len(ax.lines), len(DEGREES)))
    _finish(ax, "Target logit / scale, with the margin")
    return ax


def probability(num_classes, scales=None, margins=None, ax=None, *, adacos=True):
    """The target's probability over its angle, all other classes at 90 degrees.

    The slope is what trains. Too small a scale never reaches 1, too large a one stops at a wide
    angle; a margin moves the curve to smaller angles and makes it no wider.

        P = exp(s cos(theta + m)) / (exp(s cos(theta + m)) + num_classes - 1)

    Beyond theta + m = pi it is the rule of `margins.AngularMargin`.

    Args:
        num_classes: C, at least 2.
        scales: s, a positive number or several; None: 5 to 64, or 30 where `margins` are given.
        margins: m, radians, a number or several; None: 0. Only one of the two may be several.
        ax: matplotlib Axes to draw on; None makes a figure.
        adacos: whether AdaCos' fixed scale sqrt(2) log(C - 1), without a margin, is drawn on top,
            dashed. It is 0 for two classes, and left out.

    Returns:
        The Axes.

    Raises:
        ValueError: several scales and several margins; a number out of range.
        ImportError: matplotlib is not installed.

    Example:
        >>> from keras_margin import plots
        >>> ax = plots.probability(2000, scales=[10, 30])
        >>> [text.get_text() for text in ax.get_legend().get_texts()]
        ['s = 10', 's = 30', 'AdaCos, fixed: s = 10.7']

    Reference:
        Zhang et al., AdaCos, 2019, arXiv:1905.00292, eq. 7 and 8, fig. 2 and 3.
    """
    num_classes = checked_count("num_classes", num_classes, smallest=2)
    if scales is None:
        scales = SCALES if margins is None else SCALE_OF_MARGINS
    scales = _numbers("scales", scales)
    margins = _numbers("margins", 0.0 if margins is None else margins)
    if len(scales) > 1 and len(margins) > 1:
        raise ValueError(
            "Either `scales` or `margins` may be several: one picture shows one family of curves. "
            f"Received: scales={scales}, margins={margins}"
        )
    for scale in scales:
        if scale == 0.0:
            raise ValueError(f"`scales` must be greater than 0. Received: scales={scales}")
    values = [_probability(num_classes, s, m) for s in scales for m in margins]

    title = f"{num_classes:,} classes"
    if len(margins) > 1:
        captions, title = [f"m = {m:g}" for m in margins], f"{title}, s = {scales[0]:g}"
    else:
        captions = [f"s = {s:g}" for s in scales]
        title += f", m = {margins[0]:g}" if margins[0] else ""
    ax = new_axes(ax)
    for place, (caption, curve) in enumerate(zip(captions, values, strict=True)):
        look = line_look(place + (place > 0), len(DEGREES))  # dashes are AdaCos'
        ax.plot(DEGREES, curve, label=caption, **look)
    if adacos and num_classes > 2:
        scale = fixed_adacos_scale(num_classes)
        caption = f"AdaCos, fixed: s = {scale:.1f}" + (", m = 0" if any(margins) else "")
        curve = _probability(num_classes, scale, 0.0)
        ax.plot(DEGREES, curve, "--", color="black", linewidth=2.5, label=caption)
    ax.set(ylim=(-0.03, 1.03))
    _finish(ax, "Probability of the own class", title)
    return ax


def angles(history, ax=None):
    """The course of a training: target angles, non-target angles and, on the right, the scale.

    The target angles come down from 90 degrees; the others stay near it, which is what AdaCos
    builds on. Lines are medians, bands go from the 10 % to the 90 % quantile.

    Args:
        history: what `callbacks.AngleRecorder` has recorded: the `History` of a `fit` with it, its
            dictionary, or the recorder itself, which has the steps between the epochs too.
        ax: matplotlib Axes to draw on; None makes a figure. The scale gets a twin of it.

    Returns:
        The Axes of the angles.

    Raises:
        ValueError: the angles are missing, of several lengths, or not numbers.
        TypeError: `history` is something else.
        ImportError: matplotlib is not installed.

    Example:
        >>> from keras_margin import plots
        >>> names = ["target_angle", "nontarget_angle"]
        >>> found = {n + end: [90.0, 80.0] for n in names for end in ("", "_low", "_high")}
        >>> plots.angles(found).get_ylabel()
        'Angle to class centres (degrees)'

    Reference:
        Zhang et al., AdaCos, 2019, arXiv:1905.00292, fig. 1.
    """
    found = getattr(history, "history", history)
    series = _series(found)
    number = len(series["target_angle"])
    if "step" in found:
        x, unit = np.asarray(found["step"]), "Training step"
    else:
        x, unit = np.arange(1, number + 1), "Epoch"
        epochs = getattr(history, "epoch", [])  # of a `History`, from 0 on
        if len(epochs) == number:
            x = np.asarray(epochs) + 1

    ax = new_axes(ax)
    marker = "o" if number <= 30 else ""
    look = {"marker": marker, "markersize": 4, "linewidth": 2}
    lines = []
    for name, caption, color, style in (
        ("target_angle", "own centre", BLUE, "-"),
        ("nontarget_angle", "other centres", VERMILION, "--"),
    ):
        lines += ax.plot(x, series[name], style, color=color, label=caption, **look)
        low, high = series[f"{name}_low"], series[f"{name}_high"]
        ax.fill_between(x, low, high, color=color, alpha=0.2, linewidth=0)
    ax.set(xlabel=unit, ylabel="Angle to class centres (degrees)", ylim=(0, 180))
    ax.set_yticks(range(0, 181, 30))
    ax.grid(alpha=0.3)
    if "scale" in series:
        right = ax.twinx()
        lines += right.plot(x, series["scale"], "-.", color="black", label="scale", **look)
        right.set_ylabel("Scale s")
        right.set_ylim(bottom=0, top=1.1 * series["scale"].max())
    # Above, where no curve is.
    ax.legend(handles=lines, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3, frameon=False)
    return ax


def _named(heads):
    """(name, head) of each, from what `target_logits` takes."""
    if isinstance(heads, Mapping):
        pairs = [(str(name), head) for name, head in heads.items()]
    else:
        several = heads if isinstance(heads, (list, tuple)) else [heads]
        pairs = [(_name(head), head) for head in several]
    if not pairs:
        raise ValueError(f"`heads` must hold at least one head. Received: heads={heads!r}")
    return pairs


def _name(head):
    rule = getattr(head, "margin_rule", None)
    is_plain = type(head).__name__ == "MarginHead" and rule is not None
    name = type(rule if is_plain else head).__name__
    margin = getattr(rule if is_number(getattr(rule, "margin", None)) else head, "margin", None)
    return f"{name}, m = {margin:g}" if is_number(margin) else name


def _curves(name, head, norms):
    """(caption, values) of each curve of a head or a rule."""
    rule = head if hasattr(head, "curve") else getattr(head, "margin_rule", head)
    has_curve = rule is None or hasattr(rule, "curve")
    if not isinstance(head, keras.Layer) or not has_curve:
        raise TypeError(
            "`heads` must be heads with a logit for the target, or margin rules. "
            f"Received: {head!r} for {name!r}"
        )
    cosines = ops.convert_to_tensor(COSINES, dtype=head.maths_dtype)
    if not isinstance(rule, MarginRule):
        return [(name, _numpy(cosines if rule is None else rule.curve(cosines)))]
    curves = []
    for label in _classes_to_show(rule):
        for norm in _norms_to_show(rule, norms):
            values = rule.curve(
                cosines,
                norms=ops.full_like(cosines, 1.0 if norm is None else norm),
                labels=ops.full(cosines.shape, label or 0, dtype="int32"),
            )
            caption = name + _moment(rule)
            caption += "" if label is None else f", class {label}"
            caption += "" if norm is None else f", |x| = {norm:.3g}"
            curves.append((caption, _numpy(values)))
    return curves


def _moment(rule):
    """At which step of the training a rule that moves is drawn."""
    annealing = ""
    if hasattr(rule, "annealing"):
        annealing = f", λ = {float(rule.annealing(rule.maths_dtype)):.3g}"
    return annealing + (f" at step {int(rule.step())}" if rule.moves else "")


def _classes_to_show(rule):
    """The classes with the smallest and the largest margin at 90 degrees; [None]: all are alike."""
    if rule.num_values is None:
        return [None]
    cosines = ops.zeros((rule.num_values,), dtype=rule.maths_dtype)
    labels = ops.arange(rule.num_values, dtype="int32")
    values = _numpy(rule.curve(cosines, norms=ops.ones_like(cosines), labels=labels))
    return sorted({int(np.argmin(values)), int(np.argmax(values))})


def _norms_to_show(rule, norms):
    typical = rule.typical_norms()
    if not typical:
        return [None]
    return list(dict.fromkeys(typical if norms is None else norms))


def _numpy(tensor):
    return ops.convert_to_numpy(tensor).astype(np.float64)


def _numbers(name, values):
    """A number or a sequence of numbers, as a list of at least one."""
    values = values if are_numbers(values) else [values]
    if not len(values):  # an array has no truth value
        raise ValueError(f"`{name}` must be a number or several. Received: {name}=[]")
    return [checked_number(name, value, 0.0) for value in values]


def _probability(num_classes, scale, margin):
    cosines = _numpy(AngularMargin(margin).curve(ops.convert_to_tensor(COSINES)))
    # P = 1 / (1 + exp(-z)), by the logarithm: no z overflows.
    return np.exp(-np.logaddexp(0.0, math.log(num_classes - 1) - scale * cosines))


def _series(history):
    """What `AngleRecorder` writes, as arrays of one length."""
    if not isinstance(history, Mapping):
        raise TypeError(
            "`history` must be what `fit` returns, its dictionary, or an AngleRecorder. "
            f"Received: history={history!r}"
        )
    needed = [f"{n}_angle{e}" for n in ("target", "nontarget") for e in ("", "_low", "_high")]
    missing = [name for name in needed if name not in history]
    if missing:
        raise ValueError(
            "`history` must hold the angles that callbacks.AngleRecorder records: list it in the "
            f"callbacks of `fit`. Received: history without {missing[0]!r}"
        )
    names = [*needed, *(name for name in ("scale", "step") if name in history)]
    series = {name: np.asarray(history[name], np.float64) for name in names}
    length = len(history["target_angle"])
    for name, values in series.items():
        if values.shape != (length,) or not length or not np.isfinite(values).all():
            raise ValueError(
                "`history` must hold as many finite numbers of each kind, at least one. "
                f"Received: history[{name!r}]={history[name]!r}"
            )
    return series


def _finish(ax, ylabel, title=None):
    ax.set(xlim=(0, 180), xlabel=ANGLE_LABEL, ylabel=ylabel)
    ax.set_xticks(range(0, 181, 30))
    ax.grid(alpha=0.3)
    if len(ax.lines) <= LEGEND_INSIDE:
        ax.legend(loc="upper right", title=title)
    else:
        ax.legend(loc="center left", bbox_to_anchor=(1.02, 0.5), frameon=False, title=title)
