import math
import re
from fractions import Fraction
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.exceptions import UndefinedMetricWarning
from sklearn.metrics import confusion_matrix, roc_curve

from keras_margin import retrieval
from keras_margin.verification import (
    all_pairs,
    equal_error_rate,
    evaluate,
    kfold_accuracy,
    pair_scores,
    tar_at_far,
    threshold_at_far,
)

checked = settings(deadline=None, derandomize=True, max_examples=80)


def exactly(message):
    return f"^{re.escape(message)}$"


def slow_rates(scores, genuine, threshold):
    """FAR and TAR at a threshold, as fractions."""
    accepted = [score >= threshold for score in scores]
    impostors = [a for a, g in zip(accepted, genuine, strict=True) if not g]
    genuines = [a for a, g in zip(accepted, genuine, strict=True) if g]
    return Fraction(sum(impostors), len(impostors)), Fraction(sum(genuines), len(genuines))


def slow_tar_at_far(scores, genuine, far):
    points = [slow_rates(scores, genuine, threshold) for threshold in [*scores, math.inf]]
    return float(max(tar for false, tar in points if float(false) <= far))


def slow_threshold_at_far(scores, genuine, far):
    allowed = [t for t in scores if float(slow_rates(scores, genuine, t)[0]) <= far]
    return min(allowed) if allowed else math.nextafter(max(scores), math.inf)


def slow_equal_error_rate(scores, genuine):
    closest = None
    for threshold in sorted(set(scores), reverse=True):
        far, tar = slow_rates(scores, genuine, threshold)
        frr = 1 - tar
        if closest is None or abs(far - frr) < closest[0]:
            closest = abs(far - frr), (far + frr) / 2
    return float(closest[1])


@st.composite
def scored_pairs(draw):
    """Scores on a coarse grid, so that ties abound, with both kinds of pairs."""
    genuine = draw(st.lists(st.booleans(), min_size=2, max_size=14).filter(lambda g: len({*g}) > 1))
    size = len(genuine)
    grid = draw(st.sampled_from([2, 5, 1000]))
    scores = draw(st.lists(st.integers(-grid, grid), min_size=size, max_size=size))
    return [score / grid for score in scores], genuine


@st.composite
def scored_pairs_and_far(draw):
    """As above, with a far that the pairs can show: on a step of the curve or anywhere."""
    scores, genuine = draw(scored_pairs())
    impostors = genuine.count(False)
    steps = [accepts / impostors for accepts in range(1, impostors + 1)]
    far = draw(st.sampled_from(steps) | st.floats(1 / impostors, 1.0))
    return scores, genuine, far


# TAR@FAR and its threshold


@checked
@given(scored_pairs_and_far())
def test_tar_at_far_equals_slow_reference(data):
    scores, genuine, far = data
    assert tar_at_far(scores, genuine, far) == slow_tar_at_far(scores, genuine, far)


@checked
@given(scored_pairs_and_far())
def test_threshold_at_far_is_the_smallest_score_within_far(data):
    scores, genuine, far = data
    assert threshold_at_far(scores, genuine, far) == slow_threshold_at_far(scores, genuine, far)


@checked
@given(scored_pairs_and_far(), st.sampled_from([np.float16, np.float32, np.float64]))
def test_threshold_gives_the_tar_when_applied(data, dtype):
    scores, genuine, far = data
    scores, genuine = np.asarray(scores, dtype), np.asarray(genuine)
    accepted = scores >= threshold_at_far(scores, genuine, far)
    assert accepted[~genuine].mean() <= far
    assert accepted[genuine].mean() == tar_at_far(scores, genuine, far)


