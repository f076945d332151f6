"""python -m keras_margin evaluate, from files to a report, and each error in one line."""

import json
import os
import pickle
import shutil
import subprocess
import sys
import warnings

import keras
import numpy as np
import pytest
from keras import layers
from PIL import Image

import keras_margin
from keras_margin import datasets, verification
from keras_margin.__main__ import main

# main shows warnings as lines; a test that does not expect one looks at stderr.


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """An encoder, and six identities of four images: a bright bar at a place of its own."""
    folder = tmp_path_factory.mktemp("files")
    keras.utils.set_random_seed(0)
    image = keras.Input((16, 16, 1))
    x = layers.Dense(8)(layers.Flatten()(layers.Rescaling(1 / 255)(image)))
    model = keras_margin.EmbeddingModel(keras.Model(image, x), keras_margin.ArcFace(6))
    model.compile("sgd")
    model.encoder.save(folder / "encoder.keras")
    model.export(folder / "served" / "1")
    random = np.random.default_rng(0)
    for identity in range(6):
        name = f"P{identity}"
        (folder / "faces" / name).mkdir(parents=True)
        for number in range(4):
            pixels = random.integers(0, 120, (16, 16), dtype="uint8")
            pixels[:, 2 * identity : 2 * identity + 4] += 100
            path = folder / "faces" / name / f"{name}_{number + 1:04}.png"
            Image.fromarray(pixels).save(path)
    return folder


def written_list(folder, faces):
    """Ten folds of two genuine and two impostor pairs, as a list and as a verification set."""
    rng = np.random.default_rng(0)
    lines, images, flags = ["10 2"], [], []
    for row in range(40):
        one, other = rng.choice(6, 2, replace=False)
        i, j = rng.choice(4, 2, replace=False) + 1
        genuine = row // 2 % 2 == 0
        other = one if genuine else other
        lines.append(f"P{one} {i} {j}" if genuine else f"P{one} {i} P{other} {j}")
        for who, number in ((one, i), (other, j)):
            images.append((faces / f"P{who}" / f"P{who}_{number:04}.png").read_bytes())
        flags.append(genuine)
    (folder / "pairs.txt").write_text("\n".join(lines))
    (folder / "pairs.bin").write_bytes(pickle.dumps((images, flags)))


def run(files, out, *arguments, encoder="encoder.keras"):
    main(["evaluate", str(files / encoder), *map(str, arguments), "--out", str(out)])
    return json.loads((out / "report.json").read_text())


def test_an_identity_folder(files, tmp_path, capsys):
    report = run(files, tmp_path / "out", files / "faces", "--far", 0.5, 0.1)
    printed = capsys.readouterr()
    encoder = keras.saving.load_model(files / "encoder.keras")
    paths, labels, _ = datasets.identity_folder(files / "faces")
    pixels = np.stack([np.asarray(Image.open(path), "float32") for path in paths])[..., None]
    wanted = verification.evaluate(encoder.predict(pixels, verbose=0), labels, [0.5, 0.1])
    for name in ("eer", "tar@far=0.5", "tar@far=0.1", "rank1"):
        assert report["figures"][name] == pytest.approx(wanted[name], abs=1e-6)
        low, high = report["figures"][f"{name}_interval"]
        assert low <= wanted[name] <= high
    assert report["counts"]["identities"] == 6
    assert report["run"]["encoder_kind"] == "Keras model"
    assert report["run"]["keras_margin"] == keras_margin.__version__
    assert (report["run"]["image_shape"], report["run"]["embedding_dim"]) == ([16, 16, 1], 8)
    assert f"equal error rate (EER)                              {wanted['eer']:.4f}" in printed.out
    assert "24/24" in printed.out  # progress
    assert printed.err == ""


