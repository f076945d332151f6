"""EmbeddingModel: what `fit` trains and reports, and the plain models that it gives."""

import functools
import os
import random
import re
import subprocess
import sys

import keras
import numpy as np
import pytest
import reference
import tensorflow as tf
from keras import layers

import keras_margin as km

ROWS, FEATURES, DIM, CLASSES = 24, 4, 3, 5


def arcface(**settings):
    return km.ArcFace(CLASSES, 0.3, 8.0, **settings)


def adacos(**settings):
    return km.AdaCos(CLASSES, **settings)


HEADS = {"ArcFace": arcface, "AdaCos": adacos}
GRAPH = {"jit_compile": False}  # as a graph, without XLA
every_head = pytest.mark.parametrize("make_head", HEADS.values(), ids=HEADS.keys())


def exactly(message):
    return f"^{re.escape(message)}$"


def data(rows=ROWS, seed=0, noise=0.5):
    """A cloud per class, so that there is something to learn."""
    rng = np.random.default_rng(seed)
    y = rng.integers(0, CLASSES, rows)
    means = np.random.default_rng(99).normal(size=(CLASSES, FEATURES))
    return (means[y] + noise * rng.normal(size=(rows, FEATURES))).astype("float32"), y


def backbone(**dense):
    inputs = keras.Input((FEATURES,), name="pixels")
    x = layers.Dense(6, activation="tanh", **dense)(inputs)
    return keras.Model(inputs, layers.Dense(DIM)(x), name="tower")


def normalized_backbone():
    parts = [layers.Dense(6), layers.BatchNormalization(), layers.Dense(DIM)]
    return keras.Sequential([keras.Input((FEATURES,)), *parts])


def model_of(make_head=arcface, make_tower=backbone, optimizer=None, **compiled):
    """A model with the same initial weights each time.

    It runs eagerly, since tracing would take most of the time of a test, unless `compiled` says
    otherwise. That both are the same is a test below.
    """
    random.seed(0)
    model = km.EmbeddingModel(make_tower(), make_head())
    compiled = compiled or {"run_eagerly": True}
    model.compile(optimizer or keras.optimizers.SGD(0.05, momentum=0.9), **compiled)
    return model


def fit(model, x, y=None, batch_size=6, epochs=1, **settings):
    """The history as a dict of arrays."""
    settings = {"shuffle": False, "verbose": 0, **settings}
    history = model.fit(x, y, batch_size=batch_size, epochs=epochs, **settings)
    return {key: np.array(values) for key, values in history.history.items()}


def evaluate(model, x, y=None, **settings):
    return model.evaluate(x, y, verbose=0, return_dict=True, **settings)


def embeddings_of(model, x):
    return model.backbone(x).numpy().astype("float64")


def margin_losses(model, x, y):
    """ArcFace(0.3, 8) of the reference."""
    centers = model.head.centers.numpy().astype("float64")
    logits, _ = reference.arcface(embeddings_of(model, x), centers, y, margin=0.3, scale=8.0)
    return reference.softmax_loss(logits, y)


def plain_logits(model, x):
    centers = model.head.centers.numpy().astype("float64")
    return float(model.head.current_scale) * reference.cosines(embeddings_of(model, x), centers)


def assert_close(got, want, relative=1e-5):
    for value, expected in zip(got, want, strict=True):
        largest = np.abs(expected).max(initial=0.0)
        np.testing.assert_allclose(value, expected, rtol=relative, atol=relative * largest)


def assert_equal(got, want):
    for value, expected in zip(got, want, strict=True):
        np.testing.assert_array_equal(value, expected)


def arrays(variables):
    return [variable.numpy() for variable in variables]


def python(code, *arguments):
    """Runs code in a fresh process."""
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


# What fit reports


def test_reported_loss_and_accuracy_are_those_of_all_rows():
    """A last batch of two rows counts as two rows; the weights stand still."""
    x, y = data(20)
    model = model_of(optimizer=keras.optimizers.SGD(0.0), **GRAPH)
    history = fit(model, x, y)
    assert history.keys() == {"loss", "accuracy"}
    np.testing.assert_allclose(history["loss"], margin_losses(model, x, y).mean(), rtol=1e-5)
    right = plain_logits(model, x).argmax(axis=1) == y
    np.testing.assert_allclose(history["accuracy"], right.mean(), rtol=1e-6)


