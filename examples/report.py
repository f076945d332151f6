"""What train.py says and writes at the end: a table, models, numbers, pictures, how to serve."""

import shlex

import keras
import matplotlib

from keras_margin import plots, verification
from keras_margin.files import write_json, written_whole

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402  (after the choice of backend)


def judge(model, data, far):
    """Compares all pairs of test images by raw pixels and by the trained embedding.

    Returns:
        {"raw": ..., "embedding": ...}, each {"metrics": dict, "vectors": (n, dim)}.
    """
    vectors = {
        "raw": data.test_images.reshape(len(data.test_images), -1).astype("float32"),
        "embedding": model.encoder.predict(data.test_images, verbose=0),
    }
    return {
        name: {
            "metrics": verification.evaluate(rows, data.test_labels, far),
            "vectors": rows,
        }
        for name, rows in vectors.items()
    }


def _kind(data):
    if data.open_set:
        return f"Open set: {len(data.test_names)} identities that the training never saw"
    return f"Closed set: new images of the {len(data.test_names)} trained identities"


def print_table(results, data, far):
    metrics = results["embedding"]["metrics"]
    print(
        f"\n{_kind(data)}, {metrics['genuine_pairs']:,} genuine and {metrics['impostor_pairs']:,} "
        "impostor pairs.\n"
    )
    print(f"{'':20}{'EER':>8}{f'TAR@FAR={100 * far:g}%':>14}{'rank-1':>8}")
    for name, title in (("raw", "raw pixels"), ("embedding", "trained embedding")):
        m = results[name]["metrics"]
        print(f"{title:20}{m['eer']:8.3f}{m[f'tar@far={far:g}']:14.3f}{m['rank1']:8.3f}")


def write_all(folder, model, data, results, threshold=None):
    """Writes every artefact under a temporary name first: a name in `folder` is a whole file.

    `metrics.json` goes first and comes back last: where it is, all the rest is of the same run. So
    does a threshold: it is never beside an encoder that it was not chosen for.
    """
    (folder / "metrics.json").unlink(missing_ok=True)
    (folder / "threshold.json").unlink(missing_ok=True)
    with written_whole(folder / "model.keras") as path:
        model.save(path)
    with written_whole(folder / "encoder.keras") as path:
        model.encoder.save(path)
    if threshold is not None:
        write_json(folder / "threshold.json", threshold)
    # TensorFlow Serving wants a version number. The network takes pixels as they are decoded.
    model.export(folder / "saved_model" / "1", preprocessing=keras.layers.Identity())
    write_json(folder / "identities.json", dict(enumerate(data.train_names)))
    request = {"instances": [{"image": data.test_images[0].tolist()}]}
    write_json(folder / "request.json", request, indent=None)
    _write_pictures(folder, model, data, results)
    metrics = {name: result["metrics"] for name, result in results.items()}
    write_json(folder / "metrics.json", metrics)


def _write_pictures(folder, model, data, results):
    pairs = {
        name: verification.all_pairs(result["vectors"], data.test_labels)
        for name, result in results.items()
    }
    figure, ax = plt.subplots(figsize=(6, 5), layout="constrained")
    for name, title in (("raw", "raw pixels"), ("embedding", "trained embedding")):
        plots.roc(*pairs[name], ax=ax, label=title)
    ax.set_title(_kind(data))
    ax.legend(loc="upper left")  # where the curves are not
    save_picture(figure, folder / "roc.png")

    figure, axes = plt.subplots(1, 2, figsize=(11, 4.5), sharex=True, layout="constrained")
    for ax, (name, title) in zip(
        axes, (("raw", "raw pixels"), ("embedding", "trained embedding")), strict=True
    ):
        plots.score_histogram(*pairs[name], ax=ax)
        ax.set_title(title)
    save_picture(figure, folder / "scores.png")

    rows = results["embedding"]["vectors"]
    if rows.shape[1] in (2, 3):
        centers = None if data.open_set else keras.ops.convert_to_numpy(model.head.centers)
        ax = plots.embeddings(rows, data.test_labels, centers=centers, names=data.test_names)
        save_picture(ax.figure, folder / "embeddings.png")


def save_picture(figure, path):
    """Writes the PNG whole, and closes the figure."""
    with written_whole(path) as temporary:
        figure.savefig(temporary, dpi=120)
    plt.close(figure)


def print_usage(folder, image_shape):
    """The exact lines that load and serve what was written."""
    names = sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))
    files = ", ".join(names)
    folder = folder.resolve()
    print(f"""
Written to {folder}: {files}

Load it, without keras_margin:

    import keras, numpy
    encoder = keras.models.load_model({str(folder / "encoder.keras")!r})
    embeddings = encoder.predict(numpy.zeros({(1, *image_shape)}))  # pixels 0 to 255

Or the SavedModel, with TensorFlow alone:

    import tensorflow
    model = tensorflow.saved_model.load({str(folder / "saved_model" / "1")!r})
    model.signatures["serving_default"](image=tensorflow.zeros({(1, *image_shape)}))["embedding"]

Serve it, and ask it about the image in request.json:

    docker run -p 8501:8501 -e MODEL_NAME=encoder \\
        -v {shlex.quote(str(folder / "saved_model"))}:/models/encoder tensorflow/serving
    curl -d @{shlex.quote(str(folder / "request.json"))} \\
        localhost:8501/v1/models/encoder:predict

Or about pictures in files, with that server or without:

    python examples/serve.py --url http://localhost:8501/v1/models/encoder one.png two.png
    python examples/serve.py {shlex.quote(str(folder / "saved_model" / "1"))} one.png two.png
""")
