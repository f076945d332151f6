"""One pass over the classes, block by block: the values, and their gradients by a second pass.

A block is `chunk_size` classes. Forward keeps a running maximum and sum for each row of the batch;
backward multiplies each block again, so nothing of size (batch, num_classes) is held. With a
single block its cosines are kept instead. The last block is moved back to end at the last class;
classes that it shares with the block before are counted once.
"""

from typing import NamedTuple

from keras import ops

from keras_margin.backend import product
from keras_margin.numerics import inverse_norms

_LOWEST = -3e38  # below any cosine; -inf would give inf - inf


class Form(NamedTuple):
    """What is fixed when a pass is compiled."""

    chunk_size: int  # classes a block; one block holds all where it is not less than their number
    num_subcenters: int = 1
    normalize_centers: bool = True
    has_curriculum: bool = False
    wants_total: bool = False
    wants_scale_gradient: bool = True
    product_dtype: str = "float32"  # of what is multiplied; sums are of the embeddings' dtype


class Curriculum(NamedTuple):
    """CurricularFace's rule for the other classes: c becomes c (t + c) where c > threshold."""

    thresholds: object  # (batch,)
    t: object  # scalar


class Residuals(NamedTuple):
    """What backward needs of forward."""

    inverse: object  # (rows,): 1 / |w|
    log_b: object  # (batch,)
    rows: object  # (batch, rows): the cosines, of a single block only


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
    inverse = inverses(form, centers)
    blocks = Blocks(form, centers, inverse, labels)

    def step(k, carry):
        peak, mass, hardest, total = carry
        block = blocks[k]
        cosines, _ = best_subcenters(block.rows_of(embeddings), form.num_subcenters)
        others, _ = harden(cosines, curriculum if form.has_curriculum else None)
        left_out = block.left_out
        new_peak = ops.maximum(peak, largest_of(others, left_out))
        terms = ops.exp(_column(scale) * (others - _column(new_peak)))
        terms = ops.where(left_out, 0.0, terms)
        mass = mass * ops.exp(scale * (peak - new_peak)) + ops.sum(terms, axis=1)
        if form.has_curriculum:
            hardest = ops.maximum(hardest, largest_of(cosines, left_out))
        if form.wants_total:
            total = total + ops.sum(ops.where(left_out, 0.0, others), axis=1)
        return new_peak, mass, hardest, total

    zeros = ops.zeros_like(scale)
    lowest = zeros + _LOWEST
    peak, mass, hardest, total = blocks.each(step, (lowest, zeros, lowest, zeros))
    log_b = scale * peak + ops.log(mass)
    target = blocks.target_cosines(embeddings)
    hardest = hardest if form.has_curriculum else peak
    return (target, log_b, total, hardest), Residuals(inverse, log_b, blocks.kept_rows(embeddings))


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
    blocks = Blocks(form, centers, residuals.inverse, labels)

    def step(k, carry):
        of_embeddings, of_centers, of_scale = carry
        block = blocks[k]
        cosines, winners = best_subcenters(
            block.rows_of(embeddings, residuals.rows), form.num_subcenters
        )
        others, slopes = harden(cosines, curriculum if form.has_curriculum else None)
        # d log_b / d logit_k = exp(logit_k - log_b), the share of class k in the mass.
        shares = ops.exp(column * others - log_b)
        of_others = shares * (of_log_b * column)
        if form.wants_total:
            of_others = of_others + of_total
        of_cosines = ops.where(block.is_target, of_target, of_others * slopes)
        of_embeddings, of_centers = block.add_gradients(
            of_cosines, winners, embeddings, (of_embeddings, of_centers), unit
        )
        if form.wants_scale_gradient:
            along = ops.sum(ops.where(block.left_out, 0.0, shares * others), axis=1)
            of_scale = of_scale + of_scale_factor * along
        return of_embeddings, of_centers, of_scale

    return blocks.each(
        step, (ops.zeros_like(embeddings), ops.zeros_like(centers), ops.zeros_like(scale))
    )