def test_accuracy_in_fit_is_without_the_margin():
    """With it a random model of two classes would be right in about 0 % of the rows."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(200, FEATURES)).astype("float32"), rng.integers(0, 2, 200)
    model = model_of(lambda: km.ArcFace(2), optimizer=keras.optimizers.SGD(0.0))
    history = fit(model, x, y, batch_size=50)
    assert 0.35 < history["accuracy"][0] < 0.65


@every_head
def test_evaluate_is_the_plain_cross_entropy(make_head):
    x, y = data(20)
    model = model_of(make_head)
    fit(model, x, y)
    got = evaluate(model, x, y, batch_size=6)
    logits = plain_logits(model, x)
    np.testing.assert_allclose(got["loss"], reference.softmax_loss(logits, y).mean(), rtol=1e-5)
    np.testing.assert_allclose(got["accuracy"], (logits.argmax(axis=1) == y).mean(), rtol=1e-6)


def test_moving_scale_is_reported():
    x, y = data()
    model = model_of(adacos)
    start = float(model.head.current_scale)
    history = fit(model, x, y, epochs=2, validation_data=(x, y))
    names = {"loss", "accuracy", "scale"}
    assert history.keys() == names | {f"val_{name}" for name in names}
    assert history["scale"][1] == pytest.approx(float(model.head.current_scale))
    assert len({start, *history["scale"]}) == 3
    assert_equal(history["val_scale"], history["scale"])


def test_the_scale_of_a_schedule_is_reported_as_it_was_used():
    schedule = keras.optimizers.schedules.PiecewiseConstantDecay([0, 1], [10.0, 20.0, 30.0])
    x, y = data(6)
    model = model_of(lambda: km.ArcFace(CLASSES, 0.3, schedule))
    assert fit(model, x, y, batch_size=6, epochs=3)["scale"].tolist() == [10.0, 20.0, 30.0]


def test_class_weight_of_ignored_rows_in_a_dataset():
    """Keras looks for the weight of class -1 there; with arrays it does not."""
    x, y = data(6)
    y[0] = -1
    model = model_of(functools.partial(arcface, ignore_class=-1))
    weights = dict.fromkeys(range(5), 2.0)
    fit(model, x, y, class_weight=weights)
    with pytest.raises(ValueError, match="give \\(x, y, sample_weight\\). Received: class_weight"):
        model.fit(tf.data.Dataset.from_tensor_slices((x, y)).batch(6), class_weight=weights)


def test_validation_equals_evaluate():
    x, y = data()
    model = model_of()
    history = fit(model, x, y, validation_data=data(10, seed=1))
    got = evaluate(model, *data(10, seed=1))
    np.testing.assert_allclose(history["val_loss"], got["loss"], rtol=1e-6)
    np.testing.assert_allclose(history["val_accuracy"], got["accuracy"], rtol=1e-6)


def test_arcface_learns_from_random_weights_with_its_defaults():
    def wide_backbone():
        parts = [layers.Dense(32, activation="relu"), layers.Dense(8)]
        return keras.Sequential([keras.Input((FEATURES,)), *parts])

    x, y = data(100, noise=0.1)
    model = model_of(lambda: km.ArcFace(CLASSES), wide_backbone, keras.optimizers.SGD(0.1), **GRAPH)
    history = fit(model, x, y, batch_size=20, epochs=60)  # 300 steps
    assert np.isfinite(history["loss"]).all()
    assert history["accuracy"][-1] > 0.95


# The loss, and its gradient


def one_step(model, x, y, **settings):
    """Weights after one step of plain SGD with rate 1 on all rows."""
    model.compile(keras.optimizers.SGD(1.0), run_eagerly=True)
    fit(model, x, y, batch_size=len(y), **settings)
    return arrays(model.trainable_variables)


def manual_step(model, x, y, weights, penalty=lambda: 0.0):
    """The same by hand: sum(weights * loss) / N + penalty, `weights` holding 1 / N."""
    with tf.GradientTape() as tape:
        losses = model.head.loss(model.backbone(x), y, update_state=False)
        total = tf.reduce_sum(losses * tf.constant(weights, "float32")) + penalty()
    variables = model.trainable_variables
    gradients = tape.gradient(total, [variable.value for variable in variables])
    return float(total), [v.numpy() - g for v, g in zip(variables, gradients, strict=True)]


def test_one_step():
    x, y = data()
    loss, want = manual_step(model_of(), x, y, np.full(ROWS, 1 / ROWS))
    np.testing.assert_allclose(loss, margin_losses(model_of(), x, y).mean(), rtol=1e-5)
    assert_close(one_step(model_of(), x, y), want)


def test_head_is_trained():
    x, y = data()
    model = model_of()
    before = model.head.centers.numpy()
    assert any(variable is model.head.centers for variable in model.trainable_weights)
    fit(model, x, y, batch_size=ROWS)
    assert np.abs(model.head.centers.numpy() - before).max() > 1e-4


@pytest.mark.parametrize("shape", [(ROWS,), (ROWS, 1)])
def test_sample_weight_counts_in_the_loss_and_not_in_the_number(shape):
    x, y = data()
    weights = np.random.default_rng(0).uniform(0.0, 3.0, ROWS)
    loss, want = manual_step(model_of(), x, y, weights / ROWS)
    model = model_of(optimizer=keras.optimizers.SGD(0.0))
    reported = fit(model, x, y, sample_weight=weights.reshape(shape))["loss"]
    np.testing.assert_allclose(reported, loss, rtol=1e-5)
    assert_close(one_step(model_of(), x, y, sample_weight=weights.reshape(shape)), want)


@pytest.mark.parametrize("one_hot", [False, True], ids=["ids", "one-hot"])
def test_class_weight(one_hot):
    x, y = data()
    class_weight = {0: 0.5, 1: 2.0, 2: 1.0, 3: 0.0, 4: 3.0}
    weights = np.array([class_weight[label] for label in y])
    _, want = manual_step(model_of(), x, y, weights / ROWS)
    labels = np.eye(CLASSES)[y] if one_hot else y
    assert_close(one_step(model_of(), x, labels, class_weight=class_weight), want)


def test_ignored_rows_do_not_count():
    x, y = data()
    y[::5] = -1
    counted = y != -1
    ignoring = functools.partial(arcface, ignore_class=-1)
    loss, want = manual_step(
        model_of(), x[counted], y[counted], np.full(counted.sum(), 1 / counted.sum())
    )
    model = model_of(ignoring, optimizer=keras.optimizers.SGD(0.0))
    got = fit(model, x, y)
    np.testing.assert_allclose(got["loss"], loss, rtol=1e-5)
    right = plain_logits(model, x[counted]).argmax(axis=1) == y[counted]
    np.testing.assert_allclose(got["accuracy"], right.mean(), rtol=1e-6)
    evaluated = evaluate(model, x, y)
    np.testing.assert_allclose(evaluated["accuracy"], right.mean(), rtol=1e-6)
    assert_close(one_step(model_of(ignoring), x, y), want)


def test_all_rows_ignored_change_nothing():
    x, y = data()
    model = model_of(functools.partial(adacos, ignore_class=-1))
    before = model.get_weights()
    history = fit(model, x, np.full(ROWS, -1))
    assert history["loss"] == history["accuracy"] == [0.0]
    assert_equal(model.get_weights(), before)


def test_regularizers_are_added():
    x, y = data()

    def regularized():
        l2 = keras.regularizers.L2
        return model_of(
            lambda: arcface(centers_regularizer=l2(0.02)),
            lambda: backbone(kernel_regularizer=l2(0.1)),
        )

    model = regularized()
    kernel = model.backbone.layers[1].kernel

    def penalty():
        centers = tf.convert_to_tensor(model.head.centers)
        return 0.1 * tf.reduce_sum(kernel**2) + 0.02 * tf.reduce_sum(centers**2)

    loss, want = manual_step(model, x, y, np.full(ROWS, 1 / ROWS), penalty)
    evaluated = evaluate(model, x, y, batch_size=7)["loss"]
    plain = reference.softmax_loss(plain_logits(model, x), y).mean()
    np.testing.assert_allclose(evaluated, plain + float(penalty()), rtol=1e-5)
    model.compile(keras.optimizers.SGD(0.0))
    np.testing.assert_allclose(fit(model, x, y, batch_size=7)["loss"], loss, rtol=1e-5)
    assert_close(one_step(regularized(), x, y), want)


# The same training, asked for in other ways


def batches(x, y):
    return tf.data.Dataset.from_tensor_slices((x, y)).batch(6)


WAYS = {
    "dataset": lambda model, x, y: fit(model, batches(x, y), batch_size=None, epochs=2),
    "one-hot": lambda model, x, y: fit(model, x, np.eye(CLASSES)[y], epochs=2),
    "one-hot dataset": lambda model, x, y: fit(
        model, batches(x, np.eye(CLASSES)[y]), batch_size=None, epochs=2
    ),
    "column": lambda model, x, y: fit(model, x, y[:, None].astype("float32"), epochs=2),
    "uint8": lambda model, x, y: fit(model, x, y.astype("uint8"), epochs=2),
    "tensors": lambda model, x, y: fit(model, tf.constant(x), tf.constant(y), epochs=2),
    "two calls": lambda model, x, y: [fit(model, x, y), fit(model, x, y)],
}
COMPILED = {
    "run_eagerly": {"run_eagerly": True},
    "jit_compile": {"jit_compile": True},
    "default": {"jit_compile": "auto"},
    "steps_per_execution": {"steps_per_execution": 2},
}


@pytest.fixture(scope="module")
def trained():
    """Weights and history after two epochs."""
    made = {}
    for name, make_head in HEADS.items():
        model = model_of(make_head, **GRAPH)
        history = fit(model, *data(), epochs=2)
        made[name] = model.get_weights(), history
    return made


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS.keys())
def test_data_in_other_forms(way, trained):
    model = model_of(**GRAPH)
    way(model, *data())
    assert_close(model.get_weights(), trained["ArcFace"][0])


@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize("settings", COMPILED.values(), ids=COMPILED.keys())
def test_other_settings_of_compile(name, settings, trained):
    model = model_of(HEADS[name], **settings)
    history = fit(model, *data(), epochs=2)
    weights, want = trained[name]
    assert_close(model.get_weights(), weights, 1e-4)
    assert_close([history[key] for key in want], want.values(), 1e-4)


def test_gradient_accumulation_is_a_larger_batch():
    x, y = data()
    optimizer = keras.optimizers.SGD(0.05, momentum=0.9, gradient_accumulation_steps=2)
    accumulated, plain = model_of(optimizer=optimizer), model_of()
    fit(accumulated, x, y, batch_size=6)
    fit(plain, x, y, batch_size=12)
    assert_close(arrays(accumulated.trainable_variables), arrays(plain.trainable_variables))


def test_train_and_test_on_batch():
    x, y = data()
    model, same = model_of(), model_of()
    logs = model.train_on_batch(x, y, return_dict=True)
    history = fit(same, x, y, batch_size=ROWS)
    assert_close(model.get_weights(), same.get_weights())
    np.testing.assert_allclose(logs["loss"], history["loss"][0], rtol=1e-6)
    same.reset_metrics()  # Keras before 3.15 goes on with those of `fit`
    tested = same.test_on_batch(x, y, return_dict=True)
    np.testing.assert_allclose(tested["loss"], evaluate(same, x, y)["loss"], rtol=1e-6)


def test_callbacks_of_the_user_run():
    x, y = data()
    seen = []
    callback = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: seen.append(logs))
    fit(model_of(), x, y, epochs=2, callbacks=callback)
    fit(model_of(), x, y, callbacks=[callback])
    assert [logs.keys() for logs in seen] == [{"loss", "accuracy"}] * 3


@every_head
def test_evaluate_and_predict_change_no_weight(make_head):
    x, y = data()
    model = model_of(make_head, normalized_backbone)
    fit(model, x, y)
    before = model.get_weights()
    evaluate(model, x + 1, y)
    model.predict(x + 1, verbose=0)
    model(x + 1)
    model(x + 1, training=False)
    model.encoder.predict(x + 1, verbose=0)
    model.classifier.predict(x + 1, verbose=0)
    assert_equal(model.get_weights(), before)
    assert len(model.non_trainable_weights) >= 3  # the moving statistics and the step count


# Backbones


def two_inputs(form):
    """Of a tower with two inputs: a dict of them or a list."""
    image, mask = keras.Input((FEATURES,), name="image"), keras.Input((2,), name="mask")
    hidden = layers.Dense(6, activation="tanh")(layers.Concatenate()([image, mask]))
    inputs = {"image": image, "mask": mask} if form == "dict" else [image, mask]
    return keras.Model(inputs, layers.Dense(DIM)(hidden), name="tower")


def parts_of(x, form):
    """The names are out of alphabetical order in the list: image, mask."""
    mask = x[:, :2] ** 2
    return {"mask": mask, "image": x} if form == "dict" else [x, mask]


@pytest.mark.parametrize("form", ["dict", "list"])
def test_backbone_with_two_inputs(form, tmp_path):
    x, y = data()
    parts = parts_of(x, form)
    model = model_of(make_tower=lambda: two_inputs(form))
    loss = fit(model, parts, y)["loss"]
    same = model_of(make_tower=lambda: two_inputs("list"))
    np.testing.assert_allclose(loss, fit(same, parts_of(x, "list"), y)["loss"], rtol=1e-6)

    embeddings = reference.unit(same(parts_of(x, "list")).numpy())
    np.testing.assert_allclose(model.encoder(parts).numpy(), embeddings, atol=1e-6)
    model.save(tmp_path / "model.keras")
    again = keras.saving.load_model(tmp_path / "model.keras")
    np.testing.assert_allclose(again.encoder(parts).numpy(), embeddings, atol=1e-6)


@pytest.mark.parametrize("form", ["dict", "list"])
def test_export_of_two_inputs_keeps_their_names(form, tmp_path):
    x, _ = data()
    model = model_of(make_tower=lambda: two_inputs(form))
    model.export(tmp_path / "served")
    served = tf.saved_model.load(tmp_path / "served").signatures["serving_default"]
    got = served(image=tf.constant(x), mask=tf.constant(x[:, :2] ** 2))
    want = model.encoder(parts_of(x, form)).numpy()
    np.testing.assert_allclose(got["embedding"], want, atol=1e-6)


@keras.saving.register_keras_serializable(package="test_model")
class Tower(keras.Model):
    """A subclassed backbone, which knows its input shape only once it is called."""

    def __init__(self, dim, **kwargs):
        super().__init__(**kwargs)
        self.dim = dim
        self.hidden = layers.Dense(6, activation="tanh")
        self.last = layers.Dense(dim)

    def call(self, inputs):
        return self.last(self.hidden(inputs))

    def get_config(self):
        return {**super().get_config(), "dim": self.dim}


def test_subclassed_backbone(trained, tmp_path):
    x, y = data()
    model = model_of(make_tower=lambda: Tower(DIM))
    history = fit(model, x, y, epochs=2)
    assert_close(model.get_weights(), trained["ArcFace"][0])
    assert_close(history.values(), trained["ArcFace"][1].values())
    want = model.encoder(x).numpy()
    np.testing.assert_allclose(want, reference.unit(model(x).numpy()), atol=1e-6)

    model.save(tmp_path / "model.keras")
    again = keras.saving.load_model(tmp_path / "model.keras")
    assert_equal(again.get_weights(), model.get_weights())
    assert_equal([again.encoder(x).numpy()], [want])
    model.encoder.save(tmp_path / "encoder.keras")
    encoder = keras.saving.load_model(tmp_path / "encoder.keras")
    assert_equal([encoder(x).numpy()], [want])
    model.export(tmp_path / "served")
    served = tf.saved_model.load(tmp_path / "served").signatures["serving_default"]
    np.testing.assert_allclose(served(image=tf.constant(x))["embedding"], want, atol=1e-6)


@pytest.mark.parametrize("asked", ["encoder", "classifier"])
def test_subclassed_backbone_must_be_called_first(asked):
    model = model_of(make_tower=lambda: Tower(DIM, name="mine"))
    message = (
        "The backbone's input shape is not known yet: call the model on a batch, or `fit` it, "
        "first. Received: backbone='mine' of class Tower"
    )
    with pytest.raises(ValueError, match=exactly(message)):
        getattr(model, asked)
    x, _ = data()
    model(x)
    assert getattr(model, asked)(x).numpy().shape[0] == ROWS


@pytest.mark.parametrize(
    "make", [lambda: keras.Sequential([layers.Dense(DIM)]), lambda: layers.Dense(DIM)]
)
def test_backbone_without_an_input(make):
    x, y = data()
    model = model_of(make_tower=make)
    fit(model, x, y)
    want = reference.unit(model(x).numpy())
    np.testing.assert_allclose(model.encoder(x).numpy(), want, atol=1e-6)


def test_sequential_backbone():
    x, y = data()
    model = model_of(make_tower=normalized_backbone)
    assert model.head.built
    fit(model, x, y)
    want = reference.unit(model(x).numpy())
    np.testing.assert_allclose(model.encoder(x).numpy(), want, atol=1e-6)


def test_backbone_of_feature_maps_is_refused():
    tower = keras.Sequential([keras.Input((8, 8, 1)), layers.Conv2D(4, 3)])
    message = (
        "`embeddings` must be (batch, dim) with a known dim: end the backbone with "
        "GlobalAveragePooling2D, Flatten or Dense. Received: embeddings.shape=(None, 6, 6, 4)"
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        km.EmbeddingModel(tower, km.ArcFace(CLASSES))


# Mixed precision


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_mixed_precision(policy):
    x, y = data(60)
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(policy)
    try:
        model = model_of(adacos, **GRAPH)
        encoder, classifier = model.encoder, model.classifier
    finally:
        keras.config.set_dtype_policy(before)
    history = fit(model, x, y, batch_size=20, epochs=12)
    assert np.isfinite(history["loss"]).all()
    assert history["loss"][-1] < history["loss"][0]
    assert history["scale"][0] != history["scale"][-1]
    assert {variable.dtype for variable in model.head.variables} == {"float32", "int32"}
    assert model(x).numpy().dtype == policy.removeprefix("mixed_")
    embeddings = encoder(x).numpy()
    assert embeddings.dtype == "float32"
    np.testing.assert_allclose(reference.norms(embeddings), np.ones(60), rtol=1e-5)
    assert classifier(x).numpy().dtype == "float32"


# The encoder and the classifier


def test_encoder_is_a_plain_model_of_unit_norm():
    x, y = data()
    model = model_of()
    encoder = model.encoder
    assert type(encoder) is type(backbone())
    assert encoder is model.encoder
    fit(model, x, y)  # the weights are shared
    embeddings = encoder(x).numpy()
    assert embeddings.dtype == "float32"
    np.testing.assert_allclose(reference.norms(embeddings), np.ones(ROWS), rtol=1e-6)
    np.testing.assert_allclose(embeddings, reference.unit(embeddings_of(model, x)), atol=1e-6)


@every_head
def test_classifier_is_the_head_of_the_embeddings(make_head):
    x, y = data()
    model = model_of(make_head)
    classifier = model.classifier
    fit(model, x, y)
    logits = classifier(x).numpy()
    assert_close([logits], [model.head(model(x).numpy())])
    assert_close([logits], [plain_logits(model, x)])


def test_model_gives_the_embeddings_as_they_are():
    x, _ = data()
    model = model_of()
    np.testing.assert_allclose(model.predict(x, verbose=0), model.backbone(x), rtol=1e-5)
    assert_equal([model(x)], [model.backbone(x)])


WITHOUT_PACKAGE = """
import sys
sys.modules["keras_margin"] = None  # importing it raises
import keras, numpy as np
folder = sys.argv[1]
encoder = keras.saving.load_model(folder + "/encoder.keras")
arrays = np.load(folder + "/arrays.npz")
embeddings = encoder.predict(arrays["x"], verbose=0)
np.testing.assert_allclose(embeddings, arrays["embeddings"], rtol=1e-6, atol=1e-7)
"""

WITHOUT_KERAS = """
import sys
sys.modules["keras_margin"] = sys.modules["keras"] = None
import numpy as np, tensorflow as tf
folder = sys.argv[1]
served = tf.saved_model.load(folder + "/served").signatures["serving_default"]
arrays = np.load(folder + "/arrays.npz")
for size in (1, 5, len(arrays["x"])):
    got = served(image=tf.constant(arrays["x"][:size]))["embedding"]
    np.testing.assert_allclose(got, arrays["embeddings"][:size], rtol=1e-5, atol=1e-6)
