"""Encoded images to embeddings, against pixels and sums that are made here."""

import io
import os
import re
import sys

import keras
import numpy as np
import pytest
from keras import layers
from PIL import Image

import keras_margin
from keras_margin.datasets import embed_images
from keras_margin.encoders import Encoder, load_encoder
from keras_margin.images import read_image

RANDOM = np.random.default_rng(0)
GREY = RANDOM.integers(0, 256, (7, 4, 6), "uint8")
COLOUR = RANDOM.integers(0, 256, (7, 4, 6, 3), "uint8")


def encoded(pixels, form="PNG", **options):
    file = io.BytesIO()
    Image.fromarray(np.asarray(pixels)).save(file, form, **options)
    return file.getvalue()


def flat(channels=1, size=(4, 6)):
    """An encoder that gives the pixels themselves."""
    shape = (*size, channels)
    return Encoder(lambda x: np.reshape(x, (len(x), -1)), shape, "float32", "flat")


def pixels_of(images, channels=1, size=(4, 6), **options):
    found = embed_images(flat(channels, size), images, verbose=0, **options)
    assert found.dtype == np.float32
    return found.reshape(len(found), *size, channels)


@pytest.mark.parametrize("batch_size", [1, 2, 3, 7, 100])
def test_every_batch_size_gives_every_image(batch_size):
    found = pixels_of([encoded(each) for each in GREY], batch_size=batch_size)
    np.testing.assert_array_equal(found[..., 0], GREY)


def test_batches_have_one_size():
    sizes = []

    def embed(pixels):
        sizes.append(len(pixels))
        return np.zeros((len(pixels), 2))

    encoder = Encoder(embed, (4, 6, 1), "float32", "counts")
    assert embed_images(encoder, [encoded(GREY[0])] * 7, batch_size=3, verbose=0).shape == (7, 2)
    assert sizes == [3, 3, 3]


def test_paths_and_bytes(tmp_path):
    path = tmp_path / "one.bmp"
    path.write_bytes(encoded(GREY[0], "BMP"))
    found = pixels_of([path, str(path), path.read_bytes()])
    np.testing.assert_array_equal(found[..., 0], [GREY[0]] * 3)


def test_channels_are_the_encoders():
    images = [encoded(GREY[0]), encoded(COLOUR[0])]
    as_rgb = pixels_of(images, channels=3)
    np.testing.assert_array_equal(as_rgb[0], np.repeat(GREY[0][..., None], 3, axis=-1))
    np.testing.assert_array_equal(as_rgb[1], COLOUR[0])
    as_grey = pixels_of(images)[..., 0]
    np.testing.assert_array_equal(as_grey[0], GREY[0])
    weighted = COLOUR[0] @ [0.299, 0.587, 0.114]  # ITU-R 601
    np.testing.assert_allclose(as_grey[1], weighted, atol=1)


def test_photographs_are_turned_upright():
    exif = Image.Exif()
    exif[0x0112] = 6  # EXIF orientation: to be turned a quarter clockwise
    found = pixels_of([encoded(np.rot90(GREY[0]), exif=exif)])
    np.testing.assert_array_equal(found[0, ..., 0], GREY[0])


def test_resizing_averages_over_what_it_drops():
    chequered = np.tile(np.array([[0, 100], [100, 200]], "uint8"), (16, 16))
    found = pixels_of([encoded(chequered)], size=(2, 2))
    np.testing.assert_allclose(found, 100, atol=5)


@pytest.mark.parametrize(
    ("preprocess", "wanted"),
    [
        (None, lambda x: x),
        ("unit", lambda x: x / 255),
        ("symmetric", lambda x: x / 127.5 - 1),
        (lambda x: 255 - x, lambda x: 255 - x),
    ],
    ids=["none", "unit", "symmetric", "function"],
)
def test_preprocessing(preprocess, wanted):
    found = pixels_of([encoded(GREY[0])], preprocess=preprocess)
    np.testing.assert_allclose(found[0, ..., 0], wanted(GREY[0].astype(float)), atol=1e-5)


def test_the_flip_test_adds_outputs_as_they_are_and_normalises():
    images = [encoded(each) for each in GREY]
    weights = RANDOM.normal(size=(24, 3))
    encoder = Encoder(
        lambda x: np.reshape(x, (len(x), -1)) @ weights, (4, 6, 1), "float32", "linear"
    )
    found = embed_images(encoder, images, flip=True, preprocess="unit", batch_size=4, verbose=0)
    for row, image in zip(found, GREY / 255.0, strict=True):
        mirror = np.array([line[::-1] for line in image])
        total = image.ravel() @ weights + mirror.ravel() @ weights
        np.testing.assert_allclose(row, total / np.sqrt(np.sum(total**2)), atol=1e-5)


def test_without_the_flip_outputs_keep_their_length():
    found = embed_images(flat(), [encoded(GREY[0])], verbose=0)
    np.testing.assert_array_equal(found, GREY[:1].reshape(1, -1))


