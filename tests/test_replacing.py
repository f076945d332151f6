"""Another head behind the same backbone: the run goes on as if nothing had happened to the rest."""

import random

import keras
import numpy as np
import pytest
from keras import ops

import keras_margin as km
from keras_margin.row_updates import named_slots

CLASSES, FEATURES, DIM = 5, 6, 4
X = np.random.default_rng(0).normal(size=(20, FEATURES)).astype("float32")
Y = np.arange(20) % CLASSES


def as_numpy(variable):
    return ops.convert_to_numpy(variable)


def model_of(head=None, optimizer=None, **compiling):
    random.seed(0)
    layers = [
        keras.Input((FEATURES,)),
        keras.layers.Dense(8, activation="relu"),
        keras.layers.BatchNormalization(),
        keras.layers.Dropout(0.2, seed=1),
        keras.layers.Dense(DIM),
    ]
    model = km.EmbeddingModel(keras.Sequential(layers), head or km.ArcFace(CLASSES, seed=1))
    model.compile(optimizer or keras.optimizers.Adam(0.01), **compiling)
    return model


def fit(model, epochs=2, y=Y):
    return model.fit(X, y, epochs=epochs, batch_size=10, shuffle=False, verbose=0).history


def variables_of(model):
    return [as_numpy(each) for each in (*model.weights, *model.optimizer.variables)]


def assert_same(one, other):
    for got, want in zip(variables_of(one), variables_of(other), strict=True):
        np.testing.assert_array_equal(got, want)


OPTIMIZERS = {
    "momentum": lambda: keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True, clipnorm=1.0),
    "Adam": lambda: keras.optimizers.Adam(
        keras.optimizers.schedules.CosineDecay(0.05, 20), amsgrad=True, global_clipnorm=1.0
    ),
    "AdamW": lambda: keras.optimizers.AdamW(0.01, weight_decay=0.1, use_ema=True),
    "loss scale": lambda: keras.optimizers.LossScaleOptimizer(
        keras.optimizers.AdamW(0.01), initial_scale=16.0, dynamic_growth_steps=3
    ),
    "accumulation": lambda: keras.optimizers.Adam(0.01, gradient_accumulation_steps=3),
    "Nadam": lambda: keras.optimizers.Nadam(0.01),
    "Adagrad": lambda: keras.optimizers.Adagrad(0.1),
    "Adafactor": lambda: keras.optimizers.Adafactor(0.01),
    "Muon": lambda: keras.optimizers.Muon(0.01),
}
HEADS = {
    "ArcFace": lambda **k: km.ArcFace(CLASSES, seed=1, **k),
    "AdaCos": lambda **k: km.AdaCos(CLASSES, seed=1, **k),
    "AdaFace": lambda **k: km.AdaFace(CLASSES, seed=1, **k),
    "CurricularFace": lambda **k: km.CurricularFace(CLASSES, seed=1, **k),
    "ElasticFace": lambda **k: km.ElasticFace(CLASSES, seed=1, **k),
    "SphereFace2": lambda **k: km.SphereFace2(CLASSES, seed=1, **k),
    "learned scale": lambda **k: km.MarginHead(
        CLASSES, scale=km.scales.LearnedScale(9.0), seed=1, **k
    ),
    "warm-up": lambda **k: km.ArcFace(
        CLASSES, keras.optimizers.schedules.PolynomialDecay(0.0, 20, 0.5), seed=1, **k
    ),
    "sub-centres": lambda **k: km.ArcFace(CLASSES, num_subcenters=2, seed=1, **k),
}


DAILY = {"momentum", "loss scale", "AdaCos", "Adam"}


def some(names):
    """All of them, the rarer ones in the long tests alone."""
    return [
        pytest.param(name, marks=[] if name in DAILY else pytest.mark.long, id=name)
        for name in names
    ]


# Nothing changes


