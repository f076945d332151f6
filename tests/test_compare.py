"""examples/compare.py: resumed, refused, and its tables held to numpy, on a tiny folder."""

import csv
import importlib
import inspect
import itertools
import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from scipy import stats

import keras_margin

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
# With one scale these two are one loss.
HEADS = ["AMSoftmax", "CosFace"]
SETTINGS = ["raw-pixels", *HEADS, *(f"{head}-matched" for head in HEADS)]


@pytest.fixture(scope="module", autouse=True)
def compare():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(EXAMPLES)
        yield importlib.import_module("compare")


@pytest.fixture(scope="module")
def part():
    """`part("summary")`: a module of examples/comparison."""
    return lambda name: importlib.import_module(f"comparison.{name}")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Six identities of eight images: a bright bar at a place of its own, in noise."""
    path, random = tmp_path_factory.mktemp("images"), np.random.default_rng(0)
    for identity, number in itertools.product(range(6), range(8)):
        pixels = random.integers(0, 160, (16, 16), dtype="uint8")
        pixels[:, 2 * identity + 1 : 2 * identity + 4] += 60
        (path / f"person {identity}").mkdir(exist_ok=True)
        Image.fromarray(pixels).save(path / f"person {identity}" / f"{number}.png")
    return path


def arguments(folder, out, **options):
    options = {"heads": HEADS, "seeds": 2, "steps": 3, "unseen": 2, "far": 0.1, **options}
    words = [word for name, value in options.items() for word in (f"--{name}", *_words(value))]
    return ["--dataset", str(folder), "--embedding-dim", "8", "--out", str(out), *words]


def _words(value):
    return map(str, value) if isinstance(value, list) else [str(value)]


def fake_run(setting, seed, options, closed, open_set):
    """Numbers that depend on the setting and the seed, without training."""
    random = np.random.default_rng([seed, *str(setting).encode()])
    measures = ("eer", "tar", "rank1", "recall1")
    judged = [dict(zip(measures, random.random(4).tolist(), strict=True)) for _ in range(2)]
    result = dict(zip(("open", "closed"), judged, strict=True))
    if setting.head:
        result |= {"seconds": random.random(), "loss": 0.1, "accuracy": None}
    return result


@pytest.fixture(scope="module")
def finished(compare, folder, tmp_path_factory):
    """A whole comparison of two seeds, not really trained. Do not write here."""
    out = tmp_path_factory.mktemp("finished")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compare, "run", fake_run)
        compare.main(arguments(folder, out))
    return out


@pytest.fixture(scope="module")
def trained(compare, folder, tmp_path_factory):
    """One of a single seed that is. Do not write here."""
    out = tmp_path_factory.mktemp("trained")
    compare.main(arguments(folder, out, seeds=1))
    return out


@pytest.fixture
def out(finished, tmp_path):
    return shutil.copytree(finished, tmp_path / "out")


def results(out):
    """{"ArcFace-matched-seed0": result}."""
    return {path.stem: json.loads(path.read_text())["result"] for path in (out / "runs").iterdir()}


def test_every_run_is_a_file(finished):
    assert {path.name for path in finished.iterdir()} == {
        "runs",
        "table.md",
        "table.csv",
        "comparison.png",
    }
    assert set(results(finished)) == {f"{name}-seed{seed}" for name in SETTINGS for seed in (0, 1)}


def test_the_table_is_numpys(finished):
    found = results(finished)
    with open(finished / "table.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(SETTINGS) * 2
    for row in rows:
        matched = "-matched" if "matched" in row["scale"] else ""
        name = row["head"].replace(" ", "-") + matched
        runs = [found[f"{name}-seed{seed}"] for seed in (0, 1)]
        assert row["runs"] == "2"
        for measure in ("eer", "tar", "rank1", "recall1"):
            values = [run[row["test"]][measure] for run in runs]
            assert float(row[f"{measure}_mean"]) == pytest.approx(np.mean(values))
            assert float(row[f"{measure}_std"]) == pytest.approx(np.std(values, ddof=1))
        if row["head"] == "raw pixels":
            assert row["seconds_mean"] == row["seconds_std"] == ""
        else:
            seconds = [run["seconds"] for run in runs]
            assert float(row["seconds_mean"]) == pytest.approx(np.mean(seconds))


def test_the_text_has_the_same_numbers(finished):
    text, found = (finished / "table.md").read_text("utf-8"), results(finished)
    values = [found[f"CosFace-matched-seed{seed}"]["open"]["eer"] for seed in (0, 1)]
    eer = f"{np.mean(values):.3f} ± {np.std(values, ddof=1):.3f}"
    assert f"| `CosFace` | 1.55 (matched) | {eer} |" in text  # sqrt(2) log(3)
    assert "| head | scale | EER | TAR@FAR=10% | rank-1 | recall@1 |" in text
    # 16 images of 2 strangers; 2 of 8 held out of the others.
    assert "Open set: 2 identities that the training never saw, 16 images, 64 impostor" in text
    assert "Closed set: new images of the 4 trained identities, 8 images, 24 impostor" in text
    assert "24 training images of 4 identities" in text
    assert "With 2 seeds no difference is claimed" in text


def test_one_loss_under_two_names_gives_equal_runs(trained):
    """Weights, centres, batches and dropout of a seed are the same under every head."""
    found = results(trained)
    one, other = (found[f"{head}-matched-seed0"] for head in HEADS)
    assert one.pop("seconds") > 0 and other.pop("seconds") > 0
    assert one == other
    assert one["loss"] != found["CosFace-seed0"]["loss"]  # at its own scale
    assert 0.0 <= one["open"]["eer"] <= 1.0 and 0.0 <= one["accuracy"] <= 1.0


def test_the_picture_is_drawn(finished):
    with Image.open(finished / "comparison.png") as image:
        colors = {color[:3] for _, color in image.convert("RGB").getcolors(2**24)}
    assert {(0, 114, 178), (213, 94, 0)} <= colors  # both kinds of points


def test_a_stopped_comparison_goes_on(compare, folder, trained, tmp_path, monkeypatch, capsys):
    out = shutil.copytree(trained, tmp_path / "out")
    before = results(out)
    (out / "runs" / "CosFace-seed0.json").unlink()
    done, run = [], compare.run
    monkeypatch.setattr(compare, "run", lambda *a: done.append(a[:2]) or run(*a))
    compare.main(arguments(folder, out, seeds=1))
    ((setting, seed),) = done
    assert (str(setting), seed) == ("CosFace", 0)
    again = results(out)
    for found in (before, again):
        del found["CosFace-seed0"]["seconds"]
    assert again == before
    printed = capsys.readouterr().out
    assert "4 of 5 runs are there already." in printed
    assert "[5/5] seed 0, CosFace: open-set EER" in printed


def test_more_seeds_and_heads_join_what_is_there(compare, folder, out, monkeypatch):
    done = []
    monkeypatch.setattr(compare, "run", lambda *a: done.append(a[1]) or fake_run(*a))
    compare.main(arguments(folder, out, seeds=3, heads=[*HEADS, "SoftmaxHead"]))
    assert done == [0, 1, 2, 2, 2, 2, 2, 2]


def test_whoever_is_killed_loses_one_run(compare, folder, tmp_path, monkeypatch):
    calls = itertools.count()

    def killed(*run):
        if next(calls) == 3:
            raise KeyboardInterrupt
        return fake_run(*run)

    monkeypatch.setattr(compare, "run", killed)
    with pytest.raises(KeyboardInterrupt):
        compare.main(arguments(folder, tmp_path / "out"))
    assert len(results(tmp_path / "out")) == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": 4}, "--out has runs of other options.*: steps 3 there, 4 here. Give another"),
        ({"far": 0.2, "scale": 9.0}, r"far 0.1 there, 0.2 here, scale 1.5\d* there, 9.0 here"),
    ],
)
def test_runs_of_other_options_are_refused(compare, folder, out, options, message):
    with pytest.raises(SystemExit, match=f"compare.py: error: .*{message}"):
        compare.main(arguments(folder, out, **options))


def test_runs_of_another_version_or_of_other_images_are_refused(
    compare, folder, out, monkeypatch, tmp_path
):
    monkeypatch.setattr(keras_margin, "__version__", "9.9.9")
    with pytest.raises(SystemExit, match=r"keras_margin \S+ there, 9.9.9 here"):
        compare.main(arguments(folder, out))
    monkeypatch.undo()
    other = shutil.copytree(folder, tmp_path / folder.name)
    shutil.copy(other / "person 0" / "0.png", other / "person 1" / "0.png")
    with pytest.raises(SystemExit, match=r"images [0-9a-f]+ there, [0-9a-f]+ here"):
        compare.main(arguments(other, out))


def test_a_file_that_is_no_run_is_named(compare, folder, out):
    (out / "runs" / "CosFace-seed0.json").write_text("{")
    with pytest.raises(SystemExit, match=r"a file that is no run .*CosFace-seed0.json"):
        compare.main(arguments(folder, out))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"far": 0.01}, "--far must be at least 1 / 24, one impostor.*Received: 0.01"),
        ({"unseen": 1}, "`unseen` must be at least 2.*Received: unseen=1"),
        ({"unseen": 4}, "AdaCos needs `num_classes` of at least 3.*Received: num_classes=2"),
        ({"image-size": [6, 9]}, "images of at least 8 x 8 pixels. Received: 6 x 9"),
        ({"batch": [0, 4]}, "`classes_per_batch` must be .*Received: classes_per_batch=0"),
    ],
)
def test_clear_errors(compare, folder, tmp_path, options, message):
    with pytest.raises(SystemExit, match=f"compare.py: error: .*{message}"):
        compare.main(arguments(folder, tmp_path, **options))


@pytest.mark.parametrize(
    ("name", "value"), [("seeds", 0), ("steps", -1), ("far", 1.5), ("scale", 0.0)]
)
def test_options_out_of_range_are_refused(compare, folder, tmp_path, capsys, name, value):
    with pytest.raises(SystemExit):
        compare.parse_arguments(arguments(folder, tmp_path, **{name: value}))
    assert f"--{name} must be " in capsys.readouterr().err


def test_quick_is_smaller_and_keeps_to_a_folder_of_its_own(compare):
    quick, full = compare.parse_arguments(["--quick"]), compare.parse_arguments([])
    assert quick.seeds < full.seeds == 5 and quick.steps < full.steps
    assert (quick.out.name, full.out.name) == ("compare-orl_faces-quick", "compare-orl_faces")
    assert compare.parse_arguments(["--quick", "--seeds", "7"]).seeds == 7


def test_all_heads_are_compared(compare, part):
    public = {
        name
        for name in keras_margin.__all__
        if hasattr(getattr(keras_margin, name), "counted") and name != "MarginHead"
    }
    assert set(compare.HEADS) == public
    settings = part("training").settings_of(compare.HEADS)
    matched = {setting.head for setting in settings if setting.matched}
    assert matched == {
        head
        for head in public
        if "scale" in inspect.signature(getattr(keras_margin, head)).parameters
    }
    assert {"ArcFace", "NormFace", "SphereFace2"} <= matched
    assert not {"AdaCos", "SoftmaxHead", "SphereFace", "SemiHardTriplet"} & matched


@pytest.mark.parametrize("head", ["ArcFace", "SemiHardTriplet"])
def test_a_seed_starts_every_head_alike(compare, part, folder, head):
    options = compare.parse_arguments(arguments(folder, "unused"))
    _, split_of = compare.prepare(options)
    closed, _ = split_of(3)
    training = part("training")
    one, other, of_another_seed = (
        training.make_model(
            training.Setting(name), seed, options, closed, 10
        ).backbone.get_weights()
        for name, seed in ((head, 3), ("SoftmaxHead", 3), (head, 4))
    )
    assert all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))
    assert not np.array_equal(one[0], of_another_seed[0])


def test_judging_by_hand(part):
    angles = np.array([0.0, 0.1, 0.6, 1.0, 1.1])
    vectors = np.stack([np.cos(angles), np.sin(angles)], axis=1)
    labels = np.array([0, 0, 1, 1, 0])
    judged = part("training").judge(vectors, labels, far=0.5)
    # Enrolled: 0 and 2. Image 1 is next to 0; image 3 to 2; image 4 of identity 0 to 2.
    assert judged["rank1"] == pytest.approx(2 / 3)
    # Nearest others: 0-1 and 1-0 right; 2-3 right; 3-4 and 4-3 wrong.
    assert judged["recall1"] == pytest.approx(3 / 5)
    # By falling cosine, genuine +: 01+ 34- 23+ 24- 12- 02- 13- 03- 14+ 04+, so 2 of 4 at FAR 1/2.
    assert judged["tar"] == 0.5


def summary_of(part, **eers):
    """A `Summary` of open-set EERs: head=[one a seed]; TARs are 1 - EER."""
    setting = part("training").Setting
    results = {
        setting(None if head == "raw" else head): [
            {"failed": "no"} if x is None else {"open": {"eer": x, "tar": 1 - x}} for x in values
        ]
        for head, values in eers.items()
    }
    return part("summary").Summary(results), lambda head: setting(head)


BY_SEED = np.array([0.10, 0.25, 0.15, 0.30, 0.20, 0.35])  # moves all heads together
AROUND = np.array([1, -1, 1, -1, 1, -1]) * 0.001


@pytest.mark.parametrize(
    ("ts", "differ"),
    [
        # Two-sided, 5 degrees of freedom; Holm: 4 p, 3 p, 2 p, p, until one is above 0.05.
        ([5.0, 3.0, 1.0, 0.0], "A"),  # p = 0.0041; 0.0301, which counts if it were the only one
        ([5.0, 3.7, 2.9, 2.7], "AB"),  # p = 0.0140, 3 p and not 4 p; then 2 p = 0.068: no further
        ([3.6, 1.0, 0.0, -1.0], ""),  # 4 p = 0.062; with the spread divided by 6 it would be 0.044
        ([-9.0, 9.0, 0.5, 0.0], "AB"),
    ],
)
def test_differences_are_paired_and_corrected(part, ts, differ):
    error = np.std(AROUND, ddof=1) / math.sqrt(6)
    eers = {head: BY_SEED + AROUND + t * error for head, t in zip("ABCD", ts, strict=True)}
    for head, t in zip("ABCD", ts, strict=True):  # the tests are those of scipy
        assert stats.ttest_rel(eers[head], BY_SEED).statistic == pytest.approx(t, abs=1e-9)
        assert stats.ttest_ind(eers[head], BY_SEED).pvalue > 0.5  # unpaired: nothing to be seen
    summary, setting = summary_of(part, raw=BY_SEED, **eers)
    pairs = [(setting(head), setting(None)) for head in eers]
    named = summary.differences(pairs, "open", "eer")
    assert {pair[0].head: by for pair, by in named.items()} == {
        head: pytest.approx(ts["ABCD".index(head)] * error) for head in differ
    }


def test_equal_numbers_are_no_difference(part):
    summary, setting = summary_of(part, A=[0.1, 0.2, 0.3], B=[0.1, 0.2, 0.3])
    assert summary.differences([(setting("A"), setting("B"))], "open", "eer") == {}


def test_findings_say_who_is_lower_and_what_is_open(part):
    raw = [0.30, 0.31, 0.32, 0.33]
    summary, _ = summary_of(
        part,
        raw=raw,
        SoftmaxHead=[x + d for x, d in zip(raw, (0.1, -0.1, 0.08, -0.1), strict=True)],
        ArcFace=[x - d for x, d in zip(raw, (0.099, 0.1, 0.101, 0.1), strict=True)],
    )
    eer, _, tar, _ = summary.findings(far=0.01)
    assert eer == (
        "Open-set EER against raw pixels: lower: ArcFace -0.100. no difference shown for "
        "the other 1."
    )
    assert tar.startswith("Open-set TAR@FAR=1% against raw pixels: higher: ArcFace +0.100. no")


def test_a_failed_run_is_told_and_not_averaged(part):
    summary, setting = summary_of(part, A=[0.1, None, 0.3], B=[None, None, None])
    assert summary.count(setting("A")) == 2
    assert summary.mean_std(setting("A"), "open", "eer")[0] == pytest.approx(0.2)
    assert all(math.isnan(x) for x in summary.mean_std(setting("B"), "open", "eer"))
    assert summary.best_first() == [setting("A"), setting("B")]
    about = {"title": "t", "intro": "i", "scale": 1.0, "far": 0.1}
    about["test"] = {"open": "o", "closed": "c"}
    text = part("output").definitions(summary, about)
    assert "- A: 2 of 3 runs ended; the others stopped: no" in list(text)


def test_a_loss_that_is_not_finite_is_a_result(compare, part, folder, monkeypatch):
    def diverges(*args):
        raise FloatingPointError("loss is NaN")

    training = part("training")
    monkeypatch.setattr(training, "train", diverges)
    options = compare.parse_arguments(arguments(folder, "unused"))
    _, split_of = compare.prepare(options)
    result = training.run(training.Setting("ArcFace"), 0, options, *split_of(0))
    assert result == {"failed": "loss is NaN"}
