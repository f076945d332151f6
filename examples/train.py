"""Trains an embedding with a margin head, judges it on held-out images, and writes what ships.

    python examples/train.py                                    5 000 digits, AdaCos, a minute
    python examples/train.py --unseen 3                         judge on digits never trained on
    python examples/train.py --dataset orl_faces --unseen 10    faces
    python examples/train.py --dataset path/to/folder --image-size 112 112    your own identities

With more than one GPU it trains on all of them (tf.distribute.MirroredStrategy).
"""

import argparse
import contextlib
import inspect
import math
import sys
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf
from backbones import SMALLEST_IMAGE, small_cnn
from calibration import calibrate, print_threshold
from image_sets import load, split
from report import judge, print_table, print_usage, write_all

import keras_margin
from keras_margin.files import check_writable

HEADS = {
    name: getattr(keras_margin, name)
    for name in keras_margin.__all__
    if isinstance(getattr(keras_margin, name), type)
    and issubclass(getattr(keras_margin, name), keras_margin.MarginHead)
    and name != "MarginHead"
}
CALIBRATION = 0.2  # of the training set aside: it chooses the threshold and the epoch
MOST_CPU_REPLICAS = 16  # logical devices of one CPU only show that the code works


def parse_arguments(arguments=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--dataset",
        default="mnist_5k",
        help="mnist_5k, orl_faces, a folder with one sub-folder per identity, or any image "
        "classification set of TensorFlow Datasets (default: mnist_5k)",
    )
    parser.add_argument("--head", default="AdaCos", choices=sorted(HEADS), help="default: AdaCos")
    parser.add_argument("--margin", type=float, help="of the head (default: its own)")
    parser.add_argument("--scale", type=float, help="of the head (default: its own)")
    parser.add_argument(
        "--epochs", type=int, help="default: 8, or more if that is under 400 steps of training"
    )
    parser.add_argument(
        "--batch-size", type=int, default=64, help="over all replicas (default: 64)"
    )
    parser.add_argument("--learning-rate", type=float, default=2e-3, help="default: 0.002 (AdamW)")
    parser.add_argument(
        "--embedding-dim",
        type=int,
        help="default: 64; 128 for MagFace, whose margin follows norms from 10 to 110, where those "
        "of this network are about sqrt(dim); 2 or 3: drawn",
    )
    parser.add_argument(
        "--unseen",
        type=int,
        default=0,
        metavar="K",
        help="keep the last K identities out of training altogether and judge on them (default: 0: "
        "judge on other images of the trained identities)",
    )
    parser.add_argument(
        "--far",
        type=float,
        default=0.01,
        help="the false accept rate to judge at and to find a threshold for (default: 0.01)",
    )
    parser.add_argument("--image-size", type=int, nargs=2, metavar=("HEIGHT", "WIDTH"))
    parser.add_argument(
        "--replicas",
        type=int,
        help="train on N replicas: the first N GPUs, or N logical devices of the CPU where there "
        "are fewer GPUs (default: all GPUs, or the CPU)",
    )
    parser.add_argument(
        "--mixed-precision",
        nargs="?",
        const="auto",
        choices=["auto", "mixed_float16", "mixed_bfloat16"],
        help="auto: mixed_float16 on a GPU, mixed_bfloat16 on the CPU",
    )
    parser.add_argument("--seed", type=int, default=0, help="default: 0")
    parser.add_argument("--data-dir", help="where TensorFlow Datasets keeps its files")
    parser.add_argument(
        "--out", type=Path, help="folder for all results (default: runs/DATASET-HEAD[-unseenK])"
    )
    options = parser.parse_args(arguments)
    for name in ("epochs", "batch_size", "embedding_dim", "replicas"):
        value = getattr(options, name)
        if value is not None and value < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1. Received: {value}")
    if not 0.0 < options.learning_rate < math.inf:
        parser.error(f"--learning-rate must be positive. Received: {options.learning_rate}")
    if not 0.0 < options.far < 1.0:
        parser.error(f"--far must be between 0 and 1. Received: {options.far}")
    for name in ("margin", "scale"):
        takes = name in inspect.signature(HEADS[options.head]).parameters
        if getattr(options, name) is not None and not takes:
            parser.error(f"{options.head} takes no --{name}. Received: {getattr(options, name)}")
    if not 0 <= options.seed < 2**32:
        parser.error(f"--seed must be from 0 to 2^32 - 1. Received: {options.seed}")
    if options.embedding_dim is None:
        options.embedding_dim = 128 if options.head == "MagFace" else 64
    if options.out is None:
        unseen = f"-unseen{options.unseen}" if options.unseen else ""
        options.out = Path("runs") / f"{Path(options.dataset).name}-{options.head}{unseen}"
    return options


def make_strategy(replicas):
    """A MirroredStrategy over several devices, or None for a single one."""
    gpus = tf.config.list_physical_devices("GPU")
    replicas = replicas or max(len(gpus), 1)
    if replicas == 1:
        return None
    if replicas <= len(gpus):
        return tf.distribute.MirroredStrategy([f"GPU:{i}" for i in range(replicas)])
    if replicas > MOST_CPU_REPLICAS:
        raise ValueError(
            f"--replicas must be at most the number of GPUs, {len(gpus)}, or {MOST_CPU_REPLICAS} "
            f"on the CPU. Received: {replicas}"
        )
    tf.config.set_logical_device_configuration(
        tf.config.list_physical_devices("CPU")[0],
        [tf.config.LogicalDeviceConfiguration()] * replicas,
    )
    return tf.distribute.MirroredStrategy([f"CPU:{i}" for i in range(replicas)])