@pytest.mark.parametrize("name", some([*OPTIMIZERS, *HEADS]))
def test_a_run_with_a_head_of_the_same_size_goes_on_bit_for_bit(name):
    head = HEADS.get(name, HEADS["ArcFace"])
    optimizer = OPTIMIZERS.get(name, OPTIMIZERS["momentum"])
    whole, parts = (model_of(head(), optimizer()) for _ in range(2))
    for model in (whole, parts):
        fit(model)
    parts.replace_head(parts.head.resized(CLASSES))
    assert_same(parts, whole)
    assert fit(parts) == fit(whole)
    assert_same(parts, whole)


@pytest.mark.parametrize("optimizer", some(["SGD", "adam", "AdamW", "Lion", "loss scale"]))
def test_a_run_with_sampled_classes_goes_on_bit_for_bit(optimizer):
    def make():
        if optimizer == "loss scale":
            chosen = OPTIMIZERS["loss scale"]()
        else:
            chosen = keras.optimizers.get(optimizer)
        chosen.learning_rate = 0.01
        head = km.ArcFace(40, sample_rate=0.3, seed=1)
        return model_of(head, chosen)

    whole, parts = make(), make()
    for model in (whole, parts):
        fit(model)
    parts.replace_head(parts.head.resized(40))
    assert fit(parts) == fit(whole)
    assert_same(parts, whole)
    parts.replace_head(parts.head.resized(60))  # still by rows
    before = as_numpy(parts.head.centers)
    fit(parts, 1)
    moved = (as_numpy(parts.head.centers) != before).any(axis=1)
    assert moved[:CLASSES].all()
    assert moved.sum() < 60


def test_a_learning_rate_that_a_callback_has_set_stays():
    model = model_of()
    model.optimizer.learning_rate = 0.0025
    fit(model, 1)
    model.optimizer.learning_rate = 2.0**-10
    model.replace_head(model.head.resized(8))
    assert float(model.optimizer.learning_rate) == 2.0**-10
    assert int(model.optimizer.iterations) == 2


# Rows


@pytest.mark.parametrize("optimizer", some(OPTIMIZERS))
@pytest.mark.parametrize("mapping", [None, {4: 0, 1: 6, 0: 2}], ids=["grown", "mapped"])
def test_rows_that_stay_keep_their_slots_and_new_ones_begin(optimizer, mapping):
    model = model_of(optimizer=OPTIMIZERS[optimizer]())
    fit(model)
    old, before = model.optimizer, model.head.centers
    old_slots = {k: as_numpy(v) for k, v in named_slots(old, before).items()}
    of_backbone = {
        variable.path: {k: as_numpy(v) for k, v in named_slots(old, variable).items()}
        for variable in model.backbone.trainable_variables
    }
    assert old_slots
    model.replace_head(model.head.resized(7, mapping))
    fresh = OPTIMIZERS[optimizer]()
    fresh.build(model.trainable_variables)
    centers = model.head.centers
    slots = named_slots(model.optimizer, centers)
    assert slots.keys() == old_slots.keys()
    kept = mapping or {each: each for each in range(CLASSES)}
    new = [each for each in range(7) if each not in kept.values()]
    for name, slot in slots.items():
        start = as_numpy(named_slots(fresh, centers)[name])
        if name == "_model_variables_moving_average":
            start = as_numpy(centers)
        got = as_numpy(slot)
        if old_slots[name].shape[0] != CLASSES:  # Adafactor's, of the columns
            np.testing.assert_array_equal(got, old_slots[name])
            continue
        np.testing.assert_array_equal(got[list(kept.values())], old_slots[name][list(kept)])
        np.testing.assert_array_equal(got[new], start[new])
    for variable in model.backbone.trainable_variables:
        for name, slot in named_slots(model.optimizer, variable).items():
            np.testing.assert_array_equal(slot, of_backbone[variable.path][name])
    assert np.isfinite(fit(model, y=np.arange(20) % 7)["loss"]).all()