def test_a_list_and_a_set_of_the_same_pairs_agree(files, tmp_path, capsys):
    written_list(tmp_path, files / "faces")
    pairs = ["--pairs", tmp_path / "pairs.txt"]
    listed = run(files, tmp_path / "a", files / "faces", *pairs, "--far", 0.1, encoder="served/1")
    assert capsys.readouterr().err == ""
    packed = run(files, tmp_path / "b", tmp_path / "pairs.bin", "--far", 0.1, 0.01)
    (line,) = capsys.readouterr().err.splitlines()  # once, though two functions say it
    assert line.startswith("keras_margin evaluate: warning: far=[0.01] is below 1 / 20 impostor")
    assert packed["figures"].pop("tar@far=0.01") is packed["thresholds"]["far=0.01"] is None
    assert listed["counts"] == {**packed["counts"], "images": listed["counts"]["images"]}
    for name, value in packed["figures"].items():
        assert listed["figures"][name] == pytest.approx(value, abs=1e-6)
    assert listed["thresholds"]["far=0.1"] == pytest.approx(
        packed["thresholds"]["far=0.1"], abs=1e-5
    )
    # By hand: the encoder's own outputs, pair by pair.
    encoder = keras.saving.load_model(files / "encoder.keras")
    found = datasets.read_pairs_txt(tmp_path / "pairs.txt", files / "faces")
    pixels = np.stack([np.asarray(Image.open(path), "float32") for path in found.paths])[..., None]
    scores = verification.pair_scores(encoder.predict(pixels, verbose=0), found.pairs)
    mean, deviation = verification.kfold_accuracy(scores, found.genuine, 10)
    assert packed["figures"]["accuracy"] == pytest.approx(mean, abs=1e-12)
    assert packed["figures"]["accuracy_std"] == pytest.approx(deviation, abs=1e-12)


def test_flip_and_preprocess_reach_the_encoder(files, tmp_path):
    plain = run(files, tmp_path / "a", files / "faces", "--far", 0.1, "--no-intervals")
    assert "eer_interval" not in plain["figures"]
    changed = run(
        *(files, tmp_path / "b", files / "faces", "--far", 0.1),
        *("--flip", "--preprocess", "symmetric", "--batch-size", 5, "--image-size", 16, 16),
    )
    assert (changed["run"]["flip"], changed["run"]["preprocess"]) == (True, "symmetric")
    assert changed["thresholds"] != plain["thresholds"]
    paths, labels, _ = datasets.identity_folder(files / "faces")
    encoder = keras.saving.load_model(files / "encoder.keras")
    embeddings = datasets.embed_images(encoder, paths, flip=True, preprocess="symmetric", verbose=0)
    scores = verification.all_pairs(embeddings, labels)
    wanted = verification.threshold_at_far(*scores, 0.1)
    assert changed["thresholds"]["far=0.1"] == pytest.approx(wanted, abs=1e-5)


def test_one_image_each_is_undefined_and_said(files, tmp_path, capsys):
    for identity in range(3):
        (tmp_path / "faces" / f"P{identity}").mkdir(parents=True)
        source = files / "faces" / f"P{identity}" / f"P{identity}_0001.png"
        (tmp_path / "faces" / f"P{identity}" / "1.png").write_bytes(source.read_bytes())
    report = run(files, tmp_path / "out", tmp_path / "faces")
    assert set(report["figures"].values()) == {None}
    assert report["pictures"] == ["scores.png", "pairs.png"]
    lines = capsys.readouterr().err.splitlines()
    assert lines == [f"keras_margin evaluate: warning: {text}" for text in report["warnings"]]
    assert "undefined with 0 genuine and 3 impostor pairs" in lines[0]
    assert len(lines) == len(set(lines))


def test_warnings_are_as_before_afterwards(files, tmp_path):
    run(files, tmp_path / "out", files / "faces", "--far", 0.1)
    with pytest.raises(UserWarning, match="mine"):  # an error, as in all tests
        warnings.warn("mine", stacklevel=1)


@pytest.mark.parametrize(
    ("encoder", "data", "pairs", "place"),
    [
        ("a/encoder.keras", "b/lfw.bin", None, "a/encoder-on-lfw"),
        ("a/served/1", "faces", "c/pairs.txt", "a/served-1-on-faces-pairs"),
    ],
)
def test_the_report_goes_beside_the_encoder(tmp_path, monkeypatch, encoder, data, pairs, place):
    from keras_margin.__main__ import _beside, parser

    monkeypatch.chdir(tmp_path)
    more = ["--pairs", pairs] if pairs else []
    assert _beside(parser().parse_args(["evaluate", encoder, data, *more])) == tmp_path / place


# Wrong input


def refused(capsys, *arguments):
    with pytest.raises(SystemExit) as stop:
        main(["evaluate", *map(str, arguments)])
    assert stop.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("keras_margin evaluate: error: ")
    return line