def make_head(options, num_classes):
    """The chosen head, with its own margin and scale but where others are asked for."""
    given = {name: getattr(options, name) for name in ("margin", "scale")}
    given = {name: value for name, value in given.items() if value is not None}
    if options.head == "LSoftmax" and given.get("margin", 0.5).is_integer():
        given["margin"] = int(given["margin"])  # it counts the angle a whole number of times
    return HEADS[options.head](num_classes, **given)


def make_model(options, image_shape, num_classes, total_steps):
    """Backbone, head and optimizer: what a user of the package writes."""
    model = keras_margin.EmbeddingModel(
        backbone=small_cnn(image_shape, options.embedding_dim),
        head=make_head(options, num_classes),
    )
    schedule = keras.optimizers.schedules.CosineDecay(options.learning_rate, total_steps)
    model.compile(keras.optimizers.AdamW(schedule, weight_decay=1e-4))
    return model


def make_callbacks(options, data, epochs):
    """Judges the calibration images after each epoch, and goes back to the best one at the end.

    The test takes no part: an epoch that was chosen on it would look better than it is.
    """
    if not len(data.calibration_labels):
        return []
    images, labels = data.calibration_images, data.calibration_labels
    judge = keras_margin.callbacks.VerificationCallback(images, labels, options.far)
    # Patient: as the learning rate falls, the last epochs gain most.
    best = keras.callbacks.EarlyStopping(
        "val_eer", mode="min", patience=max(5, epochs // 2), restore_best_weights=True, verbose=1
    )
    return [judge, best]  # the judge first: the other reads what it writes


def train(options, data, strategy):
    """Fits the model to the training images."""
    images, labels = data.train_images, data.train_labels
    # Keras asks for a first batch that the replicas can share evenly.
    replicas = strategy.num_replicas_in_sync if strategy else 1
    batch_size = replicas * math.ceil(min(options.batch_size, len(images) / 8) / replicas)
    steps_per_epoch = math.ceil(len(images) / batch_size)
    epochs = options.epochs or max(8, math.ceil(400 / steps_per_epoch))
    with strategy.scope() if strategy else contextlib.nullcontext():
        model = make_model(
            options, images.shape[1:], len(data.train_names), steps_per_epoch * epochs
        )
    model.summary()
    how = {
        "epochs": epochs,
        "callbacks": make_callbacks(options, data, epochs),
        "verbose": 1 if sys.stdout.isatty() else 2,  # the bar, or a line an epoch in a file
    }
    if strategy:
        # A last batch too short for all replicas would ruin the BatchNormalization of the others.
        batches = tf.data.Dataset.from_tensor_slices((images, labels))
        batches = batches.shuffle(len(images), seed=options.seed)
        batches = batches.batch(batch_size, drop_remainder=True).prefetch(tf.data.AUTOTUNE)
        model.fit(batches, shuffle=False, **how)
    else:
        model.fit(images, labels, batch_size=batch_size, **how)
    return model


def main(arguments=None):
    options = parse_arguments(arguments)
    try:
        check_writable(options.out)
        strategy = make_strategy(options.replicas)
        image_set = load(options.dataset, data_dir=options.data_dir, image_size=options.image_size)
        data = split(image_set, unseen=options.unseen, calibration=CALIBRATION, seed=options.seed)
        make_head(options, len(data.train_names))  # says early what the head cannot train
        if min(data.train_images.shape[1:3]) < SMALLEST_IMAGE:
            raise ValueError(
                f"The network needs images of at least {SMALLEST_IMAGE} x {SMALLEST_IMAGE} pixels. "
                f"Received: {data.train_images.shape[1]} x {data.train_images.shape[2]}"
            )
        if strategy and strategy.num_replicas_in_sync > len(data.train_images):
            raise ValueError(
                f"--replicas must be at most the number of training images, "
                f"{len(data.train_images)}. Received: {strategy.num_replicas_in_sync}"
            )
    except (ValueError, TypeError, OSError, ImportError) as error:
        sys.exit(f"train.py: error: {error}")
    print(
        f"{options.dataset}: {len(data.train_images)} images of {len(data.train_names)} identities "
        f"for training, {len(data.test_images)} of {len(data.test_names)} for the test, "
        f"{len(data.calibration_images)} of {len(np.unique(data.calibration_labels))} for the "
        "threshold and the best epoch."
    )
    keras.utils.set_random_seed(options.seed)
    if options.mixed_precision:
        has_gpu = bool(tf.config.list_physical_devices("GPU"))
        automatic = "mixed_float16" if has_gpu else "mixed_bfloat16"
        policy = automatic if options.mixed_precision == "auto" else options.mixed_precision
        keras.config.set_dtype_policy(policy)

    try:
        model = train(options, data, strategy)
    except FloatingPointError as error:  # it diverged: the message says what to try
        sys.exit(f"train.py: error: {error}")
    results = judge(model, data, options.far)
    print_table(results, data, options.far)
    threshold = calibrate(model.encoder, data, options.far)
    print_threshold(threshold, data, options.far)
    write_all(options.out, model, data, results, threshold)
    print_usage(options.out, data.test_images.shape[1:])


if __name__ == "__main__":
    main()
