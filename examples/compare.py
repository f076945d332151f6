"""Compares all heads: the same images, network, batches and steps, over several seeds.

    python examples/compare.py                          faces, 5 seeds, about half an hour
    python examples/compare.py --quick                  fewer steps, 2 seeds, a few minutes
    python examples/compare.py --heads AdaCos ArcFace --seeds 10
    python examples/compare.py --dataset path/to/folder --image-size 112 112

One training serves two tests: new images of the trained identities, and identities that it never
saw. Heads that take a scale run twice, with their own and with one that all share. Every finished
run is a file in --out: the same command again goes on where it was stopped, and more seeds or heads
join what is there.
"""

import argparse
import hashlib
import math
import sys
import time
from pathlib import Path

import keras
from backbones import SMALLEST_IMAGE
from comparison import output
from comparison.run_folder import RunFolder
from comparison.summary import Summary
from comparison.training import epochs_of, make_batches, run, settings_of
from image_sets import load, split_for_both
from report import check_writable
from train import HEADS as CLASSIFIERS

import keras_margin
from keras_margin.scales import fixed_adacos_scale

HEADS = (*CLASSIFIERS, "SemiHardTriplet")
HELD_OUT = 0.3  # of each trained identity's images
FULL, QUICK = {"seeds": 5, "steps": 400}, {"seeds": 2, "steps": 100}


def parse_arguments(arguments=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--dataset", default="orl_faces", help="as in train.py (default: orl_faces)"
    )
    parser.add_argument(
        "--heads", nargs="+", default=HEADS, choices=sorted(HEADS), help="default: all"
    )
    parser.add_argument("--quick", action="store_true", help="2 seeds, 100 steps")
    parser.add_argument("--seeds", type=int, metavar="N", help="0 to N - 1 (default: 5)")
    parser.add_argument(
        "--steps", type=int, help="of training, rounded up to whole epochs (default: 400)"
    )
    parser.add_argument(
        "--batch",
        type=int,
        nargs=2,
        default=(8, 4),
        metavar=("IDENTITIES", "IMAGES"),
        help="identities of a batch, and images of each (default: 8 4)",
    )
    parser.add_argument("--learning-rate", type=float, default=2e-3, help="default: 0.002 (AdamW)")
    parser.add_argument(
        "--embedding-dim",
        type=int,
        default=128,
        help="of all heads (default: 128, for MagFace, see train.py)",
    )
    parser.add_argument(
        "--scale", type=float, help="the matched one (default: AdaCos' fixed, sqrt(2) log(C - 1))"
    )
    parser.add_argument("--far", type=float, default=0.01, help="of TAR@FAR (default: 0.01)")
    parser.add_argument(
        "--unseen",
        type=int,
        metavar="K",
        help="keep the last K identities for the open set (default: a quarter)",
    )
    parser.add_argument("--image-size", type=int, nargs=2, metavar=("HEIGHT", "WIDTH"))
    parser.add_argument("--data-dir", help="where TensorFlow Datasets keeps its files")
    parser.add_argument("--out", type=Path, help="default: runs/compare-DATASET[-quick]")
    options = parser.parse_args(arguments)
    for name, value in (QUICK if options.quick else FULL).items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    for name in ("seeds", "steps", "embedding_dim"):
        value = getattr(options, name)
        if value < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1. Received: {value}")
    for name in ("learning_rate", "scale"):
        value = getattr(options, name)
        if value is not None and not 0.0 < value < math.inf:
            parser.error(f"--{name.replace('_', '-')} must be positive. Received: {value}")
    if not 0.0 < options.far < 1.0:
        parser.error(f"--far must be between 0 and 1. Received: {options.far}")
    if options.out is None:
        quick = "-quick" if options.quick else ""
        options.out = Path("runs") / f"compare-{Path(options.dataset).name}{quick}"
    return options


