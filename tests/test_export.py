"""keras_margin/export.py: what ships runs by its own runtime, without Keras and without us."""

import io
import json
import subprocess
import sys
import textwrap

import keras
import numpy as np
import pytest
import tensorflow as tf
from jax_process import on_jax
from PIL import Image

import keras_margin

SIZE, CHANNELS, DIM, CLASSES = 12, 3, 4, 5


def backbone(channels=CHANNELS, size=SIZE, scaled=True):
    image = keras.Input((size, size, channels))
    x = keras.layers.Rescaling(1 / 255.0)(image) if scaled else image
    x = keras.layers.Conv2D(3, 3, activation="relu")(x)
    return keras.Model(image, keras.layers.Dense(DIM)(keras.layers.GlobalMaxPooling2D()(x)))


@pytest.fixture
def model():
    keras.utils.set_random_seed(0)
    return keras_margin.EmbeddingModel(backbone(), keras_margin.ArcFace(CLASSES))


def pictures(count=3, size=SIZE, channels=CHANNELS):
    return np.random.default_rng(0).integers(0, 256, (count, size, size, channels), np.uint8)


def encoded(picture, kind="png"):
    buffer = io.BytesIO()
    Image.fromarray(picture.squeeze()).save(buffer, kind)
    return buffer.getvalue()


def served(path):
    return tf.saved_model.load(path).signatures


# SavedModel


def test_image_bytes_give_what_the_arrays_give(model, tmp_path):
    model.export(tmp_path / "served", preprocessing=keras.layers.Identity())
    x = pictures()
    want = model.encoder(x.astype("float32")).numpy()
    signatures = served(tmp_path / "served")
    assert sorted(signatures) == ["image_bytes", "serving_default"]
    got = signatures["image_bytes"](image_bytes=tf.constant([encoded(one) for one in x]))
    np.testing.assert_allclose(got["embedding"], want, atol=1e-5)
    got = signatures["serving_default"](image=tf.constant(x, tf.float32))
    np.testing.assert_allclose(got["embedding"], want, atol=1e-5)


def test_preprocessing_is_in_the_graph(tmp_path):
    model = keras_margin.EmbeddingModel(backbone(scaled=False), keras_margin.ArcFace(CLASSES))
    centred = keras.Sequential(
        [
            keras.Input((20, 20, CHANNELS)),
            keras.layers.CenterCrop(SIZE, SIZE),
            keras.layers.Normalization(mean=127.5, variance=127.5**2),
        ]
    )
    model.export(tmp_path / "served", preprocessing=centred, image_size=(20, 20))
    x = pictures(size=20)
    got = served(tmp_path / "served")["image_bytes"](
        image_bytes=tf.constant([encoded(one) for one in x])
    )
    want = model.encoder((x[:, 4:16, 4:16].astype("float32") - 127.5) / 127.5)
    np.testing.assert_allclose(got["embedding"], want, atol=1e-5)


@pytest.mark.parametrize("kind", ["png", "jpeg"])
@pytest.mark.parametrize("channels", [1, 3])
def test_pictures_of_other_sizes_are_resized(tmp_path, channels, kind):
    model = keras_margin.EmbeddingModel(backbone(channels), keras_margin.ArcFace(CLASSES))
    model.export(tmp_path / "served", image_size=(SIZE, SIZE))
    # Slow changes, which neither JPEG nor a resize can harm.
    ramp = np.linspace(0, 250, 48)[:, None, None] * np.ones((48, 60, channels))
    x = Image.fromarray(ramp.astype(np.uint8).squeeze())
    small = np.asarray(x.resize((SIZE, SIZE), Image.Resampling.BILINEAR), "float32")
    want = model.encoder(small.reshape(1, SIZE, SIZE, channels))
    content = tf.constant([encoded(np.asarray(x), kind)])
    got = served(tmp_path / "served")["image_bytes"](image_bytes=content)["embedding"]
    np.testing.assert_allclose(got, want, atol=5e-3)


