"""Asks an exported encoder about pictures, as a client of TensorFlow Serving would.

    python examples/serve.py runs/mnist_5k-AdaCos/saved_model/1 one.png two.jpg

The model is loaded as the server in C++ does it: graph and signatures alone, no Python class, no
Keras. The request is the JSON that the server's REST API takes, and so is the answer. With a
running server (docker run, see README.md) the same request goes there:

    python examples/serve.py --url http://localhost:8501/v1/models/encoder one.png two.jpg
"""

import argparse
import base64
import json
import sys
import urllib.error
import urllib.request
from pathlib import Path

SIGNATURE = "image_bytes"


def request_of(paths):
    """The body of a REST request: a row of the batch for each file."""
    rows = [{"b64": base64.b64encode(Path(path).read_bytes()).decode()} for path in paths]
    return json.dumps({"signature_name": SIGNATURE, "instances": rows})


class LocalServer:
    """A SavedModel behind the part of the REST API that takes one input and gives one output.

    Args:
        folder: of the SavedModel.

    Raises:
        ValueError: there is no SavedModel, or it lacks the signature.
    """

    def __init__(self, folder):
        import tensorflow.compat.v1 as tf

        tf.logging.set_verbosity(tf.logging.ERROR)  # the loader is called deprecated, each time
        self._errors = tf.errors
        self._session = tf.Session(graph=tf.Graph())
        try:
            with self._session.graph.as_default():
                meta = tf.saved_model.loader.load(self._session, ["serve"], str(folder))
        except (OSError, RuntimeError) as error:
            raise ValueError(f"This is no SavedModel ({error}). Received: {folder}") from error
        if SIGNATURE not in meta.signature_def:
            raise ValueError(
                f"The model has the signatures {sorted(meta.signature_def)}, not {SIGNATURE!r}: "
                "export it with `preprocessing=keras.layers.Identity()`. Received: "
                f"{folder}"
            )
        signature = meta.signature_def[SIGNATURE]
        (self._input,) = [tensor.name for tensor in signature.inputs.values()]
        (self._output,) = [tensor.name for tensor in signature.outputs.values()]

    def predict(self, body):
        """The answer to the body of a request, both JSON."""
        rows = [base64.b64decode(row["b64"]) for row in json.loads(body)["instances"]]
        try:
            found = self._session.run(self._output, {self._input: rows})
        except self._errors.InvalidArgumentError as error:
            # The server answers with status 400; the next request is answered as ever.
            return json.dumps({"error": error.message})
        return json.dumps({"predictions": found.tolist()})


def ask(url, body):
    """The answer of a running server."""
    request = urllib.request.Request(
        f"{url}:predict", body.encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.read().decode()
    except urllib.error.HTTPError as error:  # with the reason in its body
        return error.read().decode()


def main(arguments=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--url", help="of the model on a running server")
    parser.add_argument("paths", nargs="+", help="the SavedModel (without --url), then pictures")
    options = parser.parse_args(arguments)
    folder, pictures = (
        (None, options.paths) if options.url else (options.paths[0], options.paths[1:])
    )
    if not pictures:
        parser.error("which pictures? Give one or more files after the model")
    try:
        body = request_of(pictures)
        answer = ask(options.url, body) if options.url else LocalServer(folder).predict(body)
        answer = json.loads(answer)
    except (OSError, ValueError) as error:
        sys.exit(f"serve.py: error: {error}")
    if not isinstance(answer, dict):
        sys.exit(f"serve.py: error: that is no answer of TensorFlow Serving: {answer!r:.200}")
    if "error" in answer:
        sys.exit(f"serve.py: the model refused the request: {answer['error']}")

    embeddings = answer.get("predictions")
    if not isinstance(embeddings, list) or len(embeddings) != len(pictures):
        sys.exit(f"serve.py: error: that is no answer to {len(pictures)} pictures: {answer!r:.200}")
    for path, embedding in zip(pictures, embeddings, strict=True):
        numbers = ", ".join(f"{value:.3f}" for value in embedding[:4])
        print(f"{path}: {len(embedding)} numbers, {numbers}, ...")
    for path, embedding in zip(pictures[1:], embeddings[1:], strict=True):
        cosine = sum(a * b for a, b in zip(embeddings[0], embedding, strict=True))
        print(f"{pictures[0]} and {path}: cosine {cosine:.3f}")


if __name__ == "__main__":
    main()
