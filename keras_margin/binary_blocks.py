"""SphereFace2's pass over the classes, block by block: a sum of softplus, not a logsumexp."""

import functools
from typing import NamedTuple

import keras
from keras import ops

from keras_margin.backend import custom_gradient
from keras_margin.class_blocks import Blocks, kept_products, largest_of, lift
from keras_margin.nontarget import choose_form, passes


class Curve(NamedTuple):
    """The logit of another class is scale (g(c) + margin) + bias."""

    scale: float
    power: float
    margin: float


class Others(NamedTuple):
    """One entry a row of the batch, (batch,) each. Gradients flow through target and total."""

    target: object  # the target's cosine
    total: object  # the sum of softplus(logit) over the other classes
    hardest: object  # the largest cosine of the other classes


def bend(cosines, power):
    """g(c) = 2 ((c + 1) / 2)^power - 1."""
    return 2.0 * _half(cosines) ** power - 1.0


def softplus_of_others(embeddings, centers, labels, bias, *, curve, **form):
    """`Others` of a batch, with gradients of embeddings, centers and bias.

    Args:
        embeddings: (batch, dim).
        centers: (num_classes * num_subcenters, dim), of the same dtype.
        labels: int32 (batch,), each in range.
        bias: scalar tensor.
        curve: `Curve`.
        **form: chunk_size, num_subcenters, normalize_centers and product_dtype, as in
            `class_statistics`.
    """
    form, is_large = choose_form(embeddings, centers, **form)
    inputs, values, gradients = ("b ", "c ", "b", ""), ("b", "b", "b"), ("b ", "c ", "")
    run_forward = passes(functools.partial(_forward, form, curve), is_large, inputs, (values, "bc"))
    run_backward = passes(
        functools.partial(_backward, form, curve), is_large, (*inputs, "bc", "b", "b"), gradients
    )

    @custom_gradient
    def others(embeddings, centers, bias):
        inputs = keras.tree.map_structure(ops.stop_gradient, (embeddings, centers, labels, bias))
        values, kept = run_forward(*inputs)

        def gradient(of_target, of_total, _):
            return run_backward(*inputs, kept, of_target, of_total)

        return values, gradient

    return Others(*others(embeddings, centers, bias))


def _forward(form, curve, embeddings, centers, labels, bias):
    kept = kept_products(form, embeddings, centers)
    blocks = Blocks(form, centers, labels, kept)

    def step(block, carry):
        total, hardest = carry
        cosines, _ = block.cosines(embeddings)
        terms = ops.where(block.is_left_out, 0.0, ops.softplus(_logits(curve, cosines, bias)))
        total = total + ops.sum(terms, axis=1)
        return total, ops.maximum(hardest, largest_of(cosines, block.is_left_out))

    target = blocks.target_cosines(embeddings)
    zeros = ops.zeros_like(target)
    total, hardest = blocks.each(step, (zeros, zeros - 3e38))
    shards = form.shards
    return (shards.sum(target), shards.sum(total), shards.max(hardest)), kept


def _backward(form, curve, embeddings, centers, labels, bias, kept, of_target, of_total):
    of_target, of_total = ops.expand_dims(of_target, 1), ops.expand_dims(of_total, 1)
    unit = lift(form, of_target, of_total * curve.scale * curve.power)
    blocks = Blocks(form, centers, labels, kept)

    def step(block, carry):
        of_embeddings, of_centers, of_bias = carry
        cosines, winners = block.cosines(embeddings)
        of_logits = of_total * ops.sigmoid(_logits(curve, cosines, bias))
        of_logits = ops.where(block.is_left_out, 0.0, of_logits)
        slope = curve.scale * curve.power * _half(cosines) ** (curve.power - 1.0)
        of_cosines = ops.where(block.is_left_out, block.at_target(of_target), of_logits * slope)
        of_embeddings, of_centers = block.add_gradients(
            of_cosines * unit, winners, embeddings, (of_embeddings, of_centers), unit
        )
        return of_embeddings, of_centers, of_bias + ops.sum(of_logits)

    zeros = ops.zeros_like(embeddings), ops.zeros_like(centers), ops.zeros_like(bias)
    of_embeddings, of_centers, of_bias = blocks.each(step, zeros)
    shards = form.shards
    of_bias = shards.sum_over_batch(shards.sum(of_bias))
    return shards.sum(of_embeddings), shards.sum_over_batch(of_centers), of_bias


def _logits(curve, cosines, bias):
    return curve.scale * (bend(cosines, curve.power) + curve.margin) + bias


def _half(cosines):
    # c can be a rounding step under -1, where the power of a negative number is NaN.
    return ops.maximum((cosines + 1.0) / 2.0, 0.0)
