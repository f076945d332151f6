"""examples/train.py from end to end: a tiny folder daily, the real digits in the long tests."""

import json
import re
import subprocess
import sys
import textwrap
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace

import keras
import numpy as np
import pytest
import tensorflow as tf
from PIL import Image

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


@pytest.fixture
def train(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    import train

    return train


@pytest.fixture
def folder(tmp_path):
    """Four identities of eight images: a bright bar at a place of its own, in noise."""
    random = np.random.default_rng(0)
    for identity in range(4):
        (tmp_path / "faces" / f"person {identity}").mkdir(parents=True)
        for number in range(8):
            pixels = random.integers(0, 60, (16, 16), dtype="uint8")
            pixels[:, 4 * identity : 4 * identity + 4] += 180
            Image.fromarray(pixels).save(
                tmp_path / "faces" / f"person {identity}" / f"{number}.png"
            )
    return tmp_path / "faces"


@pytest.fixture
def calibration(train):
    import calibration

    return calibration


def run(train, folder, *arguments, out):
    train.main(["--dataset", str(folder), "--epochs", "2", "--out", str(out), *arguments])


def test_writes_what_ships(train, folder, tmp_path, capsys):
    out = tmp_path / "out"
    dim, head = ["--embedding-dim", "3"], ["--head", "ArcFace", "--margin", "0.3", "--scale", "16"]
    run(train, folder, *dim, *head, "--far", "0.1", out=out)
    printed = capsys.readouterr().out

    assert {path.name for path in out.iterdir()} == {
        "model.keras",
        "encoder.keras",
        "saved_model",
        "identities.json",
        "metrics.json",
        "request.json",
        "threshold.json",
        "roc.png",
        "scores.png",
        "embeddings.png",
    }
    metrics = json.loads((out / "metrics.json").read_text())
    assert set(metrics) == {"raw", "embedding"}
    for values in metrics.values():
        # 2 of 8 images are held out: 8 images, 4 genuine and 24 impostor pairs.
        assert values["genuine_pairs"] == 4 and values["impostor_pairs"] == 24
        assert 0.0 <= values["eer"] <= 1.0 and 0.0 <= values["rank1"] <= 1.0
        assert 0.0 <= values["tar@far=0.1"] <= 1.0
    names = json.loads((out / "identities.json").read_text())
    assert names == {str(i): f"person {i}" for i in range(4)}
    assert "Closed set: new images of the 4 trained identities" in printed
    assert len(re.findall("val_eer: ", printed)) == 2  # an epoch each
    loaded = keras.saving.load_model(out / "model.keras").head
    assert (loaded.margin, loaded.current_scale) == (0.3, 16.0)

    # The lines that load it run as they are printed.
    code = re.search("    (import keras, numpy\n.*?)\n\n", printed, re.S)[1]
    namespace = {}
    exec(textwrap.dedent("    " + code), namespace)
    assert namespace["embeddings"].shape == (1, 3)

    instance = json.loads((out / "request.json").read_text())["instances"][0]
    image = np.array([instance["image"]], "float32")
    served = tf.saved_model.load(str(out / "saved_model" / "1")).signatures["serving_default"]
    np.testing.assert_allclose(
        served(image=tf.constant(image))["embedding"],
        namespace["encoder"].predict(image, verbose=0),
        atol=1e-6,
    )

    # The threshold is that of the other images, and its rates are measured.
    found = json.loads((out / "threshold.json").read_text())
    data = train.split(train.load(folder), calibration=train.CALIBRATION)
    for part in ("calibration", "test"):
        embeddings = namespace["encoder"].predict(getattr(data, f"{part}_images"), verbose=0)
        labels = getattr(data, f"{part}_labels")
        pairs = list(combinations(range(len(labels)), 2))
        scores = [np.dot(embeddings[i], embeddings[j]) for i, j in pairs]
        accepted = np.array(scores) >= found["threshold"] - 1e-6
        genuine = np.array([labels[i] == labels[j] for i, j in pairs])
        assert found[part]["far"] == accepted[~genuine].mean()
        assert found[part]["tar"] == accepted[genuine].mean()
        assert (found[part]["genuine_pairs"], found[part]["impostor_pairs"]) == (4, 24)
    assert found["calibration"]["far"] <= found["far_wanted"] == 0.1
    assert f"Threshold {found['threshold']:.4f} for FAR 0.1" in printed


@pytest.mark.filterwarnings("ignore:far=")  # 16 images have 64 impostor pairs
def test_open_set_says_so(train, folder, tmp_path, capsys):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "threshold.json").write_text("of another run")
    run(train, folder, "--unseen", "2", "--head", "CosFace", out=tmp_path / "out")
    printed = capsys.readouterr().out
    assert "Open set: 2 identities that the training never saw" in printed
    names = json.loads((tmp_path / "out" / "identities.json").read_text())
    assert list(names.values()) == ["person 0", "person 1"]  # those that were trained
    metrics = json.loads((tmp_path / "out" / "metrics.json").read_text())["embedding"]
    assert metrics["tar@far=0.01"] is None  # undefined: 0.01 * 64 is under one pair
    # Two identities are left for training, and none to calibrate with: no number is made up.
    assert "No threshold: FAR 0.01 needs 100 impostor pairs" in printed
    assert not (tmp_path / "out" / "threshold.json").exists()


