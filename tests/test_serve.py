"""examples/serve.py: what a client of TensorFlow Serving gets."""

import http.server
import json
import os
import re
import shutil
import subprocess
import threading
from pathlib import Path

import keras
import numpy as np
import pytest
from PIL import Image

import keras_margin

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ROOT / "examples"
SIZE = 10


@pytest.fixture
def serve(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    import serve

    return serve


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a SavedModel, two pictures, and what the encoder says of them."""
    keras.utils.set_random_seed(0)
    folder = tmp_path_factory.mktemp("served")
    image = keras.Input((SIZE, SIZE, 1))
    x = keras.layers.Flatten()(keras.layers.Rescaling(1 / 255.0)(image))
    model = keras_margin.EmbeddingModel(
        keras.Model(image, keras.layers.Dense(5)(x)), keras_margin.ArcFace(3)
    )
    model.export(folder / "model", preprocessing=keras.layers.Identity())
    model.export(folder / "without")
    pixels = np.random.default_rng(0).integers(0, 256, (2, SIZE, SIZE), np.uint8)
    for name, one in zip(("one.png", "two.png"), pixels, strict=True):
        Image.fromarray(one).save(folder / name)
    (folder / "none.png").write_text("no image")
    return folder, model.encoder(pixels[..., None].astype("float32")).numpy()


def test_answers_as_the_rest_api_does(serve, place):
    folder, want = place
    server = serve.LocalServer(folder / "model")
    answer = json.loads(server.predict(serve.request_of([folder / "one.png", folder / "two.png"])))
    np.testing.assert_allclose(answer["predictions"], want, atol=1e-5)


def test_a_corrupt_image_fails_its_own_request_alone(serve, place):
    folder, want = place
    server = serve.LocalServer(folder / "model")
    bad = json.loads(server.predict(serve.request_of([folder / "none.png"])))
    assert list(bad) == ["error"] and "image" in bad["error"]
    good = json.loads(server.predict(serve.request_of([folder / "one.png"])))
    np.testing.assert_allclose(good["predictions"], want[:1], atol=1e-5)


def test_prints_the_cosine(serve, place, capsys):
    folder, want = place
    serve.main([str(folder / name) for name in ("model", "one.png", "two.png")])
    assert f"cosine {want[0] @ want[1]:.3f}" in capsys.readouterr().out


def test_asks_a_running_server(serve, place, capsys):
    folder, want = place
    local = serve.LocalServer(folder / "model")

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"])).decode()
            answer = local.predict(body)
            found = self.path == "/v1/models/encoder:predict"
            self.send_response(400 if "error" in json.loads(answer) or not found else 200)
            self.end_headers()
            self.wfile.write(answer.encode())

        def log_message(self, *arguments):
            pass

    with http.server.ThreadingHTTPServer(("localhost", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://localhost:{server.server_port}/v1/models/encoder"
        serve.main(["--url", url, str(folder / "one.png"), str(folder / "two.png")])
        assert f"cosine {want[0] @ want[1]:.3f}" in capsys.readouterr().out
        paths = [str(folder / name) for name in ("one.png", "none.png", "two.png")]
        with pytest.raises(SystemExit, match=f"the model refused {paths[1]}: "):
            serve.main(["--url", url, *paths])
        server.shutdown()


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["nowhere", "one.png"], "This is no whole SavedModel"),
        (["without", "one.png"], "not 'image_bytes'"),
        (["model", "nothing.png"], "nothing.png"),
        (["model", "one.png", "none.png"], r"the model refused \S*none.png: .*image"),
    ],
)
def test_what_cannot_be_asked_is_named(serve, place, names, message):
    with pytest.raises(SystemExit, match=message):
        serve.main([str(place[0] / name) for name in names])


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ("<html>", "no answer of TensorFlow Serving: '<html>'"),
        ("[1]", "no answer of TensorFlow Serving to 1 pictures"),
        ('{"predictions": []}', "no answer of TensorFlow Serving to 1 pictures"),
        ('{"predictions": [[0.6, NaN]]}', "no embedding of .*one.png"),
        ('{"predictions": [0.6]}', "no embedding of .*one.png"),
        ('{"predictions": [["a"]]}', "no embedding of .*one.png"),
        ('{"predictions": [[]]}', "no embedding of .*one.png"),
        ('{"predictions": [[0.0, 0.0]]}', "no embedding of .*one.png"),
    ],
)
def test_answers_that_are_none(serve, place, answer, message):
    with pytest.raises(ValueError, match=message):
        serve.embeddings_of([place[0] / "one.png"], lambda body: answer)


@pytest.mark.parametrize(
    "answer", [b"no HTTP\r\n\r\n", b"HTTP/1.0 200\r\nContent-Length: 9\r\n\r\n{"]
)
def test_servers_that_are_none(serve, place, answer):
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            self.rfile.read(int(self.headers["Content-Length"]))
            self.wfile.write(answer)

        def log_message(self, *arguments):
            pass

    with http.server.ThreadingHTTPServer(("localhost", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://localhost:{server.server_port}/v1/models/encoder"
        with pytest.raises(SystemExit, match=f"no answer over HTTP came from {url}"):
            serve.main(["--url", url, str(place[0] / "one.png")])
        server.shutdown()


def test_an_address_that_is_none(serve, place):
    with pytest.raises(SystemExit, match="no answer over HTTP came from http://localhost:port"):
        serve.main(["--url", "http://localhost:port", str(place[0] / "one.png")])


def test_a_model_that_is_cut_short(serve, place, tmp_path):
    shutil.copytree(place[0] / "model", tmp_path / "model")
    for file in (tmp_path / "model" / "variables").glob("*.data*"):
        file.write_bytes(file.read_bytes()[:20])
    with pytest.raises(SystemExit, match="no whole SavedModel"):
        serve.main([str(tmp_path / "model"), str(place[0] / "one.png")])


def test_without_pictures(serve, place, capsys):
    with pytest.raises(SystemExit):
        serve.main([str(place[0] / "model")])
    assert "which pictures?" in capsys.readouterr().err


@pytest.mark.skipif(not shutil.which("base64"), reason="needs base64")
@pytest.mark.parametrize("page", ["README.md", "docs/serving.md"])
def test_curl_lines_send_the_same_request(serve, page, tmp_path):
    """With a stand-in for curl, and pictures that are too long for the argument of a command."""
    (line,) = re.findall(r"^(echo '.*?:predict)$", (ROOT / page).read_text("utf-8"), re.M | re.S)
    names = [name for name in ("one.png", "two.png") if name in line]
    for name in names:
        (tmp_path / name).write_bytes(np.random.default_rng(0).bytes(200_000))
    (tmp_path / "curl").write_text('#!/bin/sh\ncat > sent\necho "$@" > arguments\n')
    (tmp_path / "curl").chmod(0o755)
    path = {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    subprocess.run(["sh", "-c", line], cwd=tmp_path, env=path, check=True)
    want = json.loads(serve.request_of([tmp_path / name for name in names]))
    assert json.loads((tmp_path / "sent").read_text()) == want
    assert (
        "-d @- http://localhost:8501/v1/models/encoder:predict"
        in (tmp_path / "arguments").read_text()
    )
