"""Finds out who is on a picture: enrols a folder of people, then asks about other pictures.

    python examples/search.py enrol encoder.keras people/ --out people.npz
    python examples/search.py ask people.npz one.png two.jpg
    python examples/search.py demo                    faces: right, wrong and unknown, counted

`people/` has a folder for each person. "Unknown" is an answer: below a threshold nobody is named.
Unless `--threshold` gives it, it comes from the enrolled pictures: each is looked up among those of
the other people, as a stranger would be, and at most a share --far may be taken for someone.
"""

import argparse
import hashlib
import math
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
from sklearn.neighbors import NearestNeighbors

from keras_margin import datasets, verification
from keras_margin.encoders import load_encoder
from keras_margin.files import written_whole

UNKNOWN = "unknown"


class People(NamedTuple):
    """Enrolled pictures, and from which cosine on a picture is one of theirs.

    Attributes:
        embeddings: float32 (pictures, dim), rows of length 1.
        labels: (pictures,), in 0..len(names)-1.
        names: (people,) of `str`.
        threshold: a cosine.
        encoder: path of the encoder.
        digest: of the encoder's file or files.
    """

    embeddings: np.ndarray
    labels: np.ndarray
    names: np.ndarray
    threshold: float
    encoder: str
    digest: str


def nearest(embeddings, enrolled):
    """The nearest enrolled picture of each row: cosine and index.

    Exact, in blocks. For millions of pictures take usearch or hnswlib, which answer alike.
    """
    search = NearestNeighbors(n_neighbors=1, metric="cosine", algorithm="brute").fit(enrolled)
    distances, places = search.kneighbors(embeddings)
    return 1.0 - distances[:, 0], places[:, 0]


def calibrated(embeddings, labels, far, probes, gallery):
    """The threshold at which at most a share `far` of strangers is taken for someone.

    Every probe is a stranger once, looked up among the other people of the gallery, and known once,
    where the gallery has another picture of the same person.

    Args:
        embeddings, labels: of all pictures.
        far: the share.
        probes, gallery: bool (pictures,), which may overlap.

    Raises:
        ValueError: there are too few pictures for this share.
    """
    strangers, known = [], []
    for i in np.flatnonzero(probes):
        own = gallery & (labels == labels[i])
        others = gallery & (labels != labels[i])
        own[i] = False
        for found, among in ((strangers, others), (known, own)):
            if among.any():
                found.append(nearest(embeddings[i : i + 1], embeddings[among])[0][0])
    if far * len(strangers) < 1 or not known:
        raise ValueError(
            f"{np.count_nonzero(probes)} pictures of {len(np.unique(labels[probes]))} people are "
            f"too few to find the threshold: --far must be at least 1 / {len(strangers)}, and "
            "someone must have two pictures. Enrol more, or give --threshold. Received: --far "
            f"{far:g}"
        )
    genuine = np.arange(len(strangers) + len(known)) >= len(strangers)
    return verification.threshold_at_far(np.array(strangers + known), genuine, far)


def identified(embeddings, people):
    """The name of each row, or `UNKNOWN`, and the cosine of the nearest picture."""
    cosines, places = nearest(embeddings, people.embeddings)
    names = people.names[people.labels[places]]
    return np.where(cosines >= people.threshold, names, UNKNOWN), cosines


def enrol(options):
    if options.out.is_dir():  # before the work
        raise ValueError(f"--out must be a file, but a folder is there. Received: {options.out}")
    encoder = load_encoder(options.encoder)
    paths, labels, names = datasets.identity_folder(options.folder)
    if UNKNOWN in names:
        raise ValueError(f"A folder must not be called {UNKNOWN!r}, which is an answer.")
    embeddings = unit_embeddings(encoder, paths)
    threshold = options.threshold
    if threshold is None:
        every = np.ones(len(labels), bool)
        threshold = calibrated(embeddings, labels, options.far, probes=every, gallery=every)
    digest = digest_of(options.encoder)
    people = People(embeddings, labels, np.array(names), threshold, str(options.encoder), digest)
    with written_whole(options.out) as path, open(path, "wb") as file:
        np.savez(file, **people._asdict())
    print(
        f"{len(paths)} pictures of {len(names)} people are in {options.out}; known from cosine "
        f"{threshold:.3f} on."
    )


