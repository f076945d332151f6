"""Another head behind the same backbone, with the optimizer's state of all that stays."""

import keras

from keras_margin.backend import copy_of
from keras_margin.class_changes import source_classes, source_rows, sources_of, with_rows_of
from keras_margin.distribution import scope_of, strategy_of
from keras_margin.monitoring import metrics_of
from keras_margin.row_updates import check_optimizer, named_slots
from keras_margin.saving import built_optimizer

_AVERAGES = "_model_variables_moving_average"  # of an optimizer with `use_ema`


def replace_head(model, new_head, mapping=None):
    """Puts another head in the place of the model's, and goes on with the optimizer's state.

    A head that is built (`head.resized`, `head.collapsed`, one that was imprinted or trained) keeps
    its own centres and state. One that is not built yet takes over the centres of the classes that
    stay, of any kind of head; its own state (AdaCos' scale, counters of schedules) begins anew.

    The optimizer goes on: its slots (momentum, Adam's moments) of the backbone and of the rows that
    stay, the count of its iterations, the learning rate and its schedule, a loss scale. New rows
    begin with what the optimizer gives to new variables. It is a new object of the same settings,
    `model.optimizer`, and the model is compiled as it was; layers that were frozen or freed since
    then count from now on. A model that was not compiled stays so.

    Args:
        model: a built `EmbeddingModel`.
        new_head: a head of this package.
        mapping: {old id: new id} of the classes that stay; None: as `resized` and `collapsed` made
            the new head, otherwise the ids that both heads have.

    Raises:
        ValueError, TypeError: what is no head, a head for other dimensions, a mapping that does not
            fit, an optimizer that a sample of the classes cannot use. The model stays as it was.

    Example:

    >>> backbone = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
    >>> model = keras_margin.EmbeddingModel(backbone, keras_margin.ArcFace(3))
    >>> model.compile(keras.optimizers.SGD(0.1, momentum=0.9))
    >>> model.replace_head(model.head.resized(5))
    >>> model.head.num_classes
    5
    """
    old_head = model.head
    check_head("new_head", new_head)
    if new_head is old_head:
        raise ValueError("`new_head` must be another head than the model's. Received: the same")
    if getattr(model, "_is_fitting", False):
        raise ValueError(
            "`replace_head` must be called between two calls of `fit`, not inside one."
        )
    if not old_head.built:
        raise ValueError("The model must be built before its head is replaced: call it on a batch.")
    sources = _sources(old_head, new_head, mapping)
    with scope_of(model.loss_metric.variables[0]):
        _build(new_head, model, sources)
        pairs = _pairs(model, new_head, sources)
        compiling = _compile_config(model, new_head, pairs) if model.compiled else None
        _swap(model, new_head)
        if compiling is None:
            return
        old_optimizer = model.optimizer
        model.compile(**compiling)
        if old_optimizer.built:
            _carry(old_optimizer, built_optimizer(model), pairs, new_head, sources)


def check_head(name, head):
    """Raises `TypeError` for what is no head."""
    if not isinstance(head, keras.Layer) or not hasattr(head, "counted"):
        raise TypeError(
            f"`{name}` must be a head of keras_margin, such as keras_margin.ArcFace(num_classes). "
            f"Received: {name}={head!r}"
        )


def _sources(old_head, new_head, mapping):
    """int (num_rows,): the old row of each of the new head's rows, -1 for none.

    None where one of them has no classes.
    """
    if old_head.num_classes is None or new_head.num_classes is None:
        if mapping is not None:
            raise ValueError(
                "`mapping` is for two heads with classes. Received: "
                f"{type(old_head).__name__} and {type(new_head).__name__}"
            )
        return None
    made_from = sources_of(new_head, old_head)
    if mapping is None and made_from is not None:
        return made_from
    classes = source_classes(old_head.num_classes, new_head.num_classes, mapping)
    return source_rows(classes, old_head.num_subcenters, new_head.num_subcenters)