def test_resized_pixels_are_rounded_for_whole_numbers(tmp_path):
    image = keras.Input((SIZE, SIZE, CHANNELS), dtype="uint8")
    x = keras.layers.Flatten()(keras.layers.Rescaling(1.0)(image))
    model = keras_margin.EmbeddingModel(keras.Model(image, x), keras_margin.ArcFace(CLASSES))
    model.export(tmp_path / "served", preprocessing=keras.layers.Identity())
    x = pictures(1, 30)
    resized = tf.image.resize(x, (SIZE, SIZE), antialias=True)
    want = model.encoder(np.round(resized).astype("uint8"))
    content = tf.constant([encoded(x[0])])
    got = served(tmp_path / "served")["image_bytes"](image_bytes=content)["embedding"]
    np.testing.assert_allclose(got, want, atol=1e-6)


@pytest.mark.parametrize("packed", [lambda image: [image], lambda image: {"image": image}])
def test_one_picture_in_a_list_or_a_dict_is_decoded(tmp_path, packed):
    image = keras.Input((SIZE, SIZE, CHANNELS), name="image")
    x = keras.layers.Flatten()(image)
    model = keras_margin.EmbeddingModel(
        keras.Model(packed(image), x), keras_margin.ArcFace(CLASSES)
    )
    model.export(tmp_path / "served", preprocessing=keras.layers.Identity())
    x = pictures()
    content = tf.constant([encoded(one) for one in x])
    got = served(tmp_path / "served")["image_bytes"](image_bytes=content)["embedding"]
    np.testing.assert_allclose(got, model.encoder(packed(x.astype("float32"))), atol=1e-5)


@pytest.mark.parametrize("rows", [1, 7])
def test_batches_of_any_size(model, tmp_path, rows):
    model.export(tmp_path / "served", image_size=(SIZE, SIZE), classify=True)
    signatures = served(tmp_path / "served")
    x = pictures(rows)
    content = tf.constant([encoded(one) for one in x], tf.string, shape=(rows,))
    assert signatures["image_bytes"](image_bytes=content)["embedding"].shape == (rows, DIM)
    image = tf.constant(x, tf.float32)
    assert signatures["serving_default"](image=image)["embedding"].shape == (rows, DIM)
    assert signatures["classify"](image=image)["logits"].shape == (rows, CLASSES)


def test_an_empty_batch_is_an_error(model, tmp_path):
    model.export(tmp_path / "served", image_size=(SIZE, SIZE), classify=True)
    signatures = served(tmp_path / "served")
    for name, given in (
        ("image_bytes", {"image_bytes": tf.zeros((0,), tf.string)}),
        ("serving_default", {"image": tf.zeros((0, SIZE, SIZE, CHANNELS))}),
        ("classify", {"image": tf.zeros((0, SIZE, SIZE, CHANNELS))}),
    ):
        with pytest.raises(tf.errors.InvalidArgumentError, match="The batch is empty"):
            signatures[name](**given)


def test_classify_gives_the_scaled_cosines(model, tmp_path):
    model.export(tmp_path / "served", classify=True)
    signatures = served(tmp_path / "served")
    assert sorted(signatures) == ["classify", "serving_default"]
    x = pictures().astype("float32")
    got = signatures["classify"](image=tf.constant(x))["logits"]
    centers = keras.utils.normalize(model.head.centers.numpy())
    want = 64.0 * model.encoder(x).numpy() @ centers.T
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