def test_a_kept_row_moves_as_it_would_have():
    """With all classes kept under other ids, one step is the same step."""
    ids = np.array([3, 0, 4, 1, 2])
    whole, parts = (model_of(optimizer=OPTIMIZERS["momentum"]()) for _ in range(2))
    for model in (whole, parts):
        fit(model)
    parts.replace_head(parts.head.resized(CLASSES, dict(enumerate(ids))))
    np.testing.assert_allclose(fit(parts, y=ids[Y])["loss"], fit(whole)["loss"], rtol=1e-5)
    got = as_numpy(parts.head.centers)[ids]
    np.testing.assert_allclose(got, whole.head.centers, rtol=1e-4, atol=1e-5)


def test_dominant_subcenters_carry_their_slots():
    model = model_of(km.ArcFace(CLASSES, num_subcenters=3, seed=1), OPTIMIZERS["momentum"]())
    fit(model, 4)
    old_slots = named_slots(model.optimizer, model.head.centers)
    momentum = as_numpy(old_slots["momentums"])
    centers = as_numpy(model.head.centers)
    dominant = as_numpy(model.head.dominant_subcenters(model.predict(X, verbose=0), Y))
    rows = np.arange(CLASSES) * 3 + dominant
    assert np.abs(momentum[rows]).min(axis=1).max() > 0  # else the test shows nothing
    model.replace_head(model.head.collapsed(dominant).resized(6))
    np.testing.assert_array_equal(model.head.centers[:CLASSES], centers[rows])
    got = named_slots(model.optimizer, model.head.centers)["momentums"]
    np.testing.assert_array_equal(got[:CLASSES], momentum[rows])
    np.testing.assert_array_equal(got[CLASSES:], np.zeros((1, DIM)))


# Other kinds of head


def test_a_head_that_is_not_built_takes_over_the_rows():
    model = model_of(km.AdaCos(CLASSES), OPTIMIZERS["momentum"]())
    fit(model)
    centers, momentum = (
        as_numpy(each)
        for each in (
            model.head.centers,
            named_slots(model.optimizer, model.head.centers)["momentums"],
        )
    )
    assert "scale" in fit(model, 0) or [metric.name for metric in model.metrics][-1] == "scale"
    model.replace_head(km.ArcFace(7), {0: 6, 3: 0})
    np.testing.assert_array_equal(as_numpy(model.head.centers)[[6, 0]], centers[[0, 3]])
    slot = as_numpy(named_slots(model.optimizer, model.head.centers)["momentums"])
    np.testing.assert_array_equal(slot[[6, 0]], momentum[[0, 3]])
    assert not slot[1:6].any()
    assert sorted(fit(model)) == ["accuracy", "loss"]
    model.replace_head(km.AdaCos(7))
    assert sorted(fit(model)) == ["accuracy", "loss", "scale"]


def test_a_built_head_keeps_its_own_centers():
    model = model_of(optimizer=OPTIMIZERS["momentum"]())
    fit(model)
    momentum = as_numpy(named_slots(model.optimizer, model.head.centers)["momentums"])
    head = km.CosFace(7)
    head.imprint(model.predict(X, verbose=0), Y)
    before = as_numpy(head.centers)
    model.replace_head(head)
    np.testing.assert_array_equal(model.head.centers, before)
    slot = named_slots(model.optimizer, head.centers)["momentums"]
    np.testing.assert_array_equal(slot[:CLASSES], momentum)  # the ids that both have
    other = km.CosFace(3)
    other.build((None, DIM))
    model.replace_head(other, {})
    assert not as_numpy(named_slots(model.optimizer, other.centers)["momentums"]).any()


def test_one_center_becomes_the_first_subcenter():
    model = model_of()
    centers = as_numpy(model.head.centers)
    model.replace_head(km.ArcFace(CLASSES, num_subcenters=2))
    np.testing.assert_array_equal(as_numpy(model.head.centers)[::2], centers)


