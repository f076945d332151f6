"""A head for other classes: which row of the old centres goes where, and what else goes on."""

import warnings
import weakref
from collections.abc import Mapping
from numbers import Integral

import numpy as np
from keras import ops

from keras_margin.backend import copy_of, read
from keras_margin.checks import checked_count, is_number
from keras_margin.distribution import scope_of

# {head: {head that it was made from: sources}}, for `sources_of`.
_ancestors = weakref.WeakKeyDictionary()
# {head: shape of the centres that it was last offered in vain}, for `check_stored_centers`.
_refused = weakref.WeakKeyDictionary()


def resized(head, num_classes, mapping=None, *, new_margin=None):
    """A new head of the same kind and settings for another number of classes.

    Classes that stay keep their centres bit for bit. A new class starts as in a fresh head of that
    size: by the head's initializer, with its seed; `head.imprint` gives it a better start.

    The count of training calls goes on, and with it every schedule; so do CurricularFace's t,
    AdaFace's statistics, a learned scale and SphereFace2's bias. AdaCos' scale keeps its ratio to
    the fixed scale of the number of classes,

        s_new = s_old log(C_new - 1) / log(C_old - 1)

    and so do its default bounds: what is kept is how far the training has moved it. The next
    training call sets it from its batch.

    Args:
        head: a built head.
        num_classes: at least 2.
        mapping: {old id: new id} of the classes that stay; None: the ids that both have. Classes
            that it does not name are dropped.
        new_margin: of the new classes, where the head has one margin per class.

    Returns:
        A built head. `EmbeddingModel.replace_head` puts it in the old one's place, with the state
        of the optimizer.

    Raises:
        ValueError: a head without classes or not built; a mapping that names a class that is none
            or one new id twice; new classes without a margin; `ignore_class` would be a class.
        TypeError: a mapping that is no dict of whole numbers.

    Example:

    >>> head = keras_margin.ArcFace(3)
    >>> head.build((None, 8))
    >>> larger = head.resized(5, {0: 0, 2: 1})  # class 1 is dropped, 2 to 4 are new
    >>> bool(keras.ops.all(larger.centers[1] == head.centers[2]))
    True
    """
    check_has_centers(head)
    num_classes = checked_count("num_classes", num_classes, smallest=2)
    classes = source_classes(head.num_classes, num_classes, mapping)
    _check_ignore_class(head, num_classes)
    changed = {"num_classes": num_classes, **_parts(head, classes, new_margin)}
    sources = source_rows(classes, head.num_subcenters, head.num_subcenters)
    return remade(head, sources, head.centers_initializer, **changed)


def remade(head, sources, initializer=None, **changed):
    """A built head of the same kind that goes on from `head`, with some settings changed.

    Args:
        head: a built head.
        sources: see `sources_of`.
        initializer: of its centres, if it can make as many; None: the default.
        **changed: entries of its config.
    """
    with scope_of(head.centers):
        try:
            new = _built_like(head, initializer, changed)
        except Exception as error:  # a function or an array for the old number: all kinds
            new = _built_like(head, None, changed)
            if (sources < 0).any():
                warnings.warn(
                    f"The head's initializer cannot make {new.num_rows} centres, so the new ones "
                    f"start from the default one ({error}).",
                    stacklevel=3,
                )
    for old_variable, new_variable in zip(head.variables, new.variables, strict=True):
        if new_variable is not new.centers:
            new_variable.assign(copy_of(old_variable))
    new.scale_policy.rebase(head.scale_policy)
    new.centers.assign(with_rows_of(new.centers, head.centers, sources))
    _ancestors[new] = weakref.WeakKeyDictionary({head: sources})
    for older, earlier in _ancestors.get(head, {}).items():
        _ancestors[new][older] = np.where(sources < 0, -1, earlier[sources])
    return new


def _built_like(head, initializer, changed):
    """A built head with some settings changed; `initializer` None: the default."""
    # A function as initializer or regularizer has a config that Keras cannot read.
    changed = {**changed, "centers_initializer": None, "centers_regularizer": None}
    new = type(head).from_config({**head.get_config(), **changed})
    new.centers_regularizer = head.centers_regularizer
    if initializer is not None:
        new.centers_initializer = initializer
    new.build((None, head.centers.shape[1]))
    return new


def sources_of(new, old):
    """int (num_rows,): the row of `old` that each row of `new`'s centres was made from.

    -1: of none. None where `new` does not come from `old` by `resized` and `collapsed`.
    """
    return _ancestors.get(new, {}).get(old)


