"""Heads whose classes are shared out over devices, against the same heads on one device.

Eight virtual CPU devices, in a process of their own: the backend is JAX.
"""

import re

import numpy as np
import pytest
from jax_process import on_jax

DEVICES = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8"}

COMMON = """
    import json, os, sys
    import keras
    import numpy as np
    import keras_margin as km

    given = json.load(open("given.json"))
    ROWS, DIM = 16, 4

    HEADS = {
        "ArcFace": lambda classes: km.ArcFace(classes, 0.3, 16.0, seed=0),
        "AdaCos": lambda classes: km.AdaCos(classes, seed=0),
        "subcenters": lambda classes: km.CosFace(
            classes, 0.2, 16.0, num_subcenters=3, label_smoothing=0.1, seed=0
        ),
        "CurricularFace": lambda classes: km.CurricularFace(classes, 0.3, 16.0, seed=0),
        "AdaFace": lambda classes: km.AdaFace(classes, 0.3, 16.0, seed=0),
        "MagFace": lambda classes: km.MagFace(classes, 16.0, norm_range=(1.0, 9.0), seed=0),
        "ElasticFace": lambda classes: km.ElasticFace(classes, 0.3, 16.0, seed=0),
        "NormFace": lambda classes: km.NormFace(classes, 16.0, seed=0),
        "SphereFace": lambda classes: km.SphereFace(classes, 3, seed=0),
        "LSoftmax": lambda classes: km.LSoftmax(classes, 2, seed=0),
        "SoftmaxHead": lambda classes: km.SoftmaxHead(classes, seed=0),
        "SphereFace2": lambda classes: km.SphereFace2(classes, 0.2, 16.0, seed=0),
        "learned scale": lambda classes: km.MarginHead(
            classes, scale=km.scales.LearnedScale(16.0), seed=0
        ),
        "streamed": lambda classes: km.ArcFace(classes, 0.3, 16.0, chunk_size=3, seed=0),
        "chunks": lambda classes: km.ArcFace(classes, 0.3, 16.0, chunk_size=20_000, seed=0),
        "sampled": lambda classes: km.ArcFace(classes, 0.3, 16.0, sample_rate=0.5, seed=0),
        "sampled tenth": lambda classes: km.ArcFace(classes, 0.3, 16.0, sample_rate=0.1, seed=0),
        "sampled subcenters": lambda classes: km.AdaFace(
            classes, 0.3, 16.0, num_subcenters=2, sample_rate=0.5, seed=0
        ),
    }

    def use_mesh(shape):
        # With one axis, the devices share out both the batch and the classes over it.
        axes = ["batch", "model"][: len(shape)]
        devices = keras.distribution.list_devices()[: int(np.prod(shape))]
        mesh = keras.distribution.DeviceMesh(shape, axes, devices)
        layout = km.distribution.class_parallel_layout(mesh, axis=axes[-1])
        keras.distribution.set_distribution(
            keras.distribution.ModelParallel(layout_map=layout, batch_dim_name=axes[0])
        )

    def use_one_device():
        keras.distribution.set_distribution(None)

    def model_of(name, classes, optimizer="momentum"):
        kernel = keras.initializers.RandomNormal(seed=0)
        dense = keras.layers.Dense(DIM, kernel_initializer=kernel)
        backbone = keras.Sequential([keras.Input((6,)), dense])
        model = km.EmbeddingModel(backbone, HEADS[name](classes))
        made = {
            "momentum": lambda: keras.optimizers.SGD(0.05, momentum=0.9, weight_decay=1e-3),
            "Adam": lambda: keras.optimizers.Adam(0.01, epsilon=0.1),
        }
        model.compile(made[optimizer]())
        return model

    def data(classes, steps=3):
        rng = np.random.default_rng(0)
        x = rng.normal(size=(steps * ROWS, 6)).astype("float32")
        return x, rng.integers(0, classes, len(x))

    def fit(model, classes):
        history = model.fit(*data(classes), batch_size=ROWS, shuffle=False, verbose=0).history
        return [history[name][0] for name in sorted(history)]

    def rows_of(model):
        \"\"\"Centers and slots as arrays without padding, and the other weights.\"\"\"
        head = model.head
        rows = head.num_classes * head.num_subcenters
        values = [*model.weights, *model.optimizer.variables]
        shape = head.centers.shape
        return [np.asarray(v)[:rows] if v.shape == shape else np.asarray(v) for v in values]
"""


