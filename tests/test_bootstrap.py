"""keras_margin/bootstrap.py against sets that hold each identity as often as it was drawn."""

import numpy as np
import pytest
from sklearn.exceptions import UndefinedMetricWarning

from keras_margin import bootstrap, retrieval, verification
from keras_margin.bootstrap import Resamples, interval
from keras_margin.streamed_pairs import OperatingPoints, pair_blocks


def clouds(identities=12, each=4, dim=6, noise=0.9, seed=0):
    rng = np.random.default_rng(seed)
    labels = np.repeat(np.arange(identities), each)
    centers = rng.normal(size=(identities, dim))
    return centers[labels] + noise * rng.normal(size=(len(labels), dim)), 10 - 3 * labels


def rates(embeddings, labels, fars, block_size=None, seed=0):
    units = retrieval.unit_rows(embeddings, "embeddings")
    points = OperatingPoints(lambda: pair_blocks(units, labels))
    resamples = Resamples(labels, seed)
    blocks = retrieval.row_blocks(len(units), len(units), block_size)
    return resamples, resamples.rates(units, points, fars, blocks)


def slow_resample(embeddings, labels, times):
    """Scores and flags of the drawn set: every copy of an identity is another person, but copies
    of one identity are not compared."""
    names = np.unique(labels)
    copies = [(name, copy) for name, n in zip(names, times, strict=True) for copy in range(int(n))]
    rows = [
        (i, name, copy) for name, copy in copies for i in np.flatnonzero(labels == name)
    ]  # (sample, identity, copy)
    scores, genuine = [], []
    for a in range(len(rows)):
        for b in range(a + 1, len(rows)):
            (i, one, first), (j, other, second) = rows[a], rows[b]
            if one != other or first == second:
                scores.append(verification.pair_scores(embeddings, [(i, j)])[0])
                genuine.append(one == other)
    return np.array(scores), np.array(genuine)


@pytest.mark.parametrize("block_size", [None, 7])
@pytest.mark.parametrize("digits", [1, 6])
def test_equal_to_the_drawn_set(monkeypatch, digits, block_size):
    monkeypatch.setattr(bootstrap, "RESAMPLES", 6)
    embeddings, labels = clouds(identities=6, each=3)
    embeddings = np.round(embeddings, digits)
    fars = [0.3, 0.1, 0.05]
    resamples, found = rates(embeddings, labels, fars, block_size)
    for r, times in enumerate(resamples._drawn):
        scores, genuine = slow_resample(embeddings, labels, times)
        eer, *tars = found[:, r]
        assert eer == pytest.approx(verification.equal_error_rate(scores, genuine), abs=1e-12)
        np.testing.assert_allclose(tars, verification.tar_at_far(scores, genuine, fars))


def test_identities_are_drawn_with_replacement(monkeypatch):
    monkeypatch.setattr(bootstrap, "RESAMPLES", 2000)
    drawn = Resamples(np.repeat([5, 6, 9], 4), seed=3)._drawn
    assert set(drawn.sum(axis=1)) == {3.0}
    np.testing.assert_allclose(drawn.mean(axis=0), 1.0, atol=0.06)
    np.testing.assert_allclose(drawn.var(axis=0), 2 / 3, atol=0.06)  # binomial: n p (1 - p)


def test_means_count_a_sample_as_often_as_its_identity(monkeypatch):
    monkeypatch.setattr(bootstrap, "RESAMPLES", 50)
    resamples = Resamples(np.array([4, 4, 7, 9]), seed=0)
    means = resamples.means(np.array([0, 2, 3]), np.array([1.0, 0.0, 0.5]))
    drawn = resamples._drawn
    np.testing.assert_allclose(means, (drawn[:, 0] + 0.5 * drawn[:, 2]) / drawn.sum(axis=1))


