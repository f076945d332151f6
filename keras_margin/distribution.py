"""Statistics of the global batch under `tf.distribute`, and layouts for `keras.distribution`.

On the JAX backend an array of `keras.distribution` is already global: nothing to gather.
"""

import contextlib

import keras
from keras import ops

__all__ = ["class_parallel_layout"]


def class_parallel_layout(device_mesh, axis="model"):
    """A `LayoutMap` that shares out the centres of a head over a mesh axis, by class.

    Every device along the axis holds its share of the centres and of the optimizer's slots, works
    on its own classes, and sends the others a few numbers a row of the batch: no device holds all
    the centres or a (batch, num_classes) tensor in `fit` and `evaluate`. Any number of classes
    works: the variable is padded with zeros, files are not. JAX backend.

    Args:
        device_mesh: `keras.distribution.DeviceMesh`.
        axis: name of one of its axes.

    Returns:
        `keras.distribution.LayoutMap`; add what else of your model is to be shared out.

    Raises:
        ValueError: the mesh has no such axis.

    Example, on four devices, the batch over two of them and the classes over two:

        devices = keras.distribution.list_devices()
        mesh = keras.distribution.DeviceMesh((2, 2), ["batch", "model"], devices)
        keras.distribution.set_distribution(
            keras.distribution.ModelParallel(
                layout_map=class_parallel_layout(mesh), batch_dim_name="batch"
            )
        )
        model = EmbeddingModel(backbone, ArcFace(1_000_003))  # built after this
    """
    if axis not in device_mesh.axis_names:
        raise ValueError(
            f"`axis` must be an axis of the mesh, one of {list(device_mesh.axis_names)}. "
            f"Received: axis={axis!r}"
        )
    layout = keras.distribution.LayoutMap(device_mesh)
    layout["^(.*/)?centers$"] = keras.distribution.TensorLayout((axis, None), device_mesh)
    return layout


def num_replicas():
    """How many replicas share a step: 1 without `tf.distribute`, and outside `strategy.run`."""
    context = _replica_context()
    return 1 if context is None else context.num_replicas_in_sync


def strategy_of(variable):
    """The `tf.distribute` strategy whose scope a variable was made in, or None."""
    return getattr(variable.value, "distribute_strategy", None)


def scope_of(variable):
    """The scope that a variable was made in, to make others beside it."""
    strategy = strategy_of(variable)
    return contextlib.nullcontext() if strategy is None else strategy.scope()


def gather_rows(tensor):
    """The rows of all replicas, in replica order; the shares may differ in length.

    Args:
        tensor: (local_batch, ...). No gradient flows through the result.

    Returns:
        Tensor (global_batch, ...), the same on every replica.
    """
    if num_replicas() == 1:
        return ops.stop_gradient(tensor)
    return _replica_context().all_gather(ops.stop_gradient(tensor), axis=0)


def global_row_indices(tensor):
    """The place of each local row in the global batch, int32 (local_batch,)."""
    rows = ops.shape(tensor)[0]
    indices = ops.arange(rows, dtype="int32")
    if num_replicas() == 1:
        return indices
    replica = _replica_context().replica_id_in_sync_group
    is_before = ops.cast(ops.arange(num_replicas()) < replica, "int32")
    shares = global_sum(ops.cast(ops.arange(num_replicas()) == replica, "int32") * rows)
    return indices + ops.sum(is_before * shares)


def global_sum(tensor):
    """The sum of `tensor` over all replicas. No gradient flows through the result."""
    tensor = ops.stop_gradient(tensor)
    if num_replicas() == 1:
        return tensor
    return _replica_context().all_reduce("SUM", tensor)


def shares_can_be_empty(x, batch_size, replicas):
    """Whether the last batch of an epoch can leave a replica without rows.

    Args:
        x: what `fit` gets: arrays, or a dataset of batches.
        batch_size: of arrays.
        replicas: how many share a batch; each gets the same number of rows, rounded up.
    """
    arrays = [part for part in keras.tree.flatten(x) if hasattr(part, "shape")]
    if arrays:
        last = arrays[0].shape[0] % batch_size
    else:
        spec = keras.tree.flatten(getattr(x, "element_spec", None))
        known = bool(spec) and getattr(spec[0], "shape", None) and spec[0].shape[0] is not None
        if known:
            return False
        last = 1  # a dataset may end with any batch
    return last > 0 and -(-last // replicas) * (replicas - 1) >= last


def check_processes(strategy, method):
    """Refuses a `MultiWorkerMirroredStrategy` of several processes: Keras 3 cannot share a batch.

    Args:
        strategy: of the model, or None.
        method: name of the method that would run under it.

    Raises:
        NotImplementedError: the strategy has replicas in other processes.
    """
    if keras.backend.backend() != "tensorflow":
        return
    import tensorflow as tf

    if not isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy):
        return
    here, everywhere = len(strategy.extended.worker_devices), strategy.num_replicas_in_sync
    if here < everywhere:
        raise NotImplementedError(
            f"Keras 3's `{method}` does not support a MultiWorkerMirroredStrategy of several "
            "processes: run `model.train_step` by `strategy.run` in a loop of your own (see "
            "docs/many-devices.md), or train over several hosts as examples/train_multihost.py "
            f"does. Received: {here} of {everywhere} replicas in this process"
        )


def _replica_context():
    if keras.backend.backend() != "tensorflow":
        return None
    import tensorflow as tf

    return tf.distribute.get_replica_context()  # None inside `scope()` but outside `run`
