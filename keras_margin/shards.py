"""Classes that lie on the devices of a `keras.distribution` mesh, each device with its share.

JAX alone: TensorFlow has no such distribution. A pass over the classes runs on every device over
its own classes, see `Shards.over_devices`; then the values of the devices are combined, a number a
row of the batch. Left to XLA, a loop over sharded centres would gather them all on every device.
"""

from typing import NamedTuple

import keras
import numpy as np
from keras import ops


class Alone:
    """All classes on one device: there is nothing to combine."""

    number = 1

    def __reduce__(self):
        return "ALONE"  # a copy is the same

    def padded(self, num_classes):
        return num_classes

    def initializer(self, initializer, rows):
        return initializer

    regularizer = initializer

    def store(self, store, variables, with_padding, rows):
        return store

    def of_batch(self, batch, num_classes):
        return self

    def share(self, size):
        return size

    batch_share = share

    def labels_here(self, labels, size):
        return labels

    def is_padding(self, start, size, share):
        return None

    def sum(self, values):
        return values

    max = sum_over_batch = sum

    def over_devices(self, function, inputs, outputs):
        return function


ALONE = Alone()


class Shards(NamedTuple):
    """A share of the classes on each device of a mesh, the last of which may be padding.

    What is computed per device is inside `over_devices`.
    """

    mesh: object  # jax.sharding.Mesh
    axis: str  # of the classes
    batch_axis: str | None  # of the rows of the batch; None: every device has them all
    num_classes: int | None = None  # without padding

    @property
    def number(self):
        return self.mesh.shape[self.axis]

    def padded(self, num_classes):
        """The smallest number that the devices share evenly."""
        return -(-num_classes // self.number) * self.number

    def initializer(self, initializer, rows):
        """As `initializer` for the first `rows`, and zeros behind: these never win or move."""
        return _WithPadding(initializer, rows)

    def regularizer(self, regularizer, rows):
        """Of the first `rows` alone."""
        return regularizer and (lambda centers: regularizer(centers[:rows]))

    def store(self, store, variables, with_padding, rows):
        """A file's store of `variables` that holds, of those `with_padding`, the first `rows`."""
        padded = {id(variable): variable.shape[0] for variable in with_padding}
        places = {str(i): padded.get(id(variable)) for i, variable in enumerate(variables)}
        return _WithoutPadding(store, places, rows)

    def of_batch(self, batch, num_classes):
        """For a pass over `num_classes`; rows that the devices cannot share go to all of them."""
        if self.batch_axis is not None and batch % self.mesh.shape[self.batch_axis]:
            return self._replace(batch_axis=None, num_classes=num_classes)
        return self._replace(num_classes=num_classes)

    def share(self, size):
        """The rows of centres of one device."""
        return size // self.number

    def batch_share(self, batch):
        """The rows of the batch of one device."""
        return batch if self.batch_axis is None else batch // self.mesh.shape[self.batch_axis]

    # Per device.

    def labels_here(self, labels, share):
        """Counted from this device's first class: out of 0..share-1 where another one has it."""
        return labels - self._index() * share

    def is_padding(self, start, size, share):
        """bool (size,), for the classes from `start` on of this device's `share`; None: none is."""
        if share * self.number == self.num_classes:
            return None
        return self._index() * share + start + ops.arange(size, dtype="int32") >= self.num_classes

    def sum(self, values):
        import jax

        return jax.lax.psum(values, self.axis)

    def max(self, values):
        import jax

        return jax.lax.pmax(values, self.axis)

    def sum_over_batch(self, values):
        import jax

        return values if self.batch_axis is None else jax.lax.psum(values, self.batch_axis)

    def _index(self):
        import jax

        return jax.lax.axis_index(self.axis)

    def over_devices(self, function, inputs, outputs):
        """`function` as it runs on each device, on its part of the inputs.

        Args:
            function: of the parts.
            inputs, outputs: nested as its arguments and results, a string each: the axes of the
                tensor that are shared out: "b" the batch, "c" the classes, " " none.
        """
        import jax

        axes = {"b": self.batch_axis, "c": self.axis, " ": None}

        def specs(nested):
            return keras.tree.map_structure(
                lambda letters: jax.sharding.PartitionSpec(*(axes[letter] for letter in letters)),
                nested,
            )

        return jax.shard_map(
            function,
            mesh=self.mesh,
            in_specs=specs(inputs),
            out_specs=specs(outputs),
            check_vma=False,
        )


def shards_of(path):
    """The `Shards` that a head's centres will have, from the distribution that is in force.

    Args:
        path: of the variable.
    """
    distribution = keras.distribution.distribution()
    layout = None if distribution is None else distribution.get_tensor_layout(path)
    if layout is None or layout.axes[0] is None:
        return ALONE
    batch_axis = distribution.batch_dim_name
    mesh = layout.device_mesh or distribution.device_mesh
    return Shards(
        mesh.backend_mesh, layout.axes[0], None if batch_axis == layout.axes[0] else batch_axis
    )


class _WithPadding:
    """An initializer. Keras compiles `__call__` of large ones, which a function's refuses."""

    def __init__(self, initializer, rows):
        self._initializer = initializer
        self._rows = rows

    def __call__(self, shape, dtype=None):
        values = self._initializer((self._rows, *shape[1:]), dtype=dtype)
        return ops.pad(values, [(0, shape[0] - self._rows), *[(0, 0)] * (len(shape) - 1)])


class _WithoutPadding:
    """A mapping of keys to arrays, where rows of zeros come and go on the way."""

    def __init__(self, store, padded, rows):
        self._store = store
        self._padded = padded  # {key: rows with padding, None where there is none}
        self._rows = rows

    def keys(self):
        return self._store.keys()

    def __len__(self):
        return len(self._store.keys())

    def __setitem__(self, key, value):
        has_padding = self._padded.get(key) is not None
        self._store[key] = np.asarray(value)[: self._rows] if has_padding else value

    def __getitem__(self, key):
        value, padded = self._store[key], self._padded.get(key)
        if padded is None or value.shape[0] != self._rows:
            return value  # Keras says what is wrong with another shape
        return np.pad(value, [(0, padded - self._rows), *[(0, 0)] * (value.ndim - 1)])
