"""The loss of a row from the three numbers that the pass over the classes gives."""

from keras import ops


def margin_loss(
    target_logit, log_b, total_logit, *, num_classes, label_smoothing=0.0, focal_gamma=0.0
):
    """Cross-entropy of margined logits z, with label smoothing and the focal factor.

        cross-entropy = softplus(log B - z_y)
        smoothed = cross-entropy + epsilon (z_y - mean(z))
        focal = (1 - p)^gamma smoothed,  p = sigmoid(z_y - log B)

    Args:
        target_logit: z_y (batch,), with the margin.
        log_b: (batch,), log of the sum of exp(z_k) over the other classes.
        total_logit: (batch,), the sum of z_k over the other classes.
        num_classes: C.
        label_smoothing: epsilon; the target keeps 1 - epsilon + epsilon / C of the mass.
        focal_gamma: gamma.

    Returns:
        (batch,).

    Reference:
        Szegedy et al., 2016, arXiv:1512.00567, section 7, for the smoothing; Lin et al., Focal
        Loss for Dense Object Detection, 2017, arXiv:1708.02002, eq. 4.
    """
    loss = ops.softplus(log_b - target_logit)
    if label_smoothing:
        # logsumexp(z) - (1 - epsilon) z_y - epsilon mean(z)
        mean = (target_logit + total_logit) / num_classes
        loss = loss + label_smoothing * (target_logit - mean)
    if focal_gamma:
        # 1 - p = sigmoid(log B - z_y), as a power without overflow.
        loss = loss * ops.exp(-focal_gamma * ops.softplus(target_logit - log_b))
    return loss
