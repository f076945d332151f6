"""Files of a model that are whole or absent, with the state of its random layers in them."""

import os
import warnings
import zipfile

import keras

from keras_margin.backend import copy_of
from keras_margin.files import written_whole
from keras_margin.row_updates import slots_of

_SEED = "seed_generator_"


def built_optimizer(model):
    """The optimizer of a model with its slots, or None.

    `build` a second time would add the loss scale's variables again, and reset it.
    """
    optimizer = getattr(model, "optimizer", None)
    if optimizer is not None and not optimizer.built:
        optimizer.build(model.trainable_variables)
    return optimizer


def description(model):
    """What models must share for the weights file of one to be read into another, as JSON has it.

    Rows that only pad classes that are shared out over devices do not count.
    """
    head, optimizer = getattr(model, "head", None), built_optimizer(model)
    padded, variables = {}, {"weight": model.weights, "optimizer variable": []}
    found = {"head": type(head).__name__, "optimizer": type(optimizer).__name__}
    if getattr(head, "num_classes", None) is not None:
        found["head"] += f"({head.num_classes}, num_subcenters={head.num_subcenters})"
        padded = {id(each): head.num_rows for each in (head.centers, *_slots(optimizer, head))}
    if optimizer is not None:
        inner = getattr(optimizer, "inner_optimizer", optimizer)
        found["optimizer"] += "" if inner is optimizer else f"({type(inner).__name__})"
        variables["optimizer variable"] = optimizer.variables
    for kind, some in variables.items():
        found[f"number of {kind}s"] = len(some)
        for i, each in enumerate(some):
            rows = [padded[id(each)]] if id(each) in padded else list(each.shape[:1])
            found[f"shape of {kind} {i}"] = [*rows, *each.shape[1:]]
    return found


def _slots(optimizer, head):
    return [] if optimizer is None else slots_of(optimizer, head.centers)


class WholeFiles(keras.Model):
    """Base of `EmbeddingModel`: `save` and `save_weights` write a temporary file, then rename it.

    Keras writes the final path directly: a full disk or a killed process leaves a torn file there.
    What `keras.random.SeedGenerator`s of the layers have drawn so far is saved too, which Keras
    leaves out, so that Dropout and augmentation go on where they were.
    """

    def save(self, filepath, overwrite=True, **kwargs):
        """As `keras.Model.save`; the path holds the whole old or the whole new file at any time.

        Raises:
            FileExistsError: something is there and `overwrite` is False.
        """
        self._write_whole(super().save, filepath, overwrite, kwargs)

    def save_weights(self, filepath, overwrite=True, max_shard_size=None):
        """As `keras.Model.save_weights`; whole or absent, except for weights in several files."""
        kwargs = {"max_shard_size": max_shard_size}
        if max_shard_size is not None:
            return super().save_weights(filepath, overwrite=overwrite, **kwargs)
        self._write_whole(super().save_weights, filepath, overwrite, kwargs)

    def _write_whole(self, save, filepath, overwrite, kwargs):
        filepath = os.fspath(filepath)
        if "://" in filepath:  # not a local file: Keras uploads it
            return save(filepath, overwrite=overwrite, **kwargs)
        if not overwrite and os.path.exists(filepath):
            raise FileExistsError(
                "There is a file already: pass `overwrite=True` to replace it. Received: "
                f"filepath={filepath!r}"
            )
        with written_whole(filepath) as temporary:
            save(temporary, **kwargs)

    def load_weights(self, filepath, **kwargs):
        """As `keras.Model.load_weights`, but what is refused leaves the model as it was.

        Raises:
            ValueError: a file that is cut short or garbled, or of a head with other classes; the
                message names it, or says how to change the classes.
        """
        # Keras reads the backbone before the head can refuse. Centres are the last to be read.
        centers = getattr(self.head, "centers", None)
        kept = [(v, copy_of(v)) for v in self.variables if v is not centers]
        try:
            self._load_weights(filepath, kwargs)
        except BaseException:
            for variable, value in kept:
                variable.assign(value)
            raise

    def _load_weights(self, filepath, kwargs):
        try:
            with warnings.catch_warnings():
                # Of a part that was refused where it is, and is looked for once more elsewhere.
                warnings.filterwarnings("ignore", "Skipping nested container")
                super().load_weights(filepath, **kwargs)
        except FileNotFoundError:
            raise
        except (OSError, EOFError, KeyError, zipfile.BadZipFile) as error:
            raise ValueError(
                "The file cannot be read: it is no weights file, or it was cut short or garbled "
                f"({error}). Received: filepath={os.fspath(filepath)!r}"
            ) from error

    def _seed_states(self):
        """{key in the file: variable} of all random layers, in the order of the layers."""
        layers = {id(layer): layer for layer in self._flatten_layers()}.values()
        generators = {id(g): g for layer in layers for g in layer._seed_generators}.values()
        return {f"{_SEED}{i}": generator.state for i, generator in enumerate(generators)}

    def save_own_variables(self, store):
        super().save_own_variables(store)
        for key, state in self._seed_states().items():
            store[key] = keras.ops.convert_to_numpy(state)

    def load_own_variables(self, store):
        super().load_own_variables({k: store[k] for k in store.keys() if not k.startswith(_SEED)})
        for key, state in self._seed_states().items():
            if key in store.keys():  # noqa: SIM118
                state.assign(store[key])
