"""What each exported format loses: embeddings of real digits beside those of `encoder.predict`.

    python benchmarks/export_formats.py

Trains the examples' small network on 4 000 digits (a minute on two cores), writes it in every
format of `EmbeddingModel.export` and runs each on the 1 000 test digits with its own runtime. A
line of CSV each: the largest deviation of a number, the smallest and the mean cosine with the
embedding of `encoder.predict`, the lengths, which should be 1, the equal error rate and a true
accept rate over all pairs, and the size of the files.
"""

import csv
import sys
import tempfile
from pathlib import Path

import keras
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
from backbones import small_cnn  # noqa: E402
from image_sets import load, split  # noqa: E402

import keras_margin  # noqa: E402
from keras_margin import verification  # noqa: E402


def by_saved_model(path, x):
    import tensorflow as tf

    served = tf.saved_model.load(str(path)).signatures["serving_default"]
    return served(image=tf.constant(x))["embedding"].numpy()


def by_onnxruntime(path, x):
    import onnxruntime

    return onnxruntime.InferenceSession(path).run(["embedding"], {"image": x})[0]


def by_openvino(path, x, **settings):
    import openvino

    compiled = openvino.Core().compile_model(path, "CPU", settings)
    return compiled({"image": x})["embedding"]


def by_openvino_in_float32(path, x):
    return by_openvino(path, x, INFERENCE_PRECISION_HINT="f32")


def by_litert(path, x):
    from ai_edge_litert.interpreter import Interpreter

    run = Interpreter(str(path)).get_signature_runner("serving_default")
    return np.concatenate([run(image=image[None])["embedding"] for image in x])


# name: what is given to `export`, the file's suffix, its runtime
FORMATS = {
    "tf_saved_model": ({"format": "tf_saved_model"}, "", by_saved_model),
    "onnx": ({"format": "onnx"}, ".onnx", by_onnxruntime),
    "openvino": ({"format": "openvino"}, ".xml", by_openvino),
    "openvino, float32": ({"format": "openvino"}, ".xml", by_openvino_in_float32),
    "litert": ({"format": "litert"}, ".tflite", by_litert),
    "litert, int8": ({"format": "litert", "representative": 200}, ".tflite", by_litert),
}
HEADER = [
    *("format", "max_deviation", "min_cosine", "mean_cosine", "min_length", "max_length"),
    *("eer", "tar@far=0.001", "kB"),
]


def trained(data):
    model = keras_margin.EmbeddingModel(
        small_cnn(data.train_images.shape[1:]), keras_margin.AdaCos(len(data.train_names))
    )
    model.compile(keras.optimizers.AdamW(2e-3, weight_decay=1e-4))
    model.fit(data.train_images, data.train_labels, batch_size=128, epochs=12, verbose=0)
    return model


def main():
    keras.utils.set_random_seed(0)
    data = split(load("mnist_5k"))
    model = trained(data)
    x = data.test_images.astype("float32")
    wanted = model.encoder.predict(x, verbose=0)
    rows = [["encoder.predict", 0, 1, 1, 1, 1, *rates(wanted, data.test_labels), ""]]
    for name, (settings, suffix, runtime) in FORMATS.items():
        settings = dict(settings)
        if "representative" in settings:
            settings["representative"] = data.train_images[: settings["representative"]]
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, f"encoder{suffix}")
            model.export(path, **settings)
            found = np.asarray(runtime(path, x))
            size = sum(part.stat().st_size for part in Path(folder).rglob("*") if part.is_file())
        deviation = np.abs(found - wanted).max()
        lengths = np.linalg.norm(found, axis=1)
        cosines = np.sum(found * wanted, axis=1) / lengths
        numbers = (cosines.min(), cosines.mean(), lengths.min(), lengths.max())
        numbers = [f"{deviation:.1e}", *(f"{number:.5f}" for number in numbers)]
        rows.append([name, *numbers, *rates(found, data.test_labels), size // 1000])
    writer = csv.writer(sys.stdout)
    writer.writerow(HEADER)
    writer.writerows(rows)  # at the end: converters print too


def rates(embeddings, labels):
    found = verification.evaluate(embeddings, labels, far=0.001)
    return [f"{found[name]:.5f}" for name in ("eer", "tar@far=0.001")]


if __name__ == "__main__":
    main()