def source_classes(old_number, new_number, mapping):
    """int (new_number,): the old id of each new class, -1 where it is new.

    Raises:
        ValueError, TypeError: see `resized`.
    """
    if mapping is None:
        mapping = {each: each for each in range(min(old_number, new_number))}
    if not isinstance(mapping, Mapping):
        raise TypeError(
            "`mapping` must be a dict {old id: new id}. Received: mapping of type "
            f"{type(mapping).__name__}"
        )
    sources = np.full(new_number, -1)
    for old, new in mapping.items():
        for number, size, kind in ((old, old_number, "old"), (new, new_number, "new")):
            if not isinstance(number, Integral) or isinstance(number, bool):
                raise TypeError(
                    "`mapping` must hold whole numbers {old id: new id}. "
                    f"Received: {old!r}: {new!r}"
                )
            if not 0 <= number < size:
                raise ValueError(
                    f"`mapping` must name {kind} ids from 0 to {size - 1}. "
                    f"Received: {old!r}: {new!r}"
                )
        if sources[new] >= 0:
            raise ValueError(
                "`mapping` must give each class an id of its own. Received: "
                f"{int(sources[new])}: {new!r} and {old!r}: {new!r}"
            )
        sources[new] = old
    return sources


def source_rows(classes, old_subcenters, new_subcenters):
    """`source_classes` -> rows of centres. A single centre becomes the first sub-centre.

    Raises:
        ValueError: several sub-centres would become another number of them.
    """
    if old_subcenters not in (1, new_subcenters) and (classes >= 0).any():
        raise ValueError(
            "Which of a class' sub-centres stays? Ask `head.dominant_subcenters`, and replace the "
            "head by `head.collapsed(dominant)`; or let none stay: `mapping={}`. Received: "
            f"{old_subcenters} sub-centres in the old head, {new_subcenters} in the new one"
        )
    number = np.arange(new_subcenters)
    rows = classes[:, None] * old_subcenters + number  # (num_classes, new_subcenters)
    kept = (classes[:, None] >= 0) & (number < old_subcenters)
    return np.where(kept, rows, -1).reshape(-1)


def with_rows_of(new, old, sources):
    """The rows of variable `new`, with those that have a source taken from variable `old`."""
    padding = new.shape[0] - len(sources)  # of shared out classes
    sources = np.pad(sources, (0, padding), constant_values=-1).astype("int32")
    kept = (sources >= 0).reshape(-1, *[1] * (len(new.shape) - 1))
    return ops.where(kept, ops.take(read(old), np.maximum(sources, 0), axis=0), read(new))


def check_has_classes(head):
    """Raises `ValueError` for a head without classes."""
    if head.num_classes is None:
        raise ValueError(
            f"{type(head).__name__} has no classes, and so no centres. Received: head={head.name!r}"
        )


def check_has_centers(head):
    """Raises `ValueError` for a head without classes, or not built."""
    check_has_classes(head)
    if not head.built:
        raise ValueError(
            "The head has no centres yet: train it first. "
            f"Received: head={head.name!r}, which is not built"
        )


def check_stored_centers(head, store):
    """Refuses to load centres of another shape, and says what to do.

    Args:
        head: a built head.
        store: of its variables, as Keras numbers them.
    """
    own = [*head._trainable_variables, *head._non_trainable_variables]
    place = next(str(i) for i, variable in enumerate(own) if variable is head.centers)
    here = (head.num_rows, head.centers.shape[1])
    # Keras tries several places in a file, the last ones in vain, and shows the last error.
    is_there = place in set(store.keys())
    there = tuple(store[place].shape) if is_there else _refused.get(head)
    if there != here:
        _refused[head] = there
        raise ValueError(
            f"The file must hold centres of shape {here}, by the head's classes, sub-centres and "
            "dimensions. To change the classes of a trained model, load it as it was, then call "
            "`model.replace_head(model.head.resized(num_classes))`. Received: centers.shape="
            f"{there} in the file"
        )


def _check_ignore_class(head, num_classes):
    ignored = head.ignore_class
    if ignored is not None and head.num_classes <= ignored < num_classes:
        raise ValueError(
            f"ignore_class={ignored} would be one of the {num_classes} classes. Replace the head "
            "by a new one that ignores another label, such as -1: "
            f"`model.replace_head({type(head).__name__}({num_classes}, ignore_class=-1))`. "
            f"Received: num_classes={num_classes}"
        )


def _parts(head, classes, new_margin):
    """The entries of the head's config for rule and policy that depend on the classes."""
    config = head.get_config()
    margins = _margins(head, classes, new_margin)
    if margins and isinstance(config["margin"], dict):  # a rule; a named head has the numbers
        margins = {"margin": _with(config["margin"], **margins)}
    scale = config.get("scale")
    if isinstance(scale, dict) and "num_classes" in scale["config"]:
        return {**margins, "scale": _with(scale, num_classes=len(classes))}
    return margins


def _with(part, **changed):
    """A serialised object with other settings."""
    return {**part, "config": {**part["config"], **changed}}


def _margins(head, classes, new_margin):
    """{name: a margin for each of the new classes}; {} where all classes have the same."""
    settings = {} if head.margin_rule is None else head.margin_rule.per_class()
    if not settings and new_margin is not None:
        raise ValueError(
            "`new_margin` is for a head with one margin per class; this one has the same for all. "
            f"Received: new_margin={new_margin!r}"
        )
    if settings and (classes < 0).any() and not is_number(new_margin):
        raise ValueError(
            "The head has one margin per class: give the new classes theirs with `new_margin`, a "
            f"number. Received: new_margin={new_margin!r}"
        )
    return {
        name: [new_margin if old < 0 else values[old] for old in classes]
        for name, values in settings.items()
    }
