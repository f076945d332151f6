"""TensorFlow Lite models of 8 bit integers, and how much that costs."""

import warnings

import keras
import numpy as np

from keras_margin.files import written_whole
from keras_margin.plain_models import named


def write_int8(encoder, representative, path):
    """Writes an encoder whose weights and activations are 8 bit integers; input and output float32.

    Args:
        encoder: a Keras model of one input.
        representative: real inputs (samples, ...), which give each activation its range.
        path: of the file, whole or absent.

    Returns:
        {"mean_cosine", "min_cosine"}: floats, of the embeddings before and after.
    """
    if keras.backend.backend() != "tensorflow":
        raise ValueError(
            "`representative` needs Keras' TensorFlow backend, whose converter counts activations. "
            f"Received: backend={keras.backend.backend()!r}"
        )
    import tensorflow as tf

    shape = getattr(encoder.input, "shape", None)
    if shape is None:
        raise ValueError(
            "`representative` is for encoders of one input. Received: inputs "
            f"{keras.tree.map_structure(lambda part: part.shape, encoder.input)}"
        )
    images = np.asarray(representative, encoder.input.dtype)
    if len(images) == 0 or len(shape) != images.ndim:
        raise ValueError(
            f"`representative` must hold inputs of the encoder, {tuple(shape)}. Received: "
            f"representative.shape={images.shape}"
        )
    wanted = encoder.predict(images, verbose=0)
    converter = tf.lite.TFLiteConverter.from_keras_model(named(encoder))
    converter.optimizations = [tf.lite.Optimize.DEFAULT]
    converter.target_spec.supported_ops = [tf.lite.OpsSet.TFLITE_BUILTINS_INT8]
    converter.representative_dataset = lambda: ([image[None]] for image in images)
    with warnings.catch_warnings():
        # Input and output stay float32, so that there are none.
        warnings.filterwarnings("ignore", message="Statistics for quantized inputs")
        content = converter.convert()
    cosines = np.sum(wanted * _embeddings(content, images), axis=1)
    with written_whole(path) as temporary:
        temporary.write_bytes(content)
    return {"mean_cosine": float(cosines.mean()), "min_cosine": float(cosines.min())}


def _embeddings(content, images):
    """What a TensorFlow Lite model gives, each row at length 1 (8 bits do not keep it exactly)."""
    import tensorflow as tf

    with warnings.catch_warnings():
        # TensorFlow's own interpreter, which comes with it, is to move to another package.
        warnings.filterwarnings("ignore", message=".*tf.lite.Interpreter is deprecated")
        interpreter = tf.lite.Interpreter(model_content=content)
    run = interpreter.get_signature_runner()
    name = list(run.get_input_details())[0]
    rows = np.concatenate([run(**{name: image[None]})["embedding"] for image in images])
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)
