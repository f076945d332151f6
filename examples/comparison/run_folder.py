"""The folder that keeps finished runs, a file each: whoever is killed loses the run in progress."""

import json

from keras_margin.files import written_whole


class RunFolder:
    """Finished runs, each with the options that it was made with.

    Args:
        folder: `pathlib.Path`; need not exist.
        options: dict for JSON of all that a number depends on but the setting and the seed.

    Raises:
        ValueError: The folder has runs of other options, or a file that is no run.
    """

    def __init__(self, folder, options):
        self._folder = folder
        self._options = json.loads(json.dumps(options))  # as a file gives them back
        self._results = {}
        for path in sorted(folder.glob("*.json")):
            kept = _read(path)
            self._check(path, kept["options"])
            if kept["name"] != path.name:
                raise ValueError(f"--out has a run under another one's name: {path}")
            self._results[path.name] = kept["result"]

    def _check(self, path, options):
        if options == self._options:
            return
        names = sorted(
            name
            for name in {*options, *self._options}
            if options.get(name) != self._options.get(name)
        )
        differ = ", ".join(
            f"{name} {options.get(name)} there, {self._options.get(name)} here" for name in names
        )
        raise ValueError(
            f"--out has runs of other options, which no table can hold together: {differ}. Give "
            f"another --out, or delete this one. Received: {path}"
        )

    def get(self, setting, seed):
        """What `add` was given, in this process or an earlier one; None if it was not."""
        return self._results.get(_name(setting, seed))

    def add(self, setting, seed, result):
        """Keeps the result of a run, a dict for JSON."""
        name = _name(setting, seed)
        run = {
            "name": name,
            "setting": str(setting),
            "seed": seed,
            "result": result,
            "options": self._options,
        }
        with written_whole(self._folder / name) as path:
            path.write_text(json.dumps(run, indent=2, allow_nan=False) + "\n", "ascii")
        self._results[name] = result


def _name(setting, seed):
    head = setting.head or "raw-pixels"
    return f"{head}{'-matched' if setting.matched else ''}-seed{seed}.json"


def _read(path):
    try:
        run = json.loads(path.read_text("utf-8"))
        kept = {name: run[name] for name in ("name", "options", "result")}
        if not all(isinstance(kept[name], dict) and kept[name] for name in ("options", "result")):
            raise ValueError("no options or no result")
        return kept
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"--out has a file that is no run of this script: {path}") from error