def test_a_corrupt_image_fails_its_own_call_alone(model, tmp_path):
    model.export(tmp_path / "served", image_size=(SIZE, SIZE))
    signature = served(tmp_path / "served")["image_bytes"]
    good = encoded(pictures(1)[0])
    want = signature(image_bytes=tf.constant([good]))["embedding"]
    for bad in (b"", b"no image", good[: len(good) // 2]):
        with pytest.raises(tf.errors.InvalidArgumentError):
            signature(image_bytes=tf.constant([good, bad]))
        got = signature(image_bytes=tf.constant([good]))["embedding"]
        np.testing.assert_array_equal(got, want)


def test_a_wrong_image_size_is_an_error(model, tmp_path):
    model.export(tmp_path / "served")
    signature = served(tmp_path / "served")["serving_default"]
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"expected shape \[\?,12,12,3\]"):
        signature(image=tf.zeros((1, SIZE + 1, SIZE, CHANNELS)))


def test_loads_without_keras_by_graph_and_signature_alone(model, tmp_path):
    """As TF Serving does it: a Session, no Python class, and neither Keras nor keras_margin."""
    model.export(tmp_path / "served", image_size=(SIZE, SIZE))
    x = pictures(2)
    np.save(tmp_path / "x.npy", x.astype("float32"))
    for i, one in enumerate(x):
        (tmp_path / f"{i}.png").write_bytes(encoded(one))
    code = """
        import sys
        sys.modules.update(dict.fromkeys(["keras", "keras_margin"]))
        import json, numpy, tensorflow.compat.v1 as tf
        folder = sys.argv[1]
        with tf.Session(graph=tf.Graph()) as session:
            graph = tf.saved_model.loader.load(session, ["serve"], folder + "/served")
            found = []
            strings = [open(f"{folder}/{i}.png", "rb").read() for i in (0, 1)]
            for name, key, value in (
                ("serving_default", "image", numpy.load(folder + "/x.npy")),
                ("image_bytes", "image_bytes", strings),
            ):
                signature = graph.signature_def[name]
                output = signature.outputs["embedding"].name
                found.append(session.run(output, {signature.inputs[key].name: value}).tolist())
        print("RESULT", json.dumps(found))
    """
    array, strings = json.loads(run_alone(code, tmp_path))
    want = model.encoder(x.astype("float32"))
    np.testing.assert_allclose(array, want, atol=1e-5)
    np.testing.assert_allclose(strings, want, atol=1e-5)


def run_alone(code, folder):
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(code), str(folder)],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.rpartition("RESULT ")[2]


# Other runtimes

RUNTIMES = {
    "onnx": """
        import onnxruntime
        session = onnxruntime.InferenceSession(path)
        (found,) = session.run(["embedding"], {"image": x})
    """,
    "openvino": """
        import openvino
        exact = {"INFERENCE_PRECISION_HINT": "f32"}
        compiled = openvino.Core().compile_model(path, "CPU", exact)
        found = compiled({"image": x})["embedding"]
    """,
    "litert": """
        from ai_edge_litert.interpreter import Interpreter
        run = Interpreter(path).get_signature_runner("serving_default")
        found = run(image=x)["embedding"]
    """,
}


@pytest.mark.parametrize("format", sorted(RUNTIMES))
def test_other_formats_by_their_own_runtime(model, tmp_path, format):
    """In a process that cannot import TensorFlow, Keras or keras_margin."""
    path = tmp_path / f"encoder{keras_margin.export.FORMATS[format]}"
    model.export(path, format=format)
    x = pictures()
    np.save(tmp_path / "x.npy", x)
    for i, one in enumerate(x):
        (tmp_path / f"{i}.png").write_bytes(encoded(one))
    code = f"""
        import sys
        sys.modules.update(dict.fromkeys(["tensorflow", "keras", "keras_margin"]))
        import json, numpy, PIL.Image
        path, results = {str(path)!r}, []
        files = [PIL.Image.open(f"{{sys.argv[1]}}/{{i}}.png") for i in range({len(x)})]
        for images in (numpy.load(sys.argv[1] + "/x.npy"), numpy.stack(files)):
            x = images.astype("float32")
    {textwrap.indent(textwrap.dedent(RUNTIMES[format]), "            ")}
            results.append(numpy.asarray(found).tolist())
        print("RESULT", json.dumps(results))
    """
    array, files = json.loads(run_alone(code, tmp_path))
    want = model.encoder.predict(x.astype("float32"), verbose=0)
    np.testing.assert_allclose(array, want, atol=1e-4)
    np.testing.assert_allclose(files, want, atol=1e-4)


