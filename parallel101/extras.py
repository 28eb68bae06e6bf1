"""Optional packages: which extra brings which package, and the error that names a missing extra.

    pip install parallel101              launch, collectives, trainers, record, simulator, pictures
    pip install "parallel101[lessons]"   notebooks, pages, plots and explorers, too
    pip install "parallel101[keras]"     Keras

A module imports such packages last, in the block `with needs_extra("p101.sweep"):`. If one is
missing, the error is one line: what needs it, and what to install.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec

# extra → the packages that we import and that it brings; tomli is part of Python since 3.11
NOTEBOOKS = (
    "bs4 IPython PIL ipykernel ipywidgets jinja2 markupsafe jupyter_client jupyterlab latex2mathml "
    "matplotlib nbclient nbconvert nbformat numpy pdoc pygments tomli websocket yaml"
)
EXTRAS = {"lessons": tuple(NOTEBOOKS.split()), "keras": ("keras",)}
NAMES = {
    "PIL": "Pillow",
    "bs4": "Beautiful Soup",
    "jupyterlab": "JupyterLab",
    "keras": "Keras",
    "numpy": "NumPy",
    "websocket": "websocket-client",
    "yaml": "PyYAML",
}


class MissingExtra(ModuleNotFoundError):
    """A package is missing that an extra brings. `.name` is the package, `.extra` the extra."""

    def __init__(self, what: str, package: str, extra: str):
        self.extra = extra
        needed = NAMES.get(package, package)
        super().__init__(f'{what} needs {needed}: pip install "parallel101[{extra}]"', name=package)


@contextmanager
def needs_extra(what: str) -> Iterator[None]:
    """Say what to install if an import in the block fails because an extra isn't installed.

    Args:
        what: needs it, such as "p101.sweep" or "parallel101 lessons". It begins the sentence.

    Raises:
        MissingExtra: a package of an extra is missing. Any other error stays as it is.
    """
    try:
        yield
    except MissingExtra as error:
        raise MissingExtra(what, str(error.name), error.extra) from None
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        extra = next((extra for extra, brings in EXTRAS.items() if package in brings), None)
        if extra is None:
            raise
        raise MissingExtra(what, package, extra) from None


def missing_packages(extra: str) -> list[str]:
    """Return the packages of an extra that can't be imported here."""
    return [
        name
        for name in EXTRAS[extra]
        if find_spec(name) is None and not (name == "tomli" and find_spec("tomllib"))
    ]