"""


@pytest.mark.parametrize("code", [WITHOUT_PACKAGE, WITHOUT_KERAS], ids=["encoder", "export"])
def test_what_ships_runs_without_the_package(code, tmp_path):
    x, y = data()
    model = model_of()
    fit(model, x, y)
    model.encoder.save(tmp_path / "encoder.keras")
    model.export(tmp_path / "served")
    np.savez(tmp_path / "arrays.npz", x=x, embeddings=model.encoder.predict(x, verbose=0))
    python(code, tmp_path)


def test_export(tmp_path):
    x, _ = data()
    model = model_of()
    model.export(tmp_path / "served")
    served = tf.saved_model.load(tmp_path / "served")
    assert list(served.signatures) == ["serving_default"]
    signature = served.signatures["serving_default"]
    _, inputs = signature.structured_input_signature
    assert {name: (spec.shape.as_list(), spec.dtype) for name, spec in inputs.items()} == {
        "image": ([None, FEATURES], tf.float32)
    }
    assert {name: spec.shape.as_list() for name, spec in signature.structured_outputs.items()} == {
        "embedding": [None, DIM]
    }
    got = signature(image=tf.constant(x[:7]))["embedding"]
    np.testing.assert_allclose(got, model.encoder(x[:7]).numpy(), rtol=1e-5, atol=1e-6)


def contents(folder):
    return {
        path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()
    }


def test_export_replaces_what_was_there(tmp_path):
    x, y = data()
    model = model_of()
    model.export(tmp_path / "served")
    fit(model, x, y)
    model.export(str(tmp_path / "served"))
    served = tf.saved_model.load(tmp_path / "served").signatures["serving_default"]
    want = model.encoder(x).numpy()
    np.testing.assert_allclose(served(image=tf.constant(x))["embedding"], want, atol=1e-6)
    assert [path.name for path in tmp_path.iterdir()] == ["served"]


def test_interrupted_export_leaves_the_old_folder_whole(tmp_path, monkeypatch):
    model = model_of()
    model.export(tmp_path / "served")
    before = contents(tmp_path)

    def half_written(self, filepath, **kwargs):
        os.makedirs(filepath)
        with open(os.path.join(filepath, "saved_model.pb"), "wb") as file:
            file.write(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(type(keras.export.ExportArchive()), "write_out", half_written)
    with pytest.raises(KeyboardInterrupt):
        model.export(tmp_path / "served")
    assert contents(tmp_path) == before


# Saving


@every_head
def test_saved_model_goes_on_as_if_nothing_had_happened(make_head, tmp_path):
    x, y = data()
    optimizer = keras.optimizers.Adam(0.01)
    model = model_of(make_head, optimizer=optimizer)
    fit(model, x, y)
    model.save(tmp_path / "model.keras")
    again = keras.saving.load_model(tmp_path / "model.keras")
    assert type(again) is km.EmbeddingModel
    assert type(again.head) is type(model.head)
    assert again.head.get_config() == model.head.get_config()
    assert_equal(again.get_weights(), model.get_weights())
    assert_equal(arrays(again.optimizer.variables), arrays(optimizer.variables))
    want, got = fit(model, x, y, epochs=2), fit(again, x, y, epochs=2)
    assert_close(got.values(), want.values(), 1e-6)
    assert_close(again.get_weights(), model.get_weights(), 1e-6)


def test_weights_alone_can_be_saved(tmp_path):
    x, y = data()
    model = model_of(adacos)
    fit(model, x, y)
    model.save_weights(tmp_path / "model.weights.h5")
    again = km.EmbeddingModel(backbone(), adacos())
    again.load_weights(tmp_path / "model.weights.h5")
    assert_equal(again.get_weights(), model.get_weights())
    assert_equal([again.encoder(x).numpy()], [model.encoder(x).numpy()])


def test_uncompiled_model_can_be_saved(tmp_path):
    model = km.EmbeddingModel(backbone(), km.ArcFace(CLASSES), name="mine")
    model.save(tmp_path / "model.keras")
    again = keras.saving.load_model(tmp_path / "model.keras")
    assert again.name == "mine"
    assert_equal(again.get_weights(), model.get_weights())


def test_summary_lists_both_parts():
    model = model_of(lambda: arcface(name="angular"))
    lines = []
    model.summary(print_fn=lines.append)
    text = "\n".join(lines)
    assert re.search(r"tower .* 51 ", text)  # 4 * 6 + 6 + 6 * 3 + 3
    assert re.search(r"angular .* 16 ", text)  # 5 * 3 and the step count
    assert re.search(r"Trainable params: 66 ", text)


# Refused


@pytest.mark.parametrize("head", [layers.Dense(3), "ArcFace", km.ArcFace])
def test_head_of_another_kind(head):
    message = (
        "`head` must be a head of keras_margin, such as keras_margin.ArcFace(num_classes). "
        f"Received: head={head!r}"
    )
    with pytest.raises(TypeError, match=exactly(message)):
        km.EmbeddingModel(backbone(), head)


@pytest.mark.parametrize("tower", [None, "resnet", np.eye(3)], ids=str)
def test_backbone_of_another_kind(tower):
    message = f"`backbone` must be a Keras model. Received: backbone={tower!r}"
    with pytest.raises(TypeError, match=exactly(message)):
        km.EmbeddingModel(tower, km.ArcFace(CLASSES))


def test_compile_takes_no_loss():
    message = (
        "The head is the loss of an EmbeddingModel: call `compile(optimizer)` and choose the loss "
        "by the head. Received: loss='mse'"
    )
    with pytest.raises(TypeError, match=exactly(message)):
        model_of().compile("sgd", loss="mse")


@pytest.mark.parametrize(
    ("given", "received"),
    [
        ({"metrics": ["accuracy"]}, "metrics=['accuracy'], weighted_metrics=None"),
        ({"weighted_metrics": ["accuracy"]}, "metrics=None, weighted_metrics=['accuracy']"),
    ],
)
def test_compile_takes_no_metrics(given, received):
    message = (
        "Metrics of `compile` would compare labels with embeddings. `loss` and `accuracy` are "
        "reported anyway; for the quality of the embeddings call "
        "`keras_margin.verification.evaluate(model.encoder.predict(x), labels)`. "
        f"Received: {received}"
    )
    with pytest.raises(TypeError, match=exactly(message)):
        model_of().compile("sgd", **given)


def test_no_rows_are_refused():
    """Keras' answers would be an empty history and an empty list."""
    x, y = data()
    model = model_of(**GRAPH)
    with pytest.raises(ValueError, match=r"at least one row. Received: y.shape=\(0,\)"):
        fit(model, x[:0], y[:0])
    with pytest.raises(ValueError, match="at least one row"):
        model.evaluate(x[:0], y[:0])
    with pytest.raises(ValueError, match="`validation_data` must have at least one row"):
        fit(model, x, y, validation_data=(x[:0], y[:0]))


