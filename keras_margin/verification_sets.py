"""Lists of face pairs as they are published: insightface's `.bin` files."""

import os
from typing import NamedTuple

import numpy as np

from keras_margin import safe_pickle

_SIGNATURES = {b"\xff\xd8\xff": "JPEG", b"\x89PNG\r\n\x1a\n": "PNG"}


class VerificationSet(NamedTuple):
    """Images, and the pairs of them that are to be told apart.

    Attributes:
        images: list of bytes, each an encoded JPEG or PNG image.
        pairs: int64 (pairs, 2), indices of images.
        genuine: bool (pairs,), whether both images are of one person.
    """

    images: list
    pairs: np.ndarray
    genuine: np.ndarray


def read_verification_bin(path, max_bytes=2**32):
    """Reads insightface's verification sets: `lfw.bin`, `cfp_fp.bin`, `agedb_30.bin` and the like.

    Such a file is a pickle of (encoded images, same or different), the images 2 i and 2 i + 1
    forming pair i. It is read by a machine that can build lists, bytes, booleans and NumPy's
    scalars, and nothing else: nothing in it is executed.

    Args:
        path: the file, `str` or `os.PathLike`.
        max_bytes: a larger file is refused. The published ones have up to 200 MB.

    Returns:
        `VerificationSet`.

    Raises:
        FileNotFoundError: it is not there.
        ValueError: it is larger, damaged, holds anything but images and flags, or an image is
            neither JPEG nor PNG; the message names the file and the place.

    Example:

    >>> import pathlib, pickle, tempfile
    >>> from keras_margin.datasets import read_verification_bin
    >>> png = b"\\x89PNG\\r\\n\\x1a\\n..."
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = pathlib.Path(folder, "two.bin")
    ...     _ = path.write_bytes(pickle.dumps(([png, png, png, png], [True, False])))
    ...     pairs, genuine = read_verification_bin(path)[1:]
    >>> pairs.tolist(), genuine.tolist()
    ([[0, 1], [2, 3]], [True, False])
    """
    path = os.fspath(path)
    size = os.path.getsize(path)
    if size > max_bytes:
        raise ValueError(
            f"The file has {size} bytes, more than max_bytes={max_bytes}: pass a larger one if it "
            f"is what you want. Received: path={path!r}"
        )
    with open(path, "rb") as file:
        data = file.read()

    def refuse(what):
        return ValueError(f"This is no verification set: {what}. Received: path={path!r}")

    try:
        content = safe_pickle.loads(data)
    except ValueError as error:
        raise refuse(error) from None
    if not (isinstance(content, (tuple, list)) and len(content) == 2):
        raise refuse("it must hold (images, flags)")
    images, flags = content
    if not (isinstance(images, list) and isinstance(flags, (list, tuple)) and flags):
        raise refuse("it must hold a list of images and a list of flags")
    if len(images) != 2 * len(flags):
        raise refuse(f"{len(images)} images for {len(flags)} flags, not two for each")
    for i, flag in enumerate(flags):
        if flag not in (0, 1):
            raise refuse(f"flag {i} is {flag!r}, neither True nor False")
    for i, image in enumerate(images):
        if not isinstance(image, bytes) or not image.startswith(tuple(_SIGNATURES)):
            raise refuse(f"image {i} is neither JPEG nor PNG")
    pairs = np.arange(len(images)).reshape(-1, 2)
    return VerificationSet(images, pairs, np.array(flags, bool))
