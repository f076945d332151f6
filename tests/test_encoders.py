"""Encoders from files: every kind gives the numbers of the model in memory, others are named."""

import re
import sys

import keras
import numpy as np
import pytest
from keras import layers

import keras_margin
from keras_margin.encoders import Encoder, as_encoder, load_encoder

PIXELS = np.random.default_rng(0).uniform(0, 255, (5, 8, 6, 3)).astype("float32")


def backbone(shape=(8, 6, 3), dtype="float32"):
    image = keras.Input(shape, name="pixels", dtype=dtype)
    x = layers.Rescaling(1 / 255)(image)
    return keras.Model(image, layers.Dense(4)(layers.GlobalAveragePooling2D()(x)))


@pytest.fixture(scope="module")
def model():
    model = keras_margin.EmbeddingModel(backbone(), keras_margin.ArcFace(3))
    model.compile("sgd")
    return model


SAVES = {
    "encoder.keras": ("Keras model", lambda model, path: model.encoder.save(path)),
    "model.keras": ("encoder of EmbeddingModel", lambda model, path: model.save(path)),
    "export": ("SavedModel", lambda model, path: model.export(path)),
    "stock": ("SavedModel", lambda model, path: model.encoder.export(path, verbose=False)),
}


@pytest.mark.parametrize("name", SAVES)
def test_every_file_gives_the_numbers_of_the_model(model, tmp_path, name):
    kind, save = SAVES[name]
    save(model, tmp_path / name)
    loaded = load_encoder(tmp_path / name)
    assert (loaded.image_shape, loaded.dtype, loaded.kind) == ((8, 6, 3), "float32", kind)
    wanted = model.encoder.predict(PIXELS, verbose=0)
    np.testing.assert_allclose(loaded.embed(PIXELS), wanted, atol=1e-5)
    np.testing.assert_allclose(loaded.embed(PIXELS[:2]), wanted[:2], atol=1e-5)


def test_models_in_memory(model):
    wanted = model.encoder.predict(PIXELS, verbose=0)
    for encoder in (model, model.encoder, as_encoder(model)):
        np.testing.assert_allclose(as_encoder(encoder).embed(PIXELS), wanted, atol=1e-6)


def test_an_encoder_of_its_own_does_not_hide_a_graph(model):
    """A functional model may have an attribute of that name, which is not what it computes."""
    outer = backbone()
    outer.encoder = model.encoder
    wanted = outer.predict(PIXELS, verbose=0)
    np.testing.assert_allclose(as_encoder(outer).embed(PIXELS), wanted, atol=1e-6)


def test_a_named_input_and_output():
    plain = backbone()
    named = keras.Model({"pixels": plain.input}, {"embedding": plain.output})
    wanted = plain.predict(PIXELS, verbose=0)
    np.testing.assert_allclose(as_encoder(named).embed(PIXELS), wanted, atol=1e-6)


@pytest.mark.parametrize("kind", ["keras", "export"])
def test_whole_numbers_stay_whole_numbers(tmp_path, kind):
    model = backbone(dtype="uint8")
    path = tmp_path / ("model.keras" if kind == "keras" else "model")
    if kind == "keras":
        model.save(path)
    else:
        model.export(path, verbose=False)
    loaded = load_encoder(path)
    assert loaded.dtype == "uint8"
    whole = np.floor(PIXELS)
    np.testing.assert_allclose(loaded.embed(whole), model.predict(whole, verbose=0), atol=1e-5)


def test_any_size(tmp_path):
    backbone((None, None, 1)).export(tmp_path / "model", verbose=False)
    loaded = load_encoder(tmp_path / "model")
    assert loaded.image_shape == (None, None, 1)
    assert loaded.embed(np.ones((2, 3, 4, 1))).shape == (2, 4)


def two_inputs():
    images = [keras.Input((8, 6, 3)), keras.Input((8, 6, 3))]
    return keras.Model(images, layers.Dense(4)(layers.Flatten()(layers.Add()(images))))


def two_outputs():
    plain = backbone()
    return keras.Model(plain.input, [plain.output, plain.output * 2])


def no_embedding():
    image = keras.Input((8, 6, 3))
    return keras.Model(image, layers.Conv2D(4, 3)(image))


