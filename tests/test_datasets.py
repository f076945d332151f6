"""The readers of `keras_margin.datasets`."""

import numpy as np
import pytest

from keras_margin.datasets import identity_folder


def make_files(folder, *files):
    for file in files:
        path = folder / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    return folder


def test_identities_and_images_come_in_natural_order(tmp_path):
    make_files(tmp_path, "s10/1.pgm", "s2/10.pgm", "s2/9.pgm", "s1/1.pgm", "s01/1.pgm")
    paths, labels, names = identity_folder(tmp_path)
    assert names == ["s01", "s1", "s2", "s10"]
    files = ["s01/1.pgm", "s1/1.pgm", "s2/9.pgm", "s2/10.pgm", "s10/1.pgm"]
    assert paths == [str(tmp_path / file) for file in files]
    assert labels.dtype == np.int32
    assert labels.tolist() == [0, 1, 2, 2, 3]


def test_a_string_and_a_path_are_the_same(tmp_path):
    make_files(tmp_path, "a/1.png", "b/1.png")
    assert identity_folder(str(tmp_path))[0] == identity_folder(tmp_path)[0]


@pytest.mark.parametrize(
    "suffix", "jpg jpeg png bmp gif webp pgm ppm tif tiff JPG Png TIFF".split()
)
def test_images_are_recognised_by_suffix_in_any_case(tmp_path, suffix):
    make_files(tmp_path, f"a/1.{suffix}", f"b/1.{suffix}")
    assert len(identity_folder(tmp_path)[0]) == 2


def test_hidden_and_other_files_are_left_out(tmp_path):
    make_files(tmp_path, "a/1.png", "b/1.png", "a/notes.txt", "a/.2.png", ".c/1.png", "README.png")
    make_files(tmp_path, "a/.DS_Store", "b/png")
    paths, _, names = identity_folder(tmp_path)
    assert names == ["a", "b"]
    assert paths == [str(tmp_path / "a/1.png"), str(tmp_path / "b/1.png")]


def test_an_identity_without_images_is_named(tmp_path):
    make_files(tmp_path, "a/1.png", "empty/notes.txt")
    with pytest.raises(ValueError, match=r"'\S*/empty' holds none.*Received: path='"):
        identity_folder(tmp_path)


def test_a_missing_folder_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"existing folder. Received: path='\S*/nowhere'"):
        identity_folder(tmp_path / "nowhere")


def test_a_file_is_refused(tmp_path):
    make_files(tmp_path, "a.png")
    with pytest.raises(NotADirectoryError, match=r"not a file. Received: path='\S*/a.png'"):
        identity_folder(tmp_path / "a.png")


@pytest.mark.parametrize(("files", "identities"), [(["1.png"], 0), (["a/1.png", "2.png"], 1)])
def test_fewer_than_two_identities_are_refused(tmp_path, files, identities):
    make_files(tmp_path, *files)
    with pytest.raises(ValueError, match=f"at least two, but it has {identities}. Received: path="):
        identity_folder(tmp_path)


def test_a_link_that_names_no_image_is_named(tmp_path):
    make_files(tmp_path, "a/1.png", "b/1.png")
    (tmp_path / "b" / "2.png").symlink_to(tmp_path / "gone.png")
    with pytest.raises(FileNotFoundError, match=r"The link names no image.*2\.png"):
        identity_folder(tmp_path)
