"""Files of an EmbeddingModel: whole or absent, with the state of random layers in them."""

import resource
import zipfile

import keras
import numpy as np
import pytest

import keras_margin as km

X, Y = np.eye(4, dtype="float32"), np.arange(4)


def model_with_random_layers():
    backbone = keras.Sequential(
        [
            keras.Input((4,)),
            keras.layers.GaussianNoise(0.5, seed=1),
            keras.layers.Dense(3),
            keras.Sequential([keras.layers.Dropout(0.5, seed=2)]),
        ]
    )
    model = km.EmbeddingModel(backbone, km.AdaCos(4, seed=0))
    model.compile(keras.optimizers.Adam(0.01))
    return model


def trained(epochs=2):
    model = model_with_random_layers()
    model.fit(X, Y, epochs=epochs, shuffle=False, verbose=0)
    return model


def weights_of(model):
    return [*model.get_weights(), *(v.numpy() for v in model.optimizer.variables)]


def assert_same_weights(one, other):
    for got, want in zip(weights_of(one), weights_of(other), strict=True):
        np.testing.assert_array_equal(got, want)


def goes_on_alike(one, other):
    for model in (one, other):
        model.fit(X, Y, epochs=2, shuffle=False, verbose=0)
    assert_same_weights(one, other)


def test_random_layers_go_on_from_a_model_file(tmp_path):
    model = trained()
    drawn = [generator.numpy()[1] for generator in model._seed_states().values()]
    assert len(drawn) == 2
    assert min(drawn) > 0
    model.save(tmp_path / "model.keras")
    goes_on_alike(model, keras.saving.load_model(tmp_path / "model.keras"))


def test_random_layers_go_on_from_a_weights_file(tmp_path):
    model = trained()
    model.save_weights(tmp_path / "model.weights.h5")
    other = model_with_random_layers()
    other.optimizer.build(other.trainable_variables)
    other.load_weights(tmp_path / "model.weights.h5")
    goes_on_alike(model, other)


def test_a_file_without_their_state_loads_too(tmp_path, monkeypatch):
    model = trained()
    with monkeypatch.context() as patch:
        patch.setattr(type(model), "_seed_states", lambda self: {})
        model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    for got, want in zip(loaded.trainable_weights, model.trainable_weights, strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("name", ["model.keras", "model.weights.h5"])
def test_a_full_disk_leaves_the_previous_file(tmp_path, name):
    path = tmp_path / name
    model = trained()
    save = model.save if name.endswith(".keras") else model.save_weights
    save(path)
    before = path.read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) // 2, hard))
    try:
        with pytest.raises(OSError):  # noqa: PT011
            save(path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert path.read_bytes() == before
    assert [entry.name for entry in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize("name", ["model.keras", "model.weights.h5"])
def test_nothing_is_replaced_without_leave(tmp_path, name):
    path = tmp_path / name
    path.write_bytes(b"mine")
    model = trained()
    save = model.save if name.endswith(".keras") else model.save_weights
    with pytest.raises(FileExistsError, match="`overwrite=True` to replace it. Received: filepath"):
        save(path, overwrite=False)
    assert path.read_bytes() == b"mine"


def test_weights_in_several_files(tmp_path):
    model = trained()
    model.save_weights(tmp_path / "model.weights.json", max_shard_size=1)
    other = model_with_random_layers()
    other.optimizer.build(other.trainable_variables)
    other.load_weights(tmp_path / "model.weights.json")
    assert_same_weights(other, model)


@pytest.mark.parametrize("name", ["model.keras", "model.weights.h5"])
@pytest.mark.parametrize("share", [0.0, 0.3, 0.99])
def test_a_file_cut_short_is_named(tmp_path, name, share):
    path = tmp_path / name
    model = trained()
    (model.save if name.endswith(".keras") else model.save_weights)(path)
    path.write_bytes(path.read_bytes()[: int(share * path.stat().st_size)])
    before = model.get_weights()
    with pytest.raises(ValueError, match=rf"cut short or garbled.*\n*.*Received: .*{name}'"):
        model.load_weights(path)
    for got, want in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(got, want)


def test_a_garbled_model_file_is_named(tmp_path):
    path = tmp_path / "model.keras"
    model = trained()
    model.save(path)
    with zipfile.ZipFile(path) as file:
        info = file.getinfo("model.weights.h5")
    content = bytearray(path.read_bytes())
    content[info.header_offset + info.file_size // 2] ^= 0xFF
    path.write_bytes(content)
    with pytest.raises(
        ValueError, match=r"garbled \(Bad CRC-32.*Received: filepath='.*model.keras"
    ):
        model.load_weights(path)


def test_a_missing_file_stays_a_missing_file(tmp_path):
    with pytest.raises((FileNotFoundError, ValueError), match="nowhere"):
        trained().load_weights(tmp_path / "nowhere.weights.h5")
