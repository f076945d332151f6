"""MarginHead: cosine similarity x margin rule x scale policy. The named heads are in `heads.py`."""

import keras
from keras import ops

from keras_margin import class_changes, imprinting, subcenters
from keras_margin.backend import check_backend, is_concrete, read
from keras_margin.checks import checked_count, checked_ignore_class, checked_number, checked_seed
from keras_margin.class_blocks import best_subcenters, harden
from keras_margin.distribution import global_sum, num_replicas
from keras_margin.guidance import warn_of_clipped_norms, warn_of_loss_options, warn_of_settings
from keras_margin.initializers import default_centers_initializer
from keras_margin.labels import class_ids, usable_rows
from keras_margin.losses import margin_loss
from keras_margin.margins import checked_rule
from keras_margin.nontarget import checked_chunk_size, class_statistics
from keras_margin.numerics import computation_dtype, l2_norm, l2_normalize, product_dtype
from keras_margin.sampling import checked_rate, classes_of_step, every_class
from keras_margin.scales import as_scale_policy
from keras_margin.schedules import revived, stored
from keras_margin.shards import ALONE, shards_of


@keras.saving.register_keras_serializable(package="keras_margin")
class MarginHead(keras.layers.Layer):
    """A classifier of directions for training embeddings: any margin rule with any scale policy.

    With theta_k the angle between the embedding and the centre of class k, y the label:

        logit_k = s cos(theta_k),  k != y          logit_y = s margin(cos(theta_y))
        loss = softplus(log sum_{k != y} exp(logit_k) - logit_y)      their cross-entropy

    Giving labels means training (margin applied, state moved) unless `training=False` is passed, as
    `evaluate` and `predict` do; then the head is the plain scaled-cosine classifier and no state
    moves.

    Two ways to use it: as the final layer of a functional model with a label input and Keras'
    cross-entropy from logits, or in `EmbeddingModel`, which calls `head.loss`.

    Args:
        num_classes: number of identities, at least 2.
        margin: a rule of `keras_margin.margins`, or None for no margin.
        scale: s, a positive number, a `keras.optimizers.schedules.LearningRateSchedule` of the
            training calls, or a policy of `keras_margin.scales`. 64 is the ArcFace paper's.
        num_subcenters: centres per class; a class counts with its best one (Sub-center ArcFace).
        sample_rate: share of the classes that take part in a training step of `loss`, those of the
            batch always (Partial FC). For 10^5 classes and more; compile `EmbeddingModel` with
            SGD, Adam, AdamW or Lion, which then move the rows of the sample alone.
        ignore_class: rows with this label have loss 0, gradient 0, and no part in any statistic.
        focal_gamma: gamma of the focal factor (1 - p)^gamma on the loss, p the target's
            probability, differentiated in full (Lin et al., 2017, arXiv:1708.02002, eq. 4).
        label_smoothing: epsilon; the target keeps 1 - epsilon + epsilon / num_classes of the mass,
            on the logits with their margin. Both act in `loss`, in training only.
        chunk_size: classes that `loss` holds at once, see `nontarget_logsumexp`; None: chosen.
        centers_initializer: default: uniform directions of about unit length.
        centers_regularizer: a Keras regularizer on the raw centres; None, since only their
            directions count.
        seed: of the default initializer and of the sample; whole number, or None.
        **kwargs: `name`, `dtype`, `trainable` of a Keras layer. The maths is float32 (float64 under
            that policy) and the centres are float32 variables whatever the mixed-precision policy.

    Call arguments:
        embeddings: float (batch, dim), any length; there is no time axis, so no mask.
        labels: (batch,) or (batch, 1) ids in any integer dtype or as whole floats, or one-hot
            (batch, num_classes). A label that is no class raises ValueError in eager code, and
            gives NaN in its row of logits and loss in compiled code.
        training: see above.

    Returns:
        float32 logits (batch, num_classes).

    Attributes:
        centers: variable (num_classes * num_subcenters, dim), the rows of a class together.

    Example:
        >>> from keras_margin.margins import AngularMargin
        >>> head = MarginHead(10, margin=AngularMargin(0.5), scale=30.0)
        >>> embeddings, labels = keras.ops.ones((4, 8)), keras.ops.array([0, 1, 2, 3])
        >>> tuple(head(embeddings, labels).shape)
        (4, 10)
    """

    # False in heads from before the cosine: vectors are compared as they are.
    normalize_embeddings = normalize_centers = True
    shards = ALONE  # how the centres lie on devices, see `shards.py`
    record_rows = staticmethod(lambda rows: None)  # of `sampling.recorded_rows`

    def __init__(
        self,
        num_classes,
        margin=None,
        scale=64.0,
        *,
        num_subcenters=1,
        sample_rate=1.0,
        ignore_class=None,
        chunk_size=None,
        focal_gamma=0.0,
        label_smoothing=0.0,
        centers_initializer=None,
        centers_regularizer=None,
        seed=None,
        **kwargs,
    ):
        check_backend()
        # autocast=False: mixed precision would round float labels and the embeddings' norms.
        super().__init__(autocast=False, **kwargs)
        self.num_classes = checked_count("num_classes", num_classes, smallest=2)
        self.num_subcenters = checked_count("num_subcenters", num_subcenters, smallest=1)
        self.sample_rate = checked_rate(sample_rate, centers_regularizer)
        self.ignore_class = checked_ignore_class(ignore_class)
        self.chunk_size = checked_chunk_size(chunk_size)
        self.focal_gamma = checked_number("focal_gamma", focal_gamma, 0.0)
        self.label_smoothing = checked_number("label_smoothing", label_smoothing, 0.0, below=1.0)
        self.seed = checked_seed(seed)
        self.num_rows = self.num_classes * self.num_subcenters  # of centres, without padding
        if centers_initializer is None:
            centers_initializer = default_centers_initializer(self.seed)
        self.centers_initializer = keras.initializers.get(centers_initializer)
        self.centers_regularizer = keras.regularizers.get(centers_regularizer)
        self.margin = margin
        self.scale = scale
        self.margin_rule = checked_rule(margin)
        self.scale_policy = as_scale_policy(scale)
        self.maths_dtype = computation_dtype(self.compute_dtype)
        for part in (self.margin_rule, self.scale_policy):
            if part is not None:
                part.own(self)
                part.attach(self.num_classes, self.calls_so_far, self.maths_dtype)

    def build(self, embeddings_shape, labels_shape=None):
        if len(embeddings_shape) != 2 or embeddings_shape[-1] is None:
            raise ValueError(
                "`embeddings` must be (batch, dim) with a known dim: end the backbone with "
                "GlobalAveragePooling2D, Flatten or Dense. Received: "
                f"embeddings.shape={tuple(embeddings_shape)}"
            )
        self.shards = shards_of(f"{self.path}/centers")
        rows = self.shards.padded(self.num_classes) * self.num_subcenters
        self.centers = self.add_weight(
            name="centers",
            shape=(rows, embeddings_shape[-1]),
            initializer=self.shards.initializer(self.centers_initializer, self.num_rows),
            regularizer=self.shards.regularizer(self.centers_regularizer, self.num_rows),
            dtype=self.maths_dtype,
            autocast=False,
        )
        # Every replica counts the same global calls.
        self.steps = self.add_weight(
            name="steps",
            initializer="zeros",
            dtype="int32",
            trainable=False,
            autocast=False,
            aggregation="only_first_replica",
        )
        for part in (self.margin_rule, self.scale_policy):
            if part is not None and not part.built:
                part.build((None,))
        warn_of_settings(self)

    # The three ways to ask.

    def call(self, embeddings, labels=None, training=None):
        embeddings = ops.cast(embeddings, self.maths_dtype)
        if labels is None or training is False:
            norms = l2_norm(embeddings)
            cosines = self._cosines(self._directions(embeddings))
            return cosines * _column(self.scale_policy.scale_of(norms))

        warn_of_loss_options(self)
        found, usable, embeddings = usable_rows(self, embeddings, labels)
        directions, norms = self._directions(embeddings), l2_norm(embeddings)
        classes = every_class(self, found)
        self._update_state(directions, norms, classes, usable)
        cosines = self._cosines(directions)  # (batch, num_classes)
        ids = ops.expand_dims(found.ids, 1)
        target = ops.squeeze(ops.take_along_axis(cosines, ids, axis=1), 1)
        margined = self._with_margin(target, norms, found.ids, classes)
        others, _ = harden(cosines, self._curriculum(directions, classes, found.ids))
        is_target = ids == ops.arange(self.num_classes, dtype=ids.dtype)
        logits = ops.where(is_target, ops.expand_dims(margined, 1), others)
        # An ignored row keeps its plain logits: Keras' loss leaves it out.
        logits = ops.where(ops.expand_dims(found.counted, 1), logits, cosines)
        logits = logits * _column(self.scale_policy.scale_of(norms))
        self._add_penalty(norms, usable)
        self._count_call(usable)
        return ops.where(ops.expand_dims(usable | ~found.counted, 1), logits, float("nan"))

    def loss(self, embeddings, labels, training=None, update_state=True):
        """The loss of each row, without building the logits' gradient several times over.

        Args:
            embeddings: as in the call.
            labels: as in the call.
            training: None or True: with the margin, and state moves; False: plain cross-entropy.
            update_state: False leaves state alone, as for the second term of mixup:
                `lam * head.loss(e, y1) + (1 - lam) * head.loss(e, y2, update_state=False)`.

        Returns:
            float32 (batch,); 0 for ignored rows, NaN where the label is no class or the embedding
            is not finite.
        """
        return self.loss_and_cosines(embeddings, labels, training, update_state)[0]

    def loss_and_cosines(self, embeddings, labels, training=None, update_state=True):
        """`loss`, and from the same pass the cosines that accuracy needs.

        Returns:
            loss, target_cosines, max_nontarget_cosines: float32 (batch,) each, the cosines without
            margin, NaN in rows that do not count. A row is classified right where
            `target_cosines > max_nontarget_cosines`, among the classes that took part.
        """
        training = training is not False
        embeddings = ops.cast(embeddings, self.maths_dtype)
        if not self.built:
            self.build(tuple(embeddings.shape))
        found, usable, embeddings = usable_rows(self, embeddings, labels)
        directions, norms = self._directions(embeddings), l2_norm(embeddings)
        classes = classes_of_step(self, found) if training else every_class(self, found)
        if training and update_state:
            self._update_state(directions, norms, classes, usable)

        scale = self.scale_policy.scale_of(norms)
        statistics = self._statistics(
            directions,
            classes,
            scale,
            curriculum=self._curriculum(directions, classes, found.ids) if training else None,
            wants_total=training and self.label_smoothing > 0,
            wants_scale_gradient=self.scale_policy.takes_gradient,
        )
        if training:
            target_logit = scale * self._with_margin(statistics.target, norms, found.ids, classes)
            loss = margin_loss(
                target_logit,
                statistics.log_b,
                scale * statistics.total,
                num_classes=ops.cast(classes.number, target_logit.dtype),
                label_smoothing=self.label_smoothing,
                focal_gamma=self.focal_gamma,
            )
            penalty = self._penalty(norms)
            loss = loss if penalty is None else loss + penalty
        else:
            loss = ops.softplus(statistics.log_b - scale * statistics.target)
        if training and update_state:
            self._count_call(usable)

        nan = float("nan")
        loss = ops.where(usable, loss, ops.where(found.counted, nan, ops.zeros_like(loss)))
        target = ops.where(usable, statistics.target, nan)
        return loss, target, ops.where(usable, statistics.hardest, nan)

    def counted(self, labels):
        """bool (batch,): the rows whose label is not ignored. Raises as the call does."""
        return class_ids(labels, self.num_classes, self.ignore_class).counted

    @property
    def current_scale(self):
        """The scale now in force, a scalar tensor; None where it differs per sample."""
        return self.scale_policy.current()

    # Other classes, and sub-centres for cleaning data: see the modules.

    imprint = imprinting.imprint
    resized = class_changes.resized
    dominant_subcenters = subcenters.dominant_subcenters
    outliers = subcenters.outliers
    collapsed = subcenters.collapsed

    # Their parts.

    def _directions(self, embeddings):
        """What is compared with the centres: unit vectors, so that the products are cosines."""
        return l2_normalize(embeddings) if self.normalize_embeddings else embeddings

    @property
    def _form(self):
        """How the centres are compared, the same in every pass over them."""
        return {key: getattr(self, key) for key in ("num_subcenters", "normalize_centers")}

    def _statistics(self, directions, classes, scale, **wanted):
        """One pass over the classes of the step."""
        return class_statistics(
            directions,
            classes.centers,
            classes.labels,
            scale,
            chunk_size=self.chunk_size,
            product_dtype=product_dtype(self.compute_dtype),
            shards=classes.shards,
            **self._form,
            **wanted,
        )

    def _cosines(self, directions):
        """(batch, num_classes): with sub-centres each class' best."""
        self.record_rows(None)
        centers = read(self.centers)
        centers = l2_normalize(centers) if self.normalize_centers else centers
        cosines = ops.matmul(directions, ops.transpose(centers))
        cosines, _ = best_subcenters(cosines, self.num_subcenters)
        return cosines if self.shards is ALONE else cosines[:, : self.num_classes]

    def _with_margin(self, target, norms, ids, classes):
        if self.margin_rule is None:
            return target
        return self.margin_rule(target, norms=norms, labels=ids, training=True)

    # What a head may add, besides a rule and a policy.

    def _curriculum(self, directions, classes, ids):
        """A `Curriculum` for the other classes in training, or None."""
        return None

    def _penalty(self, norms):
        """A term of the loss in training from the embeddings' norms, (batch,), or None."""
        return None

    def _update_state(self, directions, norms, classes, usable):
        """Moves scale and margin in a training call, before they are used."""
        if self.scale_policy.needs_statistics:
            statistics = self._statistics(
                ops.stop_gradient(directions),
                classes,
                self.scale_policy.current(),
                wants_gradient=False,
            )
            self.scale_policy.update_state(statistics.log_b, statistics.target, usable)
        if self.margin_rule is not None:
            self.margin_rule.update_state(ops.stop_gradient(norms), usable)
            if is_concrete(norms):
                warn_of_clipped_norms(self)

    def _add_penalty(self, norms, usable):
        """`_penalty` in a functional model: its mean over the global batch."""
        penalty = self._penalty(norms)
        if penalty is None:
            return
        total = ops.sum(ops.where(usable, penalty, 0.0))
        number = global_sum(ops.sum(ops.cast(usable, penalty.dtype)))
        # Keras divides what a layer adds by the number of replicas.
        self.add_loss(total * num_replicas() / ops.maximum(number, 1.0))

    def calls_so_far(self):
        return read(self.steps) if self.built else 0

    def _count_call(self, usable):
        """A call in which no row of the global batch counts moves no counter."""
        rows = global_sum(ops.sum(ops.cast(usable, "int32")))
        self.steps.assign(self.calls_so_far() + ops.cast(rows > 0, "int32"))

    # What Keras asks.

    def save_own_variables(self, store):
        super().save_own_variables(self._without_padding(store))

    def load_own_variables(self, store):
        class_changes.check_stored_centers(self, store)
        super().load_own_variables(self._without_padding(store))

    def _without_padding(self, store):
        own = [*self._trainable_variables, *self._non_trainable_variables]
        return self.shards.store(store, own, [self.centers], self.num_rows)

    def compute_output_shape(self, embeddings_shape, labels_shape=None):
        return (embeddings_shape[0], self.num_classes)

    def compute_output_spec(self, embeddings, labels=None, training=None):
        # The default would promise float16 under mixed precision.
        shape = self.compute_output_shape(tuple(embeddings.shape))
        return keras.KerasTensor(shape, dtype=self.maths_dtype)

    def get_config(self):
        return {
            **super().get_config(),
            "num_classes": self.num_classes,
            "margin": stored(self.margin),
            "scale": stored(self.scale),
            "num_subcenters": self.num_subcenters,
            "sample_rate": self.sample_rate,
            "ignore_class": self.ignore_class,
            "chunk_size": self.chunk_size,
            "focal_gamma": self.focal_gamma,
            "label_smoothing": self.label_smoothing,
            "centers_initializer": keras.initializers.serialize(self.centers_initializer),
            "centers_regularizer": keras.regularizers.serialize(self.centers_regularizer),
            "seed": self.seed,
        }

    @classmethod
    def from_config(cls, config):
        revive = {key: revived(value) for key, value in config.items() if key != "dtype"}
        return cls(**{**config, **revive})


def _column(scale):
    """A scale that broadcasts with (batch, num_classes)."""
    return ops.expand_dims(scale, 1) if len(scale.shape) else scale
