"""`MultiWorkerMirroredStrategy` over two processes: a loop of one's own, against a single process.

Keras 3's `fit` cannot share a batch over processes: the loop gives `train_step` to `strategy.run`.
"""

import json
import os
import pickle
import random
import socket
import subprocess
import sys
import time
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_margin as km

pytestmark = pytest.mark.long

FEATURES, CLASSES, BATCH, WORKERS, SECONDS = 4, 40, 16, 2, 170

# Rows of each process, step by step: even, uneven, none for the second, none counts for the first.
SHARES = ((6, 6), (7, 5), (4, 0), (6, 6), (1, 3))

OPTIONS = {"ignore_class": -1}
HEADS = {
    "AdaCos": lambda: km.AdaCos(CLASSES, **OPTIONS),
    "ArcFace, sub-centres": lambda: km.ArcFace(CLASSES, 0.3, 8.0, num_subcenters=3, **OPTIONS),
    "CurricularFace": lambda: km.CurricularFace(CLASSES, 0.3, 8.0, momentum=0.2, **OPTIONS),
    "AdaFace": lambda: km.AdaFace(CLASSES, 0.3, 8.0, h=0.5, momentum=0.2, **OPTIONS),
    "ArcFace, sampled": lambda: km.ArcFace(CLASSES, 0.3, 8.0, sample_rate=0.5, seed=1, **OPTIONS),
    "AdaCos, sampled": lambda: km.AdaCos(CLASSES, sample_rate=0.25, seed=1, **OPTIONS),
}

STATE = ("centers", "steps", "scale", "t", "mu", "sigma")


def data():
    """(x, y) of the processes together."""
    rng = np.random.default_rng(0)
    x = 3.0 * rng.normal(size=(np.sum(SHARES), FEATURES)).astype("float32")
    y = rng.integers(0, CLASSES, len(x))
    y[28:34] = y[1] = -1
    return x, y


def model_of(head, seed=0):
    random.seed(seed)
    backbone = keras.Sequential([keras.Input((FEATURES,)), keras.layers.Dense(3)])
    model = km.EmbeddingModel(backbone, HEADS[head]())
    model.compile(keras.optimizers.SGD(0.05, momentum=0.9, weight_decay=0.01))
    model.optimizer.build(model.trainable_variables)
    return model


def state_of(model):
    """What is reported, and (weights, slots and counters of the optimizer) by path."""
    reported = {name: float(value) for name, value in model.get_metrics_result().items()}
    variables = [*model.weights, *model.optimizer.variables]
    return reported, {variable.path: variable.numpy() for variable in variables}


# What runs in the processes


def work(folder):
    """Trains every head and writes what this process holds after each step."""
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    process = strategy.cluster_resolver.task_id
    found = {"steps": {head: steps_of(head, strategy) for head in HEADS}}
    found["epochs"], model = epochs_of_loop(strategy)
    x, y = data()
    found["predicted"] = model.predict(x, batch_size=5, verbose=0)
    if process == 0:  # alone
        model.save(Path(folder, "model.keras"))
        model.encoder.save(Path(folder, "encoder.keras"))
    found["refused"] = {}
    for name in ("fit", "evaluate"):
        try:
            getattr(model, name)(x, y, verbose=0)
        except NotImplementedError as error:
            found["refused"][name] = str(error)
    Path(folder, f"{process}.pickle").write_bytes(pickle.dumps(found))


def steps_of(head, strategy):
    with strategy.scope():
        # The seeds differ, as in processes that nobody has told the same seed.
        model = model_of(head, seed=strategy.cluster_resolver.task_id)

    def own_shares(context):
        shares = np.array(SHARES)
        ends = np.cumsum(shares).reshape(shares.shape)[:, context.input_pipeline_id]
        starts = ends - shares[:, context.input_pipeline_id]
        x, y = (tf.constant(part) for part in data())
        dataset = tf.data.Dataset.from_tensor_slices((starts, ends))
        return dataset.map(lambda start, end: (x[start:end], y[start:end]))

    batches = strategy.distribute_datasets_from_function(own_shares)

    @tf.function(input_signature=[batches.element_spec])
    def step(batch):
        strategy.run(model.train_step, (batch,))

    after = []
    for batch in batches:
        step(batch)
        after.append(state_of(model))
        model.reset_metrics()
    return after


def epochs_of_loop(strategy):
    """The loop of docs/many-devices.md."""
    with strategy.scope():
        model = model_of("AdaCos")
    batches = strategy.experimental_distribute_dataset(
        tf.data.Dataset.from_tensor_slices(data()).batch(BATCH)
    )

    @tf.function(input_signature=[batches.element_spec])
    def step(batch):
        strategy.run(model.train_step, (batch,))

    history = []
    for _ in range(2):
        for batch in batches:
            step(batch)
        history.append(state_of(model)[0])
        model.reset_metrics()
    return history, model


# The tests


def free_ports(number):
    probes = [socket.socket() for _ in range(number)]
    for probe in probes:
        probe.bind(("127.0.0.1", 0))
    ports = [probe.getsockname()[1] for probe in probes]
    for probe in probes:
        probe.close()
    return ports


