"""The heads in NumPy float64, equation by equation from the papers, in the slowest clear way.

Nothing here is shared with keras_margin: tests compare the package with these functions. Notation:
x an embedding, w a class centre, c their cosine, theta their angle, m a margin, s a scale, z a
logit, y the label. Angles are in radians.

A head is a function `head(embeddings, centers, labels=None, state=None, **settings)` that returns
`(logits, state)`: without labels the plain logits and the state as it was, with labels one training
call. `HEADS` lists them by the package's names.

Every formula takes complex numbers too, because `numerical_gradient` differentiates by a complex
step. So comparisons look at the real part, and `.real` marks what a paper holds constant.
"""

import json
from pathlib import Path

import numpy as np

# Papers: NormFace arXiv 1704.06369, L-Softmax 1612.02295, SphereFace 1704.08063, CosFace
# 1801.09414, AM-Softmax 1801.05599, ArcFace 1801.07698, AdaCos 1905.00292, CurricularFace
# 2004.00288, MagFace 2103.06627, AdaFace 2204.00964, sub-centre ArcFace (ECCV 2020), focal loss
# 1708.02002.


# Similarity


def norms(rows):
    return np.sqrt((rows * rows).sum(axis=1))  # no abs: the complex step goes through


def unit(rows):
    """Rows of length one. A zero row stays zero, so that it has cosine 0 with everything."""
    lengths = norms(rows)
    lengths[lengths.real == 0] = 1.0
    return rows / lengths[:, None]


def cosines(embeddings, centers, num_subcenters=1):
    """cos(theta_ij), the larger one of a class where it has several centres.

    Sub-centre ArcFace, section 3. The centres of a class are consecutive rows.
    """
    cosine = unit(embeddings) @ unit(centers).T  # (batch, num_classes * num_subcenters)
    grouped = cosine.reshape(len(cosine), -1, num_subcenters)
    best = grouped.real.argmax(axis=2)  # (batch, num_classes)
    return np.take_along_axis(grouped, best[:, :, None], axis=2)[:, :, 0]


def angle(cosine):
    if abs(cosine.real) >= 1.0:  # rounding can leave [-1, 1]
        return 0.0 if cosine.real > 0 else np.pi
    return np.arccos(cosine)


def counted_rows(labels, ignore_class=None):
    """(row, label) of the rows that count: none without labels, no ignored row."""
    labels = [] if labels is None else labels
    return [(i, int(y)) for i, y in enumerate(labels) if y != ignore_class]


# Margins: what replaces the cosine of the target


def cosface_target(cosine, margin):
    return cosine - margin  # CosFace eq. 4; AM-Softmax has the same rule


def arcface_target(cosine, margin):
    """ArcFace eq. 3. Beyond pi, where cos(theta + m) would rise again, its code's fallback."""
    if angle(cosine).real + margin.real > np.pi:
        return cosine - margin * np.sin(margin)
    return np.cos(angle(cosine) + margin)


def arcface_slope(cosine, margin):
    """d arcface_target / d cosine = sin(theta + m) / sin(theta).

    At theta = 0 the target has a peak and no derivative: 0 is the mean over the directions.
    """
    theta = angle(cosine)
    if theta + margin > np.pi:
        return 1.0
    if theta == 0:
        return 0.0
    return np.sin(theta + margin) / np.sin(theta)


def sphereface_target(cosine, margin):
    """psi(theta) = (-1)^k cos(m theta) - 2k, k = floor(m theta / pi): SphereFace eq. 7."""
    return combined_target(cosine, margin, 0.0, 0.0)


def combined_target(cosine, multiplicative, angular, additive):
    """cos(m1 theta + m2) - m3, ArcFace eq. 4, continued beyond pi as psi is."""
    if multiplicative == 1.0 and additive == 0.0:
        return arcface_target(cosine, angular)
    phi = multiplicative * angle(cosine) + angular
    k = np.floor(phi.real / np.pi)
    return (-1.0) ** k * np.cos(phi) - 2.0 * k - additive


def annealed_target(cosine, margined, weight):
    """(lambda c + psi) / (1 + lambda): L-Softmax, section 4."""
    return (weight * cosine + margined) / (1.0 + weight)


def annealing_weight(iteration, base, gamma, power, floor):
    """lambda of the `iteration`-th training call, counted from 1: SphereFace's released code."""
    return max(floor, base * (1.0 + gamma * iteration) ** -power)


def adaface_target(cosine, margin, scaler, bound=1e-3):
    """AdaFace, section 3.3: cos(theta + g_angle) - g_add, the angle kept within [0, pi]."""
    g_angle = -margin * scaler
    g_add = margin * scaler + margin
    theta = angle(cosine) + g_angle
    if theta.real < bound:
        theta = bound
    elif theta.real > np.pi - bound:
        theta = np.pi - bound
    return np.cos(theta) - g_add


