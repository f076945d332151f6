"""Training on samples moves the rows of the sample, as Keras moves them, and no other row."""

import inspect
import re
import textwrap

import keras
import numpy as np
import pytest
import tensorflow as tf
from jax_process import on_jax

import keras_margin as km
from keras_margin.sampling import rows_of_step

pytestmark = pytest.mark.long

CLASSES, DIM, BATCH, STEPS = 30, 3, 4, 20

OPTIMIZERS = {
    "SGD": (keras.optimizers.SGD, {}),
    "momentum": (keras.optimizers.SGD, {"momentum": 0.9}),
    "nesterov": (keras.optimizers.SGD, {"momentum": 0.9, "nesterov": True}),
    "Adam": (keras.optimizers.Adam, {}),
    "amsgrad": (keras.optimizers.Adam, {"amsgrad": True}),
    "AdamW": (keras.optimizers.AdamW, {}),
    "Lion": (keras.optimizers.Lion, {}),
}
OPTIONS = {
    "plain": {},
    "weight_decay": {"weight_decay": 0.5},
    "clipnorm": {"clipnorm": 0.05},
    "global_clipnorm": {"global_clipnorm": 0.05},
    "clipvalue": {"clipvalue": 0.01},
    "all": {"weight_decay": 0.5, "clipnorm": 0.05},
}


def optimizer_of(name, option="plain", scaled=False):
    make, settings = OPTIMIZERS[name]
    optimizer = make(0.03, **settings, **OPTIONS[option])
    return keras.optimizers.LossScaleOptimizer(optimizer) if scaled else optimizer


def data(steps=STEPS, batch=BATCH, classes=CLASSES):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(steps * batch, 4)).astype("float32")
    return x, rng.integers(0, classes, len(x))


def model_of(optimizer, classes=CLASSES, sample_rate=0.2, dtype=None, stock=False, **compiled):
    """The same weights at each call; `stock` leaves Keras' own dense updates in place."""
    subcenters = compiled.pop("num_subcenters", 1)
    kernel = keras.initializers.RandomNormal(seed=0)
    backbone = keras.Sequential(
        [keras.Input((4,)), keras.layers.Dense(DIM, kernel_initializer=kernel, dtype=dtype)]
    )
    head = km.ArcFace(
        classes,
        0.3,
        8.0,
        sample_rate=sample_rate,
        seed=1,
        dtype=dtype,
        num_subcenters=subcenters,
    )
    model = km.EmbeddingModel(backbone, head, dtype=dtype)
    compile_it = keras.Model.compile if stock else km.EmbeddingModel.compile
    compile_it(model, optimizer, **compiled)
    return model


def rows_of(model):
    """The centers and their slots, by name."""
    centers = model.head.centers
    optimizer = getattr(model.optimizer, "inner_optimizer", model.optimizer)
    slots = [each for each in optimizer.variables if each.shape == centers.shape]
    return {each.path: each.numpy() for each in (centers, *slots)}


class Watch(keras.callbacks.Callback):
    """Asks before each step which rows may move, and looks after it which have moved."""

    def __init__(self, labels, batch=BATCH):
        super().__init__()
        self.labels = labels.reshape(-1, batch)
        self.moved = []  # (steps, sampled rows): any number of the row has changed

    def on_train_batch_begin(self, batch, logs=None):
        rows = rows_of_step(self.model.head, self.labels[batch]).numpy()
        self.sampled = np.isin(np.arange(self.model.head.centers.shape[0]), rows)
        self.before = rows_of(self.model)

    def on_train_batch_end(self, batch, logs=None):
        after = rows_of(self.model)
        for name, value in self.before.items():
            np.testing.assert_array_equal(after[name][~self.sampled], value[~self.sampled], name)
        centers = self.model.head.centers.path
        changed = (after[centers] != self.before[centers]).any(axis=1)
        self.moved.append(changed[self.sampled])


