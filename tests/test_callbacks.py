"""Callbacks for `fit`."""

import hashlib
import json
import multiprocessing
import random
import time

import keras
import numpy as np
import pytest
from test_saving import X, Y, assert_same_weights, model_with_random_layers

import keras_margin as km


def fit(model, folder, epochs, **kwargs):
    backup = km.callbacks.AtomicBackup(folder, **kwargs)
    fitted = model.fit(X, Y, epochs=epochs, shuffle=False, verbose=0, callbacks=[backup])
    return fitted.epoch


def seeded_model():
    random.seed(0)
    return model_with_random_layers()


def test_a_run_in_two_parts_equals_one_in_one(tmp_path):
    whole = seeded_model()
    assert fit(whole, tmp_path / "whole", 5) == [0, 1, 2, 3, 4]
    assert fit(seeded_model(), tmp_path / "parts", 2) == [0, 1]
    resumed = seeded_model()
    assert km.callbacks.AtomicBackup(tmp_path / "parts").next_epoch == 2
    assert fit(resumed, tmp_path / "parts", 5) == [2, 3, 4]
    assert_same_weights(resumed, whole)


def test_a_run_that_is_done_makes_no_step_more(tmp_path):
    done = seeded_model()
    fit(done, tmp_path, 2)
    again = seeded_model()
    assert fit(again, tmp_path, 2) == []
    assert_same_weights(again, done)


def test_deleted_at_the_end(tmp_path):
    fit(seeded_model(), tmp_path, 2, delete_at_end=True)
    assert list(tmp_path.iterdir()) == []
    assert km.callbacks.AtomicBackup(tmp_path).next_epoch == 0


def test_leftovers_of_killed_runs_are_removed(tmp_path):
    fit(seeded_model(), tmp_path, 1)
    (tmp_path / ".epoch-2-00.weights.h5.abc").mkdir()
    (tmp_path / ".epoch-2-00.weights.h5.abc" / "torn").write_bytes(b"torn")
    (tmp_path / ".backup.json.abc").mkdir()
    (tmp_path / "epoch-2-00.weights.h5").write_bytes(b"never named")
    (tmp_path / "mine.txt").write_text("stays")
    assert fit(seeded_model(), tmp_path, 2) == [1]
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left[0] == "backup.json"
    assert left[1].startswith("epoch-2-")
    assert left[2:] == ["mine.txt"]


