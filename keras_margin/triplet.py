"""Triplet loss with semi-hard negatives: the baseline that the margin papers compare with."""

import keras
import numpy as np
from keras import ops

from keras_margin import class_changes, imprinting
from keras_margin.backend import check_backend, holds, is_concrete
from keras_margin.checks import check_rows, checked_ignore_class, checked_number
from keras_margin.numerics import computation_dtype, l2_norm, l2_normalize


@keras.saving.register_keras_serializable(package="keras_margin")
class SemiHardTriplet(keras.layers.Layer):
    """No classes and no weights: each pair of one identity against a semi-hard negative.

    With D the squared distances of unit vectors, for each anchor a and positive p of its identity,

        n = the nearest negative with D_an > D_ap; the farthest negative where there is none
        loss_a = mean_p max(D_ap - D_an + margin, 0)

    A batch must hold several images of each identity: see `datasets.balanced_batches`. Under
    `tf.distribute` the triplets are those of each replica's share.

    Args:
        margin: at least 0; 0.2 is FaceNet's.
        ignore_class: rows with this label are in no triplet.
        **kwargs: `name`, `dtype` of a Keras layer.

    Example:

    >>> embeddings = keras.ops.array([[1.0, 0.0], [0.8, 0.6], [0.0, 1.0]])
    >>> loss = SemiHardTriplet(margin=0.2).loss(embeddings, [0, 0, 1])
    >>> [round(float(value), 4) for value in loss]  # the third row has no positive
    [0.0, 0.0, 0.0]

    Reference:
        Schroff et al., FaceNet: A Unified Embedding for Face Recognition and Clustering, 2015,
        arXiv:1503.03832, eq. 3 and 4.
    """

    num_classes = None  # EmbeddingModel asks: there is no accuracy to report
    imprint = imprinting.imprint  # both say that there are no classes
    resized = class_changes.resized

    def __init__(self, margin=0.2, *, ignore_class=None, **kwargs):
        check_backend()
        super().__init__(autocast=False, **kwargs)
        self.margin = checked_number("margin", margin, 0.0)
        self.ignore_class = checked_ignore_class(ignore_class)
        self.maths_dtype = computation_dtype(self.compute_dtype)

    def loss(self, embeddings, labels, training=None, update_state=True):
        """The loss of each anchor.

        Args:
            embeddings: float (batch, dim), any length.
            labels: integer (batch,) or (batch, 1): any whole numbers, identities are only compared.
                Float labels that are not whole raise ValueError in eager code, and give NaN in
                their rows in compiled code.
            training: as in the other heads, without effect.
            update_state: as in the other heads, without effect: there is no state.

        Returns:
            float32 (batch,); 0 for rows without a positive or a negative, and for ignored rows; NaN
            where the embedding is not finite or the label not whole.
        """
        embeddings = ops.cast(embeddings, self.maths_dtype)
        counted = self.counted(labels)
        labels, is_whole = _identities(labels)
        check_rows(embeddings, labels)
        finite = ops.isfinite(l2_norm(ops.stop_gradient(embeddings)))
        usable = counted & is_whole & finite
        unit = l2_normalize(ops.where(ops.expand_dims(finite, 1), embeddings, 0.0))

        same = ops.expand_dims(labels, 1) == labels  # (batch, batch)
        pair = ops.expand_dims(usable, 1) & usable
        rows = ops.arange(ops.shape(labels)[0])
        positive = same & pair & (ops.expand_dims(rows, 1) != rows)
        negative = ~same & pair

        distances = 2.0 - 2.0 * ops.matmul(unit, ops.transpose(unit))  # D (batch, batch)
        chosen = _semi_hard(distances, negative)  # D_an for each (a, p), (batch, batch)
        has_negative = ops.any(negative, axis=1)
        counts = positive & ops.expand_dims(has_negative, 1)
        hinge = ops.maximum(distances - chosen + self.margin, 0.0)
        number = ops.sum(ops.cast(counts, unit.dtype), axis=1)
        loss = ops.sum(ops.where(counts, hinge, 0.0), axis=1) / ops.maximum(number, 1.0)
        nan = float("nan")
        return ops.where(usable | ~counted, loss, nan)

    def counted(self, labels):
        """bool (batch,): the rows whose label is not ignored. Raises as `loss` does."""
        labels, _ = _identities(labels)
        dtype = keras.backend.standardize_dtype(labels.dtype)
        is_unsigned = dtype.startswith("uint")
        if self.ignore_class is None or (is_unsigned and self.ignore_class < 0):
            return ops.ones_like(labels, dtype="bool")
        # In a dtype that holds both: 300 is no uint8, and would be 44.
        wide = "float32" if "float" in dtype else "int32"
        labels = ops.cast(labels, dtype if "64" in dtype else wide)
        return ops.not_equal(labels, ops.cast(self.ignore_class, labels.dtype))

    def compute_output_shape(self, embeddings_shape, labels_shape=None):
        return embeddings_shape

    def get_config(self):
        return {
            **super().get_config(),
            "margin": self.margin,
            "ignore_class": self.ignore_class,
        }


