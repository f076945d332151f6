"""A fifth of the labels are wrong: sub-centres find them. The numbers of docs/going-on.md."""

import importlib
import math
import pathlib

import keras
import numpy as np
import pytest

import keras_margin as km
from keras_margin import verification

EXAMPLES = pathlib.Path(__file__).parents[1] / "examples"
SEED, EPOCHS = 0, 6


@pytest.fixture
def digits(monkeypatch, tmp_path):
    """The split into training and test, and the backbone's maker."""
    monkeypatch.syspath_prepend(EXAMPLES)
    image_sets, backbones = map(importlib.import_module, ("image_sets", "backbones"))
    return image_sets.split(image_sets.load("mnist_5k", data_dir=tmp_path)), backbones.small_cnn


@pytest.mark.long
def test_wrong_labels_are_found_and_dropped(digits):
    split, small_cnn = digits
    x, y, classes = split.train_images, split.train_labels, len(split.train_names)
    random = np.random.default_rng(SEED)
    is_wrong = random.random(len(y)) < 0.2
    given = np.where(is_wrong, (y + random.integers(1, classes, len(y))) % classes, y)

    def trained(labels, epochs, **settings):
        keras.utils.set_random_seed(SEED)
        model = km.EmbeddingModel(small_cnn(x.shape[1:]), km.ArcFace(classes, **settings))
        model.compile(keras.optimizers.AdamW(2e-3, weight_decay=1e-4))
        model.fit(x, labels, batch_size=128, epochs=epochs, verbose=0)
        return model

    def judge(title, model):
        embeddings = model.encoder.predict(split.test_images, verbose=0)
        found = verification.evaluate(embeddings, split.test_labels, far=0.01)
        print(f"{title}: EER {found['eer']:.3f}, TAR at FAR 1 % {found['tar@far=0.01']:.3f}")
        return found["eer"]

    right = judge("all labels right", trained(y, 2 * EPOCHS))
    wrong = judge("a fifth wrong", trained(given, 2 * EPOCHS))
    model = trained(given, EPOCHS, num_subcenters=3)

    embeddings = model.predict(x, verbose=0)
    is_far = np.asarray(model.head.outliers(embeddings, given, math.radians(75)))
    found, lost = is_far[is_wrong].mean(), is_far[~is_wrong].mean()
    print(f"beyond 75 degrees: {found:.3f} of the wrong labels, {lost:.3f} of the right ones")
    model.replace_head(model.head.collapsed(model.head.dominant_subcenters(embeddings, given)))
    model.fit(x[~is_far], given[~is_far], batch_size=128, epochs=EPOCHS, verbose=0)
    cleaned = judge("dropped, then one centre", model)

    assert found > 0.85 and lost < 0.02
    assert right < cleaned < 0.8 * wrong
