"""What every head must do, checked over the registry of heads."""

import inspect
import json
import subprocess
import sys
import textwrap

import keras
import numpy as np
import pytest
from backends import ON_JAX, float64_only, tensorflow_only, value_and_gradients
from conftest import RUNS
from keras import ops
from registry import CLASSES, DIM, HEADS

import keras_margin as km


def of(kind=lambda entry: True):
    entries = {name: entry for name, entry in HEADS.items() if kind(entry)}
    return pytest.mark.parametrize("entry", entries.values(), ids=entries.keys())


every_head = of()
every_classifier = of(lambda entry: entry.has_classes)


def batch(rows=12, dtype="float32"):
    random = np.random.default_rng(0)
    labels = random.integers(0, CLASSES, rows)
    labels[:CLASSES] = np.arange(CLASSES)
    return random.normal(0.0, 3.0, (rows, DIM)).astype(dtype), labels


def built(entry, **kwargs):
    """A head, the same at each call: sines as centres."""
    head = entry.make(**kwargs)
    if not head.built:
        head.build((None, DIM))
    for variable in head.trainable_variables:
        if len(variable.shape) == 2:
            variable.assign(np.sin(np.arange(np.prod(variable.shape))).reshape(variable.shape))
    return head


def loss_and_gradients(head, embeddings, labels):
    return value_and_gradients(
        lambda x: head.loss(x, labels),
        [embeddings],
        head.trainable_variables,
        head.non_trainable_variables,
    )


def assert_close(got, want, rtol=1e-5):
    for one, other in zip(got, want, strict=True):
        one, other = np.asarray(one), np.asarray(other)
        np.testing.assert_allclose(one, other, rtol, rtol * max(1.0, np.abs(other).max()))


def state_of(layer):
    return [np.array(variable) for variable in layer.non_trainable_variables]


def embedding_model(entry, **kwargs):
    backbone = keras.Sequential(
        [keras.Input((DIM,)), keras.layers.Dense(DIM, kernel_initializer="identity")]
    )
    return km.EmbeddingModel(backbone, built(entry, **kwargs))


def functional_model(entry, **kwargs):
    image, label = keras.Input((DIM,)), keras.Input((), dtype="int32")
    embedding = keras.layers.Dense(DIM, kernel_initializer="identity")(image)
    return keras.Model([image, label], built(entry, **kwargs)(embedding, label))


def test_registry_has_every_public_head():
    public = {
        name
        for name in km.__all__
        if isinstance(getattr(km, name), type)
        and issubclass(getattr(km, name), keras.layers.Layer)
        and not issubclass(getattr(km, name), keras.Model)
    }
    assert public == {type(entry.make()).__name__ for entry in HEADS.values()}


@every_head
def test_config_and_json_round_trip(entry):
    head = built(entry, name="its_name", ignore_class=-1)
    stored = json.dumps(keras.saving.serialize_keras_object(head))
    again = keras.saving.deserialize_keras_object(json.loads(stored))
    assert again.get_config() == head.get_config()

    embeddings, labels = batch()
    again = again if again.built else again.build((None, DIM)) or again
    for new, old in zip(again.variables, head.variables, strict=True):
        new.assign(old)
    assert_close([again.loss(embeddings, labels)], [head.loss(embeddings, labels)], 1e-7)


@every_head
def test_all_arguments_are_in_the_config(entry):
    head = entry.make()
    names = {
        name
        for cls in type(head).__mro__
        if cls.__module__.startswith("keras_margin")
        for name in inspect.signature(cls.__init__).parameters
    }
    own = set(inspect.signature(type(head).__init__).parameters)
    decided_by_the_preset = {"margin", "scale"} - own
    left_out = names - {"self", "kwargs"} - decided_by_the_preset - set(head.get_config())
    assert left_out == set()


