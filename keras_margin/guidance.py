"""Warnings, once a head, of settings that their own papers say cannot work."""

import warnings

from keras_margin.scales import FixedScale, scale_lower_bound


def warn_of_settings(head):
    """Called when a head is built."""
    policy = head.scale_policy
    if isinstance(policy, FixedScale) and isinstance(policy.value, float):
        bound = scale_lower_bound(head.num_classes, 0.9)
        if head.normalize_embeddings and policy.value < bound:
            warnings.warn(
                f"With scale={policy.value:g} and {head.num_classes} classes no sample can reach a "
                f"probability of 0.9, even on its own centre: the loss keeps pulling. Give a scale "
                f"of at least {bound:.1f} (keras_margin.scales.scale_lower_bound).",
                stacklevel=3,
            )
