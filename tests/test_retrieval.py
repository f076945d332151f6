import re
import tracemalloc
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.exceptions import UndefinedMetricWarning
from sklearn.neighbors import NearestNeighbors

from keras_margin import retrieval
from keras_margin.retrieval import recall_at_k

checked = settings(deadline=None, derandomize=True, max_examples=80)

# Small whole numbers: many equal directions, and cosines that differ differ by far more than the
# rounding to float32.
rows = st.lists(st.integers(-3, 3), min_size=3, max_size=3)
samples = st.lists(st.tuples(rows, st.integers(0, 2)), min_size=1, max_size=9)


def exactly(message):
    return f"^{re.escape(message)}$"


def slow_cosine_order(a, b):
    """A number that orders pairs as their cosine does: the signed square, without rounding."""
    dot = sum(x * y for x, y in zip(a, b, strict=True))
    norms = sum(x * x for x in a) * sum(y * y for y in b)
    return Fraction(dot * abs(dot), norms) if norms else Fraction(0)


def slow_recall(queries, labels, k, references=None, reference_labels=None):
    """Recall@k by sorting the neighbours of each query in turn; None where undefined."""
    hits = []
    for i, (query, label) in enumerate(zip(queries, labels, strict=True)):
        if references is None:
            others = [(queries[j], labels[j], j) for j in range(len(queries)) if j != i]
        else:
            others = [(references[j], reference_labels[j], j) for j in range(len(references))]
        others.sort(key=lambda item: (-slow_cosine_order(query, item[0]), item[2]))
        ranked = [item[1] for item in others]
        if label in ranked:
            hits.append(label in ranked[:k])
    return sum(hits) / len(hits) if hits else None


def check_equal(actual, expected):
    np.testing.assert_allclose(actual, expected, rtol=1e-12)


@checked
@given(samples, st.integers(1, 12))
def test_leave_one_out_equals_slow_reference(data, k):
    embeddings, labels = [row for row, _ in data], [label for _, label in data]
    expected = slow_recall(embeddings, labels, k)
    if expected is None:
        with pytest.warns(UndefinedMetricWarning):
            assert np.isnan(recall_at_k(embeddings, labels, k))
    else:
        check_equal(recall_at_k(embeddings, labels, k), expected)


@checked
@given(samples, samples, st.integers(1, 12))
def test_reference_set_equals_slow_reference(data, others, k):
    embeddings, labels = [row for row, _ in data], [label for _, label in data]
    reference, reference_labels = [row for row, _ in others], [label for _, label in others]
    expected = slow_recall(embeddings, labels, k, reference, reference_labels)
    if expected is None:
        with pytest.warns(UndefinedMetricWarning):
            assert np.isnan(recall_at_k(embeddings, labels, k, reference, reference_labels))
    else:
        actual = recall_at_k(embeddings, labels, k, reference, reference_labels)
        check_equal(actual, expected)


@checked
@given(st.data())
def test_order_and_length_of_samples_do_not_matter(data):
    # Real numbers: without ties the index must play no part.
    seed = data.draw(st.integers(0, 10**6))
    rng = np.random.default_rng(seed)
    embeddings, labels = rng.normal(size=(12, 4)), np.arange(12) % 4
    order, lengths = rng.permutation(12), rng.uniform(0.1, 50, size=(12, 1))
    before = recall_at_k(embeddings, labels, [1, 2, 3])
    after = recall_at_k((embeddings * lengths)[order], labels[order], [1, 2, 3])
    check_equal(after, before)


@pytest.mark.parametrize("k", [1, 3, 10])
def test_recall_is_that_of_the_neighbours_of_scikit_learn(k):
    rng = np.random.default_rng(k)
    embeddings, labels = rng.normal(size=(60, 8)), np.arange(60) % 12
    nearest = NearestNeighbors(n_neighbors=k, metric="cosine").fit(embeddings)
    found = nearest.kneighbors(return_distance=False)  # without the query itself
    want = (labels[found] == labels[:, None]).any(axis=1).mean()
    check_equal(recall_at_k(embeddings, labels, k), want)


def test_hand_made_ranking():
    # The query of label 1 has the neighbours 0, 1, 1, 2, 2 in this order.
    angles = np.array([0.1, 0.2, 0.3, 0.4, 0.5])
    reference = np.stack([np.cos(angles), np.sin(angles)], axis=1)
    recalls = recall_at_k([[1.0, 0.0]], [1], [1, 2, 5], reference, [0, 1, 1, 2, 2])
    np.testing.assert_array_equal(recalls, [0, 1, 1])


def test_equal_cosines_are_ranked_by_index():
    # All in one direction, of lengths whose rounded unit vectors need not be the same.
    reference = np.outer(np.arange(1, 8), [1.0, 1.0, 1.0])
    recalls = recall_at_k([[1, 1, 1]], [5], [1, 4, 5, 6, 7], reference, [0, 0, 0, 0, 5, 5, 0])
    np.testing.assert_array_equal(recalls, [0, 0, 1, 1, 1])


