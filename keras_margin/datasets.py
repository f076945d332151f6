"""Readers of the file formats in which face recognition keeps its data, and batches of it."""

import os
import re

import numpy as np

from keras_margin.batches import balanced_batches
from keras_margin.images import embed_images
from keras_margin.padding import pad_last_batch
from keras_margin.record_io import RecordSet, record_dataset
from keras_margin.verification_sets import (
    PairList,
    VerificationSet,
    read_pairs_txt,
    read_verification_bin,
)

__all__ = [
    "PairList",
    "RecordSet",
    "VerificationSet",
    "balanced_batches",
    "embed_images",
    "identity_folder",
    "pad_last_batch",
    "read_pairs_txt",
    "read_verification_bin",
    "record_dataset",
]

IMAGE_SUFFIXES = (
    *(".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp"),
    *(".pgm", ".ppm", ".tif", ".tiff"),
)


def identity_folder(path):
    """Lists the images of a folder that has one sub-folder per identity.

    The sub-folders, and the images in each, are taken in natural order: `s2` comes before `s10`.
    The position of a sub-folder is the label of its images. Images are recognised by their suffix,
    in any case: .jpg .jpeg .png .bmp .gif .webp .pgm .ppm .tif .tiff. Files beside the
    sub-folders, other files in them, and whatever is hidden (`.git`, `.DS_Store`) are left out.
    No image is opened.

    Args:
        path: The folder, `str` or `os.PathLike`.

    Returns:
        `paths`, a list of n `str`, the files, identity by identity; `labels`, int32 (n,), in
        0..len(names)-1, the identity of each file; `names`, a list of `str`, the sub-folder's name
        of each identity.

    Raises:
        FileNotFoundError: If `path` does not exist.
        NotADirectoryError: If `path` is a file.
        ValueError: If there are fewer than two sub-folders, or one of them holds no image.

    Example:

    >>> import pathlib, tempfile
    >>> from keras_margin.datasets import identity_folder
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     for file in ("s1/1.pgm", "s2/1.pgm", "s10/1.pgm", "s10/2.pgm"):
    ...         image = pathlib.Path(folder, file)
    ...         image.parent.mkdir(exist_ok=True)
    ...         image.touch()
    ...     paths, labels, names = identity_folder(folder)
    >>> names
    ['s1', 's2', 's10']
    >>> labels
    array([0, 1, 2, 2], dtype=int32)
    """
    path = os.fspath(path)
    if not os.path.exists(path):
        raise FileNotFoundError(f"`path` must be an existing folder. Received: path={path!r}")
    if not os.path.isdir(path):
        raise NotADirectoryError(
            f"`path` must be a folder with one sub-folder per identity, not a file. "
            f"Received: path={path!r}"
        )
    names = [name for name in _visible(path) if os.path.isdir(os.path.join(path, name))]
    if len(names) < 2:
        raise ValueError(
            f"`path` must have one sub-folder per identity, at least two, but it has {len(names)}. "
            f"Received: path={path!r}"
        )
    paths, labels = [], []
    for label, name in enumerate(names):
        folder = os.path.join(path, name)
        images = [
            file
            for file in _visible(folder)
            if file.lower().endswith(IMAGE_SUFFIXES) and _is_image(os.path.join(folder, file))
        ]
        if not images:
            raise ValueError(
                f"Each sub-folder of `path` must hold images ({' '.join(IMAGE_SUFFIXES)}), but "
                f"{folder!r} holds none. Add some or remove it. Received: path={path!r}"
            )
        paths += [os.path.join(folder, image) for image in images]
        labels += [label] * len(images)
    return paths, np.array(labels, "int32"), names


def _is_image(path):
    """Whether it is a file; a link that names nothing would be an image lost without a word."""
    if os.path.islink(path) and not os.path.exists(path):
        raise FileNotFoundError(f"The link names no image: mend or remove it. Received: {path!r}")
    return os.path.isfile(path)


def _visible(folder):
    return sorted((name for name in os.listdir(folder) if name[0] != "."), key=_natural_order)


def _natural_order(name):
    parts = re.split(r"(\d+)", name)  # text and digits take turns: "s10" -> ["s", "10", ""]
    # The name itself decides between "s1" and "s01".
    return [int(part) if i % 2 else part for i, part in enumerate(parts)], name
