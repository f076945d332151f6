"""What a margin softmax needs of the classes: one pass over them, with a custom gradient.

    target_i = cos(theta_iy)
    log B_i = log sum_{k != y} exp(s cos(theta_ik))         AdaCos eq. 7
    hardest_i = max_{k != y} cos(theta_ik)

Autodiff would hold several (batch, num_classes) tensors; the custom gradient holds one block of
classes at a time, see `class_blocks.py`. The centres are never copied normalised: 1 / |w| is kept
per class.
"""

import functools
from numbers import Real
from typing import NamedTuple

import keras
from keras import ops

from keras_margin.backend import compiled, custom_gradient, read
from keras_margin.checks import check_rows, checked_count, checked_number
from keras_margin.class_blocks import Curriculum, Form, Residuals, backward, forward
from keras_margin.labels import class_ids
from keras_margin.numerics import computation_dtype
from keras_margin.shards import ALONE

# Measured on two cores, see benchmarks/. Entries of (batch, classes):
KEEP = 2**25  # up to here the cosines are kept, 128 MB
BLOCK = 2**22  # of a block that stays in the cache
COMPILE_FROM = 4096  # classes; below, compiling takes longer than it saves


def nontarget_logsumexp(
    embeddings,
    centers,
    labels,
    scale=1.0,
    *,
    normalize_centers=True,
    num_subcenters=1,
    chunk_size=None,
):
    """log of the non-target mass, and the largest non-target cosine.

        log_b_i = log sum_{k != y_i} exp(scale * <x_i, w_k> / |w_k|)

    With sub-centres a class counts with the largest of its `num_subcenters` rows.

    Args:
        embeddings: float (batch, dim), taken as they are: normalise them first for cosines.
        centers: float (num_classes * num_subcenters, dim), the rows of a class together.
        labels: integer (batch,); a label out of range gives NaN in its row.
        scale: number, scalar tensor or (batch,); not negative.
        normalize_centers: False leaves out the division by |w_k|.
        num_subcenters: rows per class.
        chunk_size: classes a block. Backward multiplies each block again: a fourth product in place
            of the memory of (batch, num_classes). From num_classes up the cosines are kept. None:
            they are kept while they are small (2^25, 128 MB).

    Returns:
        `log_b` (batch,) and `max_cosine` (batch,). Gradients flow through `log_b` into embeddings,
        centers and scale, none through `max_cosine`.

    Example:

    >>> x, w = keras.ops.eye(2), keras.ops.eye(2)
    >>> log_b, hardest = nontarget_logsumexp(x, w, keras.ops.array([0, 1]), scale=64.0)
    >>> [float(v) for v in log_b]  # one other class, at cosine 0
    [0.0, 0.0]

    Reference:
        Zhang et al., AdaCos, 2019, arXiv:1905.00292, eq. 7.
    """
    embeddings, centers = read(embeddings), read(centers)
    for name, tensor in (("embeddings", embeddings), ("centers", centers)):
        if len(tensor.shape) != 2 or "complex" in keras.backend.standardize_dtype(tensor.dtype):
            raise ValueError(
                f"`{name}` must be a matrix of real numbers. Received: "
                f"{name}.shape={tuple(tensor.shape)}, {name}.dtype={tensor.dtype}"
            )
    if not isinstance(normalize_centers, bool):
        raise TypeError(
            "`normalize_centers` must be True or False. Received: "
            f"normalize_centers={normalize_centers!r}"
        )
    dtype = computation_dtype(keras.backend.standardize_dtype(embeddings.dtype))
    embeddings, centers = ops.cast(embeddings, dtype), ops.cast(centers, dtype)
    num_subcenters = checked_count("num_subcenters", num_subcenters, smallest=1)
    if centers.shape[0] % num_subcenters:
        raise ValueError(
            "`centers` must have `num_subcenters` rows for each class. Received: "
            f"centers.shape={tuple(centers.shape)}, num_subcenters={num_subcenters}"
        )
    num_classes = checked_count(
        "the number of classes", centers.shape[0] // num_subcenters, smallest=2
    )
    found = class_ids(labels, num_classes, refuse=False)
    check_rows(embeddings, found.ids, centers.shape[1])
    statistics = class_statistics(
        embeddings,
        centers,
        found.ids,
        _checked_scale(scale, embeddings),
        normalize_centers=normalize_centers,
        num_subcenters=num_subcenters,
        chunk_size=checked_chunk_size(chunk_size),
    )
    nan = float("nan")
    return (
        ops.where(found.valid, statistics.log_b, nan),
        ops.where(found.valid, statistics.hardest, nan),
    )


class ClassStatistics(NamedTuple):
    """One entry a row of the batch, (batch,) each. Gradients flow through all but `hardest`."""

    target: object  # the target's cosine
    log_b: object  # log of the non-target mass
    total: object  # the sum of the non-target cosines, as they enter the logits; 0 if not wanted
    hardest: object  # the largest non-target cosine


