"""Checkpoints by shards: in a process of its own with eight virtual CPU devices."""

import numpy as np
import pytest
from test_shards import run

import keras_margin as km

HELPERS = """
    from pathlib import Path
    from keras_margin import checkpoints

    def on(shape):
        use_one_device() if shape is None else use_mesh(shape)

    def message_of(function, *arguments):
        try:
            function(*arguments)
        except (ValueError, FileExistsError) as error:
            return type(error).__name__ + ": " + str(error)

    def memory(name):
        lines = open("/proc/self/status").read().splitlines()
        return int(next(line for line in lines if line.startswith(name)).split()[1]) * 1024
"""

GOES_ON = """
    classes, goes_on, padding = given["classes"], {}, 0.0
    use_mesh((2, 4))
    model = model_of("subcenters", classes, "Adam")
    fit(model, classes)
    checkpoints.save(model, "shards")
    straight = fit(model, classes)
    for shape in (None, (1, 2), (1, 3), (4, 2)):
        on(shape)
        loaded = checkpoints.load_model("shards")
        rows = loaded.head.num_classes * loaded.head.num_subcenters
        padding = max(padding, np.abs(loaded.head.centers[rows:]).max(initial=0.0))
        goes_on[str(shape)] = fit(loaded, classes)
        other = model_of("subcenters", classes, "Adam")
        fit(other, classes)
        checkpoints.restore(other, "shards")
        goes_on[f"restored {shape}"] = fit(other, classes)
    use_one_device()
    checkpoints.load_model("shards").save("whole.keras")
    goes_on["file"] = fit(keras.saving.load_model("whole.keras"), classes)
    print(json.dumps([straight, goes_on, float(padding)]))
"""


@pytest.mark.long
def test_a_run_goes_on_from_shards_on_any_number_of_devices(tmp_path):
    """10 classes of 3 sub-centres: 36 rows on 4 devices, 30 on one or two."""
    straight, goes_on, padding = run(HELPERS + GOES_ON, {"classes": 10}, tmp_path)
    assert len(goes_on) == 9
    for losses in goes_on.values():
        np.testing.assert_allclose(losses, straight, rtol=1e-5)
    assert padding == 0.0


REFUSED = """
    def other(name, classes, subcenters):
        head = getattr(km, name)(classes, num_subcenters=subcenters)
        layers = [keras.Input((4,)), keras.layers.Dense(9)]
        model = km.EmbeddingModel(keras.Sequential(layers), head)
        model.compile(keras.optimizers.SGD(0.05, momentum=0.9))
        return model

    def damage(path, how):
        whole = path.read_bytes()
        how(path, whole)
        message = message_of(checkpoints.restore, model, "shards")
        path.write_bytes(whole)
        return message

    def garble(path, whole):
        place = whole.find(np.asarray(model.head.centers)[:1].tobytes())
        assert place >= 0
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])

    use_mesh((2, 4))
    model = model_of("ArcFace", 4003)
    checkpoints.save(model, "large")
    os.rename("large", "shards")
    before = np.asarray(model.head.centers)
    files = [path for path in Path("shards/arrays").rglob("*") if path.is_file()]
    data = [path for path in files if before[:1].tobytes() in path.read_bytes()]
    found = {"garbled": damage(data[0], garble)}
    found["stays"] = bool((np.asarray(model.head.centers) == before).all())
    import shutil
    shutil.rmtree("shards")

    model = model_of("ArcFace", 10)
    checkpoints.save(model, "shards")
    found |= {
        "taken": message_of(checkpoints.save, model, "shards"),
        "absent": message_of(checkpoints.load_model, "nothing"),
        "11 classes": message_of(checkpoints.restore, model_of("ArcFace", 11), "shards"),
        "optimizer": message_of(checkpoints.restore, model_of("ArcFace", 10, "Adam"), "shards"),
        "CosFace": message_of(checkpoints.restore, other("CosFace", 5, 2), "shards"),
        "backbone": message_of(checkpoints.restore, other("ArcFace", 10, 1), "shards"),
        "not built": message_of(
            checkpoints.save, km.EmbeddingModel(keras.layers.Dense(3), km.ArcFace(3)), "other"
        ),
    }
    files = [path for path in Path("shards").rglob("*") if path.is_file()]
    largest = max(files, key=lambda path: path.stat().st_size)
    half = lambda path, whole: path.write_bytes(whole[: len(whole) // 2])
    lost = lambda path, whole: path.unlink()
    found["cut short"] = damage(largest, half)
    found["lost"] = damage(largest, lost)
    found["no manifest"] = damage(Path("shards/arrays/manifest.ocdbt"), lost)
    found["no metadata"] = damage(Path("shards/arrays/_METADATA"), half)
    print(json.dumps(found))
"""