@checked
@given(scored_pairs_and_far(), st.randoms(use_true_random=False))
def test_rates_do_not_depend_on_the_order_of_pairs(data, random):
    scores, genuine, far = data
    order = list(range(len(scores)))
    random.shuffle(order)
    mixed = [scores[i] for i in order], [genuine[i] for i in order]
    assert tar_at_far(*mixed, far) == tar_at_far(scores, genuine, far)
    assert threshold_at_far(*mixed, far) == threshold_at_far(scores, genuine, far)
    assert equal_error_rate(*mixed) == equal_error_rate(scores, genuine)


@checked
@given(scored_pairs_and_far(), st.sampled_from([lambda x: 8 * x - 3, np.exp, np.tan, np.cbrt]))
def test_rates_do_not_depend_on_a_monotone_map(data, rising):
    scores, genuine, far = data
    mapped = [float(rising(score)) for score in scores]
    assert tar_at_far(mapped, genuine, far) == tar_at_far(scores, genuine, far)
    assert equal_error_rate(mapped, genuine) == equal_error_rate(scores, genuine)
    threshold = threshold_at_far(scores, genuine, far)
    if threshold in scores:
        assert threshold_at_far(mapped, genuine, far) == float(rising(threshold))


def test_tar_at_far_never_takes_the_nearest_point():
    # The curve has FAR 0, 1/2 and 1. At 0.9 the nearest is 1; only 1/2 is within the bound.
    scores, genuine = [4, 3, 2, 1], [True, False, True, False]
    assert tar_at_far(scores, genuine, 0.9) == 1.0
    scores, genuine = [4, 3, 2, 1], [True, False, False, True]
    np.testing.assert_array_equal(tar_at_far(scores, genuine, [0.5, 0.9, 1.0]), [0.5, 0.5, 1.0])
    np.testing.assert_array_equal(threshold_at_far(scores, genuine, [0.5, 0.9, 1.0]), [3, 3, 1])


def test_far_of_exactly_one_impostor_is_not_lost_to_rounding():
    assert 1 / 49 * 49 < 1
    scores = np.arange(50.0)
    genuine = scores == 48
    assert tar_at_far(scores, genuine, 1 / 49) == 1.0
    assert threshold_at_far(scores, genuine, 1 / 49) == 48


def test_perfectly_separable_pairs():
    scores, genuine = np.array([0.9, 0.8, 0.7, 0.2, 0.1, 0.0]), np.arange(6) < 3
    np.testing.assert_array_equal(tar_at_far(scores, genuine, [0.4, 0.7, 1]), 1.0)
    np.testing.assert_array_equal(threshold_at_far(scores, genuine, [0.4, 0.7, 1]), [0.2, 0.1, 0])
    assert equal_error_rate(scores, genuine) == 0.0
    assert equal_error_rate(-scores, genuine) == 1.0


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_constant_scores(dtype):
    scores, genuine = np.full(6, 0.3, dtype), np.arange(6) < 3
    np.testing.assert_array_equal(tar_at_far(scores, genuine, [0.5, 1.0]), [0.0, 1.0])
    above, same = threshold_at_far(scores, genuine, [0.5, 1.0])
    assert above == np.nextafter(scores[0], dtype(1))
    assert same == scores[0]
    assert not np.any(scores >= above)
    assert equal_error_rate(scores, genuine) == 0.5


@pytest.mark.parametrize("metric", [tar_at_far, threshold_at_far])
def test_number_gives_number_and_sequence_gives_array(metric):
    scores, genuine = [0.9, 0.1], [1, 0]
    assert type(metric(scores, genuine, 1)) is float
    assert type(metric(scores, genuine, np.float32(1))) is float
    values = metric(scores, genuine, (1.0, 1.0, 1.0))
    assert values.shape == (3,) and values.dtype == np.float64
    assert metric(scores, genuine, []).shape == (0,)


@pytest.mark.parametrize("genuine", [[True, False], [1, 0], [1.0, 0.0], np.array([1, 0], np.uint8)])
def test_genuine_may_be_boolean_or_zero_and_one(genuine):
    assert tar_at_far([0.9, 0.1], genuine, 1.0) == 1.0


