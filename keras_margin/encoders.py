"""Trained encoders, from memory or from files: images in, embeddings out, whatever wrote them."""

import os
from collections.abc import Callable
from typing import NamedTuple

import keras
import numpy as np

from keras_margin.plain_models import graph_of


class Encoder(NamedTuple):
    """What gives the embeddings of a batch of images.

    Attributes:
        embed: function of pixels (batch, height, width, channels) that gives (batch, dim).
        image_shape: (height, width, channels); None where any number will do.
        dtype: of the pixels that it takes, a `str`.
        kind: what it is, for people.
        embed_files: function of a list of encoded images that gives (batch, dim), for what decodes
            and preprocesses them itself; None where nothing does.
    """

    embed: Callable
    image_shape: tuple
    dtype: str
    kind: str
    embed_files: Callable = None


def load_encoder(path):
    """Loads an encoder that was saved with Keras or exported for TensorFlow Serving.

    Four kinds of files are known: the `.keras` of a plain encoder or of a whole `EmbeddingModel`,
    whose encoder is taken, and the SavedModel of `EmbeddingModel.export` or of Keras' own
    `Model.export`. Of a SavedModel the signature `serving_default` is called, or `image_bytes`
    where it has one: what is judged is what is served. A SavedModel is a program: load only what
    you trust. A `.keras` file that holds Python code is refused by Keras.

    Args:
        path: the `.keras` file or the folder of the SavedModel, `str` or `os.PathLike`.

    Returns:
        `Encoder`.

    Raises:
        FileNotFoundError: it is not there.
        ValueError: it is none of these, damaged, or does not map one image to one embedding; the
            message names the path.
        ImportError: a SavedModel, and TensorFlow is not installed.

    Example:

    >>> import pathlib, tempfile
    >>> from keras_margin.encoders import load_encoder
    >>> encoder = keras.Sequential(
    ...     [keras.Input((8, 8, 1)), keras.layers.Flatten(), keras.layers.Dense(2)]
    ... )
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     encoder.save(pathlib.Path(folder, "encoder.keras"))
    ...     loaded = load_encoder(pathlib.Path(folder, "encoder.keras"))
    >>> loaded.image_shape, loaded.kind
    ((8, 8, 1), 'Keras model')
    """
    path = os.fspath(path)
    if not os.path.exists(path):
        raise FileNotFoundError(f"There is no encoder. Received: path={path!r}")
    try:
        if os.path.isdir(path):
            return _saved_model(path)
        if not path.endswith(".keras"):
            raise ValueError("An encoder is a .keras file or the folder of a SavedModel.")
        return as_encoder(_keras_model(path))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{error} Received: path={path!r}") from error


def as_encoder(model):
    """An `Encoder` that calls a Keras model.

    Args:
        model: a functional or Sequential model (batch, height, width, channels) -> (batch, dim); a
            model with such an `encoder`, as `EmbeddingModel` has; or an `Encoder`, which is
            returned as it is.

    Returns:
        `Encoder`.

    Raises:
        TypeError: it is no Keras model.
        ValueError: it has several inputs or outputs, or they have other shapes.

    Example:

    >>> from keras_margin.encoders import as_encoder
    >>> model = keras.Sequential(
    ...     [keras.Input((8, 8, 1)), keras.layers.Flatten(), keras.layers.Dense(2)]
    ... )
    >>> as_encoder(model).embed(np.zeros((3, 8, 8, 1))).shape
    (3, 2)
    """
    if isinstance(model, Encoder):
        return model
    if not isinstance(model, keras.Model):
        raise TypeError(f"`encoder` must be a Keras model. Received: encoder={model!r}")
    kind, graph = "Keras model", graph_of(model)
    if graph is None and isinstance(getattr(model, "encoder", None), keras.Model):
        kind, model = f"encoder of {type(model).__name__}", model.encoder
        graph = graph_of(model)
    if graph is None:
        raise ValueError(
            "The encoder must be a functional or Sequential model that knows its input: give "
            "keras.Model(inputs, model(inputs)), or an export of it."
        )
    image, _ = _checked(*map(keras.tree.flatten, graph))

    def embed(pixels):
        given = keras.tree.map_structure(lambda _: pixels, graph[0])  # a dict stays one
        return keras.tree.flatten(model.predict_on_batch(given))[0]

    return Encoder(
        embed, tuple(image.shape[1:]), keras.backend.standardize_dtype(image.dtype), kind
    )


