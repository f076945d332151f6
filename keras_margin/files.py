"""Files and folders that are whole or absent: written under a temporary name, then renamed."""

import contextlib
import json
import math
import os
import tempfile
from pathlib import Path


@contextlib.contextmanager
def written_whole(path):
    """Gives a temporary path beside `path` to write a file or a folder to; then renames it.

    An exception leaves what was at `path` as it was, and so does the end of the process for a
    file. A folder is absent for the moment between its old and its new one.

    Args:
        path: the final path; an existing file or folder there is replaced.

    Raises:
        FileExistsError: a folder would take the place of a file, or a file that of a folder.

    Yields:
        pathlib.Path with the same suffix as `path`, on the same file system.
    """
    path = Path(path).resolve()  # a link stays a link: what it names is replaced
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as folder:
        temporary = Path(folder) / path.name
        yield temporary
        _sync(temporary)
        if path.exists() and path.is_dir() != temporary.is_dir():
            there, new = ("folder", "file") if path.is_dir() else ("file", "folder")
            raise FileExistsError(
                f"A {there} is there, which a {new} of this name would replace. Received: "
                f"{str(path)!r}"
            )
        if temporary.is_dir():
            # A folder cannot be renamed over another one: the old one steps aside first.
            old = Path(folder) / f"old-{path.name}"
            if path.exists():
                os.rename(path, old)
            try:
                os.rename(temporary, path)
            except OSError:
                if old.exists():
                    os.rename(old, path)
                raise
        else:
            os.replace(temporary, path)
        _sync_folder(path.parent)


def _sync(path):
    """Brings the bytes to the disk, so that the rename never comes before them."""
    files = [path] if path.is_file() else [p for p in path.rglob("*") if p.is_file()]
    for file in files:
        with open(file, "rb+") as handle:
            os.fsync(handle.fileno())


def _sync_folder(path):
    """Brings a rename to the disk; systems that cannot open folders do it in their own time."""
    with contextlib.suppress(OSError):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def write_json(path, content, indent=2):
    """Writes a JSON file that is whole or absent.

    JSON has no NaN: a number that is undefined becomes null. ASCII alone, as the name of a file
    need not be valid UTF-8.

    Args:
        path: the file.
        content: dicts, lists, strings and numbers, NumPy's too.
        indent: as `json.dumps`.
    """
    with written_whole(path) as temporary:
        temporary.write_text(json.dumps(_plain(content), indent=indent) + "\n", "ascii")


def check_writable(folder):
    """Makes the folder, and finds out before the work whether it can be written.

    Raises:
        OSError: it cannot.
    """
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise OSError(f"The folder for the results cannot be written: {error}") from error


def _plain(content):
    """`content` in what JSON knows."""
    if isinstance(content, dict):
        return {name: _plain(value) for name, value in content.items()}
    if isinstance(content, (list, tuple)):
        return [_plain(value) for value in content]
    if hasattr(content, "tolist"):  # NumPy's
        return _plain(content.tolist())
    if isinstance(content, float) and not math.isfinite(content):
        return None
    return content