def test_the_test_chooses_no_epoch(train, folder):
    options = train.parse_arguments(["--dataset", str(folder), "--far", "0.1"])
    data = train.split(train.load(folder), calibration=train.CALIBRATION)
    judge, best = train.make_callbacks(options, data, epochs=2)
    np.testing.assert_array_equal(judge.x, data.calibration_images)
    np.testing.assert_array_equal(judge.labels, data.calibration_labels)
    assert (best.monitor, best.mode, best.restore_best_weights) == ("val_eer", "min", True)


class Angles:
    """Takes each "image" for the angle of its embedding, in degrees."""

    def predict(self, images, verbose):
        angles = np.deg2rad(images.ravel().astype("float64"))
        return np.stack([np.cos(angles), np.sin(angles)], axis=1)


def parts(calibration, test):
    """A split of "images" in degrees: {identity: degrees}."""

    def arrays(part):
        images = [[[[angle]]] for angles in part.values() for angle in angles]
        labels = [identity for identity, angles in part.items() for _ in angles]
        return np.array(images).reshape(-1, 1, 1, 1), np.array(labels, int)

    (images, labels), (test_images, test_labels) = arrays(calibration), arrays(test)
    return SimpleNamespace(
        calibration_images=images,
        calibration_labels=labels,
        test_images=test_images,
        test_labels=test_labels,
        open_set=True,
    )


def test_calibration_by_hand(calibration):
    # Impostor angles 5, 25, 35, 55 and genuine ones 20, 30; FAR 1/4 allows the nearest alone.
    data = parts({0: [0, 20], 1: [25, 55]}, {5: [0, 10], 6: [100, 115], 7: [120, 200]})
    found = calibration.calibrate(Angles(), data, far=0.25)
    assert found["threshold"] == pytest.approx(np.cos(np.deg2rad(20)))
    assert found["far_wanted"] == 0.25
    assert found["calibration"] == {
        "far": 0.25,
        "tar": 0.5,
        "accepted_impostors": 1,
        "impostor_pairs": 4,
        "accepted_genuines": 1,
        "genuine_pairs": 2,
    }
    # Of the test: impostors at 5 and 20 degrees pass, the second on the threshold; genuine 10, 15.
    assert found["test"] == {
        "far": 2 / 12,
        "tar": 2 / 3,
        "accepted_impostors": 2,
        "impostor_pairs": 12,
        "accepted_genuines": 2,
        "genuine_pairs": 3,
    }


