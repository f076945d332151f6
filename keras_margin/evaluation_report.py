"""The report of an evaluation: a page, its pictures, and the numbers for machines.

matplotlib is optional and imported only to draw.
"""

import math
import os
from pathlib import Path

import numpy as np

from keras_margin import plots
from keras_margin.files import write_json, written_whole
from keras_margin.images import name_of, read_image
from keras_margin.judging import CONFIDENCE

TITLES = {
    "accuracy": "accuracy, mean over the folds",
    "accuracy_std": "accuracy, standard deviation of the folds",
    "eer": "equal error rate (EER)",
    "rank1": "rank 1 (recall@1)",
    "r_precision": "R-precision",
    "map_at_r": "MAP@R",
}
FILES = ("report.json", "report.md", "roc.png", "scores.png", "pairs.png")
THUMBNAIL = 96  # pixels
UNDEFINED = "undefined"


def write_report(folder, run, test_set, judgement, warnings=()):
    """Writes `report.md`, its pictures and `report.json` into a folder.

    `report.json` goes first and comes back last: where it is, all the rest is of the same run. A
    picture that is not defined is left out.

    Args:
        folder: it is made; files of an earlier report there are replaced.
        run: {name: value} of how it was run, for both files. Its `encoder` and `data` are paths.
        test_set: `judging.TestSet`.
        judgement: `judging.Judgement`.
        warnings: list of `str`, what has been said of undefined figures and the like.

    Returns:
        list of `str`, the names of the files that were written.

    Raises:
        OSError: the folder cannot be written.
        ImportError: matplotlib or Pillow is not installed.
    """
    folder = Path(folder)
    for name in FILES:
        (folder / name).unlink(missing_ok=True)
    pictures = _write_pictures(folder, test_set, judgement)
    with written_whole(folder / "report.md") as path:
        # The name of a file need not be valid UTF-8.
        page = _page(run, test_set, judgement, pictures, warnings)
        path.write_text(page, "utf-8", "backslashreplace")
    content = {
        "run": run,
        "counts": _counts(test_set, judgement),
        "figures": judgement.figures,
        "thresholds": {f"far={far:g}": value for far, value in judgement.thresholds.items()},
        "pictures": list(pictures),
        "warnings": list(warnings),
    }
    write_json(folder / "report.json", content)
    return ["report.md", *pictures, "report.json"]


def summary(judgement):
    """The figures as lines of text, for a terminal."""
    rows = list(_figure_rows(judgement))
    for far, tar, interval, threshold in _rate_rows(judgement):
        at = "" if threshold == UNDEFINED else f", from cosine {threshold} on"
        rows.append((f"TAR@FAR={far}{at}", tar, interval))
    return "\n".join(
        f"{title:48}{value:>10}  {interval}".rstrip() for title, value, interval in rows
    )


def _counts(test_set, judgement):
    counts = {"images": len(test_set.images)}
    if test_set.labels is not None:
        counts["identities"] = len(np.unique(test_set.labels))
    if test_set.folds is not None:
        counts["folds"] = test_set.folds
    return {
        **counts,
        "genuine_pairs": judgement.genuine_pairs,
        "impostor_pairs": judgement.impostor_pairs,
    }


def _figure_rows(judgement):
    """(title, value, interval) of each figure that does not depend on a rate."""
    figures = judgement.figures
    for name, value in figures.items():
        if not name.endswith("_interval") and not name.startswith("tar@far="):
            yield TITLES.get(name, name), _number(value), _interval(figures, name)


def _rate_rows(judgement):
    """(false accept rate, true accept rate, interval, threshold) of each rate."""
    figures = judgement.figures
    for far, threshold in judgement.thresholds.items():
        name = f"tar@far={far:g}"
        yield f"{far:g}", _number(figures[name]), _interval(figures, name), _number(threshold)


def _number(value):
    return UNDEFINED if math.isnan(value) else f"{value:.4f}"


def _interval(figures, name):
    interval = figures.get(f"{name}_interval")
    if interval is None or any(math.isnan(end) for end in interval):
        return ""
    return f"{interval[0]:.4f} to {interval[1]:.4f}"


def _page(run, test_set, judgement, pictures, warnings):
    """The text of `report.md`."""
    interval = f"{100 * CONFIDENCE:g} % interval"
    counts = _counts(test_set, judgement)
    counts = [f"{value:,} {name.replace('_', ' ')}" for name, value in counts.items()]
    lines = [
        f"# {_code(run['encoder'])} on {_code(run['data'])}",
        "",
        f"{test_set.kind.capitalize()}: {', '.join(counts)}.",
        "",
        *_table(["measure", "value", interval], _figure_rows(judgement)),
        "",
        *_table(
            ["FAR at most", "TAR", interval, "threshold (cosine)"],
            _rate_rows(judgement),
        ),
        "",
        "A pair is accepted from the threshold on; `report.json` has all digits.",
    ]
    if any(name.endswith("_interval") for name in judgement.figures):
        lines += [
            "",
            "The intervals say how far the numbers would move with other people, by drawing the "
            "identities anew; with fewer than about thirty they are too narrow.",
        ]
    if warnings:
        lines += ["", "## What to know", "", *(f"- {_flat(text)}" for text in warnings)]
    for name, caption in pictures.items():
        lines += ["", f"![{caption}]({name})", "", f"{caption}."]
    lines += ["", "## How it was run", ""]
    lines += [f"- {name}: {_code(value)}" for name, value in run.items() if value is not None]
    return "\n".join(lines) + "\n"


