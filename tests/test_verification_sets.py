"""insightface's verification sets, and files that look like them."""

import io
import os
import pickle
import re

import numpy as np
import pytest

from keras_margin import safe_pickle
from keras_margin.datasets import read_pairs_txt, read_verification_bin

JPEG, PNG = b"\xff\xd8\xff\xe0" + bytes(range(256)), b"\x89PNG\r\n\x1a\n" + bytes(300)
IMAGES = [JPEG, PNG, PNG + b"1", JPEG + b"2"]


def written(folder, content, protocol=4):
    path = folder / "some.bin"
    path.write_bytes(content if isinstance(content, bytes) else pickle.dumps(content, protocol))
    return path


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("flags", [[True, False], [np.True_, np.False_], [1, 0], [np.int64(1), 0]])
def test_every_protocol_and_kind_of_flag(tmp_path, flags, protocol):
    found = read_verification_bin(written(tmp_path, (IMAGES, flags), protocol))
    assert found.images == IMAGES
    assert found.pairs.tolist() == [[0, 1], [2, 3]]
    assert found.genuine.dtype == bool
    assert found.genuine.tolist() == [True, False]


def test_strings_of_python_2(tmp_path):
    """As Python 2 wrote ([b'..', b'..'], [True]) with protocol 2."""
    image = b"\xff\xd8\xff\xe0two"
    item = b"U" + bytes([len(image)]) + image
    data = b"\x80\x02]q\x00(" + item + item + b"e]q\x01\x88a\x86q\x02."
    assert read_verification_bin(written(tmp_path, data)).images == [image, image]


class Evil:
    def __reduce__(self):
        return os.system, ("touch executed",)


def numpy_object():
    return np.array([object()], dtype=object)


@pytest.mark.parametrize(
    "content",
    [Evil(), ([Evil(), JPEG], [True]), (IMAGES, [Evil(), 0]), {"a": 1}, (IMAGES, [1.5, 0]), {1, 2}],
    ids=["call", "call in images", "call in flags", "dict", "float", "set"],
)
@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_whatever_else_is_refused_and_nothing_executed(tmp_path, monkeypatch, content, protocol):
    monkeypatch.chdir(tmp_path)
    path = written(tmp_path, content, protocol)
    with pytest.raises(ValueError, match=rf"refused: .* at byte \d+. Received: path='{path}'"):
        read_verification_bin(path)
    assert os.listdir(tmp_path) == ["some.bin"]


@pytest.mark.parametrize("call", ["numpy dtype", "numpy.core.multiarray scalar", "_codecs encode"])
@pytest.mark.parametrize("argument", [b"cos\nsystem\n", b"U\x02O8", b"U\x03M8x", b"N", b"(lI1\na"])
def test_known_calls_take_known_arguments_alone(call, argument):
    module, name = call.split(" ")
    data = b"c" + f"{module}\n{name}\n".encode() + argument + argument + b"\x86R."
    with pytest.raises(ValueError, match="refused|damaged"):
        safe_pickle.loads(data)


def test_a_file_cut_at_any_byte_is_refused(tmp_path):
    whole = pickle.dumps((IMAGES, [True, np.False_]), 4)
    for size in range(len(whole)):
        path = written(tmp_path, whole[:size])
        with pytest.raises(ValueError, match=r"(after|at) byte \d+.*Received: path="):
            read_verification_bin(path)


def test_a_garbled_file_never_passes_for_another_one(tmp_path):
    """One byte changed: an error, or the set with that byte of an image or that flag changed."""
    whole = pickle.dumps(([JPEG, PNG], [True]), 4)
    rng = np.random.default_rng(0)
    for place in range(len(whole)):
        data = bytearray(whole)
        data[place] ^= int(rng.integers(1, 256))
        try:
            found = read_verification_bin(written(tmp_path, bytes(data)))
        except ValueError as error:
            assert "some.bin" in str(error)
        else:
            assert len(found.images) == 2 and len(found.genuine) == 1
            assert all(isinstance(image, bytes) for image in found.images)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([IMAGES], "it must hold (images, flags)"),
        ((IMAGES, []), "a list of images and a list of flags"),
        ((JPEG, [True]), "a list of images and a list of flags"),
        ((IMAGES, [True]), "4 images for 1 flags, not two for each"),
        ((IMAGES, [True, 2]), "flag 1 is 2, neither True nor False"),
        ((IMAGES, [True, None]), "flag 1 is None"),
        (([JPEG, b"GIF89a"], [True]), "image 1 is neither JPEG nor PNG"),
        (([JPEG, "text"], [True]), "image 1 is neither JPEG nor PNG"),
        (([JPEG, b""], [True]), "image 1 is neither JPEG nor PNG"),
    ],
)
def test_other_content_is_named(tmp_path, content, message):
    path = written(tmp_path, content)
    with pytest.raises(ValueError, match=re.escape(f"{message}") + ".*" + re.escape(str(path))):
        read_verification_bin(path)