def test_with_and_without_classes():
    model = model_of(km.SemiHardTriplet())
    assert sorted(fit(model)) == ["loss"]
    moments = as_numpy(model.optimizer.variables[2])
    model.replace_head(km.AdaCos(CLASSES))
    np.testing.assert_array_equal(model.optimizer.variables[2], moments)
    assert sorted(fit(model)) == ["accuracy", "loss", "scale"]
    assert model.classifier.output_shape == (None, CLASSES)
    model.replace_head(km.SemiHardTriplet())
    assert sorted(fit(model)) == ["loss"]
    with pytest.raises(ValueError, match="`mapping` is for two heads with classes"):
        model.replace_head(km.ArcFace(CLASSES), {0: 0})


# The model afterwards


@pytest.mark.parametrize("optimizer", some(["momentum", "loss scale", "AdamW"]))
@pytest.mark.filterwarnings("ignore:Skipping nested container")
def test_files_go_on_bit_for_bit(tmp_path, optimizer):
    model = model_of(km.AdaCos(CLASSES, seed=1), OPTIMIZERS[optimizer]())
    fit(model)
    classifier = model.classifier
    model.replace_head(model.head.resized(7))
    assert model.classifier is not classifier
    assert model.classifier.predict(X, verbose=0).shape == (20, 7)
    y = np.arange(20) % 7
    fit(model, y=y)
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert loaded.head.num_classes == 7
    assert_same(loaded, model)
    assert fit(loaded, y=y) == fit(model, y=y)
    assert_same(loaded, model)


def test_the_old_head_can_still_be_read():
    model = model_of(km.AdaCos(CLASSES, seed=1))
    fit(model)
    old = model.head
    before = [as_numpy(each) for each in old.variables]
    model.replace_head(old.resized(CLASSES))
    fit(model)
    for got, want in zip(old.variables, before, strict=True):
        np.testing.assert_array_equal(got, want)


def test_the_old_head_is_gone():
    model = model_of()
    fit(model)
    old = model.head
    model.replace_head(old.resized(7))
    assert [layer.name for layer in model.layers] == [model.backbone.name, model.head.name]
    assert not any(variable is old.centers for variable in model.variables)
    assert len(model.metrics) == 2
    assert len(model.trainable_weights) == 7
    with pytest.raises(ValueError, match="from 0 to 6"):
        model.fit(X, Y + 3, verbose=0)
    with pytest.raises(ValueError, match="You cannot add new elements of state"):
        model.another = keras.layers.Dense(2)


def test_options_of_compile_stay():
    model = model_of(run_eagerly=True, steps_per_execution=1)
    model.replace_head(model.head.resized(7))
    assert model.run_eagerly
    assert not model.optimizer.built
    plain = km.EmbeddingModel(model.backbone, km.ArcFace(3))
    plain.replace_head(plain.head.resized(4))
    assert not plain.compiled


@pytest.mark.parametrize("scaled", [True, False])
def test_mixed_precision_stays_scaled_or_not(scaled):
    backbone = keras.Sequential([keras.Input((FEATURES,)), keras.layers.Dense(DIM)])
    model = km.EmbeddingModel(backbone, km.ArcFace(CLASSES), dtype="mixed_float16")
    model.compile(keras.optimizers.Adam(0.01), auto_scale_loss=scaled)
    fit(model)
    before = len(model.optimizer.variables)
    kind = type(model.optimizer)
    model.replace_head(model.head.resized(7))
    assert type(model.optimizer) is kind
    assert (kind is keras.optimizers.LossScaleOptimizer) is scaled
    assert len(model.optimizer.variables) == before


@pytest.mark.parametrize("by", ["variable", "name"])
def test_what_is_excluded_from_weight_decay_stays_so(by):
    optimizer = keras.optimizers.AdamW(0.01, weight_decay=0.5)
    model = model_of(optimizer="sgd")
    if by == "name":
        optimizer.exclude_from_weight_decay(var_names=["bias", "centers"])
    else:
        kernel = model.backbone.layers[0].kernel
        optimizer.exclude_from_weight_decay(var_list=[kernel, model.head.centers])
    model.compile(optimizer)
    fit(model)
    model.replace_head(model.head.resized(7))
    names = {"variable": ["kernel", "centers"], "name": ["bias", "bias", "centers"]}[by]
    new = model.optimizer
    excluded = [v.name for v in model.trainable_variables if not new._use_weight_decay(v)]
    assert excluded == names


