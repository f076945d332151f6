"""Lists of face pairs as they are published: insightface's `.bin` files, LFW's `pairs.txt`."""

import os
import reprlib
from typing import NamedTuple

import numpy as np

from keras_margin import safe_pickle

_SIGNATURES = b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n"  # of JPEG and PNG
_SHORT = reprlib.Repr()
_SHORT.maxlevel = 1  # a few bytes of a pickle can nest into a text without end
_SUFFIXES = ".jpg", ".jpeg", ".png", ".bmp", ".pgm", ".ppm"


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
            raise refuse(f"flag {i} is {_SHORT.repr(flag)}, neither True nor False")
    for i, image in enumerate(images):
        if not isinstance(image, bytes) or not image.startswith(_SIGNATURES):
            raise refuse(f"image {i} is neither JPEG nor PNG")
    pairs = np.arange(len(images)).reshape(-1, 2)
    return VerificationSet(images, pairs, np.array(flags, bool))


class PairList(NamedTuple):
    """Image files, and the pairs of them that are to be told apart.

    Attributes:
        paths: list of `str`, each file once.
        pairs: int64 (pairs, 2), indices of paths.
        genuine: bool (pairs,), whether both images are of one person.
        folds: how many folds the list names, in order, for `verification.kfold_accuracy`.
    """

    paths: list
    pairs: np.ndarray
    genuine: np.ndarray
    folds: int


def read_pairs_txt(path, images):
    """Reads a list of pairs in the form of LFW's `pairs.txt`, and finds the images.

    The first line holds the number of folds and of genuine pairs in each (or that number alone).
    Each fold has as many lines `name i j`, images i and j of one person, and then as many lines
    `name i other j`. Image i of a person is the file `name/name_000i.jpg` (or .png and so on).

    Args:
        path: the list, `str` or `os.PathLike`.
        images: the folder that holds a folder for each person.

    Returns:
        `PairList`.

    Raises:
        FileNotFoundError: the list or an image is not there; the message names the line.
        ValueError: a line is of another form, or there are too few or too many.

    Example:

    >>> import pathlib, tempfile
    >>> from keras_margin.datasets import read_pairs_txt
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     folder = pathlib.Path(folder)
    ...     for file in ("Ann/Ann_0001.jpg", "Ann/Ann_0002.jpg", "Bo/Bo_0001.jpg"):
    ...         (folder / file).parent.mkdir(exist_ok=True)
    ...         (folder / file).touch()
    ...     _ = (folder / "pairs.txt").write_text("1\\t1\\nAnn\\t1\\t2\\nAnn\\t1\\tBo\\t1\\n")
    ...     found = read_pairs_txt(folder / "pairs.txt", folder)
    >>> found.pairs.tolist(), found.genuine.tolist()
    ([[0, 1], [0, 2]], [True, False])

    Reference:
        Huang, Ramesh, Berg, Learned-Miller: Labeled Faces in the Wild. 2007, UMass Amherst
        technical report 07-49.
    """
    path, images = os.fspath(path), os.fspath(images)
    try:
        with open(path, encoding="utf-8-sig") as file:  # some editors write a mark at the start
            lines = [line.split() for line in file.read().splitlines()]
    except UnicodeDecodeError as error:
        raise ValueError(
            f"The list is no text in UTF-8 ({error}). Received: path={path!r}"
        ) from error
    while lines and not lines[-1]:
        lines.pop()

    def refuse(number, what, kind=ValueError):
        return kind(f"Line {number} of the list {what}. Received: path={path!r}")

    header = lines[0] if lines else []
    if len(header) not in (1, 2) or not all(word.isdecimal() for word in header):
        raise refuse(1, "must hold the number of folds and of genuine pairs in each")
    folds, each = (1, int(header[0])) if len(header) == 1 else map(int, header)
    if len(lines) - 1 != folds * 2 * each or not folds * each:
        raise refuse(
            1, f"promises {folds} x 2 x {each} pairs, and {len(lines) - 1} lines come after it"
        )
    places, pairs, genuine = {}, [], []
    for number, words in enumerate(lines[1:], 2):
        is_genuine = (number - 2) // each % 2 == 0
        if is_genuine and len(words) == 3:
            named = [(words[0], words[1]), (words[0], words[2])]
        elif not is_genuine and len(words) == 4:
            named = [(words[0], words[1]), (words[2], words[3])]
        else:
            form = "`name i j`" if is_genuine else "`name i other j`"
            raise refuse(number, f"must have the form {form}")
        pair = []
        for name, index in named:
            if (
                not index.isdecimal()
                or len(index) > 9
                or os.path.basename(name) != name
                or name in (".", "..")
            ):
                raise refuse(number, f"names no image: {name} {index}")
            file = _image_of(images, name, int(index))
            if file is None:
                missing = os.path.join(images, name, f"{name}_{int(index):04}.jpg")
                raise refuse(
                    number, f"names an image that is not there: {missing}", FileNotFoundError
                )
            pair.append(places.setdefault(file, len(places)))
        pairs.append(pair)
        genuine.append(is_genuine)
    return PairList(list(places), np.array(pairs, np.int64), np.array(genuine), folds)


def _image_of(images, name, index):
    stem = os.path.join(images, name, f"{name}_{index:04}")
    return next((stem + suffix for suffix in _SUFFIXES if os.path.isfile(stem + suffix)), None)
