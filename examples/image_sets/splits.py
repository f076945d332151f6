"""Splits an image set into training and test: the same identities in both, new ones in test, or
one training and a test of either kind.

On request a third part chooses what the test must not choose: a threshold, the best epoch.
"""

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True, eq=False)
class Split:
    """Training, test and calibration images.

    Attributes:
        train_images: uint8 array (n, height, width, channels).
        train_labels: int32 array (n,), in 0..len(train_names)-1.
        test_images: uint8 array (m, height, width, channels).
        test_labels: int32 array (m,), in 0..len(test_names)-1.
        train_names: Tuple of `str`, the identities of `train_labels`.
        test_names: Tuple of `str`, the identities of `test_labels`.
        open_set: False if the parts have the same identities, True if they share none.
        calibration_images: uint8 array (k, height, width, channels), in neither of the two.
        calibration_labels: int32 array (k,), the identities that training would have given them.
            k is 0 where nothing was set aside.
    """

    train_images: np.ndarray
    train_labels: np.ndarray
    test_images: np.ndarray
    test_labels: np.ndarray
    train_names: tuple
    test_names: tuple
    open_set: bool
    calibration_images: np.ndarray
    calibration_labels: np.ndarray


def split(image_set, *, unseen=0, held_out=0.2, calibration=0.0, seed=0):
    """Splits an image set into training and test, and perhaps calibration.

    With `unseen=0` the set is closed: training and test have the same identities. The source's own
    test split is used if it has one; if not, a part of each identity's images is held out.

    With `unseen=K` the set is open: the last K identities are kept out of training, and all their
    images are the test. That is how face recognition is used: the people that one meets are not
    those of the training set. The source's own test split plays no part then.

    The calibration is set aside from the training, by the same rule: other images of the identities
    of a closed set, other identities of an open one. The test stays the same with and without it.

    Args:
        image_set: An `ImageSet`.
        unseen: Number of identities kept out of training, 0 or from 2 (pairs of different people
            need two) to the number of identities - 2 (so does training).
        held_out: Fraction of each identity's images that is held out, rounded, but at least one
            (two of four or more) goes to the test and at least one stays. An only image stays.
        calibration: Fraction of the training that is set aside, 0 for none. In a closed set of the
            images of each identity that has four or more, at least two; in an open set of the
            identities, the last ones, at least two, but none where fewer than three would stay.
            Nothing is set aside where it would make no pairs.
        seed: Which images are held out.

    Returns:
        A `Split`.

    Raises:
        ValueError: If `unseen`, `held_out` or `calibration` is out of range, no image is left for
            the test, or the source's own test split has identities that training does not.
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
    if not 0 <= calibration < 1:
        raise ValueError(
            "`calibration` must be a fraction from 0 to below 1. "
            f"Received: calibration={calibration}"
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
    if not _makes_pairs(labels[test]):
        raise ValueError(
            "The test must have two images of one identity, and two identities, to make pairs; "
            f"{image_set.name!r} has too few images per identity. Received: unseen={unseen}, "
            f"held_out={held_out}"
        )
    aside = np.zeros(len(labels), bool)
    if calibration:
        aside[~test] = _set_aside(labels[~test], calibration, bool(unseen), seed)
    train = ~test & ~aside
    trained = int(labels[aside].min()) if unseen and aside.any() else first
    return Split(
        train_images=image_set.images[train],
        train_labels=labels[train],
        test_images=image_set.images[test],
        test_labels=labels[test] - first,
        train_names=names[:trained] if unseen else names,
        test_names=names[first:],
        open_set=unseen > 0,
        calibration_images=image_set.images[aside],
        calibration_labels=labels[aside],
    )


def split_for_both(image_set, *, unseen, held_out=0.2, seed=0):
    """One training for two tests: new images of its identities, and identities that it never saw.

    The last K identities are the open set. The others are split as `split` splits a closed set.

    Args:
        image_set: An `ImageSet`.
        unseen: K, from 2 to the number of identities - 2.
        held_out, seed: As of `split`, for the identities that are trained.

    Returns:
        closed, open: two `Split`s with the same training images.

    Raises:
        ValueError: As `split` does, for either test.
    """
    if unseen < 2:
        raise ValueError(
            "`unseen` must be at least 2: pairs of different people need two. "
            f"Received: unseen={unseen}"
        )
    open_set = split(image_set, unseen=unseen)
    seen = image_set.labels < len(open_set.train_names)
    test_split = image_set.test_split
    rest = dataclasses.replace(
        image_set,
        images=image_set.images[seen],
        labels=image_set.labels[seen],
        names=open_set.train_names,
        test_split=None if test_split is None else test_split[seen],
    )
    closed = split(rest, held_out=held_out, seed=seed)
    training = {"train_images": closed.train_images, "train_labels": closed.train_labels}
    return closed, dataclasses.replace(open_set, **training)


def _makes_pairs(labels):
    """Whether there are pairs of one identity, and of two."""
    return len(np.unique(labels)) >= 2 and np.bincount(labels).max() >= 2


def _set_aside(labels, share, open_set, seed):
    """Marks what of the training calibrates: labels (n,) -> bool (n,)."""
    counts = np.bincount(labels)  # (identities,)
    if open_set:
        identities = max(2, round(len(counts) * share))
        aside = labels >= len(counts) - identities
        enough = len(counts) - identities >= 3
    else:
        # Not the images of the test: that was drawn with `seed` alone.
        aside = _hold_out(labels, share, [seed, 1]) & (counts[labels] >= 4)
        enough = True
    return aside & (enough and _makes_pairs(labels[aside]))


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
