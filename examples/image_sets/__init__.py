"""The data sets of the examples: `load` a set of images, `split` it into training and test."""

try:
    # TensorFlow Datasets 4.9.10 needs importlib_resources without declaring it (its issue 11212).
    import importlib_resources  # noqa: F401
    import tensorflow_datasets  # noqa: F401
except ImportError as error:
    raise ImportError(
        "The examples read their images with TensorFlow Datasets. Install it with: "
        'pip install "keras_margin[examples]"'
    ) from error

from .loading import ImageSet, load
from .splits import Split, split, split_for_both

__all__ = ["ImageSet", "Split", "load", "split", "split_for_both"]
