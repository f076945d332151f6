"""The public names, their docstrings, and the rules of the house that a reader would check."""

import ast
import doctest
import importlib
import pkgutil
import re
from pathlib import Path

import keras
import pytest

import keras_margin

PACKAGE = Path(keras_margin.__file__).parent
MODULES = sorted(module.name for module in pkgutil.iter_modules(keras_margin.__path__))
README = (PACKAGE.parent / "README.md").read_text("utf-8")


@pytest.mark.parametrize("module", MODULES)
def test_docstring_examples(module):
    module = importlib.import_module(f"keras_margin.{module}")
    failures, _ = doctest.testmod(
        module, extraglobs={"keras": keras, "keras_margin": keras_margin}, report=True
    )
    assert failures == 0


def test_all_is_what_is_public():
    public = {
        name
        for name, value in vars(keras_margin).items()
        if not name.startswith("_") and (name not in MODULES or name in keras_margin.__all__)
        if getattr(value, "__module__", "keras_margin").startswith("keras_margin")
    }
    assert public == set(keras_margin.__all__)
    assert keras_margin.__all__ == sorted(keras_margin.__all__)


@pytest.mark.parametrize("name", keras_margin.__all__)
def test_every_name_is_in_the_readme(name):
    assert re.search(rf"\b{name}\b", README)


@pytest.mark.parametrize("name", keras_margin.__all__)
def test_every_name_says_what_it_is(name):
    assert getattr(keras_margin, name).__doc__.strip()


@pytest.mark.parametrize("module", MODULES)
def test_no_file_passes_400_lines(module):
    assert len((PACKAGE / f"{module}.py").read_text("utf-8").splitlines()) <= 400


def imports(module):
    """The package's modules that a module imports at its top level."""
    tree = ast.parse((PACKAGE / f"{module}.py").read_text("utf-8"))
    return {
        node.module.partition(".")[2]
        for node in tree.body
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("keras_margin.")
    }


def reached(module):
    """All modules of the package that an import of this one brings in."""
    found, waiting = set(), {module}
    while waiting:
        found |= waiting
        waiting = set().union(*map(imports, waiting)) - found
    return found


EVALUATION = ["verification", "retrieval", "plots", "datasets", "encoders", "images", "judging"]


@pytest.mark.parametrize("module", [*EVALUATION, "evaluation_report", "__main__"])
def test_evaluation_never_imports_heads(module):
    assert not reached(module) & {"margin_head", "heads", "adaptive_heads", "model", "nontarget"}


def test_pictures_of_heads_import_rules_and_scales_alone():
    assert imports("head_plots") <= {"checks", "drawing", "margins", "scales"}


@pytest.mark.parametrize("module", ["batches", "padding"])
def test_batches_need_nothing_but_checks(module):
    assert imports(module) == {"checks"}


@pytest.mark.parametrize(
    ("module", "may_not_import"),
    [
        ("numerics", {"margins", "scales", "nontarget", "margin_head", "heads", "model"}),
        ("margins", {"scales", "nontarget", "margin_head", "heads", "model"}),
        ("scales", {"nontarget", "margin_head", "heads", "model"}),
        ("nontarget", {"margins", "scales", "margin_head", "heads", "model"}),
        ("heads", {"model"}),
    ],
)
def test_imports_run_one_way(module, may_not_import):
    assert not imports(module) & may_not_import
