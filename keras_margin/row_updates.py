"""Training steps that move the rows of the sampled classes alone: no momentum, no decay elsewhere.

Keras' optimizers turn a sparse gradient into a dense update of all rows. On TensorFlow the update
of Keras is run here on a view of the rows that the gradient names; its cost follows their number.
On JAX, which has no sparse gradients, the step is Keras' own, and what other rows were is put back.
"""

import contextlib
from typing import NamedTuple

import keras
from keras import ops

from keras_margin.sampling import sample_size

_ROW_BY_ROW = (
    keras.optimizers.SGD,
    keras.optimizers.Adam,
    keras.optimizers.AdamW,
    keras.optimizers.Lion,
)


def check_optimizer(optimizer):
    """Refuses what cannot leave rows alone.

    Raises:
        ValueError: an optimizer whose update of a row needs the others, or has not been checked;
            `use_ema`, `gradient_accumulation_steps`.
    """
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    if type(inner) not in _ROW_BY_ROW:
        names = ", ".join(known.__name__ for known in _ROW_BY_ROW)
        raise ValueError(
            f"A head with `sample_rate` below 1 needs one of {names}, which can leave the rows of "
            f"other classes alone. Received: optimizer={type(inner).__name__}"
        )
    for option in ("use_ema", "gradient_accumulation_steps"):
        if getattr(inner, option):
            raise ValueError(
                f"A head with `sample_rate` below 1 cannot be trained with `{option}`, which "
                f"touches all rows. Received: {option}={getattr(inner, option)}"
            )


def check_works_on_shards(optimizer):
    """Refuses, for classes that are shared out, what sees rows of padding or has no such slots."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    if isinstance(inner, (keras.optimizers.Adafactor, keras.optimizers.Muon)):
        raise ValueError(
            "Classes that are shared out over devices need an optimizer that works number by "
            "number, such as SGD, Adam, AdamW, Lamb or Lion: this one looks at whole matrices. "
            f"Received: optimizer={type(inner).__name__}"
        )


def update_rows_only(optimizer, of_head):
    """TensorFlow: from now on a sparse gradient of the centres moves its rows alone.

    Clipping, loss scaling, weight decay and replicas stay Keras' own.

    Args:
        optimizer: one that `check_optimizer` accepts, of a single model.
        of_head: a callable that returns the head.
    """
    if getattr(optimizer, "_updates_rows_only", False):
        return
    optimizer._updates_rows_only = True
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    apply, update_step, decays = optimizer.apply, inner.update_step, inner._use_weight_decay
    sample = []  # `_Sample` of the step that is being traced: the same on every replica

    def is_centers(variable):
        return inner._var_key(variable) == inner._var_key(of_head().centers)

    def apply_to_rows(grads, trainable_variables=None):
        grads = list(grads)
        sample.clear()
        for i, variable in enumerate(trainable_variables or inner._trainable_variables):
            if is_centers(variable) and hasattr(grads[i], "indices"):
                rows, grads[i] = _sample_of(of_head(), grads[i])
                sample.append(rows)
        return apply(grads, trainable_variables)

    def update_rows(gradient, variable, learning_rate):
        if not sample or not is_centers(variable):
            return update_step(gradient, variable, learning_rate)
        (rows,), index = sample, inner._get_variable_index(variable)
        view = _Rows(variable, rows, inner._var_key(variable))
        if inner.weight_decay and decays(of_head().centers):
            view.assign_sub(view * ops.cast(inner.weight_decay, view.dtype) * learning_rate)
        with _slots_as_rows(inner, index, rows):
            return update_step(gradient, view, learning_rate)

    def uses_weight_decay(variable):
        return decays(variable) and not (sample and is_centers(variable))

    optimizer.apply = apply_to_rows
    inner.update_step = update_rows
    inner._use_weight_decay = uses_weight_decay


@contextlib.contextmanager
def _slots_as_rows(optimizer, index, rows):
    """The optimizer's slots of one variable (momentum, velocity ...) as views of their rows."""
    slots = list(_slots(optimizer, index).values())
    whole = [each[index] for each in slots]
    for each, variable in zip(slots, whole, strict=True):
        each[index] = _Rows(variable.value, rows)
    try:
        yield
    finally:
        for each, variable in zip(slots, whole, strict=True):
            each[index] = variable