def test_litert_has_builtin_operations_alone(model, tmp_path):
    model.export(tmp_path / "encoder.tflite", format="litert")
    from ai_edge_litert.interpreter import Interpreter

    operations = {
        op["op_name"] for op in Interpreter(tmp_path / "encoder.tflite")._get_ops_details()
    }
    assert operations and not any(name.startswith(("Flex", "CUSTOM")) for name in operations)


def test_int8_reports_what_it_costs(model, tmp_path):
    x = pictures(20).astype("float32")
    report = model.export(tmp_path / "small.tflite", format="litert", representative=x)
    assert 0.9 < report["min_cosine"] <= report["mean_cosine"] < 1.0
    from ai_edge_litert.interpreter import Interpreter

    interpreter = Interpreter(tmp_path / "small.tflite")
    kinds = [detail["dtype"] for detail in interpreter.get_tensor_details()]
    assert np.int8 in kinds
    run = interpreter.get_signature_runner("serving_default")
    rows = np.concatenate([run(image=one[None])["embedding"] for one in x])
    np.testing.assert_allclose(np.linalg.norm(rows, axis=1), 1.0, atol=1e-5)
    cosines = np.sum(rows * model.encoder.predict(x, verbose=0), axis=1)
    assert cosines.min() == pytest.approx(report["min_cosine"], abs=1e-2)


# What does not fit


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"format": "pickle"}, "`format` must be one of"),
        ({"format": ["onnx"]}, "`format` must be one of"),
        ({"format": "onnx"}, "`path` must end in '.onnx'"),
        ({"format": "onnx", "classify": True}, "`classify` is for a SavedModel"),
        ({"format": "litert", "image_size": (4, 4)}, "`image_size` is for a SavedModel"),
        ({"representative": np.zeros((1, SIZE, SIZE, 3))}, "`representative` is for"),
        ({"image_size": (4,)}, r"`image_size` must be \(height, width\)"),
        ({"image_size": (0, 4)}, r"`image_size` must be \(height, width\)"),
        ({"image_size": 12}, r"`image_size` must be \(height, width\). Received: image_size=12"),
        (
            {"image_size": "12"},
            r"`image_size` must be \(height, width\). Received: image_size='12'",
        ),
        ({"image_size": (True, True)}, r"`image_size` must be \(height, width\)"),
        ({"image_size": (10**9, 10**9)}, "`image_size` must have at most"),
        ({"image_size": (4, 4)}, "`preprocessing` must give what the backbone takes"),
    ],
    ids=lambda value: None if isinstance(value, dict) else value[:30],
)
def test_settings_that_do_not_fit_are_refused(model, tmp_path, settings, message):
    with pytest.raises(ValueError, match=message):
        model.export(tmp_path / "served", **settings)
    assert not list(tmp_path.iterdir())


def test_preprocessing_must_be_a_layer(model, tmp_path):
    with pytest.raises(TypeError, match="`preprocessing` must be a Keras layer"):
        model.export(tmp_path / "served", preprocessing=lambda x: x / 255)


def of_two(packed, **named):
    left, right = (keras.Input((4,), **named.get(side, {})) for side in ("left", "right"))
    dense = keras.layers.Dense(DIM)(left + right)
    return keras_margin.EmbeddingModel(
        keras.Model(packed(left, right), dense), keras_margin.ArcFace(CLASSES)
    )


@pytest.mark.parametrize("format", sorted(keras_margin.export.FORMATS))
@pytest.mark.parametrize(
    "packed",
    [lambda left, right: [left, [right]], lambda left, right: {"a": {"b": left, "c": right}}],
)
def test_nested_inputs_are_refused(tmp_path, format, packed):
    with pytest.raises(ValueError, match="must take one tensor, a list or a dict of tensors"):
        of_two(packed).export(tmp_path / f"e{keras_margin.export.FORMATS[format]}", format=format)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["left eye", "left-eye", "\xe9"])
