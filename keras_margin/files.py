"""Files and folders that are whole or absent: written under a temporary name, then renamed."""

import contextlib
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

    Yields:
        pathlib.Path with the same suffix as `path`, on the same file system.
    """
    path = Path(path).resolve()  # a link stays a link: what it names is replaced
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as folder:
        temporary = Path(folder) / path.name
        yield temporary
        _sync(temporary)
        if temporary.is_dir() or path.is_dir():
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
