"""Heads whose margin depends on the sample: on its difficulty, its norm, or a draw."""

import keras
from keras import ops

from keras_margin.backend import read
from keras_margin.checks import checked_number
from keras_margin.class_blocks import Curriculum, target_cosines
from keras_margin.distribution import global_sum
from keras_margin.margin_head import MarginHead
from keras_margin.margins import AngularMargin
from keras_margin.numerics import add_angle
from keras_margin.sample_margins import AdaFaceMargin, ElasticMargin, MagFaceMargin


@keras.saving.register_keras_serializable(package="keras_margin")
class CurricularFace(MarginHead):
    """ArcFace that comes to weigh hard other classes more and more.

    With c_k the cosines, and the target as in `AngularMargin`:

        logit_k = s c_k (t + c_k)  where c_k > cos(theta_y + margin)          s c_k elsewhere
        t = momentum mean(c_y) + (1 - momentum) t          each training call, before use

    Giving labels means training: each such call moves t, the running mean of the global batch's
    target cosines, unless `training=False` is passed. t starts at 0 and takes no gradient.

    Args:
        num_classes: at least 2.
        margin: of `AngularMargin`, radians; 0.5 and scale 64 are the paper's.
        scale: as in `MarginHead`.
        momentum: weight of the new batch in t; 0.01 as in the published code.
        **kwargs: of `MarginHead`.

    Reference:
        Huang et al., CurricularFace: Adaptive Curriculum Learning Loss for Deep Face Recognition,
        2020, arXiv:2004.00288, eq. 5 to 7.
    """

    def __init__(self, num_classes, margin=0.5, scale=64.0, *, momentum=0.01, **kwargs):
        super().__init__(num_classes, AngularMargin(margin), scale, **kwargs)
        self.margin = margin
        self.momentum = checked_number("momentum", momentum, 0.0, at_most=1.0)

    def build(self, embeddings_shape, labels_shape=None):
        super().build(embeddings_shape)
        self.t = self.add_weight(
            name="t",
            initializer="zeros",
            dtype=self.maths_dtype,
            trainable=False,
            autocast=False,
            aggregation="only_first_replica",  # computed from the global batch on each of them
        )

    def _update_state(self, directions, norms, classes, usable):
        super()._update_state(directions, norms, classes, usable)
        target = self._own_cosines(directions, classes)
        number = global_sum(ops.sum(ops.cast(usable, target.dtype)))
        mean = global_sum(ops.sum(ops.where(usable, target, 0.0))) / ops.maximum(number, 1.0)
        moved = self.momentum * mean + (1.0 - self.momentum) * read(self.t)
        self.t.assign(ops.where(number > 0, moved, read(self.t)))

    def _curriculum(self, directions, classes, ids):
        target = self._own_cosines(directions, classes)
        margin = self.margin_rule.setting("margin", self.maths_dtype, ids)
        # The mask compares with cos(theta + margin), without the rule's fallback.
        return Curriculum(add_angle(target, margin), read(self.t))

    def _own_cosines(self, directions, classes):
        return target_cosines(directions, classes.centers, classes.labels, **self._form)

    def get_config(self):
        return {**super().get_config(), "momentum": self.momentum}


@keras.saving.register_keras_serializable(package="keras_margin")
class AdaFace(MarginHead):
    """A margin that follows the image's quality, read off the embedding's norm: `AdaFaceMargin`.

    Giving labels means training: each such call moves mu and sigma, the running mean and standard
    deviation of the global batch's norms, unless `training=False` is passed. The embeddings must
    come as the backbone gives them: after a normalisation there is no quality left to see.

    Args:
        num_classes: at least 2.
        margin: 0.4 and scale 64 are the paper's.
        scale: as in `MarginHead`.
        h: how far the margin moves per standard deviation of the norms; 0.333 is the paper's.
        momentum: weight of the new batch in mu and sigma; 0.01 is the paper's.
        **kwargs: of `MarginHead`.

    Reference:
        Kim et al., AdaFace: Quality Adaptive Margin for Face Recognition, 2022, arXiv:2204.00964,
        section 3.
    """

    def __init__(self, num_classes, margin=0.4, scale=64.0, *, h=0.333, momentum=0.01, **kwargs):
        rule = AdaFaceMargin(margin, h=h, momentum=momentum)
        super().__init__(num_classes, rule, scale, **kwargs)
        self.margin = margin
        self.h = rule.h
        self.momentum = rule.momentum

    def get_config(self):
        return {**super().get_config(), "h": self.h, "momentum": self.momentum}


