"""examples/figures.py: that it draws and writes what it says. What it shows is for the eye."""

from pathlib import Path

import matplotlib.image
import pytest

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


@pytest.fixture
def figures(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    import figures

    return figures


@pytest.mark.long
def test_draws_every_figure(figures, tmp_path, capsys):
    figures.main(["--quick", "--out", str(tmp_path / "out")])
    written = {path.name for path in (tmp_path / "out").iterdir()}
    assert written == {"target_logits.png", "probability.png", "angles.png", "features.png"}
    for name in written:
        pixels = matplotlib.image.imread(tmp_path / "out" / name)
        assert min(pixels.shape[:2]) >= 500
        assert pixels[..., :3].std() > 0.02  # something is on it
    assert "[4/4] features" in capsys.readouterr().out


def test_only_some_need_no_training(figures, tmp_path, monkeypatch):
    monkeypatch.setattr(figures, "load", None)  # nor data
    figures.main(["--only", "probability", "target_logits", "--out", str(tmp_path)])
    assert {path.name for path in tmp_path.iterdir()} == {"target_logits.png", "probability.png"}


def test_a_failed_figure_leaves_the_old_one(figures, tmp_path, monkeypatch):
    (tmp_path / "probability.png").write_bytes(b"old")

    def torn(self, path, **kwargs):
        Path(path).write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr("matplotlib.figure.Figure.savefig", torn)
    with pytest.raises(KeyboardInterrupt):
        figures.main(["--only", "probability", "--out", str(tmp_path)])
    assert (tmp_path / "probability.png").read_bytes() == b"old"
    assert len(list(tmp_path.iterdir())) == 1


def test_out_that_cannot_be_written(figures, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(SystemExit, match="figures.py: error: The folder for the"):
        figures.main(["--out", str(tmp_path / "file" / "out")])


@pytest.mark.parametrize("arguments", [["--only", "none"], ["--only"], ["--seed", "-1"]])
def test_arguments_are_checked(figures, arguments):
    with pytest.raises(SystemExit, match="2"):
        figures.main(arguments)
