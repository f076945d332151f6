"""Images as files hold them, decoded batch by batch, and their embeddings.

Pillow is optional and imported only to decode.
"""

import io
import os

import keras
import numpy as np

from keras_margin.checks import checked_count
from keras_margin.encoders import as_encoder, one_line
from keras_margin.retrieval import unit_rows

# Decoders that only decode: Pillow would hand a PostScript file, whatever its name, to Ghostscript.
FORMATS = ("JPEG", "PNG", "BMP", "GIF", "WEBP", "PPM", "TIFF")
GREY_MODES = ("1", "L", "LA")
MIRROR = 0  # Pillow's Transpose.FLIP_LEFT_RIGHT, without an import
LARGEST = 2**26  # pixels of an image that an encoder is given: more is a slip
DEEP_MODES = ("I", "F")  # more than 8 bits a channel; Pillow would clip them to white

PREPROCESS = {
    None: lambda pixels: pixels,
    "unit": lambda pixels: pixels / np.float32(255.0),
    "symmetric": lambda pixels: (pixels - np.float32(127.5)) / np.float32(127.5),
}


def embed_images(
    encoder,
    images,
    *,
    flip=False,
    preprocess=None,
    image_size=None,
    batch_size=64,
    verbose=1,
):
    """Embeddings of encoded images, which are decoded batch by batch.

    Each image is turned as its EXIF tag says, made grey or RGB as the encoder's input has 1 or 3
    channels, and resized to the encoder's input (bilinear, antialiased, not keeping the aspect).
    With `flip` it is the flip test of the published figures: the outputs of the encoder, at the
    length that they have, are added for the image and its mirror image, and then normalised.

        e(x) = encoder(x)
        flip:  e(x) = (encoder(x) + encoder(mirror x)) / |encoder(x) + encoder(mirror x)|

    Args:
        encoder: what `encoders.as_encoder` takes: a Keras model, an `EmbeddingModel`, or what
            `encoders.load_encoder` gives.
        images: list of paths, or of the bytes of encoded images.
        flip: whether to add the mirror image.
        preprocess: what the encoder wants of pixels: None for 0..255, as they are; "unit" for
            0..1; "symmetric" for (x - 127.5) / 127.5, from -1 to 1; or a function of a float32
            batch 0..255 that gives one of the same shape. With None and no `image_size`, a
            SavedModel that has `image_bytes` resizes and preprocesses itself, as it does in
            service.
        image_size: (height, width) to resize to, for an encoder that takes any.
        batch_size: images that are in memory at a time.
        verbose: 0 is silent, 1 shows a bar, 2 a line.

    Returns:
        float32 (images, dim).

    Raises:
        ValueError: an image cannot be decoded or has more than 8 bits of grey; the encoder gives
            NaN; sizes that do not fit. The message names the file, or the place in the list.
        TypeError: `encoder` is no model.
        ImportError: Pillow is not installed.

    Example:

    >>> import io
    >>> from PIL import Image
    >>> from keras_margin.datasets import embed_images
    >>> file = io.BytesIO()
    >>> Image.new("L", (4, 4), 51).save(file, "PNG")
    >>> mean = keras.Sequential([keras.Input((8, 8, 1)), keras.layers.GlobalAveragePooling2D()])
    >>> embed_images(mean, [file.getvalue()], preprocess="unit", verbose=0)
    array([[0.2]], dtype=float32)

    Reference:
        Deng, Guo, Xue, Zafeiriou: ArcFace. 2019, arXiv:1801.07698, and its authors' evaluation.
    """
    encoder = as_encoder(encoder)
    if isinstance(images, str | bytes | os.PathLike):
        raise TypeError(f"`images` must be a list of images, not one. Received: {images!r:.80}")
    images = list(images)
    for row, image in enumerate(images):
        if not isinstance(image, str | bytes | os.PathLike):
            raise TypeError(
                "`images` must hold paths, or bytes. Received: images"
                f"[{row}] of type {type(image).__name__}"
            )
    if not images:
        raise ValueError("`images` must hold at least one image. Received: images=[]")
    batch_size = min(checked_count("batch_size", batch_size, smallest=1), len(images))
    as_served = encoder.embed_files is not None and preprocess is None and image_size is None
    size = None if as_served else _size(encoder, image_size)
    prepare = _prepare(encoder, preprocess)
    mode = "L" if encoder.image_shape[2] == 1 else "RGB"

    def embedded(pixels):  # (batch, height, width, channels)
        prepared = np.asarray(prepare(pixels.copy()))  # it may write: the mirror image comes next
        if prepared.shape != pixels.shape:
            raise ValueError(
                "`preprocess` must keep the shape. Received: a function that gives "
                f"{prepared.shape} for {pixels.shape}"
            )
        is_whole = prepared.dtype.kind in "iu" or preprocess is None
        if not is_whole and not encoder.dtype.startswith(("float", "bfloat")):
            raise ValueError(
                f"`preprocess` must give whole numbers, since the encoder takes {encoder.dtype}. "
                f"Received: a function that gives {prepared.dtype}"
            )
        return _embedded(encoder.embed, prepared)

    progress = keras.utils.Progbar(len(images), unit_name="image", verbose=verbose)
    found = []
    for start in range(0, len(images), batch_size):
        rows = range(start, min(start + batch_size, len(images)))
        if as_served:
            decoded = [read_image(images[row], name_of(images[row], row)) for row in rows]
            embeddings = _embedded(encoder.embed_files, [_png(image) for image in decoded])
            if flip:
                mirrored = [_png(image.transpose(MIRROR)) for image in decoded]
                embeddings = embeddings + _embedded(encoder.embed_files, mirrored)
        else:
            pixels = np.stack([_pixels(images[row], row, mode, size) for row in rows])
            # Every batch has one size, filled up with copies: no backend compiles twice.
            pixels = pixels[np.arange(batch_size) % len(rows)]
            embeddings = embedded(pixels)
            if flip:
                embeddings = embeddings + embedded(pixels[:, :, ::-1])
        embeddings = embeddings[: len(rows)]
        _check_finite(embeddings, images, start)
        found.append(embeddings)
        progress.update(rows.stop)
    embeddings = np.concatenate(found)
    return unit_rows(embeddings, "embeddings").astype(np.float32) if flip else embeddings


