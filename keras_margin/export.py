"""What ships: the encoder as a SavedModel for TF Serving, or for ONNX Runtime, OpenVINO, LiteRT."""

import shutil
import tempfile
import warnings
from numbers import Integral
from pathlib import Path

import keras
import numpy as np

from keras_margin import litert, warmup
from keras_margin.files import written_whole
from keras_margin.images import LARGEST
from keras_margin.plain_models import input_names, named

FORMATS = {"tf_saved_model": "", "onnx": ".onnx", "openvino": ".xml", "litert": ".tflite"}
# What a layer may not compute in: the file would be written, and its runtime would not run it.
_CANNOT = {
    "onnx": {"bfloat16", "float64"},
    "openvino": {"bfloat16"},
    "litert": {"bfloat16", "float16", "float64"},
}
_OF_A_SAVED_MODEL = {"saved_model.pb", "fingerprint.pb", "variables", "assets", "assets.extra"}


def export(
    model,
    path,
    format="tf_saved_model",
    *,
    preprocessing=None,
    image_size=None,
    classify=False,
    representative=None,
    verbose=False,
):
    """Writes the encoder for serving: no label, no Python class is needed to run it.

    A SavedModel has these signatures, for batches of any size:

        serving_default   {image} -> {embedding}          what the backbone takes, as it is
        image_bytes       {image_bytes} -> {embedding}    JPEG or PNG strings, decoded, resized and
                                                          preprocessed inside the graph
        classify          {image} -> {logits}             scale * cosine of the training classes

    An input of several parts keeps their names in place of `image`. Warm-up requests are in
    `assets.extra`, so that TF Serving answers its first real request at full speed. The other
    formats hold the encoder alone, `image` to `embedding`.

    Args:
        path: the folder (a file ending in .onnx, .xml or .tflite for the other formats) to write,
            whole or absent at any time. An earlier one there is replaced.
        format: "tf_saved_model", "onnx", "openvino" (a .bin lies beside the .xml) or "litert"
            (TensorFlow Lite, builtin operations only).
        preprocessing: a Keras layer or model that maps float32 pixels from 0 to 255 (batch,
            height, width, channels) to what the backbone takes; `keras.layers.Identity()` where it
            takes pixels as they are. It, or `image_size`, makes `image_bytes`. On TensorFlow only.
        image_size: (height, width) that decoded images are resized to, bilinear with antialiasing;
            None: that of the backbone's input. The rotation that cameras note beside the pixels
            (EXIF) is not applied.
        classify: whether to add that signature.
        representative: for "litert", some real inputs (samples, ...): weights and activations
            become 8 bit integers, scaled to what these show; embeddings keep their length of 1.
        verbose: whether Keras prints what it writes.

    Returns:
        None; with `representative` a dict of Python floats, `mean_cosine` and `min_cosine` between
        the embeddings of the representative inputs before and after.

    Raises:
        ValueError: settings that do not fit the format or the backbone; weights that are not
            finite; on JAX, another format than a SavedModel.
        FileExistsError: `path` is a file, or a folder that holds anything but a SavedModel; for the
            other formats, a folder.
        ImportError: the format needs a package that is not installed.

    Example:

    >>> import tempfile
    >>> import keras_margin, tensorflow
    >>> backbone = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
    >>> model = keras_margin.EmbeddingModel(backbone, keras_margin.ArcFace(3))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     model.export(f"{folder}/served", classify=True)
    ...     sorted(tensorflow.saved_model.load(f"{folder}/served").signatures)
    ['classify', 'serving_default']
    """
    path = Path(path)
    if not isinstance(format, str) or format not in FORMATS:
        raise ValueError(f"`format` must be one of {list(FORMATS)}. Received: format={format!r}")
    _check_finite([*model.backbone.variables, *(model.head.variables if classify else ())])
    if format == "tf_saved_model":
        if representative is not None:
            raise ValueError(
                '`representative` is for format="litert". Received: format="tf_saved_model"'
            )
        return _saved_model(model, path, preprocessing, image_size, classify, verbose)
    given = {"preprocessing": preprocessing, "image_size": image_size, "classify": classify}
    for name, value in given.items():
        if value is not None and value is not False:
            raise ValueError(
                f"`{name}` is for a SavedModel: other formats hold the encoder alone. Received: "
                f"{name}={value!r} with format={format!r}"
            )
    if keras.backend.backend() != "tensorflow":
        raise ValueError(
            "`format` other than a SavedModel needs Keras' TensorFlow backend: save the model, "
            "load it with KERAS_BACKEND=tensorflow and export it there. Received: "
            f"format={format!r} with backend={keras.backend.backend()!r}"
        )
    if path.suffix != FORMATS[format]:
        raise ValueError(
            f"`path` must end in {FORMATS[format]!r} for this format. Received: "
            f"path={str(path)!r}, format={format!r}"
        )
    if path.is_dir():
        raise FileExistsError(
            "`path` must be a file for this format: a folder is there. Received: "
            f"path={str(path)!r}"
        )
    _check_computes(model.encoder, format)
    if format == "litert":
        _check_names(input_names(model.encoder))
    if representative is not None:
        if format != "litert":
            raise ValueError(
                f'`representative` is for format="litert". Received: format={format!r}'
            )
        return litert.write_int8(model.encoder, representative, path, verbose)
    encoder = named(model.encoder)
    with tempfile.TemporaryDirectory() as folder:
        written = Path(folder, path.name)
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="In the future `np.object`")
                encoder.export(str(written), format=format, verbose=verbose)
        except ImportError as error:
            raise ImportError(
                f'This format needs more packages: pip install "keras_margin[{format}]" ({error})'
            ) from error
        # What OpenVINO's .xml refers to comes first.
        for part in sorted(Path(folder).iterdir(), key=lambda part: part == written):
            with written_whole(path.with_name(part.name)) as temporary:
                shutil.copyfile(part, temporary)


