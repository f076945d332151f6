"""Draws the figures that explain margin heads, the trained ones from real digits.

python examples/figures.py                      all four, a few minutes on two cores
python examples/figures.py --only probability   one of them

target_logits.png   what each margin asks of a sample at each angle (ArcFace, fig. 4 b)
probability.png     what scale and margin do to the probability (AdaCos, fig. 2 and 3)
angles.png          angles and AdaCos' scale in the course of a training (AdaCos, fig. 1)
features.png        embeddings of two dimensions under four heads (SphereFace, fig. 2)
"""

import argparse
import dataclasses
import sys
from pathlib import Path
from typing import NamedTuple

import keras
import numpy as np
from backbones import small_cnn
from image_sets import load, split
from report import check_writable, plt, save_picture

from keras_margin import (
    AdaCos,
    AdaFace,
    ArcFace,
    CosFace,
    CurricularFace,
    ElasticFace,
    EmbeddingModel,
    LSoftmax,
    MagFace,
    MarginHead,
    NormFace,
    SoftmaxHead,
    SphereFace,
    SphereFace2,
    callbacks,
    margins,
    plots,
)

PolynomialDecay = keras.optimizers.schedules.PolynomialDecay

CLASSES = 10
BATCH_SIZE = 64


class Effort(NamedTuple):
    """How much is trained."""

    images: int | None  # None: all
    course_epochs: int
    feature_epochs: int
    every: int  # steps between two records of angles


FULL = Effort(images=None, course_epochs=6, feature_epochs=15, every=5)
QUICK = Effort(images=128, course_epochs=1, feature_epochs=1, every=1)


# Formulas.


def target_logits(data, effort):
    plain = {"no margin (NormFace, AdaCos)": NormFace(CLASSES)}
    adaface = AdaFace(CLASSES)
    adaface.build((None, 2))
    # As after a training with norms of 20 +- 5; at the start sigma is 100.
    adaface.margin_rule.mu.assign(20.0)
    adaface.margin_rule.sigma.assign(5.0)
    panels = {
        "One margin for all": {
            "CosFace, AM-Softmax, m = 0.35": CosFace(CLASSES),
            "ArcFace, CurricularFace, m = 0.5": CurricularFace(CLASSES),
            "combined: 0.9 θ + 0.4, - 0.15": MarginHead(
                CLASSES, margins.CombinedMargin(0.9, 0.4, 0.15)
            ),
        },
        "The angle, or the cosine, is bent": {
            "L-Softmax, m = 2": LSoftmax(CLASSES, 2, lambda_base=0),
            "SphereFace, m = 4": SphereFace(CLASSES, lambda_base=0, lambda_min=5),
            "SphereFace2, m = 0.4": SphereFace2(CLASSES),
        },
        "A margin for each sample": {
            "MagFace": MagFace(CLASSES),
            "AdaFace": adaface,
            "ElasticFace, mean": ElasticFace(CLASSES),
        },
    }
    figure, axes = plt.subplots(1, 3, figsize=(14, 7), sharey=True, layout="constrained")
    for ax, (title, heads) in zip(axes, panels.items(), strict=True):
        plots.target_logits(plain | heads, ax)
        ax.set_title(title)
        _legend_below(ax)
    for ax in axes[1:]:
        ax.set_ylabel("")
    return figure


def probability(data, effort):
    figure, axes = plt.subplots(1, 3, figsize=(14, 7), sharey=True, layout="constrained")
    plots.probability(2_000, ax=axes[0])
    plots.probability(20_000, ax=axes[1])
    plots.probability(2_000, margins=[0.0, 0.1, 0.2, 0.3, 0.5], ax=axes[2])
    axes[0].set_title("Scales, 2 000 classes")
    axes[1].set_title("Scales, 20 000 classes")
    axes[2].set_title("Margins (radians) at s = 30, 2 000 classes")
    for ax in axes:
        _legend_below(ax)
    for ax in axes[1:]:
        ax.set_ylabel("")
    return figure


def _legend_below(ax):
    """Where no curve is."""
    ax.legend(loc="upper center", bbox_to_anchor=(0.5, -0.12), frameon=False, handlelength=4)


# Trainings.


def angles(data, effort):
    model = EmbeddingModel(small_cnn(data.train_images.shape[1:]), AdaCos(CLASSES))
    recorder = callbacks.AngleRecorder(
        data.train_images[:500], data.train_labels[:500], every=effort.every, batch_size=100
    )
    _fit(model, data, effort.course_epochs, [recorder])
    figure, ax = plt.subplots(figsize=(8, 5.5), layout="constrained")
    plots.angles(recorder, ax)
    ax.set_title(
        f"AdaCos on {len(data.train_images):,} digits, {CLASSES} classes, 64 dimensions", pad=28
    )
    return figure


