import re

import keras
import numpy as np
import pytest
from registry import HEADS

import keras_margin as km
from keras_margin import angle_recorder
from keras_margin.angle_recorder import AngleRecorder, angles_to_centers

NAMES = ["target_angle", "nontarget_angle"]
KEYS = {name + end for name in NAMES for end in ("", "_low", "_high")}


def exactly(message):
    return f"^{re.escape(message)}$"


def expected_angles(centers, subcenters, embeddings, labels):
    """Every angle, one after the other."""
    target, others = [], []
    for x, y in zip(np.float64(embeddings), labels, strict=True):
        for k in range(len(centers) // subcenters):
            own = np.float64(centers[k * subcenters : (k + 1) * subcenters])
            norms = np.linalg.norm(own, axis=1) * np.linalg.norm(x)
            angle = np.degrees(np.arccos(np.clip(own @ x / norms, -1, 1).max()))
            (target if k == y else others).append(angle)
    return target, others


def samples(number=23, dim=4, classes=5):
    rng = np.random.default_rng(0)
    return rng.normal(size=(number, dim)), rng.integers(0, classes, number)


def model_of(head):
    backbone = keras.Sequential(
        [
            keras.Input((4,)),
            keras.layers.Dense(4),
            keras.layers.Dropout(0.5),
            keras.layers.BatchNormalization(),
        ]
    )
    model = km.EmbeddingModel(backbone, head)
    model.compile(keras.optimizers.SGD(0.05))
    return model


def fit(model, *callbacks, epochs=2, rows=12):
    x, y = samples(rows)
    return model.fit(x, y, batch_size=4, epochs=epochs, verbose=0, callbacks=list(callbacks))


@pytest.mark.parametrize("block", [1, 7, 2**22])
@pytest.mark.parametrize("name", ["AdaCos", "ArcFace, sub-centres", "SoftmaxHead", "SphereFace2"])
def test_quantiles_of_all_angles(monkeypatch, name, block):
    monkeypatch.setattr("keras_margin.retrieval.BLOCK_SIZE", block)
    head = HEADS[name].make()
    head.build((None, 4))
    x, y = samples()
    found = angles_to_centers(head, x, y)
    target, others = expected_angles(np.array(head.centers), head.num_subcenters, x, y)
    assert found.keys() == KEYS
    for end, share in (("", 0.5), ("_low", 0.1), ("_high", 0.9)):
        assert found[f"target_angle{end}"] == pytest.approx(np.quantile(target, share), abs=1e-3)
        # An angle that is there: to half a bin.
        lower = np.quantile(others, share, method="lower")
        assert found[f"nontarget_angle{end}"] == pytest.approx(lower, abs=0.00501)


def test_known_angles():
    head = km.ArcFace(3)
    head.build((None, 2))
    head.centers.assign([[2.0, 0.0], [0.0, 1.0], [-3.0, 0.0]])
    found = angles_to_centers(head, [[5.0, 0.0], [0.0, 0.1]], [0, 2])
    assert found["target_angle"] == pytest.approx(45.0)  # 0 and 90
    assert found["target_angle_low"] == pytest.approx(9.0)
    assert found["nontarget_angle"] == pytest.approx(90.0, abs=0.006)  # 90, 180, 90, 0
    assert found["nontarget_angle_high"] == pytest.approx(90.0, abs=0.006)


def test_ignored_rows_are_left_out():
    head = km.ArcFace(5, ignore_class=-1)
    head.build((None, 4))
    x, y = samples()
    y[::3] = -1
    assert angles_to_centers(head, x, y) == angles_to_centers(head, x[y >= 0], y[y >= 0])
    message = (
        "`labels` must hold a class that counts. Received: labels that are all ignore_class=-1"
    )
    with pytest.raises(ValueError, match=exactly(message)):
        angles_to_centers(head, x, np.full(len(x), -1))


def test_nothing_of_samples_times_classes_is_held(monkeypatch):
    largest = []
    histogram = angle_recorder._histogram
    monkeypatch.setattr("keras_margin.retrieval.BLOCK_SIZE", 64)
    monkeypatch.setattr(
        angle_recorder, "_histogram", lambda a: largest.append(a.size) or histogram(a)
    )
    head = km.ArcFace(100)
    head.build((None, 4))
    angles_to_centers(head, *samples(60, classes=100))
    assert max(largest) <= 64


def test_writes_into_the_history_of_each_epoch():
    model = model_of(km.AdaCos(5))
    recorder = AngleRecorder(*samples(), every=2)
    history = fit(model, recorder).history
    assert KEYS | {"scale"} <= history.keys() and "step" not in history
    assert recorder.history["step"] == [0, 2, 3, 4, 6]  # three steps an epoch
    last = {name: values[-1] for name, values in history.items()}
    embeddings = model.encoder.predict(recorder.x, verbose=0)
    for name, value in angles_to_centers(model.head, embeddings, recorder.labels).items():
        assert last[name] == recorder.history[name][-1] == pytest.approx(value, abs=1e-3)
        assert history[name][0] == recorder.history[name][2]
    assert last["scale"] == pytest.approx(float(model.head.current_scale), rel=1e-6)
    assert recorder.history["scale"][0] == pytest.approx(km.scales.fixed_adacos_scale(5), rel=1e-6)
    assert len(set(recorder.history["scale"])) == 5  # it moves, and each is the one of its step


def test_without_every_only_the_start_and_the_ends_of_epochs():
    recorder = AngleRecorder(*samples())
    fit(model_of(km.ArcFace(5)), recorder)
    assert recorder.history["step"] == [0, 3, 6]


def test_callbacks_after_it_can_follow_it():
    seen = []
    follower = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: seen.append(logs["target_angle"])
    )
    history = fit(model_of(km.ArcFace(5)), AngleRecorder(*samples()), follower).history
    assert seen == history["target_angle"]


