"""Warnings, once a head, of settings that their own papers say cannot work."""

import warnings
import weakref

from keras_margin.backend import read
from keras_margin.scales import FixedScale, scale_lower_bound

_warned_of_loss_options = weakref.WeakSet()
_warned_of_clipped_norms = weakref.WeakSet()


def warn_of_settings(head):
    """Called when a head is built."""
    policy = head.scale_policy
    if isinstance(policy, FixedScale) and isinstance(policy.value, float):
        bound = scale_lower_bound(head.num_classes, 0.5)
        is_softmax_of_cosines = head.normalize_embeddings and getattr(head, "is_softmax", True)
        if is_softmax_of_cosines and policy.value < bound:
            warnings.warn(
                f"With scale={policy.value:g} and {head.num_classes} classes no sample reaches a "
                "probability of 1/2, even on its own centre, so the loss never lets go. Give a "
                f"scale well above {bound:.1f}, see keras_margin.scales.scale_lower_bound and "
                "fixed_adacos_scale.",
                stacklevel=3,
            )
    lower, weight = magface_lower_bound(head), getattr(head, "regularizer_weight", None)
    if weight is not None and lower is not None and weight < lower:
        warnings.warn(
            f"With regularizer_weight={weight:g} MagFace's norms need not converge: its paper asks "
            f"for at least {lower:.1f} at these ranges and this scale.",
            stacklevel=3,
        )


def warn_of_loss_options(head):
    """Called when a head is asked for logits to train with."""
    options = {name: getattr(head, name) for name in ("focal_gamma", "label_smoothing")}
    options = {name: value for name, value in options.items() if value}
    if head.sample_rate < 1.0:
        options["sample_rate"] = head.sample_rate
    if options and head not in _warned_of_loss_options:
        _warned_of_loss_options.add(head)
        received = ", ".join(f"{name}={value}" for name, value in options.items())
        warnings.warn(
            f"Only `head.loss`, as in EmbeddingModel, applies {' and '.join(options)}; the logits "
            f"of a functional model do not have it. Received: {received}",
            stacklevel=3,
        )


def warn_of_clipped_norms(head):
    """Called after a training call in eager code, and by EmbeddingModel at the end of an epoch."""
    rule = getattr(head, "margin_rule", None)
    variable = getattr(rule, "clipped_share", None)
    if variable is None or head in _warned_of_clipped_norms:
        return
    share = float(read(variable))  # `float` refuses the variable of several replicas
    if share <= 0.5:
        return
    _warned_of_clipped_norms.add(head)
    low, high = rule.norm_limits
    warnings.warn(
        f"{share:.0%} of the last batch's embeddings have norms outside {low:g} to "
        f"{high:g}: {type(rule).__name__} sees one norm for all of them, so the margin no longer "
        "follows the image's quality. Bring the norms inside, for example with BatchNormalization "
        "at the end of the backbone (norms of about sqrt(dim)), or choose another `norm_range` "
        "where the head has one.",
        stacklevel=3,
    )


def magface_lower_bound(head):
    """s K u_a^2 l_a^2 / (u_a^2 - l_a^2), K = (u_m - l_m) / (u_a - l_a); the paper's condition."""
    ranges = getattr(head, "norm_range", None), getattr(head, "margin_range", None)
    scale = getattr(head.scale_policy, "value", None)
    if None in ranges or not isinstance(scale, float):
        return None
    (low, high), (least, most) = ranges
    slope = (most - least) / (high - low)
    return scale * slope * high**2 * low**2 / (high**2 - low**2)