def _table(header, rows):
    """Lines of a Markdown table; a column that is empty is left out."""
    rows = list(rows)
    kept = [place for place in range(len(header)) if any(row[place] for row in rows)]
    lines = [header, ["---"] * len(header), *rows]
    return [f"| {' | '.join(line[place] for place in kept)} |" for line in lines]


def _code(value):
    return f"`{_flat(value).replace('`', chr(39))}`"


def _flat(value):
    return " ".join(str(value).split())


def _write_pictures(folder, test_set, judgement):
    """Draws what is defined: {file name: caption}."""
    pictures = {}
    genuine = judgement.genuine
    part = ""
    if len(genuine) < judgement.genuine_pairs + judgement.impostor_pairs:
        part = (
            f", of a random part: {np.count_nonzero(genuine):,} of {judgement.genuine_pairs:,} "
            f"genuine and {np.count_nonzero(~genuine):,} of {judgement.impostor_pairs:,} impostor "
            "pairs"
        )
    if judgement.genuine_pairs and judgement.impostor_pairs:
        figure, ax = _figure()
        plots.roc(judgement.scores, genuine, ax=ax)
        _save(figure, folder / "roc.png")
        pictures["roc.png"] = f"True accept rate over false accept rate{part}"
    if len(genuine):
        figure, ax = _figure()
        plots.score_histogram(judgement.scores, genuine, ax=ax)
        _draw_threshold(ax, judgement.thresholds)
        _save(figure, folder / "scores.png")
        pictures["scores.png"] = f"Cosines of the pairs{part}"
        _save(_hardest_pairs(test_set, judgement), folder / "pairs.png")
        pictures["pairs.png"] = "The pairs that are hardest to tell, each with its cosine"
    return pictures


def _figure():
    from matplotlib.figure import Figure  # without pyplot: no window, nothing to close

    figure = Figure(figsize=(6, 4.5), layout="constrained")
    return figure, figure.subplots()


def _draw_threshold(ax, thresholds):
    """A line at the strictest threshold that is defined."""
    defined = {far: value for far, value in thresholds.items() if not math.isnan(value)}
    if defined:
        far = min(defined)
        label = f"threshold at FAR={far:g}: {defined[far]:.3f}"
        ax.axvline(defined[far], color="0.2", linestyle="--", linewidth=1.5, label=label)
        ax.legend()


def _hardest_pairs(test_set, judgement):
    """A figure of two rows of pairs: impostors that look alike, genuine ones that do not."""
    from matplotlib.figure import Figure

    rows = [
        ("Two identities, the highest cosines", judgement.hardest["impostor"]),
        ("One identity, the lowest cosines", judgement.hardest["genuine"]),
    ]
    rows = [row for row in rows if row[1]]
    columns = max(len(pairs) for _, pairs in rows)
    size = (max(2 * columns, 4), 2.1 * len(rows))
    figure = Figure(figsize=size, layout="constrained")
    for part, (title, pairs) in zip(figure.subfigures(len(rows), squeeze=False), rows, strict=True):
        part[0].suptitle(title)
        for ax, pair in zip(part[0].subplots(1, columns, squeeze=False)[0], pairs, strict=False):
            score, *both = pair
            ax.imshow(np.concatenate([_thumbnail(test_set.images[i], i) for i in both], axis=1))
            ax.set_title(f"{score:.3f}", fontsize=9)
            names = "\n".join(_short_name(test_set.images[i], i) for i in both)
            ax.set_xlabel(names, fontsize=7, parse_math=False)
            ax.set(xticks=[], yticks=[])
            ax.spines[:].set_visible(False)
        for ax in part[0].axes[len(pairs) :]:
            ax.set_axis_off()
    return figure


def _thumbnail(image, index):
    """uint8 (THUMBNAIL, THUMBNAIL + 2, 3), the whole image on white."""
    from PIL import ImageOps

    side = (THUMBNAIL, THUMBNAIL)
    decoded = read_image(image, name_of(image, index)).convert("RGB")
    padded = np.asarray(ImageOps.pad(decoded, side, color="white"))
    return np.pad(padded, ((0, 0), (1, 1), (0, 0)), constant_values=255)


def _short_name(image, index):
    if isinstance(image, bytes):
        return f"image {index}"
    folder, name = os.path.split(os.fspath(image))
    text = f"{os.path.basename(folder)}/{name}"
    text = text.encode("ascii", "replace").decode()  # what every font can draw
    return text if len(text) <= 28 else f"...{text[-25:]}"


def _save(figure, path):
    with written_whole(path) as temporary:
        figure.savefig(temporary, dpi=120)