def fit(model, x, labels, batch=BATCH, **settings):
    model.fit(x, labels, batch_size=batch, shuffle=False, verbose=0, **settings)


def watched(model, x, labels):
    watch = Watch(labels)
    fit(model, x, labels, callbacks=[watch])
    assert len(watch.moved) == STEPS
    return np.array(watch.moved)


def slots_of(name):
    number = {"SGD": 0, "momentum": 1, "nesterov": 1, "Lion": 1, "amsgrad": 3}
    return number.get(name, 2)


# Which rows move


LONG = pytest.mark.long
DAILY = {"all"}


every_optimizer = pytest.mark.parametrize("name", OPTIMIZERS)
every_option = pytest.mark.parametrize(
    "option", [pytest.param(n, marks=[LONG] * (n not in DAILY)) for n in OPTIONS]
)
one_optimizer = pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[LONG] * (n != "AdamW")) for n in OPTIMIZERS]
)


@every_optimizer
@every_option
def test_rows_that_are_not_sampled_stay(name, option):
    model = model_of(optimizer_of(name, option))
    assert len(rows_of(model)) == 1 + slots_of(name) or not model.optimizer.built
    assert watched(model, *data()).all()
    assert len(rows_of(model)) == 1 + slots_of(name)
    assert int(model.optimizer.iterations.value) == STEPS


@pytest.mark.parametrize("name", [pytest.param("momentum", marks=LONG), "amsgrad"])
def test_rows_stay_in_a_step_compiled_by_xla(name):
    model = model_of(optimizer_of(name, "all"), jit_compile=True)
    assert watched(model, *data()).all()


@one_optimizer
def test_rows_stay_inside_a_loss_scale_optimizer(name):
    assert watched(model_of(optimizer_of(name, "all", scaled=True)), *data()).all()


@pytest.mark.parametrize("name", ["Adam", pytest.param("momentum", marks=LONG)])
def test_rows_stay_under_mixed_precision(name):
    """Keras wraps the optimizer itself; steps that overflow move nothing."""
    model = model_of(optimizer_of(name, "all"), dtype="mixed_float16")
    assert isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)
    moved = watched(model, *data())
    assert moved.all(axis=1).sum() > STEPS / 2
    assert (moved.all(axis=1) | ~moved.any(axis=1)).all()


@pytest.mark.parametrize("name", ["momentum", pytest.param("Lion", marks=LONG)])
def test_rows_of_subcenters(name):
    """A center that does not win moves too: its momentum and its decay go on."""
    model = model_of(optimizer_of(name, "all"), num_subcenters=2)
    moved = watched(model, *data())
    assert moved.shape == (STEPS, 12)
    assert moved.all()


def test_steps_in_eager_code():
    assert watched(model_of(optimizer_of("Adam", "all"), run_eagerly=True), *data()).all()


def test_steps_of_train_on_batch():
    model = model_of(optimizer_of("momentum", "all"))
    x, labels = data(3)
    for i in range(0, 12, 4):
        rows = rows_of_step(model.head, labels[i : i + 4]).numpy()
        before = rows_of(model)
        model.train_on_batch(x[i : i + 4], labels[i : i + 4])
        for path, value in rows_of(model).items():
            changed = (value != before.get(path, np.zeros_like(value))).any(axis=1)
            np.testing.assert_array_equal(np.flatnonzero(changed), rows)


def test_a_second_compile_goes_on_row_by_row():
    x, labels = data()
    optimizer = optimizer_of("Adam", "all")
    model = model_of(optimizer)
    model.compile(optimizer)
    assert watched(model, x, labels).all()
    model.compile(optimizer_of("momentum", "all"))
    assert watched(model, x, labels).all()


def test_a_whole_head_is_updated_by_keras_alone():
    """Momentum and decay reach every row, whatever the batch."""
    x, labels = data(2)
    model = model_of(optimizer_of("momentum", "all"), sample_rate=1.0)
    before = model.head.centers.numpy()
    fit(model, x, labels)
    assert (model.head.centers.numpy() != before).any(axis=1).all()


