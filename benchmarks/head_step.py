"""Time and peak memory of a head, beside the bare matrix products and other people's heads.

    python benchmarks/head_step.py                          the default grid, see below
    python benchmarks/head_step.py --quick                  tiny shapes: does it run?
    python benchmarks/head_step.py --classes 100000 --contenders arcface keras-usual
    python benchmarks/head_step.py --torch-python ~/torch/bin/python     torch lives elsewhere

Two scopes. `head`: forward and backward of the head alone, from embeddings (batch, dim) and labels
to the loss and the gradients of the embeddings and of all centres. `fit`: a whole step of
`model.fit` of Input(dim) -> Dense(dim) -> head with SGD and momentum 0.9, from the beginning of the
step to that of the next one, so that the input pipeline, metrics and callbacks count; the
optimizer's update alone, from ready gradients, has its own column. Everything runs on the CPU in
float32, with default flags and as many threads as there are cores.

Beside each of them: the bare three products of the same shapes in TensorFlow, which no head can
avoid, l = x w^T, l w, l^T x, in a tf.function.

The contenders:
    arcface                 keras_margin.ArcFace as it comes: it chooses the blocks of classes
    arcface-one-block       the same with chunk_size=classes: all cosines at once
    arcface-streamed        the same with chunk_size=CHUNK
    adacos                  keras_margin.AdaCos as it comes, its scale moving: a pass more
    arcface-sampled         the same as arcface with SAMPLE of the classes in a step (Partial FC)
    keras-usual             one-hot labels, arccos with clip, full logits, a layer in a functional
                            model with Keras' categorical cross-entropy
    torch-insightface       a torch head in the form of insightface's training code
    torch-metric-learning   ArcFaceLoss of pytorch-metric-learning

What is counted. Every configuration has a fresh process. It builds the weights, the optimizer's
slots and the inputs, and only then is the memory watched: extra memory is the largest resident size
(VmHWM) of the first steps, compiling and results included, less what was resident before anything
was built and less the size of weights, slots and inputs, in MB of 10^6 bytes. After that the bare
products are built in the same process, and run before and after each step. A ratio is a step's time
by the mean of the products just before and just after it, since a machine that is busy for a while
slows both; reported are the median of these ratios, the least and the most. The torch contenders
take turns, step by step, with a second process that runs the products; their threads wait for each
other without spinning (OMP_WAIT_POLICY=PASSIVE), since spinning cost them up to 0.3 s a step where
anything else ran. Sampled classes, drawn anew in each step, take turns with a process that trains
the full head of as many classes as there are in the sample.
"""

import argparse
import contextlib
import itertools
import os
import platform
import statistics
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path

from grid import CONTENDERS, SCOPES, TORCH, needed_gb, plan
from measuring import available_gb, number_of_cores, run_child
from processes import Child, Failed
from results import draw, print_findings, print_tables, progress_of, title_of, write_csv


def parse_arguments(arguments=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    several = {"type": int, "nargs": "+", "metavar": "N"}
    parser.add_argument("--batch", **several, help="default: 1024; with sampled classes 256")
    parser.add_argument("--dim", **several, help="default: 128")
    parser.add_argument(
        "--classes",
        **several,
        help="default: 10 000 to 400 000, not for every contender; `fit` 100 000; samples are "
        "drawn from 100 000, 400 000, 1 000 000",
    )
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=CONTENDERS)
    parser.add_argument("--scopes", nargs="+", choices=SCOPES, default=SCOPES)
    parser.add_argument(
        "--repeats",
        type=int,
        default=5,
        help="ratios that a median is of (default: 5; three times as many where a step is short; "
        "1 for other people's heads where batch x classes is above 2^28)",
    )
    parser.add_argument("--chunk", type=int, help="of arcface-streamed (default: 10 000)")
    parser.add_argument("--sample", type=int, help="of arcface-sampled (default: 20 000)")
    parser.add_argument(
        "--torch-python", default=sys.executable, metavar="PATH", help="default: this one"
    )
    parser.add_argument("--quick", action="store_true", help="tiny shapes: does everything run?")
    parser.add_argument("--out", type=Path, default=Path("runs/bench"), help="default: runs/bench")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    for name in ("batch", "dim", "classes", "repeats", "chunk", "sample"):
        value = getattr(options, name)
        numbers = value if isinstance(value, list) else [] if value is None else [value]
        if min(numbers, default=1) < 1:
            parser.error(f"--{name} must be at least 1. Received: {value}")
    return options