def ask(options):
    people = load_people(options.people)
    if not Path(people.encoder).exists():
        raise ValueError(
            f"The encoder {people.encoder} is not there: put it back, ask from the folder where "
            "it was enrolled, or enrol again."
        )
    if digest_of(people.encoder) != people.digest:
        raise ValueError(
            f"The encoder {people.encoder} is another one than at enrolment: enrol again."
        )
    embeddings = unit_embeddings(load_encoder(people.encoder), options.pictures)
    for path, name, cosine in zip(options.pictures, *identified(embeddings, people), strict=True):
        print(f"{path}: {name} (cosine {cosine:.3f})")


def load_people(path):
    try:
        with np.load(path, allow_pickle=False) as file:
            found = {name: file[name] for name in People._fields}
        for name, kind in (("threshold", float), ("encoder", str), ("digest", str)):
            found[name] = kind(found[name])
    except FileNotFoundError:
        raise
    # Damaged archives end in almost any error, of zipfile or of NumPy.
    except Exception as error:
        raise ValueError(f"These are no enrolled people ({error}). Received: {path}") from error
    people = People(**found)
    rows = len(people.embeddings) if people.embeddings.ndim == 2 else 0
    if (
        rows == 0
        or people.embeddings.dtype.kind != "f"
        or people.labels.dtype.kind not in "iu"
        or people.labels.shape != (rows,)
        or people.names.dtype.kind != "U"
        or people.names.ndim != 1
        or not -1.0 <= people.threshold <= 1.0
        or not np.isfinite(people.embeddings).all()
        or not np.isin(people.labels, np.arange(len(people.names))).all()
    ):
        raise ValueError(f"These are no enrolled people (damaged). Received: {path}")
    return people


def unit_embeddings(encoder, images):
    rows = datasets.embed_images(encoder, images, verbose=1 if sys.stdout.isatty() else 0)
    zero = ~rows.any(axis=1)
    if zero.any():
        raise ValueError(f"The encoder gives nothing but 0 for {images[int(np.argmax(zero))]}.")
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def digest_of(path):
    path = Path(path)
    files = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.read_bytes())
    return digest.hexdigest()


# The demonstration: ORL's faces, people that are enrolled and people that nobody has seen.


def demo(options):
    """Enrols 5 pictures of 30 people, and asks about their other 5 and all 10 of 10 strangers.

    Again and again with other people drawn as strangers: ten are few, and some look alike.
    """
    from image_sets import load

    faces = load("orl_faces")
    print(f"{'':16}  150 pictures of 30 known people     100 pictures of 10 strangers")
    print(f"{'draw':>4}{'threshold':>12}{'right':>11}{'wrong':>10}{'unknown':>12}", end="")
    print(f"{'named':>14}{'unknown':>12}")
    counts = []
    for draw in range(options.draws):
        threshold, *found = asked_once(faces, options.seed + draw, options.epochs, options.far)
        counts.append(found)
        print_row(f"{draw + 1:4}{threshold:12.3f}", found, "d")
    if options.draws > 1:
        print_row(f"{'mean':16}", np.mean(counts, axis=0), ".1f")
    print(
        "\nFor a stranger `unknown` is the right answer. Asked for: at most a share of "
        f"{options.far:g} named (--far)."
    )


def print_row(title, counts, form):
    widths = (11, 10, 12, 14, 12)
    cells = [f"{n:{w}{form}}" for n, w in zip(counts, widths, strict=True)]
    print(title + "".join(cells), flush=True)


