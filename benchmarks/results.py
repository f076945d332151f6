"""What head_step.py says and writes: tables, findings, CSV, a picture."""

import csv
import itertools
import os
import statistics
import tempfile
from pathlib import Path

# Okabe and Ito's palette and a brown: told apart, with the markers, whatever the eye sees.
LABELS = {  # contender: (name, color, marker, line style)
    "products": ("three bare products", "0.4", "x", "--"),
    "arcface-one-block": ("ArcFace, one block", "#009E73", "s", "-"),
    "arcface": ("ArcFace", "#0072B2", "o", "-"),
    "arcface-streamed": ("ArcFace, streamed", "#56B4E9", "^", "-"),
    "adacos": ("AdaCos", "#CC79A7", "D", "-"),
    "arcface-sampled": ("ArcFace, sampled", "#E69F00", "v", "-"),
    "keras-usual": ("usual Keras layer", "#D55E00", "P", ":"),
    "torch-insightface": ("insightface-style (torch)", "#000000", "*", ":"),
    "torch-metric-learning": ("pytorch-metric-learning", "#8C510A", "X", ":"),
}
COLUMNS = (
    "scope contender batch dim classes chunk sample repeats seconds reference reference_seconds "
    "ratio ratio_low ratio_high ratios optimizer_seconds ratio_without_optimizer extra_mb "
    "gradient_mb loss note"
).split()


def label(row):
    name = LABELS[row["contender"]][0]
    if row["contender"] == "arcface-streamed":
        return f"{name}, {number(row['chunk'])} a block"
    if row["contender"] == "arcface-sampled":
        return f"{name}, {number(row['sample'])} at a time"
    return name


def number(value):
    """10000 as 10 000."""
    return f"{value:,}".replace(",", " ")


def gradient_mb(row):
    """The gradient of the centres, which every step must hold."""
    rows = row["sample"] if row["contender"] == "arcface-sampled" else row["classes"]
    return rows * row["dim"] * 4 / 1e6


def title_of(jobs):
    """What runs, as a line of the progress."""
    names = ", ".join(f"{LABELS[job['contender']][0]} {number(job['classes'])}" for job in jobs)
    return f"{jobs[0]['scope']}, batch {jobs[0]['batch']}, dim {jobs[0]['dim']}: {names}"


def progress_of(row):
    """What came out, as another."""
    if "note" in row:
        return f"{label(row)}: {row['note']}"
    parts = [f"{row['seconds']:.3f} s"]
    if "ratio" in row:
        parts.append(f"{row['ratio']:.2f} x {row['reference']}")
    parts.append(f"{row['extra_mb']:.0f} MB")
    return f"{label(row)}: {', '.join(parts)}"


def write_csv(rows, about, path):
    """The rows, each with the machine, to a file that is whole or absent."""
    with tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as folder:
        temporary = Path(folder) / path.name
        with open(temporary, "w", newline="") as file:
            writer = csv.DictWriter(file, [*COLUMNS, *about], extrasaction="ignore")
            writer.writeheader()
            for row in rows:
                ratios = " ".join(f"{ratio:.4f}" for ratio in row.get("ratios", []))
                cells = {**row, "ratios": ratios, "gradient_mb": gradient_mb(row), **about}
                writer.writerow({name: _short(cell) for name, cell in cells.items()})
        os.replace(temporary, path)


def _short(cell):
    return f"{cell:.6g}" if isinstance(cell, float) else cell


# Tables.

TITLES = {
    "head": "Forward and backward of the head alone",
    "fit": "A step of fit",
    "sampled": "A step of fit with sampled classes",
}


def by_shape(rows):
    """{(scope, batch, dim): rows}, the rows by classes and then as `LABELS` has them."""
    order = list(LABELS)
    found = {}
    for row in sorted(rows, key=lambda row: (row["classes"], order.index(row["contender"]))):
        found.setdefault((row["scope"], row["batch"], row["dim"]), []).append(row)
    return dict(sorted(found.items(), key=lambda item: list(TITLES).index(item[0][0])))


