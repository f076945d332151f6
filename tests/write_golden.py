"""Writes the files of this version that later ones must load: python tests/write_golden.py

Once for each release, before its version number is raised; what is there is never written again.
"""

import io
import sys
from pathlib import Path

import keras
import numpy as np
from registry import CLASSES, DIM, HEADS

import keras_margin

GOLDEN = Path(__file__).parent / "golden"
EXPORTED = "AdaCos"  # as a SavedModel and as weights too
ROWS = 12


def data():
    """x (ROWS, DIM) and labels of every class."""
    x = np.random.default_rng(7).normal(size=(ROWS, DIM)).astype("float32")
    return x, np.arange(ROWS) % CLASSES


def trained(name):
    """A small model after three steps, so that every state has moved."""
    keras.utils.set_random_seed(11)
    backbone = keras.Sequential(
        [keras.Input((DIM,)), keras.layers.Dense(DIM), keras.layers.BatchNormalization()]
    )
    model = keras_margin.EmbeddingModel(backbone, HEADS[name].make())
    model.compile(keras.optimizers.Adam(0.01))
    model.fit(*data(), batch_size=4, shuffle=False, verbose=0)
    return model


def answers(model):
    """What a model must still say: arrays by name. Its last entry trains it."""
    x, y = data()
    found = {"embeddings": model.encoder.predict(x, verbose=0)}
    if model.head.num_classes is not None:
        found["logits"] = model.classifier.predict(x, verbose=0)
        found["evaluated"] = np.array(model.evaluate(x, y, verbose=0))
    history = model.fit(x, y, batch_size=4, shuffle=False, epochs=2, verbose=0).history
    found["next_losses"] = np.array(history["loss"])
    return found


def file_of(name):
    """A file name for an entry of the registry."""
    return name.replace(", ", "-").replace(" ", "-")


def main():
    folder = GOLDEN / keras_margin.__version__
    if folder.exists():
        sys.exit(f"{folder} is there: golden files are never written again.")
    folder.mkdir(parents=True)
    for name in HEADS:
        model = trained(name)
        model.save(folder / f"{file_of(name)}.keras")
        if name == EXPORTED:
            model.save_weights(folder / f"{file_of(name)}.weights.h5")
            model.export(folder / f"{file_of(name)}.saved_model")
        buffer = io.BytesIO()
        np.savez(buffer, **answers(model))
        (folder / f"{file_of(name)}.npz").write_bytes(buffer.getvalue())
        print(name)


if __name__ == "__main__":
    main()
