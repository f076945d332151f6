"""Models that one backend trains and saves and the other one loads: both processes run this."""

import keras
import numpy as np

import keras_margin as km

CLASSES, FEATURES, DIM = 20, 5, 4
HEADS = {
    "AdaCos": lambda: km.AdaCos(CLASSES),
    "AdaFace": lambda: km.AdaFace(CLASSES, scale=9.0, momentum=0.2),
    "ArcFace, sample": lambda: km.ArcFace(CLASSES, scale=9.0, sample_rate=0.5),
    "CurricularFace": lambda: km.CurricularFace(CLASSES, scale=9.0, momentum=0.2),
    "ElasticFace": lambda: km.ElasticFace(CLASSES, scale=9.0, std=0.1, seed=3),
    "LearnedScale": lambda: km.MarginHead(CLASSES, None, km.scales.LearnedScale(9.0)),
    "MagFace": lambda: km.MagFace(CLASSES, scale=9.0, norm_range=(1.0, 51.0)),
    "SphereFace": lambda: km.SphereFace(CLASSES, 1.5, lambda_base=10.0),
    "sub-centres": lambda: km.ArcFace(CLASSES, scale=9.0, num_subcenters=3),
}


def data():
    rng = np.random.default_rng(0)
    y = rng.integers(0, 6, 24)
    return rng.normal(size=(CLASSES, FEATURES))[y] + rng.normal(size=(24, FEATURES)), y


def new_model(name):
    backbone = keras.Sequential(
        [keras.Input((FEATURES,)), keras.layers.Dense(8, "tanh"), keras.layers.Dense(DIM)]
    )
    model = km.EmbeddingModel(backbone, HEADS[name]())
    model.compile(keras.optimizers.SGD(0.01, momentum=0.9))
    model(data()[0])
    rng = np.random.default_rng(1)
    for variable in model.trainable_variables:
        if len(variable.shape) == 2:
            variable.assign(rng.normal(size=variable.shape))
    return model


def two_epochs(model):
    """The losses."""
    x, y = data()
    fit = model.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0)
    return fit.history["loss"]


def judged_and_trained(model):
    """What the model predicts, what it says of the data, and the losses of two more epochs."""
    x, y = data()
    return {
        "embeddings": model.predict(x, verbose=0).tolist(),
        "evaluation": model.evaluate(x, y, verbose=0, return_dict=True),
        "losses": two_epochs(model),
    }


def train_and_save(folder):
    """For each head: the losses of two epochs; what `judged_and_trained` gives after them."""
    found = {}
    for name in HEADS:
        model = new_model(name)
        first = two_epochs(model)
        model.save(f"{folder}/{name} of {keras.backend.backend()}.keras")
        found[name] = first, judged_and_trained(model)
    return found


def load_and_go_on(folder, backend):
    """What `judged_and_trained` gives of each model that `backend` saved."""
    files = {name: f"{folder}/{name} of {backend}.keras" for name in HEADS}
    models = {name: keras.saving.load_model(path) for name, path in files.items()}
    return {name: judged_and_trained(model) for name, model in models.items()}
