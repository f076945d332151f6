"""Faults that users of other packages reported: each must not be one here.

Those that stand beside their subject are elsewhere: labels in test_labels.py, singular cosines in
test_heads.py and test_conformance.py, AdaCos' scale in test_scales.py, replicas in
test_distribution.py.
"""

import math
import os
import subprocess
import sys
import textwrap

import keras
import numpy as np
import pytest
import reference
import tensorflow as tf
from keras.optimizers.schedules import PolynomialDecay
from registry import CLASSES, DIM, HEADS

import keras_margin as km
from keras_margin.margins import AngularMargin, CombinedMargin, MultiplicativeMargin


def of(kind=lambda entry: True, without=()):
    entries = {name: e for name, e in HEADS.items() if kind(e) and name not in without}
    return pytest.mark.parametrize("entry", entries.values(), ids=entries.keys())


every_head = of()
every_classifier = of(lambda entry: entry.has_classes)
every_softmax = of(lambda entry: entry.is_cross_entropy)


def batch(rows=12, seed=0):
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, CLASSES, rows)
    labels[:CLASSES] = np.arange(CLASSES)[:rows]
    return rng.normal(0.0, 3.0, (rows, DIM)).astype("float32"), labels


def built(head):
    """With sines as centres: the same at each call."""
    if not head.built:
        head.build((None, DIM))
    if head.num_classes is not None:
        shape = head.centers.shape
        head.centers.assign(np.sin(np.arange(np.prod(shape))).reshape(shape))
    return head


def wide(head):
    """Centres of any head in float64, for the reference."""
    return head.centers.numpy().astype("float64")


def model_of(head, **compiled):
    """The head behind a backbone that leaves the embeddings as they are until it learns."""
    dense = keras.layers.Dense(DIM, kernel_initializer="identity")
    model = km.EmbeddingModel(keras.Sequential([keras.Input((DIM,)), dense]), built(head))
    model.compile(keras.optimizers.SGD(0.01), **(compiled or {"run_eagerly": True}))
    return model


def loss_and_gradients(head, embeddings, labels):
    embeddings = tf.convert_to_tensor(embeddings)
    trained = [variable.value for variable in head.trainable_variables]
    with tf.GradientTape() as tape:
        tape.watch(embeddings)
        losses = head.loss(embeddings, labels)
    gradients = tape.gradient(losses, [embeddings, *trained])
    return [losses, *(tf.convert_to_tensor(gradient) for gradient in gradients)]


def state_of(layer):
    return [np.array(variable) for variable in layer.non_trainable_variables]


def assert_equal(got, want):
    for one, other in zip(got, want, strict=True):
        np.testing.assert_array_equal(one, other)


# Labels where there should be none