# How they move


def set_state(model, like):
    """The weights and the optimizer's variables of another model."""
    model.set_weights(like.get_weights())
    model.optimizer.build(model.trainable_variables)
    for new, old in zip(model.optimizer.variables, like.optimizer.variables, strict=True):
        new.assign(old)


def assert_one_step_is_that_of_keras(make_optimizer, **settings):
    """After three steps, the fourth moves the sampled rows and the backbone as Keras does."""
    x, labels = data(4)
    model = model_of(make_optimizer(), run_eagerly=True, **settings)
    fit(model, x[:12], labels[:12])
    stock = model_of(make_optimizer(), run_eagerly=True, stock=True, **settings)
    set_state(stock, model)
    rows = rows_of_step(model.head, labels[12:]).numpy()
    for each in (model, stock):
        fit(each, x[12:], labels[12:])
    got, want = rows_of(model), rows_of(stock)
    for one, other in zip(got.values(), want.values(), strict=True):
        np.testing.assert_allclose(one[rows], other[rows], rtol=1e-6, atol=1e-8)
    for one, other in zip(model.backbone.get_weights(), stock.backbone.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-8)


@every_optimizer
@every_option
def test_rows_move_as_keras_moves_them(name, option):
    assert_one_step_is_that_of_keras(lambda: optimizer_of(name, option))


@one_optimizer
def test_rows_move_as_keras_moves_them_under_loss_scaling(name):
    assert_one_step_is_that_of_keras(lambda: optimizer_of(name, "all", scaled=True))


def test_rows_follow_a_schedule():
    """The decay of weights, too, takes the learning rate of the step."""

    def make():
        rate = keras.optimizers.schedules.PolynomialDecay(0.1, 10, 0.01)
        return keras.optimizers.AdamW(rate, weight_decay=0.5)

    assert_one_step_is_that_of_keras(make)


def without_decay_of_centers(scaled=False):
    optimizer = keras.optimizers.AdamW(0.03, weight_decay=0.5)
    optimizer.exclude_from_weight_decay(var_names=["centers"])
    return keras.optimizers.LossScaleOptimizer(optimizer) if scaled else optimizer


@pytest.mark.parametrize("scaled", [False, True])
def test_centers_without_weight_decay(scaled):
    assert_one_step_is_that_of_keras(lambda: without_decay_of_centers(scaled))


def test_decay_of_centers_can_be_left_out_by_variable():
    """Without a gradient and a decay the rows stay; the kernel's decay goes on."""
    x, labels = data(1)
    lengths = []
    for excluded in (True, False):
        optimizer = keras.optimizers.SGD(0.1, weight_decay=1.0)
        model = model_of(optimizer, run_eagerly=True)
        kernel = model.backbone.layers[0].kernel
        optimizer.build(model.trainable_variables)
        if excluded:
            optimizer.exclude_from_weight_decay(var_list=[model.head.centers])
        rows = rows_of_step(model.head, labels).numpy()
        before = rows_of(model)[model.head.centers.path], kernel.numpy()
        fit(model, x, labels, sample_weight=np.zeros(4))
        after = rows_of(model)[model.head.centers.path], kernel.numpy()
        lengths.append(np.linalg.norm(after[0][rows]) / np.linalg.norm(before[0][rows]))
        np.testing.assert_allclose(after[1], 0.9 * before[1], rtol=1e-6)
    assert lengths == pytest.approx([1.0, 0.9], rel=1e-6)


@every_optimizer
def test_a_sample_of_all_classes_is_trained_as_the_whole_head(name):
    """6 rows of 5 classes: the same weights and slots."""
    x, labels = data(6, 6, 5)
    whole, sampled = (
        model_of(optimizer_of(name, "all"), 5, rate, run_eagerly=True) for rate in (1.0, 0.2)
    )
    for model in (whole, sampled):
        fit(model, x, labels, batch=6)
    for got, want in (
        (sampled.get_weights(), whole.get_weights()),
        (rows_of(sampled).values(), rows_of(whole).values()),
    ):
        for one, other in zip(got, want, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-7)


