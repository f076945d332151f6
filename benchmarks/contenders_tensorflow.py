"""The contenders on TensorFlow: the heads of keras_margin, the usual Keras layer, bare products.

All of them run with default flags: `tf.function` without `jit_compile`, `model.compile` likewise.
"""

import math

import keras
import numpy as np
import tensorflow as tf
from keras import ops
from measuring import Turns, inputs_of

import keras_margin

MARGIN, SCALE = 0.5, 64.0

HEADS = {
    "arcface-one-block": lambda job: arcface(job, chunk_size=job["classes"]),
    "arcface": lambda job: arcface(job),
    "arcface-streamed": lambda job: arcface(job, chunk_size=job["chunk"]),
    "adacos": lambda job: keras_margin.AdaCos(job["classes"], **FROM_ZEROS),
    "arcface-sampled": lambda job: arcface(job, sample_rate=job["sample"] / job["classes"], seed=0),
}
# The centres are set afterwards. Random ones leave free memory behind, more than a step takes.
FROM_ZEROS = {"centers_initializer": "zeros"}


def arcface(job, **more):
    return keras_margin.ArcFace(job["classes"], MARGIN, SCALE, **FROM_ZEROS, **more)


class UsualArcFace(keras.layers.Layer):
    """ArcFace as most Keras code has it: one-hot labels, arccos with clip, all logits at once."""

    def __init__(self, num_classes):
        super().__init__()
        self.num_classes = num_classes

    def build(self, embeddings_shape, one_hot_shape):
        self.w = self.add_weight(
            name="w", shape=(embeddings_shape[-1], self.num_classes), initializer="zeros"
        )

    def call(self, embeddings, one_hot):
        cosines = ops.matmul(ops.normalize(embeddings, axis=1), ops.normalize(self.w, axis=0))
        theta = ops.arccos(ops.clip(cosines, -1.0 + 1e-7, 1.0 - 1e-7))
        target = ops.cos(theta + MARGIN)
        return SCALE * (cosines * (1.0 - one_hot) + target * one_hot)


def run(job, reply):
    tf.zeros(1).numpy()  # starts the runtime
    turns = Turns(job, reply)
    if job["scope"] != "head":
        return run_fit(job, turns)
    if job["contender"] == "products":
        step = bare_products(job)
    elif job["contender"] == "keras-usual":
        step = usual_head_step(job)
    else:
        step = own_head_step(job)
    rows = job["batch"] + job["classes"]
    turns.built((rows * job["dim"] + job["batch"]) * 4 / 1e6, lambda: products_beside(job))
    turns.run(step)


def bare_products(job):
    """x w^T, l w, l^T x: what no head can avoid, with the two gradients as its results."""
    x, w = (tf.constant(values) for values in inputs_of(job)[:2])

    @tf.function
    def products(x, w):
        logits = tf.matmul(x, w, transpose_b=True)
        return tf.matmul(logits, w), tf.matmul(logits, x, transpose_a=True)

    def step():
        products(x, w)[0].numpy()

    return step


def products_beside(job):
    if not job["products_beside"]:
        return {}
    return {"products": bare_products(job)}


# Forward and backward of the head alone: the loss, its gradients for embeddings and centres.


def own_head_step(job):
    x, w, y = inputs_of(job)
    head = HEADS[job["contender"]](job)
    head.build(x.shape)
    head.centers.assign(w)

    @tf.function
    def forward_backward(x, y):
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.reduce_mean(head.loss(x, y))
        return loss, tape.gradient(loss, [x, head.centers.value])

    x, y = tf.constant(x), tf.constant(y)
    return lambda: float(forward_backward(x, y)[0])


def usual_model(job, backbone):
    inputs = keras.Input((job["dim"],))
    one_hot = keras.Input((job["classes"],))
    layer = UsualArcFace(job["classes"])
    model = keras.Model([inputs, one_hot], layer(backbone(inputs), one_hot))
    return model, layer, keras.losses.CategoricalCrossentropy(from_logits=True)


def usual_head_step(job):
    x, w, y = inputs_of(job)
    model, layer, loss_of = usual_model(job, backbone=lambda inputs: inputs)
    layer.w.assign(w.T)

    @tf.function
    def forward_backward(x, y):
        one_hot = tf.one_hot(y, job["classes"])
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = loss_of(one_hot, model([x, one_hot], training=True))
        return loss, tape.gradient(loss, [x, layer.w.value])

    x, y = tf.constant(x), tf.constant(y)
    return lambda: float(forward_backward(x, y)[0])


# A whole step of `fit`: input pipeline, backbone, head, optimizer, metrics, callbacks.


def run_fit(job, turns):
    random = np.random.default_rng(0)
    rows = job["batch"] * (job["warm_up"] + job["repeats"] + 1)
    x = random.standard_normal((rows, job["dim"]), "float32")
    y = random.integers(0, job["classes"], rows, "int32")
    dense = keras.layers.Dense(job["dim"])
    optimizer = keras.optimizers.SGD(0.01, momentum=0.9)
    if job["contender"] == "keras-usual":
        model, layer, loss = usual_model(job, backbone=dense)
        layer.w.assign(inputs_of(job)[1].T)
        model.compile(optimizer, loss)

        def with_one_hot(x, y):
            one_hot = tf.one_hot(y, job["classes"])
            return (x, one_hot), one_hot

        data = tf.data.Dataset.from_tensor_slices((x, y)).batch(job["batch"]).map(with_one_hot)
        how = {"x": data, "shuffle": False}
    else:
        backbone = keras.Sequential([keras.Input((job["dim"],)), dense])
        model = keras_margin.EmbeddingModel(backbone, HEADS[job["contender"]](job))
        model.head.centers.assign(inputs_of(job)[1])
        model.compile(optimizer)
        how = {"x": x, "y": y, "batch_size": job["batch"]}
    optimizer.build(model.trainable_variables)
    weights = sum(math.prod(v.shape) for v in [*model.variables, *optimizer.variables])
    turns.built(
        (weights * 4 + x.nbytes + y.nbytes) / 1e6,
        lambda: {**products_beside(job), "optimizer": optimizer_alone(job, model)},
    )
    # From the beginning of a step to that of the next one, so that all that `fit` does counts.
    each_step = keras.callbacks.LambdaCallback(
        on_train_batch_begin=lambda batch, logs=None: turns.between_steps()
    )
    model.fit(**how, verbose=0, callbacks=[each_step])


def optimizer_alone(job, model):
    """The optimizer's update from ready gradients of the shapes that a step has."""
    variables = model.trainable_variables
    gradients = [tf.random.normal(v.shape, stddev=1e-6) for v in variables]
    if job["contender"] == "arcface-sampled":
        rows = np.sort(np.random.default_rng(1).permutation(job["classes"])[: job["sample"]])
        of_rows = tf.random.normal((job["sample"], job["dim"]), stddev=1e-6)
        centers = next(i for i, v in enumerate(variables) if v is model.head.centers)
        gradients[centers] = tf.IndexedSlices(of_rows, tf.constant(rows, "int32"))

    @tf.function
    def apply():
        model.optimizer.apply(gradients, variables)

    return apply