def prepare(options):
    """Loads the images, and fills in the options that follow from them.

    Returns:
        The image set, and `split_of(seed)` -> closed, open.
    """
    image_set = load(options.dataset, data_dir=options.data_dir, image_size=options.image_size)
    if options.unseen is None:
        options.unseen = max(2, len(image_set.names) // 4)

    def split_of(seed):
        return split_for_both(image_set, unseen=options.unseen, held_out=HELD_OUT, seed=seed)

    closed, open_set = split_of(0)
    if options.scale is None:
        options.scale = fixed_adacos_scale(len(closed.train_names))
    make_batches(0, options, closed)  # says early what cannot be
    height, width = image_set.images.shape[1:3]
    if min(height, width) < SMALLEST_IMAGE:
        raise ValueError(
            f"The network needs images of at least {SMALLEST_IMAGE} x {SMALLEST_IMAGE} pixels. "
            f"Received: {height} x {width}"
        )
    fewest = min(impostor_pairs(closed.test_labels), impostor_pairs(open_set.test_labels))
    if options.far * fewest < 1:
        raise ValueError(
            f"--far must be at least 1 / {fewest}, one impostor pair of the smaller test. "
            f"Received: {options.far:g}"
        )
    return image_set, split_of


def impostor_pairs(labels):
    counts = [int((labels == label).sum()) for label in set(labels.tolist())]
    return (len(labels) ** 2 - sum(count**2 for count in counts)) // 2


def fingerprint(options, image_set):
    """All that a run's numbers depend on but its head and seed."""
    digest = hashlib.sha256(image_set.labels.tobytes())
    digest.update(image_set.images.tobytes())
    names = "steps batch learning_rate embedding_dim scale far unseen image_size".split()
    return {
        "dataset": Path(options.dataset).name,
        "images": digest.hexdigest()[:16],
        **{name: getattr(options, name) for name in names},
        "held_out": HELD_OUT,
        "backend": keras.backend.backend(),
        "keras": keras.__version__,
        "keras_margin": keras_margin.__version__,
    }


def run_all(options, folder, split_of):
    """Does the runs that the folder does not have, seed by seed, and says how far it is."""
    settings = settings_of(options.heads)
    todo = [
        (seed, setting)
        for seed in range(options.seeds)
        for setting in settings
        if folder.get(setting, seed) is None
    ]
    total = options.seeds * len(settings)
    done = total - len(todo)
    if done:
        print(f"{done} of {total} runs are there already.", flush=True)
    start, splits = time.perf_counter(), {}
    for number, (seed, setting) in enumerate(todo, start=1):
        if seed not in splits:
            splits = {seed: split_of(seed)}
        result = run(setting, seed, options, *splits[seed])
        folder.add(setting, seed, result)
        left = (time.perf_counter() - start) / number * (len(todo) - number)
        said = result.get("failed") or f"open-set EER {_shown(result['open']['eer'])}"
        place = f"[{done + number}/{total}]"
        print(f"{place} seed {seed}, {setting}: {said}; {_minutes(left)} left", flush=True)


def _shown(value):
    return "undefined" if value is None else f"{value:.3f}"


def _minutes(seconds):
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"


def describe(options, closed, open_set):
    """What the table says of the runs."""
    batches = make_batches(0, options, closed)
    steps = epochs_of(options, batches) * len(batches)
    batch = f"{min(options.batch[0], len(closed.train_names))} identities x {options.batch[1]}"
    tests = {"open": open_set, "closed": closed}
    kinds = {
        "open": f"Open set: {len(open_set.test_names)} identities that the training never saw",
        "closed": f"Closed set: new images of the {len(closed.test_names)} trained identities",
    }
    return {
        "title": f"{Path(options.dataset).name}: heads compared",
        "intro": (
            f"{len(closed.train_images)} training images of {len(closed.train_names)} identities, "
            f"`small_cnn` of {options.embedding_dim} dimensions, {steps} steps of "
            f"{batch} images, AdamW at {options.learning_rate:g} falling to 0: the same for all "
            "heads. Nothing was tuned for any of them."
        ),
        "scale": options.scale,
        "far": options.far,
        "test": {
            name: f"{kinds[name]}, {len(test.test_labels)} images, "
            f"{impostor_pairs(test.test_labels):,} impostor pairs"
            for name, test in tests.items()
        },
    }


def main(arguments=None):
    options = parse_arguments(arguments)
    try:
        check_writable(options.out)
        image_set, split_of = prepare(options)
        folder = RunFolder(options.out / "runs", fingerprint(options, image_set))
    except (ValueError, OSError, ImportError) as error:
        sys.exit(f"compare.py: error: {error}")
    run_all(options, folder, split_of)

    seeds = range(options.seeds)
    summary = Summary(
        {s: [folder.get(s, seed) for seed in seeds] for s in settings_of(options.heads)}
    )
    about = describe(options, *split_of(0))
    table = output.as_markdown(summary, about)
    output.write_text(table, options.out / "table.md")
    output.write_csv(summary, about, options.out / "table.csv")
    output.draw(summary, about, options.out / "comparison.png")
    print(f"\n{table}\nWritten to {options.out}: table.md, table.csv, comparison.png, runs/")


if __name__ == "__main__":
    main()