WRONG = {
    "two inputs": (two_inputs, "one input to one output, but it has 2 inputs and 1 outputs."),
    "two outputs": (two_outputs, "one input to one output, but it has 1 inputs and 2 outputs."),
    "a map": (no_embedding, "embeddings (batch, dim), but its output has shape (None, 6, 4, 4)."),
    "four channels": (lambda: backbone((8, 6, 4)), "its input has shape (None, 8, 6, 4)."),
    "channels first": (lambda: backbone((3, 8, 6)), "its input has shape (None, 3, 8, 6)."),
}


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("kind", ["memory", "keras", "export"])
def test_what_maps_no_image_to_an_embedding(tmp_path, name, kind):
    make, message = WRONG[name]
    model = make()
    if kind == "memory":
        with pytest.raises(ValueError, match=re.escape(message)):
            as_encoder(model)
        return
    path = tmp_path / ("model.keras" if kind == "keras" else "model")
    if kind == "keras":
        model.save(path)
    else:
        model.export(path, verbose=False)
    with pytest.raises(ValueError, match=re.escape(f"{message} Received: path='{path}'")):
        load_encoder(path)


def test_what_is_no_model_or_has_no_graph():
    with pytest.raises(TypeError, match="`encoder` must be a Keras model. Received: encoder=3"):
        as_encoder(3)

    class Bare(keras.Model):
        def call(self, x):
            return x

    with pytest.raises(ValueError, match="must be a functional or Sequential model that knows"):
        as_encoder(Bare())


def test_an_encoder_stays_as_it_is():
    encoder = Encoder(lambda pixels: pixels, (8, 8, 1), "float32", "mine")
    assert as_encoder(encoder) is encoder


# Files


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(FileNotFoundError, match="There is no encoder. Received: path='.*no.keras'"):
        load_encoder(tmp_path / "no.keras")


def test_files_of_another_kind(tmp_path):
    for name in ("weights.h5", "model.onnx"):
        (tmp_path / name).write_bytes(b"some")
        with pytest.raises(ValueError, match=f"is a .keras file or .*Received: path='.*{name}'"):
            load_encoder(tmp_path / name)


def test_a_file_that_is_cut_or_garbled(model, tmp_path):
    model.encoder.save(tmp_path / "whole.keras")
    whole = (tmp_path / "whole.keras").read_bytes()
    for content in (b"", b"text", whole[: len(whole) // 2], whole[:-30]):
        (tmp_path / "cut.keras").write_bytes(content)
        with pytest.raises(ValueError, match="Keras cannot load the file .*path='.*cut.keras'"):
            load_encoder(tmp_path / "cut.keras")


def test_code_in_a_file_is_refused(tmp_path):
    image = keras.Input((8, 6, 3))
    x = layers.Lambda(lambda x: x * 2.0, output_shape=(8, 6, 3))(image)
    keras.Model(image, layers.GlobalAveragePooling2D()(x)).save(tmp_path / "code.keras")
    with pytest.raises(ValueError, match=r"Keras cannot load .*[Ll]ambda.*code.keras"):
        load_encoder(tmp_path / "code.keras")


def test_a_folder_above_the_saved_model_names_it(model, tmp_path):
    model.export(tmp_path / "served" / "2")
    with pytest.raises(ValueError, match="no SavedModel .* Do you mean '.*served/2'"):
        load_encoder(tmp_path / "served")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"saved_model.pb\). Received: path='.*empty'"):
        load_encoder(tmp_path / "empty")


def test_a_garbled_saved_model(model, tmp_path):
    model.export(tmp_path / "served")
    graph = tmp_path / "served" / "saved_model.pb"
    graph.write_bytes(graph.read_bytes()[:1000])
    with pytest.raises(ValueError, match="TensorFlow cannot load the folder .*Received: path="):
        load_encoder(tmp_path / "served")


def test_a_saved_model_without_the_signature(tmp_path):
    import tensorflow as tf

    tf.saved_model.save(tf.Module(), str(tmp_path / "empty"))
    with pytest.raises(ValueError, match=r"signature serving_default, but it has \[\]"):
        load_encoder(tmp_path / "empty")


def test_a_saved_model_without_tensorflow(model, tmp_path, monkeypatch):
    model.export(tmp_path / "served")
    monkeypatch.setitem(sys.modules, "tensorflow", None)
    with pytest.raises(ImportError, match="A SavedModel needs TensorFlow: pip install tensorflow"):
        load_encoder(tmp_path / "served")