def _keras_model(path):
    try:
        return keras.saving.load_model(path, compile=False)
    # A garbled file ends in almost any error, of Keras, of zipfile, of h5py or of json.
    except Exception as error:
        raise ValueError(
            f"Keras cannot load the file ({one_line(error)}). If it holds layers of your own, "
            "export the encoder as a SavedModel and name that."
        ) from error


def _saved_model(path):
    if not os.path.isfile(os.path.join(path, "saved_model.pb")):
        versions = [
            name
            for name in sorted(os.listdir(path))
            if os.path.isfile(os.path.join(path, name, "saved_model.pb"))
        ]
        hint = f" Do you mean {os.path.join(path, versions[-1])!r}?" if versions else ""
        raise ValueError(f"The folder holds no SavedModel (saved_model.pb).{hint}")
    try:
        import tensorflow as tf
    except ImportError as error:
        raise ImportError(
            "A SavedModel needs TensorFlow: pip install tensorflow. Without it, name the encoder's "
            f".keras file. Received: path={path!r}"
        ) from error
    try:
        loaded = tf.saved_model.load(path)
    except Exception as error:  # of protobuf, of the file system, of any operation
        raise ValueError(f"TensorFlow cannot load the folder ({one_line(error)}).") from error
    if "serving_default" not in loaded.signatures:
        raise ValueError(
            "The SavedModel must have the signature serving_default, but it has "
            f"{sorted(loaded.signatures)}."
        )
    signature = loaded.signatures["serving_default"]
    inputs, outputs = signature.structured_input_signature[1], signature.structured_outputs
    image, _ = _checked(list(inputs.values()), list(outputs.values()))
    (given,), (wanted,) = inputs, outputs

    def embed(pixels, of=loaded):  # `of` keeps the variables alive
        tensor = tf.convert_to_tensor(np.asarray(pixels, image.dtype.as_numpy_dtype))
        return signature(**{given: tensor})[wanted].numpy()

    if "image_bytes" not in loaded.signatures:
        return Encoder(embed, tuple(image.shape[1:]), image.dtype.name, "SavedModel")

    def embed_files(files, of=loaded):
        found = loaded.signatures["image_bytes"](image_bytes=tf.constant(files, tf.string))
        return found["embedding"].numpy()

    kind = "SavedModel that decodes and preprocesses images itself"
    return Encoder(embed, tuple(image.shape[1:]), image.dtype.name, kind, embed_files)


def _checked(inputs, outputs):
    """The only input and the only output: images, and embeddings."""
    if len(inputs) != 1 or len(outputs) != 1:
        raise ValueError(
            "The encoder must map one input to one output, but it has "
            f"{len(inputs)} inputs and {len(outputs)} outputs."
        )
    shapes = [None if s.shape is None else tuple(s.shape) for s in (*inputs, *outputs)]
    image, embedding = shapes
    if image is None or len(image) != 4 or image[-1] not in (1, 3):
        raise ValueError(
            "The encoder must take images (batch, height, width, channels) with 1 or 3 channels, "
            f"but its input has shape {image}."
        )
    if embedding is None or len(embedding) != 2:
        raise ValueError(
            f"The encoder must give embeddings (batch, dim), but its output has shape {embedding}."
        )
    return inputs[0], outputs[0]


def one_line(error):
    """The first 200 characters: Keras' messages can hold the whole model."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return text if len(text) <= 200 else f"{text[:200]} ..."
