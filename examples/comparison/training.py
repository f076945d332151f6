"""One run of the comparison: train a head from a seed, judge its embeddings closed and open set."""

import dataclasses
import inspect
import math
import time

import keras
import numpy as np
from backbones import small_cnn

import keras_margin
from keras_margin import datasets, retrieval, verification

ROWS = 256  # images that the encoder is given at once


@dataclasses.dataclass(frozen=True)
class Setting:
    """What is compared: a head at its own defaults or at the matched scale.

    Attributes:
        head: A class of `keras_margin`; None: no training, the raw pixels.
        matched: Whether the head has the scale that all have, and not its own.
    """

    head: str | None
    matched: bool = False

    def __str__(self):
        if self.head is None:
            return "raw pixels"
        return f"{self.head} (matched scale)" if self.matched else self.head


RAW_PIXELS = Setting(None)


def default_scale(head):
    """The scale that a head has by default; None if it takes no `scale`, so cannot be matched."""
    scale = inspect.signature(getattr(keras_margin, head)).parameters.get("scale")
    return scale and scale.default


def settings_of(heads):
    """The raw pixels, every head as it is, and those that take a scale at the matched one."""
    heads = list(dict.fromkeys(heads))
    matched = [Setting(head, matched=True) for head in heads if default_scale(head) is not None]
    return [RAW_PIXELS, *(Setting(head) for head in heads), *matched]


def make_model(setting, seed, options, data, total_steps):
    """A compiled model; a seed's backbone, and its centres, start equal under every head."""
    keras.utils.set_random_seed(seed)
    # Before the head, which draws numbers of its own.
    backbone = small_cnn(data.train_images.shape[1:], options.embedding_dim)
    arguments = {"scale": options.scale} if setting.matched else {}
    if setting.head == "SemiHardTriplet":
        head = keras_margin.SemiHardTriplet()
    else:
        head_class = getattr(keras_margin, setting.head)
        head = head_class(len(data.train_names), seed=seed, **arguments)
    model = keras_margin.EmbeddingModel(backbone, head)
    schedule = keras.optimizers.schedules.CosineDecay(options.learning_rate, total_steps)
    model.compile(keras.optimizers.AdamW(schedule, weight_decay=1e-4))
    return model


def make_batches(seed, options, data):
    """The batches of a seed, the same under every head: the triplet needs pairs in them."""
    identities, images = options.batch
    identities = min(identities, len(data.train_names))
    return datasets.balanced_batches(data.train_labels, identities, images, seed=seed)


def epochs_of(options, batches):
    """As many as `options.steps` takes, and two at least: the first is not timed."""
    return max(2, -(-options.steps // len(batches)))


def train(setting, seed, options, data):
    """Trains for `epochs_of(options, batches)` epochs.

    Returns:
        The model, and what the training says of itself: `seconds` without the first epoch, in which
        Keras compiles; the `loss` of the last one, and its `accuracy` on the training images
        without margin, None for a head without classes.

    Raises:
        FloatingPointError: The loss is no longer finite.
    """
    batches = make_batches(seed, options, data)
    epochs = epochs_of(options, batches)
    model = make_model(setting, seed, options, data, epochs * len(batches))
    ends = []  # of the epochs
    clock = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: ends.append(time.perf_counter())
    )
    history = model.fit(
        batches.gather(data.train_images, data.train_labels),
        epochs=epochs,
        shuffle=False,  # in the order of the seed
        callbacks=[clock],
        verbose=0,
    ).history
    return model, {
        "seconds": ends[-1] - ends[0],
        "loss": history["loss"][-1],
        "accuracy": history["accuracy"][-1] if "accuracy" in history else None,
    }


def encode(model, images):
    """Unit embeddings (n, dim): eager, since Keras would compile `predict` for every run."""
    blocks = (images[start : start + ROWS] for start in range(0, len(images), ROWS))
    rows = [keras.ops.convert_to_numpy(model.encoder(block, training=False)) for block in blocks]
    return np.concatenate(rows)


def judge(vectors, labels, far):
    """Verification of all pairs, identification with one enrolled image each, retrieval.

    Returns:
        {"eer": ..., "tar": ... at `far`, "rank1": ..., "recall1": ...}; None where undefined.
    """
    pairs = verification.evaluate(vectors, labels, far=far)
    enrolled = np.zeros(len(labels), bool)
    enrolled[np.unique(labels, return_index=True)[1]] = True  # the first image of each identity
    found = verification.identify(
        vectors[~enrolled], labels[~enrolled], vectors[enrolled], labels[enrolled], ranks=1, far=()
    )
    numbers = {
        "eer": pairs["eer"],
        "tar": pairs[f"tar@far={far:g}"],
        "rank1": found["rank1"],
        "recall1": retrieval.recall_at_k(vectors, labels, 1),
    }
    return {name: None if math.isnan(value) else value for name, value in numbers.items()}


def run(setting, seed, options, closed, open_set):
    """Trains and judges.

    Args:
        closed, open_set: `Split`s with the same training images.

    Returns:
        dict for JSON: `open` and `closed` as of `judge`, and for a head what `train` says. Where
        the loss was no longer finite, only `failed`, the message.
    """
    tests = {"open": open_set, "closed": closed}
    if setting == RAW_PIXELS:
        return {name: _judge_pixels(test, options.far) for name, test in tests.items()}
    keras.backend.clear_session()  # the graphs of the runs before
    try:
        model, training = train(setting, seed, options, closed)
    except FloatingPointError as error:
        return {"failed": str(error)}
    judged = {
        name: judge(encode(model, test.test_images), test.test_labels, options.far)
        for name, test in tests.items()
    }
    return {**judged, **training}


def _judge_pixels(test, far):
    rows = test.test_images.reshape(len(test.test_images), -1).astype("float32")
    return judge(rows, test.test_labels, far)
