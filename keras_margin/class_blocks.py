"""One pass over the classes, block by block: the values, and their gradients by a second pass.

Forward keeps a running maximum and sum for each row of the batch; backward multiplies each block
again, so nothing of size (batch, num_classes) is held, or uses the cosines that forward has kept.
Blocks that stay in the processor's cache are faster than one large one in either case.
"""

from typing import NamedTuple

from keras import ops

from keras_margin.backend import product
from keras_margin.numerics import inverse_norms
from keras_margin.shards import ALONE

_LOWEST = -3e38  # below any cosine; -inf would give inf - inf


class Form(NamedTuple):
    """What is fixed when a pass is compiled."""

    size: int  # classes a block
    keeps_cosines: bool  # for backward, which multiplies each block again where it is false
    num_subcenters: int = 1
    normalize_centers: bool = True
    has_curriculum: bool = False
    wants_total: bool = False
    wants_scale_gradient: bool = True
    product_dtype: str = "float32"  # of what is multiplied; sums are of the embeddings' dtype
    shards: object = ALONE  # where the classes lie; what follows runs on each device


class Curriculum(NamedTuple):
    """CurricularFace's rule for the other classes: c becomes c (t + c) where c > threshold."""

    thresholds: object  # (batch,)
    t: object  # scalar


class Residuals(NamedTuple):
    """What backward needs of forward."""

    log_b: object  # (batch,)
    kept: object  # of `kept_products`


def forward(form, embeddings, centers, labels, scale, curriculum):
    """The running statistics over all blocks.

    Args:
        form: `Form`.
        embeddings: (batch, dim).
        centers: (num_classes * num_subcenters, dim).
        labels: int32 (batch,), each in range.
        scale: (batch,), not negative.
        curriculum: `Curriculum`, used where the form says so.

    Returns:
        (target, log_b, total, hardest), each (batch,), and `Residuals`.
    """
    kept = kept_products(form, embeddings, centers)
    blocks = Blocks(form, centers, labels, kept)

    def step(block, carry):
        peak, mass, hardest, total = carry
        cosines, _ = block.cosines(embeddings)
        others, _ = harden(cosines, curriculum if form.has_curriculum else None)
        new_peak = ops.maximum(peak, largest_of(others, block.is_left_out))
        terms = ops.exp(_column(scale) * (others - _column(new_peak)))
        terms = ops.where(block.is_left_out, 0.0, terms)
        mass = mass * ops.exp(scale * (peak - new_peak)) + ops.sum(terms, axis=1)
        if form.has_curriculum:
            hardest = ops.maximum(hardest, largest_of(cosines, block.is_left_out))
        if form.wants_total:
            total = total + ops.sum(ops.where(block.is_left_out, 0.0, others), axis=1)
        return new_peak, mass, hardest, total

    zeros = ops.zeros_like(scale)
    lowest = zeros + _LOWEST
    peak, mass, hardest, total = blocks.each(step, (lowest, zeros, lowest, zeros))
    hardest = hardest if form.has_curriculum else peak
    shards, peak_here = form.shards, peak
    peak = shards.max(peak)
    mass = shards.sum(mass * ops.exp(scale * (peak_here - peak)))
    log_b = scale * peak + ops.log(mass)
    target = shards.sum(blocks.target_cosines(embeddings))
    return (target, log_b, shards.sum(total), shards.max(hardest)), Residuals(log_b, kept)