def features(data, effort):
    steps = effort.feature_epochs * -(-len(data.train_images) // BATCH_SIZE)
    # Ten centres on a circle are 36 degrees apart. ArcFace's own margin, 28.6 degrees, leaves a
    # class 3.7 to either side; 0.3 radians leave 9.4. From the start even that is too hard.
    margin = PolynomialDecay(0.0, steps // 2 + 1, 0.3)
    scale = PolynomialDecay(5.0, steps // 2 + 1, 30.0)
    # Centres that start close together can stay so: on a circle they cannot pass each other.
    start = {"centers_initializer": _evenly_on_a_circle}
    # lambda_gamma: comes to lambda = 5 in fewer steps.
    sphere_face = SphereFace(CLASSES, lambda_gamma=0.4, **start)
    panels = (
        (SoftmaxHead(CLASSES, **start), "softmax"),
        (sphere_face, "SphereFace, m = 4, λ = {annealing:.3g} at the end"),
        (ArcFace(CLASSES, margin, scale, **start), "ArcFace, m from 0 to 0.3, s from 5 to 30"),
        (AdaCos(CLASSES, **start), "AdaCos, s = {scale:.3g} at the end"),
    )
    figure, axes = plt.subplots(1, 4, figsize=(18, 5), layout="constrained")
    for ax, (head, title) in zip(axes, panels, strict=True):
        print(f"features: {type(head).__name__}", flush=True)
        model = EmbeddingModel(_flat_cnn(data.train_images.shape[1:]), head)
        _fit(model, data, effort.feature_epochs)
        rows = model.predict(data.test_images, verbose=0)
        found = keras.ops.convert_to_numpy(head(rows)).argmax(axis=1)  # without labels: no margin
        accuracy = np.mean(found == data.test_labels)
        if hasattr(head.margin_rule, "annealing"):
            title = title.format(annealing=float(head.margin_rule.annealing("float32")))
        elif head.current_scale is not None:
            title = title.format(scale=float(head.current_scale))
        centers = keras.ops.convert_to_numpy(head.centers)
        # Softmax and SphereFace see the length of an embedding, the others its direction alone.
        sees_lengths = isinstance(head, (SoftmaxHead, SphereFace))
        plots.embeddings(rows, data.test_labels, centers, ax, normalize=not sees_lengths)
        ax.set_title(f"{title}\naccuracy {accuracy:.1%}")
        _name_stars(ax, centers)
        if ax is not axes[-1]:
            ax.get_legend().remove()  # one for all
    figure.suptitle(
        f"{len(data.test_images):,} test digits in two dimensions: own lengths for softmax and "
        "SphereFace, directions for ArcFace and AdaCos.\nRays are the directions of the class "
        "centres, which start evenly spread."
    )
    return figure


def _evenly_on_a_circle(shape, dtype=None):
    angles = 2 * np.pi * np.arange(shape[0]) / shape[0]
    return keras.ops.convert_to_tensor(np.stack([np.cos(angles), np.sin(angles)], axis=1), dtype)


def _name_stars(ax, centers):
    """Writes the digit beyond the star of its centre: ten colours are more than one can tell."""
    stars = [line for line in ax.lines if line.get_marker() == "*"]
    for label, (star, center) in enumerate(zip(stars, centers, strict=False)):  # the last is empty
        direction = center / np.linalg.norm(center)
        ax.annotate(
            str(label),
            np.ravel(star.get_data()),
            xytext=13 * direction,
            textcoords="offset points",
            ha="center",
            va="center",
            fontweight="bold",
        )
    ax.margins(0.12)


def _flat_cnn(image_shape):
    """Embeddings of two dimensions that may have any length.

    Without the layer of 128 before the last one, or with dropout, classes stay on top of others.
    """
    return keras.Sequential(
        [
            keras.Input(image_shape),
            small_cnn(image_shape, 128, dropout=0.0),
            keras.layers.PReLU(),
            keras.layers.Dense(2, use_bias=False),
        ]
    )


def _fit(model, data, epochs, watching=()):
    steps = epochs * -(-len(data.train_images) // BATCH_SIZE)
    schedule = keras.optimizers.schedules.CosineDecay(2e-3, steps)
    model.compile(keras.optimizers.AdamW(schedule, weight_decay=1e-4))
    model.fit(
        data.train_images,
        data.train_labels,
        batch_size=BATCH_SIZE,
        epochs=epochs,
        verbose=1 if sys.stdout.isatty() else 2,  # the bar, or a line an epoch in a file
        callbacks=list(watching),
    )


FIGURES = {
    "target_logits": target_logits,
    "probability": probability,
    "angles": angles,
    "features": features,
}
TRAINED = {"angles", "features"}


def parse_arguments(arguments=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out", type=Path, default=Path("runs/figures"), help="default: runs/figures"
    )
    parser.add_argument(
        "--only",
        nargs="+",
        choices=FIGURES,
        default=list(FIGURES),
        metavar="FIGURE",
        help=f"of {', '.join(FIGURES)} (default: all)",
    )
    parser.add_argument(
        "--quick", action="store_true", help="train on a few images only, to see that it runs"
    )
    parser.add_argument("--seed", type=int, default=0, help="default: 0")
    options = parser.parse_args(arguments)
    if not 0 <= options.seed < 2**32:
        parser.error(f"--seed must be from 0 to 2^32 - 1. Received: {options.seed}")
    return options


def main(arguments=None):
    options = parse_arguments(arguments)
    effort = QUICK if options.quick else FULL
    wanted = [name for name in FIGURES if name in options.only]
    try:
        check_writable(options.out)
        data = _digits(effort) if TRAINED & set(wanted) else None
    except (ValueError, OSError, ImportError) as error:
        sys.exit(f"figures.py: error: {error}")
    for number, name in enumerate(wanted, start=1):
        print(f"[{number}/{len(wanted)}] {name}", flush=True)
        keras.utils.set_random_seed(options.seed)
        figure = FIGURES[name](data, effort)
        save_picture(figure, options.out / f"{name}.png")
        print(f"written: {options.out / name}.png", flush=True)


def _digits(effort):
    """The `Split` of mnist_5k, the same for every seed; its images come in random order."""
    data = split(load("mnist_5k"))
    if effort.images is None:
        return data
    few = slice(None, None, len(data.train_images) // effort.images)
    return dataclasses.replace(
        data,
        train_images=data.train_images[few],
        train_labels=data.train_labels[few],
        test_images=data.test_images[few],
        test_labels=data.test_labels[few],
    )


if __name__ == "__main__":
    main()
