"""Every head learns from random weights with one recipe: SGD 0.1, scale 64, margin 0.5."""

import random

import keras
import numpy as np
import pytest
import registry
from keras import layers

import keras_margin as km
from keras_margin.margins import AngularMargin, CombinedMargin
from keras_margin.scales import AdaCosScale, LearnedScale

CLASSES, FEATURES, ROWS, BATCH = 10, 16, 640, 64

MARGIN, SCALE = 0.5, 64.0
WARM_UP = keras.optimizers.schedules.PolynomialDecay(0.0, decay_steps=50, end_learning_rate=MARGIN)

# Names as in the registry, and a few more. Heads without a margin or a scale of that kind keep
# their defaults. The default annealing takes thousands of steps; "annealed" has it done in twenty.
HEADS = {
    "AdaCos": lambda: km.AdaCos(CLASSES),
    "AdaCos, fixed": lambda: km.AdaCos(CLASSES, dynamic=False),
    "AdaFace": lambda: km.AdaFace(CLASSES, MARGIN, SCALE),
    "AMSoftmax": lambda: km.AMSoftmax(CLASSES, MARGIN, SCALE),
    "ArcFace": lambda: km.ArcFace(CLASSES, MARGIN, SCALE),
    "ArcFace, warm-up": lambda: km.ArcFace(CLASSES, WARM_UP, SCALE),
    "ArcFace, per class": lambda: km.ArcFace(CLASSES, np.linspace(0.3, MARGIN, CLASSES), SCALE),
    "ArcFace, sub-centres": lambda: km.ArcFace(CLASSES, MARGIN, SCALE, num_subcenters=3),
    "CosFace": lambda: km.CosFace(CLASSES, MARGIN, SCALE),
    "CurricularFace": lambda: km.CurricularFace(CLASSES, MARGIN, SCALE),
    "ElasticFace": lambda: km.ElasticFace(CLASSES, MARGIN, SCALE),
    "ElasticFace, cosine": lambda: km.ElasticFace(CLASSES, MARGIN, SCALE, kind="cosine"),
    "LSoftmax": lambda: km.LSoftmax(CLASSES),
    "LSoftmax, annealed": lambda: km.LSoftmax(CLASSES, 2, lambda_gamma=0.02),
    "MagFace": lambda: km.MagFace(CLASSES, SCALE),
    "MagFace, margins up to 0.5": lambda: km.MagFace(CLASSES, SCALE, margin_range=(0.25, MARGIN)),
    "MarginHead": lambda: km.MarginHead(CLASSES, CombinedMargin(1.0, 0.3, 0.2), SCALE),
    "MarginHead, three margins": lambda: km.MarginHead(
        CLASSES, CombinedMargin(1.1, 0.2, 0.2), SCALE
    ),
    "MarginHead, AdaCos' scale": lambda: km.MarginHead(
        CLASSES, AngularMargin(MARGIN), AdaCosScale(CLASSES)
    ),
    "MarginHead, learned scale": lambda: km.MarginHead(
        CLASSES, AngularMargin(MARGIN), LearnedScale(SCALE)
    ),
    "NormFace": lambda: km.NormFace(CLASSES, SCALE),
    "SemiHardTriplet": lambda: km.SemiHardTriplet(MARGIN),
    "SoftmaxHead": lambda: km.SoftmaxHead(CLASSES),
    "SphereFace": lambda: km.SphereFace(CLASSES),
    "SphereFace, annealed": lambda: km.SphereFace(CLASSES, lambda_gamma=12.0),
    "SphereFace2": lambda: km.SphereFace2(CLASSES, MARGIN, SCALE),
}

EPOCHS = dict.fromkeys(HEADS, 12)
# Its first step takes the scale from 64 to 2, and 15 epochs pass before it rises again.
EPOCHS["MarginHead, learned scale"] = 30

# They leave the two sides of a class apart: without a margin, or nearly, nothing joins them, and of
# sub-centres each side takes its own.
LEAVE_APART = {
    "ArcFace, sub-centres",
    "LSoftmax",
    "MagFace, margins up to 0.5",
    "NormFace",
    "SoftmaxHead",
    "SphereFace",
}


def test_every_head_is_trained_here():
    kinds = {name: type(entry.make()) for name, entry in registry.HEADS.items()}
    assert {name: type(HEADS[name]()) for name in kinds if name in HEADS} == kinds


def blobs(rng, rows):
    """(x, y, side): a class is two blobs on opposite sides of 0, so no plane tells it apart."""
    middles = np.random.default_rng(0).normal(size=(CLASSES, FEATURES))
    y, side = rng.integers(0, CLASSES, rows), rng.choice([-1, 1], rows)
    x = side[:, None] * middles[y] + rng.normal(0.0, 0.3, (rows, FEATURES))
    return x.astype("float32"), y, side


def model_of(head):
    parts = [
        layers.Dense(64),
        layers.BatchNormalization(momentum=0.9),
        layers.ReLU(),
        layers.Dense(256),
        layers.BatchNormalization(momentum=0.9),  # norms of about 16, in MagFace's range
    ]
    model = km.EmbeddingModel(keras.Sequential([keras.Input((FEATURES,)), *parts]), head)
    model.compile(keras.optimizers.SGD(0.1))
    return model


def nearest_of_the_other_side(model, train, test):
    """The share of embeddings whose nearest one of the other side is of their class."""
    (x, y, side), (probes, labels, probe_side) = train, test
    gallery, probes = model.encoder.predict(x, verbose=0), model.encoder.predict(probes, verbose=0)
    cosines = np.where(probe_side[:, None] != side, probes @ gallery.T, -np.inf)
    return (y[cosines.argmax(axis=1)] == labels).mean()


def trained(name, seed):
    """(running loss after each step, accuracy on new samples, how well the two sides meet)."""
    random.seed(seed)
    rng = np.random.default_rng(seed)
    train, test = blobs(rng, ROWS), blobs(rng, ROWS)
    losses = []
    record = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda step, logs: losses.append(logs["loss"])
    )
    model = model_of(HEADS[name]())
    settings = {"batch_size": BATCH, "verbose": 0}
    model.fit(*train[:2], epochs=EPOCHS[name], shuffle=False, callbacks=[record], **settings)
    meeting = nearest_of_the_other_side(model, train, test)
    if model.head.num_classes is None:
        return losses, meeting, meeting
    accuracy = model.evaluate(*test[:2], return_dict=True, **settings)["accuracy"]
    return losses, accuracy, meeting


@pytest.mark.parametrize("seed", [0, *(pytest.param(s, marks=pytest.mark.long) for s in (1, 2))])
@pytest.mark.parametrize("name", HEADS)
def test_learns_from_random_weights(name, seed):
    losses, accuracy, meeting = trained(name, seed)
    assert len(losses) == EPOCHS[name] * ROWS // BATCH
    assert np.isfinite(losses).all()
    assert accuracy > 0.95
    assert meeting > 0.5 or name in LEAVE_APART  # 0 for the random weights