def curricularface_negative(cosine, margined_target, t):
    """CurricularFace's N(t, c): the cosine of a hard negative, one above cos(theta_y + m)."""
    return cosine * (t + cosine) if cosine.real > margined_target.real else cosine


def magface_length(norm, norm_range):
    """The length a of an embedding, kept within [l_a, u_a]."""
    low, high = norm_range
    return low if norm.real < low else high if norm.real > high else norm


def magface_margin(length, norm_range, margin_range):
    """m(a): linear from (l_a, l_m) to (u_a, u_m)."""
    (low, high), (smallest, largest) = norm_range, margin_range
    return (largest - smallest) / (high - low) * (length - low) + smallest


# Softmax


def softmax(logits):
    """Of one row."""
    powers = np.exp(logits - logits.real.max())
    return powers / powers.sum()


def softmax_loss(logits, labels, ignore_class=None, focal_gamma=0.0):
    """-log p_y per row, times (1 - p_y)^gamma: focal loss eq. 4. Ignored rows have loss 0."""
    loss = np.zeros(len(logits), logits.dtype)
    for i, y in counted_rows(labels, ignore_class):
        highest = logits[i].real.max()
        log_sum = highest + np.log(np.exp(logits[i] - highest).sum())
        entropy = log_sum - logits[i, y]
        loss[i] = entropy if focal_gamma == 0 else (1.0 - np.exp(-entropy)) ** focal_gamma * entropy
    return loss


# State


def fixed_adacos_scale(num_classes):
    return np.sqrt(2.0) * np.log(num_classes - 1.0)  # AdaCos, section 4.1


def adacos_scale(cosine, labels, scale, ignore_class=None, min_scale=0.1, max_scale=None):
    """The scale after one training call whose scale was `scale`: AdaCos, section 4.2.

    B averages over the batch the sum of exp(s cos) over the classes other than the target; s is the
    one of the call before. The median is that of the target angles.
    """
    rows = counted_rows(labels, ignore_class)
    if not rows:
        return scale
    cosine = cosine.real  # no gradient through the scale
    num_classes = cosine.shape[1]
    terms = [scale * cosine[i, k] for i, y in rows for k in range(num_classes) if k != y]
    log_average = max(terms) + np.log(sum(np.exp(t - max(terms)) for t in terms) / len(rows))
    median = np.median([angle(cosine[i, y]) for i, y in rows])
    new_scale = log_average / np.cos(min(np.pi / 4, median))
    if max_scale is None:
        max_scale = 4.0 * fixed_adacos_scale(num_classes)
    return min(max(new_scale, min_scale), max_scale)


def curricularface_t(cosine, labels, t, momentum, ignore_class=None):
    """Moving average of the target cosines, without margin."""
    targets = [cosine[i, y].real for i, y in counted_rows(labels, ignore_class)]
    return momentum * np.mean(targets) + (1.0 - momentum) * t if targets else t


def adaface_statistics(lengths, state, momentum):
    """Moving mean and sample standard deviation (0 for one row) of the embeddings' lengths."""
    if len(lengths) == 0:
        return state
    spread = np.std(lengths, ddof=1) if len(lengths) > 1 else 0.0
    return {
        "mu": momentum * np.mean(lengths) + (1.0 - momentum) * state["mu"],
        "sigma": momentum * spread + (1.0 - momentum) * state["sigma"],
    }


# Heads


def normface(
    embeddings,
    centers,
    labels=None,
    state=None,
    *,
    scale=64.0,
    num_subcenters=1,
    ignore_class=None,
):
    """z = s cos(theta)."""
    return scale * cosines(embeddings, centers, num_subcenters), state


def cosface(
    embeddings,
    centers,
    labels=None,
    state=None,
    *,
    margin=0.35,
    scale=64.0,
    num_subcenters=1,
    ignore_class=None,
):
    cosine = cosines(embeddings, centers, num_subcenters)
    logits = scale * cosine
    for i, y in counted_rows(labels, ignore_class):
        logits[i, y] = scale * cosface_target(cosine[i, y], margin)
    return logits, state


def amsoftmax(embeddings, centers, labels=None, state=None, *, scale=30.0, **settings):
    """CosFace with another default scale."""
    return cosface(embeddings, centers, labels, state, scale=scale, **settings)


def arcface(
    embeddings,
    centers,
    labels=None,
    state=None,
    *,
    margin=0.5,
    scale=64.0,
    num_subcenters=1,
    ignore_class=None,
):
    cosine = cosines(embeddings, centers, num_subcenters)
    logits = scale * cosine
    for i, y in counted_rows(labels, ignore_class):
        logits[i, y] = scale * arcface_target(cosine[i, y], margin)
    return logits, state


