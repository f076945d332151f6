"""Files that released versions wrote load for ever, and say and do the same."""

import json
import zipfile

import keras
import numpy as np
import pytest
from registry import HEADS
from write_golden import EXPORTED, GOLDEN, answers, data, file_of, trained

import keras_margin

VERSIONS = sorted(folder.name for folder in GOLDEN.iterdir())
# Rounding of other processors and versions; Adam's first steps enlarge it.
CLOSE = {"rtol": 1e-4, "atol": 1e-5}


def check(found, path):
    with np.load(path) as expected:
        assert set(found) == set(expected)
        for name, value in found.items():
            np.testing.assert_allclose(value, expected[name], err_msg=name, **CLOSE)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", HEADS)
def test_models_load_and_go_on(version, name):
    path = GOLDEN / version / f"{file_of(name)}.keras"
    model = keras.saving.load_model(path)
    assert type(model.head).__name__ == name.partition(",")[0]
    check(answers(model), path.with_suffix(".npz"))


@pytest.mark.parametrize("version", VERSIONS)
def test_weights_load_into_a_model_of_today(version):
    model = trained(EXPORTED)
    for variable in model.weights:
        variable.assign(keras.ops.zeros_like(variable))
    path = GOLDEN / version / f"{file_of(EXPORTED)}.weights.h5"
    model.load_weights(path)
    check(answers(model), GOLDEN / version / f"{file_of(EXPORTED)}.npz")


@pytest.mark.parametrize("version", VERSIONS)
def test_saved_models_answer(version):
    import tensorflow as tf

    x, _ = data()
    signature = tf.saved_model.load(
        GOLDEN / version / f"{file_of(EXPORTED)}.saved_model"
    ).signatures["serving_default"]
    found = signature(image=tf.constant(x))["embedding"]
    with np.load(GOLDEN / version / f"{file_of(EXPORTED)}.npz") as expected:
        np.testing.assert_allclose(found, expected["embeddings"], **CLOSE)


def test_every_head_is_in_the_files_of_this_version():
    made = {path.stem for path in (GOLDEN / keras_margin.__version__).glob("*.keras")}
    assert made == {file_of(name) for name in HEADS}


@pytest.mark.parametrize(
    ("old", "new"),
    [('"keras_margin>ArcFace"', '"keras_margin>Arcface"'), ('"margin": ', '"margins": ')],
)
def test_a_renamed_class_or_argument_is_noticed(tmp_path, old, new):
    """The files name both: what is renamed here stands for what would be renamed in the code."""
    source = GOLDEN / VERSIONS[0] / "ArcFace.keras"
    path = tmp_path / "renamed.keras"
    with zipfile.ZipFile(source) as before, zipfile.ZipFile(path, "w") as after:
        for name in before.namelist():
            content = before.read(name)
            if name == "config.json":
                text = json.dumps(json.loads(content))
                assert old in text
                content = text.replace(old, new).encode()
            after.writestr(name, content)
    with pytest.raises((TypeError, ValueError)):
        keras.saving.load_model(path)