# Equal error rate


@checked
@given(scored_pairs())
def test_equal_error_rate_equals_slow_reference(data):
    expected = slow_equal_error_rate(*data)
    assert equal_error_rate(*data) == pytest.approx(expected, rel=1e-12)


def test_equal_error_rate_by_hand():
    # At 0.6: FAR 1/4, FRR 1/4. At every other score the two lie further apart.
    scores = [0.9, 0.8, 0.6, 0.4, 0.7, 0.3, 0.2, 0.1]
    assert equal_error_rate(scores, [1, 1, 1, 1, 0, 0, 0, 0]) == 0.25


def test_equal_error_rate_takes_the_larger_of_two_scores_equally_close():
    # At 4: FAR 0, FRR 1/4. At 3: FAR 1/2, FRR 1/4. At 2: FAR 1, FRR 0.
    assert equal_error_rate([4, 4, 4, 3, 3, 2, 2, 2], [1, 1, 1, 0, 0, 1, 0, 0]) == 1 / 8


# Undefined results


@pytest.mark.parametrize("metric", [tar_at_far, threshold_at_far])
@pytest.mark.parametrize(
    ("scores", "genuine", "counts"),
    [
        ([0.5, 0.4], [0, 0], "0 genuine and 2 impostor"),
        ([0.5, 0.4], [1, 1], "2 genuine and 0 impostor"),
        ([], [], "0 genuine and 0 impostor"),
    ],
)
def test_rates_without_both_kinds_warn_and_give_nan(metric, scores, genuine, counts):
    message = f"An operating point is undefined with {counts} pairs. The result is NaN."
    with pytest.warns(UndefinedMetricWarning, match=exactly(message)) as caught:
        value = metric(scores, genuine, 0.5)
    assert type(value) is float and math.isnan(value)
    assert caught[0].filename == __file__
    with pytest.warns(UndefinedMetricWarning, match=exactly(message)):
        np.testing.assert_array_equal(metric(scores, genuine, [0.5, 1.0]), [np.nan, np.nan])


@pytest.mark.parametrize("genuine", [[0, 0], [1, 1]])
def test_equal_error_rate_without_both_kinds_warns_and_gives_nan(genuine):
    message = (
        f"equal_error_rate is undefined with {sum(genuine)} genuine and {2 - sum(genuine)} "
        "impostor pairs. The result is NaN."
    )
    with pytest.warns(UndefinedMetricWarning, match=exactly(message)) as caught:
        value = equal_error_rate([0.5, 0.4], genuine)
    assert type(value) is float and math.isnan(value)
    assert caught[0].filename == __file__


@pytest.mark.parametrize("metric", [tar_at_far, threshold_at_far])
def test_far_too_small_for_the_impostors_warns_and_gives_nan(metric):
    scores, genuine = [4, 3, 2, 1], [1, 0, 0, 1]
    message = "far=[0.0, 0.49] is below 1 / 2 impostor pairs. The result is NaN."
    with pytest.warns(UndefinedMetricWarning, match=exactly(message)) as caught:
        values = metric(scores, genuine, [0.0, 0.5, 0.49])
    assert caught[0].filename == __file__
    np.testing.assert_array_equal(np.isnan(values), [True, False, True])
    message = "far=[0.1] is below 1 / 2 impostor pairs. The result is NaN."
    with pytest.warns(UndefinedMetricWarning, match=exactly(message)):
        assert math.isnan(metric(scores, genuine, 0.1))


# Scores of pairs


def slow_cosine(a, b):
    norms = math.sqrt(sum(x * x for x in a)) * math.sqrt(sum(y * y for y in b))
    return sum(x * y for x, y in zip(a, b, strict=True)) / norms if norms else 0.0


