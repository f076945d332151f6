"""What margin rules and scale policies share: each serves one head, in that head's precision."""

import gc
import re

import numpy as np
import pytest
import tensorflow as tf

import keras_margin as km
from keras_margin.parts import HeadPart


class Doubled(HeadPart):
    def call(self, x):
        return 2.0 * x


def test_part_serves_one_head():
    part, first, other = Doubled(name="mine"), km.NormFace(3, name="a"), km.NormFace(3, name="b")
    part.own(first)
    message = (
        "This Doubled belongs to the head 'a' already; make a new one for each head. "
        "Received: 'mine' for the head 'b'"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        part.own(other)


def test_head_may_own_its_part_again():
    part, head = Doubled(), km.NormFace(3)
    part.own(head)
    part.own(head)


def test_part_outlives_its_head():
    part = Doubled()
    part.own(km.NormFace(3))  # which nothing else holds
    gc.collect()
    part.own(km.NormFace(3))


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_mixed_precision_rounds_no_input(policy):
    x = np.float32([0.12345679, 1e-30])
    np.testing.assert_array_equal(Doubled(dtype=policy)(tf.constant(x)), 2.0 * x)


@pytest.mark.parametrize(
    "part", [lambda: km.margins.CosineMargin(0.2), lambda: km.scales.LearnedScale(9.0)]
)
def test_head_builds_its_parts_when_it_is_loaded(part):
    """Keras would build them before `attach` gives them the head's counter and precision."""
    assert part().get_build_config() is None
