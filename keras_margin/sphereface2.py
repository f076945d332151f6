"""SphereFace2: a yes-or-no question for each class instead of a choice among all."""

import math

import keras
from keras import ops

from keras_margin.backend import read
from keras_margin.checks import checked_number
from keras_margin.initializers import exact_constant
from keras_margin.labels import usable_rows
from keras_margin.margin_head import MarginHead


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
        if self.positive_weight == 0.0:
            raise ValueError(
                "`positive_weight` must be greater than 0. "
                f"Received: positive_weight={positive_weight!r}"
            )

    def build(self, embeddings_shape, labels_shape=None):
        super().build(embeddings_shape)
        self.bias = self.add_weight(
            name="bias",
            initializer=exact_constant(self.initial_bias()),
            dtype=self.maths_dtype,
            autocast=False,
        )

    def initial_bias(self):
        """The b at which the expected loss has no slope when all cosines are 0."""
        odds = self.positive_weight / ((1.0 - self.positive_weight) * (self.num_classes - 1))
        bent = 2.0 * 0.5**self.similarity_power - 1.0  # g(0)
        positive = self.scale * (bent - self.margin)
        negative = self.scale * (bent + self.margin)
        root = math.sqrt((1.0 - odds) ** 2 + 4.0 * odds * math.exp(positive - negative))
        return math.log(2.0 * odds) - negative - math.log(1.0 - odds + root)

    def call(self, embeddings, labels=None, training=None):
        embeddings = ops.cast(embeddings, self.maths_dtype)
        if labels is None or training is False:
            return self._logits(self._cosines(self._directions(embeddings)))
        found, usable, embeddings = usable_rows(self, embeddings, labels)
        cosines = self._cosines(self._directions(embeddings))
        logits = self._margined(cosines, self._is_target(found))
        self._count_call(usable)
        return ops.where(ops.expand_dims(usable | ~found.counted, 1), logits, float("nan"))

    def loss_and_cosines(self, embeddings, labels, training=None, update_state=True):
        training = training is not False
        embeddings = ops.cast(embeddings, self.maths_dtype)
        found, usable, embeddings = usable_rows(self, embeddings, labels)
        cosines = self._cosines(self._directions(embeddings))  # (batch, num_classes)
        is_target = self._is_target(found)
        logits = self._margined(cosines, is_target) if training else self._logits(cosines)
        terms = ops.where(
            is_target,
            self.positive_weight * ops.softplus(-logits),
            (1.0 - self.positive_weight) * ops.softplus(logits),
        )
        loss = self.loss_weight / self.scale * ops.sum(terms, axis=1)
        if training and update_state:
            self._count_call(usable)

        nan, infinity = float("nan"), float("inf")
        loss = ops.where(usable, loss, ops.where(found.counted, nan, ops.zeros_like(loss)))
        target = ops.sum(ops.where(is_target, cosines, 0.0), axis=1)
        hardest = ops.max(ops.where(is_target, -infinity, cosines), axis=1, initial=-infinity)
        return loss, ops.where(usable, target, nan), ops.where(usable, hardest, nan)

    def _is_target(self, found):
        """bool (batch, num_classes); no target in an ignored row."""
        classes = ops.arange(self.num_classes, dtype="int32")
        return (ops.expand_dims(found.ids, 1) == classes) & ops.expand_dims(found.counted, 1)

    def _logits(self, cosines):
        # c can be a rounding step under -1, where the power of a negative number is NaN.
        half = ops.maximum((cosines + 1.0) / 2.0, 0.0)
        bent = 2.0 * half**self.similarity_power - 1.0
        return self.scale * bent + read(self.bias)

    def _margined(self, cosines, is_target):
        sign = 1.0 - 2.0 * ops.cast(is_target, cosines.dtype)  # - for the target, + for the others
        return self._logits(cosines) + self.scale * self.margin * sign

    def get_config(self):
        return {
            **super().get_config(),
            "positive_weight": self.positive_weight,
            "similarity_power": self.similarity_power,
            "loss_weight": self.loss_weight,
        }