@pytest.mark.parametrize("format", ["tf_saved_model", "litert"])
def test_names_that_signatures_do_not_keep_are_refused(tmp_path, format, name):
    model = of_two(lambda left, right: [left, right], left={"name": name})
    with pytest.raises(ValueError, match=f"must be letters, digits and underscores.*'{name}'"):
        model.export(tmp_path / f"e{keras_margin.export.FORMATS[format]}", format=format)
    assert not list(tmp_path.iterdir())


def test_preprocessing_gives_one_tensor(model, tmp_path):
    image = keras.Input((SIZE, SIZE, CHANNELS))
    double = keras.Model(image, [image + 0, image + 1])
    with pytest.raises(ValueError, match="must give one tensor of images. Received: list"):
        model.export(tmp_path / "served", preprocessing=double)


def test_preprocessing_with_weights_that_are_not_finite_does_not_ship(model, tmp_path):
    damaged = keras.Sequential([keras.Input((SIZE, SIZE, CHANNELS)), keras.layers.Conv2D(3, 1)])
    damaged.layers[0].bias.assign([np.nan] * 3)
    with pytest.raises(ValueError, match="must have finite weights.*bias$"):
        model.export(tmp_path / "served", preprocessing=damaged)
    assert not list(tmp_path.iterdir())


def test_export_leaves_random_preprocessing_as_it_was(model, tmp_path):
    flip = keras.layers.RandomFlip(seed=0)
    before = np.array(flip.variables[0])
    model.export(tmp_path / "served", preprocessing=flip)
    np.testing.assert_array_equal(flip.variables[0], before)


def test_a_backbone_of_any_size_needs_one_for_decoding(tmp_path):
    model = keras_margin.EmbeddingModel(backbone(size=None), keras_margin.ArcFace(CLASSES))
    with pytest.raises(ValueError, match="does not say it"):
        model.export(tmp_path / "served", preprocessing=keras.layers.Identity())
    model.export(tmp_path / "served", image_size=(SIZE, SIZE))
    x = pictures()
    content = tf.constant([encoded(one) for one in x])
    got = served(tmp_path / "served")["image_bytes"](image_bytes=content)["embedding"]
    np.testing.assert_allclose(got, model.encoder(x.astype("float32")), atol=1e-5)


def test_decoding_is_for_images(tmp_path):
    plain = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
    model = keras_margin.EmbeddingModel(plain, keras_margin.ArcFace(CLASSES))
    with pytest.raises(ValueError, match="for backbones that take grey or RGB images"):
        model.export(tmp_path / "served", preprocessing=keras.layers.Identity())


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (np.zeros((0, SIZE, SIZE, 3)), "must hold inputs of the encoder"),
        (np.zeros((SIZE, SIZE, 3)), "must hold inputs of the encoder"),
        (np.zeros((2, SIZE + 1, SIZE, 3)), "must hold inputs of the encoder"),
        (np.zeros((2, SIZE, SIZE, 1)), "must hold inputs of the encoder"),
        (np.full((2, SIZE, SIZE, 3), np.nan), "must be finite"),
        (np.full((2, SIZE, SIZE, 3), 1j), "must hold numbers that the encoder takes"),
        (np.full((2, SIZE, SIZE, 3), 1e300), "must be finite"),
        (["a"], "must be one array of numbers"),
        (iter([1]), "must be one array of numbers"),
    ],
)
def test_representative_inputs_are_those_of_the_encoder(model, tmp_path, rows, message):
    with pytest.raises(ValueError, match=f"`representative` {message}"):
        model.export(tmp_path / "small.tflite", format="litert", representative=rows)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("value", [0.5, 300.0, -1.0, np.nan])