def test_a_backbone_frozen_before():
    model = model_of(optimizer=OPTIMIZERS["momentum"]())
    fit(model)
    model.backbone.trainable = False
    model.replace_head(model.head.resized(7))
    before = [as_numpy(each) for each in model.backbone.weights]
    fit(model, y=np.arange(20) % 7)
    for got, want in zip(model.backbone.weights, before, strict=True):
        np.testing.assert_array_equal(got, want)
    model.backbone.trainable = True
    model.replace_head(model.head.resized(8))  # slots of the backbone begin anew
    fit(model)
    assert not np.array_equal(as_numpy(model.backbone.weights[0]), before[0])


def test_a_subclassed_backbone():
    class Backbone(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = keras.layers.Dense(DIM)

        def call(self, inputs):
            return self.dense(inputs)

    for head in (km.ArcFace(CLASSES), km.SemiHardTriplet()):
        model = km.EmbeddingModel(Backbone(), head)
        model.compile(keras.optimizers.Adam(0.01))
        fit(model)
        model.replace_head(km.ArcFace(7))
        assert np.isfinite(fit(model)["loss"]).all()
    model = km.EmbeddingModel(Backbone(), km.ArcFace(CLASSES))
    with pytest.raises(ValueError, match="must be built before its head is replaced"):
        model.replace_head(km.ArcFace(7))


# What is refused


def test_what_is_refused_leaves_the_model_as_it_was():
    model = model_of(km.ArcFace(CLASSES, num_subcenters=3), keras.optimizers.RMSprop(0.01))
    fit(model)
    head, optimizer = model.head, model.optimizer
    wrong_dim = km.ArcFace(7)
    wrong_dim.build((None, DIM + 1))
    for new_head, mapping, error, message in (
        (keras.layers.Dense(3), None, TypeError, "`new_head` must be a head of keras_margin"),
        (head, None, ValueError, "`new_head` must be another head"),
        (wrong_dim, {}, ValueError, "for embeddings of dimension 4. Received: .* dimension 5"),
        (km.ArcFace(7), None, ValueError, r"Which of a class' sub-centres stays\?.*3 sub-centres"),
        (km.ArcFace(7, num_subcenters=3), {9: 0}, ValueError, "must name old ids from 0 to 4"),
        (km.ArcFace(7, sample_rate=0.5), {}, ValueError, "needs one of SGD, Adam, AdamW, Lion"),
    ):
        with pytest.raises(error, match=message):
            model.replace_head(new_head, mapping)
        assert model.head is head
        assert model.optimizer is optimizer
    fit(model)


def test_not_inside_fit():
    model = model_of(km.ArcFace(CLASSES))
    swap = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: model.replace_head(model.head.resized(7))
    )
    with pytest.raises(ValueError, match="between two calls of `fit`, not inside one"):
        model.fit(X, Y, verbose=0, callbacks=[swap])
    model.replace_head(model.head.resized(7))
    fit(model)


# Frozen backbones: the recipe of docs/going-on.md


def test_fine_tuning_a_head_moves_neither_weights_nor_statistics_of_the_backbone():
    model = model_of()
    fit(model)
    model.backbone.trainable = False
    model.replace_head(model.head.resized(7))
    model.compile(keras.optimizers.Adam(0.05))
    before = [as_numpy(each) for each in model.backbone.weights]
    centers = as_numpy(model.head.centers)
    assert len(model.trainable_weights) == 1
    embeddings = model.predict(X, verbose=0)
    fit(model, y=np.arange(20) % 7)
    for got, want in zip(model.backbone.weights, before, strict=True):
        np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(model.predict(X, verbose=0), embeddings)
    assert (as_numpy(model.head.centers) != centers).any(axis=1).all()
