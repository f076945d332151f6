"""Which configurations are measured, and which of them together."""

import itertools

OWN = ("arcface-one-block", "arcface", "arcface-streamed", "adacos")
TORCH = ("torch-insightface", "torch-metric-learning")
CONTENDERS = ("products", *OWN, "arcface-sampled", "keras-usual", *TORCH)
SCOPES = ("head", "fit", "sampled")

FULL = {
    "batch": [1024],
    "dim": [128],
    "classes": [10_000, 30_000, 100_000, 400_000],
    "peers_classes": [100_000, 400_000],
    "fit_classes": [100_000],
    "sampled_batch": [256],
    "sampled_classes": [100_000, 400_000, 1_000_000],
    "sample": 20_000,
    "chunk": 10_000,
}
QUICK = {
    "batch": [64],
    "dim": [32],
    "classes": [2000, 6000, 18_000],
    "peers_classes": [18_000],
    "fit_classes": [18_000],
    "sampled_batch": [32],
    "sampled_classes": [6000, 18_000],
    "sample": 1000,
    "chunk": 1000,
}


def grid_of(options):
    """The default grid, with what the command line says instead."""
    grid = dict(QUICK if options.quick else FULL)
    for name, value in vars(options).items():
        for key in grid:
            if value is not None and key.split("_")[-1] == name:
                grid[key] = value
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

    def chosen(*contenders):
        return [contender for contender in contenders if contender in options.contenders]

    def shapes(scope, batches, classes):
        wanted = scope in options.scopes
        shapes = itertools.product([scope], grid[batches], grid["dim"], grid[classes])
        return list(shapes) if wanted else []

    groups = []
    for shape in shapes("head", "batch", "classes"):
        groups += [(None, [job(name, *shape)]) for name in chosen(*OWN)]
        has_peers = shape[-1] in grid["peers_classes"]
        on_torch = [job(name, *shape) for name in chosen(*TORCH) if has_peers]
        if has_peers:
            groups += [(None, [job(name, *shape)]) for name in chosen("keras-usual")]
        if on_torch or chosen("products"):
            groups.append(taking_turns(job("products", *shape), on_torch))
    for shape in shapes("fit", "batch", "fit_classes"):
        groups += [(None, [job(name, *shape)]) for name in chosen(*OWN, "keras-usual")]
    if chosen("arcface-sampled"):
        for scope, batch, dim in dict.fromkeys(
            shape[:3] for shape in shapes("sampled", "sampled_batch", "sampled_classes")
        ):
            sampled = [
                job("arcface-sampled", scope, batch, dim, classes)
                for classes in grid["sampled_classes"]
                if classes > grid["sample"]
            ]
            full = job("arcface", scope, batch, dim, grid["sample"])
            groups.append(taking_turns(full, sampled))
    return groups


def taking_turns(reference, jobs):
    """A group whose reference runs before, between and after the steps of the others."""
    repeats = max((job["repeats"] for job in jobs), default=reference["repeats"])
    name = reference["contender"]
    if name != "products":
        name = f"a full {name} of {reference['classes']}"
    jobs = [
        {**job, "repeats": repeats, "products_beside": False, "reference": name} for job in jobs
    ]
    alone = {"repeats": repeats + 1, "products_beside": False, "reference": None}
    return {**reference, **alone}, jobs


def steps_of(repeats, contender, entries):
    """More steps where they are short, fewer where they are long, other people's first of all."""
    ours = contender in (*OWN, "products")
    if contender == "arcface-sampled" or entries < 2**24:
        return {"warm_up": 2, "repeats": 3 * repeats}
    if entries < 2**28:
        return {"warm_up": 2, "repeats": repeats if ours else min(repeats, 5)}
    return {"warm_up": 1, "repeats": min(repeats, 5 if ours else 3)}


# (batch, classes) matrices of float32 that a process holds at its peak, as measured; one of them,
# at least, for the bare products.
MATRICES = {"keras-usual": 9.0, "arcface-one-block": 2.0, **dict.fromkeys(TORCH, 5.5)}


def needed_gb(job):
    """About what a process takes, in GB: without this it could bring down what else runs."""
    entries = job["batch"] * job["classes"] * MATRICES.get(job["contender"], 1.0)
    weights = 6 * job["classes"] * job["dim"]  # also their gradient, slots, what runs beside
    return 0.5 + 4e-9 * (entries + weights)
