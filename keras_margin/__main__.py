"""Commands of the package.

python -m keras_margin evaluate ENCODER DATA    judges a trained encoder
"""

import argparse
import contextlib
import sys
import warnings
from pathlib import Path

import keras

import keras_margin
from keras_margin.checks import checked_seed
from keras_margin.encoders import load_encoder
from keras_margin.evaluation_report import summary, write_report
from keras_margin.files import check_writable
from keras_margin.images import embed_images
from keras_margin.judging import judge, read_test_set
from keras_margin.score_checks import check_named_far

EVALUATE = """Judges a trained encoder on images of people, and writes a report with pictures.

ENCODER is the .keras file of an encoder or of an EmbeddingModel, or the folder of a SavedModel.
DATA is one of

  - a folder that has a folder for each identity: all pairs, and rankings;
  - a verification set of insightface, as lfw.bin: its pairs;
  - with --pairs, a folder of images that a list in the form of LFW's pairs.txt names.
"""


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line."""

    def error(self, message):
        self.exit(2, f"{self.prog}: error: {' '.join(message.split())}\n")


def parser():
    """The commands and their options."""
    top = Parser("keras_margin", description="Margin heads of face recognition as Keras layers.")
    top.add_argument(
        "--version", action="version", version=f"keras_margin {keras_margin.__version__}"
    )
    commands = top.add_subparsers(title="commands", dest="command", metavar="COMMAND")
    evaluate = commands.add_parser(
        "evaluate",
        help="judge a trained encoder on images of people",
        description=EVALUATE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    option = evaluate.add_argument
    option("encoder", type=Path, metavar="ENCODER")
    option("data", type=Path, metavar="DATA")
    option("--pairs", type=Path, help="a list of pairs of the images in DATA")
    option(
        "--far",
        type=float,
        nargs="+",
        default=[1e-1, 1e-2, 1e-3],
        help="false accept rates (default: 0.1 0.01 0.001)",
    )
    option("--out", type=Path, help="folder for the report (default: beside ENCODER, NAME-on-DATA)")
    option("--flip", action="store_true", help="add the embedding of the mirror image")
    option(
        "--preprocess",
        choices=["none", "unit", "symmetric"],
        default="none",
        help="what ENCODER wants of pixels: 0 to 255 (none), 0 to 1 (unit), -1 to 1 (symmetric)",
    )
    option(
        "--image-size",
        type=int,
        nargs=2,
        metavar=("HEIGHT", "WIDTH"),
        help="where ENCODER takes images of any size",
    )
    option("--batch-size", type=int, default=64, help="images at a time (default: 64)")
    option("--folds", type=int, help="of a list's accuracy (default: as the list says, or 10)")
    option(
        "--no-intervals",
        dest="intervals",
        action="store_false",
        help="leave out the intervals of an identity folder, which take minutes on 10^8 pairs",
    )
    option("--seed", type=int, default=0, help="of what is drawn at random (default: 0)")
    evaluate.set_defaults(run=run_evaluate, error=evaluate.error)
    return top


def run_evaluate(options, said):
    """Reads, embeds, judges and writes.

    Args:
        options: the parsed arguments.
        said: list of the warnings so far, which grows.

    Raises:
        ValueError, OSError, ImportError: what the user can mend.
    """
    check_named_far(options.far)
    checked_seed(options.seed)
    _check_pictures()
    test_set = read_test_set(options.data, options.pairs, options.folds)
    out = options.out or _beside(options)
    if out.resolve().is_relative_to(options.data.resolve()):
        raise ValueError(
            "--out must not be in DATA, where the pictures of the report would be taken for a "
            f"person the next time. Received: {str(out)!r}"
        )
    encoder = load_encoder(options.encoder)
    check_writable(out)  # after the encoder: a path that is mistyped makes no folders
    verbose = 1 if sys.stdout.isatty() else 2  # a bar, or a line in a file
    print(f"{encoder.kind}, {len(test_set.images):,} images ({test_set.kind})")
    embeddings = embed_images(
        encoder,
        test_set.images,
        flip=options.flip,
        preprocess=None if options.preprocess == "none" else options.preprocess,
        image_size=options.image_size,
        batch_size=options.batch_size,
        verbose=verbose,
    )
    judgement = judge(
        *(embeddings, test_set, options.far),
        intervals=options.intervals,
        seed=options.seed,
        verbose=verbose,
    )
    run = {
        **{name: _plain(value) for name, value in vars(options).items() if name in REPORTED},
        "encoder_kind": encoder.kind,
        "image_shape": encoder.image_shape,
        "embedding_dim": embeddings.shape[1],
        "keras_margin": keras_margin.__version__,
        "keras": f"{keras.__version__} on {keras.backend.backend()}",
    }
    files = write_report(out, run, test_set, judgement, said)
    print(f"\n{summary(judgement)}\n\nWritten to {str(out)!r}: {', '.join(files)}")


# The options that a report repeats.
REPORTED = (
    *("encoder", "data", "pairs", "far", "flip", "preprocess"),
    *("image_size", "batch_size", "seed"),
)


def main(arguments=None):
    """Runs a command; wrong input ends with one line and exit status 2."""
    options = parser().parse_args(arguments)
    if options.command is None:
        parser().print_help()
        return
    try:
        with _plain_warnings() as said:
            options.run(options, said)
    except (ValueError, OSError, ImportError) as error:
        options.error(str(error))


def _beside(options):
    """The default folder of a report: no other encoder's or set's."""
    encoder, data = options.encoder.absolute(), options.data.absolute()
    name = encoder.stem
    if name.isdecimal():  # the version of a SavedModel, in a folder that is TF Serving's
        encoder, name = encoder.parent, f"{encoder.parent.name}-{name}"
    pairs = f"-{options.pairs.stem}" if options.pairs else ""
    of_data = data.name if data.is_dir() else data.stem
    return encoder.parent / f"{name}-on-{of_data}{pairs}"


def _check_pictures():
    """Before the work: what the report needs at its end."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise ImportError(
            'The report needs matplotlib: pip install "keras_margin[evaluate]"'
        ) from error


@contextlib.contextmanager
def _plain_warnings():
    """Writes each warning once, as a line, and gives the list of those that came."""
    said = []

    def show(message, category, *_, **__):
        text = " ".join(str(message).split())
        if not issubclass(category, DeprecationWarning) and text not in said:
            said.append(text)
            print(f"keras_margin evaluate: warning: {text}", file=sys.stderr)

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = show
        yield said


def _plain(value):
    return str(value) if isinstance(value, Path) else value


if __name__ == "__main__":
    main()
