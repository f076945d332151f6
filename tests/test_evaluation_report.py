"""The report: what is in it, what is left out, and that its presence means that all is whole."""

import io
import json

import numpy as np
import pytest
from PIL import Image

from keras_margin import evaluation_report, judging
from keras_margin.evaluation_report import FILES, summary, write_report
from keras_margin.judging import TestSet, judge

RUN = {"encoder": "some/encoder.keras", "data": "faces", "flip": False, "pairs": None}


def png(level, size=(9, 5)):
    file = io.BytesIO()
    Image.new("L", size, int(level)).save(file, "PNG")
    return file.getvalue()


def judged(labels, far=(0.5, 0.1), seed=0):
    labels = np.array(labels)
    rng = np.random.default_rng(seed)
    embeddings = np.eye(9)[labels] + 0.5 * rng.normal(size=(len(labels), 9))
    images = [png(10 * i) for i in range(len(labels))]
    test_set = TestSet("identity folder", images, labels=labels)
    return test_set, judge(embeddings, test_set, far)


LABELS = np.arange(20) // 4


def without_intervals(judgement):
    figures = {k: v for k, v in judgement.figures.items() if not k.endswith("_interval")}
    return judgement._replace(figures=figures)


def test_all_files_of_a_whole_report(tmp_path):
    test_set, judgement = judged(LABELS)
    judgement = without_intervals(judgement)
    names = write_report(tmp_path / "out", RUN, test_set, judgement)
    assert sorted(names) == sorted(FILES)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == sorted(FILES)
    for name in ("roc.png", "scores.png", "pairs.png"):
        with Image.open(tmp_path / "out" / name) as picture:
            assert len(np.unique(np.asarray(picture.convert("L")))) > 10  # something is drawn

    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["run"] == RUN
    assert report["counts"] == {
        "images": 20,
        "identities": 5,
        "genuine_pairs": 30,
        "impostor_pairs": 160,
    }
    assert report["figures"] == judgement.figures
    assert report["thresholds"] == {f"far={f:g}": t for f, t in judgement.thresholds.items()}

    page = (tmp_path / "out" / "report.md").read_text()
    assert page.startswith("# `some/encoder.keras` on `faces`\n")
    assert "20 images, 5 identities, 30 genuine pairs, 160 impostor pairs." in page
    assert f"| equal error rate (EER) | {judgement.figures['eer']:.4f} |" in page
    tar, threshold = judgement.figures["tar@far=0.1"], judgement.thresholds[0.1]
    assert f"| 0.1 | {tar:.4f} | {threshold:.4f} |" in page
    assert all(f"({name})" in page for name in FILES if name.endswith(".png"))
    assert "What to know" not in page and "interval" not in page and "None" not in page


def test_intervals_stand_beside_their_figures(tmp_path):
    test_set, judgement = judged(LABELS)
    figures = {
        **without_intervals(judgement).figures,
        "eer": 0.25,
        "eer_interval": (0.2, 0.3),
        "tar@far=0.1_interval": (0.5, 0.75),
        "rank1_interval": (float("nan"), float("nan")),
    }
    judgement = judgement._replace(figures=figures)
    write_report(tmp_path, RUN, test_set, judgement)
    page = (tmp_path / "report.md").read_text()
    assert "| measure | value | 95 % interval |" in page
    assert "| equal error rate (EER) | 0.2500 | 0.2000 to 0.3000 |" in page
    assert "| FAR at most | TAR | 95 % interval | threshold (cosine) |" in page
    assert "| 0.5000 to 0.7500 |" in page
    assert "nan" not in page and "eer_interval" not in page
    found = json.loads((tmp_path / "report.json").read_text())["figures"]
    assert found["eer_interval"] == [0.2, 0.3]
    assert found["rank1_interval"] == [None, None]
    assert "0.2500  0.2000 to 0.3000" in summary(judgement)


@pytest.mark.parametrize("labels", [range(6), [3] * 6], ids=["no genuine", "no impostor"])
@pytest.mark.filterwarnings("ignore::sklearn.exceptions.UndefinedMetricWarning")
def test_what_is_undefined_is_null_and_said(tmp_path, labels):
    (tmp_path / "roc.png").write_text("of an earlier report")
    test_set, judgement = judged(labels)
    names = write_report(tmp_path, RUN, test_set, judgement, ["evaluate is\nundefined."])
    assert names == ["report.md", "scores.png", "pairs.png", "report.json"]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(names)
    text = (tmp_path / "report.json").read_text()
    assert "NaN" not in text
    report = json.loads(text)
    assert report["figures"]["eer"] is None
    assert report["thresholds"] == {"far=0.5": None, "far=0.1": None}
    assert report["warnings"] == ["evaluate is\nundefined."]
    page = (tmp_path / "report.md").read_text()
    assert "| equal error rate (EER) | undefined |" in page
    assert "| 0.1 | undefined | undefined |" in page
    assert "- evaluate is undefined.\n" in page
    assert "TAR@FAR=0.1 " in summary(judgement) and "undefined on" not in summary(judgement)


def test_a_random_part_is_said(tmp_path, monkeypatch):
    monkeypatch.setattr(judging, "DRAWN", 80)
    test_set, judgement = judged(LABELS)
    write_report(tmp_path, RUN, test_set, judgement)
    shown = np.count_nonzero(~judgement.genuine)
    part = f"of a random part: 30 of 30 genuine and {shown:,} of 160 impostor pairs"
    assert (tmp_path / "report.md").read_text().count(part) == 4  # two captions, each twice


@pytest.mark.parametrize("fails", ["roc", "score_histogram"])
def test_no_report_json_beside_what_is_not_whole(tmp_path, monkeypatch, fails):
    test_set, judgement = judged(LABELS)
    write_report(tmp_path, RUN, test_set, judgement)

    def full(*_, **__):
        raise OSError("no space left")

    monkeypatch.setattr(evaluation_report.plots, fails, full)
    with pytest.raises(OSError, match="no space left"):
        write_report(tmp_path, RUN, test_set, judgement)
    left = {path.name for path in tmp_path.iterdir()}
    assert "report.json" not in left
    assert left <= set(FILES)  # no temporary file


def test_names_of_files_need_not_be_text(tmp_path):
    (tmp_path / "a").mkdir()
    paths = []
    for name in ("$x_{1$.png", "名前.png", "a`|b.png", "long" * 20 + ".png"):
        paths.append(tmp_path / "a" / name)
        paths[-1].write_bytes(png(99))
    pairs, genuine = np.array([[0, 1], [0, 2], [2, 3], [1, 3]]), np.array([True, False] * 2)
    test_set = TestSet("list of pairs", paths, pairs=pairs, genuine=genuine, folds=2)
    judgement = judge(np.array([[1.0, 0], [0.9, 0.1], [0, 1], [0.1, 0.9]]), test_set, [0.5])
    run = {**RUN, "data": "a\udcff`\n名"}
    write_report(tmp_path / "out", run, test_set, judgement)
    page = (tmp_path / "out" / "report.md").read_text("utf-8")
    assert page.startswith("# `some/encoder.keras` on `a\\udcff' 名`\n")
    assert json.loads((tmp_path / "out" / "report.json").read_text())["run"] == run