class Evil:
    def __reduce__(self):
        return os.system, ("touch executed",)


def test_a_garbled_set_and_one_that_calls(files, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "evil.bin").write_bytes(pickle.dumps(([b""], [Evil()])))
    assert "refused" in refused(capsys, files / "encoder.keras", "evil.bin")
    written_list(tmp_path, files / "faces")
    (tmp_path / "cut.bin").write_bytes((tmp_path / "pairs.bin").read_bytes()[:-9])
    assert "cut.bin" in refused(capsys, files / "encoder.keras", "cut.bin")
    assert not (tmp_path / "executed").exists()


def test_an_image_that_is_none(files, tmp_path, capsys):
    for name in ("a/1.png", "b/1.png"):
        (tmp_path / "faces" / name).parent.mkdir(parents=True)
        (tmp_path / "faces" / name).write_text("no image")
    out = tmp_path / "out"
    line = refused(capsys, files / "encoder.keras", tmp_path / "faces", "--out", out)
    assert "a/1.png' cannot be read: it is none of JPEG" in line
    assert list(out.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["no.keras", "faces"], "There is no encoder. Received: path='no.keras'"),
        (["served", "faces"], "Do you mean 'served/1'?"),
        (["faces", "faces"], "holds no SavedModel"),
        (["encoder.keras", "none"], "no such file or folder. Received: path='none'"),
        (["encoder.keras", "faces", "--pairs", "no.txt"], "No such file or directory: 'no.txt'"),
        (["encoder.keras", "faces", "--folds", "3"], "`folds` is for lists of pairs"),
        (["encoder.keras", "faces", "--far", "2"], "`far` must be in [0, 1]. Received: far=[2.0]"),
        (["encoder.keras", "faces", "--far", "nan"], "`far` must be in [0, 1]"),
        (["encoder.keras", "faces", "--seed", "-1"], "`seed` must be at least 0"),
        (["encoder.keras", "faces", "--batch-size", "0"], "`batch_size` must be at least 1"),
        (["encoder.keras", "faces", "--image-size", "8", "8"], "leave it out"),
        (["encoder.keras", "faces", "--preprocess", "x"], "invalid choice: 'x'"),
        (["encoder.keras", "faces", "--out", "encoder.keras/x"], "results cannot be written"),
        (["encoder.keras"], "the following arguments are required: DATA"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_input_ends_with_one_line(files, tmp_path, capsys, monkeypatch, arguments, message):
    monkeypatch.chdir(files)
    more = [] if "--out" in arguments else ["--out", tmp_path / "out"]
    assert message in refused(capsys, *arguments, *more)


def test_without_matplotlib_names_the_install_command(files, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    line = refused(capsys, files / "encoder.keras", files / "faces")
    assert line.endswith('The report needs matplotlib: pip install "keras_margin[evaluate]"')


def test_help_and_version(capsys):
    main([])
    assert "evaluate" in capsys.readouterr().out
    with pytest.raises(SystemExit) as stop:
        main(["--version"])
    assert stop.value.code == 0
    assert capsys.readouterr().out == f"keras_margin {keras_margin.__version__}\n"


def test_as_a_command_in_a_process_of_its_own(files, tmp_path):
    """Wrong input, which comes after all imports."""
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "keras_margin",
            "evaluate",
            "none.keras",
            "faces",
            "--out",
            tmp_path,
        ],
        cwd=files,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    last = done.stderr.splitlines()[-1]
    assert last == (
        "keras_margin evaluate: error: There is no encoder. Received: path='none.keras'"
    )
    assert "Traceback" not in done.stderr


def test_an_encoder_that_is_not_there_makes_no_folder(files, tmp_path):
    with pytest.raises(SystemExit):
        main(["evaluate", str(tmp_path / "mistyped" / "encoder.keras"), str(files / "faces")])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("out", [[], ["--out", "faces/report"], ["--out", "faces"]])
def test_a_report_never_goes_among_the_people(files, tmp_path, monkeypatch, capsys, out):
    shutil.copytree(files / "faces", tmp_path / "faces")
    shutil.copy(files / "encoder.keras", tmp_path / "faces")
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(SystemExit):
        main(["evaluate", "faces/encoder.keras", "faces", *out])
    assert "--out must not be in DATA" in capsys.readouterr().err
    assert sorted(tmp_path.rglob("*")) == before