def test_intervals_of_a_report(monkeypatch):
    monkeypatch.setattr(bootstrap, "RESAMPLES", 100)
    embeddings, labels = clouds()
    plain = verification.evaluate(embeddings, labels, far=[0.1, 0.05])
    report = verification.evaluate(embeddings, labels, far=[0.1, 0.05], confidence=0.9, seed=1)
    assert plain.items() <= report.items()
    for name in ("eer", "tar@far=0.1", "tar@far=0.05", "rank1"):
        low, high = report[f"{name}_interval"]
        assert 0 <= low < report[name] < high <= 1
    same = verification.evaluate(
        embeddings, labels, far=[0.1, 0.05], confidence=0.9, seed=1, block_size=5
    )
    assert same == report
    wider = verification.evaluate(embeddings, labels, far=0.1, confidence=0.99, seed=1)
    assert wider["eer_interval"][0] < report["eer_interval"][0]


def test_scores_of_a_collapsed_encoder_are_told_apart(monkeypatch):
    """All cosines within 10^-5 of 1: finer than the bins in which pairs are counted first."""
    monkeypatch.setattr(bootstrap, "RESAMPLES", 50)
    embeddings, labels = clouds(identities=20)
    collapsed = np.concatenate([1e-3 * embeddings, np.ones((len(embeddings), 1))], axis=1)
    report = verification.evaluate(collapsed, labels, far=0.1, confidence=0.95, seed=0)
    low, high = report["eer_interval"]
    assert low < report["eer"] < high < 0.5


@pytest.mark.parametrize("labels", [[0, 0, 0], [0, 1, 2], [0], []])
@pytest.mark.filterwarnings("ignore::sklearn.exceptions.UndefinedMetricWarning")
def test_without_both_kinds_of_pairs_everything_is_nan(labels):
    report = verification.evaluate(
        np.ones((len(labels), 2)), np.array(labels, int), far=0.5, confidence=0.9, seed=0
    )
    assert np.isnan(report["eer_interval"]).all()
    assert np.isnan(report["tar@far=0.5_interval"]).all()


@pytest.mark.filterwarnings("ignore:The interval of tar@far")
def test_an_interval_of_too_few_identities_is_nan_with_a_warning():
    """Two identities: half of the resamples hold one of them alone."""
    with pytest.warns(UndefinedMetricWarning, match="The interval of eer is undefined"):
        report = verification.evaluate(np.eye(4), [0, 0, 1, 1], far=1.0, confidence=0.9, seed=0)
    assert np.isnan(report["eer_interval"]).all()


def test_an_interval_spans_the_middle():
    values = np.append(np.arange(101.0), np.nan)
    assert interval("x", values, 0.9) == pytest.approx((5.0, 95.0))


@pytest.mark.parametrize("confidence", [0, 1, -0.5, 95])
def test_confidence_is_a_share(confidence):
    with pytest.raises(ValueError, match=f"Received: confidence={confidence}"):
        verification.evaluate(np.eye(2), [0, 1], confidence=confidence)


@pytest.mark.long
def test_intervals_hold_what_they_promise(monkeypatch):
    """Of sets of 50 people about 95 % have the rates of the whole population in their interval."""
    monkeypatch.setattr(bootstrap, "RESAMPLES", 200)
    rng = np.random.default_rng(0)
    labels = np.repeat(np.arange(1000), 4)
    population = rng.normal(size=(1000, 8))[labels] + 0.8 * rng.normal(size=(4000, 8))
    truth = verification.evaluate(population, labels, far=0.01)
    names, tries = ("eer", "tar@far=0.01", "rank1"), 200
    held = dict.fromkeys(names[:2], 0)
    for seed in range(tries):
        people = rng.choice(1000, 50, replace=False)
        chosen = np.isin(labels, people)
        report = verification.evaluate(
            population[chosen], labels[chosen], far=0.01, confidence=0.95, seed=seed
        )
        for name in held:
            low, high = report[f"{name}_interval"]
            held[name] += low <= truth[name] <= high
    print(held)
    assert all(0.88 * tries <= count for count in held.values())