def _build(new_head, model, sources):
    """Builds a new head and hands it its rows; checks one that is built already."""
    old_head = model.head
    if old_head.num_classes is None:
        dim = model.encoder.output_shape[-1]
    else:
        dim = old_head.centers.shape[1]
    if not new_head.built:
        new_head.build((None, dim))
        if sources is not None:
            centers = new_head.centers
            centers.assign(with_rows_of(centers, old_head.centers, sources))
    elif new_head.num_classes is not None:
        found = new_head.centers.shape[1]
        if found != dim:
            raise ValueError(
                f"`new_head` must be for embeddings of dimension {dim}. "
                f"Received: new_head with dimension {found}"
            )
        here = strategy_of(model.loss_metric.variables[0])
        if strategy_of(new_head.centers) is not here:
            raise ValueError(
                "`new_head` must be built in the scope of the model's `tf.distribute` strategy: "
                f"`with strategy.scope():`. Received: new_head of {strategy_of(new_head.centers)}"
            )


def _pairs(model, new_head, sources):
    """[(variable, the old one that it goes on from)], of all that are trained."""
    old_head = model.head
    pairs = [(variable, variable) for variable in model.backbone.trainable_variables]
    if sources is None:
        return pairs
    pairs.append((new_head.centers, old_head.centers))
    if sources_of(new_head, old_head) is not None:  # a learned scale, a bias
        both = zip(new_head.variables, old_head.variables, strict=True)
        pairs += [(new, old) for new, old in both if new is not new_head.centers]
    return pairs


def _compile_config(model, new_head, pairs):
    """What the model was compiled with, and in place of the optimizer one like it."""
    config = keras.saving.deserialize_keras_object(model.get_compile_config())
    if getattr(new_head, "sample_rate", 1.0) < 1.0:
        check_optimizer(config["optimizer"])
    old, new = _inner(model.optimizer), _inner(config["optimizer"])
    # Keras' configs leave out what is excluded from weight decay. Of the class: an instance's own
    # belongs to `update_rows_only`.
    decays = type(old)._use_weight_decay
    pattern = getattr(old, "_exclude_from_weight_decay_pattern", None)
    new.exclude_from_weight_decay(
        var_list=[variable for variable, before in pairs if not decays(old, before)],
        var_names=None if pattern is None else [pattern.pattern],
    )
    is_scaled = isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)
    return {**config, "auto_scale_loss": is_scaled}


def _swap(model, new_head):
    tracker = model._tracker
    was_locked = tracker.locked  # Keras lets no built layer change
    tracker.unlock()
    for name, part in {"head": new_head, **metrics_of(new_head)}.items():
        tracker.untrack(getattr(model, name))
        setattr(model, name, part)
    if was_locked:
        tracker.lock()
    model._models.forget()


def _carry(old, new, pairs, new_head, sources):
    """Brings the state of one optimizer into another of the same settings."""
    for one, other in {(old, new), (_inner(old), _inner(new))}:
        for name, variable in vars(one).items():  # iterations, learning rate, loss scale
            if isinstance(variable, keras.Variable):
                getattr(other, name).assign(copy_of(variable))
    for variable in _inner(new)._trainable_variables:
        if _AVERAGES in (slots := named_slots(new, variable)):
            slots[_AVERAGES].assign(copy_of(variable))  # zeros would be averaged in
    centers = getattr(new_head, "centers", None)
    for variable, before in pairs:
        old_slots = named_slots(old, before)  # none of what was not trained until now
        for name in named_slots(new, variable).keys() & old_slots.keys():
            slot, old_slot = named_slots(new, variable)[name], old_slots[name]
            if variable is centers and old_slot.shape[:1] == before.shape[:1]:
                slot.assign(with_rows_of(slot, old_slot, sources))
            else:
                slot.assign(copy_of(old_slot))


def _inner(optimizer):
    """Without its loss scale."""
    return getattr(optimizer, "inner_optimizer", optimizer)