def test_keras_files_in_a_fresh_process(tmp_path):
    embeddings, labels = batch()
    np.save(tmp_path / "embeddings.npy", embeddings)
    want = {}
    for name, entry in HEADS.items():
        model = embedding_model(entry)
        model.compile("sgd")
        model.fit(embeddings, labels, epochs=2, batch_size=6, verbose=0)
        model.save(tmp_path / f"{name}.keras")
        want[name] = [np.array(variable).tolist() for variable in model.head.variables]
        want[name] += [model.predict(embeddings, verbose=0).tolist()]
    code = """
        import json, sys
        import keras, numpy as np
        import keras_margin
        got, embeddings = {}, np.load("embeddings.npy")
        for name in json.load(sys.stdin):
            model = keras.models.load_model(f"{name}.keras")
            got[name] = [np.array(variable).tolist() for variable in model.head.variables]
            got[name] += [model.predict(embeddings, verbose=0).tolist()]
        json.dump(got, open("got.json", "w"))
    """
    subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        input=json.dumps(list(HEADS)),
        cwd=tmp_path,
        text=True,
        check=True,
    )
    got = json.loads((tmp_path / "got.json").read_text())
    for name in HEADS:
        assert_close(got[name], want[name], 1e-6)


@tensorflow_only
@every_classifier
def test_saved_model_of_the_classifier(entry, tmp_path):
    import tensorflow as tf

    model = embedding_model(entry)
    archive = keras.export.ExportArchive()
    archive.track(model.classifier)
    archive.add_endpoint(
        "serve", model.classifier.call, [keras.InputSpec(shape=(None, DIM), dtype="float32")]
    )
    archive.write_out(tmp_path / "saved", verbose=False)
    embeddings, _ = batch()
    loaded = tf.saved_model.load(str(tmp_path / "saved"))
    assert_close([loaded.serve(tf.constant(embeddings))], [model.head(embeddings)])


def by_xla(head, labels):
    """The compiled `loss_and_gradients` of the head."""
    run = RUNS["jit" if ON_JAX else "xla"]
    return run(lambda x: loss_and_gradients(head, x, labels), state=head.variables)


@every_head
def test_xla_equals_eager(entry):
    embeddings, labels = batch()
    compiled, eager = built(entry), built(entry)
    run = by_xla(compiled, labels)
    assert_close(run(embeddings), loss_and_gradients(eager, embeddings, labels), 1e-4)
    assert_close(state_of(compiled), state_of(eager))


@every_head
def test_singular_rows_are_finite_and_the_same_under_xla(entry):
    embeddings, labels = batch()
    embeddings[0] = np.sin(np.arange(DIM))  # the first centre: cosine 1
    embeddings[1] = -embeddings[0]
    labels[:3] = 0, 0, 1
    embeddings[2] = embeddings[0]  # cosine 1 with another class
    embeddings[3] = 0.0
    got = by_xla(built(entry), labels)(embeddings)
    want = loss_and_gradients(built(entry), embeddings, labels)
    for one, other in zip(got, want, strict=True):
        assert np.isfinite(other).all()
        # A rounding step of the cosine, divided by the smallest sine: scale * sqrt(epsilon).
        np.testing.assert_allclose(one, other, 1e-4, 64 * 3.5e-4)


@tensorflow_only
@every_head
def test_unknown_batch_size(entry):
    import tensorflow as tf

    head = built(entry)
    signature = [tf.TensorSpec((None, DIM), tf.float32), tf.TensorSpec((None,), tf.int64)]
    compiled = tf.function(lambda x, y: loss_and_gradients(head, x, y), signature)
    embeddings, labels = batch()
    for rows in (12, 7, 1):
        fresh = built(entry)
        for variable, value in zip(fresh.variables, head.variables, strict=True):
            variable.assign(value)
        want = loss_and_gradients(fresh, embeddings[:rows], labels[:rows])
        assert_close(compiled(embeddings[:rows], labels[:rows]), want)
    assert all(np.isfinite(value).all() for value in compiled(embeddings[:0], labels[:0]))


