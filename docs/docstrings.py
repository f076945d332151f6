"""Renames sections of the docstrings for griffe, which reads them for the API pages.

The docstrings follow Keras: `Example:` with a doctest, at times after a blank line, and the
`Call arguments:` of a layer.
"""

import re

import griffe


class KerasSections(griffe.Extension):
    """Renames those two, line for line, so that what griffe warns of has its line number."""

    def on_object(self, *, obj, **kwargs):
        if obj.docstring is not None:
            obj.docstring.value = as_google(obj.docstring.value)


def as_google(docstring):
    """`Examples:` and what is indented below it; `Call arguments` as a list like `Args`."""
    docstring = re.sub(
        r"^Example:\n\n(>>> (?:.+\n?)+)",
        lambda found: "\nExamples:\n" + re.sub("(?m)^(?=.)", "    ", found[1]),
        docstring,
        flags=re.M,
    )
    docstring = re.sub("(?m)^Example:$", "Examples:", docstring)
    return re.sub("(?m)^Call arguments:$", "Other Parameters: Call arguments", docstring)
