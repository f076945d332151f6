"""Finds data files inside installed packages."""

import importlib.util
import pathlib


def installed_path(package, path):
    """Returns where pip put `path`, a file or folder of `package`, without importing the package.

    Args:
        package: Name of a top-level package, which is also its name on PyPI.
        path: The file or folder, relative to the package.

    Returns:
        A `pathlib.Path` that exists.

    Raises:
        ModuleNotFoundError: If the package is not installed.
        FileNotFoundError: If the package is there, and the file is not.
    """
    spec = importlib.util.find_spec(package)  # for a top-level name this runs none of its code
    if spec is None:
        raise ModuleNotFoundError(
            f"This data set is a part of the package `{package}`, which is not installed. "
            f"Install it with: pip install {package}. Or all that the examples need with: "
            'pip install "keras_margin[examples]"',
            name=package,
        )
    found = pathlib.Path(spec.origin).parent / path
    if not found.exists():
        raise FileNotFoundError(
            f"The installed `{package}` must hold the data set, but there is no {found}. "
            f"Another version may: pip install --upgrade {package}"
        )
    return found