def test_labels_are_needed():
    message = "EmbeddingModel needs labels: call `fit(x, y)` or give (x, y) batches."
    with pytest.raises(ValueError, match=re.escape(message)):
        fit(model_of(), data()[0])


@pytest.mark.parametrize("make", [np.array, tf.constant], ids=["array", "tensor"])
@pytest.mark.parametrize(
    ("row", "label", "words"),
    [
        (3, CLASSES, "whole numbers from 0 to 4 (num_classes=5); ids count from 0"),
        (0, 9, "whole numbers from 0 to 4 (num_classes=5)"),
        (
            23,
            -1,
            "whole numbers from 0 to 4 (num_classes=5); to leave rows out give the head "
            "ignore_class=-1",
        ),
    ],
)
def test_labels_are_checked_before_the_first_step(make, row, label, words):
    x, y = data()
    y[row] = label
    model = model_of(**GRAPH)
    before = model.get_weights()
    message = f"`labels` must be {words}. Received: labels[{row}]={label}"
    with pytest.raises(ValueError, match=exactly(message)):
        fit(model, x, make(y))
    assert_equal(model.get_weights(), before)


def test_one_hot_labels_of_another_width_are_refused_before_the_first_step():
    x, y = data()
    message = (
        "`labels` must have shape (batch,), (batch, 1) or, one-hot, (batch, 5) for num_classes=5. "
        "Received: labels.shape=(24, 7)"
    )
    with pytest.raises(ValueError, match=exactly(message)):
        fit(model_of(**GRAPH), x, np.eye(7)[y])