def test_what_cannot_be_restored_is_named(tmp_path):
    found = run(HELPERS + REFUSED, {}, tmp_path)
    assert found["taken"].startswith("FileExistsError: `directory` must be a new folder")
    assert "the head is ArcFace(11, 1) here and ArcFace(10, 1) there" in found["11 classes"]
    assert "the head is CosFace(5, 2) here and ArcFace(10, 1) there" in found["CosFace"]
    assert "the optimizer is Adam here and SGD there" in found["optimizer"]
    assert "has shape (4, 9) here and (6, 4) there" in found["backbone"]
    assert "The model must be built" in found["not built"]
    damaged = ["cut short", "garbled", "lost", "no manifest", "no metadata"]
    for name, folder in (("absent", "nothing"), *((name, "shards") for name in damaged)):
        assert found[name].startswith("ValueError: There is no whole checkpoint"), found[name]
        assert f"{tmp_path.name}/{folder}'" in found[name]
    assert "centers was garbled" in found["garbled"]
    assert found["stays"]


PARTS = """
    def scaled(classes=10):
        backbone = keras.Sequential([keras.Input((6,)), keras.layers.Dense(DIM)])
        model = km.EmbeddingModel(backbone, HEADS["ArcFace"](classes))
        optimizer = keras.optimizers.Adam(0.01, epsilon=0.1)
        scale = {"initial_scale": 1024.0, "dynamic_growth_steps": 2}
        model.compile(keras.optimizers.LossScaleOptimizer(optimizer, **scale))
        return model

    class Save(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            checkpoints.save(self.model, f"epoch-{epoch}")

    x, y = data(10)
    settings = {"batch_size": ROWS, "shuffle": False, "verbose": 0}
    use_mesh((2, 4))
    model = scaled()
    model.fit(x, y, epochs=2, callbacks=[Save()], **settings)
    model.save("scaled.keras")
    state = [float(model.optimizer.dynamic_scale), len(model.optimizer.variables)]
    straight = model.fit(x, y, **settings).history["loss"]
    use_one_device()
    again = scaled()
    checkpoints.restore(again, "epoch-1")
    later = again.fit(x, y, **settings).history["loss"]
    loaded = keras.saving.load_model("scaled.keras")
    from_file = loaded.fit(x, y, **settings).history["loss"]
    plain = km.EmbeddingModel(scaled().backbone, HEADS["ArcFace"](10))
    checkpoints.restore(plain, "epoch-1")
    want = np.asarray(checkpoints.load_model("epoch-1").head.centers)
    print(json.dumps([state, straight, later, from_file, bool((plain.head.centers == want).all())]))
"""


def test_a_loss_scale_and_a_model_without_an_optimizer(tmp_path):
    """A checkpoint after each epoch does not reset the scale: 1024, doubled after 3 x 2 pairs."""
    state, straight, later, from_file, plain = run(HELPERS + PARTS, {}, tmp_path)
    assert state == [8192.0, 3 + 2 + 1 + 6]
    np.testing.assert_allclose(later, straight, rtol=1e-5)
    np.testing.assert_allclose(from_file, straight, rtol=1e-5)
    assert plain


MEMORY = """
    use_mesh((2, 4))
    checkpoints.save(model_of("ArcFace", 10), "warm-up")
    DIM = 64
    model = model_of("ArcFace", given["classes"])
    fit(model, given["classes"])
    one = model.head.centers.value.addressable_shards[0].data.nbytes
    open("/proc/self/clear_refs", "w").write("5")
    before = memory("VmRSS")
    checkpoints.save(model, "shards")
    extra = memory("VmHWM") - before
    written = sum(path.stat().st_size for path in Path("shards").rglob("*") if path.is_file())
    print(json.dumps([extra, one, written]))
"""


@pytest.mark.long
def test_no_more_than_a_shard_is_held_while_it_is_written(tmp_path):
    """400 003 classes of 64 dimensions, and their momentum: 8 shards of 26 MB each."""
    extra, one, written = run(HELPERS + MEMORY, {"classes": 400_003}, tmp_path)
    assert one == 100_001 * 64 * 4
    assert written > 2 * 4 * one  # each once, not once for every row of the mesh
    assert written < 2 * 4 * one + 1e6
    assert extra < one


def test_tensorflow_is_told_to_use_save(tmp_path):
    with pytest.raises(ValueError, match="use `model.save`. Received: backend='tensorflow'"):
        km.checkpoints.save(None, tmp_path / "new")
