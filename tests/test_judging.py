"""What is said of a test set, against the functions of arrays and pairs that are counted here."""

import itertools
import pickle
import re

import numpy as np
import pytest

from keras_margin import judging, retrieval, verification
from keras_margin.judging import TestSet, judge, pairs_in_order, read_test_set

FARS = [0.5, 0.1, 0.02]


def random_set(identities=6, each=5, seed=0):
    rng = np.random.default_rng(seed)
    labels = rng.permutation(np.repeat(np.arange(identities), each))
    embeddings = rng.normal(size=(identities, 4))[labels] + 0.7 * rng.normal(size=(len(labels), 4))
    return embeddings.astype("float32"), labels


def identities(labels):
    return TestSet("identity folder", [""] * len(labels), labels=labels)


def pair_list(labels, count=60, folds=10, seed=1):
    pairs = np.random.default_rng(seed).integers(0, len(labels), (count, 2))
    genuine = labels[pairs[:, 0]] == labels[pairs[:, 1]]
    return TestSet("list of pairs", [""] * len(labels), pairs=pairs, genuine=genuine, folds=folds)


@pytest.mark.parametrize("block_size", [1, 50, 2**22])
def test_identities_are_judged_as_by_the_functions_of_arrays(monkeypatch, block_size):
    monkeypatch.setattr(retrieval, "BLOCK_SIZE", block_size)
    embeddings, labels = random_set()
    judged = judge(embeddings, identities(labels), FARS, seed=3)
    wanted = verification.evaluate(embeddings, labels, FARS, confidence=0.95, seed=3)
    assert (judged.genuine_pairs, judged.impostor_pairs) == (60, 375)
    assert judged.figures == {
        **{name: value for name, value in wanted.items() if not name.endswith("_pairs")},
        "r_precision": retrieval.r_precision(embeddings, labels),
        "map_at_r": retrieval.map_at_r(embeddings, labels),
    }
    scores, genuine = verification.all_pairs(embeddings, labels)
    thresholds = verification.threshold_at_far(scores, genuine, FARS)
    assert judged.thresholds == dict(zip(FARS, thresholds, strict=True))
    order = np.lexsort([scores, ~genuine])
    np.testing.assert_array_equal(judged.genuine, genuine[order])
    drawn = np.lexsort([judged.scores, ~judged.genuine])
    np.testing.assert_array_equal(judged.scores[drawn], scores[order])


def test_a_list_is_judged_as_it_is_published():
    embeddings, labels = random_set()
    listed = pair_list(labels)
    judged = judge(embeddings, listed, FARS[:2])
    scores = verification.pair_scores(embeddings, listed.pairs)
    mean, deviation = verification.kfold_accuracy(scores, listed.genuine, 10)
    tars = verification.tar_at_far(scores, listed.genuine, FARS[:2])
    assert judged.figures == {
        "accuracy": mean,
        "accuracy_std": deviation,
        "eer": verification.equal_error_rate(scores, listed.genuine),
        "tar@far=0.5": tars[0],
        "tar@far=0.1": tars[1],
    }
    thresholds = verification.threshold_at_far(scores, listed.genuine, FARS[:2])
    assert list(judged.thresholds.values()) == thresholds.tolist()
    assert judged.genuine_pairs == np.count_nonzero(listed.genuine)
    assert judged.genuine_pairs + judged.impostor_pairs == 60


@pytest.mark.parametrize("kind", ["identities", "list"])
@pytest.mark.parametrize("block_size", [1, 70, 2**22])
def test_the_hardest_pairs(monkeypatch, kind, block_size):
    monkeypatch.setattr(retrieval, "BLOCK_SIZE", block_size)
    embeddings, labels = random_set()
    test_set = identities(labels) if kind == "identities" else pair_list(labels)
    units = embeddings / np.linalg.norm(embeddings, axis=1, keepdims=True)
    pairs = test_set.pairs
    if pairs is None:
        pairs = np.array(list(itertools.combinations(range(len(labels)), 2)))
    scored = [(float(units[i] @ units[j]), i, j) for i, j in pairs.tolist()]
    genuine = [pair for pair in scored if labels[pair[1]] == labels[pair[2]]]
    impostor = [pair for pair in scored if labels[pair[1]] != labels[pair[2]]]
    wanted = {"genuine": sorted(genuine)[:6], "impostor": sorted(impostor)[:-7:-1]}
    found = judge(embeddings, test_set, [0.5]).hardest
    for name, rows in wanted.items():
        if kind == "identities":  # a list may hold a pair twice, and either first
            assert [row[1:] for row in found[name]] == [row[1:] for row in rows]
        np.testing.assert_allclose([row[0] for row in found[name]], [r[0] for r in rows], atol=1e-6)
        for score, i, j in found[name]:
            assert score == pytest.approx(units[i] @ units[j], abs=1e-6)