def test_pair_scores_equal_slow_reference():
    embeddings = np.random.default_rng(0).normal(size=(9, 5))
    embeddings[4] = 0
    pairs = [(0, 1), (1, 0), (3, 3), (4, 2), (8, 7), (4, 4)]
    expected = [slow_cosine(embeddings[i], embeddings[j]) for i, j in pairs]
    scores = pair_scores(embeddings, pairs)
    assert scores.dtype == np.float32
    np.testing.assert_allclose(scores, expected, rtol=1e-6, atol=1e-7)
    assert scores[2] == 1 and scores[3] == 0 and scores[5] == 0


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, np.int8, bool])
def test_pair_scores_take_any_real_dtype(dtype):
    scores = pair_scores(np.array([[1, 0], [1, 1]], dtype), [(0, 1)])
    np.testing.assert_allclose(scores, [1 / math.sqrt(2)], rtol=1e-6)


def test_equal_directions_score_exactly_one():
    embeddings = np.outer(np.geomspace(1e-200, 1e200, 41), [0.3, -0.7, 0.11])
    scores, _ = all_pairs(embeddings, np.zeros(41, int))
    np.testing.assert_array_equal(scores, 1)


def test_pair_scores_of_no_pairs():
    assert pair_scores(np.eye(3), np.zeros((0, 2), int)).shape == (0,)


def test_all_pairs_equal_slow_reference():
    rng = np.random.default_rng(1)
    embeddings, labels = rng.normal(size=(11, 4)), rng.integers(-2, 2, size=11)
    pairs = list(combinations(range(11), 2))
    scores, genuine = all_pairs(embeddings, labels)
    assert scores.dtype == np.float32 and genuine.dtype == bool
    expected = [slow_cosine(embeddings[i], embeddings[j]) for i, j in pairs]
    np.testing.assert_allclose(scores, expected, rtol=1e-6, atol=1e-7)
    np.testing.assert_array_equal(genuine, [labels[i] == labels[j] for i, j in pairs])
    np.testing.assert_array_equal(scores, pair_scores(embeddings, pairs))


@pytest.mark.parametrize("samples", [0, 1])
def test_all_pairs_of_too_few_samples(samples):
    scores, genuine = all_pairs(np.ones((samples, 3)), np.zeros(samples, int))
    assert scores.shape == genuine.shape == (0,)


@pytest.mark.parametrize("block_size", [1, 10, 50])
def test_blocks_do_not_change_the_scores(monkeypatch, block_size):
    rng = np.random.default_rng(2)
    embeddings, labels = rng.normal(size=(17, 6)), rng.integers(0, 5, size=17)
    pairs = rng.integers(0, 17, size=(40, 2))
    expected = *all_pairs(embeddings, labels), pair_scores(embeddings, pairs)
    monkeypatch.setattr(retrieval, "BLOCK_SIZE", block_size)
    actual = *all_pairs(embeddings, labels), pair_scores(embeddings, pairs)
    for got, wanted in zip(actual, expected, strict=True):
        np.testing.assert_array_equal(got, wanted)


# Other implementations


@pytest.mark.parametrize("seed", range(3))
def test_operating_points_are_those_of_scikit_learn(seed):
    """On scores with ties; the rates at the threshold are those of its confusion matrix."""
    rng = np.random.default_rng(seed)
    genuine = rng.random(300) < 0.3
    scores = np.round(rng.normal(size=300) + genuine, 1)
    fars, tars, thresholds = roc_curve(genuine, scores, drop_intermediate=False)
    for far in (0.05, 0.1, 0.5):
        tar, threshold = tar_at_far(scores, genuine, far), threshold_at_far(scores, genuine, far)
        assert tar == tars[fars <= far].max()
        assert threshold == thresholds[fars <= far].min()
        table = confusion_matrix(genuine, scores >= threshold)
        rejected, accepted = table / table.sum(axis=1, keepdims=True)
        assert rejected[1] <= far and accepted[1] == pytest.approx(tar)


