"""Tells whether the program runs in a notebook.

Imports nothing: `import parallel101` asks here, also where torch is missing.
"""

from __future__ import annotations

import sys


def in_notebook() -> bool:
    """Return whether this is a notebook's kernel, and not a terminal."""
    return getattr(shell(), "kernel", None) is not None


def shell() -> object:
    """Return IPython's shell if the program runs in it, else None.

    A program that has not imported IPython does not run in it.
    """
    return getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