# Refused


def refused(optimizer, message):
    model = model_of("sgd")
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        model.compile(optimizer)


@pytest.mark.parametrize(
    "name",
    ["RMSprop", "Adagrad", "Adadelta", "Adamax", "Adafactor", "Nadam", "Ftrl", "Lamb", "Muon"],
)
@pytest.mark.parametrize("scaled", [False, True])
def test_other_optimizers(name, scaled):
    optimizer = getattr(keras.optimizers, name)(0.01)
    message = (
        "A head with `sample_rate` below 1 needs one of SGD, Adam, AdamW, Lion, which can leave "
        f"the rows of other classes alone. Received: optimizer={name}"
    )
    refused(keras.optimizers.LossScaleOptimizer(optimizer) if scaled else optimizer, message)
    model_of(optimizer, sample_rate=1.0)


def test_an_optimizer_of_ones_own():
    class Mine(keras.optimizers.Adam):
        """Whatever it does, nobody has looked."""

    message = (
        "A head with `sample_rate` below 1 needs one of SGD, Adam, AdamW, Lion, which can leave "
        "the rows of other classes alone. Received: optimizer=Mine"
    )
    refused(Mine(0.01), message)


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize(
    ("option", "value"), [("use_ema", True), ("gradient_accumulation_steps", 2)]
)
def test_options_that_touch_all_rows(option, value, scaled):
    optimizer = keras.optimizers.Adam(0.01, **{option: value})
    message = (
        f"A head with `sample_rate` below 1 cannot be trained with `{option}`, which touches all "
        f"rows. Received: {option}={value}"
    )
    refused(keras.optimizers.LossScaleOptimizer(optimizer) if scaled else optimizer, message)
    model_of(optimizer, sample_rate=1.0)


def test_a_refused_optimizer_is_not_taken():
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    model = model_of(optimizer)
    with pytest.raises(ValueError, match="use_ema"):
        model.compile(keras.optimizers.SGD(0.1, use_ema=True))
    assert model.optimizer is optimizer


def test_default_of_keras_is_refused():
    head = km.ArcFace(CLASSES, sample_rate=0.2)
    model = km.EmbeddingModel(keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)]), head)
    with pytest.raises(ValueError, match="Received: optimizer=RMSprop"):
        model.compile()
    model.compile("adam")


# The loss twice in a step


class Mixup(km.EmbeddingModel):
    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        other = keras.ops.roll(y, 1)
        loss = 0.7 * self.head.loss(y_pred, y) + 0.3 * self.head.loss(
            y_pred, other, update_state=False
        )
        return keras.ops.mean(loss)


def mixed(optimizer, sample_rate, **compiled):
    kernel = keras.initializers.RandomNormal(seed=0)
    dense = keras.layers.Dense(DIM, kernel_initializer=kernel)
    head = km.CosFace(CLASSES, 0.2, 8.0, sample_rate=sample_rate, seed=1)
    model = Mixup(keras.Sequential([keras.Input((4,)), dense]), head)
    model.compile(optimizer, **compiled)
    fit(model, *data(steps=5))
    return rows_of(model)