def test_cosines_and_squared_distances_of_unit_vectors_are_one_protocol():
    rng = np.random.default_rng(4)
    people = np.repeat(np.arange(12), 4)
    embeddings = rng.normal(size=(12, 6))[people] + 0.8 * rng.normal(size=(48, 6))
    units = embeddings / np.linalg.norm(embeddings, axis=1, keepdims=True)
    pairs = rng.permutation(list(combinations(range(48), 2)))[:300]
    genuine = people[pairs[:, 0]] == people[pairs[:, 1]]
    distances = ((units[pairs[:, 0]] - units[pairs[:, 1]]) ** 2).sum(axis=1)  # 2 - 2 cosine
    cosines = pair_scores(embeddings, pairs)  # of any length: they are normalised inside
    accuracy = kfold_accuracy(cosines, genuine)
    assert 0.5 < accuracy[0] < 1
    assert accuracy == pytest.approx(kfold_accuracy(-distances, genuine))


# The whole report


def test_evaluate_gathers_the_metrics():
    rng = np.random.default_rng(5)
    labels = np.repeat(np.arange(6), 4)
    embeddings = rng.normal(size=(6, 5))[labels] + 0.6 * rng.normal(size=(24, 5))
    scores, genuine = all_pairs(embeddings, labels)
    report = evaluate(embeddings, labels, far=[1 / 3, 1e-2])
    assert report == {
        "eer": equal_error_rate(scores, genuine),
        "tar@far=0.333333": tar_at_far(scores, genuine, 1 / 3),
        "tar@far=0.01": tar_at_far(scores, genuine, 0.01),
        "rank1": retrieval.recall_at_k(embeddings, labels, 1),
        "genuine_pairs": 6 * 4 * 3 // 2,
        "impostor_pairs": 24 * 23 // 2 - 6 * 4 * 3 // 2,
    }
    assert [type(value) for value in report.values()] == [float] * 4 + [int] * 2
    assert 0 < report["eer"] < 0.5  # neither end: the case can tell


def test_evaluate_does_not_depend_on_the_order_or_length_of_samples():
    rng = np.random.default_rng(6)
    labels = np.repeat(np.arange(6), 4)
    embeddings = rng.normal(size=(6, 5))[labels] + 0.6 * rng.normal(size=(24, 5))
    order, lengths = rng.permutation(24), rng.uniform(0.1, 50, (24, 1))
    want = evaluate(embeddings, labels, far=0.1)
    assert evaluate((lengths * embeddings)[order], labels[order], far=0.1) == want


def test_evaluate_defaults():
    labels = np.repeat(np.arange(12), 4)
    report = evaluate(np.eye(12)[labels], labels)
    assert report == {
        "eer": 0.0,
        "tar@far=0.1": 1.0,
        "tar@far=0.01": 1.0,
        "tar@far=0.001": 1.0,
        "rank1": 1.0,
        "genuine_pairs": 72,
        "impostor_pairs": 1056,
    }


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.UndefinedMetricWarning")
@pytest.mark.parametrize("samples", [0, 1, 3])
def test_evaluate_without_genuine_pairs_is_nan(samples):
    report = evaluate(np.ones((samples, 2)), np.arange(samples), far=0.5)
    assert list(report) == ["eer", "tar@far=0.5", "rank1", "genuine_pairs", "impostor_pairs"]
    np.testing.assert_array_equal(list(report.values())[:3], np.nan)
    assert report["genuine_pairs"] == 0
    assert report["impostor_pairs"] == samples * (samples - 1) // 2


# Bad input


