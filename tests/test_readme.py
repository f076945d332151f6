"""The README's Python code, executed from top to bottom as a reader would."""

import re
from pathlib import Path

README = Path(__file__).resolve().parents[1] / "README.md"


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```", README.read_text("utf-8"), re.M | re.S)


def test_code_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    namespace = {}
    for number, code in enumerate(blocks("python")):
        exec(compile(code, f"README.md, Python block {number}", "exec"), namespace)
    assert (tmp_path / "encoder.keras").is_file()
    assert (tmp_path / "serving" / "1" / "saved_model.pb").is_file()
    assert namespace["embeddings"].shape[0] == 512


def test_first_example_is_short():
    assert len(blocks("python")[0].strip().splitlines()) <= 15


def test_commands_name_make_targets():
    makefile = README.with_name("Makefile").read_text("utf-8")
    targets = set(re.findall(r"make ([\w-]+)", "\n".join(blocks("sh"))))
    assert {"train", "test"} <= targets
    assert all(re.search(rf"^{target}:", makefile, re.M) for target in targets)
