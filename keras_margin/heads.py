"""The named heads: presets of `MarginHead`, each a margin rule and a scale."""

import keras
from keras import ops

from keras_margin.checks import checked_count
from keras_margin.margin_head import MarginHead
from keras_margin.margins import AngularMargin, CosineMargin, MultiplicativeMargin
from keras_margin.numerics import l2_norm
from keras_margin.scales import AdaCosScale, EmbeddingNormScale
from keras_margin.schedules import stored


@keras.saving.register_keras_serializable(package="keras_margin")
class NormFace(MarginHead):
    """Scaled cosines without a margin: the baseline of every margin head.

    Args:
        num_classes: at least 2.
        scale: as in `MarginHead`.
        **kwargs: of `MarginHead`.

    Reference:
        Wang et al., NormFace: L2 Hypersphere Embedding for Face Verification, 2017,
        arXiv:1704.06369.
    """

    def __init__(self, num_classes, scale=64.0, **kwargs):
        super().__init__(num_classes, None, scale, **kwargs)

    def get_config(self):
        return _without(super().get_config(), "margin")


@keras.saving.register_keras_serializable(package="keras_margin")
class CosFace(MarginHead):
    """A margin on the cosine, see `CosineMargin`.

    Args:
        num_classes: at least 2.
        margin: of `CosineMargin`; 0.35 and scale 64 are the paper's.
        scale: as in `MarginHead`.
        **kwargs: of `MarginHead`.

    Reference:
        Wang et al., CosFace: Large Margin Cosine Loss for Deep Face Recognition, 2018,
        arXiv:1801.09414, eq. 4.
    """

    def __init__(self, num_classes, margin=0.35, scale=64.0, **kwargs):
        super().__init__(num_classes, CosineMargin(margin), scale, **kwargs)
        self.margin = margin


@keras.saving.register_keras_serializable(package="keras_margin")
class AMSoftmax(CosFace):
    """CosFace's rule with the scale 30 of its own paper.

    Args:
        num_classes: at least 2.
        margin: of `CosineMargin`; the paper uses 0.35 and scale 30.
        scale: as in `MarginHead`.
        **kwargs: of `MarginHead`.

    Reference:
        Wang et al., Additive Margin Softmax for Face Verification, 2018, arXiv:1801.05599, eq. 6.
    """

    def __init__(self, num_classes, margin=0.35, scale=30.0, **kwargs):
        super().__init__(num_classes, margin, scale, **kwargs)


@keras.saving.register_keras_serializable(package="keras_margin")
class ArcFace(MarginHead):
    """A margin on the angle, see `AngularMargin`.

    Args:
        num_classes: at least 2.
        margin: of `AngularMargin`, radians; 0.5 and scale 64 are the paper's.
        scale: as in `MarginHead`.
        **kwargs: of `MarginHead`.

    Example:

    >>> head = ArcFace(10)
    >>> tuple(head(keras.ops.ones((4, 8))).shape)  # no labels: scale * cosine
    (4, 10)

    Reference:
        Deng et al., ArcFace: Additive Angular Margin Loss for Deep Face Recognition, 2019,
        arXiv:1801.07698, eq. 3.
    """

    def __init__(self, num_classes, margin=0.5, scale=64.0, **kwargs):
        super().__init__(num_classes, AngularMargin(margin), scale, **kwargs)
        self.margin = margin


@keras.saving.register_keras_serializable(package="keras_margin")
class SoftmaxHead(MarginHead):
    """Plain w.x: no normalisation, no margin, no scale, no bias. The baseline of the papers.

    Args:
        num_classes: at least 2.
        **kwargs: of `MarginHead`.
    """

    normalize_embeddings = normalize_centers = False

    def __init__(self, num_classes, **kwargs):
        super().__init__(num_classes, None, 1.0, **kwargs)

    def get_config(self):
        return _without(super().get_config(), "margin", "scale")


@keras.saving.register_keras_serializable(package="keras_margin")
class SphereFace(MarginHead):
    """The angle counts `margin` times, on logits of length |x|: see `MultiplicativeMargin`.

        logit_k = |x| cos(theta_k)          logit_y = |x| (lambda cos(theta_y) + psi) / (1 + lambda)

    Giving labels means training: each such call moves the annealing on, unless `training=False` is
    passed.

    Args:
        num_classes: at least 2.
        margin: any real number from 1; the paper uses 4.
        lambda_base: of the annealing, see `MultiplicativeMargin`; the defaults of all four are
            those of the published training.
        lambda_gamma: of the annealing.
        lambda_power: of the annealing.
        lambda_min: of the annealing.
        **kwargs: of `MarginHead`.

    Reference:
        Liu et al., SphereFace: Deep Hypersphere Embedding for Face Recognition, 2017,
        arXiv:1704.08063, eq. 7.
    """

    def __init__(
        self,
        num_classes,
        margin=4,
        *,
        lambda_base=1000.0,
        lambda_gamma=0.12,
        lambda_power=1.0,
        lambda_min=5.0,
        **kwargs,
    ):
        annealing = {
            "lambda_base": lambda_base,
            "lambda_gamma": lambda_gamma,
            "lambda_power": lambda_power,
            "lambda_min": lambda_min,
        }
        rule = MultiplicativeMargin(margin, **annealing)
        super().__init__(num_classes, rule, EmbeddingNormScale(), **kwargs)
        self.margin = margin
        self._annealing = annealing

    def get_config(self):
        annealing = {name: stored(value) for name, value in self._annealing.items()}
        return {**_without(super().get_config(), "scale"), **annealing}