def adacos(
    embeddings,
    centers,
    labels=None,
    state=None,
    *,
    dynamic=True,
    min_scale=0.1,
    max_scale=None,
    num_subcenters=1,
    ignore_class=None,
):
    """z = s cos(theta) with the scale of this very call. State: scale."""
    cosine = cosines(embeddings, centers, num_subcenters)
    scale = state["scale"] if state else fixed_adacos_scale(cosine.shape[1])
    if dynamic:
        scale = adacos_scale(cosine, labels, scale, ignore_class, min_scale, max_scale)
    return scale * cosine, {"scale": scale}


def combined_margin(
    embeddings,
    centers,
    labels=None,
    state=None,
    *,
    multiplicative=1.0,
    angular=0.0,
    additive=0.0,
    scale=64.0,
    num_subcenters=1,
    ignore_class=None,
):
    cosine = cosines(embeddings, centers, num_subcenters)
    logits = scale * cosine
    for i, y in counted_rows(labels, ignore_class):
        logits[i, y] = scale * combined_target(cosine[i, y], multiplicative, angular, additive)
    return logits, state


def softmax_head(embeddings, centers, labels=None, state=None, *, ignore_class=None):
    """z = w . x."""
    return embeddings @ centers.T, state


def lsoftmax(
    embeddings,
    centers,
    labels=None,
    state=None,
    *,
    margin=4,
    lambda_base=1000.0,
    lambda_gamma=2.5e-5,
    lambda_power=35.0,
    lambda_min=0.0,
    ignore_class=None,
):
    """z = |w| |x| cos(theta), |w| |x| psi(theta) for the target: L-Softmax eq. 4."""
    lengths = np.outer(norms(embeddings), norms(centers))  # (batch, num_classes)
    annealing = (lambda_base, lambda_gamma, lambda_power, lambda_min)
    cosine = cosines(embeddings, centers)
    return _multiplicative(cosine, lengths, labels, state, margin, annealing, ignore_class)


def sphereface(
    embeddings,
    centers,
    labels=None,
    state=None,
    *,
    margin=4,
    lambda_base=1000.0,
    lambda_gamma=0.12,
    lambda_power=1.0,
    lambda_min=5.0,
    num_subcenters=1,
    ignore_class=None,
):
    """z = |x| cos(theta), |x| psi(theta) for the target: SphereFace eq. 7."""
    cosine = cosines(embeddings, centers, num_subcenters)
    lengths = np.outer(norms(embeddings), np.ones(cosine.shape[1]))  # (batch, num_classes)
    annealing = (lambda_base, lambda_gamma, lambda_power, lambda_min)
    return _multiplicative(cosine, lengths, labels, state, margin, annealing, ignore_class)


def _multiplicative(cosine, lengths, labels, state, margin, annealing, ignore_class):
    """State: iteration, and the lambda that it gave."""
    iteration = state["iteration"] if state else 0
    rows = counted_rows(labels, ignore_class)
    iteration += 1 if rows else 0
    weight = annealing_weight(iteration, *annealing)
    logits = lengths * cosine
    for i, y in rows:
        margined = sphereface_target(cosine[i, y], margin)
        logits[i, y] = lengths[i, y] * annealed_target(cosine[i, y], margined, weight)
    return logits, {"iteration": iteration, "lambda": weight}


def curricularface(
    embeddings,
    centers,
    labels=None,
    state=None,
    *,
    margin=0.5,
    scale=64.0,
    momentum=0.01,
    num_subcenters=1,
    ignore_class=None,
):
    """ArcFace's target; hard negatives c become c (t + c), t updated first. State: t."""
    cosine = cosines(embeddings, centers, num_subcenters)
    t = curricularface_t(cosine, labels, state["t"] if state else 0.0, momentum, ignore_class)
    logits = scale * cosine
    for i, y in counted_rows(labels, ignore_class):
        threshold = np.cos(angle(cosine[i, y]) + margin)  # without the fallback
        for j in range(cosine.shape[1]):
            logits[i, j] = scale * curricularface_negative(cosine[i, j], threshold, t)
        logits[i, y] = scale * arcface_target(cosine[i, y], margin)
    return logits, {"t": t}


def adaface(
    embeddings,
    centers,
    labels=None,
    state=None,
    *,
    margin=0.4,
    scale=64.0,
    h=0.333,
    momentum=0.01,
    num_subcenters=1,
    ignore_class=None,
):
    """A margin that depends on the length, which is held constant. State: mu and sigma."""
    cosine = cosines(embeddings, centers, num_subcenters)
    lengths = np.clip(norms(embeddings).real, 1e-3, 100.0)  # (batch,)
    rows = counted_rows(labels, ignore_class)
    state = state or {"mu": 20.0, "sigma": 100.0}
    state = adaface_statistics([lengths[i] for i, _ in rows], state, momentum)
    logits = scale * cosine
    for i, y in rows:
        scaler = np.clip(h * (lengths[i] - state["mu"]) / (state["sigma"] + 1e-3), -1.0, 1.0)
        logits[i, y] = scale * adaface_target(cosine[i, y], margin, scaler)
    return logits, state


