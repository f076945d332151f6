"""Splits an image set into training and test: the same identities in both, or new ones in test."""

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True, eq=False)
class Split:
    """Training and test images.

    Attributes:
        train_images: uint8 array (n, height, width, channels).
        train_labels: int32 array (n,), in 0..len(train_names)-1.
        test_images: uint8 array (m, height, width, channels).
        test_labels: int32 array (m,), in 0..len(test_names)-1.
        train_names: Tuple of `str`, the identities of `train_labels`.
        test_names: Tuple of `str`, the identities of `test_labels`.
        open_set: False if both parts have the same identities, True if they share none.
    """

    train_images: np.ndarray
    train_labels: np.ndarray
    test_images: np.ndarray
    test_labels: np.ndarray
    train_names: tuple
    test_names: tuple
    open_set: bool


def split(image_set, *, unseen=0, held_out=0.2, seed=0):
    """Splits an image set into training and test.

    With `unseen=0` the set is closed: training and test have the same identities. The source's own
    test split is used if it has one; if not, a part of each identity's images is held out.

    With `unseen=K` the set is open: the last K identities are kept out of training, and all their
    images are the test. That is how face recognition is used: the people that one meets are not
    those of the training set. The source's own test split plays no part then.

    Args:
        image_set: An `ImageSet`.
        unseen: Number of identities kept out of training, 0 or from 2 (pairs of different people
            need two) to the number of identities - 2 (so does training).
        held_out: Fraction of each identity's images that is held out, rounded, but at least one
            (two of four or more) goes to the test and at least one stays. An only image stays.
        seed: Which images are held out.

    Returns:
        A `Split`.

    Raises:
        ValueError: If `unseen` or `held_out` is out of range, no image is left for the test, or
            the source's own test split has identities that training does not.
    """
    labels, names = image_set.labels, image_set.names
    if unseen and not 2 <= unseen <= len(names) - 2:
        raise ValueError(
            "`unseen` must be 0 or between 2 and the number of identities - 2, since training and "
            f"test need two identities each; {image_set.name!r} has {len(names)}. "
            f"Received: unseen={unseen}"
        )
    if not 0 < held_out < 1:
        raise ValueError(
            f"`held_out` must be a fraction between 0 and 1. Received: held_out={held_out}"
        )
    first = len(names) - unseen if unseen else 0  # the first identity of the test
    if unseen:
        test = labels >= first
    elif image_set.test_split is not None:
        test = image_set.test_split
    else:
        test = _hold_out(labels, held_out, seed)
    if not test.any():
        raise ValueError(
            "No image is left for the test: every identity has a single one. Keep whole "
            f"identities out of training: `unseen`. Received: unseen={unseen}"
        )
    if not unseen and not np.isin(labels[test], labels[~test]).all():
        raise ValueError(
            f"The test split of {image_set.name!r} has identities that its training images do not "
            f"have. Test with new identities: `unseen`. Received: unseen={unseen}"
        )
    if np.bincount(labels[test]).max() < 2 or len(np.unique(labels[test])) < 2:
        raise ValueError(
            "The test must have two images of one identity, and two identities, to make pairs; "
            f"{image_set.name!r} has too few images per identity. Received: unseen={unseen}, "
            f"held_out={held_out}"
        )
    return Split(
        train_images=image_set.images[~test],
        train_labels=labels[~test],
        test_images=image_set.images[test],
        test_labels=labels[test] - first,
        train_names=names[:first] if unseen else names,
        test_names=names[first:],
        open_set=unseen > 0,
    )


def _hold_out(labels, held_out, seed):
    """Marks a random part of each identity's images: labels (n,) -> bool (n,)."""
    order = np.random.default_rng(seed).permutation(len(labels))
    order = order[np.argsort(labels[order], kind="stable")]  # identity by identity, shuffled
    counts = np.bincount(labels)  # (identities,)
    rank = np.arange(len(labels)) - np.repeat(np.cumsum(counts) - counts, counts)
    # Two where there are four or more: the test needs pairs of one identity. 0 of a single image.
    fewest = np.where(counts >= 4, 2, 1)
    held = np.minimum(np.maximum(np.rint(counts * held_out), fewest), counts - 1)
    test = np.empty(len(labels), bool)
    test[order] = rank < np.repeat(held, counts)
    return test