@pytest.mark.filterwarnings("ignore:The interval")  # two identities: many draws have but one
def test_the_hardest_of_pairs_that_tie_are_the_first():
    embeddings = np.ones((8, 2))
    found = judge(embeddings, identities(np.arange(8) // 4), [0.5]).hardest
    assert [pair[1:] for pair in found["genuine"]] == list(itertools.combinations(range(4), 2))
    assert [pair[1:] for pair in found["impostor"]] == [
        (0, 4),
        (0, 5),
        (0, 6),
        (0, 7),
        (1, 4),
        (1, 5),
    ]


@pytest.mark.parametrize("samples", [2, 3, 10])
def test_places_of_all_pairs(samples):
    wanted = np.stack(np.triu_indices(samples, 1), axis=-1)
    np.testing.assert_array_equal(pairs_in_order(np.arange(len(wanted)), samples), wanted)


def test_pictures_of_many_pairs_hold_a_part_of_them(monkeypatch):
    monkeypatch.setattr(judging, "DRAWN", 100)
    embeddings, labels = random_set(identities=20, each=5)
    judged, again, other = (
        judge(embeddings, identities(labels), [0.1], seed=seed) for seed in (0, 0, 1)
    )
    assert (judged.genuine_pairs, judged.impostor_pairs) == (200, 4750)
    for kind in (judged.genuine, ~judged.genuine):
        assert 60 < np.count_nonzero(kind) < 140  # 100, within four standard deviations
    np.testing.assert_array_equal(judged.scores, again.scores)
    assert not np.array_equal(judged.scores, other.scores)
    assert judged.figures == again.figures
    assert judged.figures["eer"] == other.figures["eer"]  # of all pairs
    scores, genuine = verification.all_pairs(embeddings, labels)
    assert set(judged.scores[judged.genuine]) <= set(scores[genuine])
    assert set(judged.scores[~judged.genuine]) <= set(scores[~genuine])


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.UndefinedMetricWarning")
@pytest.mark.parametrize(("labels", "kind"), [([0, 1, 2], "genuine"), ([4, 4, 4], "impostor")])
def test_what_one_kind_of_pairs_leaves_undefined_is_nan(labels, kind):
    judged = judge(np.eye(3), identities(np.array(labels)), [0.5])
    assert np.isnan([judged.figures["eer"], judged.figures["tar@far=0.5"]]).all()
    assert np.isnan(judged.thresholds[0.5])
    assert np.isnan(judged.figures["map_at_r"]) == (kind == "genuine")
    assert judged.hardest[kind] == []
    assert len(judged.scores) == 3


@pytest.mark.parametrize("kind", ["identities", "list"])
def test_a_rate_that_the_pairs_cannot_show_is_nan(kind):
    embeddings, labels = random_set()
    test_set = identities(labels) if kind == "identities" else pair_list(labels)
    with pytest.warns(UserWarning, match="below 1 / "):
        judged = judge(embeddings, test_set, [0.5, 1e-3], intervals=False)
    assert np.isfinite(judged.thresholds[0.5])
    assert np.isnan([judged.thresholds[1e-3], judged.figures["tar@far=0.001"]]).all()


# Reading


def written(folder, *files):
    for file in files:
        (folder / file).parent.mkdir(exist_ok=True, parents=True)
        (folder / file).touch()
    return folder


LIST = "{}\nAnn 1 2\nAnn 1 Bo 1\nAnn 2 1\nBo 1 Ann 2\n"


def test_a_folder_is_a_set_of_identities(tmp_path):
    found = read_test_set(written(tmp_path, "Ann/1.png", "Ann/2.png", "Bo/1.png"))
    assert found.kind == "identity folder"
    assert [path[-9:] for path in found.images] == ["Ann/1.png", "Ann/2.png", "/Bo/1.png"]
    assert found.labels.tolist() == [0, 0, 1]
    assert (found.pairs, found.genuine, found.folds) == (None, None, None)


@pytest.mark.parametrize(("folds", "wanted"), [(None, 2), (3, 3)])
def test_a_list_of_pairs_in_a_folder(tmp_path, folds, wanted):
    written(tmp_path, "Ann/Ann_0001.jpg", "Ann/Ann_0002.jpg", "Bo/Bo_0001.jpg")
    (tmp_path / "pairs.txt").write_text(LIST.format("2 1"))
    found = read_test_set(tmp_path, tmp_path / "pairs.txt", folds)
    assert (found.kind, found.folds, found.labels) == ("list of pairs", wanted, None)
    assert found.pairs.tolist() == [[0, 1], [0, 2], [1, 0], [2, 1]]


@pytest.mark.parametrize(("folds", "wanted"), [(None, 10), (4, 4)])
def test_a_verification_set(tmp_path, folds, wanted):
    images = [b"\x89PNG\r\n\x1a\n" + bytes([i]) for i in range(24)]
    (tmp_path / "some.bin").write_bytes(pickle.dumps((images, [True, False] * 6)))
    found = read_test_set(tmp_path / "some.bin", folds=folds)
    assert (found.kind, found.images, found.folds) == ("verification set", images, wanted)


def test_options_without_a_meaning_are_refused(tmp_path):
    folder = written(tmp_path / "faces", "Ann/Ann_0001.jpg", "Ann/Ann_0002.jpg", "Bo/Bo_0001.jpg")
    with pytest.raises(ValueError, match="`folds` is for lists of pairs.*Received: folds=3"):
        read_test_set(folder, folds=3)
    (tmp_path / "pairs.txt").write_text(LIST.format("2 1"))
    (tmp_path / "some.bin").touch()
    with pytest.raises(ValueError, match="`pairs` names images in a folder"):
        read_test_set(tmp_path / "some.bin", tmp_path / "pairs.txt")
    for folds in (0, 1, 5):
        message = f"`folds` must be from 2 to the number of pairs, 4. Received: folds={folds}"
        with pytest.raises(ValueError, match=re.escape(message)):
            read_test_set(folder, tmp_path / "pairs.txt", folds)
    with pytest.raises(FileNotFoundError, match="no such file or folder. Received: path='.*none'"):
        read_test_set(tmp_path / "none")


@pytest.mark.parametrize("kind", [identities, pair_list], ids=["identities", "list"])
def test_embeddings_of_zeros_are_warned_of(kind):
    embeddings, labels = random_set()
    embeddings[[2, 5]] = 0.0
    with pytest.warns(UserWarning, match="^2 of 30 embeddings are nothing but zeros"):
        judge(embeddings, kind(labels), far=0.5)