def test_size_and_existence(tmp_path):
    path = written(tmp_path, (IMAGES, [True, False]))
    with pytest.raises(ValueError, match=r"more than max_bytes=100: pass a larger one"):
        read_verification_bin(path, max_bytes=100)
    with pytest.raises(FileNotFoundError, match="none.bin"):
        read_verification_bin(tmp_path / "none.bin")


@pytest.mark.parametrize("size", [2**31, 2**62])
def test_a_size_beyond_the_file_takes_no_memory(size):
    data = b"\x80\x04\x8e" + size.to_bytes(8, "little") + b"abc"
    with pytest.raises(ValueError, match="damaged"):
        safe_pickle.loads(data)
    buffer = io.BytesIO()
    pickle.dump([1], buffer, 4)
    assert safe_pickle.loads(buffer.getvalue()) == [1]


# pairs.txt

FILES = ["Ann/Ann_0001.jpg", "Ann/Ann_0002.png", "Bo_X/Bo_X_0001.jpg", "Cy/Cy_0012.jpg"]
LINES = ["Ann\t1\t2", "Ann\t1\tBo_X\t1", "Ann 2 1", "Cy 12 Ann 2"]


def listed(folder, *lines):
    for file in FILES:
        (folder / file).parent.mkdir(exist_ok=True)
        (folder / file).touch()
    (folder / "pairs.txt").write_text("\n".join(lines) + "\n", "utf-8")
    return folder / "pairs.txt", folder


def test_pairs_in_the_order_of_the_list(tmp_path):
    found = read_pairs_txt(*listed(tmp_path, "2 1", *LINES))
    names = [os.path.relpath(path, tmp_path) for path in found.paths]
    assert names == FILES
    assert found.pairs.tolist() == [[0, 1], [0, 2], [1, 0], [3, 1]]
    assert found.genuine.tolist() == [True, False, True, False]
    assert found.folds == 2


def test_one_number_means_one_fold(tmp_path):
    found = read_pairs_txt(*listed(tmp_path, "1", *LINES[:2]))
    assert (found.folds, found.genuine.tolist()) == (1, [True, False])


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "Line 1 of the list must hold the number of folds"),
        (["ten 300", *LINES], "Line 1 of the list must hold the number of folds"),
        (["2 1", *LINES[:3]], "promises 2 x 2 x 1 pairs, and 3 lines come after it"),
        (["0 0"], "promises 0 x 2 x 0 pairs"),
        (["2 1", LINES[1], *LINES[1:]], "Line 2 of the list must have the form `name i j`"),
        (["2 1", LINES[0], *LINES[:3]], "Line 3 of the list must have the form `name i other j`"),
        (["1", "Ann 1 x", LINES[1]], "Line 2 of the list names no image: Ann x"),
        (["1", "../Ann 1 2", LINES[1]], "Line 2 of the list names no image: ../Ann 1"),
        (["1", ".. 1 2", LINES[1]], "Line 2 of the list names no image: .. 1"),
    ],
)
def test_a_list_of_another_form_is_named(tmp_path, lines, message):
    path, images = listed(tmp_path, *lines)
    with pytest.raises(ValueError, match=re.escape(message) + ".*" + re.escape(str(path))):
        read_pairs_txt(path, images)


def test_a_missing_image_is_named(tmp_path):
    path, images = listed(tmp_path, "1", "Ann 1 3", LINES[1])
    message = f"Line 2 of the list names an image that is not there: {tmp_path}/Ann/Ann_0003.jpg"
    with pytest.raises(FileNotFoundError, match=re.escape(message)):
        read_pairs_txt(path, images)


def test_a_nested_flag_makes_no_endless_message(tmp_path):
    flag = b"a"
    for _ in range(20):
        flag = (flag,) * 40  # 40^20 items in a kilobyte
    path = written(tmp_path, ([b"\xff\xd8\xff"] * 2, [flag]))
    assert path.stat().st_size < 3000
    with pytest.raises(ValueError, match="flag 0 is") as raised:
        read_verification_bin(path)
    assert len(str(raised.value)) < 1000


def test_a_list_in_another_encoding_is_named(tmp_path):
    path = tmp_path / "pairs.txt"
    path.write_bytes("1\nJosé 1 2\n".encode("latin-1"))
    with pytest.raises(ValueError, match=r"no text in UTF-8.*pairs\.txt"):
        read_pairs_txt(path, tmp_path)


def test_a_mark_at_the_start_and_endless_numbers(tmp_path):
    path, folder = listed(tmp_path, "1", *LINES[:2])
    path.write_text("\ufeff" + path.read_text("utf-8"), "utf-8")
    assert read_pairs_txt(path, folder).genuine.tolist() == [True, False]
    path, folder = listed(tmp_path, "1", "Ann\t1\t" + "2" * 5000, LINES[1])
    with pytest.raises(ValueError, match="Line 2 of the list names no image"):
        read_pairs_txt(path, folder)