def _saved_model(model, path, preprocessing, image_size, classify, verbose):
    _check_replaceable(path)
    encoder = model.encoder
    names = input_names(encoder)
    _check_names(names)
    parts = keras.tree.flatten(encoder.input)
    signature = {
        name: keras.InputSpec(shape=(None, *part.shape[1:]), dtype=part.dtype, name=name)
        for name, part in zip(names, parts, strict=True)
    }
    archive = keras.export.ExportArchive()
    archive.track(encoder)
    if classify:
        # On JAX an endpoint knows the variables that were tracked before it, and no others.
        classifier = model.classifier
        archive.track(classifier)
    archive.add_endpoint(
        "serving_default",
        lambda parts: {"embedding": _called(encoder, names, parts)},
        input_signature=[signature],
    )
    requests = {"serving_default": warmup.zeros(signature)}
    if preprocessing is not None or image_size is not None:
        decoding = _Decoding(encoder, preprocessing, image_size)
        _check_finite(decoding.preprocessing.variables)
        archive.track(decoding.preprocessing)
        archive.add_endpoint(
            "image_bytes",
            lambda image_bytes: {
                "embedding": _called(encoder, names, {names[0]: decoding(image_bytes)})
            },
            input_signature=[decoding.signature],
        )
        requests["image_bytes"] = {"image_bytes": decoding.example()}
    if classify:
        archive.add_endpoint(
            "classify",
            lambda parts: {"logits": _called(classifier, names, parts)},
            input_signature=[signature],
        )
        requests["classify"] = warmup.zeros(signature)
    with written_whole(path) as temporary:
        archive.write_out(temporary, verbose=verbose)
        warmup.write(temporary, requests)


def _called(plain_model, names, parts):
    ordered = [parts[name] for name in names]
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        # A served graph does not look at shapes: some networks answer pictures of any size.
        ordered = [tf.ensure_shape(part, part.shape) for part in ordered]
        _check_batch(ordered[0])
    inputs = keras.tree.pack_sequence_as(plain_model.input, ordered)
    return plain_model(inputs, training=False)


def _check_batch(part):
    """In the graph: of no rows TensorFlow's fused convolutions make tensors of wrong shapes."""
    import tensorflow as tf

    tf.debugging.assert_positive(tf.shape(part)[0], "The batch is empty: send at least one row.")


