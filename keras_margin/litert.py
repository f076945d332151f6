"""TensorFlow Lite models of 8 bit integers, and how much that costs."""

import contextlib
import tempfile
import warnings

import keras
import numpy as np
from keras import ops

from keras_margin.files import written_whole
from keras_margin.plain_models import named


def write_int8(encoder, representative, path, verbose=False):
    """Writes an encoder whose weights and activations are 8 bit integers.

    Input, output and the division by the length are float32, so that embeddings have length 1.

    Args:
        encoder: a Keras model of one input.
        representative: real inputs (samples, ...), which give each activation its range.
        path: of the file, whole or absent.
        verbose: whether Keras prints what it exports.

    Returns:
        {"mean_cosine", "min_cosine"}: floats, of the embeddings before and after. Those that
        are 0 before do not count; NaN where all are.
    """
    import tensorflow as tf

    images = _checked(representative, encoder)
    wanted = encoder.predict(images, verbose=0)
    with tempfile.TemporaryDirectory() as folder:
        named(_with_fusable_length(encoder)).export(folder, verbose=verbose)
        converter = tf.lite.TFLiteConverter.from_saved_model(folder)
        converter.optimizations = [tf.lite.Optimize.DEFAULT]
        converter.target_spec.supported_ops = [tf.lite.OpsSet.TFLITE_BUILTINS_INT8]
        converter.representative_dataset = lambda: ([image[None]] for image in images)
        with _converters_warnings_ignored():
            # Its name is history: it is TensorFlow's way to leave operations out.
            content = tf.lite.experimental.QuantizationDebugger(
                converter=converter,
                debug_dataset=converter.representative_dataset,
                debug_options=tf.lite.experimental.QuantizationDebugOptions(
                    denylisted_ops=["L2_NORMALIZATION"]
                ),
            ).get_nondebug_quantized_model()
    cosines = np.sum(wanted * _embeddings(content, images), axis=1)
    has_direction = wanted.any(axis=1)
    cosines = cosines[has_direction] if has_direction.any() else np.array([np.nan])
    with written_whole(path) as temporary:
        temporary.write_bytes(content)
    return {"mean_cosine": float(cosines.mean()), "min_cosine": float(cosines.min())}


def _checked(representative, encoder):
    """As an array of what the encoder takes."""
    wanted = encoder.input
    if not hasattr(wanted, "shape"):
        raise ValueError(
            "`representative` is for encoders of one input. Received: inputs "
            f"{keras.tree.map_structure(lambda part: part.shape, wanted)}"
        )
    try:
        given = np.asarray(representative)
        with np.errstate(invalid="ignore", over="ignore"):  # what they warn of is refused below
            images = np.asarray(given.real, wanted.dtype)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"`representative` must be one array of numbers. Received: {representative!r:.200}"
        ) from error
    if given.dtype.kind == "c" or (images.dtype.kind in "iu" and not np.array_equal(images, given)):
        raise ValueError(
            f"`representative` must hold numbers that the encoder takes, {wanted.dtype}. Received: "
            f"numbers of {given.dtype} that would change"
        )
    fits = images.ndim == len(wanted.shape) and all(
        size in (None, found) for size, found in zip(wanted.shape, images.shape, strict=True)
    )
    if not fits or len(images) == 0:
        raise ValueError(
            f"`representative` must hold inputs of the encoder, {tuple(wanted.shape)}. Received: "
            f"representative.shape={images.shape}"
        )
    if not np.isfinite(images).all():
        raise ValueError("`representative` must be finite. Received: NaN or infinity in it")
    return images


def _with_fusable_length(encoder):
    """The same encoder, its length written as the converter knows it: as L2_NORMALIZATION.

    In 8 bits the lengths would lie between 0.5 and 1.2. This one operation can stay in float32.
    """
    embeddings = ops.cast(encoder.get_layer("unit_embedding").input, "float32")
    squares = ops.sum(ops.square(embeddings), axis=-1, keepdims=True)
    return keras.Model(encoder.input, embeddings * ops.rsqrt(ops.maximum(squares, 1e-24)))


def _embeddings(content, images):
    """What a TensorFlow Lite model gives, row by row."""
    import tensorflow as tf

    with _converters_warnings_ignored():
        run = tf.lite.Interpreter(model_content=content).get_signature_runner()
    name = list(run.get_input_details())[0]
    return np.concatenate([run(**{name: image[None]})["embedding"] for image in images])


@contextlib.contextmanager
def _converters_warnings_ignored():
    with warnings.catch_warnings():
        # Input and output stay float32, so that there are none.
        warnings.filterwarnings("ignore", message="Statistics for quantized inputs")
        # TensorFlow's own interpreter, which comes with it, is to move to another package.
        warnings.filterwarnings("ignore", message=".*tf.lite.Interpreter is deprecated")
        yield
