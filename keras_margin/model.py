"""EmbeddingModel: a backbone and a head that `fit` trains, and the plain models that ship."""

import warnings

import keras
import numpy as np
from keras import ops

from keras_margin import export
from keras_margin.distribution import (
    check_processes,
    global_sum,
    num_replicas,
    shares_can_be_empty,
)
from keras_margin.monitoring import Watch, metrics_of
from keras_margin.plain_models import PlainModels, embeddings_shape_of, graph_of
from keras_margin.replacing import check_head, replace_head
from keras_margin.row_updates import (
    check_optimizer,
    check_works_on_shards,
    put_back_other_rows,
    slots_of,
    update_rows_only,
)
from keras_margin.sampling import recorded_rows
from keras_margin.saving import WholeFiles, built_optimizer
from keras_margin.shards import ALONE


@keras.saving.register_keras_serializable(package="keras_margin")
class EmbeddingModel(WholeFiles):
    """Trains a backbone with a margin head; the labels are `fit`'s `y`, there is no label input.

    `model(x)` and `model.predict(x)` give the backbone's embeddings as they are. The head is the
    loss: sum(weight_i * loss_i) / N, N the number of rows that count (not ignored) in the global
    batch, over all replicas, plus the regularisation losses. `fit` and `evaluate` report `loss`,
    `accuracy` (top-1 of the cosines, without margin) and, where it moves, the head's `scale`.

    Args:
        backbone: a Keras model or layer that maps a batch of inputs to embeddings (batch, dim).
        head: a head of this package.
        **kwargs: `name`, `dtype`, `trainable` of a Keras model.

    Example:

    >>> import keras_margin
    >>> backbone = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
    >>> model = EmbeddingModel(backbone, keras_margin.ArcFace(3))
    >>> model.compile(keras.optimizers.SGD(0.1))
    >>> x, y = np.eye(4, dtype="float32"), np.array([0, 1, 2, 0])
    >>> history = model.fit(x, y, verbose=0)
    >>> sorted(history.history)
    ['accuracy', 'loss']
    >>> model.encoder.predict(x, verbose=0).shape  # unit-norm embeddings
    (4, 2)
    """

    def __init__(self, backbone, head, **kwargs):
        super().__init__(**kwargs)
        check_head("head", head)
        if not isinstance(backbone, keras.Layer):
            raise TypeError(f"`backbone` must be a Keras model. Received: backbone={backbone!r}")
        self.backbone = backbone
        self.head = head
        for name, metric in metrics_of(head).items():
            setattr(self, name, metric)
        self._models = PlainModels(self)
        graph = graph_of(backbone)
        if graph is not None:
            inputs, embeddings = graph
            if not self.head.built:
                self.head.build(embeddings_shape_of(embeddings))
            self(inputs)  # so that the model is built, and `summary` reads well

    def call(self, inputs, training=None):
        self._models.remember(inputs)
        embeddings = self.backbone(inputs, training=training)
        if not self.head.built:
            self.head.build(embeddings_shape_of(embeddings))
        return embeddings

    # Training.

    def compile(
        self, optimizer="rmsprop", loss=None, metrics=None, weighted_metrics=None, **kwargs
    ):
        """As `keras.Model.compile`, without a loss and metrics: the head is the loss.

        Raises:
            TypeError: `loss` or `metrics` is given.
            ValueError: the head samples its classes, and the optimizer cannot leave others alone;
                or its classes are shared out, and the optimizer looks at whole matrices.
        """
        if loss is not None:
            raise TypeError(
                "The head is the loss of an EmbeddingModel: call `compile(optimizer)` and choose "
                f"the loss by the head. Received: loss={loss!r}"
            )
        if metrics is not None or weighted_metrics is not None:
            raise TypeError(
                "Metrics of `compile` would compare labels with embeddings. `loss` and `accuracy` "
                "are reported anyway; for the quality of the embeddings call "
                "`keras_margin.verification.evaluate(model.encoder.predict(x), labels)`. "
                f"Received: metrics={metrics!r}, weighted_metrics={weighted_metrics!r}"
            )
        if self._samples:
            optimizer = keras.optimizers.get(optimizer)
            check_optimizer(optimizer)
        if getattr(self.head, "shards", ALONE) is not ALONE:
            optimizer = keras.optimizers.get(optimizer)
            check_works_on_shards(optimizer)
        super().compile(optimizer=optimizer, **kwargs)
        if self._samples and keras.backend.backend() == "tensorflow":
            update_rows_only(self.optimizer, lambda: self.head)
        if self.head.num_classes is not None and keras.backend.backend() == "jax":
            self._save_slots_without_padding()

    def _save_slots_without_padding(self):
        """As the head saves its centres, so the optimizer saves what belongs to them."""
        head = self.head

        def leave_out(optimizer):
            save, load = optimizer.save_own_variables, optimizer.load_own_variables

            def slots(store):
                of_centers = slots_of(optimizer, head.centers)
                return head.shards.store(store, optimizer.variables, of_centers, head.num_rows)

            optimizer.save_own_variables = lambda store: save(slots(store))
            optimizer.load_own_variables = lambda store: load(slots(store))

        leave_out(self.optimizer)
        if hasattr(self.optimizer, "inner_optimizer"):  # of a loss scale: Keras saves both
            leave_out(self.optimizer.inner_optimizer)

    @property
    def _samples(self):
        return getattr(self.head, "sample_rate", 1.0) < 1.0

    def train_step(self, *args):
        """Keras' own; on JAX rows of classes that were not sampled are put back after it."""
        result = super().train_step(*args)
        if not self._samples or keras.backend.backend() != "jax":
            return result
        (trained, others, slots, counts), data = args
        logs, (new_trained, new_others, new_slots, new_counts) = result
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        parts = self.trainable_variables, self.non_trainable_variables, self.metrics_variables
        values = [*trained, *others, *counts]
        mapping = list(zip([v for part in parts for v in part], values, strict=True))
        # Once more, for the rows alone: XLA leaves out what nothing depends on. A loss of your own
        # may draw several samples, as mixup does.
        with keras.StatelessScope(state_mapping=mapping), recorded_rows(self.head) as rows:
            self.compute_loss(x, y, self(x, training=True), sample_weight, training=True)
        if any(each is None for each in rows):
            return result  # a loss of your own that looks at every class moves every class
        new_trained, new_slots = put_back_other_rows(
            self.optimizer,
            self.head.centers,
            ops.concatenate([ops.zeros((0,), "int32"), *rows]),
            (self.trainable_variables, trained, new_trained),
            (self.optimizer.variables, slots, new_slots),
        )
        return logs, (new_trained, new_others, new_slots, new_counts)

    def compile_from_config(self, config):
        self.compile(**keras.saving.deserialize_keras_object(config))
        if self.built:
            built_optimizer(self)

    @property
    def metrics(self):
        own = [self.loss_metric, self.accuracy_metric, self.scale_metric]
        return [metric for metric in own if metric is not None]

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        if y is None:
            raise ValueError(
                "EmbeddingModel needs labels: call `fit(x, y)` or give (x, y) batches."
            )
        if self.accuracy_metric is None:
            loss = self.head.loss(y_pred, y, training=training)
        else:
            scale = self.head.current_scale  # a schedule's moves on with the call
            loss, target, hardest = self.head.loss_and_cosines(y_pred, y, training=training)
            if self.head.scale_policy.needs_statistics:
                scale = self.head.current_scale
        counted = ops.cast(self.head.counted(y), loss.dtype)  # (batch,)
        if sample_weight is not None:
            loss = loss * ops.reshape(ops.cast(sample_weight, loss.dtype), (-1,))
        number = global_sum(ops.sum(counted))
        total = ops.sum(loss) / ops.maximum(number, 1.0)

        # Keras sums the gradients of the replicas, so a term that each of them has is shared out.
        extra = sum((ops.sum(ops.cast(term, loss.dtype)) for term in self.losses), 0.0)
        total = total + extra / num_replicas()

        self.loss_metric.update_state(ops.stop_gradient(loss + extra), sample_weight=counted)
        if self.accuracy_metric is not None:
            # NaN where a row counts but has no cosine: its label is no class.
            correct = ops.cast(target > hardest, loss.dtype)
            correct = ops.where(ops.logical_and(ops.isnan(target), counted > 0), target, correct)
            self.accuracy_metric.update_state(correct, counted)
        if self.scale_metric is not None:
            self.scale_metric.update_state(scale)
        return total

    def fit(
        self, x=None, y=None, batch_size=None, epochs=1, verbose="auto", callbacks=None, **kwargs
    ):
        """As `keras.Model.fit`. Array labels are checked once, before the first step.

        Raises:
            ValueError: no rows; labels that are no classes of the head, in `y` or in
                `validation_data`.
            FloatingPointError: the first non-finite loss; the message names the usual causes.
            NotImplementedError: a `MultiWorkerMirroredStrategy` of several processes.
        """
        check_processes(self._strategy, "fit")
        self._check_labels(y)
        self._check_class_weight(x, kwargs.get("class_weight"))
        self._check_validation_labels(kwargs.get("validation_data"))
        self._warn_of_empty_shares(x, batch_size)
        guard = Watch()
        if isinstance(callbacks, keras.callbacks.CallbackList):
            callbacks.append(guard)
        else:
            callbacks = [*_as_list(callbacks), guard]
        self._is_fitting = True
        try:
            return super().fit(
                x,
                y,
                batch_size=batch_size,
                epochs=epochs,
                verbose=verbose,
                callbacks=callbacks,
                **kwargs,
            )
        finally:
            self._is_fitting = False

    def evaluate(self, x=None, y=None, batch_size=None, verbose="auto", **kwargs):
        """As `keras.Model.evaluate`: the cross-entropy without margin. Array labels are checked.

        Raises:
            ValueError: no rows; labels that are no classes of the head.
            NotImplementedError: a `MultiWorkerMirroredStrategy` of several processes.
        """
        check_processes(self._strategy, "evaluate")
        self._check_labels(y)
        return super().evaluate(x, y, batch_size=batch_size, verbose=verbose, **kwargs)

    @property
    def _strategy(self):
        return getattr(self, "distribute_strategy", None)  # TensorFlow's

    def _check_labels(self, y):
        if y is not None and hasattr(y, "__len__") and not isinstance(y, dict):
            y = np.asarray(y)
            if y.shape[:1] == (0,):
                raise ValueError(f"There must be at least one row. Received: y.shape={y.shape}")
            self.head.counted(y)

    def _check_class_weight(self, x, class_weight):
        is_dataset = hasattr(x, "element_spec")  # of tf.data
        if is_dataset and class_weight is not None and self.head.ignore_class is not None:
            raise ValueError(
                "Keras cannot look up the class weight of an ignored row in a tf.data.Dataset: let "
                "the dataset give (x, y, sample_weight). Received: class_weight with "
                f"ignore_class={self.head.ignore_class}"
            )

    def _warn_of_empty_shares(self, x, batch_size):
        """Keras' BatchNormalization turns non-finite on a replica that gets no rows."""
        replicas = getattr(self._strategy, "num_replicas_in_sync", 1)
        layers = keras.layers.BatchNormalization
        has_statistics = any(isinstance(layer, layers) for layer in self._flatten_layers())
        if replicas == 1 or not has_statistics:
            return
        if shares_can_be_empty(x, batch_size or 32, replicas):
            warnings.warn(
                f"The last batch can leave one of the {replicas} replicas without rows, and the "
                "BatchNormalization of the backbone turns non-finite there. Give a dataset with "
                "drop_remainder=True: tf.data.Dataset.batch(batch_size, drop_remainder=True).",
                stacklevel=3,
            )

    def _check_validation_labels(self, validation_data):
        if not isinstance(validation_data, (tuple, list)) or len(validation_data) < 2:
            return
        if np.shape(validation_data[1])[:1] == (0,):
            raise ValueError("`validation_data` must have at least one row, or be None.")
        try:
            self._check_labels(validation_data[1])
        except ValueError as error:
            raise ValueError(
                "validation labels are not training classes; use VerificationCallback to judge the "
                f"embeddings of other identities. {error}"
            ) from error

    replace_head = replace_head

    # What ships.

    @property
    def encoder(self):
        """A plain Keras model: input -> unit-norm embedding (batch, dim), float32.

        It shares the backbone's weights, saves, loads and runs without keras_margin.

        Raises:
            ValueError: a subclassed backbone that has not been called yet.
        """
        return self._models.get("encoder")

    @property
    def classifier(self):
        """A Keras model: input -> scale * cosine with every training class (batch, num_classes).

        Raises:
            ValueError: a subclassed backbone that has not been called yet; a head without classes.
        """
        if self.head.num_classes is None:
            raise ValueError(f"{type(self.head).__name__} has no classes to tell apart.")
        return self._models.get("classifier")

    export = export.export

    # What Keras asks.

    def get_config(self):
        return {
            **super().get_config(),
            "backbone": keras.saving.serialize_keras_object(self.backbone),
            "head": keras.saving.serialize_keras_object(self.head),
        }

    @classmethod
    def from_config(cls, config, custom_objects=None):
        parts = {
            key: keras.saving.deserialize_keras_object(config[key], custom_objects=custom_objects)
            for key in ("backbone", "head")
        }
        return cls(**{**config, **parts})


def _as_list(callbacks):
    if callbacks is None:
        return []
    return list(callbacks) if isinstance(callbacks, (list, tuple)) else [callbacks]