@pytest.mark.parametrize("damage", ["cut", "garbled", "missing", "record", "empty record"])
def test_a_damaged_backup_is_named(tmp_path, damage):
    fit(seeded_model(), tmp_path, 1)
    (weights,) = tmp_path.glob("*.weights.h5")
    content = bytearray(weights.read_bytes())
    record = tmp_path / "backup.json"
    if damage == "cut":
        weights.write_bytes(content[: len(content) // 2])
    elif damage == "garbled":
        content[len(content) // 2] ^= 1
        weights.write_bytes(content)
    elif damage == "missing":
        weights.unlink()
    else:
        record.write_text("{" if damage == "record" else "{}")
    name = record.name if "record" in damage else weights.name
    model = seeded_model()
    before = model.get_weights()
    with pytest.raises(ValueError, match=rf"cannot be restored: \S*{name} .*Received: directory="):
        fit(model, tmp_path, 2)
    for got, want in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(got, want)


def other_model(head=None, optimizer="adam", dim=3):
    backbone = keras.Sequential([keras.Input((4,)), keras.layers.Dense(dim)])
    model = km.EmbeddingModel(backbone, head or km.AdaCos(4))
    model.compile(optimizer)
    return model


@pytest.mark.parametrize(
    ("other", "what"),
    [
        ({"dim": 7}, r"shape of weight 0 \[4, 7\] here and \[4, 3\] there"),
        ({"head": km.AdaCos(5)}, r"head AdaCos\(5, .* here and AdaCos\(4, num_subcenters=1\)"),
        ({"head": km.NormFace(4)}, r"head NormFace\(4"),
        ({"optimizer": keras.optimizers.SGD(momentum=0.9)}, "optimizer SGD here and Adam there"),
        # As many variables of the same shapes.
        ({"optimizer": keras.optimizers.Nadam()}, "optimizer Nadam here and Adam there"),
        ({"optimizer": keras.optimizers.Adam(amsgrad=True)}, "number of optimizer variables 11 "),
    ],
    ids=["dimension", "classes", "head", "SGD", "Nadam", "amsgrad"],
)
def test_a_backup_of_another_model_is_refused(tmp_path, other, what):
    fit(other_model(), tmp_path, 1)
    model = other_model(**other)
    before = model.get_weights()
    with pytest.raises(ValueError, match=rf"of another model: {what}[\s\S]*Received: directory="):
        fit(model, tmp_path, 2)
    for got, want in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(got, want)


def test_a_backup_without_a_description_of_the_model(tmp_path):
    """As version 0.1 wrote them."""
    fit(other_model(), tmp_path, 1)
    record = json.loads((tmp_path / "backup.json").read_text())
    del record["model"]
    (tmp_path / "backup.json").write_text(json.dumps(record))
    assert fit(other_model(), tmp_path, 2) == [1]
    with pytest.raises(ValueError, match="of another model"):
        fit(other_model(dim=7), tmp_path, 3)


def test_an_unbuilt_model_is_told_to_build(tmp_path):
    class Backbone(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = keras.layers.Dense(2)

        def call(self, inputs):
            return self.dense(inputs)

    fit(seeded_model(), tmp_path, 1)
    model = km.EmbeddingModel(Backbone(), km.AdaCos(4))
    model.compile("adam")
    with pytest.raises(ValueError, match="must be built"):
        fit(model, tmp_path, 2)


def test_a_loss_scale_goes_on(tmp_path):
    """Restoring builds the optimizer of a fresh model once, and that of a used one not again."""

    def scaled():
        model = seeded_model()
        adam = keras.optimizers.Adam(0.01)
        scale = {"initial_scale": 64.0, "dynamic_growth_steps": 2}
        model.compile(keras.optimizers.LossScaleOptimizer(adam, **scale))
        return model

    whole, parts = scaled(), scaled()
    fit(whole, tmp_path / "whole", 4)
    fit(parts, tmp_path / "parts", 2)
    fit(parts, tmp_path / "parts", 3)  # the same model
    other = scaled()
    fit(other, tmp_path / "parts", 4)  # a new one
    assert len(other.optimizer.variables) == len(whole.optimizer.variables)
    assert float(whole.optimizer.dynamic_scale) > 64.0
    assert float(other.optimizer.dynamic_scale) == float(whole.optimizer.dynamic_scale)
    assert_same_weights(other, whole)


def test_a_file_in_place_of_the_folder_is_named(tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(NotADirectoryError, match="`directory` must be a folder"):
        fit(seeded_model(), tmp_path / "file", 1)


# Other identities, judged after each epoch


def others(samples=7):
    rng = np.random.default_rng(3)
    return rng.normal(size=(samples, *X.shape[1:])).astype("float32"), np.arange(samples) % 3


class Embeddings(keras.callbacks.Callback):
    """Those of the others after each epoch, all at once."""

    def __init__(self):
        super().__init__()
        self.found = []

    def on_epoch_end(self, epoch, logs=None):
        self.found.append(self.model.encoder.predict(others()[0], batch_size=7, verbose=0))


def test_other_identities_are_judged_after_each_epoch():
    x, people = others()
    model, seen = seeded_model(), Embeddings()
    judge = km.callbacks.VerificationCallback(x, people, far=(0.2, 1e-1), batch_size=4)
    best = keras.callbacks.EarlyStopping("val_eer", mode="min", patience=9)
    history = model.fit(X, Y, epochs=3, verbose=0, callbacks=[judge, best, seen]).history
    assert len({embeddings.tobytes() for embeddings in seen.found}) == 3  # it trains
    for epoch, embeddings in enumerate(seen.found):
        want = km.verification.evaluate(embeddings, people, far=(0.2, 0.1))
        assert history["val_eer"][epoch] == pytest.approx(want["eer"])
        assert history["val_tar_at_far_2e-1"][epoch] == want["tar@far=0.2"]
        assert history["val_tar_at_far_1e-1"][epoch] == want["tar@far=0.1"]
        assert history["val_rank1"][epoch] == want["rank1"]
    assert best.best == min(history["val_eer"])


def test_identities_may_be_judged_every_other_epoch():
    judge = km.callbacks.VerificationCallback(*others(), far=0.2, every=2)
    model = seeded_model()
    assert len(model.fit(X, Y, epochs=5, verbose=0, callbacks=[judge]).history["val_eer"]) == 2


def test_an_encoder_of_ones_own_is_judged():
    x, people = others()
    dense = keras.Sequential([keras.Input(x.shape[1:]), keras.layers.Dense(2)])
    dense.compile("sgd", "mse")
    judge = km.callbacks.VerificationCallback(x, people, far=0.2, encoder=dense)
    found = dense.fit(x, np.ones((7, 2)), epochs=1, verbose=0, callbacks=[judge]).history
    embeddings = dense.predict(x, verbose=0)
    want = km.verification.evaluate(embeddings, people, far=0.2)["eer"]
    assert found["val_eer"] == [pytest.approx(want)]
    judge = km.callbacks.VerificationCallback(x, people, far=0.2)
    with pytest.raises(ValueError, match="since the model is no EmbeddingModel"):
        dense.fit(x, np.ones((7, 2)), epochs=1, verbose=0, callbacks=[judge])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"labels": [0, 1]}, r"shape \(7,\)"),
        ({"labels": np.full(7, 0.5)}, r"must be integers. Received: labels\[0\]=0.5"),
        ({"x": np.ones((1, 6)), "labels": [0]}, "Two samples make a pair"),
        ({"far": 2.0}, r"in \[0, 1\]"),
        ({"every": 0}, "`every` must be"),
        ({"batch_size": 0}, "`batch_size` must be"),
    ],
)
def test_what_cannot_be_judged_is_refused(settings, message):
    x, people = others()
    with pytest.raises(ValueError, match=message):
        km.callbacks.VerificationCallback(**{"x": x, "labels": people, **settings})


# Killed at any moment


class Mixed(keras.utils.PyDataset):
    """Three batches, in an order that depends on the epoch alone."""

    def __init__(self, epoch):
        super().__init__()
        self.epoch = epoch
        self.mix()

    def mix(self):
        rng = np.random.default_rng([7, self.epoch])
        self.x = rng.normal(size=(24, 6)).astype("float32")
        self.y = rng.integers(0, 40, 24)

    def __len__(self):
        return 3

    def __getitem__(self, i):
        return self.x[8 * i : 8 * i + 8], self.y[8 * i : 8 * i + 8]

    def on_epoch_end(self):
        self.epoch += 1
        self.mix()


def train(epochs, folder, answers):
    """What a process does: sends the epoch that it begins with, and how it ends."""
    random.seed(0)
    dense = keras.layers.Dense(4)
    backbone = keras.Sequential([keras.Input((6,)), dense, keras.layers.Dropout(0.2, seed=1)])
    warm_up = keras.optimizers.schedules.PolynomialDecay(0.0, 50, 0.3)
    head = km.MarginHead(
        40,
        margin=km.margins.AngularMargin(warm_up),
        scale=km.scales.AdaCosScale(40),
        sample_rate=0.5,
        seed=3,
    )
    model = km.EmbeddingModel(backbone, head)
    model.compile(keras.optimizers.Adam(0.01))
    backup = km.callbacks.AtomicBackup(folder)
    answers.send(backup.next_epoch)
    model.fit(Mixed(backup.next_epoch), epochs=epochs, shuffle=False, verbose=0, callbacks=[backup])
    values = [*model.get_weights(), *(np.asarray(v) for v in model.optimizer.variables)]
    digest = hashlib.sha256(b"".join(np.ascontiguousarray(v).tobytes() for v in values))
    answers.send([digest.hexdigest(), float(head.current_scale), int(head.steps.value)])


def start(epochs, folder):
    """A process, and where its answers come from. It has imported TensorFlow when it starts."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["keras_margin"])
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=train, args=(epochs, folder, there))
    process.start()
    there.close()
    return process, here


def finished(epochs, folder):
    """The first epoch of a run that is left alone, and how it ends."""
    process, answers = start(epochs, folder)
    found = answers.recv(), answers.recv()
    process.join()
    return found


@pytest.mark.long
def test_killed_at_random_moments(tmp_path):
    """20 kills, half of them inside saving; a completed epoch is never lost."""
    epochs = 400
    _, want = finished(epochs, tmp_path / "whole")
    folder = tmp_path / "killed"
    moments, epoch = random.Random(5), 0
    for kill in range(20):
        process, answers = start(epochs, folder)
        begins = answers.recv()
        assert begins >= epoch
        wait_for_a_backup(folder, begins)
        time.sleep(moments.uniform(0.0, 0.3))
        if kill % 2:
            while not any(folder.glob(".*")):  # what is being written
                assert process.is_alive()
        process.kill()
        process.join()
        epoch = km.callbacks.AtomicBackup(folder).next_epoch
        assert begins < epoch < epochs
    begins, got = finished(epochs, folder)
    assert begins == epoch
    assert got == want


def wait_for_a_backup(folder, epoch):
    """Until an epoch after `epoch` has been completed."""
    while km.callbacks.AtomicBackup(folder).next_epoch <= epoch:
        time.sleep(0.01)
