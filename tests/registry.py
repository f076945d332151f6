"""Every public head, with arguments that differ from the defaults wherever that is possible."""

from typing import NamedTuple

import keras

import keras_margin as km

CLASSES, DIM = 5, 4


class Entry(NamedTuple):
    make: object  # make(**kwargs) -> a head for CLASSES classes
    is_cross_entropy: bool = True  # its loss is Keras' cross-entropy of its logits
    is_cosine: bool = True  # the embeddings' lengths do not matter
    has_classes: bool = True


WARM_UP = keras.optimizers.schedules.PolynomialDecay(0.1, decay_steps=3, end_learning_rate=0.4)

HEADS = {
    "AdaCos": Entry(lambda **k: km.AdaCos(CLASSES, min_scale=0.5, max_scale=9.0, **k)),
    "AdaCos, fixed": Entry(lambda **k: km.AdaCos(CLASSES, dynamic=False, **k)),
    "AdaFace": Entry(
        lambda **k: km.AdaFace(CLASSES, 0.3, 20.0, h=0.5, momentum=0.2, **k), is_cosine=False
    ),
    "AMSoftmax": Entry(lambda **k: km.AMSoftmax(CLASSES, 0.2, 10.0, **k)),
    "ArcFace": Entry(lambda **k: km.ArcFace(CLASSES, 0.3, 20.0, **k)),
    "ArcFace, warm-up": Entry(lambda **k: km.ArcFace(CLASSES, WARM_UP, 20.0, **k)),
    "ArcFace, per class": Entry(lambda **k: km.ArcFace(CLASSES, [0.1, 0.2, 0.3, 0.4, 0.5], **k)),
    "ArcFace, sub-centres": Entry(lambda **k: km.ArcFace(CLASSES, num_subcenters=3, **k)),
    "CosFace": Entry(lambda **k: km.CosFace(CLASSES, 0.2, 20.0, **k)),
    "CurricularFace": Entry(lambda **k: km.CurricularFace(CLASSES, 0.3, 20.0, momentum=0.2, **k)),
    "ElasticFace": Entry(lambda **k: km.ElasticFace(CLASSES, 0.3, 20.0, std=0.1, seed=3, **k)),
    "ElasticFace, cosine": Entry(lambda **k: km.ElasticFace(CLASSES, kind="cosine", **k)),
    "LSoftmax": Entry(lambda **k: km.LSoftmax(CLASSES, 2, lambda_base=10.0, **k), is_cosine=False),
    "MagFace": Entry(
        lambda **k: km.MagFace(
            CLASSES,
            20.0,
            norm_range=(1.0, 51.0),
            margin_range=(0.3, 0.7),
            regularizer_weight=5.0,
            **k,
        ),
        is_cosine=False,
    ),
    "MarginHead": Entry(
        lambda **k: km.MarginHead(
            CLASSES,
            km.margins.CombinedMargin(1.1, 0.2, 0.1),
            km.scales.AdaCosScale(CLASSES),
            **k,
        )
    ),
    "MarginHead, learned scale": Entry(
        lambda **k: km.MarginHead(CLASSES, None, km.scales.LearnedScale(9.0), **k)
    ),
    "NormFace": Entry(lambda **k: km.NormFace(CLASSES, 20.0, **k)),
    "SemiHardTriplet": Entry(
        lambda **k: km.SemiHardTriplet(0.3, **k), is_cross_entropy=False, has_classes=False
    ),
    "SoftmaxHead": Entry(lambda **k: km.SoftmaxHead(CLASSES, **k), is_cosine=False),
    "SphereFace": Entry(
        lambda **k: km.SphereFace(CLASSES, 1.5, lambda_base=10.0, **k), is_cosine=False
    ),
    "SphereFace2": Entry(
        lambda **k: km.SphereFace2(CLASSES, 0.3, 20.0, positive_weight=0.6, **k),
        is_cross_entropy=False,
    ),
}
