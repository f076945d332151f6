"""Operating points in two passes over blocks of pairs, against the functions of arrays."""

import subprocess
import sys
import textwrap

import numpy as np
import pytest

from keras_margin import retrieval, streamed_pairs, verification
from keras_margin.streamed_pairs import OperatingPoints, pair_blocks

FARS = np.array([0.5, 0.1, 0.03, 1e-2, 1e-3])


def random_set(samples, identities, digits, seed=0):
    """Embeddings of few different directions tie often: that many digits of each entry."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, identities, samples)
    embeddings = rng.normal(size=(identities, 3))[labels] + rng.normal(size=(samples, 3))
    return np.round(embeddings, digits), labels


def from_arrays(embeddings, labels, fars):
    scores, genuine = verification.all_pairs(embeddings, labels)
    rates = verification.tar_at_far(scores, genuine, fars)
    return [verification.equal_error_rate(scores, genuine), *rates]


@pytest.mark.parametrize("block_size", [1, 100, 2**22])
@pytest.mark.parametrize("bins", [1, 7, 2**16])
@pytest.mark.parametrize("digits", [0, 1, 9])
def test_equal_to_the_functions_of_arrays(monkeypatch, digits, bins, block_size):
    monkeypatch.setattr(retrieval, "BLOCK_SIZE", block_size)
    monkeypatch.setattr(streamed_pairs, "BINS", bins)
    for seed in range(3):
        embeddings, labels = random_set(60, 8, digits, seed)
        report = verification.evaluate(embeddings, labels, FARS)
        found = [report["eer"], *(report[f"tar@far={far:g}"] for far in FARS)]
        assert found == from_arrays(embeddings, labels, FARS)


@pytest.mark.parametrize("block_size", [100, 2**22])
@pytest.mark.parametrize("bins", [1, 7, 2**16])
@pytest.mark.parametrize("digits", [0, 1, 9])
def test_thresholds_are_those_of_arrays(monkeypatch, digits, bins, block_size):
    monkeypatch.setattr(retrieval, "BLOCK_SIZE", block_size)
    monkeypatch.setattr(streamed_pairs, "BINS", bins)
    fars = np.append(FARS, 1.0)
    for seed in range(3):
        embeddings, labels = random_set(60, 8, digits, seed)
        units = retrieval.unit_rows(embeddings, "embeddings")
        points = OperatingPoints(lambda units=units, labels=labels: pair_blocks(units, labels))
        wanted = verification.threshold_at_far(*verification.all_pairs(embeddings, labels), fars)
        np.testing.assert_array_equal(points.thresholds(fars), wanted)


def test_the_threshold_where_the_highest_scores_tie():
    """Two impostor pairs share the highest score: a bound that allows one of them allows none."""
    scores = np.array([0.9, 0.9, 0.7, 0.2], np.float32)
    points = OperatingPoints(lambda: iter([(scores, np.array([False, False, True, False]))]))
    above = np.nextafter(np.float32(0.9), np.float32(1))
    assert points.thresholds([1 / 3, 2 / 3, 1.0]).tolist() == [above, scores[2], scores[3]]


@pytest.mark.parametrize(
    ("genuine", "impostor", "want"),
    [
        ([0.9, 0.8], [0.1, 0.0], [2, 2]),  # apart
        ([0.5, 0.5], [0.5, 0.5], [0, 2]),  # one score
        ([1.0, 0.2], [0.7, 0.2], [1, 2]),
        ([-1.0], [1.0, -1.0], [0, 1]),  # both ends
        ([1.0000001, 0.3], [1.0, 0.4], [1, 2]),  # rounding passes 1
    ],
)
def test_hand_made_scores(genuine, impostor, want):
    """At a FAR of 1/2, which one impostor pair may use up, and of 1."""
    scores = np.array([*genuine, *impostor], np.float32)
    is_genuine = np.arange(len(scores)) < len(genuine)
    points = OperatingPoints(
        lambda: iter([(scores[:1], is_genuine[:1]), (scores[1:], is_genuine[1:])])
    )
    assert (points.genuines, points.impostors) == (len(genuine), len(impostor))
    assert points.accepts([0.5, 1.0]).tolist() == want
    accepts, rejects = points.equal_error()
    rate = (accepts / len(impostor) + rejects / len(genuine)) / 2
    assert rate == verification.equal_error_rate(scores, is_genuine)


def test_a_bound_is_kept_where_rounding_would_pass_it():
    """0.07 x 100 pairs is 7.000000000000001, and 0.29 x 100 is 28.999999999999996."""
    scores = np.linspace(0.0, 0.9, 101, dtype=np.float32)
    is_genuine = np.arange(101) == 50
    points = OperatingPoints(lambda: iter([(scores, is_genuine)]))
    fars = np.array([0.07, 0.29, 0.49, 0.5])
    want = verification.tar_at_far(scores, is_genuine, fars)
    assert (points.accepts(fars) / points.genuines).tolist() == want.tolist() == [0, 0, 0, 1]


@pytest.mark.long
def test_a_hundred_million_pairs(tmp_path):
    """14 200 embeddings of 512 dimensions at a FAR of 10^-6, in little memory."""
    code = """
        import numpy as np
        from keras_margin import verification

        def memory(name):
            lines = open("/proc/self/status").read().splitlines()
            return int(next(line for line in lines if line.startswith(name)).split()[1]) * 1024

        rng = np.random.default_rng(0)
        labels = np.arange(14_200) % 1420
        embeddings = rng.normal(size=(1420, 512))[labels] + 2.5 * rng.normal(size=(14_200, 512))
        embeddings = embeddings.astype("float32")
        verification.evaluate(embeddings[:500], labels[:500], far=0.1)
        before = memory("VmRSS")
        report = verification.evaluate(embeddings, labels, far=1e-6)
        print(memory("VmHWM") - before, report["tar@far=1e-06"], report["eer"])
        # The same from the scores themselves, of which the largest are enough.
        units = embeddings / np.linalg.norm(embeddings.astype("float64"), axis=1, keepdims=True)
        impostors, genuines, tail = 0, [], np.zeros(0, "float32")
        for i in range(0, len(units), 200):
            scores = (units[i : i + 200] @ units.T).astype("float32")
            pairs = np.arange(i, i + 200)[:, None] < np.arange(len(units))
            alike = labels[i : i + 200, None] == labels
            genuines.append(scores[pairs & alike])
            others = scores[pairs & ~alike]
            impostors += len(others)
            tail = np.sort(np.concatenate([tail, others]))[-200:]
        genuines = np.concatenate(genuines)
        bound = tail[-1 - int(1e-6 * impostors)]
        print((genuines > bound).mean())
    """
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(code)],
        env={"PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    extra, rate, eer, want = done.stdout.split()
    assert float(rate) == float(want)
    assert 0.01 < float(rate) < 0.9
    assert 0.0 < float(eer) < 0.2
    assert int(extra) < 2e9
