"""A labelled set of inputs, and its embeddings while a model trains."""

import keras
import numpy as np

from keras_margin.retrieval import check_labels


def checked_set(x, labels):
    """Inputs as arrays, and one whole number for each of them.

    Args:
        x: an array or nested arrays (samples, ...).
        labels: (samples,).

    Raises:
        ValueError: labels that do not fit `x`.
    """
    x = keras.tree.map_structure(np.asarray, x)
    for part in keras.tree.flatten(x):
        labels = check_labels(labels, len(part), "labels")
    return x, labels


def encoder_for(encoder, model):
    """`encoder`, or that of an `EmbeddingModel`.

    Raises:
        ValueError: there is none.
    """
    if encoder is None:
        encoder = getattr(model, "encoder", None)
    if encoder is None:
        raise ValueError(
            "`encoder` must say what gives the embeddings, since the model is no EmbeddingModel. "
            f"Received: encoder=None with {type(model).__name__}"
        )
    return encoder


def encoded(encoder, x, batch_size):
    """The embeddings of x, (samples, dim).

    In batches of one size, filled up with copies: some distributions refuse others.
    """
    rows = len(keras.tree.flatten(x)[0])
    filled = np.arange(-(-rows // batch_size) * batch_size) % rows
    x = keras.tree.map_structure(lambda part: part[filled], x)
    return encoder.predict(x, batch_size=batch_size, verbose=0)[:rows]
