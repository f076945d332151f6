"""examples/search.py: people are found, strangers are unknown."""

import re
from pathlib import Path

import keras
import numpy as np
import pytest
from PIL import Image

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
SIZE = 12


@pytest.fixture
def search(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    import search

    return search


def picture(person, random):
    """A bright spot at a place of the person's own, in noise."""
    pixels = random.integers(0, 40, (SIZE, SIZE), dtype=np.uint8)
    row, column = divmod(person, 3)
    pixels[4 * row : 4 * row + 4, 4 * column : 4 * column + 4] += 200
    return Image.fromarray(pixels)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """An encoder, six enrolled people, pictures of two of them and of two strangers."""
    folder, random = tmp_path_factory.mktemp("search"), np.random.default_rng(0)
    for person in range(6):
        (folder / "people" / f"person {person}").mkdir(parents=True)
        for number in range(4):
            picture(person, random).save(folder / "people" / f"person {person}" / f"{number}.png")
    for person in (1, 4, 7, 8):
        picture(person, random).save(folder / f"{person}.png")
    (folder / "none.png").write_text("no image")
    image = keras.Input((SIZE, SIZE, 1))
    x = keras.layers.Flatten()(keras.layers.Rescaling(1 / 255.0)(image))
    keras.Model(image, x).save(folder / "encoder.keras")
    return folder


def run(search, *arguments):
    search.main([str(argument) for argument in arguments])


def test_known_people_are_named_and_strangers_are_not(search, place, tmp_path, capsys):
    run(search, "enrol", place / "encoder.keras", place / "people", "--out", tmp_path / "p.npz")
    assert "24 pictures of 6 people" in capsys.readouterr().out
    run(search, "ask", tmp_path / "p.npz", *(place / f"{i}.png" for i in (1, 4, 7, 8)))
    answers = re.findall(r"(\d)\.png: (.*?) \(", capsys.readouterr().out)
    assert answers == [("1", "person 1"), ("4", "person 4"), ("7", "unknown"), ("8", "unknown")]


def test_the_nearest_is_that_of_a_slow_search(search):
    random = np.random.default_rng(0)
    rows, enrolled = random.normal(size=(9, 5)), random.normal(size=(30, 5))
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    enrolled /= np.linalg.norm(enrolled, axis=1, keepdims=True)
    cosines, places = search.nearest(rows, enrolled)
    np.testing.assert_array_equal(places, np.argmax(rows @ enrolled.T, axis=1))
    np.testing.assert_allclose(cosines, np.max(rows @ enrolled.T, axis=1), atol=1e-12)


def test_the_threshold_keeps_out_strangers_among_the_enrolled(search):
    """On a circle, in degrees: 0 and 10 are one person, 50 and 65 another; they are 40 apart."""
    angles = np.radians([0, 10, 50, 65])
    rows = np.stack([np.cos(angles), np.sin(angles)], axis=1)
    every, labels = np.ones(4, bool), np.array([0, 0, 1, 1])
    # As strangers they score cos 50, 40, 40, 55; as known people cos 10, 10, 15, 15.
    found = [search.calibrated(rows, labels, far, every, every) for far in (0.25, 0.5, 1.0)]
    np.testing.assert_allclose(found, np.cos(np.radians([15, 40, 55])), atol=1e-6)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["enrol", "nowhere.keras", "people"], "There is no encoder"),
        (["enrol", "encoder.keras", "nowhere"], "nowhere"),
        (["enrol", "encoder.keras", "people", "--far", "0.001"], "are too few"),
        (["ask", "encoder.keras", "1.png"], "These are no enrolled people"),
        (["ask", "nothing.npz", "1.png"], "nothing.npz"),
    ],
)
def test_what_cannot_be_done_is_named(search, place, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(place)
    with pytest.raises(SystemExit, match=message):
        run(search, *arguments)
    assert not (place / "people.npz").exists()


def test_a_picture_that_is_none_is_named(search, place, tmp_path):
    out = tmp_path / "p.npz"
    run(
        search,
        "enrol",
        place / "encoder.keras",
        place / "people",
        "--threshold",
        "0.5",
        "--out",
        out,
    )
    with pytest.raises(SystemExit, match=r"none\.png"):
        run(search, "ask", out, place / "1.png", place / "none.png")


def test_another_encoder_is_refused(search, place, tmp_path):
    encoder, out = tmp_path / "encoder.keras", tmp_path / "p.npz"
    encoder.write_bytes((place / "encoder.keras").read_bytes())
    run(search, "enrol", encoder, place / "people", "--threshold", "0.5", "--out", out)
    image = keras.Input((SIZE, SIZE, 1))
    keras.Model(image, keras.layers.Flatten()(image)).save(encoder)
    with pytest.raises(SystemExit, match="enrol again"):
        run(search, "ask", out, place / "1.png")


@pytest.mark.parametrize("threshold", ["nan", "inf", "5"])
def test_a_threshold_is_a_cosine(search, place, tmp_path, capsys, threshold):
    with pytest.raises(SystemExit):
        run(search, "enrol", place / "encoder.keras", place / "people", "--threshold", threshold)
    assert "--threshold must be a cosine" in capsys.readouterr().err


def test_damaged_people_are_refused(search, place, tmp_path):
    out = tmp_path / "p.npz"
    run(search, "enrol", place / "encoder.keras", place / "people", "--out", out)
    with np.load(out) as file:
        content = dict(file)
    damaged = {
        "threshold": [np.nan],
        "labels": [content["labels"][1:], content["labels"] * 1.0, content["labels"] > 0],
        "embeddings": [content["embeddings"][:, 0], content["embeddings"].astype(str)],
        "names": [np.array("a"), content["names"][:, None], np.arange(len(content["names"]))],
    }
    for name, value in ((name, value) for name, values in damaged.items() for value in values):
        with open(out, "wb") as file:
            np.savez(file, **{**content, name: value})
        with pytest.raises(SystemExit, match="damaged"):
            run(search, "ask", out, place / "1.png")


def test_people_whose_bytes_are_damaged_are_refused(search, place, tmp_path):
    out = tmp_path / "p.npz"
    run(search, "enrol", place / "encoder.keras", place / "people", "--out", out)
    whole = bytearray(out.read_bytes())
    entry = whole.rindex(b"PK\x01\x02")  # its method of compression is 10 bytes on
    whole[entry + 10] = 77
    out.write_bytes(whole)
    with pytest.raises(SystemExit, match="no enrolled people"):
        run(search, "ask", out, place / "1.png")


def test_an_encoder_that_has_gone_is_named(search, place, tmp_path, monkeypatch):
    monkeypatch.chdir(place)
    run(search, "enrol", "encoder.keras", "people", "--out", tmp_path / "p.npz")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match="encoder.keras is not there: put it back"):
        run(search, "ask", "p.npz", place / "1.png")


def test_out_is_no_folder(search, place):
    with pytest.raises(SystemExit, match="--out must be a file"):
        run(search, "enrol", "nowhere.keras", place / "people", "--out", place)


def test_an_encoder_of_zeros_is_refused(search, place, tmp_path):
    image = keras.Input((SIZE, SIZE, 1))
    zeros = keras.layers.Flatten()(keras.layers.Rescaling(0.0)(image))
    keras.Model(image, zeros).save(tmp_path / "zero.keras")
    with pytest.raises(SystemExit, match="nothing but 0"):
        run(search, "enrol", tmp_path / "zero.keras", place / "people", "--out", tmp_path / "p")


def test_demo_counts_every_picture(search, capsys):
    run(search, "demo", "--epochs", "1", "--draws", "2")
    rows = re.findall(r"^ *\d+ +[\d.]+((?: +\d+){5})$", capsys.readouterr().out, re.MULTILINE)
    counts = np.array([row.split() for row in rows], int)
    assert counts.shape == (2, 5)
    np.testing.assert_array_equal(counts[:, :3].sum(axis=1), 150)
    np.testing.assert_array_equal(counts[:, 3:].sum(axis=1), 100)
    assert not np.array_equal(*counts)  # other people, other faces