def read_image(image, name=None):
    """Decodes an image of 8 bits a channel, upright.

    Args:
        image: its path, or its bytes.
        name: what to call it in messages; None: its path.

    Returns:
        `PIL.Image.Image` of mode "L" or "RGB". Transparency is dropped.

    Raises:
        ValueError: it cannot be decoded: no image, cut short, too large to be one, or of more than
            8 bits of grey (of 16 bits of colour Pillow itself keeps 8).
        ImportError: Pillow is not installed.

    Example:

    >>> import io
    >>> from PIL import Image
    >>> from keras_margin.images import read_image
    >>> file = io.BytesIO()
    >>> Image.new("L", (4, 2), 51).save(file, "PNG")
    >>> image = read_image(file.getvalue())
    >>> image.mode, image.size
    ('L', (4, 2))
    """
    try:
        from PIL import Image, ImageOps, UnidentifiedImageError
    except ImportError as error:
        raise ImportError(
            'Decoding images needs Pillow: pip install "keras_margin[evaluate]"'
        ) from error
    is_path = not isinstance(image, bytes)
    if name is None:
        name = repr(os.fspath(image)) if is_path else "in memory"
    try:
        with Image.open(image if is_path else io.BytesIO(image), formats=FORMATS) as opened:
            return grey_or_rgb(ImageOps.exif_transpose(opened))  # cameras store rotation as a tag
    except UnidentifiedImageError:
        why = f"it is none of {', '.join(FORMATS)}"
    # Pillow's decoders answer damaged files with almost any error.
    except Exception as error:
        why = str(error) or type(error).__name__
    raise ValueError(f"The image {name} cannot be read: {why}. Replace it or leave it out.")