@every_head
@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_mixed_precision(entry, policy):
    embeddings, labels = batch()
    head, plain = built(entry, dtype=policy), built(entry)
    losses = head.loss(embeddings, labels)
    assert losses.dtype == "float32"
    assert {v.dtype for v in head.variables} <= {"float32", "int32"}
    assert_close([losses], [plain.loss(embeddings, labels)])
    if entry.has_classes:
        assert head(ops.cast(embeddings, policy[6:]), labels).dtype == "float32"


@float64_only
@every_head
def test_float64(entry):
    embeddings, labels = batch(dtype="float64")
    wide, narrow = built(entry, dtype="float64"), built(entry)
    got = loss_and_gradients(wide, embeddings, labels)
    assert {keras.backend.standardize_dtype(value.dtype) for value in got} == {"float64"}
    assert_close(got, loss_and_gradients(narrow, embeddings.astype("float32"), labels), 1e-4)


@of(lambda entry: entry.is_cross_entropy)
def test_functional_model_equals_embedding_model(entry):
    embeddings, labels = batch()
    functional, model = functional_model(entry), embedding_model(entry)
    functional.compile(
        keras.optimizers.SGD(0.01), keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    )
    model.compile(keras.optimizers.SGD(0.01))
    settings = {"batch_size": 6, "epochs": 2, "shuffle": False, "verbose": 0}
    history = functional.fit([embeddings, labels], labels, **settings).history
    assert_close([model.fit(embeddings, labels, **settings).history["loss"]], [history["loss"]])
    assert_close(model.get_weights(), functional.get_weights(), 1e-4)


@every_head
def test_evaluate_and_predict_move_nothing(entry):
    embeddings, labels = batch()
    model = embedding_model(entry)
    model.compile("sgd")
    model.fit(embeddings, labels, verbose=0)
    before = state_of(model)
    model.evaluate(embeddings, labels, verbose=0)
    model.predict(embeddings, verbose=0)
    for now, then in zip(state_of(model), before, strict=True):
        np.testing.assert_array_equal(now, then)


@of(lambda entry: entry.is_cosine)
def test_length_of_the_embeddings_does_not_matter(entry):
    embeddings, labels = batch()
    lengths = np.geomspace(1e-20, 1e4, len(embeddings))[:, None].astype("float32")
    assert_close(
        [built(entry).loss(embeddings * lengths, labels)], [built(entry).loss(embeddings, labels)]
    )


@every_head
@pytest.mark.parametrize("length", [0.0, 1e-30, 1e4])
def test_any_length_is_finite(entry, length):
    embeddings, labels = batch()
    embeddings[3] *= length / np.linalg.norm(embeddings[3])
    for value in loss_and_gradients(built(entry), embeddings, labels):
        assert np.isfinite(value).all()


def free_loss(entry, steps):
    """The mean loss at first and after training embeddings and centres freely, 3 a class."""
    labels = np.repeat(np.arange(CLASSES), 3)
    embeddings = keras.Variable(
        np.random.default_rng(1).normal(0, 3.0, (len(labels), DIM)), dtype="float32"
    )
    head, optimizer = built(entry), keras.optimizers.Adam(0.1)
    variables = [embeddings, *head.trainable_variables]
    optimizer.build(variables)

    def step():
        # With its state at rest the loss is one function of embeddings and centres.
        loss, *gradients = value_and_gradients(
            lambda: ops.mean(head.loss(embeddings, labels, update_state=False)), [], variables
        )
        optimizer.apply(gradients, variables)
        return loss

    run = RUNS["jit" if ON_JAX else "graph"]
    step = run(step, state=[*variables, *head.non_trainable_variables, *optimizer.variables])
    losses = [float(step()) for _ in range(steps)]
    assert np.isfinite(losses).all()
    return losses


@every_head
def test_twenty_steps_halve_the_gap_to_the_best_loss(entry):
    losses = free_loss(entry, 400)
    best = min(losses)
    assert losses[20] - best <= 0.5 * (losses[0] - best)