def backward(form, embeddings, centers, labels, scale, curriculum, residuals, upstream):
    """The gradients, from those of (target, log_b, total).

    Returns:
        Of embeddings (batch, dim), centers (rows, dim) and scale (batch,).
    """
    log_b, column = _column(residuals.log_b), _column(scale)
    of_target, of_log_b, of_total = (_column(of) for of in upstream)
    of_scale_factor = of_log_b[:, 0]
    unit = lift(form, of_target, of_log_b * column, of_total)
    of_target, of_log_b, of_total = (of * unit for of in (of_target, of_log_b, of_total))
    blocks = Blocks(form, centers, labels, residuals.kept)

    def step(block, carry):
        of_embeddings, of_centers, of_scale = carry
        cosines, winners = block.cosines(embeddings)
        others, slopes = harden(cosines, curriculum if form.has_curriculum else None)
        # d log_b / d logit_k = exp(logit_k - log_b), the share of class k in the mass.
        shares = ops.exp(column * others - log_b)
        of_others = shares * (of_log_b * column)
        if form.wants_total:
            of_others = of_others + of_total
        of_cosines = ops.where(block.is_left_out, block.at_target(of_target), of_others * slopes)
        of_embeddings, of_centers = block.add_gradients(
            of_cosines, winners, embeddings, (of_embeddings, of_centers), unit
        )
        if form.wants_scale_gradient:
            along = ops.sum(ops.where(block.is_left_out, 0.0, shares * others), axis=1)
            of_scale = of_scale + of_scale_factor * along
        return of_embeddings, of_centers, of_scale

    zeros = ops.zeros_like(embeddings), ops.zeros_like(centers), ops.zeros_like(scale)
    of_embeddings, of_centers, of_scale = blocks.each(step, zeros)
    shards = form.shards
    return shards.sum(of_embeddings), shards.sum_over_batch(of_centers), shards.sum(of_scale)


class Blocks:
    """The classes, block by block.

    Args:
        form: `Form`.
        centers: (num_classes * num_subcenters, dim).
        labels: int32 (batch,).
        kept: (batch, num_classes * num_subcenters), of `kept_products`.
    """

    def __init__(self, form, centers, labels, kept):
        self.form = form
        self.centers = centers
        self.kept = kept
        rows = centers.shape[0]  # None for a sample for a batch of unknown size
        self.num_classes = None if rows is None else rows // form.num_subcenters
        self.labels = form.shards.labels_here(labels, self.num_classes)

    def each(self, step, carry):
        """`step(block, carry)` for every block, one after the other."""
        if self.num_classes is None:
            return step(_Block(self, 0, None), carry)
        size = min(self.form.size, self.num_classes)
        number, rest = divmod(self.num_classes, size)
        if number == 1:
            carry = step(_Block(self, 0, size), carry)
        else:
            carry = ops.fori_loop(
                0, number, lambda k, carry: step(_Block(self, k * size, size), carry), carry
            )
        return step(_Block(self, number * size, rest), carry) if rest else carry

    def target_cosines(self, embeddings):
        """(batch,); 0 where another device has the class."""
        labels, is_elsewhere = self.labels, None
        if self.form.shards is not ALONE:
            is_elsewhere = (labels < 0) | (labels >= self.num_classes)
            labels = ops.where(is_elsewhere, 0, labels)
        cosines = target_cosines(
            embeddings,
            self.centers,
            labels,
            normalize_centers=self.form.normalize_centers,
            num_subcenters=self.form.num_subcenters,
        )
        return cosines if is_elsewhere is None else ops.where(is_elsewhere, 0.0, cosines)


class _Block:
    """The classes start ... start + size - 1; start may be a tensor, size None means all."""

    def __init__(self, blocks, start, size):
        form = self._form = blocks.form
        self._kept = blocks.kept
        self._is_all = size == blocks.num_classes
        centers = blocks.centers
        if size is None:
            size = ops.shape(centers)[0] // form.num_subcenters
        self._start, self._rows = start * form.num_subcenters, size * form.num_subcenters
        if not self._is_all:
            centers = ops.slice(centers, (self._start, 0), (self._rows, centers.shape[1]))
        self._inverse = inverse_norms(centers) if form.normalize_centers else None
        self._directions = centers if self._inverse is None else centers * _column(self._inverse)
        # bool (batch, size)
        self.is_target = _column(blocks.labels) - start == ops.arange(size, dtype="int32")
        padding = form.shards.is_padding(start, size, blocks.num_classes)
        self._has_padding = padding is not None
        self.is_left_out = self.is_target | padding if self._has_padding else self.is_target

    def at_target(self, values):
        """The values (batch, 1) where the classes are left out that are targets, 0 for padding."""
        return ops.where(self.is_target, values, 0.0) if self._has_padding else values

    def cosines(self, embeddings):
        """(batch, size), and which sub-centres they are of, see `best_subcenters`."""
        if not self._form.keeps_cosines:
            rows = self._product(embeddings, ops.transpose(self._directions))
        else:
            rows = self._kept
            if not self._is_all:
                rows = ops.slice(rows, (0, self._start), (ops.shape(rows)[0], self._rows))
            rows = rows if self._inverse is None else rows * self._inverse
        return best_subcenters(rows, self._form.num_subcenters)

    def add_gradients(self, of_cosines, winners, embeddings, gradients, unit):
        """The gradients of embeddings and centres with this block's part, from its cosines'.

        Args:
            of_cosines: (batch, size), multiplied by `unit`, see `lift`.
            winners: of `cosines`.
            embeddings: (batch, dim).
            gradients: (of embeddings, of centers) so far.
            unit: number.
        """
        of_embeddings, of_centers = gradients
        of_rows = of_cosines if winners is None else _to_rows(of_cosines, winners)
        of_embeddings = of_embeddings + self._product(of_rows, self._directions) / unit
        part = self._product(ops.transpose(of_rows), embeddings) / unit  # of the directions
        if self._inverse is not None:
            # d cos / d w = (x - cos w / |w|) / |w|
            along = ops.sum(part * self._directions, axis=1)
            part = (part - _column(along) * self._directions) * _column(self._inverse)
        if self._is_all:
            return of_embeddings, part
        return of_embeddings, ops.slice_update(of_centers, (self._start, 0), part)

    def _product(self, one, other):
        return product(one, other, self._form.product_dtype)