@pytest.mark.parametrize("identities", [{}, {0: [0, 20], 1: [25, 55]}], ids=["none", "few"])
def test_no_threshold_from_too_few_pairs(calibration, capsys, identities):
    data = parts(identities, {5: [0, 10], 6: [100, 115]})
    found = calibration.calibrate(Angles(), data, far=0.2)
    assert found is None
    calibration.print_threshold(found, data, far=0.2)
    assert "needs 5 impostor pairs that neither train nor test" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--dataset", "no_such_set"], "`name` must be one of .*Received: name='no_such_set'"),
        (["--unseen", "2"], "AdaCos needs `num_classes` of at least 3.*Received: num_classes=2"),
        (["--unseen", "9"], "`unseen` must be 0 or between 2 and .*Received: unseen=9"),
        (["--replicas", "200"], "--replicas must be at most the number of GPUs.*Received: 200"),
        (["--head", "ArcFace", "--scale", "-1"], "`scale` must be .*-1"),
        (["--head", "LSoftmax", "--margin", "2.5"], "`margin` must be .*2.5"),
    ],
)
def test_clear_errors(train, folder, tmp_path, arguments, message):
    with pytest.raises(SystemExit, match=f"train.py: error: {message}"):
        run(train, folder, *arguments, out=tmp_path / "out")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--far", "0"], "--far must be between 0 and 1. Received: 0.0"),
        (["--far", "nan"], "--far must be between 0 and 1. Received: nan"),
        (["--margin", "0.5"], "AdaCos takes no --margin. Received: 0.5"),
        (["--head", "SphereFace", "--scale", "30"], "SphereFace takes no --scale. Received: 30.0"),
    ],
)
def test_arguments_that_are_refused(train, capsys, arguments, message):
    with pytest.raises(SystemExit):
        train.parse_arguments(arguments)
    assert message in capsys.readouterr().err


def test_whole_margin_of_l_softmax(train):
    options = train.parse_arguments(["--head", "LSoftmax", "--margin", "3"])
    assert train.make_head(options, 5).margin == 3


def test_a_training_that_diverges_says_so(train, folder, tmp_path, monkeypatch):
    def diverge(*arguments):
        raise FloatingPointError("The loss is nan at batch 3.")

    monkeypatch.setattr(train, "train", diverge)
    with pytest.raises(SystemExit, match="train.py: error: The loss is nan at batch 3"):
        run(train, folder, out=tmp_path / "out")


def test_unreadable_image_is_named(train, folder, tmp_path):
    (folder / "person 1" / "3.png").write_bytes(b"no image")
    with pytest.raises(SystemExit, match=r"train.py: error: The image '.*3\.png' cannot be read"):
        run(train, folder, out=tmp_path / "out")


def test_out_that_cannot_be_written(train, folder, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(SystemExit, match="train.py: error: The folder for the results cannot"):
        run(train, folder, out=tmp_path / "file" / "out")


@pytest.mark.filterwarnings("ignore:far=")
def test_interrupted_while_writing(train, folder, tmp_path, monkeypatch):
    def half(self, path, **kwargs):
        Path(path).write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(keras.Model, "save", half)
    with pytest.raises(KeyboardInterrupt):
        run(train, folder, out=tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []


def train_digits(tmp_path, *arguments):
    subprocess.run(
        [sys.executable, EXAMPLES / "train.py", "--out", tmp_path / "out", *arguments], check=True
    )
    return json.loads((tmp_path / "out" / "metrics.json").read_text())["embedding"]


@pytest.mark.long
def test_digits(tmp_path):
    metrics = train_digits(tmp_path)
    assert metrics["eer"] <= 0.03
    assert metrics["tar@far=0.01"] >= 0.95
    assert metrics["genuine_pairs"] == 10 * 100 * 99 // 2


@pytest.mark.long
def test_digits_on_two_replicas_in_mixed_precision(tmp_path):
    arguments = ["--replicas", "2", "--mixed-precision", "mixed_bfloat16", "--epochs", "3"]
    assert train_digits(tmp_path, *arguments)["eer"] <= 0.15