def measure(reference, jobs, torch_python):
    """The rows of a group; one for the reference too, where there is one.

    The reference runs first and last, so that every step of the others lies between two of its.
    """
    everyone = [*([reference] if reference else []), *jobs]
    rows = [dict(job) for job in everyone]
    answers, children = [[] for _ in everyone], {}
    with contextlib.ExitStack() as stack:
        for i, job in enumerate(everyone):
            try:
                check_memory(job)
                python = torch_python if job["contender"] in TORCH else sys.executable
                children[i] = stack.enter_context(Child(job, python))
            except Failed as error:
                rows[i]["note"] = str(error)
            else:
                answers[i].append(children[i].first)
        for turn in range(max(job["repeats"] for job in everyone)):
            for i, child in children.items():
                if turn == everyone[i]["repeats"] or "note" in rows[i]:
                    continue
                if reference:
                    time.sleep(0.05)  # threads of the one before may still spin
                try:
                    answers[i].append(child.step())
                except Failed as error:
                    rows[i]["note"] = str(error)
    beside = [answer["seconds"] for answer in answers[0][1:]] if reference else []
    for i, row in enumerate(rows):
        if "note" not in row:
            row.update(summary(answers[i], beside))
    return rows


def check_memory(job):
    """Raises `Failed` where a job could take the memory that the machine still needs."""
    needed, available = needed_gb(job), available_gb()
    if needed > 0.75 * available:
        raise Failed(f"skipped: needs about {needed:.0f} GB, {available:.0f} GB are free")


def summary(answers, beside):
    """Medians of a contender's answers, the first of which came before its first counted step.

    Args:
        answers: of a `Child`.
        beside: seconds of the reference before, between and after the steps; where the contender's
            own process ran the products, they are in the answers.
    """
    first, steps = answers[0], answers[1:]
    seconds = [step["seconds"] for step in steps]
    found = {
        "seconds": statistics.median(seconds),
        "extra_mb": first["extra_mb"],
        "loss": first["loss"],
    }
    optimizer = None
    if "optimizer" in first:
        optimizer = around([answer["optimizer"] for answer in answers])
        found["optimizer_seconds"] = statistics.median(optimizer)
    if "products" in first:
        beside = [answer["products"] for answer in answers]
    if len(beside) != len(steps) + 1:
        return found  # it is the reference, or the reference failed
    found["reference_seconds"] = statistics.median(beside)
    ratios = [one / other for one, other in zip(seconds, around(beside), strict=True)]
    found.update(ratio=statistics.median(ratios), ratio_low=min(ratios), ratio_high=max(ratios))
    found["ratios"] = ratios
    if optimizer and "products" in first:
        rest = [one - update for one, update in zip(seconds, optimizer, strict=True)]
        found["ratio_without_optimizer"] = statistics.median(
            one / other for one, other in zip(rest, around(beside), strict=True)
        )
    return found


def around(times):
    """The mean of the times just before and just after each step."""
    return [(before + after) / 2 for before, after in itertools.pairwise(times)]


def machine(torch_python):
    """What it ran on: the CPU, and the versions that matter."""
    model = platform.processor() or platform.machine()
    with contextlib.suppress(OSError), open("/proc/cpuinfo") as file:
        model = next((line.split(":")[1].strip() for line in file if "model name" in line), model)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
    return {
        "cpu": model,
        "cores": number_of_cores(),
        "ram_gb": round(memory),
        "system": platform.platform(),
        "python": platform.python_version(),
        **{name: metadata.version(name) for name in ("tensorflow", "keras", "keras_margin")},
        "torch": version_of_torch(torch_python),
    }


def version_of_torch(python):
    """Its version in another environment, without importing it."""
    ask = "from importlib import metadata; print(metadata.version('torch'))"
    try:
        answer = subprocess.run([python, "-c", ask], capture_output=True, text=True)
    except OSError as error:
        sys.exit(f"head_step.py: error: --torch-python cannot be run: {error}")
    return answer.stdout.strip() or "not installed"


def main(arguments=None):
    options = parse_arguments(arguments)
    if options.child:
        return run_child(options.child)
    options.out.mkdir(parents=True, exist_ok=True)
    about, rows = machine(options.torch_python), []
    print(", ".join(f"{name} {value}" for name, value in about.items()), flush=True)
    groups, start = plan(options), time.monotonic()
    try:
        for number, (reference, jobs) in enumerate(groups, 1):
            minutes, seconds = divmod(int(time.monotonic() - start), 60)
            print(f"[{number}/{len(groups)}] {minutes}:{seconds:02}", end=" ")
            print(title_of([*([reference] if reference else []), *jobs]), flush=True)
            measured = measure(reference, jobs, options.torch_python)
            rows += measured
            for row in measured:
                print(f"    {progress_of(row)}", flush=True)
            write_csv(rows, about, options.out / "head_step.csv")
    except KeyboardInterrupt:
        print(f"\nStopped; the rows so far are in {options.out / 'head_step.csv'}")
        return 130
    print_tables(rows)
    print_findings(rows)
    try:
        drawn = draw(rows, about, options.out / "head_step.png")
    except ImportError as error:
        print(f"No picture: {error}")
        drawn = False
    written = ["head_step.csv", *(["head_step.png"] if drawn else [])]
    print(f"\nWrote {', '.join(str(options.out / name) for name in written)}")
    if any(row.get("note", "").startswith(("failed", "killed")) for row in rows):
        return 1


if __name__ == "__main__":
    sys.exit(main())