def test_the_training_is_the_same_with_it():
    weights = []
    for callbacks in ([], [AngleRecorder(*samples(), every=1)]):
        keras.utils.set_random_seed(0)
        model = model_of(km.AdaCos(5))
        fit(model, *callbacks)
        weights.append([np.array(variable) for variable in model.variables])
    for alone, watched in zip(*weights, strict=True):
        np.testing.assert_array_equal(alone, watched)


def test_steps_go_on_in_a_training_that_is_gone_on_with():
    model = model_of(km.ArcFace(5))
    fit(model, epochs=1)
    recorder = AngleRecorder(*samples(), every=5)
    fit(model, recorder)
    assert recorder.history["step"] == [3, 5, 6, 9]


def test_several_steps_in_one_execution():
    model = model_of(km.ArcFace(5))
    model.compile(keras.optimizers.SGD(0.05), steps_per_execution=3)
    recorder = AngleRecorder(*samples(), every=2)
    fit(model, recorder, rows=24)
    assert recorder.history["step"] == [0, 3, 6, 9, 12]


def test_a_scale_that_differs_by_sample_is_left_out():
    recorder = AngleRecorder(*samples())
    fit(model_of(km.SphereFace(5)), recorder, epochs=1)
    assert recorder.history.keys() == KEYS | {"step"}


def test_functional_model_with_encoder_and_head():
    x, y = samples()
    inputs, labels = keras.Input((4,)), keras.Input((), dtype="int32")
    embedding, head = keras.layers.Dense(4)(inputs), km.AdaCos(5)
    model = keras.Model([inputs, labels], head(embedding, labels))
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    recorder = AngleRecorder(x, y, encoder=keras.Model(inputs, embedding), head=head)
    model.fit([x, y], y, verbose=0, callbacks=[recorder])
    assert recorder.history["step"] == [0, 1]
    with pytest.raises(ValueError, match="^`head` must have class centres .* Received: NoneType"):
        model.fit([x, y], y, verbose=0, callbacks=[AngleRecorder(x, y)])


def test_is_among_the_callbacks():
    assert km.callbacks.AngleRecorder is AngleRecorder


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"labels": [0, 1]}, r"`labels` must have one entry per row, shape \(23,\)"),
        ({"x": np.ones((0, 4)), "labels": []}, "`labels` must hold at least one sample"),
        ({"every": 0}, "`every` must be at least 1"),
        ({"batch_size": 0}, "`batch_size` must be at least 1"),
    ],
)
def test_arguments_are_checked(change, message):
    x, y = samples()
    with pytest.raises(ValueError, match=f"^{message}"):
        AngleRecorder(**({"x": x, "labels": y} | change))


def test_labels_must_be_classes_of_the_head():
    with pytest.raises(ValueError, match="labels"):
        fit(model_of(km.ArcFace(5)), AngleRecorder(samples()[0], np.full(23, 5)))


def test_a_head_without_classes_is_refused():
    message = "`head` must have class centres to measure angles to. Received: SemiHardTriplet"
    with pytest.raises(ValueError, match=exactly(message)):
        fit(model_of(km.SemiHardTriplet()), AngleRecorder(*samples()))


def test_embeddings_that_are_not_finite_are_refused():
    head = km.ArcFace(5)
    head.build((None, 4))
    x, y = samples()
    x[3, 1] = np.nan
    with pytest.raises(
        ValueError, match=r"^`embeddings` must be finite. Received: embeddings\[3\]"
    ):
        angles_to_centers(head, x, y)


def test_steps_are_batches_where_the_optimizer_gathers_gradients():
    model = model_of(km.ArcFace(5))
    model.compile(keras.optimizers.SGD(0.05, gradient_accumulation_steps=2))
    recorder = AngleRecorder(*samples(), every=1)
    fit(model, recorder, epochs=2)
    steps = recorder.history["step"]
    assert steps == sorted(set(steps)) == list(range(steps[0], steps[-1] + 1))