def test_representative_pixels_are_not_changed_to_fit(tmp_path, value):
    image = keras.Input((SIZE, SIZE, 1), dtype="uint8")
    x = keras.layers.Flatten()(keras.layers.Rescaling(1 / 255.0)(image))
    model = keras_margin.EmbeddingModel(keras.Model(image, x), keras_margin.ArcFace(CLASSES))
    rows = np.full((2, SIZE, SIZE, 1), value)
    with pytest.raises(ValueError, match="must hold numbers that the encoder takes, uint8"):
        model.export(tmp_path / "small.tflite", format="litert", representative=rows)
    report = model.export(
        tmp_path / "small.tflite", format="litert", representative=np.full_like(rows, 7.0)
    )
    assert report["min_cosine"] > 0.99


def test_int8_of_embeddings_without_a_direction(tmp_path):
    """A black picture has the embedding 0 here, and no cosine."""
    image = keras.Input((SIZE, SIZE, 1))
    embedding = keras.layers.Dense(DIM, use_bias=False)(keras.layers.Flatten()(image))
    model = keras_margin.EmbeddingModel(
        keras.Model(image, embedding), keras_margin.ArcFace(CLASSES)
    )
    x = np.concatenate([np.zeros((1, SIZE, SIZE, 1)), pictures(5, channels=1)])
    report = model.export(tmp_path / "small.tflite", format="litert", representative=x)
    assert 0.99 < report["min_cosine"] <= report["mean_cosine"] <= 1.0 + 1e-6
    report = model.export(tmp_path / "small.tflite", format="litert", representative=x[:1])
    assert np.isnan([report["min_cosine"], report["mean_cosine"]]).all()


@pytest.mark.parametrize(
    ("format", "policy"),
    [
        ("litert", "mixed_float16"),
        ("litert", "mixed_bfloat16"),
        ("litert", "float64"),
        ("onnx", "mixed_bfloat16"),
        ("onnx", "float64"),
        ("openvino", "mixed_bfloat16"),
    ],
)
def test_numbers_that_a_runtime_cannot_compute_with(tmp_path, format, policy):
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(policy)
    try:
        model = keras_margin.EmbeddingModel(backbone(), keras_margin.ArcFace(CLASSES))
    finally:
        keras.config.set_dtype_policy(before)
    path = tmp_path / f"e{keras_margin.export.FORMATS[format]}"
    for representative in (None, pictures()) if format == "litert" else (None,):
        with pytest.raises(ValueError, match="needs a backbone that computes in float32"):
            model.export(path, format=format, representative=representative)
    assert not list(tmp_path.iterdir())


def test_paths_that_would_lose_something(model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="`path` must name a folder"):
        model.export("")
    (tmp_path / "e.onnx").mkdir()
    with pytest.raises(FileExistsError, match="a folder is there"):
        model.export("e.onnx", format="onnx")
    assert [path.name for path in tmp_path.iterdir()] == ["e.onnx"]


@pytest.mark.parametrize("format", sorted(keras_margin.export.FORMATS))
def test_weights_that_are_not_finite_do_not_ship(model, tmp_path, format):
    model.backbone.trainable_variables[0].assign(np.full((3, 3, CHANNELS, 3), np.inf))
    with pytest.raises(ValueError, match="must have finite weights.*kernel$"):
        model.export(tmp_path / f"e{keras_margin.export.FORMATS[format]}", format=format)
    assert not list(tmp_path.iterdir())


def test_a_missing_package_is_named(tmp_path):
    code = """
        import sys
        sys.modules["tf2onnx"] = None
        import keras, keras_margin
        backbone = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
        model = keras_margin.EmbeddingModel(backbone, keras_margin.ArcFace(3))
        try:
            model.export(sys.argv[1] + "/encoder.onnx", format="onnx")
        except ImportError as error:
            print("RESULT", error)
    """
    assert 'pip install "keras_margin[onnx]"' in run_alone(code, tmp_path)
    assert not list(tmp_path.iterdir())