class _Decoding:
    """Encoded images to what the encoder takes, inside the graph."""

    def __init__(self, encoder, preprocessing, image_size):
        if keras.backend.backend() != "tensorflow":
            # Strings live in TensorFlow's graphs alone.
            raise ValueError(
                "`preprocessing` and `image_size` make a signature that decodes images, which "
                "needs Keras' TensorFlow backend. Received: backend="
                f"{keras.backend.backend()!r}"
            )
        shapes = [tuple(part.shape) for part in keras.tree.flatten(encoder.input)]
        shape, dtype = shapes[0], keras.tree.flatten(encoder.input)[0].dtype
        if len(shapes) != 1 or len(shape) != 4 or shape[-1] not in (1, 3):
            raise ValueError(
                "`preprocessing` and `image_size` are for backbones that take grey or RGB images "
                "(batch, height, width, channels). Received: inputs of shape "
                f"{', '.join(map(str, shapes))}"
            )
        size = shape[1:3] if image_size is None else image_size
        is_pair = isinstance(size, (tuple, list)) and len(size) == 2
        if not is_pair or not all(_is_whole(n) and n > 0 for n in size):
            why = f", since the backbone's input of shape {shape} does not say it"
            raise ValueError(
                f"`image_size` must be (height, width){why if image_size is None else ''}. "
                f"Received: image_size={image_size!r}"
            )
        if int(size[0]) * int(size[1]) > LARGEST:
            raise ValueError(
                f"`image_size` must have at most {LARGEST:,} pixels. Received: image_size={size}"
            )
        self.size, self.channels, self.dtype = tuple(map(int, size)), shape[-1], dtype
        self.preprocessing = keras.layers.Identity() if preprocessing is None else preprocessing
        if not isinstance(self.preprocessing, keras.Layer):
            raise TypeError(
                "`preprocessing` must be a Keras layer or model, which can be saved with the "
                f"encoder. Received: preprocessing={preprocessing!r}"
            )
        black = keras.ops.zeros((1, *self.size, self.channels))
        given = self.preprocessing(black, training=False)
        found = getattr(given, "shape", None)
        if found is None:
            raise ValueError(
                f"`preprocessing` must give one tensor of images. Received: {type(given).__name__}"
            )
        if len(found) != 4 or any(b not in (None, a) for a, b in zip(found, shape, strict=True)):
            raise ValueError(
                f"`preprocessing` must give what the backbone takes, {shape}. Received: "
                f"{tuple(found)} from images of {self.size}"
            )

    @property
    def signature(self):
        import tensorflow as tf

        return tf.TensorSpec((None,), tf.string, name="image_bytes")

    def __call__(self, image_bytes):
        import tensorflow as tf

        def decoded(one):
            image = tf.io.decode_image(one, channels=self.channels, expand_animations=False)
            return tf.image.resize(image, self.size, antialias=True)

        _check_batch(image_bytes)
        spec = tf.TensorSpec((*self.size, self.channels), tf.float32)
        images = tf.map_fn(decoded, image_bytes, fn_output_signature=spec)
        prepared = self.preprocessing(images, training=False)
        if keras.backend.is_int_dtype(self.dtype):
            prepared = keras.ops.round(prepared)  # a cast would cut off: half a grey level darker
        return keras.ops.cast(prepared, self.dtype)

    def example(self):
        """A black image, encoded."""
        import tensorflow as tf

        image = tf.zeros((*self.size, self.channels), tf.uint8)
        return tf.reshape(tf.io.encode_png(image), (1,))


def _check_replaceable(path):
    """Refuses to write over anything but an earlier SavedModel."""
    if not path.exists():
        return
    if not path.name:
        raise ValueError(f"`path` must name a folder. Received: path={str(path)!r}")
    if not path.is_dir() or {part.name for part in path.iterdir()} - _OF_A_SAVED_MODEL:
        raise FileExistsError(
            "`path` of `export` must be a new folder or an earlier SavedModel: what is there would "
            f"be lost. Received: path={str(path)!r}"
        )


def _check_finite(variables):
    for variable in variables:
        if not np.all(np.isfinite(keras.ops.convert_to_numpy(variable))):
            raise ValueError(
                "A model to export must have finite weights: go on from the last good ones. "
                f"Received: NaN or infinity in {variable.path}"
            )


def _check_computes(encoder, format):
    for layer in encoder._flatten_layers():
        if layer.compute_dtype in _CANNOT[format]:
            raise ValueError(
                f'`format="{format}"` needs a backbone that computes in float32: load its weights '
                'into one made under keras.config.set_dtype_policy("float32"). Received: '
                f"{layer.compute_dtype} in layer {layer.name!r}"
            )


def _check_names(names):
    """TensorFlow's signatures would call them otherwise, or fail on them."""
    for name in names:
        if not (name.isascii() and name.isidentifier()):
            raise ValueError(
                "The names of a backbone's inputs must be letters, digits and underscores, as "
                f"TensorFlow's signatures keep them. Received: {name!r}"
            )


def _is_whole(number):
    return isinstance(number, Integral) and not isinstance(number, bool)