def test_a_keras_model_and_its_progress(capsys):
    model = keras.Sequential([keras.Input((4, 6, 1)), layers.Flatten(), layers.Dense(3)])
    images = [encoded(each) for each in GREY]
    found = embed_images(model, images, batch_size=3, verbose=2)
    assert "7/7" in capsys.readouterr().out
    wanted = model.predict(GREY[..., None].astype("float32"), verbose=0)
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-3)


def test_an_encoder_of_any_size():
    encoder = flat(size=(None, None))
    found = embed_images(encoder, [encoded(GREY[0])], image_size=(2, 3), verbose=0)
    assert found.shape == (1, 6)
    with pytest.raises(ValueError, match="`image_size` must say .* any size"):
        embed_images(encoder, [encoded(GREY[0])])


# What cannot be read


def deep():
    file = io.BytesIO()
    Image.fromarray(GREY[0].astype("uint16") * 256).save(file, "PNG")
    return file.getvalue()


PNG = encoded(RANDOM.integers(0, 256, (64, 64), "uint8"))
JPEG = encoded(RANDOM.integers(0, 256, (64, 64), "uint8"), "JPEG")
BAD = {
    "text": (b"text", "it is none of JPEG, PNG"),
    "empty": (b"", "it is none of JPEG, PNG"),
    "cut PNG": (PNG[: len(PNG) // 2], ""),
    "cut JPEG": (JPEG[: len(JPEG) // 2], "image file is truncated"),
    "16 bits": (deep(), "images must have 8 bits a channel. Received: mode='I;16'"),
    "PostScript": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "it is none of JPEG"),
}


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("as_path", [False, True], ids=["bytes", "path"])
def test_an_image_that_cannot_be_read_is_named(tmp_path, name, as_path):
    content, why = BAD[name]
    called, image = "2 of the set", content
    if as_path:
        image = tmp_path / "bad one.png"
        image.write_bytes(content)
        called = repr(str(image))
    images = [encoded(GREY[0]), encoded(GREY[0]), image]
    message = f"The image {called} cannot be read: {why}"
    with pytest.raises(ValueError, match=re.escape(message) + ".*Replace it or leave it out"):
        embed_images(flat(), images, batch_size=2, verbose=0)


def test_a_decompression_bomb_is_refused(monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 10)
    with pytest.raises(ValueError, match="image 0 of the set cannot be read: .*exceeds limit"):
        embed_images(flat(), [encoded(GREY[0])], verbose=0)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"image '.*none.png' cannot be read: .*No such file"):
        embed_images(flat(), [tmp_path / "none.png"], verbose=0)


@pytest.mark.filterwarnings("ignore::UserWarning")  # Pillow's, of damaged metadata
@pytest.mark.parametrize("form", ["JPEG", "PNG", "BMP", "GIF", "WEBP", "PPM", "TIFF"])
def test_a_garbled_image_is_read_or_named(form):
    """One byte changed: the image, another image, or the error that names it."""
    whole = encoded(GREY[0], form)
    for place in range(0, len(whole), 1 + len(whole) // 150):
        data = bytearray(whole)
        data[place] ^= int(RANDOM.integers(1, 256))
        try:
            found = read_image(bytes(data), "17 of the set")
        except ValueError as error:
            assert str(error).startswith("The image 17 of the set cannot be read: ")
        else:
            assert found.mode in ("L", "RGB")


# Other wrong input


def test_an_encoder_that_gives_nan_is_refused():
    def embed(pixels):
        return np.where(pixels[:, 0, 0] > 100, np.nan, pixels[:, 0, 0])

    encoder = Encoder(embed, (4, 6, 1), "float32", "diverged")
    images = [encoded(np.full((4, 6), level, "uint8")) for level in (1, 2, 200)]
    message = r"gives NaN or infinity for the image 2 of the set\. Its weights .*`preprocess`"
    with pytest.raises(ValueError, match=message):
        embed_images(encoder, images, batch_size=2, verbose=0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"preprocess": "half"}, '`preprocess` must be None, "unit", "symmetric" or a functi'),
        ({"preprocess": ["unit"]}, "Received: preprocess=['unit']"),
        ({"preprocess": lambda x: x[:, 0]}, "that gives (1, 6, 1) for (1, 4, 6, 1)"),
        ({"batch_size": 0}, "`batch_size` must be at least 1. Received: batch_size=0"),
        (
            {"image_size": (4, 5)},
            "of the encoder, (4, 6): leave it out. Received: image_size=(4, 5)",
        ),
        ({"image_size": (4,)}, "`image_size` must be (height, width). Received: image_size=(4,)"),
        ({"image_size": (4, 0)}, "`image_size` must be at least 1. Received: image_size=0"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_wrong_options(options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        embed_images(flat(), [encoded(GREY[0])], verbose=0, **options)


def test_whole_numbers_are_not_rescaled():
    encoder = flat()._replace(dtype="uint8")
    with pytest.raises(ValueError, match="`preprocess` must be None, .* as uint8"):
        embed_images(encoder, [encoded(GREY[0])], preprocess="unit")


def test_no_images():
    with pytest.raises(ValueError, match="`images` must hold at least one image"):
        embed_images(flat(), [])


def test_without_pillow_names_the_install_command(monkeypatch):
    image = encoded(GREY[0])
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(ImportError, match=r'pip install "keras_margin\[evaluate\]"'):
        embed_images(flat(), [image], verbose=0)


def test_names_that_are_no_text(tmp_path):
    path = os.fsencode(tmp_path / "a").decode() + "\udcff.png"
    try:
        with open(path, "wb") as file:
            file.write(b"text")
    except OSError:
        pytest.skip("the file system has no such names")
    with pytest.raises(ValueError, match=r"a\\udcff.png' cannot be read"):
        embed_images(flat(), [path], verbose=0)


@pytest.mark.parametrize("rows", [1, 9, 0])
def test_an_encoder_must_give_a_row_for_each_image(rows):
    encoder = Encoder(lambda x: np.ones((rows, 2)), (4, 6, 1), "float32", "other rows")
    with pytest.raises(ValueError, match=re.escape("(3, dim) for 3 images. Received: emb")):
        embed_images(encoder, [encoded(each) for each in GREY[:3]], verbose=0)


def test_a_preprocess_that_writes_into_its_batch_is_applied_once():
    def darker_in_place(pixels):
        pixels -= 100
        return pixels

    images = [encoded(each) for each in GREY]
    found = pixels_of(images, preprocess=darker_in_place, flip=True)
    wanted = pixels_of(images, preprocess=lambda pixels: pixels - 100, flip=True)
    np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize(
    ("images", "message"),
    [
        ("one.png", "`images` must be a list of images"),
        (b"bytes", "`images` must be a list of images"),
        ([b"x", None], r"images\[1\] of type NoneType"),
        ([bytearray(b"x")], r"images\[0\] of type bytearray"),
    ],
    ids=["a path", "bytes", "None", "bytearray"],
)
def test_a_list_of_images_is_asked_for(images, message):
    with pytest.raises(TypeError, match=message):
        embed_images(flat(), images, verbose=0)


def test_fractions_for_an_encoder_of_whole_numbers_are_refused():
    encoder = Encoder(lambda x: np.zeros((len(x), 2)), (4, 6, 1), "uint8", "whole")
    images = [encoded(GREY[0])]
    assert embed_images(encoder, images, verbose=0).shape == (1, 2)
    with pytest.raises(ValueError, match="`preprocess` must give whole numbers"):
        embed_images(encoder, images, preprocess=lambda x: x / 255 - 1, verbose=0)


def test_an_encoder_that_fails_is_an_error_in_one_line():
    def embed(pixels):
        raise RuntimeError("no such\nlayer")

    encoder = Encoder(embed, (4, 6, 1), "float32", "broken")
    with pytest.raises(ValueError, match=r"fails on images of shape \(4, 6, 1\): .*no such layer"):
        embed_images(encoder, [encoded(GREY[0])], verbose=0)


@pytest.mark.parametrize("size", [(100_000, 100_000), 12, (4, 6, 1)])
def test_image_sizes_that_cannot_be_meant_are_refused(size):
    encoder = Encoder(lambda x: np.zeros((len(x), 2)), (None, None, 1), "float32", "free")
    with pytest.raises(ValueError, match="`image_size` must"):
        embed_images(encoder, [encoded(GREY[0])], image_size=size, verbose=0)


@pytest.mark.parametrize("flip", [False, True])
def test_a_saved_model_is_judged_as_it_is_served(tmp_path, flip):
    """Its own preprocessing is in `image_bytes` alone, and what clients send goes there."""
    image = keras.Input((4, 6, 3))
    x = layers.Dense(3)(layers.Flatten()(image))
    model = keras_margin.EmbeddingModel(keras.Model(image, x), keras_margin.ArcFace(2))
    model.export(tmp_path / "1", preprocessing=layers.Rescaling(1 / 127.5, offset=-1))
    encoder = load_encoder(tmp_path / "1")
    files = [encoded(each) for each in COLOUR]
    scaled = COLOUR.astype("float32") / 127.5 - 1
    want = model.encoder(scaled).numpy()
    if flip:
        want = want + model.encoder(scaled[:, :, ::-1]).numpy()
        want /= np.linalg.norm(want, axis=1, keepdims=True)
    found = embed_images(encoder, files, flip=flip, batch_size=3, verbose=0)
    np.testing.assert_allclose(found, want, atol=1e-5)
    # A preprocess that is named takes the place of the model's own.
    named = embed_images(encoder, files, flip=flip, preprocess="symmetric", verbose=0)
    np.testing.assert_allclose(named, want, atol=1e-5)