def test_query_without_relevant_item_is_left_out():
    embeddings = [[1.0, 0.0], [1.0, 0.1], [0.0, 1.0]]
    assert recall_at_k(embeddings, [0, 0, 9], 1) == 1.0


def test_query_itself_counts_only_in_a_reference_set():
    embeddings, labels = [[1.0, 0.0], [0.0, 1.0], [1.0, 0.1], [0.1, 1.0]], [0, 0, 1, 1]
    assert recall_at_k(embeddings, labels, 1) == 0.0
    assert recall_at_k(embeddings, labels, 1, embeddings, labels) == 1.0


def test_k_beyond_the_neighbours_means_all_of_them():
    embeddings, labels = [[1.0, 0.0], [0.0, 1.0], [1.0, 0.1], [0.1, 1.0]], [0, 0, 1, 1]
    assert recall_at_k(embeddings, labels, 1000) == 1.0


def test_number_gives_number_and_sequence_gives_array():
    embeddings, labels = [[1.0, 0.0], [1.0, 0.1]], [0, 0]
    assert type(recall_at_k(embeddings, labels, 1)) is float
    assert type(recall_at_k(embeddings, labels, np.int64(1))) is float
    recalls = recall_at_k(embeddings, labels, (1, 5))
    assert recalls.dtype == np.float64
    assert recalls.shape == (2,)


@pytest.mark.parametrize(
    "labels",
    [
        np.array([0, 0, 1, 1], np.uint8),
        np.array([-7, -7, 2**62, 2**62]),
        np.array([[3], [3], [4], [4]]),
        np.array([85741.0, 85741.0, 2.0, 2.0], np.float32),
    ],
)
def test_any_integer_label(labels):
    embeddings = [[1.0, 0.0], [0.8, 0.3], [0.9, 0.1], [0.0, 1.0]]
    np.testing.assert_array_equal(recall_at_k(embeddings, labels, [1, 2, 3]), [0.0, 0.75, 1.0])


def test_length_of_embeddings_may_be_extreme():
    embeddings = np.array([[1.0, 0.0], [1.0, 0.1], [0.0, 1.0], [0.1, 1.0]])
    lengths = np.array([[1e-300], [1e300], [1e-30], [1e4]])
    assert recall_at_k(embeddings * lengths, [0, 0, 1, 1], 1) == 1.0


@pytest.mark.parametrize("block_size", [1, 7, 40])
@pytest.mark.parametrize("leave_one_out", [True, False])
def test_blocks_do_not_change_the_result(monkeypatch, block_size, leave_one_out):
    rng = np.random.default_rng(3)
    embeddings, labels = rng.integers(-2, 3, size=(31, 3)), rng.integers(0, 9, size=31)
    reference = () if leave_one_out else (embeddings[::-1], labels[::-1])
    expected = recall_at_k(embeddings, labels, [1, 2, 5], *reference)
    monkeypatch.setattr(retrieval, "BLOCK_SIZE", block_size)
    np.testing.assert_array_equal(recall_at_k(embeddings, labels, [1, 2, 5], *reference), expected)


def test_no_square_matrix_is_held(monkeypatch):
    monkeypatch.setattr(retrieval, "BLOCK_SIZE", 2**16)
    embeddings = np.random.default_rng(0).normal(size=(2000, 4))
    labels = np.arange(2000) % 100
    tracemalloc.start()
    recall_at_k(embeddings, labels, 1)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2000 * 2000  # one byte an entry is already more


