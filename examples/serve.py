"""Asks an exported encoder about pictures, as a client of TensorFlow Serving would.

    python examples/serve.py runs/mnist_5k-AdaCos/saved_model/1 one.png two.jpg

The model is loaded as the server in C++ does it: graph and signatures alone, no Python class, no
Keras. The request is the JSON that the server's REST API takes, and so is the answer. With a
running server (docker run, see README.md) the same request goes there:

    python examples/serve.py --url http://localhost:8501/v1/models/encoder one.png two.jpg
"""

import argparse
import base64
import functools
import http.client
import json
import math
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
        # Of the file system, of protobuf, of variables that are cut short.
        except (OSError, RuntimeError, ValueError, tf.errors.OpError) as error:
            why = " ".join(str(error).split())
            raise ValueError(f"This is no whole SavedModel ({why}). Received: {folder}") from error
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
    except http.client.HTTPException as error:  # an address that is none, an answer cut short
        raise ValueError(f"no answer over HTTP came from {url} ({error!r})") from error


def embeddings_of(pictures, send):
    """A list of numbers for each picture.

    Args:
        pictures: paths.
        send: the body of a request to that of the answer.

    Raises:
        ValueError: the model refuses pictures, or the answer is none.
    """
    text = send(request_of(pictures))
    try:
        answer = json.loads(text)
    except ValueError as error:
        raise ValueError(f"that is no answer of TensorFlow Serving: {text!r:.200}") from error
    if isinstance(answer, dict) and "error" in answer:
        # One bad picture fails a batch, and the answer does not say which one it is.
        refused = [path for path in pictures if "error" in json.loads(send(request_of([path])))]
        what = ", ".join(map(str, refused)) or "the request"
        raise ValueError(f"the model refused {what}: {' '.join(str(answer['error']).split())}")
    embeddings = answer.get("predictions") if isinstance(answer, dict) else None
    if not isinstance(embeddings, list) or len(embeddings) != len(pictures):
        raise ValueError(
            f"that is no answer of TensorFlow Serving to {len(pictures)} pictures: {answer!r:.200}"
        )
    for path, embedding in zip(pictures, embeddings, strict=True):
        # NaN, or nothing but 0, has a cosine with nothing.
        numbers = embedding if isinstance(embedding, list) else [math.nan]
        if not all(isinstance(n, (int, float)) and abs(n) < math.inf for n in numbers) or not any(
            numbers
        ):
            raise ValueError(f"that is no embedding of {path}: {embedding!r:.200}")
    return embeddings


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
        send = functools.partial(ask, options.url) if options.url else LocalServer(folder).predict
        embeddings = embeddings_of(pictures, send)
    except (OSError, ValueError) as error:
        sys.exit(f"serve.py: error: {error}")
    for path, embedding in zip(pictures, embeddings, strict=True):
        numbers = ", ".join(f"{value:.3f}" for value in embedding[:4])
        print(f"{path}: {len(embedding)} numbers, {numbers}, ...")
    for path, embedding in zip(pictures[1:], embeddings[1:], strict=True):
        cosine = sum(a * b for a, b in zip(embeddings[0], embedding, strict=True))
        print(f"{pictures[0]} and {path}: cosine {cosine:.3f}")


if __name__ == "__main__":
    main()
