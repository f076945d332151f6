"""examples/train.py from end to end: a tiny folder daily, the real digits in the long tests."""

import json
import re
import subprocess
import sys
import textwrap
from pathlib import Path

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


def run(train, folder, *arguments, out):
    train.main(["--dataset", str(folder), "--epochs", "2", "--out", str(out), *arguments])


@pytest.mark.filterwarnings("ignore:far=")  # 8 images have 24 impostor pairs
def test_writes_what_ships(train, folder, tmp_path, capsys):
    out = tmp_path / "out"
    run(train, folder, "--embedding-dim", "3", "--head", "ArcFace", out=out)
    printed = capsys.readouterr().out

    assert {path.name for path in out.iterdir()} == {
        "model.keras",
        "encoder.keras",
        "saved_model",
        "identities.json",
        "metrics.json",
        "request.json",
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
        assert values["tar@far=0.01"] is None  # undefined: 0.01 * 24 is under one pair
    names = json.loads((out / "identities.json").read_text())
    assert names == {str(i): f"person {i}" for i in range(4)}
    assert "Closed set: new images of the 4 trained identities" in printed

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


@pytest.mark.filterwarnings("ignore:far=")  # 16 images have 64 impostor pairs
def test_open_set_says_so(train, folder, tmp_path, capsys):
    run(train, folder, "--unseen", "2", "--head", "CosFace", out=tmp_path / "out")
    printed = capsys.readouterr().out
    assert "Open set: 2 identities that the training never saw" in printed
    names = json.loads((tmp_path / "out" / "identities.json").read_text())
    assert list(names.values()) == ["person 0", "person 1"]  # those that were trained


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--dataset", "no_such_set"], "`name` must be one of .*Received: name='no_such_set'"),
        (["--unseen", "2"], "AdaCos needs `num_classes` of at least 3.*Received: num_classes=2"),
        (["--unseen", "9"], "`unseen` must be 0 or between 2 and .*Received: unseen=9"),
    ],
)
def test_clear_errors(train, folder, tmp_path, arguments, message):
    with pytest.raises(SystemExit, match=f"train.py: error: {message}"):
        run(train, folder, *arguments, out=tmp_path / "out")


def test_unreadable_image_is_named(train, folder, tmp_path):
    (folder / "person 1" / "3.png").write_bytes(b"no image")
    with pytest.raises(SystemExit, match=r"train.py: error: The image '.*3\.png' cannot be read"):
        run(train, folder, out=tmp_path / "out")


def test_out_that_cannot_be_written(train, folder, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(SystemExit, match="train.py: error: --out cannot be written"):
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
