"""What EmbeddingModel watches while it trains."""

import keras
import numpy as np
from keras import ops

from keras_margin.backend import read
from keras_margin.guidance import warn_of_clipped_norms


class LastValue(keras.metrics.Metric):
    """The value of the last step: a scale is not something to average."""

    def __init__(self, name, **kwargs):
        super().__init__(name=name, **kwargs)
        # The same on every replica.
        self.value = self.add_variable((), "zeros", aggregation="mean", name="value")

    def update_state(self, value, sample_weight=None):
        self.value.assign(ops.cast(value, self.value.dtype))

    def result(self):
        return read(self.value)


def metrics_of(head):
    """The metrics of an EmbeddingModel, {attribute: metric, None where the head has none}."""
    # Named as Keras names its own: this one is exact with uneven shares of the replicas too.
    loss = keras.metrics.Mean(name="loss")
    has_classes = head.num_classes is not None
    moves = has_classes and head.scale_policy.moves
    return {
        "loss_metric": loss,
        "accuracy_metric": keras.metrics.Mean(name="accuracy") if has_classes else None,
        "scale_metric": LastValue(name="scale") if moves else None,
    }


class Watch(keras.callbacks.Callback):
    """Raises at the first loss that is NaN or infinite, and says what usually brings it.

    At the end of an epoch it lets the head warn of norms that are mostly clipped.
    """

    def on_train_batch_end(self, batch, logs=None):
        loss = (logs or {}).get("loss", 0.0)
        if np.isfinite(loss):
            return
        head = self.model.head
        labels = ""
        if head.num_classes is not None:
            labels = (
                f"a label outside 0 to {head.num_classes - 1} (the head has "
                f"num_classes={head.num_classes}, ignore_class={head.ignore_class}); "
            )
        raise FloatingPointError(
            f"The loss is {float(loss)} at batch {batch}. Usual causes: {labels}NaN or infinity in "
            "the inputs, or inputs not scaled to about [0, 1]; a learning rate that is too high "
            "(try a tenth); float16 without loss scaling. The weights may be damaged: go on from "
            "the last good ones."
        )

    def on_epoch_end(self, epoch, logs=None):
        warn_of_clipped_norms(self.model.head)
        loss = (logs or {}).get("val_loss", 0.0)
        if not np.isfinite(loss):
            raise FloatingPointError(
                f"The val_loss is {float(loss)}: validation labels are not training classes, or "
                "the validation inputs hold NaN or infinity. To judge the embeddings of other "
                "identities use VerificationCallback."
            )
