"""Memory and traffic of a training step for each way to lay the classes out over devices.

    python benchmarks/scaling.py                     10^6 and 10^7 classes on 8 devices

Nothing is trained and nothing of the size of the centres is allocated: for each way the whole step
of `EmbeddingModel.fit` on the JAX backend, SGD with momentum included, is compiled for virtual CPU
devices, and XLA is asked what a device needs (`memory_analysis`: its arguments and, at the peak,
its temporary values) and what it sends (the results of the collective operations in the compiled
program). The backbone is a single Dense layer without memory to speak of, so the numbers are the
head's.

The ways:
    every device has all classes         keras.distribution.DataParallel, as MirroredStrategy does
    the same, a sample of a tenth        sample_rate=0.1
    classes shared out                   class_parallel_layout over the one axis of the mesh, which
                                         the batch is shared out over too
    the same, a sample of a tenth        sample_rate=0.1
"""

import argparse
import csv
import math
import os
import re
from pathlib import Path

WIDTHS = {
    "f64": 8,
    "s64": 8,
    "u64": 8,
    "f32": 4,
    "s32": 4,
    "u32": 4,
    "bf16": 2,
    "f16": 2,
    "pred": 1,
}
COLLECTIVES = "all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute"


def parse_arguments(arguments=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--classes", type=int, nargs="+", default=[1_000_000, 10_000_000])
    parser.add_argument("--devices", type=int, default=8, help="default: 8")
    parser.add_argument("--batch", type=int, default=1024, help="of all devices (default: 1024)")
    parser.add_argument("--dim", type=int, default=512, help="default: 512")
    parser.add_argument("--sample-rate", type=float, default=0.1, help="default: 0.1")
    parser.add_argument("--out", type=Path, default=Path("runs/bench"), help="default: runs/bench")
    options = parser.parse_args(arguments)
    for name in ("classes", "devices", "batch", "dim"):
        value = getattr(options, name)
        least = 2 if name == "classes" else 1
        if min(value if isinstance(value, list) else [value]) < least:
            parser.error(f"--{name} must be at least {least}. Received: {value}")
    if options.batch % options.devices:
        parser.error(
            f"--batch must be a multiple of --devices={options.devices}. Received: {options.batch}"
        )
    if not 0.0 < options.sample_rate <= 1.0:
        parser.error(f"--sample-rate must be in (0, 1]. Received: {options.sample_rate}")
    return options


def compiled_step(options, classes, sample_rate, shared_out):
    """The compiled step of `fit`, from shapes alone."""
    import jax
    import keras

    import keras_margin

    devices = keras.distribution.list_devices()
    mesh = keras.distribution.DeviceMesh((len(devices),), ["batch"], devices)
    layout = keras.distribution.LayoutMap(mesh)
    if shared_out:
        layout = keras_margin.distribution.class_parallel_layout(mesh, axis="batch")
    keras.distribution.set_distribution(
        keras.distribution.ModelParallel(layout_map=layout, batch_dim_name="batch")
    )

    def build():
        backbone = keras.Sequential([keras.Input((8,)), keras.layers.Dense(options.dim)])
        head = keras_margin.ArcFace(classes, sample_rate=sample_rate)
        model = keras_margin.EmbeddingModel(backbone, head)
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9))
        model.optimizer.build(model.trainable_variables)
        models.append(model)

    models = []
    jax.eval_shape(build)  # its variables have shapes and no values
    (model,) = models

    def abstract(variable):
        layout = keras.distribution.distribution().get_variable_layout(variable)
        return jax.ShapeDtypeStruct(variable.shape, variable.dtype, sharding=layout.backend_layout)

    parts = model.trainable_variables, model.non_trainable_variables
    parts = (*parts, model.optimizer.variables, model.metrics_variables)
    state = tuple([abstract(variable) for variable in part] for part in parts)
    by_row = jax.sharding.NamedSharding(mesh.backend_mesh, jax.sharding.PartitionSpec("batch"))
    data = (
        jax.ShapeDtypeStruct((options.batch, 8), "float32", sharding=by_row),
        jax.ShapeDtypeStruct((options.batch,), "int32", sharding=by_row),
    )
    step = jax.jit(model.train_step, donate_argnums=0)  # as `fit` compiles it
    return step.lower(state, data).compile()


def traffic(program):
    """Bytes of the results of the collective operations of a compiled program, loops counted."""
    parts = {}  # {computation: its lines}
    for line in program.splitlines():
        begins = re.match(r"(ENTRY )?%([\w.-]+) \(.*\{$", line)
        if begins:
            current = parts["ENTRY" if begins[1] else begins[2]] = []
        elif parts:
            current.append(line)

    def sent(name):
        total = 0
        for line in parts[name]:
            loop = re.search(r" while\(.*body=%([\w.-]+)", line)
            if loop:
                times = re.search(r'known_trip_count":\{"n":"(\d+)"', line)
                total += sent(loop[1]) * int(times[1] if times else 1)
            called = re.search(r" (?:call|conditional)\(.*to_apply=%([\w.-]+)", line)
            if called:
                total += sent(called[1])
            found = re.search(rf"= (.*?) (?:{COLLECTIVES})(?:-start)?\(", line)
            if found:
                total += sum(map(bytes_of, re.findall(r"(\w+)\[([\d,]*)\]", found[1])))
        return total

    return sent("ENTRY")


def bytes_of(shape):
    """Of a tensor given as (kind, sizes), such as ("f32", "1024,512")."""
    kind, sizes = shape
    return WIDTHS[kind] * math.prod(int(size) for size in sizes.split(",") if size)


def main(arguments=None):
    options = parse_arguments(arguments)
    os.environ["KERAS_BACKEND"] = "jax"
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={options.devices}"
    ways = [
        ("every device has all classes", 1.0, False),
        (f"the same, a sample of {options.sample_rate:g}", options.sample_rate, False),
        ("classes shared out", 1.0, True),
        (f"the same, a sample of {options.sample_rate:g}", options.sample_rate, True),
    ]
    rows = []
    print(
        f"{options.devices} devices, batch {options.batch}, dimension {options.dim}; MB a device\n"
    )
    print("| classes | way | weights and slots | besides, at the peak | sent in a step |")
    print("|--:|---|--:|--:|--:|")
    for classes in options.classes:
        for name, sample_rate, shared_out in ways:
            step = compiled_step(options, classes, sample_rate, shared_out)
            needs = step.memory_analysis()
            besides = needs.temp_size_in_bytes + needs.output_size_in_bytes
            besides -= needs.alias_size_in_bytes
            megabytes = [
                round(number / 1e6, 1)
                for number in (needs.argument_size_in_bytes, besides, traffic(step.as_text()))
            ]
            rows.append([classes, name, *megabytes])
            print("|", " | ".join(map(str, rows[-1])), "|", flush=True)
    options.out.mkdir(parents=True, exist_ok=True)
    with open(options.out / "scaling.csv", "w", newline="") as file:
        csv.writer(file).writerows([["classes", "way", "held_mb", "peak_mb", "sent_mb"], *rows])


if __name__ == "__main__":
    main()
