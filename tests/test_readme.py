"""The Python code of the README and the guides, executed from top to bottom as a reader would."""

import re
from pathlib import Path

import numpy as np
import pytest

import keras_margin

README = Path(__file__).resolve().parents[1] / "README.md"


def blocks(language, page=README):
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text("utf-8"), re.M | re.S)


# "python no-run" is for what needs several devices, files of other people or other packages.
GUIDES = [page for page in sorted((README.parent / "docs").rglob("*.md")) if blocks("python", page)]


def execute(page):
    namespace = {}
    for number, code in enumerate(blocks("python", page)):
        exec(compile(code, f"{page.name}, Python block {number}", "exec"), namespace)
    return namespace


def test_code_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    namespace = execute(README)
    assert (tmp_path / "encoder.keras").is_file()
    assert (tmp_path / "serving" / "1" / "saved_model.pb").is_file()
    assert namespace["embeddings"].shape[0] == 512


def test_first_example_is_short():
    assert len(blocks("python")[0].strip().splitlines()) <= 15


def test_commands_name_make_targets():
    makefile = README.with_name("Makefile").read_text("utf-8")
    targets = set(re.findall(r"make ([\w-]+)", "\n".join(blocks("sh"))))
    assert {"train", "test"} <= targets
    assert all(re.search(rf"^{target}:", makefile, re.M) for target in targets)


@pytest.mark.parametrize("page", GUIDES, ids=lambda page: page.stem)
def test_guide_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert execute(page)


def test_a_head_of_your_own_trains():
    head = execute(README.parent / "docs" / "choosing-a-head.md")["linear"]
    loss = head.loss(np.eye(4, 8), [0, 1, 2, 3])
    assert np.isfinite(loss).all()
    again = type(head).from_config(head.get_config())
    assert again.margin.margin == 0.5


FIRST_LOSSES = {
    "ArcFace": lambda classes: keras_margin.ArcFace(classes),
    "CosFace": lambda classes: keras_margin.CosFace(classes),
    "AMSoftmax": lambda classes: keras_margin.AMSoftmax(classes),
    "NormFace": lambda classes: keras_margin.NormFace(classes),
}


@pytest.mark.parametrize("column", range(4))
@pytest.mark.parametrize("classes", [10, 1000, 10572, 93431])
def test_first_losses_of_the_guide(classes, column):
    """All cosines 0: the embedding is orthogonal to all centres."""
    table = (README.parent / "docs" / "choosing-a-head.md").read_text("utf-8")
    row = re.search(rf"^\| {classes:,} \|(.*)\|$".replace(",", " "), table, re.M)[1]
    head = list(FIRST_LOSSES.values())[column](classes)
    head.build((None, 2))
    head.centers.assign(np.tile([[1.0, 0.0]], (classes, 1)))
    loss = float(head.loss(np.array([[0.0, 1.0]]), [0])[0])
    assert f"{loss:.2f}" == row.split("|")[column].strip()