@pytest.mark.parametrize(
    ("scores", "genuine", "message"),
    [
        (
            [0.1, 0.2],
            [1],
            "`scores` and `genuine` must be vectors of one length. "
            "Received: scores.shape=(2,), genuine.shape=(1,)",
        ),
        (
            [[0.1], [0.2]],
            [[1], [0]],
            "`scores` and `genuine` must be vectors of one length. "
            "Received: scores.shape=(2, 1), genuine.shape=(2, 1)",
        ),
        (
            0.1,
            1,
            "`scores` and `genuine` must be vectors of one length. "
            "Received: scores.shape=(), genuine.shape=()",
        ),
        ([0.1, np.nan], [1, 0], "`scores` must be finite. Received: scores[1]=nan"),
        ([-np.inf, 0.1], [1, 0], "`scores` must be finite. Received: scores[0]=-inf"),
        ([1j, 0.1], [1, 0], "`scores` must be real numbers. Received: scores.dtype=complex128"),
        ([0.1, 0.2], [1, 2], "`genuine` must be boolean, or 0 and 1. Received: genuine[1]=2"),
        ([0.1, 0.2], [-1, 1], "`genuine` must be boolean, or 0 and 1. Received: genuine[0]=-1"),
        (
            [0.1, 0.2],
            ["1", "0"],
            "`genuine` must be boolean, or 0 and 1. Received: genuine.dtype=<U1",
        ),
    ],
)
@pytest.mark.parametrize(
    "metric",
    [
        lambda scores, genuine: tar_at_far(scores, genuine, 0.5),
        lambda scores, genuine: threshold_at_far(scores, genuine, 0.5),
        equal_error_rate,
    ],
    ids=["tar_at_far", "threshold_at_far", "equal_error_rate"],
)
def test_bad_scores(metric, scores, genuine, message):
    with pytest.raises(ValueError, match=exactly(message)):
        metric(scores, genuine)


@pytest.mark.parametrize(
    ("far", "message"),
    [
        (-0.1, "`far` must be in [0, 1]. Received: far=-0.1"),
        ([0.1, 1.5], "`far` must be in [0, 1]. Received: far=[0.1, 1.5]"),
        (math.nan, "`far` must be in [0, 1]. Received: far=nan"),
        (None, "`far` must be a number or a sequence of numbers. Received: far=None"),
        ("0.1", "`far` must be a number or a sequence of numbers. Received: far='0.1'"),
        ([[0.1]], "`far` must be a number or a sequence of numbers. Received: far=[[0.1]]"),
    ],
)
@pytest.mark.parametrize(
    "metric",
    [
        lambda far: tar_at_far([0.9, 0.1], [1, 0], far),
        lambda far: threshold_at_far([0.9, 0.1], [1, 0], far),
        lambda far: evaluate(np.eye(3), [0, 0, 1], far),
    ],
    ids=["tar_at_far", "threshold_at_far", "evaluate"],
)
def test_bad_far(metric, far, message):
    with pytest.raises(ValueError, match=exactly(message)):
        metric(far)


@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        (
            [(0, 1, 2)],
            "`pairs` must be integers of shape (pairs, 2). "
            "Received: pairs.shape=(1, 3), pairs.dtype=int64",
        ),
        (
            [(0.0, 1.0)],
            "`pairs` must be integers of shape (pairs, 2). "
            "Received: pairs.shape=(1, 2), pairs.dtype=float64",
        ),
        ([(0, 1), (0, 3)], "`pairs` must be indices in 0..2. Received: pairs[1]=[0, 3]"),
        ([(-1, 1)], "`pairs` must be indices in 0..2. Received: pairs[0]=[-1, 1]"),
    ],
)
def test_bad_pairs(pairs, message):
    with pytest.raises(ValueError, match=exactly(message)):
        pair_scores(np.eye(3), pairs)


@pytest.mark.parametrize("function", [all_pairs, evaluate])
def test_bad_labels(function):
    message = "`labels` must have one entry per row, shape (3,). Received: labels.shape=(2,)"
    with pytest.raises(ValueError, match=exactly(message)):
        function(np.eye(3), [0, 1])