def test_what_jax_exports(tmp_path):
    code = """
        import json, keras, keras_margin, numpy
        keras.utils.set_random_seed(0)
        backbone = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
        model = keras_margin.EmbeddingModel(backbone, keras_margin.ArcFace(3))
        model.export("served", classify=True)
        refused = []
        for format, suffix in keras_margin.export.FORMATS.items():
            if suffix:
                try:
                    model.export("encoder" + suffix, format=format)
                except ValueError as error:
                    refused.append(str(error))
        x = numpy.eye(4, dtype="float32")
        found = [numpy.asarray(m(x)).tolist() for m in (model.encoder, model.classifier)]
        print(json.dumps([found, refused]))
    """
    (embeddings, logits), refused = on_jax(code, None, tmp_path)
    x = tf.eye(4)
    got = served(tmp_path / "served")["serving_default"](image=x)["embedding"]
    np.testing.assert_allclose(got, embeddings, atol=1e-5)
    got = served(tmp_path / "served")["classify"](image=x)["logits"]
    np.testing.assert_allclose(got, logits, rtol=1e-5, atol=1e-5)
    assert len(refused) == 3 and all("KERAS_BACKEND=tensorflow" in one for one in refused)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["given.json", "served"]


def test_warm_up_requests(model, tmp_path):
    """Read by the message classes of TF Serving, as far as they are needed."""
    model.export(tmp_path / "served", image_size=(SIZE, SIZE), classify=True)
    path = tmp_path / "served" / "assets.extra" / "tf_serving_warmup_requests"
    requests = {}
    for record in tf.data.TFRecordDataset(str(path)):
        log = prediction_log().FromString(record.numpy())
        request = log.predict_log.request
        requests[request.model_spec.signature_name] = {
            name: tf.make_ndarray(value) for name, value in request.inputs.items()
        }
    assert sorted(requests) == ["classify", "image_bytes", "serving_default"]
    signatures = served(tmp_path / "served")
    black = model.encoder(np.zeros((1, SIZE, SIZE, CHANNELS), "float32"))
    for name, inputs in requests.items():
        found = signatures[name](**{key: tf.constant(value) for key, value in inputs.items()})
        if name != "classify":
            np.testing.assert_allclose(found["embedding"], black, atol=1e-6)


def prediction_log():
    """PredictionLog of tensorflow_serving/apis/prediction_log.proto, without its other fields."""
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
    from tensorflow.core.framework import tensor_pb2

    pool = descriptor_pool.DescriptorPool()
    done = set()

    def add(file):
        for dependency in file.dependencies:
            add(dependency)
        if file.name not in done:
            done.add(file.name)
            pool.AddSerializedFile(file.serialized_pb)

    add(tensor_pb2.DESCRIPTOR)
    field = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(
        name="serving.proto",
        package="tensorflow.serving",
        syntax="proto3",
        dependency=[tensor_pb2.DESCRIPTOR.name],
    )

    def message(name, *fields, within=None):
        added = (within.nested_type if within else file.message_type).add(name=name)
        for label, number, kind in fields:
            one = added.field.add(name=label, number=number, label=field.LABEL_OPTIONAL)
            if kind == "string":
                one.type = field.TYPE_STRING
            else:
                one.type, one.type_name = field.TYPE_MESSAGE, kind
        return added

    package = ".tensorflow.serving."
    message("ModelSpec", ("name", 1, "string"), ("signature_name", 3, "string"))
    request = message(
        "PredictRequest",
        ("model_spec", 1, package + "ModelSpec"),
        ("inputs", 2, package + "PredictRequest.InputsEntry"),
    )
    request.field[1].label = field.LABEL_REPEATED
    entry = message(
        "InputsEntry",
        ("key", 1, "string"),
        ("value", 2, ".tensorflow.TensorProto"),
        within=request,
    )
    entry.options.map_entry = True
    message("PredictLog", ("request", 1, package + "PredictRequest"))
    message("PredictionLog", ("predict_log", 6, package + "PredictLog"))
    pool.Add(file)
    return message_factory.GetMessageClass(
        pool.FindMessageTypeByName("tensorflow.serving.PredictionLog")
    )
