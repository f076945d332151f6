"""1:N identification against hand-made galleries and a slow reference."""

import re

import numpy as np
import pytest
from sklearn.exceptions import UndefinedMetricWarning

from keras_margin import retrieval
from keras_margin.verification import all_pairs, identify


def slow_identify(probe, probe_labels, gallery, gallery_labels, ranks, fars):
    """Probe by probe, with the cosines of `all_pairs`."""
    both = np.concatenate([probe, gallery])
    matrix = np.zeros((len(both), len(both)), np.float32)
    matrix[np.triu_indices(len(both), 1)], _ = all_pairs(both, np.zeros(len(both), int))
    known, alarms = [], []
    for i, label in enumerate(probe_labels):
        scores = {}
        for j, other in enumerate(gallery_labels):
            score = matrix[i, len(probe) + j]
            scores[other] = max(score, scores.get(other, -2.0))
        if label in scores:
            mine = scores.pop(label)
            known.append((sum(score >= mine for score in scores.values()), mine))
        else:
            alarms.append(max(scores.values()))
    report = {f"rank{k}": np.mean([ahead < k for ahead, _ in known]) for k in ranks}
    for far in fars:
        bounds = [t for t in [-2.0, *alarms] if np.mean([a > t for a in alarms]) <= far]
        best = [ahead == 0 and mine > min(bounds) for ahead, mine in known]
        report[f"dir@far={far:g}"] = np.mean(best)
    return {**report, "known_probes": len(known), "unknown_probes": len(alarms)}


@pytest.mark.parametrize("block_size", [1, 2**22])
@pytest.mark.parametrize("digits", [0, 9])
def test_equals_slow_reference(monkeypatch, digits, block_size):
    """Few different directions, so that scores tie, and several images of an identity."""
    monkeypatch.setattr(retrieval, "BLOCK_SIZE", block_size)
    for seed in range(5):
        rng = np.random.default_rng(seed)
        gallery_labels, probe_labels = rng.integers(0, 6, 15), rng.integers(0, 9, 30)
        people = rng.normal(size=(9, 3))
        gallery, probe = (
            np.round(people[labels] + 0.5 * rng.normal(size=(len(labels), 3)), digits)
            for labels in (gallery_labels, probe_labels)
        )
        sets = probe, probe_labels, gallery, gallery_labels, (1, 2, 5), (1.0, 0.5, 0.3)
        assert identify(*sets) == pytest.approx(slow_identify(*sets))


def test_collapsed_embeddings_find_nobody():
    report = identify(np.ones((4, 2)), [0, 1, 2, 9], np.ones((3, 2)), [0, 1, 2], far=1.0)
    assert (report["rank1"], report["dir@far=1"]) == (0.0, 0.0)


def test_the_false_alarms_stay_within_their_bound():
    """Unknown probes score 0.9, 0.8 and 0.8: at a third only the first may pass."""
    angles = np.arccos([0.85, 0.8, 0.9, 0.8, 0.8])
    probe = np.stack([np.cos(angles), np.sin(angles)], axis=1)
    gallery = [[1.0, 0.0]]
    report = identify(probe, [0, 0, 5, 6, 7], gallery, [0], ranks=1, far=[1 / 3, 2 / 3, 1.0])
    assert report["rank1"] == 1.0
    # Passing 0.8 would let all three in.
    assert report["dir@far=0.333333"] == report["dir@far=0.666667"] == 0.5
    assert report["dir@far=1"] == 1.0


def test_what_is_undefined_is_nan():
    gallery = np.eye(2)
    with pytest.warns(UndefinedMetricWarning, match="no probe is unknown"):
        report = identify(gallery, [0, 1], gallery, [0, 1], far=0.5)
    assert report["rank1"] == 1.0
    assert np.isnan(report["dir@far=0.5"])
    with pytest.warns(UndefinedMetricWarning, match="no probe has an identity"):
        report = identify(gallery, [7, 8], gallery, [0, 1], far=0.5)
    assert np.isnan(report["rank1"]) and np.isnan(report["dir@far=0.5"])
    with pytest.warns(UndefinedMetricWarning, match=r"far=0.1 is below 1 / 1 unknown"):
        report = identify(gallery, [0, 8], gallery, [0, 1], far=[0.1, 1.0])
    assert np.isnan(report["dir@far=0.1"]) and report["dir@far=1"] == 1.0


def test_without_far_only_the_known_are_asked_for():
    report = identify(np.eye(2), [0, 1], np.eye(2), [0, 1], ranks=1, far=())
    assert report == {"rank1": 1.0, "known_probes": 2, "unknown_probes": 0}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"probe_labels": [0]}, "`probe_labels` must have one entry per row"),
        ({"gallery": np.ones((2, 3))}, "with as many columns as `probe`"),
        ({"gallery": np.ones((0, 2)), "gallery_labels": []}, "`gallery` must have images"),
        ({"gallery": [[np.nan, 0.0], [0.0, 1.0]]}, "`gallery` must be finite"),
        ({"ranks": 0}, "`ranks` must be an integer of at least 1"),
        ({"ranks": [1.5]}, "`ranks` must be an integer of at least 1"),
        ({"far": 1.5}, "`far` must be in [0, 1]"),
    ],
)
def test_what_does_not_fit_is_refused(settings, message):
    sets = {"probe": np.eye(2), "probe_labels": [0, 9]}
    sets.update({"gallery": np.eye(2), "gallery_labels": [0, 1]})
    with pytest.raises(ValueError, match=re.escape(message)):
        identify(**{**sets, **settings})