def _semi_hard(distances, negative):
    """D_an of the negative chosen for each anchor (down) and positive (across), (batch, batch).

    One positive at a time, so that no (batch, batch, batch) tensor is needed; only the choice of
    the negative is made in the loop, and it takes no gradient.
    """
    fixed, infinity = ops.stop_gradient(distances), float("inf")
    farthest = _argmax(ops.where(negative, fixed, -infinity))

    def choose(to_positive):  # (batch,): D_ap of one p
        beyond = negative & (fixed > ops.expand_dims(to_positive, 1))
        nearest = _argmax(ops.where(beyond, -fixed, -infinity))
        return ops.cast(ops.where(ops.any(beyond, axis=1), nearest, farthest), "int32")

    # One more column, since a loop over nothing fails.
    chosen = ops.map(choose, ops.pad(ops.transpose(fixed), [[0, 1], [0, 0]]))[:-1]
    return ops.take_along_axis(distances, ops.transpose(chosen), axis=1)


def _argmax(rows):
    # One more column, so that an empty batch has something to look at.
    return ops.argmax(ops.pad(rows, [[0, 0], [0, 1]], constant_values=-float("inf")), axis=1)


def _check_32_bits(labels):
    """JAX would cut 2^32 + 1 to 1, and two identities would be one."""
    with np.errstate(over="ignore"):
        kept = labels.astype(f"{labels.dtype.kind}4")
    lost = (kept != labels) & (labels == labels)
    if lost.any():
        row = int(np.argmax(lost))
        raise ValueError(
            "`labels` must be numbers that 32 bits hold: JAX has no others. "
            f"Received: labels[{row}]={labels.flat[row]}"
        )


def _identities(labels):
    """Numbers (batch,), and bool (batch,): whether they are whole. Refused where it can be seen."""
    if isinstance(labels, (list, tuple)) or labels is None:
        labels = np.asarray(labels)
    if isinstance(labels, np.ndarray) and labels.dtype.kind not in "iufb":
        raise ValueError(f"`labels` must be numbers. Received: labels.dtype={labels.dtype}")
    if isinstance(labels, np.ndarray) and not holds(labels.dtype):
        _check_32_bits(labels)
    labels = ops.convert_to_tensor(labels)
    dtype = keras.backend.standardize_dtype(labels.dtype)
    if not any(kind in dtype for kind in ("int", "float", "bool")):
        raise ValueError(f"`labels` must be numbers. Received: labels.dtype={dtype}")
    if len(labels.shape) not in (1, 2) or (len(labels.shape) == 2 and labels.shape[1] != 1):
        raise ValueError(
            "`labels` must have shape (batch,) or (batch, 1). "
            f"Received: labels.shape={tuple(labels.shape)}"
        )
    labels = ops.reshape(labels, (-1,))
    if "float" not in dtype:
        labels = ops.cast(labels, "int32") if dtype == "bool" else labels
        return labels, ops.ones_like(labels, dtype="bool")
    is_whole = ops.isfinite(labels) & (labels == ops.floor(labels))
    if is_concrete(is_whole):
        found = ops.convert_to_numpy(is_whole)
        if not found.all():
            row = int(np.argmin(found))
            raise ValueError(
                f"`labels` must be whole numbers. Received: labels[{row}]={float(labels[row])}"
            )
    return labels, is_whole