def asked_once(faces, seed, epochs, far):
    """Threshold; known people right, wrong, unknown; strangers with a name, unknown.

    The network learns from 20 of the 30. The others give the threshold: it must keep out strangers,
    and people that a network was trained on tell nothing of them.
    """
    import keras
    from backbones import small_cnn

    import keras_margin

    labels = np.random.default_rng(seed).permutation(40)[faces.labels]
    rank = np.array([np.sum(labels[:i] == y) for i, y in enumerate(labels)])
    known = labels < 30
    enrolled, asked = known & (rank < 5), (known & (rank >= 5)) | ~known
    trained, untrained = enrolled & (labels < 20), enrolled & (labels >= 20)

    keras.utils.set_random_seed(seed)
    model = keras_margin.EmbeddingModel(small_cnn(faces.images.shape[1:]), keras_margin.AdaCos(20))
    schedule = keras.optimizers.schedules.CosineDecay(2e-3, epochs * 4)
    model.compile(keras.optimizers.AdamW(schedule, weight_decay=1e-4))
    model.fit(faces.images[trained], labels[trained], epochs=epochs, verbose=0)
    embeddings = model.encoder.predict(faces.images, verbose=0)

    threshold = calibrated(embeddings, labels, far, probes=untrained, gallery=enrolled)
    names = np.array([f"person {label}" for label in range(40)])
    people = People(embeddings[enrolled], labels[enrolled], names, threshold, "", "")
    answers, _ = identified(embeddings[asked], people)
    is_known, is_unknown = known[asked], answers == UNKNOWN
    is_right = answers == names[labels[asked]]
    outcomes = [
        is_known & is_right,
        is_known & ~is_right & ~is_unknown,
        is_known & is_unknown,
        ~is_known & ~is_unknown,
        ~is_known & is_unknown,
    ]
    return threshold, *(int(np.count_nonzero(outcome)) for outcome in outcomes)


def parse_arguments(arguments=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    one = commands.add_parser("enrol", help="remember a folder of people")
    one.add_argument("encoder", type=Path, help="a .keras file or a SavedModel")
    one.add_argument("folder", type=Path, help="with a folder for each person")
    one.add_argument("--out", type=Path, default=Path("people.npz"), help="default: people.npz")
    one.add_argument("--threshold", type=float, help="a cosine; default: from the pictures")
    one.add_argument("--far", type=float, default=0.05, help="default: 0.05")
    one.set_defaults(run=enrol)
    one = commands.add_parser("ask", help="who is on these pictures?")
    one.add_argument("people", type=Path, help="what `enrol` wrote")
    one.add_argument("pictures", nargs="+")
    one.set_defaults(run=ask)
    one = commands.add_parser("demo", help="trains on faces, enrols, asks, counts")
    one.add_argument("--epochs", type=int, default=30, help="default: 30")
    one.add_argument("--draws", type=int, default=5, help="of who is a stranger; default: 5")
    one.add_argument("--seed", type=int, default=0, help="of the first draw; default: 0")
    one.add_argument("--far", type=float, default=0.1, help="default: 0.1, 5 of 50 pictures")
    one.set_defaults(run=demo)
    options = parser.parse_args(arguments)
    threshold = getattr(options, "threshold", None)
    if threshold is not None and not -1.0 <= threshold <= 1.0:
        parser.error(f"--threshold must be a cosine, from -1 to 1. Received: {threshold}")
    if min(getattr(options, "epochs", 1), getattr(options, "draws", 1)) < 1:
        parser.error("--epochs and --draws must be at least 1")
    if not 0 <= getattr(options, "seed", 0) < 2**31:
        parser.error("--seed must be from 0 to 2^31 - 1")
    far = getattr(options, "far", 0.5)
    if not 0.0 < far <= 1.0 or math.isnan(far):
        parser.error(f"--far must be above 0 and at most 1. Received: {far}")
    return options


def main(arguments=None):
    options = parse_arguments(arguments)
    try:
        options.run(options)
    except (ValueError, OSError, ImportError) as error:
        sys.exit(f"search.py: error: {error}")


if __name__ == "__main__":
    main()