def magface(
    embeddings,
    centers,
    labels=None,
    state=None,
    *,
    scale=64.0,
    norm_range=(10.0, 110.0),
    margin_range=(0.45, 0.8),
    regularizer_weight=35.0,
    num_subcenters=1,
    ignore_class=None,
):
    """ArcFace with each embedding's own margin m(a). `magface_regularizer` goes with its loss."""
    cosine = cosines(embeddings, centers, num_subcenters)
    logits = scale * cosine
    for i, y in counted_rows(labels, ignore_class):
        length = magface_length(norms(embeddings)[i], norm_range)
        margin = magface_margin(length, norm_range, margin_range)
        logits[i, y] = scale * arcface_target(cosine[i, y], margin)
    return logits, state


def magface_regularizer(
    embeddings, labels, *, norm_range=(10.0, 110.0), regularizer_weight=35.0, ignore_class=None
):
    """lambda_g g(a), g(a) = a / u_a^2 + 1 / a, per row."""
    regularizer = np.zeros(len(embeddings), embeddings.dtype)
    for i, _ in counted_rows(labels, ignore_class):
        length = magface_length(norms(embeddings)[i], norm_range)
        regularizer[i] = regularizer_weight * (length / norm_range[1] ** 2 + 1.0 / length)
    return regularizer


HEADS = {
    "NormFace": normface,
    "CosFace": cosface,
    "AMSoftmax": amsoftmax,
    "ArcFace": arcface,
    "AdaCos": adacos,
    "CombinedMargin": combined_margin,
    "SoftmaxHead": softmax_head,
    "LSoftmax": lsoftmax,
    "SphereFace": sphereface,
    "CurricularFace": curricularface,
    "AdaFace": adaface,
    "MagFace": magface,
}


# Gradients of sum(loss) / batch with respect to the embeddings and the centres


def numerical_gradient(function, point, step=1e-30):
    """Gradient of a real-valued `function` of an array: Im f(x + ih) / h, exact to rounding."""
    gradient = np.zeros(point.shape)
    for index in np.ndindex(point.shape):
        moved = point.astype(complex)
        moved[index] += 1j * step
        gradient[index] = function(moved).imag / step
    return gradient


def gradients(loss, embeddings, centers):
    """Gradients of mean(loss(embeddings, centers)), for any head, by complex steps."""
    of_embeddings = numerical_gradient(lambda x: np.mean(loss(x, centers)), embeddings)
    of_centers = numerical_gradient(lambda w: np.mean(loss(embeddings, w)), centers)
    return of_embeddings, of_centers


def analytic_gradients(embeddings, centers, labels, logits, scale, slope, ignore_class=None):
    """The same from the chain rule, for heads with z_ij = s c_ij and z_iy = s f(c_iy).

    `logits` are the head's, with the margin; `slope(c)` is f'(c): 1 for NormFace, CosFace and
    AdaCos, `arcface_slope` for ArcFace. A zero vector gets gradient 0.
    """
    x_norm, w_norm = norms(embeddings), norms(centers)
    x_unit, w_unit = unit(embeddings), unit(centers)
    of_embeddings, of_centers = np.zeros(embeddings.shape), np.zeros(centers.shape)
    for i, y in counted_rows(labels, ignore_class):
        probability = softmax(logits[i])  # (num_classes,)
        for j in range(len(centers)):
            c = x_unit[i] @ w_unit[j]
            by_z = (probability[j] - (j == y)) / len(embeddings)
            by_c = by_z * scale * (slope(c) if j == y else 1.0)
            if x_norm[i] > 0:
                of_embeddings[i] += by_c * (w_unit[j] - c * x_unit[i]) / x_norm[i]
            if w_norm[j] > 0:
                of_centers[j] += by_c * (x_unit[i] - c * w_unit[j]) / w_norm[j]
    return of_embeddings, of_centers


# The recorded values, described in golden_values/README.md


GOLDEN_VALUES = Path(__file__).parent / "golden_values"


def golden_cases(name):
    path = GOLDEN_VALUES / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8"))


def assert_golden(got, want, rtol, atol):
    """`got` is finite, and within atol + rtol |want| of `want` wherever that is not None."""
    got = np.asarray(got)
    assert np.isfinite(got).all()
    if want is None:
        return
    assert len(got) == len(want)
    for value, expected in zip(got, want, strict=True):
        if expected is not None:
            np.testing.assert_allclose(value, expected, rtol=rtol, atol=atol)