def run(code, given, folder, **environment):
    lines = COMMON + code
    return on_jax(lines, given, folder, **DEVICES, **environment)


EQUALITY = """
    gaps = {}
    for name in given["heads"]:
        results = []
        for shape in (None, *given["meshes"]):
            use_one_device() if shape is None else use_mesh(shape)
            model = model_of(name, given["classes"])
            reported = fit(model, given["classes"])
            x, y = data(given["classes"])
            reported += model.evaluate(x, y, batch_size=ROWS, verbose=0)
            centers = model.head.centers.value
            padded = -(-given["classes"] // (shape or [1])[-1]) * model.head.num_subcenters
            assert centers.sharding.shard_shape(centers.shape)[0] == padded, centers.sharding
            logits = model.classifier.predict(x, batch_size=ROWS, verbose=0)
            assert logits.shape == (len(x), given["classes"])
            results.append([np.array(reported), logits, *rows_of(model)])
        for other in results[1:]:
            for one, want in zip(other, results[0], strict=True):
                scale = max(1.0, np.abs(want).max(initial=0.0))
                gap = np.abs(np.subtract(one, want, dtype="float64")).max(initial=0.0) / scale
                gaps[name] = max(gaps.get(name, 0.0), float(gap))
    print(json.dumps(gaps))
"""

HEADS = [
    "ArcFace",
    "AdaCos",
    "subcenters",
    "CurricularFace",
    "AdaFace",
    "MagFace",
    "ElasticFace",
    "NormFace",
    "SphereFace",
    "LSoftmax",
    "SoftmaxHead",
    "SphereFace2",
    "learned scale",
    "streamed",
    "sampled",
    "sampled subcenters",
]


def assert_equal_on(meshes, heads, classes, folder):
    gaps = run(EQUALITY, {"meshes": meshes, "heads": heads, "classes": classes}, folder)
    assert gaps.keys() == set(heads)
    assert max(gaps.values()) < 1e-5, gaps