@keras.saving.register_keras_serializable(package="keras_margin")
class LSoftmax(SphereFace):
    """SphereFace's rule before the centres were normalised: logits |w| |x| cos(theta).

        logit_k = |w_k| |x| cos(theta_k)
        logit_y = |w_y| |x| (lambda cos(theta_y) + psi) / (1 + lambda)

    Giving labels means training: each such call moves the annealing on, unless `training=False` is
    passed.

    Args:
        num_classes: at least 2.
        margin: a whole number from 1; the paper uses 2 to 4.
        lambda_base: of the annealing, see `MultiplicativeMargin`; the defaults of all four are
            those of the published training on MNIST.
        lambda_gamma: of the annealing.
        lambda_power: of the annealing.
        lambda_min: of the annealing.
        **kwargs: of `MarginHead`.

    Raises:
        ValueError: a margin that is not a whole number; sub-centres, which are of cosine heads.

    Reference:
        Liu et al., Large-Margin Softmax Loss for Convolutional Neural Networks, 2016,
        arXiv:1612.02295, eq. 4 to 6.
    """

    normalize_centers = False

    def __init__(
        self,
        num_classes,
        margin=4,
        *,
        lambda_base=1000.0,
        lambda_gamma=2.5e-5,
        lambda_power=35.0,
        lambda_min=0.0,
        **kwargs,
    ):
        if kwargs.get("num_subcenters", 1) != 1:
            raise ValueError(
                "LSoftmax compares lengths too, and has one centre per class: for sub-centres take "
                f"SphereFace. Received: num_subcenters={kwargs['num_subcenters']!r}"
            )
        super().__init__(
            num_classes,
            checked_count("margin", margin, smallest=1),
            lambda_base=lambda_base,
            lambda_gamma=lambda_gamma,
            lambda_power=lambda_power,
            lambda_min=lambda_min,
            **kwargs,
        )

    def _with_margin(self, target, norms, ids, classes):
        # The product is |w_y| cos(theta): the margin acts on the cosine alone.
        lengths = l2_norm(ops.take(classes.centers, classes.labels, axis=0))
        cosines = target / ops.where(lengths > 0.0, lengths, 1.0)
        return lengths * super()._with_margin(cosines, norms, ids, classes)


@keras.saving.register_keras_serializable(package="keras_margin")
class AdaCos(MarginHead):
    """No margin and no scale to choose: the scale adapts to the classes and to the training.

    Giving labels means training: each such call moves the scale, see `AdaCosScale`; `evaluate`,
    `predict` and `training=False` leave it alone. It is a non-trainable variable of the layer,
    saved with the model; under `MirroredStrategy` it is that of the global batch.

    Args:
        num_classes: at least 3.
        dynamic: False keeps the fixed scale sqrt(2) log(num_classes - 1).
        min_scale: lower bound, see `AdaCosScale`.
        max_scale: upper bound, see `AdaCosScale`.
        **kwargs: of `MarginHead`.

    Raises:
        ValueError: fewer than 3 classes: the scale would be 0.

    Example:

    >>> head = AdaCos(1000)
    >>> head.build((None, 8))
    >>> round(float(head.current_scale), 3)  # sqrt(2) log(999)
    9.768

    Reference:
        Zhang et al., AdaCos: Adaptively Scaling Cosine Logits for Effectively Learning Deep Face
        Representations, 2019, arXiv:1905.00292, eq. 12 to 15.
    """

    def __init__(self, num_classes, dynamic=True, *, min_scale=0.1, max_scale=None, **kwargs):
        scale = AdaCosScale(num_classes, dynamic, min_scale=min_scale, max_scale=max_scale)
        super().__init__(num_classes, None, scale, **kwargs)
        self.dynamic = dynamic
        self.min_scale = scale.min_scale
        self.max_scale = scale.max_scale

    def get_config(self):
        own = {"dynamic": self.dynamic, "min_scale": self.min_scale, "max_scale": self.max_scale}
        return {**_without(super().get_config(), "margin", "scale"), **own}


def _without(config, *keys):
    return {key: value for key, value in config.items() if key not in keys}
