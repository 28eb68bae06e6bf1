"""Keeps a learner's code in a graded rank from what it must not reach, and from accidents.

    isolate             memory and files have limits; as root, the process becomes a user of its own
    hide_parallel101    `import parallel101` raises ImportError
    Neighbours          imports what was handed in beside the learner's file

Which files it may open is in file_access.py. The rank that does all this is rank.py.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.abc
import importlib.machinery
import os
import site
import sys
import sysconfig
import tempfile
import types
from typing import Any

import torch

from parallel101.laboratory.grade import file_access
from parallel101.laboratory.grade.exercise import module_of
from parallel101.laboratory.grade.users import open_library
from parallel101.laboratory.record import torch_private

NO_PARALLEL101 = (
    "the homework is written with torch.distributed alone: parallel101 can't be imported in it"
)
MOST_MEMORY = 2 << 30  # bytes that a rank may allocate
MOST_WRITTEN = 1 << 28  # bytes of a file


def isolate(job: dict[str, Any]) -> str:
    """Limit this process, and as root make it a user of its own.

    That user can read neither the cases nor other ranks. Returns the folder of Python's library.
    """
    torch.set_num_threads(1)
    torch_private.fill_new_tensors()
    library = sysconfig.get_path("stdlib") if job["user"] is None else open_library()
    with contextlib.suppress(OSError):
        os.chdir(job["scratch"])
    for name in ("OLDPWD", "PWD", "SUDO_COMMAND", "_"):  # they may name the submissions' folder
        os.environ.pop(name, None)
    os.environ.update(HOME=job["scratch"], TMPDIR=job["scratch"])
    tempfile.tempdir = None
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        with open("/proc/self/statm") as statm:
            most = int(statm.read().split()[0]) * os.sysconf("SC_PAGE_SIZE") + MOST_MEMORY
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_FSIZE, (MOST_WRITTEN, MOST_WRITTEN))
    if job["user"] is not None:
        file_access.own_shared_memory()
        os.setgroups([])
        os.setgid(job["user"])
        os.setuid(job["user"])
        with contextlib.suppress(OSError, AttributeError):
            # PR_SET_DUMPABLE: no process of another rank can read this one's memory
            ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)
    return library


class _NoParallel101(importlib.abc.MetaPathFinder):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name.partition(".")[0] == "parallel101":
            raise ImportError(NO_PARALLEL101)


class Neighbours(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports the files that were handed in beside the learner's file.

    They come with the job, so no folder need be readable here.
    """

    def __init__(self, files: dict[str, str]):
        self.files = files

    def find_spec(
        self, name: str, path: Any = None, target: Any = None
    ) -> importlib.machinery.ModuleSpec | None:
        return (
            importlib.machinery.ModuleSpec(name, self, origin=f"{name}.py")
            if name in self.files
            else None
        )

    def exec_module(self, module: types.ModuleType) -> None:
        path = f"{module.__name__}.py"
        module.__dict__.update(
            module_of(path, self.files[module.__name__], module.__name__).__dict__
        )


def hide_parallel101(library: str) -> None:
    """Let `import parallel101` raise ImportError: the learner writes what it would offer.

    Importing files of the grader's folders fails as well.
    """
    libraries = (*sysconfig.get_paths().values(), *site.getsitepackages(), library)
    sys.path[:] = [entry for entry in sys.path if entry.startswith(libraries)]
    for name in [name for name in sys.modules if name.partition(".")[0] == "parallel101"]:
        del sys.modules[name]
    sys.meta_path.insert(0, _NoParallel101())