@pytest.mark.parametrize("jit_compile", [False, True])
@every_optimizer
def test_rows_of_two_samples_move_once(name, jit_compile):
    """At a rate that takes all 30 classes, both calls have all rows in common."""
    got, want = (
        mixed(optimizer_of(name, "all"), rate, jit_compile=jit_compile) for rate in (0.99, 1.0)
    )
    assert len(got) == 1 + slots_of(name)
    for one, other in zip(got.values(), want.values(), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


class DenseAdam(keras.optimizers.Adam):
    """Adam on added gradients: Keras squares those of a row that comes twice one by one."""

    def apply(self, grads, trainable_variables=None):
        grads = [tf.convert_to_tensor(gradient) for gradient in grads]
        return super().apply(grads, trainable_variables)


def test_rows_of_two_samples_in_part_the_same():
    """In the first step of Adam a row without a gradient stays anyway."""
    x, labels = data(steps=1)
    results = []
    for optimizer, compile_it in (
        (keras.optimizers.Adam(0.03), km.EmbeddingModel.compile),
        (DenseAdam(0.03), keras.Model.compile),
    ):
        kernel = keras.initializers.RandomNormal(seed=0)
        dense = keras.layers.Dense(DIM, kernel_initializer=kernel)
        head = km.CosFace(CLASSES, 0.2, 8.0, sample_rate=0.4, seed=1)
        model = Mixup(keras.Sequential([keras.Input((4,)), dense]), head)
        compile_it(model, optimizer)
        fit(model, x, labels)
        results.append(rows_of(model))
    for one, other in zip(*(result.values() for result in results), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


# Resume


@pytest.mark.parametrize("name", [pytest.param("momentum", marks=LONG), "AdamW"])
def test_a_file_goes_on_as_if_nothing_had_happened(tmp_path, name):
    x, labels = data()
    straight = model_of(optimizer_of(name, "all"))
    fit(straight, x, labels)

    first = model_of(optimizer_of(name, "all"))
    fit(first, x[:40], labels[:40])
    first.save(tmp_path / "model.keras")
    again = keras.saving.load_model(tmp_path / "model.keras")
    watch = Watch(labels[40:])
    fit(again, x[40:], labels[40:], callbacks=[watch])
    assert np.array(watch.moved).all()
    for got, want in zip(again.get_weights(), straight.get_weights(), strict=True):
        np.testing.assert_array_equal(got, want)
    for got, want in zip(rows_of(again).values(), rows_of(straight).values(), strict=True):
        np.testing.assert_array_equal(got, want)


# JAX


def test_jax_moves_the_same_rows_to_the_same_place(tmp_path):
    """JAX has no sparse gradients: Keras moves all rows, and the others are put back."""
    x, labels = data()
    chosen = [(name, "all") for name in OPTIMIZERS] + [("amsgrad", "global_clipnorm")]
    runs = []
    for name, option in chosen:
        model = model_of(optimizer_of(name, option))
        runs.append({"optimizer": keras.saving.serialize_keras_object(model.optimizer)})
        runs[-1]["before"] = [value.tolist() for value in model.get_weights()]
        fit(model, x, labels)
        runs[-1]["after"] = model.get_weights(), [*rows_of(model).values()]
    code = """
        import json
        import keras
        import numpy as np
        import keras_margin as km
        from keras_margin.sampling import rows_of_step

        given = json.load(open("given.json"))
        x, labels = np.array(given["x"], "float32"), np.array(given["labels"])

        def rows_of(model):
            centers = model.head.centers
            slots = [v for v in model.optimizer.variables if v.shape == centers.shape]
            return [np.array(each) for each in (centers, *slots)]

        results = []
        for settings in given["runs"]:
            backbone = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
            head = km.ArcFace(30, 0.3, 8.0, sample_rate=0.2, seed=1)
            model = km.EmbeddingModel(backbone, head)
            model.set_weights([np.array(value) for value in settings["before"]])
            model.compile(keras.saving.deserialize_keras_object(settings["optimizer"]))
            model.optimizer.build(model.trainable_variables)
            for i in range(0, len(x), 4):
                rows = np.array(rows_of_step(head, labels[i : i + 4]))
                others = np.delete(np.arange(30), rows)
                before = rows_of(model)
                model.train_on_batch(x[i : i + 4], labels[i : i + 4])
                after = rows_of(model)
                for one, other in zip(after, before, strict=True):
                    assert (one[others] == other[others]).all()
                assert (after[0] != before[0])[rows].any(axis=1).all()
            weights = [np.array(value).tolist() for value in model.get_weights()]
            results.append([weights, [value.tolist() for value in rows_of(model)]])
        print(json.dumps(results))
    """
    given = [{key: run[key] for key in ("optimizer", "before")} for run in runs]
    given = {"x": x.tolist(), "labels": labels.tolist(), "runs": given}
    for got, run in zip(on_jax(code, given, tmp_path), runs, strict=True):
        for ours, theirs in zip(got, run["after"], strict=True):
            for one, other in zip(ours, theirs, strict=True):
                np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


MIXUP = """
    import json
    import keras
    import numpy as np
    import keras_margin as km
    from keras_margin.sampling import recorded_rows

    given = json.load(open("given.json"))
    x, labels = np.array(given["x"], "float32"), np.array(given["labels"])
    backbone = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
    model = Mixup(backbone, km.ArcFace(30, 0.3, 8.0, sample_rate=0.2, seed=1))
    model.set_weights([np.array(value) for value in given["before"]])
    model.compile(keras.optimizers.SGD(0.03, momentum=0.9))
    for i in range(0, len(x), 4):
        with recorded_rows(model.head) as rows:
            step = np.array(model.head.steps)
            model.compute_loss(y=labels[i : i + 4], y_pred=np.ones((4, 3)))
            model.head.steps.assign(step)
        rows = np.unique(np.concatenate([np.array(each) for each in rows]))
        before = np.array(model.head.centers)
        model.train_on_batch(x[i : i + 4], labels[i : i + 4])
        moved = (np.array(model.head.centers) != before).any(axis=1)
        assert np.array_equal(np.flatnonzero(moved), rows)
    print(json.dumps([np.array(value).tolist() for value in model.get_weights()]))
"""


def test_jax_moves_the_rows_of_both_samples_of_mixup(tmp_path):
    x, labels = data()
    backbone = keras.Sequential([keras.Input((4,)), keras.layers.Dense(DIM)])
    model = Mixup(backbone, km.ArcFace(CLASSES, 0.3, 8.0, sample_rate=0.2, seed=1))
    given = {"x": x.tolist(), "labels": labels.tolist()}
    given["before"] = [value.tolist() for value in model.get_weights()]
    model.compile(keras.optimizers.SGD(0.03, momentum=0.9))
    for i in range(0, len(x), BATCH):
        model.train_on_batch(x[i : i + BATCH], labels[i : i + BATCH])
    cut = MIXUP.index("    given =")
    code = MIXUP[:cut] + textwrap.indent(inspect.getsource(Mixup), "    ") + MIXUP[cut:]
    for got, want in zip(on_jax(code, given, tmp_path), model.get_weights(), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


LOSSES = """
    import json
    import keras
    import numpy as np
    import keras_margin as km

    given = json.load(open("given.json"))
    x, labels = np.array(given["x"], "float32")[:4], np.array(given["labels"])[:4]

    class Own(km.EmbeddingModel):
        def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
            terms = {
                "embeddings": lambda: keras.ops.mean(y_pred**2),
                "logits": lambda: keras.ops.mean(self.head.loss(y_pred, y))
                + keras.ops.mean(keras.ops.logsumexp(self.head(y_pred), axis=1)),
            }
            return terms[self.term]()

    moved = {}
    for term in ("embeddings", "logits"):
        backbone = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
        model = Own(backbone, km.ArcFace(30, 0.3, 8.0, sample_rate=0.2, seed=1))
        model.term = term
        model.compile(keras.optimizers.SGD(0.03, momentum=0.9, weight_decay=0.1))
        before = np.array(model.head.centers)
        model.train_on_batch(x, labels)
        moved[term] = int((np.array(model.head.centers) != before).any(axis=1).sum())
    print(json.dumps(moved))
"""


def test_jax_moves_what_a_loss_of_ones_own_looks_at(tmp_path):
    """No class, or every one."""
    x, labels = data()
    moved = on_jax(LOSSES, {"x": x.tolist(), "labels": labels.tolist()}, tmp_path)
    assert moved == {"embeddings": 0, "logits": 30}