def kept_products(form, embeddings, centers):
    """Of all embeddings with all centres, where the form keeps them; else nothing."""
    if form.keeps_cosines:
        return product(embeddings, ops.transpose(centers), form.product_dtype)
    return ops.zeros_like(embeddings[:0])


def lift(form, *upstream):
    """What the gradients are multiplied by on their way through the products.

    float16 ends at 6e-8, and a class of 10^5 has a share of the gradient far below that.
    """
    if form.product_dtype != "float16":
        return 1.0
    largest = ops.max(ops.abs(ops.concatenate(upstream, axis=1)), initial=0.0)
    return 2.0**14 / ops.where(largest > 0.0, largest, 1.0)


def harden(cosines, curriculum):
    """The cosines of the other classes as they enter the logits, and d of them / d cosine.

    Args:
        cosines: (batch, num_classes).
        curriculum: a `Curriculum`; None leaves them as they are.

    Returns:
        Two tensors (batch, num_classes); the second is the number 1.0 without a curriculum.
    """
    if curriculum is None:
        return cosines, 1.0
    is_hard = cosines > _column(curriculum.thresholds)
    hardened = ops.where(is_hard, cosines * (curriculum.t + cosines), cosines)
    return hardened, ops.where(is_hard, curriculum.t + 2.0 * cosines, ops.ones_like(cosines))


def target_cosines(embeddings, centers, labels, *, normalize_centers=True, num_subcenters=1):
    """The target's cosine (batch,) alone: a product with one class a row. No gradient flows."""
    rows = _column(labels * num_subcenters) + ops.arange(num_subcenters, dtype="int32")
    own = ops.stop_gradient(ops.take(centers, rows, axis=0))  # (batch, num_subcenters, dim)
    cosines = ops.sum(ops.expand_dims(ops.stop_gradient(embeddings), 1) * own, axis=2)
    if normalize_centers:
        cosines = cosines * inverse_norms(own)
    return _max(cosines, axis=1)


def best_subcenters(rows, num_subcenters):
    """The largest cosine of each class, and which row has it (None where a class has one row)."""
    if num_subcenters == 1:
        return rows, None
    grouped = ops.reshape(rows, (-1, ops.shape(rows)[1] // num_subcenters, num_subcenters))
    winners = ops.one_hot(ops.argmax(grouped, axis=2), num_subcenters, dtype=rows.dtype)
    return _max(grouped, axis=2), winners  # (batch, num_classes), (batch, num_classes, k)


def _to_rows(of_cosines, winners):
    """The gradient of a class goes to the row that won."""
    of_rows = ops.expand_dims(of_cosines, 2) * winners
    return ops.reshape(of_rows, (-1, ops.shape(winners)[1] * ops.shape(winners)[2]))


def largest_of(values, is_left_out):
    """The largest of the other classes, (batch,)."""
    return _max(ops.where(is_left_out, _LOWEST, values), axis=1)


def _max(values, axis):
    # `initial`: without it Keras checks at run time that there is something to compare.
    return ops.max(values, axis=axis, initial=-float("inf"))


def _column(vector):
    return ops.expand_dims(vector, 1)