def class_statistics(
    embeddings,
    centers,
    labels,
    scale,
    *,
    normalize_centers=True,
    num_subcenters=1,
    chunk_size=None,
    curriculum=None,
    wants_total=False,
    wants_scale_gradient=True,
    wants_gradient=True,
    product_dtype=None,
    shards=ALONE,
):
    """`nontarget_logsumexp`, and what else the same pass can say.

    Args:
        embeddings, centers: of one dtype.
        labels: int32 (batch,), each in range.
        scale, normalize_centers, num_subcenters, chunk_size: as in `nontarget_logsumexp`.
        curriculum: a `Curriculum` for the non-target cosines, or None.
        wants_total, wants_scale_gradient: False saves the work.
        wants_gradient: False keeps nothing for a backward pass.
        product_dtype: of the entries that large products multiply; None: the embeddings'.
        shards: `Shards` of the centres.

    Returns:
        `ClassStatistics`.
    """
    form, is_large = choose_form(
        embeddings,
        centers,
        chunk_size=chunk_size,
        num_subcenters=num_subcenters,
        normalize_centers=normalize_centers,
        product_dtype=product_dtype,
        has_curriculum=curriculum is not None,
        wants_total=wants_total,
        wants_scale_gradient=wants_scale_gradient,
        wants_gradient=wants_gradient,
        shards=shards,
    )
    inputs, residuals = ("b ", "c ", "b", "b", Curriculum("b", "")), Residuals("b", "bc")
    run_forward = passes(
        functools.partial(forward, form), is_large, inputs, (("b",) * 4, residuals)
    )
    run_backward = passes(
        functools.partial(backward, form),
        is_large,
        (*inputs, residuals, ("b",) * 3),
        ("b ", "c ", "b"),
    )
    scale = ops.convert_to_tensor(scale, dtype=embeddings.dtype)
    scale = ops.broadcast_to(scale, ops.shape(embeddings)[:1])  # (batch,)
    if curriculum is None:
        # Not looked at. Nothing that is differentiated: JAX refuses it where it is not an argument.
        curriculum = Curriculum(
            ops.zeros_like(labels, dtype=scale.dtype), ops.zeros((), scale.dtype)
        )

    @custom_gradient
    def statistics(embeddings, centers, scale):
        # Stopped, since TensorFlow's tape would look into a compiled loop and fail.
        inputs = keras.tree.map_structure(
            ops.stop_gradient, (embeddings, centers, labels, scale, curriculum)
        )
        values, residuals = run_forward(*inputs)

        def gradient(of_target, of_log_b, of_total, _):
            return run_backward(*inputs, residuals, (of_target, of_log_b, of_total))

        return values, gradient

    return ClassStatistics(*statistics(embeddings, centers, scale))


def _checked_scale(scale, embeddings):
    """A tensor of the embeddings' dtype: a scalar or (batch,); NaN where it is negative."""
    if isinstance(scale, Real):
        return checked_number("scale", scale, 0.0)
    try:
        scale = ops.convert_to_tensor(scale, dtype=embeddings.dtype)
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"`scale` must be a number or a tensor. Received: scale={scale!r}"
        ) from error
    rows, given = embeddings.shape[0], tuple(scale.shape)
    if len(given) > 1 or (given and None not in (rows, given[0]) and given[0] != rows):
        raise ValueError(
            f"`scale` must be a scalar or (batch,). Received: scale.shape={given}, batch={rows}"
        )
    return ops.where(scale >= 0.0, scale, float("nan"))


def checked_chunk_size(chunk_size):
    """A whole number of at least 1, or None."""
    return None if chunk_size is None else checked_count("chunk_size", chunk_size, smallest=1)


def choose_form(
    embeddings,
    centers,
    *,
    chunk_size,
    num_subcenters,
    product_dtype,
    wants_gradient=True,
    shards=ALONE,
    **form,
):
    """The `Form` of a pass, and whether there are so many classes that it should be compiled."""
    rows = centers.shape[0] if shards is ALONE else shards.share(centers.shape[0])
    # A sample for a batch of unknown size has unknown size: it is one block, and may be large.
    num_classes = 2**31 if rows is None else rows // num_subcenters
    is_large = num_classes > COMPILE_FROM
    # Often not known while a step is being traced.
    batch = shards.batch_share(embeddings.shape[0] or 1024)
    keeps = batch * num_classes <= KEEP if chunk_size is None else chunk_size >= num_classes
    keeps = keeps or rows is None
    size = max(1024, BLOCK // batch) if is_large else num_classes
    if chunk_size is not None and not keeps:
        size = chunk_size
    size = -(-num_classes // -(-num_classes // size))  # as many blocks, of equal size
    if chunk_size is None and size < num_classes and size % 512 == 0:
        size += 16  # rows of 2 KB share few lines of the cache: backward took 1.25 times as long
    dtype = keras.backend.standardize_dtype(embeddings.dtype)
    chosen = Form(
        size=size,
        keeps_cosines=keeps and wants_gradient,
        num_subcenters=num_subcenters,
        product_dtype=product_dtype if product_dtype and is_large else dtype,
        shards=shards,
        **form,
    )
    return chosen, is_large


def passes(function, is_large, inputs, outputs):
    """A pass as it runs: where there are many classes compiled, once, not at each call.

    Args:
        function: `functools.partial` of a function and of what is fixed, the `Form` first.
        is_large: see `choose_form`.
        inputs, outputs: what devices share out, see `Shards.over_devices`.
    """
    form = function.args[0]
    if form.shards is not ALONE:
        return form.shards.over_devices(function, inputs, outputs)
    return _compiled(function.func, function.args) if is_large else function


@functools.cache
def _compiled(function, fixed):
    return compiled(functools.partial(function, *fixed))
