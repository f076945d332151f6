"""The comparison as a table to read, a table to compute with, and a picture."""

import csv
import math

import matplotlib

from keras_margin.files import written_whole

from .summary import JUDGED, MEASURES, tar_name
from .training import RAW_PIXELS, default_scale

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402  (after the choice of backend)

# Okabe and Ito's blue and vermilion: told apart, with the markers, whatever the eye sees.
LOOKS = {False: ("own defaults", "#0072B2", "o"), True: ("matched scale", "#D55E00", "s")}


def scale_of(setting, matched_scale):
    """The scale of a setting in a cell of the table."""
    if setting == RAW_PIXELS:
        return ""
    if setting.matched:
        return f"{matched_scale:.3g} (matched)"
    own = default_scale(setting.head)
    return "its own" if own is None else f"{own:g}"


def as_markdown(summary, about):
    """The text of table.md.

    Args:
        summary: A `Summary`.
        about: dict: `title`, `intro` (str), `scale`, `far` (float), `test` ({"open": str, ...}).
    """
    titles = ["EER", tar_name(about["far"]), "rank-1", "recall@1"]
    lines = [f"# {about['title']}", "", about["intro"]]
    for judged in JUDGED:
        lines += ["", f"## {about['test'][judged]}", ""]
        names = ["head", "scale", *titles, *(["seconds"] if judged == "closed" else [])]
        lines.append(f"| {' | '.join(names)} |")
        lines.append("|---|" + "--:|" * (len(names) - 1))
        for setting in summary.best_first():
            cells = [_cell(summary.mean_std(setting, judged, name), 3) for name in MEASURES]
            if judged == "closed":
                cells.append(_cell(summary.mean_std(setting, "seconds"), 1))
            head = f"`{setting.head}`" if setting.head else str(setting)
            cells = [head, scale_of(setting, about["scale"]), *cells]
            lines.append(f"| {' | '.join(cells)} |")
    lines += ["", "## What the numbers are", "", *definitions(summary, about)]
    lines += ["", "## Differences that the seeds do not explain", ""]
    lines += [f"- {line}" for line in summary.findings(about["far"])]
    return "\n".join(lines) + "\n"


def definitions(summary, about):
    """What a reader must know to use the table."""
    yield from (
        f"- Mean ± sample standard deviation over {summary.seeds_in_words()}, by open-set EER. A "
        "seed decides the weights of the backbone and the centres at the start, the order of the "
        "batches and which images are held out: the same under every head. The strangers of the "
        "open set are the same people in all seeds, so the spread is that of the training, not "
        "that of the choice of people.",
        f"- EER and {tar_name(about['far'])}: all pairs of the test's images, by cosine.",
        "- rank-1: the first image of each identity is enrolled, and the others are looked up.",
        "- recall@1: the nearest of all other test images is of the same identity.",
        "- seconds: of `fit` without its first epoch, in which Keras compiles; on a machine that "
        "other work may have kept busy.",
        "- Differences: seed by seed, since a seed moves all heads together, which the ± holds "
        "too; a paired t-test, with Holm's correction over each line, at 5 %. The order of what no "
        "line names is open.",
    )
    for setting, message in summary.failures().items():
        count = summary.count(setting)
        yield f"- {setting}: {count} of {summary.seeds} runs ended; the others stopped: {message}"


def _cell(mean_std, digits):
    mean, std = mean_std
    if math.isnan(mean):
        return "–"
    return f"{mean:.{digits}f}" + ("" if math.isnan(std) else f" ± {std:.{digits}f}")


def write_csv(summary, about, path):
    """A row for each setting and test; an empty cell is a number that is not defined."""
    statistics = ("mean", "std")
    columns = [f"{name}_{what}" for name in (*MEASURES, "seconds") for what in statistics]
    with written_whole(path) as temporary, open(temporary, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["head", "scale", "test", "runs", *columns])
        for setting in summary.best_first():
            for judged in JUDGED:
                numbers = [x for name in MEASURES for x in summary.mean_std(setting, judged, name)]
                numbers += summary.mean_std(setting, "seconds")
                writer.writerow(
                    [
                        setting.head or str(setting),
                        scale_of(setting, about["scale"]),
                        judged,
                        summary.count(setting),
                        *("" if math.isnan(x) else repr(x) for x in numbers),
                    ]
                )


def write_text(text, path):
    with written_whole(path) as temporary:
        temporary.write_text(text, "utf-8")


def draw(summary, about, path):
    """Open-set EER and TAR@FAR of each head, at its own scale and at the matched one."""
    heads = [s.head for s in summary.best_first() if s != RAW_PIXELS and not s.matched]
    places = {head: place for place, head in enumerate(heads)}
    height = 1.6 + 0.36 * len(heads)
    figure, axes = plt.subplots(1, 2, figsize=(11, height), sharey=True, layout="constrained")
    panels = (
        ("eer", "EER: lower is better"),
        ("tar", f"{tar_name(about['far'])}: higher is better"),
    )
    for ax, (key, title) in zip(axes, panels, strict=True):
        mean, _ = summary.mean_std(RAW_PIXELS, "open", key)
        ax.axvline(mean, color="0.5", linestyle="--", label="raw pixels")
        for matched, (name, color, marker) in LOOKS.items():
            settings = [s for s in summary.results if s.head and s.matched == matched]
            shift = 0.16 if matched else -0.16
            rows = [places[s.head] + shift for s in settings]
            points = [summary.mean_std(s, "open", key) for s in settings]
            for setting, row in zip(settings, rows, strict=True):
                seeds = summary.values(setting, "open", key)
                ax.plot(seeds, [row] * len(seeds), marker, color=color, alpha=0.3, markersize=3)
            ax.errorbar(
                [mean for mean, _ in points],
                rows,
                xerr=[0.0 if math.isnan(std) else std for _, std in points],
                fmt=marker,
                color=color,
                capsize=3,
                markersize=6,
                label=name,
            )
        ax.set_xlabel(title)
        ax.grid(alpha=0.3)
    axes[0].set_yticks(range(len(heads)), heads)
    axes[0].invert_yaxis()  # the best on top
    figure.suptitle(
        f"{about['title']}\n{about['test']['open']}; mean and standard deviation, "
        f"{summary.seeds_in_words()}",
        fontsize=10,
    )
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    with written_whole(path) as temporary:
        figure.savefig(temporary, dpi=120)
    plt.close(figure)