@every_classifier
def test_evaluation_of_a_random_classifier_is_no_better_than_chance(entry):
    """Validation 100 %: the label had reached the logits."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(600, DIM)), rng.integers(0, CLASSES, 600)
    results = model_of(entry.make()).test_on_batch(x, y, return_dict=True)
    assert abs(results["accuracy"] - 1 / CLASSES) < 0.06


@every_classifier
def test_labels_do_not_change_the_logits_of_evaluation(entry):
    embeddings, labels = batch()
    head = built(entry.make())
    plain = head(embeddings)
    assert_equal(head(embeddings, labels, training=False), plain)
    assert_equal(head(embeddings, np.roll(labels, 1), training=False), plain)


@every_classifier
def test_predict_needs_no_label_and_has_the_scale(entry):
    embeddings, _ = batch()
    head = built(entry.make())
    (image,) = model_of(head).classifier.inputs
    assert image.shape == (None, DIM)
    logits = head(embeddings).numpy()
    np.testing.assert_allclose(keras.ops.softmax(logits).numpy().sum(axis=1), 1.0, rtol=1e-5)
    if entry.is_cross_entropy and entry.is_cosine:
        cosines = reference.cosines(embeddings.astype("float64"), wide(head), head.num_subcenters)
        want = float(head.current_scale) * cosines
        np.testing.assert_allclose(logits, want, rtol=1e-4, atol=1e-4)


ZERO_MARGIN = {
    "CosFace": lambda: km.CosFace(CLASSES, 0.0, 9.0),
    "ArcFace": lambda: km.ArcFace(CLASSES, 0.0, 9.0),
    "ElasticFace": lambda: km.ElasticFace(CLASSES, 0.0, 9.0, std=0.0),
    "CombinedMargin": lambda: km.MarginHead(CLASSES, CombinedMargin(), 9.0),
    "SphereFace": lambda: km.SphereFace(CLASSES, 1.0),
    "LSoftmax": lambda: km.LSoftmax(CLASSES, 1),
    "AdaFace": lambda: km.AdaFace(CLASSES, 0.0, 9.0),
    "SphereFace2": lambda: km.SphereFace2(CLASSES, 0.0, 9.0),
}


@pytest.mark.parametrize("make", ZERO_MARGIN.values(), ids=ZERO_MARGIN.keys())
def test_training_without_a_margin_has_the_logits_of_predict(make):
    """The scale was lost in one of the two."""
    embeddings, labels = batch()
    head = built(make())
    trained, plain = head(embeddings, labels), head(embeddings)
    np.testing.assert_allclose(trained, plain, rtol=2e-5, atol=2e-5)


@of(lambda entry: entry.is_cross_entropy, without=["CurricularFace"])
def test_margin_changes_the_logit_of_the_target_alone(entry):
    """Smoothed labels used as the mask gave every class a margin."""
    embeddings, labels = batch()
    head = built(entry.make())
    margined, plain = head(embeddings, labels).numpy(), head(embeddings).numpy()
    margined[np.arange(12), labels] = plain[np.arange(12), labels] = 0.0
    np.testing.assert_array_equal(margined, plain)


@every_classifier
def test_labels_in_another_form_are_the_same_labels(entry):
    embeddings, labels = batch()
    want = built(entry.make()).loss(embeddings, labels)
    assert_equal(built(entry.make()).loss(embeddings, labels.astype("uint8")[:, None]), want)
    assert_equal(built(entry.make()).loss(embeddings, np.eye(CLASSES)[labels]), want)


@every_classifier
@pytest.mark.parametrize("label", [CLASSES, -5])
def test_label_that_means_no_class_is_refused(entry, label):
    embeddings, labels = batch()
    labels[7] = label
    head = built(entry.make())
    for ask in (head, head.loss):
        with pytest.raises(ValueError, match=r"`labels` must be whole numbers from 0 to 4"):
            ask(embeddings, labels)


OWN_PATHS = ["CurricularFace", "MagFace", "SphereFace2"]


@of(without=HEADS.keys() - set(OWN_PATHS))
def test_label_that_means_no_class_is_no_plausible_number_in_compiled_code(entry):
    embeddings, labels = batch()
    head, good = built(entry.make()), np.arange(12) != 7
    bad = tf.constant(np.where(good, labels, CLASSES))
    loss, logits = tf.function(lambda y: (head.loss(embeddings, y), head(embeddings, y)))(bad)
    assert np.isnan(loss[7]) and np.isnan(logits[7]).all()
    assert np.isfinite(loss.numpy()[good]).all() and np.isfinite(logits.numpy()[good]).all()
    assert all(np.isfinite(value).all() for value in state_of(head))


# Weights that do not train, or are not saved


@every_classifier
def test_one_step_trains_the_centres(entry):
    """Weights inside a loss object are in no optimizer."""
    embeddings, labels = batch()
    model = model_of(entry.make())
    before = model.head.centers.numpy()
    assert any(weight is model.head.centers for weight in model.trainable_weights)
    model.train_on_batch(embeddings, labels)
    assert (np.abs(model.head.centers.numpy() - before).max(axis=1) > 0).any()


STATEFUL = [
    *("AdaCos", "AdaFace", "ArcFace, warm-up", "CurricularFace", "ElasticFace"),
    *("MarginHead, learned scale", "SphereFace", "SphereFace2"),
]


@of(without=HEADS.keys() - set(STATEFUL))
def test_next_losses_after_loading_are_the_same(entry, tmp_path):
    """Scale, running statistics, step count and draws go on."""
    embeddings, labels = batch()
    model = model_of(entry.make())
    for _ in range(2):
        model.head.loss(embeddings, labels)
    model.save(tmp_path / "model.keras")
    model.save_weights(tmp_path / "model.weights.h5")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    fresh = model_of(entry.make())
    fresh.load_weights(tmp_path / "model.weights.h5")
    want = [model.head.loss(embeddings, labels) for _ in range(2)]
    assert_equal([loaded.head.loss(embeddings, labels) for _ in range(2)], want)
    assert_equal([fresh.head.loss(embeddings, labels) for _ in range(2)], want)


def test_warm_up_goes_on_after_a_resume(tmp_path):
    """Margin 0 to .5 and scale 16 to 64 over six training calls, saved after the third."""
    embeddings, labels = batch()

    def warm_up(start, end):
        return PolynomialDecay(start, 6, end_learning_rate=end, power=1.0)

    model = model_of(km.ArcFace(CLASSES, warm_up(0.0, 0.5), warm_up(16.0, 64.0)))
    model.compile(keras.optimizers.SGD(0.0), run_eagerly=True)
    settings = {"batch_size": 12, "verbose": 0}
    first = model.fit(embeddings, labels, epochs=3, **settings).history
    model.save(tmp_path / "model.keras")
    model = keras.saving.load_model(tmp_path / "model.keras")
    model.evaluate(embeddings, labels, verbose=0)
    later = model.fit(embeddings, labels, epochs=5, **settings).history
    want, x = [], embeddings.astype("float64")
    for t in [0, 1, 2, 3, 4, 5, 6, 6]:
        at = {"margin": np.float64(t / 12), "scale": 16.0 + 8.0 * t}
        logits, _ = reference.arcface(x, wide(model.head), labels, **at)
        want.append(reference.softmax_loss(logits, labels).mean())
    np.testing.assert_allclose(first["loss"] + later["loss"], want, rtol=1e-5)
    np.testing.assert_allclose(later["scale"], [40.0, 48.0, 56.0, 64.0, 64.0], rtol=1e-6)


@pytest.mark.parametrize(
    ("call", "value"), [(1, 892.857), (1658, 1000 / 199.96), (1659, 5.0), (10**6, 5.0)]
)
def test_sphereface_reaches_its_smallest_lambda_at_call_1659(call, value):
    head = built(km.SphereFace(CLASSES))
    head.steps.assign(call - 1)
    np.testing.assert_allclose(head.margin_rule.annealing("float32"), value, rtol=1e-6)


@pytest.mark.parametrize("lambda_gamma", [0.1, 2.0])
def test_lambda_is_not_frozen_in_compiled_code(lambda_gamma):
    """A Python float would stay what it was when the function was traced."""
    embeddings, labels = batch()
    settings = {"lambda_base": 1500.0, "lambda_gamma": lambda_gamma, "lambda_min": 5.0}
    head = built(km.SphereFace(CLASSES, 2.0, **settings))
    step = tf.function(lambda: head.loss(embeddings, labels))
    x, state = embeddings.astype("float64"), None
    for _ in range(10):
        got = step()
        head.loss(embeddings, labels, training=False)
        logits, state = reference.sphereface(x, wide(head), labels, state, margin=2.0, **settings)
        want = reference.softmax_loss(logits, labels)
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


def test_head_used_twice_in_one_model_shares_its_weights():
    """Two views of one image, as two inputs."""
    embeddings, labels = batch()
    head = built(km.ArcFace(CLASSES, 0.3, 9.0))
    one, other, label = keras.Input((DIM,)), keras.Input((DIM,)), keras.Input((), dtype="int32")
    model = keras.Model([one, other, label], [head(one, label), head(other, label)])
    assert len(model.trainable_weights) == 1
    entropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.5), [entropy, entropy], run_eagerly=True)
    x, w = embeddings.astype("float64"), wide(head)

    def loss(x, w):
        logits, _ = reference.arcface(x, w, labels, margin=0.3, scale=9.0)
        return reference.softmax_loss(logits, labels)

    views = [x, x[::-1].copy()]
    moved = sum(reference.gradients(loss, view, w)[1] for view in views)
    got = model.fit([*views, labels], [labels, labels], batch_size=12, verbose=0).history["loss"]
    np.testing.assert_allclose(got, [sum(loss(view, w).mean() for view in views)], rtol=1e-5)
    np.testing.assert_allclose(head.centers, w - 0.5 * moved, rtol=1e-4, atol=1e-5)
    assert head.steps.numpy() == 2
    plain = model.predict([*views, labels], verbose=0)
    np.testing.assert_allclose(plain[0][::-1], plain[1], rtol=1e-5)


# NaN


@every_classifier
def test_zero_embeddings_and_zero_centres_are_finite(entry):
    embeddings, labels = batch()
    head = built(entry.make())
    centers = head.centers.numpy()
    centers[: head.num_subcenters], embeddings[[0, 5]] = 0.0, 0.0
    head.centers.assign(centers)
    assert all(np.isfinite(value).all() for value in loss_and_gradients(head, embeddings, labels))
    assert np.isfinite(head(embeddings, labels)).all()
    assert all(np.isfinite(value).all() for value in state_of(head))


@every_head
def test_batch_of_one_class_is_finite(entry):
    embeddings, _ = batch()
    head = built(entry.make())
    for label in (0, 3):
        got = loss_and_gradients(head, embeddings, np.full(12, label))
        assert all(np.isfinite(value).all() for value in got)
    assert all(np.isfinite(value).all() for value in state_of(head))


@every_head
@pytest.mark.parametrize("rows", [0, 12], ids=["empty", "all ignored"])
def test_nothing_to_learn_is_loss_0_and_moves_nothing(entry, rows):
    head = built(entry.make(ignore_class=-1))
    before = state_of(head)
    got = loss_and_gradients(head, batch()[0][:rows], np.full(rows, -1))
    assert_equal(got, [np.zeros(value.shape) for value in got])
    assert got[0].shape == (rows,)
    assert_equal(state_of(head), before)


def test_200_calls_on_collapsed_embeddings_leave_scale_and_loss_finite():
    """All cosines .7 of 2000 classes: the mass of the others overflows, and the scale with it."""
    around = reference.unit(np.random.default_rng(0).normal(size=(2000, 7)))
    centers = np.concatenate([np.full((2000, 1), 0.7), math.sqrt(0.51) * around], axis=1)
    head = km.AdaCos(2000)
    head.build((None, 8))
    head.centers.assign(centers)
    embeddings, labels = np.eye(1, 8, dtype="float32").repeat(8, axis=0), np.arange(8)
    step = tf.function(lambda: (head.loss(embeddings, labels), head.current_scale))
    losses, scales = zip(*(step() for _ in range(200)), strict=True)
    largest = 4.0 * math.sqrt(2.0) * math.log(1999.0)
    assert np.max(scales) <= largest * (1 + 1e-6)
    np.testing.assert_allclose(losses, math.log(2000.0), rtol=1e-4)
    before = state_of(head)
    head.loss(embeddings, labels, training=False)
    head(embeddings, labels, training=False)
    head(embeddings)
    assert_equal(state_of(head), before)


def test_large_common_offset_loses_no_accuracy():
    """All cosines .99, scale 64: log B - t is a difference of large numbers."""
    around = 2 * math.pi * np.arange(CLASSES) / CLASSES
    angle = math.acos(0.99)
    rows = [
        np.full(CLASSES, 0.99),
        math.sin(angle) * np.cos(around),
        math.sin(angle) * np.sin(around),
    ]
    embeddings = np.eye(1, 3, dtype="float32").repeat(CLASSES, axis=0)
    for head, want in [
        (km.NormFace(CLASSES), math.log(CLASSES)),
        (km.CosFace(CLASSES), math.log1p((CLASSES - 1) * math.exp(64 * 0.35))),
    ]:
        head.build((None, 3))
        head.centers.assign(np.stack(rows, axis=1))
        np.testing.assert_allclose(head.loss(embeddings, np.arange(CLASSES)), want, rtol=1e-5)


# Mixed precision


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_updates_smaller_than_half_precision_survive(policy):
    """Centres of about unit length move by less than 1e-5, the step of float16 is 5e-4."""
    embeddings, labels = batch()
    moved = []
    for dtype in (policy, "float32"):
        model = model_of(km.ArcFace(CLASSES, 0.3, 8.0, dtype=dtype))
        model.compile(keras.optimizers.SGD(1e-5), run_eagerly=True)
        before = model.head.centers.numpy()
        model.fit(embeddings, labels, batch_size=4, verbose=0)
        assert model.head.centers.dtype == "float32"
        moved.append(model.head.centers.numpy() - before)
    largest = np.abs(moved[1]).max()
    assert 1e-7 < largest < 1e-4
    np.testing.assert_allclose(*moved, atol=0.02 * largest)


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_gradient_of_the_centres_accumulates_in_float32(policy):
    """A sum over 4000 rows; bfloat16 would stop counting at 256."""
    embeddings, labels = batch(4000)
    embeddings = tf.cast(embeddings, policy.removeprefix("mixed_"))
    head = built(km.ArcFace(CLASSES, 0.3, 4.0, dtype=policy))
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(head.loss(embeddings, labels))
    got = tape.gradient(loss, head.centers.value).numpy()
    x, w = embeddings.numpy().astype("float64"), wide(head)
    logits, _ = reference.arcface(x, w, labels, margin=0.3, scale=4.0)
    _, want = reference.analytic_gradients(
        x, w, labels, logits, 4.0, lambda c: reference.arcface_slope(c, 0.3)
    )
    assert np.abs(got - want).max() < 5e-3 * np.abs(want).max()


# Margins and scales


@pytest.mark.parametrize(
    ("terms", "value"), [((1.0, 0.3, 0.2), 1.39), ((1.5, 0.0, 0.0), 0.0), ((1.0, 0.0, 0.2), 19.2)]
)
def test_all_terms_of_the_combined_margin_count(terms, value):
    """At theta = pi / 3, scale 64; elsewhere (1, .3, .2) was CosFace and (1.5, 0, 0) an error."""
    head = km.MarginHead(2, CombinedMargin(*terms))
    head.build((None, 2))
    head.centers.assign(np.eye(2))
    x = np.array([[0.5, math.sqrt(0.75)]], "float32")
    np.testing.assert_allclose(head(x, np.array([0]))[0, 0], value, atol=5e-3)


@pytest.mark.parametrize("margin", [0.2, 0.5, 1.0, 1.5])
@pytest.mark.parametrize("rule", [AngularMargin, lambda m: MultiplicativeMargin(1.0 + m)])
def test_more_distant_target_never_gets_a_better_logit(rule, margin):
    """Accuracy 0 and falling loss: all cosines had gone to -1, where the logit rose again."""
    head = km.MarginHead(2, rule(margin), dtype="float64")
    head.build((None, 2))
    head.centers.assign(np.eye(2))
    theta = np.linspace(0.0, math.pi, 500)
    x = np.stack([np.cos(theta), np.sin(theta)], axis=1)
    logits = head(x, np.zeros(500, int)).numpy()[:, 0]
    assert np.diff(logits).max() < 0.0


def test_gradient_of_a_learned_scale_is_the_numerical_one():
    embeddings, labels = batch()
    head = built(km.MarginHead(CLASSES, None, km.scales.LearnedScale(7.0), dtype="float64"))
    (log_scale,) = head.scale_policy.trainable_variables
    x, w = embeddings.astype("float64"), wide(head)
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(head.loss(x, labels))
    got = tape.gradient(loss, log_scale.value)

    def slow(a):
        logits, _ = reference.normface(x, w, labels, scale=np.exp(a))
        return reference.softmax_loss(logits, labels).mean()

    np.testing.assert_allclose(log_scale, math.log(7.0), rtol=1e-12)
    np.testing.assert_allclose(loss, slow(math.log(7.0)), rtol=1e-9)
    want = reference.numerical_gradient(slow, np.array(math.log(7.0)))
    np.testing.assert_allclose(got, want, rtol=1e-8)


@of(lambda entry: entry.has_classes, without=["SoftmaxHead", "LSoftmax"])
def test_lengths_of_the_centres_carry_nothing(entry):
    """Weight decay on them would only hurt, so there is none unless it is asked for."""
    embeddings, labels = batch()
    head, longer = built(entry.make()), built(entry.make())
    assert head.losses == []
    lengths = np.geomspace(1e-3, 1e3, head.centers.shape[0])[:, None]
    longer.centers.assign(head.centers.numpy() * lengths)
    want = head.loss(embeddings, labels)
    np.testing.assert_allclose(longer.loss(embeddings, labels), want, rtol=1e-4, atol=1e-4)


# Mixed labels, weights


@pytest.mark.parametrize(
    ("make", "slow"),
    [
        (lambda: km.ArcFace(CLASSES, dtype="float64"), reference.arcface),
        (lambda: km.AdaCos(CLASSES, dtype="float64"), reference.adacos),
        (lambda: km.CurricularFace(CLASSES, dtype="float64"), reference.curricularface),
    ],
    ids=["ArcFace", "AdaCos", "CurricularFace"],
)
def test_mixup_is_two_losses_and_one_training_call(make, slow):
    embeddings, labels = batch()
    other, head = np.roll(labels, 1), built(make())
    x, w = embeddings.astype("float64"), wide(head)
    share = 0.3
    got = share * head.loss(x, labels) + (1 - share) * head.loss(x, other, update_state=False)
    first, state = slow(x, w, labels)
    if slow is reference.adacos:
        second = first  # no margin, and the scale that the first call has left
    elif slow is reference.curricularface:
        second, _ = slow(x, w, other, state, momentum=0.0)
    else:
        second, _ = slow(x, w, other)
    want = share * reference.softmax_loss(first, labels)
    want += (1 - share) * reference.softmax_loss(second, other)
    np.testing.assert_allclose(got, want, rtol=1e-9)
    assert head.steps.numpy() == 1


WEIGHTS = {
    "class_weight": lambda y: (
        {"class_weight": dict(enumerate(np.arange(CLASSES) / 2.0))},
        y / 2.0,
    ),
    "sample_weight": lambda y: ({"sample_weight": np.arange(12) / 4.0}, np.arange(12) / 4.0),
}


@pytest.mark.parametrize("weighted", WEIGHTS.values(), ids=WEIGHTS.keys())
@pytest.mark.parametrize("one_hot", [False, True], ids=["ids", "one-hot"])
def test_weights_count_in_a_functional_model(weighted, one_hot):
    embeddings, labels = batch()
    head = built(km.ArcFace(CLASSES, 0.3, 9.0))
    settings, weights = weighted(labels)
    image = keras.Input((DIM,))
    label = keras.Input((CLASSES,)) if one_hot else keras.Input((), dtype="int32")
    model = keras.Model([image, label], head(image, label))
    kind = keras.losses.CategoricalCrossentropy if one_hot else None
    loss = (kind or keras.losses.SparseCategoricalCrossentropy)(from_logits=True)
    model.compile(keras.optimizers.SGD(0.0), loss, run_eagerly=True)
    y = np.eye(CLASSES, dtype="float32")[labels] if one_hot else labels
    got = model.fit([embeddings, y], y, batch_size=12, verbose=0, **settings).history["loss"]
    x = embeddings.astype("float64")
    logits, _ = reference.arcface(x, wide(head), labels, margin=0.3, scale=9.0)
    np.testing.assert_allclose(got, (weights * reference.softmax_loss(logits, labels)).mean(), 1e-5)


def test_dataset_without_a_whole_batch_is_not_trained_in_silence():
    x, y = batch()
    too_large = tf.data.Dataset.from_tensor_slices((x, y)).batch(32, drop_remainder=True)
    with pytest.warns(UserWarning, match="ran out of data"):
        model_of(km.ArcFace(CLASSES)).fit(too_large, verbose=0)


# Replicas


ON_TWO_REPLICAS = """
    import numpy as np, tensorflow as tf
    cpu = tf.config.list_physical_devices("CPU")[0]
    two = [tf.config.LogicalDeviceConfiguration()] * 2
    tf.config.set_logical_device_configuration(cpu, two)
    import keras_margin as km
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    heads = {
        "AdaFace": lambda: km.AdaFace(5, 0.3, 20.0, h=0.5, momentum=0.2),
        "CurricularFace": lambda: km.CurricularFace(5, 0.3, 20.0, momentum=0.2),
        "ElasticFace": lambda: km.ElasticFace(5, seed=3),
    }
    rng = np.random.default_rng(0)
    x = rng.normal(0.0, 3.0, (8, 4)).astype("float32") * np.geomspace(0.5, 5.0, 8)[:, None]
    y, centers = np.arange(8) % 5, np.sin(np.arange(20)).reshape(5, 4)
    x = x.astype("float32")

    def built(make):
        head = make()
        head.build((None, 4))
        head.centers.assign(centers)
        return head

    shares = [slice(0, 5), slice(5, 8)]
    def share(values):
        return strategy.experimental_distribute_values_from_function(
            lambda context: tf.constant(values[shares[context.replica_id_in_sync_group]])
        )

    for name, make in heads.items():
        with strategy.scope():
            head = built(make)
        alone = built(make)
        step = tf.function(lambda x, y: strategy.run(head.loss, (x, y)))
        for rows in (x, x[::-1].copy()):
            losses = strategy.experimental_local_results(step(share(rows), share(y)))
            want = alone.loss(rows, y)
            np.testing.assert_allclose(np.concatenate(losses), want, rtol=1e-4, atol=1e-4)
        for one, other in zip(head.variables, alone.variables, strict=True):
            for copy in strategy.experimental_local_results(one.value):
                np.testing.assert_allclose(copy, other, rtol=1e-5, err_msg=f"{name} {one.name}")
"""


@pytest.mark.long
def test_statistics_and_draws_of_two_replicas_are_those_of_the_joined_batch():
    """mu and sigma, t, and the place of a row in the global batch, with uneven shares."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(ON_TWO_REPLICAS)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
