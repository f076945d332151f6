"""written_whole: what stands at the path is whole, the old or the new, and nothing else is left."""

import json
import os
import stat
from pathlib import Path

import numpy as np
import pytest

from keras_margin.files import check_writable, write_json, written_whole


def write(temporary, kind, text):
    if kind == "file":
        temporary.write_text(text)
    else:
        (temporary / "inner").mkdir(parents=True)
        (temporary / "inner" / "part").write_text(text)


def text_at(path):
    """The text of the file or of the folder's only file."""
    if path.is_file():
        return path.read_text()
    assert [part for part in path.rglob("*") if part.is_file()] == [path / "inner" / "part"]
    return (path / "inner" / "part").read_text()


def names_in(folder):
    return sorted(path.name for path in folder.iterdir())


every_kind = pytest.mark.parametrize("kind", ["file", "folder"])
every_old_kind = pytest.mark.parametrize("old", ["file", "folder"])


@every_kind
@pytest.mark.parametrize("as_given", [Path, str])
def test_new(kind, as_given, tmp_path):
    path = tmp_path / "deep" / "model.keras"
    with written_whole(as_given(path)) as temporary:
        assert temporary.suffix == ".keras"
        assert not temporary.exists()
        write(temporary, kind, "new")
        assert not path.exists()
    assert text_at(path) == "new"
    assert names_in(path.parent) == ["model.keras"]


@every_kind
def test_existing_is_replaced(kind, tmp_path):
    path = tmp_path / "model"
    write(path, kind, "old")
    with written_whole(path) as temporary:
        write(temporary, kind, "new")
        assert text_at(path) == "old"
    assert text_at(path) == "new"
    assert names_in(tmp_path) == ["model"]


@every_kind
@every_old_kind
@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_exception_leaves_what_was_there(kind, old, error, tmp_path):
    path = tmp_path / "model"
    write(path, old, "old")
    with pytest.raises(error), written_whole(path) as temporary:
        write(temporary, kind, "half")
        raise error
    assert text_at(path) == "old"
    assert names_in(tmp_path) == ["model"]


@pytest.mark.parametrize(("kind", "old"), [("file", "folder"), ("folder", "file")])
def test_another_kind_is_never_replaced(kind, old, tmp_path):
    """A model must not take the place of a folder with all that it holds."""
    path = tmp_path / "model"
    write(path, old, "old")
    message = f"A {old} is there, which a {kind} of this name would replace"
    with pytest.raises(FileExistsError, match=message), written_whole(path) as temporary:
        write(temporary, kind, "new")
    assert text_at(path) == "old"
    assert names_in(tmp_path) == ["model"]


@every_kind
def test_exception_leaves_nothing_where_nothing_was(kind, tmp_path):
    with pytest.raises(OSError), written_whole(tmp_path / "model") as temporary:
        write(temporary, kind, "half")
        raise OSError
    assert names_in(tmp_path) == []


@every_kind
def test_failing_rename_leaves_what_was_there(kind, tmp_path, monkeypatch):
    """At the moment when the new one is about to take the old one's place."""
    path = tmp_path / "model"
    write(path, kind, "old")
    rename, replace = os.rename, os.replace
    failed = []

    def failing(move):
        def move_or_fail(source, target):
            if Path(target) == path and not failed:
                failed.append(target)
                raise OSError("no space")
            move(source, target)

        return move_or_fail

    monkeypatch.setattr(os, "rename", failing(rename))
    monkeypatch.setattr(os, "replace", failing(replace))
    with pytest.raises(OSError, match="^no space$"), written_whole(path) as temporary:
        write(temporary, kind, "new")
    assert text_at(path) == "old"
    assert names_in(tmp_path) == ["model"]


def test_nothing_written_is_an_error_and_leaves_what_was_there(tmp_path):
    write(tmp_path / "model", "file", "old")
    with pytest.raises(FileNotFoundError), written_whole(tmp_path / "model"):
        pass
    assert text_at(tmp_path / "model") == "old"
    assert names_in(tmp_path) == ["model"]


def test_relative_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with written_whole("model") as temporary:
        temporary.write_text("new")
    assert (tmp_path / "model").read_text() == "new"


@every_kind
def test_bytes_are_on_the_disk_before_the_rename(kind, tmp_path, monkeypatch):
    path = tmp_path / "model"
    synced = []

    def fsync(handle):
        if stat.S_ISREG(os.fstat(handle).st_mode):  # a folder's entries come after it
            assert not path.exists()
            synced.append(handle)

    monkeypatch.setattr(os, "fsync", fsync)
    with written_whole(path) as temporary:
        write(temporary, kind, "new")
    assert synced


def test_json_has_no_nan_and_takes_numpy(tmp_path):
    content = {
        "a": [float("nan"), np.float32(0.5), (1, np.inf)],
        "b": np.arange(2),
        "c": "\udcff",
        "d": True,
    }
    write_json(tmp_path / "some.json", content)
    text = (tmp_path / "some.json").read_text("ascii")
    assert json.loads(text) == {"a": [None, 0.5, [1, None]], "b": [0, 1], "c": "\udcff", "d": True}


def test_a_folder_that_can_be_written(tmp_path):
    check_writable(tmp_path / "deep" / "folder")
    assert names_in(tmp_path / "deep" / "folder") == []
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="The folder for the results cannot be written: .*file"):
        check_writable(tmp_path / "file" / "folder")