class Blocks:
    """The blocks of the classes; `blocks[k]` is the k-th."""

    def __init__(self, form, centers, inverse, labels):
        self.form = form
        self.centers = centers
        self.inverse = inverse
        self.labels = labels
        self.num_classes = centers.shape[0] // form.num_subcenters
        self.size = min(form.chunk_size, self.num_classes)
        self.number = -(-self.num_classes // self.size)
        self.overlap = self.num_classes % self.size > 0

    def __getitem__(self, k):
        return _Block(self, k)

    def target_cosines(self, embeddings):
        return target_cosines(
            embeddings,
            self.centers,
            self.labels,
            normalize_centers=self.form.normalize_centers,
            num_subcenters=self.form.num_subcenters,
        )

    def kept_rows(self, embeddings):
        """The cosines for `backward`, where a single block has them all; else nothing."""
        return self[0].rows_of(embeddings) if self.number == 1 else ops.zeros_like(embeddings[:0])

    def each(self, step, carry):
        """`step(k, carry)` for every block, one after the other."""
        if self.number == 1:
            return step(0, carry)
        return ops.fori_loop(0, self.number, step, carry)


class _Block:
    def __init__(self, blocks, k):
        self._blocks = blocks
        form = blocks.form
        if blocks.number == 1:
            self._start, centers, self._inverse = 0, blocks.centers, blocks.inverse
        else:
            start = ops.minimum(k * blocks.size, blocks.num_classes - blocks.size)
            self._start = start * form.num_subcenters
            rows = blocks.size * form.num_subcenters
            centers = ops.slice(blocks.centers, (self._start, 0), (rows, blocks.centers.shape[1]))
            self._inverse = ops.slice(blocks.inverse, (self._start,), (rows,))
        classes = ops.arange(blocks.size, dtype="int32")
        if blocks.number > 1:
            classes = classes + start
        # bool (size,): counted in the block before already. None where blocks do not overlap.
        self._repeated = classes < k * blocks.size if blocks.overlap else None
        self.is_target = _column(blocks.labels) == classes  # (batch, size)
        self.directions = centers
        if form.normalize_centers:
            self.directions = centers * _column(self._inverse)  # (size * num_subcenters, dim)

    def _product(self, one, other):
        return product(one, other, self._blocks.form.product_dtype)

    def rows_of(self, embeddings, kept=None):
        """(batch, size * num_subcenters): the cosines; those that were kept, if there are any."""
        if kept is not None and self._blocks.number == 1:
            return kept
        return self._product(embeddings, ops.transpose(self.directions))

    @property
    def left_out(self):
        """bool (batch, size): what is not one of the other classes, or was counted already."""
        if self._repeated is None:
            return self.is_target
        return self.is_target | self._repeated

    def add_gradients(self, of_cosines, winners, embeddings, gradients, unit):
        """The gradients of embeddings and centres with this block's part, from its cosines'.

        Args:
            of_cosines: (batch, size), multiplied by `unit`, see `lift`.
            winners: of `best_subcenters`.
            embeddings: (batch, dim).
            gradients: (of embeddings, of centers) so far.
            unit: number.
        """
        of_embeddings, of_centers = gradients
        if self._repeated is not None:
            of_cosines = ops.where(self._repeated, 0.0, of_cosines)
        of_rows = of_cosines if winners is None else _to_rows(of_cosines, winners)
        of_embeddings = of_embeddings + self._product(of_rows, self.directions) / unit
        part = self._product(ops.transpose(of_rows), embeddings) / unit  # of the directions
        if self._blocks.form.normalize_centers:
            # d cos / d w = (x - cos w / |w|) / |w|
            along = ops.sum(part * self.directions, axis=1)
            part = (part - _column(along) * self.directions) * _column(self._inverse)
        if self._blocks.number == 1:
            return of_embeddings, part
        if self._blocks.overlap:
            part = part + ops.slice(of_centers, (self._start, 0), part.shape)
        return of_embeddings, ops.slice_update(of_centers, (self._start, 0), part)


def inverses(form, centers):
    """1 / |w| of every row, (rows,); 1 where they are compared as they are."""
    return inverse_norms(centers) if form.normalize_centers else ops.ones_like(centers[:, 0])


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
    grouped = ops.reshape(rows, (-1, rows.shape[1] // num_subcenters, num_subcenters))
    winners = ops.one_hot(ops.argmax(grouped, axis=2), num_subcenters, dtype=rows.dtype)
    return _max(grouped, axis=2), winners  # (batch, num_classes), (batch, num_classes, k)


def _to_rows(of_cosines, winners):
    """The gradient of a class goes to the row that won."""
    of_rows = ops.expand_dims(of_cosines, 2) * winners
    return ops.reshape(of_rows, (-1, winners.shape[1] * winners.shape[2]))


def largest_of(values, left_out):
    return _max(ops.where(left_out, _LOWEST, values), axis=1)


def _max(values, axis):
    # `initial`: without it Keras checks at run time that there is something to compare.
    return ops.max(values, axis=axis, initial=-float("inf"))


def _column(vector):
    return ops.expand_dims(vector, 1)
