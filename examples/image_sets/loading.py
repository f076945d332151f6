"""Loads a set of labelled images: a built-in set, a folder, or any set of TensorFlow Datasets."""

import dataclasses
import os
import sys

import keras
import numpy as np
import tensorflow_datasets as tfds
from PIL import Image

from keras_margin.datasets import identity_folder
from keras_margin.images import grey_or_rgb, read_image

from .mnist_5k import Mnist5k
from .orl_faces import OrlFaces

BUILT_IN = (Mnist5k.name, OrlFaces.name)  # TensorFlow Datasets knows them once they are imported


@dataclasses.dataclass(frozen=True, eq=False)
class ImageSet:
    """Labelled images in memory.

    Attributes:
        images: uint8 array (n, height, width, channels); 1 channel is grey, 3 are RGB.
        labels: int32 array (n,), in 0..len(names)-1. Every identity has an image.
        names: Tuple of `str`, the name of each identity.
        test_split: bool array (n,), True where the source itself marks an image as test, or None
            if it marks none.
        name: The name that the set was loaded by.
    """

    images: np.ndarray
    labels: np.ndarray
    names: tuple
    test_split: np.ndarray | None
    name: str


def load(name, *, data_dir=None, image_size=None):
    """Loads a set of labelled images into memory.

    Args:
        name: One of
            - `"mnist_5k"` or `"orl_faces"`, which need no download;
            - a folder with one sub-folder per identity (`keras_margin.datasets.identity_folder`);
            - any set of TensorFlow Datasets with the features `image` and `label`, all its splits
              together. If it has the splits `train` and `test`, `test_split` says which is which.
              Its images without a label (-1) are left out.
        data_dir: Where TensorFlow Datasets prepares and keeps its sets. Default: its own default.
        image_size: `(height, width)` to resize to (bilinear, antialiased). Default: the images
            keep their size, and must all have the same.

    Returns:
        An `ImageSet`. A set that mixes grey and colour images becomes RGB.

    Raises:
        ValueError: If `name` is none of the three, an image cannot be read, the images differ in
            size and `image_size` is not given, or there are fewer than two identities.
        ModuleNotFoundError: If a built-in set is asked for, and its package is not installed.
    """
    name = os.fspath(name)
    if image_size is not None and (len(image_size) != 2 or min(image_size) < 1):
        raise ValueError(
            "`image_size` must be (height, width), both positive. "
            f"Received: image_size={image_size}"
        )
    if os.path.isdir(name) and name not in BUILT_IN:
        count, class_names, examples = _read_folder(name)
    else:
        count, class_names, examples = _read_tfds(name, data_dir)

    pictures, labels, tests = [], [], []
    progress = keras.utils.Progbar(
        count, unit_name="image", verbose=1 if sys.stdout.isatty() else 2
    )
    for index, (picture, label, is_test) in enumerate(examples):
        progress.update(index + 1)
        if label < 0:
            continue
        if image_size is not None:
            picture = picture.resize(tuple(image_size)[::-1], Image.Resampling.BILINEAR)
        if pictures and picture.size != pictures[0].size:
            raise ValueError(
                "The images must have one size, but there are "
                f"{pictures[0].height} x {pictures[0].width} and "
                f"{picture.height} x {picture.width} (height x width). Resize them: "
                "--image-size HEIGHT WIDTH, in Python image_size=(height, width). "
                f"Received: name={name!r}, image_size=None"
            )
        pictures.append(picture)
        labels.append(label)
        tests.append(is_test)

    ids, labels = np.unique(labels, return_inverse=True)  # identities without an image go
    if len(ids) < 2:
        raise ValueError(
            f"`name` must be a set of at least two identities, but it has {len(ids)}. "
            f"Received: name={name!r}"
        )
    mode = "RGB" if any(picture.mode == "RGB" for picture in pictures) else "L"
    images = np.stack([np.asarray(picture.convert(mode)) for picture in pictures])
    return ImageSet(
        images=images if mode == "RGB" else images[..., None],
        labels=labels.astype("int32"),
        names=tuple(class_names[i] if class_names else str(i) for i in ids),
        test_split=np.array(tests) if any(tests) and not all(tests) else None,
        name=name,
    )


def _read_folder(path):
    """Returns the number of examples, the class names, and examples (image, label, is_test)."""
    paths, labels, names = identity_folder(path)
    files = zip(paths, labels, strict=True)
    return len(paths), names, ((read_image(file), label, False) for file, label in files)


def _read_tfds(name, data_dir):
    """The same as `_read_folder`, from TensorFlow Datasets."""
    if not sys.stderr.isatty():
        tfds.disable_progress_bar()
    try:
        builder = tfds.builder(name, data_dir=data_dir)
    except ValueError as error:
        not_found = isinstance(error, tfds.core.DatasetNotFoundError)  # it lists all the others
        raise ValueError(
            f"`name` must be one of {BUILT_IN}, an existing folder with one sub-folder per "
            "identity, or the name of a set of TensorFlow Datasets "
            f"(https://www.tensorflow.org/datasets/catalog). Received: name={name!r}"
        ) from (None if not_found else error)
    features = builder.info.features
    if not {"image", "label"} <= set(features):
        raise ValueError(
            "A set of TensorFlow Datasets must have the features `image` and `label`, but "
            f"{name!r} has {sorted(features)}. Received: name={name!r}"
        )
    builder.download_and_prepare()
    splits = builder.info.splits

    def examples():
        read_config = tfds.ReadConfig(try_autocache=False)  # read once: a cache would only cost
        for split in splits:
            is_test = split == "test" and "train" in splits
            for example in tfds.as_numpy(builder.as_dataset(split, read_config=read_config)):
                image = example["image"]
                image = Image.fromarray(image[..., 0] if image.shape[-1] == 1 else image)
                yield grey_or_rgb(image), example["label"], is_test

    class_names = getattr(features["label"], "names", None)
    return sum(split.num_examples for split in splits.values()), class_names, examples()