def test_validation_labels_of_other_identities():
    x, y = data()
    message = (
        "validation labels are not training classes; use VerificationCallback to judge the "
        "embeddings of other identities. `labels` must be whole numbers from 0 to 4 "
        "(num_classes=5). Received: labels[0]=107"
    )
    with pytest.raises(ValueError, match=exactly(message)):
        fit(model_of(**GRAPH), x, y, validation_data=(x, np.full(ROWS, 107)))


def stopped(batch, ignore_class=None):
    return exactly(
        f"The loss is nan at batch {batch}. Usual causes: a label outside 0 to 4 (the head has "
        f"num_classes=5, ignore_class={ignore_class}); NaN or infinity in the inputs, or inputs "
        "not scaled to about [0, 1]; a learning rate that is too high (try a tenth); float16 "
        "without loss scaling. The weights may be damaged: go on from the last good ones."
    )


@every_head
def test_first_loss_that_is_not_finite_stops_fit(make_head):
    x, y = data()
    x[13] = np.nan  # in the third batch
    with pytest.raises(FloatingPointError, match=stopped(batch=2)):
        fit(model_of(make_head), x, y, epochs=3)


def test_label_in_a_dataset_that_means_no_class_stops_fit():
    x, y = data()
    y[0] = 77
    model = model_of(functools.partial(arcface, ignore_class=-1), **GRAPH)
    with pytest.raises(FloatingPointError, match=stopped(batch=0, ignore_class=-1)):
        fit(model, batches(x, y), batch_size=None)


