"""The documentation site: what its pages name, and how the docstrings look on them."""

import importlib
import importlib.util
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import keras_margin

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md"))
API = "\n".join(page.read_text("utf-8") for page in sorted((DOCS / "api").glob("*.md")))
MODULES = [name for name in keras_margin.__all__ if inspect.ismodule(getattr(keras_margin, name))]


def test_nav_has_every_page_once():
    nav = (ROOT / "mkdocs.yml").read_text("utf-8").partition("\nnav:\n")[2]
    assert sorted(re.findall(r": (\S+\.md)$", nav, re.M)) == PAGES


@pytest.mark.parametrize("name", keras_margin.__all__)
def test_api_pages_have_every_public_name(name):
    assert len(re.findall(rf"^::: keras_margin\.{name}$", API, re.M)) == 1


@pytest.mark.parametrize("name", re.findall(r"^::: (\S+)$", API, re.M))
def test_what_api_pages_name_is_there(name):
    module, _, attribute = name.rpartition(".")
    assert getattr(importlib.import_module(module), attribute).__doc__


@pytest.mark.parametrize("name", MODULES)
def test_public_modules_say_what_they_offer(name):
    """The API pages show what `__all__` names."""
    module = getattr(keras_margin, name)
    assert list(module.__all__) == sorted(module.__all__)
    for public in module.__all__:
        assert getattr(module, public).__doc__.strip()


HEADS = [
    name
    for name, value in vars(keras_margin).items()
    if name in keras_margin.__all__ and hasattr(value, "loss_and_cosines")
]


@pytest.mark.parametrize("head", [*HEADS, "SemiHardTriplet"])
def test_formulas_have_every_head(head):
    assert re.search(rf"`{head}`", (DOCS / "formulas.md").read_text("utf-8"))


# With the extra `docs`


@pytest.fixture
def as_google():
    pytest.importorskip("griffe")
    spec = importlib.util.spec_from_file_location("docstrings", DOCS / "docstrings.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.as_google


INDENTED = "One line.\n\nExample:\n    >>> 1\n    1\n\nReference:\n    A book."
AFTER_A_BLANK_LINE = "One line.\n\nExample:\n\n>>> 1\n1\n\nReference:\n    A book."


def test_examples_become_a_section(as_google):
    assert as_google(INDENTED) == INDENTED.replace("Example", "Examples")
    section = "\n\n\nExamples:\n    >>> 1\n    1\n\nReference:"
    assert section in as_google(AFTER_A_BLANK_LINE)
    assert as_google(AFTER_A_BLANK_LINE).count("\n") == AFTER_A_BLANK_LINE.count("\n")


def test_an_example_may_be_the_end(as_google):
    assert as_google("A.\n\nExample:\n\n>>> 1\n1") == "A.\n\n\nExamples:\n    >>> 1\n    1"


def test_arguments_of_a_call_become_a_section(as_google):
    docstring = "A.\n\nCall arguments:\n    x: a number."
    assert as_google(docstring) == "A.\n\nOther Parameters: Call arguments\n    x: a number."


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    for package in ("material", "mkdocstrings_handlers"):
        pytest.importorskip(package)
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return folder


def test_docstrings_render(site):
    """A section that griffe does not know is text, and a doctest in it three nested quotations."""
    for page in (site / "api").glob("*.html"):
        text = page.read_text("utf-8")
        assert "<blockquote>" not in text
        titles = "Args|Arguments|Returns|Raises|Yields|Attributes|Example|Reference"
        assert not re.findall(rf"<p>\s*(?:{titles}):", text)
        assert "<code>`" not in text  # what stands before a colon in "Returns" is taken for a type


def test_code_is_set_as_code(site):
    """A fence that the site does not know is text, and what follows it, up to the next, is code."""
    for page in sorted(DOCS.rglob("*.md")):
        text = (site / page.relative_to(DOCS).with_suffix(".html")).read_text("utf-8")
        assert "```" not in text, page.name
        assert len(re.findall("<h1[ >]", text)) == 1, page.name
        assert not re.findall(r"<\w+,", text), page.name  # <x, w> is taken for a tag, and not shown


def test_everything_has_its_place(site):
    text = "\n".join(page.read_text("utf-8") for page in (site / "api").glob("*.html"))
    places = set(re.findall(r'id="keras_margin\.([\w.]+)"', text))
    assert set(keras_margin.__all__) <= places
    for name in MODULES:
        assert {f"{name}.{each}" for each in getattr(keras_margin, name).__all__} <= places


def test_nothing_comes_from_elsewhere(site):
    """The site works offline."""
    for page in site.rglob("*.html"):
        text = page.read_text("utf-8")
        loaded = re.findall(r"<(?:script|img|iframe)[^>]*\ssrc=\"?([^\">\s]+)", text)
        loaded += re.findall(r"<link[^>]*rel=\"?stylesheet\"?[^>]*href=\"?([^\">\s]+)", text)
        assert loaded and not [each for each in loaded if re.match("(https?:)?//", each)]