def grey_or_rgb(image):
    """A `PIL.Image.Image` in mode "L" or "RGB".

    Raises:
        ValueError: it has more than 8 bits a channel.
    """
    if image.mode.startswith(DEEP_MODES):
        raise ValueError(f"images must have 8 bits a channel. Received: mode={image.mode!r}")
    return image.convert("L" if image.mode in GREY_MODES else "RGB")


def name_of(image, index):
    """How messages call an image of a list: by its path, or by its place, counted from 0."""
    return f"{index} of the set" if isinstance(image, bytes) else repr(os.fspath(image))


def _embedded(embed, images):
    """What an encoder gives for a batch, checked."""
    try:
        embeddings = np.asarray(embed(images), np.float32)
    except Exception as error:  # of Keras, of TensorFlow, of any layer
        of_shape = f" of shape {images.shape[1:]}" if hasattr(images, "shape") else ""
        raise ValueError(f"The encoder fails on images{of_shape}: {one_line(error)}") from error
    if embeddings.ndim != 2 or len(embeddings) != len(images):
        raise ValueError(
            f"The encoder must give embeddings ({len(images)}, dim) for {len(images)} images. "
            f"Received: embeddings.shape={embeddings.shape}"
        )
    return embeddings


def _png(image):
    """A decoded image as a file: upright, and without loss."""
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def _pixels(image, index, mode, size):
    """float32 (height, width, channels) in 0..255."""
    decoded = read_image(image, name_of(image, index)).convert(mode)
    if decoded.size != size[::-1]:
        from PIL import Image

        decoded = decoded.resize(size[::-1], Image.Resampling.BILINEAR)
    return np.asarray(decoded, np.float32).reshape(*size, -1)


def _size(encoder, image_size):
    """(height, width) that the images get."""
    own = encoder.image_shape[:2]
    if image_size is None:
        if None in own:
            raise ValueError(
                "`image_size` must say (height, width), since the encoder takes images of any "
                "size. Received: image_size=None"
            )
        return own
    if not isinstance(image_size, list | tuple) or len(image_size) != 2:
        raise ValueError(
            f"`image_size` must be (height, width). Received: image_size={image_size!r}"
        )
    size = tuple(checked_count("image_size", side, smallest=1) for side in image_size)
    if size[0] * size[1] > LARGEST:
        raise ValueError(
            f"`image_size` must have at most {LARGEST:,} pixels. Received: image_size={size}"
        )
    if any(mine not in (None, side) for mine, side in zip(own, size, strict=True)):
        raise ValueError(
            f"`image_size` must be that of the encoder, {own}: leave it out. "
            f"Received: image_size={size}"
        )
    return size


def _prepare(encoder, preprocess):
    if callable(preprocess):
        return preprocess
    if not isinstance(preprocess, str | None) or preprocess not in PREPROCESS:
        raise ValueError(
            '`preprocess` must be None, "unit", "symmetric" or a function. '
            f"Received: preprocess={preprocess!r}"
        )
    if preprocess is not None and not encoder.dtype.startswith(("float", "bfloat")):
        raise ValueError(
            f"`preprocess` must be None, since the encoder takes pixels as {encoder.dtype}. "
            f"Received: preprocess={preprocess!r}"
        )
    return PREPROCESS[preprocess]


def _check_finite(embeddings, images, start):
    finite = np.isfinite(embeddings).all(axis=1)
    if not finite.all():
        index = start + int(np.argmin(finite))
        raise ValueError(
            f"The encoder gives NaN or infinity for the image {name_of(images[index], index)}. Its "
            "weights have diverged, or it wants pixels in another range: see `preprocess`."
        )
