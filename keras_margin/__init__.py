"""Margin heads of deep face recognition and metric learning as Keras layers."""

from keras_margin import datasets, margins, plots, retrieval, scales, verification
from keras_margin.heads import AdaCos, AMSoftmax, ArcFace, CosFace, NormFace
from keras_margin.margin_head import MarginHead
from keras_margin.model import EmbeddingModel
from keras_margin.nontarget import nontarget_logsumexp

__version__ = "0.1.0"

__all__ = [
    "AMSoftmax",
    "AdaCos",
    "ArcFace",
    "CosFace",
    "EmbeddingModel",
    "MarginHead",
    "NormFace",
    "datasets",
    "margins",
    "nontarget_logsumexp",
    "plots",
    "retrieval",
    "scales",
    "verification",
]