@pytest.mark.parametrize(
    ("embeddings", "labels", "reference"),
    [
        ([[1.0, 0.0], [0.0, 1.0]], [0, 1], ()),
        ([[1.0, 0.0]], [0], ()),
        (np.zeros((0, 2)), np.zeros(0, int), ()),
        ([[1.0, 0.0]], [0], ([[1.0, 0.0]], [3])),
        ([[1.0, 0.0]], [0], (np.zeros((0, 2)), np.zeros(0, int))),
    ],
    ids=["no partner", "one sample", "no samples", "not in the reference", "no reference"],
)
def test_undefined_warns_and_gives_nan(embeddings, labels, reference):
    message = (
        "recall_at_k is undefined: no query has a neighbour with its label. The result is NaN."
    )
    with pytest.warns(UndefinedMetricWarning, match=exactly(message)) as caught:
        recall = recall_at_k(embeddings, labels, 1, *reference)
    assert np.isnan(recall) and type(recall) is float
    assert caught[0].filename == __file__
    with pytest.warns(UndefinedMetricWarning, match=exactly(message)):
        np.testing.assert_array_equal(recall_at_k(embeddings, labels, [1, 2], *reference), np.nan)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"embeddings": [1.0, 2.0]},
            "`embeddings` must be a real matrix (samples, dim). "
            "Received: embeddings.shape=(2,), embeddings.dtype=float64",
        ),
        (
            {"embeddings": [[1j], [1.0]]},
            "`embeddings` must be a real matrix (samples, dim). "
            "Received: embeddings.shape=(2, 1), embeddings.dtype=complex128",
        ),
        (
            {"embeddings": [[1.0, 0.0], [0.0, np.nan]]},
            "`embeddings` must be finite. Received: embeddings[1] with a NaN or infinite value",
        ),
        (
            {"labels": [0, 0, 0]},
            "`labels` must have one entry per row, shape (2,). Received: labels.shape=(3,)",
        ),
        (
            {"labels": ["a", "b"]},
            "`labels` must be integers. Received: labels.dtype=<U1",
        ),
        ({"labels": [1.0, 0.5]}, "`labels` must be integers. Received: labels[1]=0.5"),
        ({"labels": [np.nan, 0.0]}, "`labels` must be integers. Received: labels[0]=nan"),
        ({"k": 0}, "`k` must be an integer of at least 1, or a sequence of them. Received: k=0"),
        (
            {"k": 1.0},
            "`k` must be an integer of at least 1, or a sequence of them. Received: k=1.0",
        ),
        (
            {"k": [1, -2]},
            "`k` must be an integer of at least 1, or a sequence of them. Received: k=[1, -2]",
        ),
        (
            {"k": True},
            "`k` must be an integer of at least 1, or a sequence of them. Received: k=True",
        ),
        (
            {"reference": [[1.0, 0.0]]},
            "`reference` and `reference_labels` must be given together. Received: "
            "reference is None: False, reference_labels is None: True",
        ),
        (
            {"reference_labels": [0]},
            "`reference` and `reference_labels` must be given together. Received: "
            "reference is None: True, reference_labels is None: False",
        ),
        (
            {"reference": [[1.0]], "reference_labels": [0]},
            "`reference` must have as many columns as `embeddings`. Received: "
            "reference.shape=(1, 1), embeddings.shape=(2, 2)",
        ),
        (
            {"reference": [[1.0, 0.0]], "reference_labels": [0, 1]},
            "`reference_labels` must have one entry per row, shape (1,). "
            "Received: reference_labels.shape=(2,)",
        ),
    ],
)
def test_bad_input(arguments, message):
    valid = {"embeddings": [[1.0, 0.0], [0.0, 1.0]], "labels": [0, 0], "k": 1}
    with pytest.raises(ValueError, match=exactly(message)):
        recall_at_k(**{**valid, **arguments})


# R-precision and MAP@R


def slow_at_r(queries, labels):
    """R-precision and MAP@R by sorting the neighbours of each query in turn."""
    precisions, averages = [], []
    for i, query in enumerate(queries):
        others = [j for j in range(len(queries)) if j != i]
        others.sort(key=lambda j: (-slow_cosine_order(query, queries[j]), j))
        ranked = [labels[j] == labels[i] for j in others]
        number = sum(ranked)
        if number:
            hits = ranked[:number]
            precisions.append(Fraction(sum(hits), number))
            at = [Fraction(sum(hits[: n + 1]), n + 1) * hit for n, hit in enumerate(hits)]
            averages.append(sum(at) / number)
    if not precisions:
        return None
    return [float(sum(each) / len(each)) for each in (precisions, averages)]


@checked
@given(samples)
def test_r_precision_and_map_at_r_equal_slow_reference(data):
    embeddings, labels = [row for row, _ in data], [label for _, label in data]
    want = slow_at_r(embeddings, labels)
    functions = retrieval.r_precision, retrieval.map_at_r
    if want is None:
        for function in functions:
            with pytest.warns(UndefinedMetricWarning, match=function.__name__):
                assert np.isnan(function(embeddings, labels))
    else:
        check_equal([function(embeddings, labels) for function in functions], want)


def test_hand_made_ranking_at_r():
    """Query of label 1, neighbours 0, 1, 1, 2, 2: R = 2, of which the second is found."""
    angles = np.array([0.1, 0.2, 0.3, 0.4, 0.5])
    reference, kinds = np.stack([np.cos(angles), np.sin(angles)], axis=1), [0, 1, 1, 2, 2]
    sets = [[1.0, 0.0]], [1], reference, kinds
    assert retrieval.map_at_r(*sets) == 0.25
    assert retrieval.r_precision(*sets) == 0.5
    assert recall_at_k([[1.0, 0.0]], [1], 1, reference, kinds) == 0.0


@pytest.mark.parametrize("function", [retrieval.r_precision, retrieval.map_at_r])
def test_at_r_does_not_depend_on_the_blocks(monkeypatch, function):
    rng = np.random.default_rng(0)
    embeddings, labels = rng.integers(-2, 3, (40, 3)), rng.integers(0, 5, 40)
    want = function(embeddings, labels)
    monkeypatch.setattr(retrieval, "BLOCK_SIZE", 1)
    assert function(embeddings, labels) == pytest.approx(want, rel=1e-12)
