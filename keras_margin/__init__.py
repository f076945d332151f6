"""Margin heads of deep face recognition and metric learning as Keras layers."""

from keras_margin import backend as _backend
from keras_margin import (
    callbacks,
    checkpoints,
    datasets,
    distribution,
    margins,
    plots,
    retrieval,
    scales,
    verification,
)
from keras_margin.adaptive_heads import AdaFace, CurricularFace, ElasticFace, MagFace
from keras_margin.heads import (
    AdaCos,
    AMSoftmax,
    ArcFace,
    CosFace,
    LSoftmax,
    NormFace,
    SoftmaxHead,
    SphereFace,
)
from keras_margin.margin_head import MarginHead
from keras_margin.model import EmbeddingModel
from keras_margin.nontarget import nontarget_logsumexp
from keras_margin.sphereface2 import SphereFace2
from keras_margin.triplet import SemiHardTriplet

_backend.warn_of_backend()

__version__ = "0.1.0"

__all__ = [
    "AMSoftmax",
    "AdaCos",
    "AdaFace",
    "ArcFace",
    "CosFace",
    "CurricularFace",
    "ElasticFace",
    "EmbeddingModel",
    "LSoftmax",
    "MagFace",
    "MarginHead",
    "NormFace",
    "SemiHardTriplet",
    "SoftmaxHead",
    "SphereFace",
    "SphereFace2",
    "callbacks",
    "checkpoints",
    "datasets",
    "distribution",
    "margins",
    "nontarget_logsumexp",
    "plots",
    "retrieval",
    "scales",
    "verification",
]