@keras.saving.register_keras_serializable(package="keras_margin")
class MagFace(MarginHead):
    """A margin that grows with the embedding's norm, and a term that makes norms worth growing.

    With a = clip(|x|, l_a, u_a), the target as in `MagFaceMargin`:

        loss = cross-entropy + regularizer_weight (a / u_a^2 + 1 / a)

    Good images end with long embeddings, so the norm tells the quality. The term is part of
    `head.loss` in training; in a functional model it is added with `add_loss`.

    Args:
        num_classes: at least 2.
        scale: as in `MarginHead`; 64 is the paper's.
        norm_range: (l_a, u_a).
        margin_range: (l_m, u_m), radians.
        regularizer_weight: lambda_g; 35 is the published training's. Under
            s K u_a^2 l_a^2 / (u_a^2 - l_a^2), K = (u_m - l_m) / (u_a - l_a), 22.6 at the defaults,
            the norms need not converge, and a warning says so.
        **kwargs: of `MarginHead`.

    Reference:
        Meng et al., MagFace: A Universal Representation for Face Recognition and Quality
        Assessment, 2021, arXiv:2103.06627, section 3.
    """

    def __init__(
        self,
        num_classes,
        scale=64.0,
        *,
        norm_range=(10.0, 110.0),
        margin_range=(0.45, 0.8),
        regularizer_weight=35.0,
        **kwargs,
    ):
        rule = MagFaceMargin(norm_range, margin_range)
        super().__init__(num_classes, rule, scale, **kwargs)
        self.norm_range = rule.norm_range
        self.margin_range = rule.margin_range
        self.regularizer_weight = checked_number("regularizer_weight", regularizer_weight, 0.0)

    def _penalty(self, norms):
        low, high = self.norm_range
        lengths = ops.clip(norms, low, high)
        return self.regularizer_weight * (lengths / high**2 + 1.0 / lengths)

    def get_config(self):
        config = super().get_config()
        del config["margin"]
        return {
            **config,
            "norm_range": self.norm_range,
            "margin_range": self.margin_range,
            "regularizer_weight": self.regularizer_weight,
        }


@keras.saving.register_keras_serializable(package="keras_margin")
class ElasticFace(MarginHead):
    """A margin drawn for each sample and training call, see `ElasticMargin`.

    Args:
        num_classes: at least 2.
        margin: the mean of the draws; None: the paper's, 0.5 radians for "angular" and 0.35 for
            "cosine".
        scale: as in `MarginHead`; 64 is the paper's.
        std: the standard deviation of the draws; 0.05 is the paper's.
        kind: "angular" or "cosine".
        seed: of the draws and of the default initializer; None: 0 for the draws.
        **kwargs: of `MarginHead`.

    Reference:
        Boutros et al., ElasticFace: Elastic Margin Loss for Deep Face Recognition, 2022,
        arXiv:2109.09416, eq. 6 and 7.
    """

    def __init__(
        self, num_classes, margin=None, scale=64.0, *, std=0.05, kind="angular", seed=None, **kwargs
    ):
        mean = margin
        if margin is None:
            mean = 0.35 if kind == "cosine" else 0.5
        rule = ElasticMargin(mean, std=std, kind=kind, seed=seed or 0)
        super().__init__(num_classes, rule, scale, seed=seed, **kwargs)
        self.margin = margin
        self.std = rule.std
        self.kind = kind

    def get_config(self):
        return {**super().get_config(), "std": self.std, "kind": self.kind}