def print_tables(rows):
    """Markdown, one table for each scope, batch and dimension."""
    for (scope, batch, dim), of_shape in by_shape(rows).items():
        yardstick = "full head" if scope == "sampled" else "products"
        names = ["classes", "contender", "s", f"{yardstick}, s", f"x {yardstick}", "least to most"]
        if scope != "head":
            names.append("optimizer, s")
        if scope == "fit":
            names.append("x without optimizer")
        names += ["extra MB", "centres' gradient, MB"]
        print(f"\n{TITLES[scope]}, batch {batch}, dim {dim}\n")
        print(f"| {' | '.join(names)} |")
        print(f"|{'--:|' * len(names)}".replace("--:|--:|", "--:|---|", 1))
        for row in of_shape:
            cells = _cells(row, scope)
            print(f"| {' | '.join(cells + [''] * (len(names) - len(cells)))} |")


def _cells(row, scope):
    cells = [number(row["classes"]), label(row)]
    if "note" in row:
        return [*cells, row["note"]]
    cells += [_digits(row["seconds"], 3), _digits(row.get("reference_seconds"), 3)]
    cells.append(_digits(row.get("ratio"), 2))
    spread = [_digits(row.get(name), 2) for name in ("ratio_low", "ratio_high")]
    cells.append(" to ".join(spread) if "ratio" in row else "")
    if scope != "head":
        cells.append(_digits(row.get("optimizer_seconds"), 3))
    if scope == "fit":
        cells.append(_digits(row.get("ratio_without_optimizer"), 2))
    return cells + [_digits(row["extra_mb"], 0), _digits(gradient_mb(row), 0)]


def _digits(value, digits):
    return "" if value is None else f"{value:.{digits}f}"


# Findings.


def print_findings(rows):
    """What the numbers say together: growth with the classes, other heads, equal losses."""
    rows = [row for row in rows if "note" not in row]
    for (scope, batch, dim), of_shape in by_shape(rows).items():
        found = [*flatness(of_shape)] if scope == "sampled" else [*growth(of_shape)]
        if scope != "sampled":
            found += [*others_beside_ours(of_shape)]
        if scope == "head":
            found += [*equal_losses(of_shape)]
        if found:
            print(f"\n{TITLES[scope]}, batch {batch}, dim {dim}\n")
            print(*(f"- {line}" for line in found), sep="\n")


def growth(rows):
    """A line through seconds and through memory over classes, for each contender."""
    for contender in LABELS:
        points = [row for row in rows if row["contender"] == contender]
        if len(points) < 3:
            continue  # two always lie on a line
        classes = [row["classes"] for row in points]
        parts = []
        for key, unit, digits in (("seconds", "s", 3), ("extra_mb", "MB", 0)):
            values = [row[key] for row in points]
            if len(set(values)) > 1:
                slope, start = statistics.linear_regression(classes, values)
                r2 = statistics.correlation(classes, values) ** 2
                parts.append(
                    f"{start:.{digits}f} {unit} + {slope * 1e5:.{digits}f} {unit} per 100 000 "
                    f"classes (r^2 {r2:.4f})"
                )
        span = f"{number(classes[0])} to {number(classes[-1])} classes"
        yield f"{label(points[0])}, {span}: {'; '.join(parts)}"


def flatness(rows):
    """The cost of a sample of fixed size over the classes that it is drawn from."""
    sampled = [row for row in rows if row["contender"] == "arcface-sampled" and "ratio" in row]
    for row in sampled:
        size = number(row["sample"])
        yield (
            f"{size} of {number(row['classes'])} classes: {row['ratio']:.2f} x the step of a full "
            f"head of {size}"
        )
    if len(sampled) > 1:
        # Their ratios, since they took turns with the same reference.
        ratios = [row["ratio"] for row in sampled]
        times = sampled[-1]["classes"] / sampled[0]["classes"]
        yield (
            f"{times:.1f} x the classes for the same sample: {ratios[-1] / ratios[0]:.2f} x the "
            f"time; the slowest of all by the fastest: {max(ratios) / min(ratios):.2f}"
        )


