"""Checkpoints that every process writes its own shards of, with orbax-checkpoint. JAX backend.

A `.keras` file is written by one process that has gathered all centres. Where they do not fit into
its memory, a checkpoint of this module is a folder of arrays, each written from where it lies.
"""

import contextlib
import json
import os

import keras
import numpy as np

from keras_margin.row_updates import slots_of
from keras_margin.saving import built_optimizer

__all__ = ["load_model", "restore", "save"]


def save(model, directory):
    """Writes a model, its optimizer and its counters shard by shard.

    Every process of a run calls it. No process holds more than its own shards of one array besides
    what it trains with. The folder is whole or absent at any time.

    Args:
        model: a built `EmbeddingModel`.
        directory: a folder that is not there yet, the same for all processes: on a file system that
            they share, or what orbax can write to, such as gs://bucket/run.

    Raises:
        FileExistsError: it is there.
        ValueError: another backend than JAX.

    Example, after each epoch of a run:

        keras.callbacks.LambdaCallback(
            on_epoch_end=lambda epoch, logs: checkpoints.save(model, f"run/epoch-{epoch:03}")
        )
    """
    ocp = _orbax()
    directory = _checked(directory)
    if directory.exists():
        raise FileExistsError(
            "`directory` must be a new folder, such as one for each epoch: what is there would be "
            f"lost. Received: directory={str(directory)!r}"
        )
    arrays = {name: variable.value for name, variable in _variables(model).items()}
    about = {
        "model": json.dumps(keras.saving.serialize_keras_object(model)),
        "rows": getattr(model.head, "num_rows", None),  # of the centres, without padding
        "sums": _sums_of(arrays),
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
        model: an `EmbeddingModel`, built and, if the optimizer is to go on, compiled. It stays as
            it was where this raises.
        directory: what `save` got.

    Raises:
        ValueError: no such checkpoint, a damaged one, or one of another model.
    """
    _orbax()
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
    _orbax()
    directory = _checked(directory)
    model = keras.saving.deserialize_keras_object(json.loads(_about(directory)["model"]))
    _read(model, directory)
    return model


def _read(model, directory):
    import jax

    ocp, variables, about = _orbax(), _variables(model), _about(directory)
    _compare(model, about, directory)
    saved_rows = about["rows"]
    with _naming(directory):
        saved = dict(ocp.pytree_metadata(directory, checkpointable_name="arrays").metadata)
    is_whole = getattr(model, "optimizer", None) is not None
    if not is_whole:  # it asks for no slots
        saved = {name: value for name, value in saved.items() if name.startswith("model-")}
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
    context.pytree.loading.partial_load = not is_whole
    with context, _naming(directory):
        arrays = ocp.load_checkpointables(directory, {"arrays": wanted})["arrays"]
        for name, number in _sums_of(arrays).items():
            if number != about["sums"][name]:
                raise ValueError(f"{variables[name].path} was garbled")
    for name, variable in variables.items():
        variable.assign(arrays[name])


def _variables(model):
    """{name in a checkpoint: variable}. Names are places: Keras numbers layers anew each time."""
    if not hasattr(model, "head"):
        raise TypeError(f"`model` must be an EmbeddingModel. Received: {type(model).__name__}")
    if not model.built:
        raise ValueError("The model must be built: call it on a batch.")
    found = {f"model-{i}": variable for i, variable in enumerate(model.variables)}
    optimizer = built_optimizer(model)
    if optimizer is not None:
        slots = optimizer.variables
        found.update({f"optimizer-{i}": variable for i, variable in enumerate(slots)})
    return found


def _with_padding(model):
    """The centres and their slots."""
    if model.head.num_classes is None:
        return []
    centers, optimizer = model.head.centers, built_optimizer(model)
    return [centers, *([] if optimizer is None else slots_of(optimizer, centers))]


def _compare(model, about, directory):
    """Refuses a checkpoint whose arrays fit and mean something else."""
    here = keras.saving.serialize_keras_object(model)
    there = json.loads(about["model"])
    for name in ("head", "optimizer"):
        found = [_identity(config, name) for config in (here, there)]
        if None not in found and found[0] != found[1]:
            raise ValueError(
                f"The checkpoint is of another model: the {name} is {found[0]} here and {found[1]} "
                f"there. Received: directory={str(directory)!r}"
            )


def _identity(config, name):
    """Of a head or an optimizer: its class, and how many rows stand for what."""
    if name == "optimizer":
        part = (config.get("compile_config") or {}).get("optimizer")
        return part and part["class_name"]
    part = config["config"]["head"]
    numbers = ", ".join(f"{part['config'].get(key)}" for key in ("num_classes", "num_subcenters"))
    return f"{part['class_name']}({numbers})"


def _sums_of(arrays):
    """{name: checksum} of arrays, wherever they lie: rows of zeros at their end change nothing.

    sum_i (2 i + 1) bits_i mod 2^32: any one number that is changed changes it.
    """
    from jax.experimental.multihost_utils import process_allgather

    here = np.array([_sum_here(array) for array in arrays.values()], np.uint32)
    everywhere = np.reshape(process_allgather(here), (-1, len(here)))
    sums = everywhere.sum(axis=0, dtype=np.uint32)
    return dict(zip(arrays, map(int, sums), strict=True))


def _sum_here(array):
    """Of the shards of this process, each once."""
    total, strides = 0, np.cumprod([1, *array.shape[:0:-1]], dtype=np.uint64)[::-1]
    for shard in array.addressable_shards:
        if shard.replica_id:
            continue
        data = np.atleast_1d(np.asarray(shard.data))
        starts = [part.start or 0 for part in shard.index] or [0]
        # The place of a number in the whole array, counted row by row.
        along = np.ix_(
            *(
                (np.arange(start, start + size, dtype=np.uint64) * stride).astype(np.uint32)
                for start, size, stride in zip(starts, data.shape, strides, strict=True)
            )
        )
        step = max(1, 2**18 // max(1, data[:1].size))  # rows at a time
        for row in range(0, len(data), step):
            place = sum(along[1:], along[0][row : row + step])
            some = data[row : row + step]
            bits = some.view(f"uint{8 * data.dtype.itemsize}")
            if data.dtype.itemsize == 8:
                bits = bits ^ (bits >> np.uint64(32))
            total += int(np.sum(bits.astype(np.uint32) * (2 * place + 1), dtype=np.uint32))
    return total % 2**32


def _bytes_here(array):
    """Of the part of an array that this process has, each shard once."""
    shards = {str(shard.index): shard.data.nbytes for shard in array.addressable_shards}
    return sum(shards.values())


def _about(directory):
    ocp = _orbax()
    with _naming(directory):
        return ocp.load_checkpointables(directory, {"about": None})["about"]


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
    """An absolute path, as orbax asks for; what has a scheme (gs://) stays as it is."""
    from etils import epath  # orbax needs it too

    directory = os.fspath(directory)
    return epath.Path(directory if "://" in directory else os.path.abspath(directory))


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