def slots_of(optimizer, variable):
    """The optimizer's variables that are of the shape of a trained one and belong to it."""
    slots = named_slots(optimizer, variable).values()
    return [slot for slot in slots if slot.shape == variable.shape]


def named_slots(optimizer, variable):
    """{attribute of the optimizer: variable}, of all that it keeps for a trained variable."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    if not inner.built or inner._var_key(variable) not in inner._trainable_variables_indices:
        return {}
    index = inner._get_variable_index(variable)
    return {name: each[index] for name, each in _slots(inner, index).items()}


def _slots(optimizer, index):
    """The optimizer's lists that have one variable for each trained variable, by name."""
    known = {id(variable) for variable in optimizer.variables}
    return {
        name: each
        for name, each in vars(optimizer).items()
        if isinstance(each, list)
        and each is not optimizer._variables
        and len(each) == len(optimizer._trainable_variables)
        and id(each[index]) in known
    }


class _Sample(NamedTuple):
    """The rows that a step moves."""

    rows: object  # (n,)
    is_spare: object = None  # bool (n,): the places that name the first row again, or None


def _sample_of(head, gradient):
    """`_Sample` and the gradients of its rows (n, dim), of a sparse gradient."""
    rows, values = gradient.indices, gradient.values
    one_call = sample_size(head.num_classes, head.sample_rate, 0) * head.num_subcenters
    if rows.shape[0] == one_call:
        return _Sample(rows), values
    # Two calls of the loss, as for mixup, have rows in common: their gradients are added. Shapes
    # stay known for XLA, so the places that become free name the first row, with gradient 0.
    order = ops.argsort(rows)
    rows, values = ops.take(rows, order), ops.take(values, order, axis=0)
    is_first = ops.concatenate([ops.ones_like(rows[:1], "bool"), rows[1:] != rows[:-1]])
    place = ops.cumsum(ops.cast(is_first, "int32")) - 1
    number = ops.shape(rows)[0]
    is_spare = ops.arange(number, dtype="int32") > place[-1]
    merged = ops.segment_max(rows, place, num_segments=number)
    merged = ops.where(is_spare, rows[0], merged)
    return _Sample(merged, is_spare), ops.segment_sum(values, place, num_segments=number)


class _Rows:
    """Some rows of a `tf.Variable`, as a variable for an optimizer's update step."""

    def __init__(self, variable, sample, key=None):
        self._variable = variable
        self._rows, self._is_spare = sample
        self.dtype = variable.dtype
        self._unique_id = key  # what the optimizer knows it by, the same on every replica

    def __tf_tensor__(self, dtype=None, name=None):
        import tensorflow as tf

        return tf.gather(self._variable, self._rows)

    def __mul__(self, other):
        return ops.convert_to_tensor(self) * other

    def assign(self, value):
        import tensorflow as tf

        if self._is_spare is not None:
            value = ops.where(ops.expand_dims(self._is_spare, 1), value[:1], value)
        self._variable.scatter_update(tf.IndexedSlices(value, self._rows))

    def assign_add(self, value):
        self.assign(ops.convert_to_tensor(self) + value)

    def assign_sub(self, value):
        self.assign(ops.convert_to_tensor(self) - value)


def put_back_other_rows(optimizer, centers, rows, *states):
    """JAX: what a step made of the rows that were not sampled is undone.

    Args:
        optimizer: of the step.
        centers: the variable.
        rows: int32 (n,), the rows that may move.
        *states: (variables, values before, values after) each.

    Returns:
        The lists of values after, one a state.
    """
    by_row = {id(variable) for variable in (centers, *slots_of(optimizer, centers))}
    moves = ops.scatter(ops.expand_dims(rows, 1), ops.ones_like(rows), (centers.shape[0],)) > 0
    moves = ops.expand_dims(moves, 1)
    return [
        [
            ops.where(moves, new, old) if id(variable) in by_row else new
            for variable, old, new in zip(*state, strict=True)
        ]
        for state in states
    ]
