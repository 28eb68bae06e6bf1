"""Whether the program runs in a notebook.

Imports nothing: `import parallel101` asks here, also where torch is missing.
"""

from __future__ import annotations

import sys


def in_notebook() -> bool:
    """Whether this is a notebook's kernel, and not a terminal."""
    return getattr(shell(), "kernel", None) is not None


def shell() -> object:
    """IPython's, if the program runs in it. A program that has not imported IPython does not."""
    return getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
