"""Turns a wanted false accept rate into a threshold, on images that neither train nor judge."""

import math

from keras_margin import verification


def calibrate(encoder, data, far):
    """Chooses the threshold on the calibration images, and measures it on the test images.

    Training scores are no guide: the network has pulled them apart. Nor are those of the test: a
    threshold that was chosen on them keeps its rate there by construction.

    Args:
        encoder: images -> unit-length embeddings.
        data: a `Split`.
        far: the false accept rate that is wanted, between 0 and 1.

    Returns:
        What `threshold.json` holds, or None where the calibration has fewer than 1 / far impostor
        pairs: no threshold can show such a rate there.
    """
    if not len(data.calibration_labels):
        return None
    scores, genuine = _pairs(encoder, data.calibration_images, data.calibration_labels)
    impostors = int((~genuine).sum())
    if not impostors or far < 1 / impostors:
        return None
    threshold = verification.threshold_at_far(scores, genuine, far)
    test = _pairs(encoder, data.test_images, data.test_labels)
    which = "of identities" if data.open_set else "of the trained identities"
    return {
        "threshold": threshold,
        "use": "Accept two images as one identity when the dot product of their embeddings "
        "is >= threshold.",
        "far_wanted": far,
        "chosen": "the smallest threshold within far_wanted, on all pairs of "
        f"{len(data.calibration_labels)} images {which} that are in neither training nor test",
        "calibration": _rates(scores, genuine, threshold),
        "test": _rates(*test, threshold),
    }


def print_threshold(found, data, far):
    """The threshold, and what it does on images that did not choose it; or what to do."""
    if found is None:
        least = "two identities beside the test and three in training"
        if not data.open_set:
            least = "two images of an identity beside the test and two in training"
        print(
            f"\nNo threshold: FAR {far:g} needs {math.ceil(1 / far):,} impostor pairs that neither "
            f"train nor test.\n{len(data.calibration_labels)} images there make too few. Give more "
            f"(at least {least}), or a larger --far."
        )
        return
    print(f"\nThreshold {found['threshold']:.4f} for FAR {far:g}:\n{found['chosen']}.\n")
    print(f"{'':12}{'FAR':>8}{'TAR':>8}   accepted impostor and genuine pairs")
    for part in ("calibration", "test"):
        r = found[part]
        print(
            f"{part:12}{r['far']:8.4f}{r['tar']:8.4f}   "
            f"{r['accepted_impostors']:,} of {r['impostor_pairs']:,}, "
            f"{r['accepted_genuines']:,} of {r['genuine_pairs']:,}"
        )


def _pairs(encoder, images, labels):
    embeddings = encoder.predict(images, verbose=0)
    return verification.all_pairs(embeddings, labels)


def _rates(scores, genuine, threshold):
    """FAR and TAR at a threshold, and the counts that they are made of."""
    accepted = scores >= threshold
    return {
        "far": float(accepted[~genuine].mean()),
        "tar": float(accepted[genuine].mean()),
        "accepted_impostors": int(accepted[~genuine].sum()),
        "impostor_pairs": int((~genuine).sum()),
        "accepted_genuines": int(accepted[genuine].sum()),
        "genuine_pairs": int(genuine.sum()),
    }
