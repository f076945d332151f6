"""The contenders on TensorFlow: the heads of keras_margin, the usual Keras layer, bare products.

All of them run with default flags: `tf.function` without `jit_compile`, `model.compile` likewise.
"""

import keras
import numpy as np
import tensorflow as tf
from keras import ops
from measuring import Turns, inputs_of

import keras_margin

MARGIN, SCALE = 0.5, 64.0

HEADS = {
    "arcface-one-block": lambda job: keras_margin.ArcFace(
        job["classes"], MARGIN, SCALE, chunk_size=job["classes"]
    ),
    "arcface": lambda job: keras_margin.ArcFace(job["classes"], MARGIN, SCALE),
    "arcface-streamed": lambda job: keras_margin.ArcFace(
        job["classes"], MARGIN, SCALE, chunk_size=job["chunk"]
    ),
    "adacos": lambda job: keras_margin.AdaCos(job["classes"]),
    "arcface-sampled": lambda job: keras_margin.ArcFace(
        job["classes"], MARGIN, SCALE, sample_rate=job["sample"] / job["classes"], seed=0
    ),
}


class UsualArcFace(keras.layers.Layer):
    """ArcFace as most Keras code has it: one-hot labels, arccos with clip, all logits at once."""

    def __init__(self, num_classes):
        super().__init__()
        self.num_classes = num_classes

    def build(self, embeddings_shape, one_hot_shape):
        self.w = self.add_weight(name="w", shape=(embeddings_shape[-1], self.num_classes))

    def call(self, embeddings, one_hot):
        cosines = ops.matmul(ops.normalize(embeddings, axis=1), ops.normalize(self.w, axis=0))
        theta = ops.arccos(ops.clip(cosines, -1.0 + 1e-7, 1.0 - 1e-7))
        target = ops.cos(theta + MARGIN)
        return SCALE * (cosines * (1.0 - one_hot) + target * one_hot)


def run(job, reply):
    if job["contender"] == "products":
        turns = Turns(job, reply)
        step = bare_products(job["batch"], job["dim"], job["classes"])
        turns.built()
        turns.run(step)
    elif job["scope"] == "head":
        turns = Turns(job, reply, lambda: products_beside(job))
        usual = job["contender"] == "keras-usual"
        step = usual_head_step(job) if usual else own_head_step(job)
        turns.built()
        turns.run(step)
    else:
        run_fit(job, reply)


def bare_products(batch, dim, classes):
    """x w^T, l w, l^T x: what no head can avoid, with the two gradients as its results."""
    x, w = tf.random.normal((batch, dim)), tf.random.normal((classes, dim))

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
    return {"products": bare_products(job["batch"], job["dim"], job["classes"])}


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


def run_fit(job, reply):
    random = np.random.default_rng(0)
    rows = job["batch"] * (job["warm_up"] + job["repeats"] + 1)
    x = random.standard_normal((rows, job["dim"]), "float32")
    y = random.integers(0, job["classes"], rows, "int32")
    dense = keras.layers.Dense(job["dim"])
    optimizer = keras.optimizers.SGD(0.01, momentum=0.9)
    if job["contender"] == "keras-usual":
        model, _, loss = usual_model(job, backbone=dense)
        model.compile(optimizer, loss)

        def with_one_hot(x, y):
            one_hot = tf.one_hot(y, job["classes"])
            return (x, one_hot), one_hot

        data = tf.data.Dataset.from_tensor_slices((x, y)).batch(job["batch"]).map(with_one_hot)
        how = {"x": data, "shuffle": False}
    else:
        backbone = keras.Sequential([keras.Input((job["dim"],)), dense])
        model = keras_margin.EmbeddingModel(backbone, HEADS[job["contender"]](job))
        model.compile(optimizer)
        how = {"x": x, "y": y, "batch_size": job["batch"]}
    optimizer.build(model.trainable_variables)
    turns = Turns(
        job,
        reply,
        lambda: {**products_beside(job), "optimizer": optimizer_alone(job, model)},
    )
    turns.built()
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