def start(folder, workers, index):
    cluster = {"worker": workers}
    environment = {
        **os.environ,
        "CUDA_VISIBLE_DEVICES": "-1",
        "PYTHONPATH": os.pathsep.join(sys.path),
        "TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": "worker", "index": index}}),
    }
    code = f"import test_multi_worker as t; t.work({str(folder)!r})"
    command = [sys.executable, "-W", "ignore", "-c", code]
    with (folder / f"{index}.log").open("wb") as log:
        return subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)


@pytest.fixture(scope="module")
def processes(tmp_path_factory):
    """What each process has found. One that fails leaves the other waiting: both are ended."""
    folder = tmp_path_factory.mktemp("workers")
    workers = [f"127.0.0.1:{port}" for port in free_ports(WORKERS)]
    running = [start(folder, workers, index) for index in range(WORKERS)]
    end = time.monotonic() + SECONDS
    try:
        while any(process.poll() is None for process in running):
            if time.monotonic() > end or any(process.poll() for process in running):
                break
            time.sleep(0.1)
        codes = [process.poll() for process in running]
    finally:
        for process in running:
            process.kill()
            process.wait()
    logs = [(folder / f"{index}.log").read_text() for index in range(WORKERS)]
    assert codes == [0] * WORKERS, "\n".join(logs)
    found = [pickle.loads((folder / f"{i}.pickle").read_bytes()) for i in range(WORKERS)]
    return [{**each, "folder": folder} for each in found]


def steps_of_one_process(head):
    model = model_of(head)
    signature = (tf.TensorSpec((None, FEATURES)), tf.TensorSpec((None,), tf.int64))
    step = tf.function(model.train_step, input_signature=[signature])
    ends = np.cumsum(np.sum(SHARES, axis=1))[:-1]
    after = []
    for x, y in zip(*(np.split(part, ends) for part in data()), strict=True):
        step((tf.constant(x), tf.constant(y)))
        after.append(state_of(model))
        model.reset_metrics()
    return after


@pytest.mark.parametrize("head", HEADS)
def test_every_step_equals_the_joined_batch(processes, head):
    """Losses, scale, t, mu, sigma, counters, centres and slots, and the same in both processes."""
    wanted = steps_of_one_process(head)
    first, second = (found["steps"][head] for found in processes)
    assert len(first) == len(second) == len(wanted) == len(SHARES)
    for (reported, values), (others_report, others), (want, variables) in zip(
        first, second, wanted, strict=True
    ):
        assert others_report == reported
        assert reported == pytest.approx(want, rel=1e-5, nan_ok=True)
        for (path, value), other, variable in zip(
            values.items(), others.values(), variables.values(), strict=True
        ):
            np.testing.assert_array_equal(other, value, path)
            np.testing.assert_allclose(value, variable, 1e-5, 1e-5, err_msg=path)
    moved = {path for path, value in wanted[-1][1].items() if (value != wanted[0][1][path]).any()}
    assert moved >= {path for path in wanted[0][1] if path.split("/")[-1] in STATE}


def test_the_loop_of_the_guide_reports_what_fit_does(processes):
    """The last of its batches has 8 rows."""
    model = model_of("AdaCos")
    history = model.fit(*data(), batch_size=BATCH, epochs=2, shuffle=False, verbose=0).history
    for found in processes:
        for epoch, reported in enumerate(found["epochs"]):
            wanted = {name: values[epoch] for name, values in history.items()}
            assert reported == pytest.approx(wanted, rel=1e-5)


def test_fit_and_evaluate_are_refused(processes):
    for found in processes:
        assert found["refused"].keys() == {"fit", "evaluate"}
        for name, message in found["refused"].items():
            assert message.startswith(f"Keras 3's `{name}` does not support a MultiWorkerMirrored")
            assert "examples/train_multihost.py" in message
            assert message.endswith("Received: 1 of 2 replicas in this process")


def test_predictions_and_files_are_those_of_one_process(processes):
    """`predict` gives every row to each process, and one process alone writes the files."""
    first, second = (found["predicted"] for found in processes)
    x, y = data()
    model = model_of("AdaCos")
    model.fit(x, y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0)
    np.testing.assert_array_equal(second, first)
    np.testing.assert_allclose(first, model.predict(x, verbose=0), 1e-5, 1e-5)

    folder = processes[0]["folder"]
    loaded = keras.saving.load_model(folder / "model.keras")
    encoder = keras.saving.load_model(folder / "encoder.keras")
    got, wanted = encoder.predict(x, verbose=0), model.encoder.predict(x, verbose=0)
    np.testing.assert_allclose(got, wanted, 1e-5, 1e-5)
    for each in (loaded, model):
        each.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0)
    for (path, value), variable in zip(
        state_of(loaded)[1].items(), state_of(model)[1].values(), strict=True
    ):
        np.testing.assert_allclose(value, variable, 1e-5, 1e-5, err_msg=path)
