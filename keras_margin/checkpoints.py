"""Checkpoints that every process writes its own shards of, with orbax-checkpoint. JAX backend.

A `.keras` file is written by one process that has gathered all centres. Where they do not fit into
its memory, a checkpoint of this module is a folder of arrays, each written from where it lies.
"""

import contextlib
import json
import os
from pathlib import Path

import keras

from keras_margin.row_updates import slots_of


def save(model, directory):
    """Writes a model, its optimizer and its counters shard by shard.

    Every process of a run calls it. No process holds more than its own shards of one array besides
    what it trains with. The folder is whole or absent at any time.

    Args:
        model: a built `EmbeddingModel`.
        directory: a folder that is not there yet, the same for all processes.

    Raises:
        FileExistsError: it is there.
        ValueError: another backend than JAX.

    Example, after each epoch of a run:

        keras.callbacks.LambdaCallback(
            on_epoch_end=lambda epoch, logs: checkpoints.save(model, f"run/epoch-{epoch:03}")
        )
    """
    ocp, directory = _orbax(), _checked(directory)
    if directory.exists():
        raise FileExistsError(
            "`directory` must be a new folder, such as one for each epoch: what is there would be "
            f"lost. Received: directory={str(directory)!r}"
        )
    arrays = {name: variable.value for name, variable in _variables(model).items()}
    about = {
        "model": json.dumps(keras.saving.serialize_keras_object(model)),
        "rows": getattr(model.head, "num_rows", None),  # of the centres, without padding
    }
    context = ocp.Context()
    # Compressed, copied or shared out anew the arrays would be in memory several times.
    context.array.saving.use_compression = False
    context.array.saving.use_replica_parallel = False
    context.memory.deepcopy_host_arrays = False
    # The shards of one array at a time; orbax wants to stay below the limit.
    context.memory.transfer_concurrent_bytes = 1 + max(map(_bytes_here, arrays.values()))
    context.memory.write_concurrent_bytes = context.memory.transfer_concurrent_bytes
    with context:
        ocp.save_checkpointables(directory, {"arrays": arrays, "about": about})


def restore(model, directory):
    """Reads what `save` wrote into a model of the same kind, on any number of devices.

    Args:
        model: an `EmbeddingModel`, built and, if the optimizer is to go on, compiled.
        directory: what `save` got.

    Raises:
        ValueError: no such checkpoint, a damaged one, or one of another model.
    """
    _read(model, _checked(directory))


def load_model(directory):
    """The model that `save` wrote, on the devices of the distribution that is in force.

    Without a distribution it is whole, in the memory of this process. A `.keras` file is then a
    line: `checkpoints.load_model("run/epoch-009").save("model.keras")`.

    Args:
        directory: what `save` got.

    Returns:
        `EmbeddingModel`, compiled as it was.

    Raises:
        ValueError: no such checkpoint, or a damaged one.
    """
    directory = _checked(directory)
    model = keras.saving.deserialize_keras_object(json.loads(_about(directory)["model"]))
    _read(model, directory)
    return model


def _read(model, directory):
    import jax

    ocp, variables = _orbax(), _variables(model)
    saved_rows = _about(directory)["rows"]
    with _naming(directory):
        saved = ocp.pytree_metadata(directory, checkpointable_name="arrays").metadata
    if saved.keys() != variables.keys():
        raise ValueError(
            f"The checkpoint is of another model or optimizer: it holds {len(saved)} arrays, the "
            f"model {len(variables)}. Received: directory={str(directory)!r}"
        )
    may_differ = {id(variable) for variable in _with_padding(model)}
    wanted = {}
    for name, variable in variables.items():
        here, there = tuple(variable.shape), tuple(saved[name].shape)
        if id(variable) in may_differ and there:  # in their padding
            here = (model.head.num_rows, *here[1:])
            there = (min(saved_rows or 0, there[0]), *there[1:])
        if here != there:
            raise ValueError(
                f"The checkpoint is of another model: {variable.path} has shape {here} here and "
                f"{there} there. Received: directory={str(directory)!r}"
            )
        value = variable.value
        wanted[name] = jax.ShapeDtypeStruct(variable.shape, value.dtype, sharding=value.sharding)
    context = ocp.Context()
    context.array.loading.enable_padding_and_truncation = True  # with zeros, of zeros
    with context, _naming(directory):
        arrays = ocp.load_checkpointables(directory, {"arrays": wanted})["arrays"]
    for name, variable in variables.items():
        variable.assign(arrays[name])


def _variables(model):
    """{name in a checkpoint: variable}. Names are places: Keras numbers layers anew each time."""
    if not model.built:
        raise ValueError("The model must be built: call it on a batch.")
    found = {f"model-{i}": variable for i, variable in enumerate(model.variables)}
    if model.optimizer is not None:
        model.optimizer.build(model.trainable_variables)
        slots = model.optimizer.variables
        found.update({f"optimizer-{i}": variable for i, variable in enumerate(slots)})
    return found


def _with_padding(model):
    """The centres and their slots."""
    if model.head.num_classes is None:
        return []
    centers = model.head.centers
    return [centers, *(slots_of(model.optimizer, centers) if model.optimizer is not None else [])]


def _bytes_here(array):
    """Of the part of an array that this process has, each shard once."""
    shards = {str(shard.index): shard.data.nbytes for shard in array.addressable_shards}
    return sum(shards.values())


def _about(directory):
    with _naming(directory):
        return _orbax().load_checkpointables(directory, {"about": None})["about"]


@contextlib.contextmanager
def _naming(directory):
    """What goes wrong when files are read, with the name of the checkpoint."""
    try:
        yield
    except Exception as error:  # orbax and tensorstore raise all kinds
        raise ValueError(
            "There is no whole checkpoint of keras_margin.checkpoints.save "
            f"({str(error).strip()[:200]}). Received: directory={str(directory)!r}"
        ) from error


def _checked(directory):
    """An absolute path: orbax asks for it."""
    return Path(os.path.abspath(os.fspath(directory)))


def _orbax():
    if keras.backend.backend() != "jax":
        raise ValueError(
            "Checkpoints by shards are of Keras' JAX backend: use `model.save`. Received: "
            f"backend={keras.backend.backend()!r}"
        )
    try:
        from orbax.checkpoint import v1
    except ImportError as error:
        raise ImportError(
            'Checkpoints by shards need orbax-checkpoint: pip install "keras_margin[orbax]"'
        ) from error
    return v1