# Faults found by trying


@pytest.mark.parametrize("what", ["file", "project", "other file beside a model"])
def test_export_over_anything_but_a_saved_model_is_refused(what, tmp_path):
    model, path = model_of(), tmp_path / "place"
    if what == "file":
        path.write_text("thesis")
    else:
        path.mkdir()
        (path / "thesis.tex").write_text("thesis")
    if what == "other file beside a model":
        (path / "saved_model.pb").write_text("")
    with pytest.raises(FileExistsError, match="`path` of `export` must be a new folder or"):
        model.export(path)
    assert (path if what == "file" else path / "thesis.tex").read_text() == "thesis"


def test_export_through_a_link(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    model_of().export(tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real" / "saved_model.pb").is_file()


def test_evaluate_refuses_labels_that_are_no_classes():
    x, y = data()
    model = model_of()
    with pytest.raises(ValueError, match="`labels` must be whole numbers"):
        model.evaluate(x, y + 100, verbose=0)


def test_accuracy_of_labels_in_a_dataset_that_are_no_classes_is_nan():
    x, y = data()
    results = model_of(run_eagerly=False).evaluate(
        tf.data.Dataset.from_tensor_slices((x, y + 100)).batch(4), return_dict=True, verbose=0
    )
    assert np.isnan(results["loss"]) and np.isnan(results["accuracy"])


def test_validation_dataset_of_other_identities_stops_fit():
    x, y = data()
    others = tf.data.Dataset.from_tensor_slices((x, y + 100)).batch(4)
    with pytest.raises(FloatingPointError, match="validation labels are not training classes"):
        model_of(run_eagerly=False).fit(x, y, validation_data=others, verbose=0)
