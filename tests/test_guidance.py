"""Warnings of settings that cannot work; each once."""

import warnings

import keras
import numpy as np
import pytest

import keras_margin as km

CLASSES = 100


def caught(action):
    with warnings.catch_warnings(record=True) as messages:
        warnings.simplefilter("always")
        action()
    return [str(message.message) for message in messages]


def built(head):
    head.build((None, 4))
    return head


@pytest.mark.parametrize(
    ("scale", "warns"),
    [
        (4.5, True),  # 0.99 log(99) = 4.549: the CosFace paper's bound for P = 1/2
        (4.6, False),
        (64.0, False),
    ],
)
def test_scale_under_its_lower_bound(scale, warns):
    messages = caught(lambda: built(km.CosFace(CLASSES, scale=scale)))
    assert len(messages) == warns
    if warns:
        assert messages[0].startswith(f"With scale={scale} and {CLASSES} classes no sample reaches")
        assert "well above 4.5" in messages[0]


def test_heads_without_unit_vectors_have_no_lower_bound():
    assert caught(lambda: built(km.SoftmaxHead(CLASSES))) == []


def test_sigmoids_have_no_lower_bound():
    assert caught(lambda: built(km.SphereFace2(CLASSES, scale=4.5))) == []


@pytest.mark.parametrize(("weight", "warns"), [(22.5, True), (22.7, False), (35.0, False)])
def test_magface_weight_under_its_lower_bound(weight, warns):
    """64 * 0.0035 * 110^2 * 10^2 / (110^2 - 10^2) = 22.587, the MagFace paper's condition."""
    messages = caught(lambda: built(km.MagFace(CLASSES, regularizer_weight=weight)))
    assert len(messages) == warns
    if warns:
        assert "at least 22.6" in messages[0]


# Norms that are mostly clipped


def embeddings(norms):
    rows = np.random.default_rng(0).normal(size=(len(norms), 4))
    return (rows / np.linalg.norm(rows, axis=1, keepdims=True) * np.array(norms)[:, None]).astype(
        "float32"
    )


LABELS = np.arange(4)
MAGFACE = "75% of the last batch's embeddings have norms outside 10 to 110: MagFaceMargin sees"
ADAFACE = "75% of the last batch's embeddings have norms outside 0.001 to 100: AdaFaceMargin sees"
HEADS = pytest.mark.parametrize(
    ("make", "inside", "outside", "starts"),
    [
        (km.MagFace, 20.0, 2.0, MAGFACE),
        (km.MagFace, 20.0, 120.0, MAGFACE),
        (km.AdaFace, 105.0 / 3, 105.0, ADAFACE),
    ],
)


@HEADS
def test_norms_mostly_clipped(make, inside, outside, starts):
    head = make(CLASSES)
    half = embeddings([inside, inside, outside, outside])
    most = embeddings([inside, outside, outside, outside])
    assert caught(lambda: head.loss(half, LABELS)) == []
    assert caught(lambda: head.loss(most, LABELS, training=False)) == []
    (message,) = caught(lambda: head(most, LABELS))
    assert message.startswith(starts)
    assert caught(lambda: head.loss(most, LABELS)) == []  # once


@HEADS
@pytest.mark.parametrize("jit_compile", [False, True])
def test_norms_mostly_clipped_in_fit(make, inside, outside, starts, jit_compile):
    backbone = keras.Sequential(
        [keras.Input((4,)), keras.layers.Dense(4, kernel_initializer="identity", trainable=False)]
    )
    model = km.EmbeddingModel(backbone, make(CLASSES))
    model.compile(keras.optimizers.SGD(0.0), jit_compile=jit_compile)
    most = embeddings([inside, outside, outside, outside])
    (message,) = caught(lambda: model.fit(most, LABELS, epochs=2, verbose=0))
    assert message.startswith(starts)
    assert caught(lambda: model.fit(most, LABELS, verbose=0)) == []


def test_rows_that_do_not_count_are_not_clipped():
    head = km.MagFace(CLASSES, ignore_class=-1)
    rows = embeddings([20.0, 2.0, 2.0, 2.0])
    rows[3] = np.nan
    assert caught(lambda: head.loss(rows, np.array([0, 1, -1, 2]))) == []
    np.testing.assert_array_equal(head.margin_rule.clipped_share, 0.5)


# Options that logits do not have


@pytest.mark.parametrize("option", [{"focal_gamma": 2.0}, {"label_smoothing": 0.1}])
def test_options_of_the_loss_alone(option):
    head = km.ArcFace(CLASSES, **option)
    rows = embeddings([1.0] * 4)
    assert caught(lambda: head(rows)) == []
    (message,) = caught(lambda: head(rows, LABELS))
    assert message.startswith("Only `head.loss`")
    assert caught(lambda: head(rows, LABELS)) == []