def test_two_heads_equal_those_on_one_device(tmp_path):
    """10 classes on 3 devices: 2 rows of padding."""
    assert_equal_on([(1, 3), (4,)], ["AdaCos", "sampled"], 10, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("classes", [10, 43])
def test_every_head_equals_that_on_one_device(tmp_path, classes):
    """The losses, accuracy, state, weights, slots and logits after three steps of `fit`."""
    assert_equal_on([(2, 4), (4, 2), (8,)], HEADS, classes, tmp_path)


@pytest.mark.long
def test_a_device_may_have_padding_alone(tmp_path):
    """5 classes on 4 devices: 2, 2, 1 and none."""
    assert_equal_on([(2, 4)], ["ArcFace", "AdaCos", "SphereFace2", "subcenters"], 5, tmp_path)


FILES = """
    classes, straight = given["classes"], []
    use_one_device()
    plain = model_of("subcenters", classes, "Adam")
    fit(plain, classes)
    straight = fit(plain, classes)
    use_mesh((2, 4))
    model = model_of("subcenters", classes, "Adam")
    fit(model, classes)
    model.save("four.keras")
    model.save_weights("four.weights.h5")
    goes_on = {}
    for shape in (None, (1, 2), (1, 3), (2, 4)):
        use_one_device() if shape is None else use_mesh(shape)
        loaded = keras.saving.load_model("four.keras")
        goes_on[str(shape)] = fit(loaded, classes)
        loaded = model_of("subcenters", classes, "Adam")
        loaded.optimizer.build(loaded.trainable_variables)
        loaded.load_weights("four.weights.h5")
        goes_on[f"weights {shape}"] = fit(loaded, classes)
    import h5py
    with h5py.File("four.weights.h5") as file:
        shapes = []
        file.visititems(lambda name, part: shapes.append(list(getattr(part, "shape", []))))
    print(json.dumps([straight, goes_on, shapes]))
"""


def test_files_do_not_care_how_many_devices_there_are(tmp_path):
    """10 classes of 3 sub-centres: saved from 4 devices, which have 36 rows."""
    straight, goes_on, shapes = run(FILES, {"classes": 10}, tmp_path)
    assert len(goes_on) == 8
    for losses in goes_on.values():
        np.testing.assert_allclose(losses, straight, rtol=1e-5)
    assert shapes.count([30, 4]) == 3  # centers and two slots
    assert [36, 4] not in shapes


SAME_SHAPE = """
    def model_of_same_shape(classes):
        kernel = keras.initializers.RandomNormal(seed=0)
        layers = [keras.layers.Dense(n, kernel_initializer=kernel) for n in (12, DIM, 10, DIM)]
        backbone = keras.Sequential([keras.Input((6,)), *layers])
        model = km.EmbeddingModel(backbone, HEADS["ArcFace"](classes))
        model.compile(keras.optimizers.Adam(0.01, epsilon=0.1))
        return model

    use_mesh((2, 4))
    model = model_of_same_shape(10)
    fit(model, 10)
    model.save("model.keras")
    straight = fit(model, 10)
    use_one_device()
    print(json.dumps([straight, fit(keras.saving.load_model("model.keras"), 10)]))
"""


def test_files_leave_other_weights_of_the_same_shape_alone(tmp_path):
    """12 centres of which 2 are padding, beside kernels of (12, 4) and (10, 4)."""
    straight, later = run(SAME_SHAPE, {}, tmp_path)
    np.testing.assert_allclose(later, straight, rtol=1e-5)


PADDING = """
    @keras.saving.register_keras_serializable()
    class MeanSquare(keras.regularizers.Regularizer):
        def __call__(self, centers):
            return keras.ops.mean(centers**2)

    results, refused = [], []
    for shape in (None, (2, 4)):
        use_one_device() if shape is None else use_mesh(shape)
        backbone = keras.Sequential([keras.Input((6,)), keras.layers.Dense(DIM)])
        backbone.set_weights([np.full((6, DIM), 0.1) * np.arange(DIM), np.zeros(DIM)])
        head = km.ArcFace(5, 0.3, 16.0, centers_regularizer=MeanSquare(), seed=0)
        model = km.EmbeddingModel(backbone, head)
        model.compile(keras.optimizers.SGD(0.5))
        results.append(fit(model, 5))
    for make in (keras.optimizers.Adafactor, keras.optimizers.Muon):
        try:
            model.compile(make())
        except ValueError as error:
            refused.append(str(error))
    print(json.dumps([results, refused]))
"""


def test_padding_counts_for_no_regularizer_and_no_optimizer(tmp_path):
    """5 classes on 4 devices: 3 rows of padding."""
    (one, shared), refused = run(PADDING, {}, tmp_path)
    np.testing.assert_allclose(shared, one, rtol=1e-5)
    assert len(refused) == 2
    assert "Received: optimizer=Adafactor" in refused[0]
    assert "Received: optimizer=Muon" in refused[1]


LARGE_START = """
    DIM, centers = 16, []
    for shape in (None, (2, 4)):
        use_one_device() if shape is None else use_mesh(shape)
        head = HEADS["ArcFace"](given["classes"])
        head.build((None, DIM))
        centers.append(np.asarray(head.centers))
    one, shared = centers
    rows = given["classes"]
    np.testing.assert_allclose(shared[:rows], one, rtol=1e-6)
    print(json.dumps([len(shared), float(np.abs(shared[rows:]).max())]))
"""


@pytest.mark.long
def test_centers_that_are_made_where_they_lie_are_those_of_one_device(tmp_path):
    """From 250 MB on all devices together on, Keras compiles the initializer."""
    rows, padding = run(LARGE_START, {"classes": 600_003}, tmp_path)
    assert (rows, padding) == (600_004, 0.0)


LARGE = """
    classes, results = given["classes"], {}
    for name in given["heads"]:
        use_one_device()
        want = fit(model_of(name, classes), classes)
        use_mesh((2, 4))
        model = model_of(name, classes)
        got = fit(model, classes)
        x, y = data(classes)
        model.evaluate(x, y, batch_size=ROWS, verbose=0)
        optimizer = model.optimizer
        shards = {}
        for v in (model.head.centers, *optimizer.variables):
            if v.shape == model.head.centers.shape:
                parts = v.value.addressable_shards
                shards[v.path] = [list(v.shape), [part.data.nbytes for part in parts]]
        results[name] = [want, got, shards]
    print(json.dumps(results))
"""
LARGE_HEADS = ["ArcFace", "chunks", "AdaCos", "subcenters", "CurricularFace", "sampled tenth"]


@pytest.mark.long
@pytest.mark.parametrize("classes", [200_000, 200_003])
def test_no_device_holds_all_classes(tmp_path, classes):
    """The compiled programs of `fit`, optimizer included, and of `evaluate`, as XLA dumps them."""
    dump = tmp_path / "dump"
    flags = f"{DEVICES['XLA_FLAGS']} --xla_dump_to={dump} --xla_dump_hlo_as_text"
    given = {"classes": classes, "heads": LARGE_HEADS}
    results = on_jax(COMMON + LARGE, given, tmp_path, XLA_FLAGS=flags)
    padded = -(-classes // 4) * 4
    for name, (want, got, shards) in results.items():
        np.testing.assert_allclose(got, want, rtol=1e-5, err_msg=name)
        assert len(shards) == 2  # centers and momentum
        subcenters = 3 if name == "subcenters" else 1
        for shape, parts in shards.values():
            assert shape == [padded * subcenters, 4]
            assert parts == [padded // 4 * subcenters * 4 * 4] * 8

    whole = {str(rows) for rows in (classes, padded, 3 * classes, 3 * padded)}
    programs = [path.read_text() for path in dump.glob("*train_step*after_optimizations.txt")]
    programs += [path.read_text() for path in dump.glob("*test_step*after_optimizations.txt")]
    sharded = [text for text in programs if "num_partitions=8" in text]
    assert len(sharded) >= 2 * len(LARGE_HEADS)
    for text in sharded:
        shapes = re.findall(r"\b(?:f|bf|s|u|pred)\d*\[([\d,]+)\]", text)
        for shape in shapes:
            sizes = shape.split(",")
            # One number a class, such as whether it may move, is all that may be whole.
            assert not (whole & set(sizes) and len(sizes) > 1 and sizes[1:] != ["1"]), shape


REPLACED = """
    results = []
    for shape in (None, (2, 4)):
        use_one_device() if shape is None else use_mesh(shape)
        model = model_of("subcenters", 10)
        found = fit(model, 10)
        x, y = data(10)
        head = model.head.resized(13, {old: 12 - old for old in range(9)})
        head.imprint(model.predict(x, batch_size=ROWS, verbose=0)[:9], [0, 1, 2] * 3)
        model.replace_head(head)
        found += fit(model, 13)
        results.append([np.array(found), *rows_of(model)])
        padding = np.abs(np.asarray(model.head.centers)[39:]).max(initial=0.0)
        shares = model.head.centers.value.sharding.shard_shape(model.head.centers.shape)
    gaps = [
        float(np.abs(np.subtract(one, other, dtype="float64")).max(initial=0.0))
        for one, other in zip(*results, strict=True)
    ]
    print(json.dumps([max(gaps), float(padding), shares]))
"""


def test_a_head_that_is_replaced(tmp_path):
    """13 classes of 3 sub-centres on 4 devices: 4 classes each, the last 3 of them padding."""
    gap, padding, shares = run(REPLACED, {}, tmp_path)
    assert gap < 1e-5
    assert padding == 0.0
    assert shares == [12, 4]
