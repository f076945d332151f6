"""Trains over several processes or hosts with `keras.distribution`, on Keras' JAX backend.

    python examples/train_multihost.py                    two processes on this machine, on the CPU
    python examples/train_multihost.py --processes 1      the same losses from one

On a cluster, one command a host, the same on all but for the number of the process:

    python examples/train_multihost.py --coordinator host0:5000 --processes 4 --process-id 0

The devices form a mesh: the batch is shared out over its rows, the classes over its columns. By
default a row is the devices of a process, so that centres travel inside a host alone. Every process
reads its own rows of every batch, and writes its own shards of every checkpoint: the same command
again goes on after the last one. After each epoch every process judges the embedding of images that
neither train nor test.
"""

import argparse
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

HEADS = "AdaCos", "AdaFace", "ArcFace", "CosFace", "CurricularFace", "NormFace", "SphereFace2"
IGNORED = -1  # the label of rows that fill a batch up


def parse_arguments(arguments=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--processes", type=int, default=2, help="in all (default: 2)")
    parser.add_argument(
        "--coordinator",
        metavar="HOST:PORT",
        help="address of process 0; without it all processes are started on this machine",
    )
    parser.add_argument("--process-id", type=int, help="of this process, from 0")
    parser.add_argument(
        "--cpu-devices",
        type=int,
        metavar="N",
        help="virtual CPU devices of each process, in place of GPUs (default: as many as make four "
        "in all; on a cluster, the GPUs)",
    )
    parser.add_argument(
        "--mesh",
        type=int,
        nargs=2,
        metavar=("BATCH", "CLASSES"),
        help="shares of the batch and of the classes (default: processes, devices of a process)",
    )
    parser.add_argument("--dataset", default="mnist_5k", help="as in train.py")
    parser.add_argument("--head", default="AdaCos", choices=HEADS, help="default: AdaCos")
    parser.add_argument("--epochs", type=int, default=3, help="default: 3")
    parser.add_argument("--batch-size", type=int, default=64, help="of all processes (default: 64)")
    parser.add_argument("--seed", type=int, default=0, help="default: 0")
    parser.add_argument("--out", type=Path, default=Path("runs/multihost"))
    parser.add_argument(
        "--checkpoints",
        type=Path,
        metavar="DIR",
        help="write one after each epoch there, on a file system of all hosts (needs "
        "orbax-checkpoint), and go on after the last one that is there",
    )
    options = parser.parse_args(arguments)
    for name in ("processes", "cpu_devices", "epochs", "batch_size"):
        value = getattr(options, name)
        if value is not None and value < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1. Received: {value}")
    if options.mesh and min(options.mesh) < 1:
        parser.error(f"--mesh must hold two numbers of at least 1. Received: {options.mesh}")
    if (options.coordinator is None) != (options.process_id is None):
        parser.error("--coordinator and --process-id belong together")
    if options.process_id is not None and not 0 <= options.process_id < options.processes:
        parser.error(
            f"--process-id must be from 0 to {options.processes - 1}. "
            f"Received: {options.process_id}"
        )
    return options


def start_here(options):
    """Starts all processes on this machine; the first one that fails ends the others."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    devices = options.cpu_devices or max(1, 4 // options.processes)
    command = [sys.executable, __file__, *sys.argv[1:], "--coordinator", f"127.0.0.1:{port}"]
    command += ["--cpu-devices", str(devices), "--process-id"]
    # A terminated parent takes its processes with it, as Ctrl-C does.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    running = [subprocess.Popen([*command, str(i)]) for i in range(options.processes)]
    try:
        while any(process.poll() is None for process in running):
            if any(process.poll() for process in running):
                break
            time.sleep(0.1)
        return 1 if any(process.poll() for process in running) else 0
    finally:
        for process in running:
            process.terminate()
            process.wait()


def train(options):
    """What each process does."""
    os.environ["KERAS_BACKEND"] = "jax"
    if options.cpu_devices:
        os.environ["JAX_PLATFORMS"] = "cpu"
        flag = f"--xla_force_host_platform_device_count={options.cpu_devices}"
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}"
    import jax

    if options.cpu_devices:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
    import keras

    if options.processes > 1:
        keras.distribution.initialize(options.coordinator, options.processes, options.process_id)
    # Only now: what follows makes arrays, and these must know all devices.
    from backbones import small_cnn
    from image_sets import load, split

    import keras_margin

    is_first = jax.process_index() == 0
    shape = options.mesh or (options.processes, jax.local_device_count())
    devices = keras.distribution.list_devices()
    if shape[0] * shape[1] != len(devices):
        sys.exit(f"train_multihost.py: error: --mesh has {shape}, there are {len(devices)} devices")
    if options.batch_size % shape[0]:
        sys.exit(f"train_multihost.py: error: --batch-size is no multiple of {shape[0]}")
    mesh = keras.distribution.DeviceMesh(shape, ["batch", "model"], devices)
    keras.distribution.set_distribution(
        keras.distribution.ModelParallel(
            layout_map=keras_margin.distribution.class_parallel_layout(mesh),
            batch_dim_name="batch",
            auto_shard_dataset=False,  # each process reads its own rows
        )
    )

    data = split(load(options.dataset), calibration=0.2, seed=options.seed)
    keras.utils.set_random_seed(options.seed)  # the same weights in every process
    make_head = getattr(keras_margin, options.head)
    head = make_head(len(data.train_names), ignore_class=IGNORED, seed=options.seed)
    model = keras_margin.EmbeddingModel(small_cnn(data.train_images.shape[1:]), head)
    model.compile(keras.optimizers.AdamW(2e-3, weight_decay=1e-4))

    first_epoch, callbacks = 0, []
    if options.checkpoints:
        first_epoch, callbacks = go_on(model, options.checkpoints)
    if len(data.calibration_labels):
        judge = keras_margin.callbacks.VerificationCallback(
            data.calibration_images,
            data.calibration_labels,
            far=0.01,
            encoder=EncoderHere(model.encoder),
        )
        callbacks = [judge, *callbacks]  # first: others can follow what it writes
    Rows = rows_of_this_process(options.batch_size, mesh)
    history = model.fit(
        Rows(data.train_images, data.train_labels, options.seed, first_epoch),
        initial_epoch=first_epoch,
        epochs=options.epochs,
        shuffle=False,
        callbacks=callbacks,
        verbose=2 if is_first else 0,
    ).history
    test = model.evaluate(
        Rows(data.test_images, data.test_labels), return_dict=True, verbose=0
    )  # of all processes together
    if is_first:
        print(*(f"loss {loss:.6f}" for loss in history.get("loss", ())), sep="\n")
        print(*(f"val_eer {eer:.4f}" for eer in history.get("val_eer", ())), sep="\n")
        print(f"test loss {test['loss']:.6f}, accuracy {test['accuracy']:.4f}", flush=True)
        options.out.mkdir(parents=True, exist_ok=True)
        model.encoder.save(options.out / "encoder.keras")
        print(f"Written to {options.out}: encoder.keras", flush=True)
    if options.processes > 1:
        jax.distributed.shutdown()


def go_on(model, folder):
    """The epoch to begin with, after the last checkpoint, and the callback that writes them."""
    import keras

    from keras_margin import checkpoints

    # While it is being written, a checkpoint has another name.
    done = [int(path.name[6:]) for path in folder.glob("epoch-*") if path.name[6:].isdigit()]
    first_epoch = max(done, default=0)
    if done:
        checkpoints.restore(model, folder / f"epoch-{first_epoch:04}")

    def save(epoch, logs):
        checkpoints.save(model, folder / f"epoch-{epoch + 1:04}")

    return first_epoch, [keras.callbacks.LambdaCallback(on_epoch_end=save)]


class EncoderHere:
    """An encoder whose `predict` is of this process alone, on its first device.

    Keras' own, on a mesh of several hosts, would take the rows of each process for a part of the
    batch, and give embeddings that no process can read whole. Every host has all weights of a
    backbone; the centres of the classes, which no host has, take no part in an embedding.
    """

    def __init__(self, encoder):
        self._encoder = encoder

    def predict(self, x, batch_size, verbose=0):
        import jax
        import numpy as np

        variables = self._encoder.trainable_variables, self._encoder.non_trainable_variables
        weights = jax.tree.map(lambda variable: np.asarray(variable.value), variables)
        with jax.default_device(jax.local_devices()[0]):
            embed = jax.jit(self._encoder.stateless_call, static_argnames="training")
            embeddings = [
                embed(*weights, x[first : first + batch_size], training=False)[0]
                for first in range(0, len(x), batch_size)
            ]
        return np.concatenate(embeddings)


def rows_of_this_process(batch_size, mesh):
    """A PyDataset class: of every batch of all processes the rows that this one's devices take."""
    import jax
    import keras
    import numpy as np

    from keras_margin.datasets import pad_last_batch

    here = [
        device.process_index == jax.process_index() for device in mesh.backend_mesh.devices.flat
    ]
    parts = np.flatnonzero(np.reshape(here, mesh.shape).any(axis=1))
    per_part = batch_size // mesh.shape[0]
    mine = np.concatenate([np.arange(part * per_part, (part + 1) * per_part) for part in parts])

    class Rows(keras.utils.PyDataset):
        """With a seed, in an order that depends on (seed, epoch): the same in every process."""

        def __init__(self, images, labels, seed=None, epoch=0):
            super().__init__()
            self._images, self._labels = images, labels
            self._seed, self._epoch = seed, epoch
            self._mix()

        def _mix(self):
            order = np.arange(len(self._labels))
            if self._seed is not None:
                order = np.random.default_rng([self._seed, self._epoch]).permutation(order)
            cuts = [order[i : i + batch_size] for i in range(0, len(order), batch_size)]
            batches = [(rows, self._labels[rows]) for rows in cuts]
            # Devices share out every batch evenly, the last one too.
            self._batches = pad_last_batch(batches, batch_size, ignore_class=IGNORED)

        def __len__(self):
            return len(self._batches)

        def __getitem__(self, index):
            rows, labels = self._batches[index]
            return self._images[rows[mine]], labels[mine]

        def on_epoch_end(self):
            self._epoch += 1
            self._mix()

    return Rows


def main(arguments=None):
    options = parse_arguments(arguments)
    if options.coordinator is None:
        return start_here(options)
    train(options)


if __name__ == "__main__":
    sys.exit(main())
