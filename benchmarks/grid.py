"""Which configurations are measured, and which of them together."""

import itertools

OWN = ("arcface-one-block", "arcface", "arcface-streamed", "adacos")
TORCH = ("torch-insightface", "torch-metric-learning")
CONTENDERS = (*OWN, "arcface-sampled", "keras-usual", *TORCH)
SCOPES = ("head", "fit", "sampled")

FULL = {
    "batch": [1024],
    "dim": [128],
    "classes": {
        "arcface": [10_000, 30_000, 100_000, 400_000],
        "adacos": [10_000, 100_000],
        "keras-usual": [10_000, 100_000],
        "torch-insightface": [100_000],
        "torch-metric-learning": [10_000, 100_000, 400_000],
    },
    "fit_classes": {
        "arcface": [100_000],
        "arcface-one-block": [100_000],
        "arcface-streamed": [100_000],
        "adacos": [100_000],
    },
    "sampled_batch": [256],
    "sampled_classes": {"arcface-sampled": [100_000, 400_000, 1_000_000]},
    "sample": 20_000,
    "chunk": 10_000,
}
QUICK = {
    "batch": [64],
    "dim": [32],
    "classes": {
        **dict.fromkeys(OWN, [2000, 6000, 18_000]),
        **dict.fromkeys(("keras-usual", *TORCH), [18_000]),
    },
    "fit_classes": dict.fromkeys((*OWN, "keras-usual"), [18_000]),
    "sampled_batch": [32],
    "sampled_classes": {"arcface-sampled": [6000, 18_000]},
    "sample": 1000,
    "chunk": 1000,
}


def grid_of(options):
    """The default grid, with what the command line says instead."""
    grid = dict(QUICK if options.quick else FULL)
    for name, value in vars(options).items():
        for key, default in grid.items():
            if value is not None and key.split("_")[-1] == name:
                grid[key] = dict.fromkeys(default, value) if isinstance(default, dict) else value
    return grid


def plan(options):
    """A list of (reference, jobs), each to be measured together.

    The reference, a job too, and the jobs take turns. None: each job runs the bare products itself.
    """
    grid = grid_of(options)

    def job(contender, scope, batch, dim, classes):
        return {
            "contender": contender,
            "scope": scope,
            "batch": batch,
            "dim": dim,
            "classes": classes,
            "chunk": grid["chunk"] if contender == "arcface-streamed" else None,
            "sample": grid["sample"] if contender == "arcface-sampled" else None,
            **steps_of(options.repeats, contender, batch * classes),
            "products_beside": True,
            "reference": "products",
        }

    def jobs_of(scope, batches, classes_of):
        """The wanted jobs, those of one shape together."""
        if scope not in options.scopes:
            return
        numbers = sorted({number for numbers in classes_of.values() for number in numbers})
        for batch, dim, classes in itertools.product(batches, grid["dim"], numbers):
            shape = scope, batch, dim, classes
            names = [name for name in classes_of if classes in classes_of[name]]
            yield shape, [job(name, *shape) for name in names if name in options.contenders]

    groups = []
    for shape, jobs in jobs_of("head", grid["batch"], grid["classes"]):
        on_torch = [job for job in jobs if job["contender"] in TORCH]
        groups += [(None, [job]) for job in jobs if job not in on_torch]
        if on_torch:
            groups.append(taking_turns(job("products", *shape), on_torch))
    for _, jobs in jobs_of("fit", grid["batch"], grid["fit_classes"]):
        groups += [(None, [job]) for job in jobs]
    sampled = {}
    for (*shape, classes), jobs in jobs_of(
        "sampled", grid["sampled_batch"], grid["sampled_classes"]
    ):
        sampled.setdefault(tuple(shape), []).extend(jobs if classes > grid["sample"] else [])
    for shape, jobs in sampled.items():
        if jobs:
            groups.append(taking_turns(job("arcface", *shape, grid["sample"]), jobs))
    return groups


def taking_turns(reference, jobs):
    """A group whose reference runs before, between and after the steps of the others."""
    repeats = max(job["repeats"] for job in jobs)
    name = reference["contender"]
    if name != "products":
        name = f"a full {name} of {reference['classes']}"
    jobs = [
        {**job, "repeats": repeats, "products_beside": False, "reference": name} for job in jobs
    ]
    alone = {"repeats": repeats + 1, "products_beside": False, "reference": None}
    return {**reference, **alone}, jobs


def steps_of(repeats, contender, entries):
    """More steps where they are short; of other people's longest one, for its memory."""
    if contender == "arcface-sampled" or entries < 2**24:
        return {"warm_up": 2, "repeats": 3 * repeats}
    if entries < 2**28:
        return {"warm_up": 2, "repeats": repeats}
    return {"warm_up": 1, "repeats": repeats if contender in OWN else 1}


# (batch, classes) matrices of float32 that a process holds at its peak, as measured; one of them,
# at least, for the bare products.
MATRICES = {"keras-usual": 9.0, "arcface-one-block": 2.0, **dict.fromkeys(TORCH, 5.5)}


def needed_gb(job):
    """About what a process takes, in GB: without this it could bring down what else runs."""
    entries = job["batch"] * job["classes"] * MATRICES.get(job["contender"], 1.0)
    weights = 6 * job["classes"] * job["dim"]  # also their gradient, slots, what runs beside
    return 0.5 + 4e-9 * (entries + weights)