@pytest.mark.parametrize(
    "function",
    [lambda rows: pair_scores(rows, [(0, 1)]), lambda rows: all_pairs(rows, [0, 0])],
    ids=["pair_scores", "all_pairs"],
)
def test_bad_embeddings(function):
    message = "`embeddings` must be finite. Received: embeddings[1] with a NaN or infinite value"
    with pytest.raises(ValueError, match=exactly(message)):
        function([[1.0, 0.0], [np.nan, 0.0]])


# Folds


def slow_kfold(scores, genuine, folds):
    """Every threshold between two scores of the other folds is tried, from the highest down."""
    accuracies = []
    edges = np.cumsum([0] + [len(part) for part in np.array_split(scores, folds)])
    for start, stop in zip(edges[:-1], edges[1:], strict=True):
        train = [i for i in range(len(scores)) if not start <= i < stop]
        values = sorted({scores[i] for i in train}, reverse=True)
        bounds = [np.inf, *values, -np.inf]
        middles = [(high + low) / 2 for high, low in zip(bounds[:-1], bounds[1:], strict=True)]
        right = [sum((scores[i] >= t) == genuine[i] for i in train) for t in middles]
        best = middles[right.index(max(right))]
        accuracies.append(np.mean([(scores[i] >= best) == genuine[i] for i in range(start, stop)]))
    return np.mean(accuracies), np.std(accuracies)


@pytest.mark.parametrize("folds", [2, 3, 10, 23])
def test_kfold_accuracy_equals_slow_reference(folds):
    rng = np.random.default_rng(folds)
    for _ in range(5):
        genuine = rng.random(23) < 0.5
        scores = np.round(rng.normal(size=23) + genuine, 1)  # with ties
        want = slow_kfold(scores.tolist(), genuine.tolist(), folds)
        assert kfold_accuracy(scores, genuine, folds) == pytest.approx(want, rel=1e-12)


def test_kfold_accuracy_keeps_the_order_of_the_list():
    """Two halves with thresholds far apart: each is judged by that of the other."""
    scores, genuine = [0.9, 0.8, 0.3, 0.2], [1, 0, 1, 0]
    assert kfold_accuracy(scores, genuine, folds=2) == (0.5, 0.0)
    assert kfold_accuracy([0.9, 0.2, 0.8, 0.1], [1, 0, 1, 0], folds=2) == (1.0, 0.0)


@pytest.mark.parametrize("folds", [1, 0, 5, -2])
def test_kfold_accuracy_refuses_folds_that_it_cannot_make(folds):
    message = f"`folds` must be from 2 to the number of pairs, 4. Received: folds={folds}"
    with pytest.raises(ValueError, match=exactly(message)):
        kfold_accuracy([0.1, 0.2, 0.3, 0.4], [0, 1, 0, 1], folds)


@pytest.mark.parametrize("folds", [2.0, True, "2"])
def test_kfold_accuracy_refuses_what_is_no_number_of_folds(folds):
    with pytest.raises(TypeError, match="`folds` must be an integer"):
        kfold_accuracy([0.1, 0.2, 0.3, 0.4], [0, 1, 0, 1], folds)


@pytest.mark.parametrize("genuine", [True, False])
def test_kfold_accuracy_of_one_kind_of_pair_warns_and_gives_nan(genuine):
    with pytest.warns(UndefinedMetricWarning, match="kfold_accuracy is undefined"):
        found = kfold_accuracy(np.linspace(0, 1, 20), np.full(20, genuine))
    assert np.isnan(found).all()


def test_rates_that_a_report_cannot_tell_apart_are_refused():
    with pytest.raises(ValueError, match="`far` must hold rates that differ"):
        evaluate(np.eye(3), [0, 0, 1], far=[0.1, 0.1000001])


@pytest.mark.parametrize("confidence", ["a", True, [0.9]])
def test_confidence_is_a_number(confidence):
    with pytest.raises(ValueError, match="`confidence` must be a number between 0 and 1"):
        evaluate(np.eye(3), [0, 0, 1], far=0.5, confidence=confidence)
