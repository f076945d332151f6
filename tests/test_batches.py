"""Batches of P classes x K images."""

import keras
import numpy as np
import pytest

import keras_margin as km
from keras_margin.datasets import balanced_batches

# 7 classes of 1 to 40 images, labels that are not 0, 1, 2 ...
LABELS = np.random.default_rng(0).permutation(
    np.repeat([5, 900, -3, 8, 70, 2, 11], [1, 2, 3, 10, 20, 30, 40])
)


@pytest.mark.parametrize(("classes", "images"), [(3, 4), (7, 2), (1, 5), (5, 1), (7, 40)])
def test_each_batch_has_p_classes_of_k_images(classes, images):
    for _ in range(3):
        batches = balanced_batches(LABELS, classes, images, seed=1)
        seen = list(batches)
        assert len(seen) == len(batches) == max(1, len(LABELS) // (classes * images))
        for rows in seen:
            assert rows.dtype == np.int64
            ids = LABELS[rows].reshape(classes, images)
            assert (ids == ids[:, :1]).all()  # the images of a class are neighbours
            assert len(set(ids[:, 0])) == classes
            for own, label in zip(rows.reshape(classes, images), ids[:, 0], strict=True):
                assert len(set(own)) == min(images, (LABELS == label).sum())


def test_classes_and_images_take_turns():
    """Of 7 classes, 3 a batch: 7 batches are 3 rounds of all classes."""
    batches = balanced_batches(np.repeat(np.arange(7), 6), 3, 2, seed=0)
    rows = np.concatenate(list(batches))  # 7 batches of 6: each image once
    np.testing.assert_array_equal(np.sort(rows), np.arange(42))


def test_order_depends_on_seed_and_epoch_alone():
    def epochs(seed, number, first=0):
        batches = balanced_batches(LABELS, 3, 4, seed)
        batches.epoch = first
        return [np.concatenate(list(batches)) for _ in range(number)]

    one = epochs(0, 3)
    np.testing.assert_array_equal(one, epochs(0, 3))
    np.testing.assert_array_equal(one[2:], epochs(0, 1, first=2))
    orders = [*one, *epochs(1, 3)]
    assert len({tuple(order) for order in orders}) == 6


def test_all_classes_are_drawn_equally_often():
    batches = balanced_batches(LABELS, 2, 1, seed=0)
    ids = np.concatenate([LABELS[rows] for _ in range(40) for rows in batches])
    counts = np.unique(ids, return_counts=True)[1]
    # An epoch of 106 places deals 15 or 16 to each of 7 classes.
    assert counts.min() >= 40 * 15 and counts.max() <= 40 * 16


def test_dataset():
    expected = balanced_batches(LABELS, 3, 4, seed=2)
    dataset = balanced_batches(LABELS, 3, 4, seed=2).dataset()
    assert dataset.element_spec.shape == (12,)
    assert int(dataset.cardinality()) == len(expected)
    for _ in range(2):
        np.testing.assert_array_equal([rows.numpy() for rows in dataset], list(expected))


def test_gather():
    x = {"image": np.arange(len(LABELS)), "other": np.arange(len(LABELS)) * 2.0}
    expected = balanced_batches(LABELS, 3, 4, seed=2)
    data = balanced_batches(LABELS, 3, 4, seed=2).gather(x, LABELS)
    for _ in range(2):
        for index, rows in enumerate(expected):
            features, labels = data[index]
            np.testing.assert_array_equal(features["image"], rows)
            np.testing.assert_array_equal(features["other"], 2.0 * rows)
            np.testing.assert_array_equal(labels, LABELS[rows])
        data.on_epoch_end()


@pytest.mark.parametrize("first", [0, 3])
def test_fit_trains_on_the_epochs_in_their_order(first):
    """Keras looks at one batch, and ends an epoch, before the first one."""
    seen = []

    class Watching(keras.Model):
        def train_step(self, data):
            seen.append(np.array(data[0]))
            return {"loss": 0.0}

    batches = balanced_batches(LABELS, 3, 4, seed=2)
    batches.epoch = first
    model = Watching()
    model.compile(run_eagerly=True)
    data = batches.gather(np.arange(len(LABELS)), LABELS)
    model.fit(data, epochs=2, shuffle=False, verbose=0)
    wanted = balanced_batches(LABELS, 3, 4, seed=2)
    wanted.epoch = first
    np.testing.assert_array_equal(seen, [*wanted, *wanted])
    assert batches.epoch == first + 2


@pytest.mark.parametrize("epoch", [-1, "a", 1.5, None])
def test_epochs_that_are_no_numbers(epoch):
    with pytest.raises((ValueError, TypeError), match=f"epoch={epoch!r}"):
        balanced_batches(LABELS, 3, 4).epoch = epoch


def test_gather_takes_rows_by_their_place():
    pandas = pytest.importorskip("pandas")
    rows = np.random.default_rng(0).permutation(len(LABELS))
    frame = pandas.DataFrame({"a": rows, "b": -rows}, index=rows)
    data = balanced_batches(LABELS, 3, 4, seed=2).gather(frame, frame["a"])
    for index, places in enumerate(balanced_batches(LABELS, 3, 4, seed=2)):
        x, y = data[index]
        np.testing.assert_array_equal(x, np.stack([rows[places], -rows[places]], axis=1))
        np.testing.assert_array_equal(y, rows[places])


def test_gather_takes_tensors():
    data = balanced_batches(LABELS, 3, 4, seed=2).gather(keras.ops.arange(len(LABELS)))
    for index, places in enumerate(balanced_batches(LABELS, 3, 4, seed=2)):
        np.testing.assert_array_equal(data[index], places)


@pytest.mark.parametrize("form", ["arrays", "dataset"])
def test_fit_of_triplets(form):
    random = np.random.default_rng(0)
    y = np.repeat(np.arange(20), 10)
    x = (np.eye(20)[y] + random.normal(0, 0.2, (200, 20))).astype("float32")
    batches = balanced_batches(y, 8, 4, seed=0)
    if form == "arrays":
        data = batches.gather(x, y)
    else:
        import tensorflow as tf

        data = batches.dataset().map(lambda rows: (tf.gather(x, rows), tf.gather(y, rows)))
    keras.utils.set_random_seed(0)
    backbone = keras.Sequential([keras.Input((20,)), keras.layers.Dense(8)])
    model = km.EmbeddingModel(backbone, km.SemiHardTriplet())
    model.compile(keras.optimizers.Adam(0.03))
    losses = model.fit(data, epochs=20, verbose=0, shuffle=False).history["loss"]
    assert losses[-1] < 0.7 * losses[0]


@pytest.mark.parametrize(
    ("labels", "received"),
    [
        (np.zeros((4, 1), int), "labels.shape=(4, 1)"),
        (np.array([0.5, 1.0]), "labels.dtype=float64"),
        (np.array([], int), "labels.shape=(0,)"),
        (np.array(["a", "b"]), "labels.dtype=<U1"),
    ],
)
def test_labels_that_are_no_ids(labels, received):
    with pytest.raises(ValueError, match="`labels` must be whole numbers") as error:
        balanced_batches(labels, 1, 1)
    assert received in str(error.value)


def test_more_classes_than_there_are():
    with pytest.raises(ValueError, match="classes_per_batch=8, 7 different labels"):
        balanced_batches(LABELS, 8, 1)


@pytest.mark.parametrize(
    ("argument", "value"),
    [("classes_per_batch", 0), ("images_per_class", 0), ("images_per_class", 1.5), ("seed", -1)],
)
def test_counts(argument, value):
    arguments = {"classes_per_batch": 2, "images_per_class": 2, argument: value}
    with pytest.raises((ValueError, TypeError), match=f"{argument}={value}"):
        balanced_batches(LABELS, **arguments)


def test_arrays_of_another_length():
    batches = balanced_batches(LABELS, 2, 2)
    with pytest.raises(ValueError, match="must have 106 rows"):
        batches.gather(np.zeros((105, 2)), LABELS)
    with pytest.raises(ValueError, match="Received: list of shape None|Received: int of shape"):
        batches.gather([1, 2, 3], LABELS)