def others_beside_ours(rows):
    """By their ratios to the same products."""
    for classes, of_classes in itertools.groupby(rows, key=lambda row: row["classes"]):
        by_name = {row["contender"]: row for row in of_classes if "ratio" in row}
        for other in ("keras-usual", "torch-insightface", "torch-metric-learning"):
            for own in ("arcface-one-block", "arcface"):
                if other in by_name and own in by_name:
                    yield f"{number(classes)} classes: {_beside(by_name[other], by_name[own])}"


def _beside(other, own):
    time, memory = (other[key] / own[key] for key in ("ratio", "extra_mb"))
    return f"{label(other)} takes {time:.1f} x the time and {memory:.1f} x the extra memory of " + (
        label(own)
    )


def equal_losses(rows):
    """From the same inputs every ArcFace has the same loss, or it is not the same work."""
    rows = [row for row in rows if row["contender"] not in ("products", "adacos")]
    for classes, of_classes in itertools.groupby(rows, key=lambda row: row["classes"]):
        losses = [row["loss"] for row in of_classes]
        if len(losses) > 1:
            agree = max(losses) - min(losses) <= 1e-4 * max(losses)
            yield (
                f"{number(classes)} classes: {'the same' if agree else 'NOT THE SAME'} loss in all "
                f"{len(losses)} ArcFace heads, {min(losses):.4f} to {max(losses):.4f}"
            )


# The picture.


def draw(rows, about, path):
    """Time and extra memory over classes, log-log: a row of two panels for each shape."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = [row for row in rows if "note" not in row]
    shapes = {
        shape: of_shape
        for shape, of_shape in by_shape(rows).items()
        if len({row["classes"] for row in of_shape}) > 1
    }
    if not shapes:
        return False
    height = 4.8 * len(shapes)
    figure, axes = plt.subplots(
        len(shapes), 2, figsize=(12, height), squeeze=False, layout="constrained"
    )
    for (shape, of_shape), (time, memory) in zip(shapes.items(), axes, strict=True):
        scope, batch, dim = shape
        lines = {}
        for row in of_shape:
            lines.setdefault(label(row), []).append(row)
        for name, line in lines.items():
            _, color, marker, style = LABELS[line[0]["contender"]]
            for ax, key in ((time, "seconds"), (memory, "extra_mb")):
                points = [(row["classes"], row[key]) for row in line if row[key] > 0]
                ax.plot(
                    *zip(*points, strict=True) if points else ((), ()),
                    color=color,
                    marker=marker,
                    linestyle=style,
                    label=name,
                    markersize=8,
                )
        for ax, what in ((time, "Seconds per step"), (memory, "Extra peak memory (MB)")):
            ax.set(xscale="log", yscale="log", xlabel="Classes", ylabel=what)
            ax.set_title(f"{TITLES[scope]}\nbatch {batch}, dim {dim}", fontsize=11)
            ticks = sorted({row["classes"] for row in of_shape})
            ax.set_xticks(ticks, [number(tick) for tick in ticks], fontsize=9)
            ax.set_xticks([], minor=True)
            ax.grid(which="both", alpha=0.25)
            low, high = ax.get_ylim()
            if high < 10.0 * low:  # what is flat should look so
                middle = (low * high) ** 0.5
                ax.set_ylim(middle / 10**0.5, middle * 10**0.5)
        memory.legend(loc="center left", bbox_to_anchor=(1.02, 0.5), frameon=False)
    versions = ", ".join(f"{name} {about[name]}" for name in ("tensorflow", "keras"))
    figure.suptitle(f"{about['cpu']}, {about['cores']} cores; {versions}", fontsize=10)
    with tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as folder:
        temporary = Path(folder) / path.name
        figure.savefig(temporary, dpi=120)
        os.replace(temporary, path)
    plt.close(figure)
    return True
