"""1:N identification: who of a gallery is on the probe, and is it anyone at all?"""

import warnings

import numpy as np
from sklearn.exceptions import UndefinedMetricWarning

from keras_margin.retrieval import check_labels, row_blocks, unit_rows
from keras_margin.score_checks import check_named_far


def identify(probe, probe_labels, gallery, gallery_labels, ranks=(1, 5), far=(1e-1, 1e-2, 1e-3)):
    """Looks every probe up in a gallery of known people; some probes may be of unknown ones.

    An identity scores the best cosine of its gallery images. Another identity with an equal score
    counts as ahead, so that ties never flatter.

        CMC, rank k:  share of known probes whose identity is among the k best
        DIR@FAR=f:    share of known probes whose identity is the best one and scores above the
                      threshold at which at most a share f of the unknown probes is taken for anyone

    Args:
        probe: (probes, dim) real array. A zero vector has cosine 0 with everything.
        probe_labels: (probes,) whole numbers. A probe is known where the gallery has its label.
        gallery: (images, dim) real array, one image or several of each identity.
        gallery_labels: (images,) whole numbers.
        ranks: an integer of at least 1, or a sequence of them.
        far: a number in [0, 1], or a sequence of them: false alarms among unknown probes (FPIR).
            An empty one asks for the CMC alone.

    Returns:
        dict of Python numbers: `rank1` and so on; `dir@far=0.1` and so on, written as
        `f"{far:g}"`; `known_probes` and `unknown_probes`. What is undefined (no known probe, no
        unknown one, far below 1 / unknown_probes) is NaN, with an `UndefinedMetricWarning`.

    Raises:
        ValueError: shapes, types or values that do not fit.

    Example:
        >>> import numpy as np
        >>> from keras_margin import verification
        >>> gallery = np.array([[1.0, 0.0], [0.0, 1.0]])
        >>> probe = np.array([[0.9, 0.1], [0.8, 0.6], [-1.0, -1.0]])
        >>> verification.identify(probe, [0, 1, 7], gallery, [0, 1], ranks=(1, 2), far=1.0)
        {'rank1': 0.5, 'rank2': 1.0, 'dir@far=1': 0.5, 'known_probes': 2, 'unknown_probes': 1}

    Reference:
        Phillips, Grother, Micheals: Evaluation Methods in Face Recognition. Handbook of Face
        Recognition, 2011, section 21.2.
    """
    ranks, fars = np.atleast_1d(_check_ranks(ranks)), check_named_far(far)
    probes = unit_rows(probe, "probe")
    probe_labels = check_labels(probe_labels, len(probes), "probe_labels")
    images = unit_rows(gallery, "gallery")
    gallery_labels = check_labels(gallery_labels, len(images), "gallery_labels")
    if len(images) == 0 or images.shape[1] != probes.shape[1]:
        raise ValueError(
            "`gallery` must have images, with as many columns as `probe`. Received: "
            f"gallery.shape={images.shape}, probe.shape={probes.shape}"
        )
    ahead, own, alarms = _looked_up(probes, probe_labels, images, gallery_labels)
    known, unknown = len(ahead), len(alarms)
    thresholds = _thresholds(alarms, fars)
    if not known:
        _warn("no probe has an identity of the gallery")
    nan = float("nan")
    report = {f"rank{k}": float(np.mean(ahead < k)) if known else nan for k in ranks}
    for bound, threshold in zip(fars, thresholds, strict=True):
        found = (ahead == 0) & (own > threshold)
        is_defined = known and not np.isnan(threshold)
        report[f"dir@far={bound:g}"] = float(np.mean(found)) if is_defined else nan
    return {**report, "known_probes": known, "unknown_probes": unknown}


def _looked_up(probes, probe_labels, images, gallery_labels):
    """Of each known probe how many identities are ahead of its own, and what its own scores; of
    each unknown one what the best identity scores."""
    order = np.argsort(gallery_labels, kind="stable")
    identities, starts = np.unique(gallery_labels[order], return_index=True)
    images = images[order]
    ahead, own, alarms = [np.empty(0, int)], [np.empty(0, "f4")], [np.empty(0, "f4")]
    for rows in row_blocks(len(probes), len(images)):
        cosines = (probes[rows] @ images.T).astype(np.float32)
        scores = np.maximum.reduceat(cosines, starts, axis=1)  # (block, identities)
        relevant = probe_labels[rows, None] == identities
        known = relevant.any(axis=1)
        alarms.append(scores[~known].max(axis=1))
        mine = scores[known][relevant[known]]
        own.append(mine)
        ahead.append((scores[known] >= mine[:, None]).sum(axis=1) - 1)
    return tuple(map(np.concatenate, (ahead, own, alarms)))


def _thresholds(alarms, fars):
    """Scores that at most a share `far` of the alarms is above; NaN where that is undefined."""
    unknown = len(alarms)
    thresholds = np.full(len(fars), np.nan)
    if not unknown:
        if len(fars):
            _warn("no probe is unknown to the gallery")
        return thresholds
    falling = np.append(np.sort(alarms)[::-1], -np.inf)
    for i, bound in enumerate(fars):
        allowed = np.flatnonzero(np.arange(unknown + 1) / unknown <= bound)[-1]
        if bound * unknown < 1 and not allowed:
            _warn(f"far={bound:g} is below 1 / {unknown} unknown probes")
        else:
            thresholds[i] = falling[allowed]
    return thresholds


def _check_ranks(ranks):
    found = np.asarray(ranks)
    if found.ndim > 1 or found.dtype.kind not in "iu" or np.any(found < 1):
        raise ValueError(
            "`ranks` must be an integer of at least 1, or a sequence of them. Received: "
            f"ranks={ranks}"
        )
    return found


def _warn(what):
    warnings.warn(
        f"identify is undefined in part: {what}. The result is NaN.",
        UndefinedMetricWarning,
        stacklevel=3,
    )
