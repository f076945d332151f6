"""SphereFace2: a yes-or-no question for each class instead of a choice among all."""

import math

import keras
from keras import ops

from keras_margin.backend import read
from keras_margin.binary_blocks import Curve, bend, softplus_of_others
from keras_margin.checks import SMALLEST_FLOAT32, checked_number
from keras_margin.guidance import warn_of_loss_options
from keras_margin.initializers import exact_constant
from keras_margin.labels import usable_rows
from keras_margin.margin_head import MarginHead
from keras_margin.numerics import product_dtype
from keras_margin.sampling import classes_of_step, every_class


@keras.saving.register_keras_serializable(package="keras_margin")
class SphereFace2(MarginHead):
    """Binary logistic regression for each class, on a bent cosine, with a bias that all share.

        g(c) = 2 ((c + 1) / 2)^t - 1
        z_y = r (g(c_y) - m) + b          z_k = r (g(c_k) + m) + b  for the other classes
        loss = w / r (lambda softplus(-z_y) + (1 - lambda) sum_{k != y} softplus(z_k))

    The logits without labels are r g(c_k) + b. In a functional model the same loss is, from the
    logits of the head with labels and one-hot labels of shape (batch, num_classes),

        binary = keras.losses.binary_crossentropy(
            one_hot[..., None], z[..., None], from_logits=True
        )
        weights = one_hot * lambda + (1 - one_hot) * (1 - lambda)
        loss = w / r * keras.ops.sum(weights * binary, axis=-1)

    Args:
        num_classes: at least 2.
        margin: m, at least 0.
        scale: r, a positive number.
        positive_weight: lambda, between 0 and 1.
        similarity_power: t, at least 1.
        loss_weight: w, positive.
        **kwargs: of `MarginHead`, but for focal_gamma and label_smoothing, which are of the
            softmax. The defaults are those of the published code on small sets.

    Reference:
        Wen et al., SphereFace2: Binary Classification is All You Need for Deep Face Recognition,
        2022, arXiv:2108.01513, eq. 6, variant C of the published code; b starts where the code
        starts it, at the value that is best when all cosines are 0.
    """

    is_softmax = False

    def __init__(
        self,
        num_classes,
        margin=0.4,
        scale=40.0,
        *,
        positive_weight=0.7,
        similarity_power=3.0,
        loss_weight=50.0,
        **kwargs,
    ):
        for name in ("focal_gamma", "label_smoothing"):
            if kwargs.get(name):
                raise ValueError(
                    f"SphereFace2 has no softmax for `{name}` to act on. "
                    f"Received: {name}={kwargs[name]!r}"
                )
        scale = checked_number("scale", scale, 0.0)
        super().__init__(num_classes, None, scale, **kwargs)
        self.margin = checked_number("margin", margin, 0.0)
        self.positive_weight = checked_number("positive_weight", positive_weight, 0.0, below=1.0)
        self.similarity_power = checked_number("similarity_power", similarity_power, 1.0)
        self.loss_weight = checked_number("loss_weight", loss_weight, 0.0)
        for name in ("scale", "positive_weight", "loss_weight"):
            value = getattr(self, name)
            if value < SMALLEST_FLOAT32:
                raise ValueError(
                    f"`{name}` must be greater than 0 in float32. Received: {name}={value!r}"
                )
        checked_number("scale * (1 + margin)", scale * (1.0 + self.margin), 0.0)

    def build(self, embeddings_shape, labels_shape=None):
        super().build(embeddings_shape)
        self.bias = self.add_weight(
            name="bias",
            initializer=exact_constant(self.initial_bias()),
            dtype=self.maths_dtype,
            autocast=False,
        )

    def initial_bias(self):
        """The b at which the expected loss has no slope when all cosines are 0.

        It is the root of a quadratic in exp(b); of its two forms the one in which nothing cancels.
        """
        odds = self.positive_weight / ((1.0 - self.positive_weight) * (self.num_classes - 1))
        bent = 2.0 * 0.5**self.similarity_power - 1.0  # g(0)
        positive = self.scale * (bent - self.margin)
        negative = self.scale * (bent + self.margin)
        # log(d + sqrt(d^2 + g^2)) with d = |1 - odds|, g = 2 sqrt(odds) exp(-scale margin), which
        # underflows.
        difference = abs(1.0 - odds)
        log_sum = math.log(2.0) + 0.5 * math.log(odds) - self.scale * self.margin
        if difference > 0.0:
            log_sum = math.log(difference + math.hypot(difference, math.exp(log_sum)))
        if odds <= 1.0:
            return math.log(2.0 * odds) - negative - log_sum
        return log_sum - math.log(2.0) - positive

    def curve(self, target_cosines, norms=None, labels=None):
        """(z_y - b) / r, for pictures: see `MarginRule.curve`."""
        return bend(target_cosines, self.similarity_power) - self.margin

    def call(self, embeddings, labels=None, training=None):
        embeddings = ops.cast(embeddings, self.maths_dtype)
        if labels is None or training is False:
            return self._logits(self._cosines(self._directions(embeddings)))
        warn_of_loss_options(self)
        found, usable, embeddings = usable_rows(self, embeddings, labels)
        logits = self._logits(self._cosines(self._directions(embeddings)))
        is_target = ops.expand_dims(found.ids, 1) == ops.arange(self.num_classes, dtype="int32")
        gap = self.scale * self.margin * (1.0 - 2.0 * ops.cast(is_target, logits.dtype))
        # An ignored row keeps its plain logits, as in the other heads.
        logits = ops.where(ops.expand_dims(found.counted, 1), logits + gap, logits)
        self._count_call(usable)
        return ops.where(ops.expand_dims(usable | ~found.counted, 1), logits, float("nan"))

    def loss_and_cosines(self, embeddings, labels, training=None, update_state=True):
        training = training is not False
        embeddings = ops.cast(embeddings, self.maths_dtype)
        if not self.built:
            self.build(tuple(embeddings.shape))
        found, usable, embeddings = usable_rows(self, embeddings, labels)
        classes = classes_of_step(self, found) if training else every_class(self, found)
        margin = self.margin if training else 0.0
        others = softplus_of_others(
            self._directions(embeddings),
            classes.centers,
            classes.labels,
            read(self.bias),
            curve=Curve(self.scale, self.similarity_power, margin),
            chunk_size=self.chunk_size,
            product_dtype=product_dtype(self.compute_dtype),
            shards=classes.shards,
            **self._form,
        )
        target_logit = self._logits(others.target) - self.scale * margin
        loss = self.positive_weight * ops.softplus(-target_logit)
        loss = loss + (1.0 - self.positive_weight) * others.total
        loss = self.loss_weight / self.scale * loss
        if training and update_state:
            self._count_call(usable)

        nan = float("nan")
        loss = ops.where(usable, loss, ops.where(found.counted, nan, ops.zeros_like(loss)))
        return loss, ops.where(usable, others.target, nan), ops.where(usable, others.hardest, nan)

    def _logits(self, cosines):
        return self.scale * bend(cosines, self.similarity_power) + read(self.bias)

    def get_config(self):
        return {
            **super().get_config(),
            "positive_weight": self.positive_weight,
            "similarity_power": self.similarity_power,
            "loss_weight": self.loss_weight,
        }
