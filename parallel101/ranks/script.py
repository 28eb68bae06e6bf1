"""One rank of `parallel101 run`: an unmodified script, run as torchrun runs it: as `__main__`, with torchrun's environment.

    parallel101 run train.py --lr 0.1 ──▶ launch(run_script, script) ──▶ each rank: sys.argv, sys.path, os.environ, then train.py's code

The process group exists before the script starts. Its own init_process_group then does nothing, but it is told if the backend differs.
On sim, functions that the script registers with `atexit` are not called, because all ranks are one process.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import functools
import gc
import importlib.util
import os
import socket
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

import torch
import torch.distributed as dist

from parallel101.record.spans import recorder, span


@dataclass(frozen=True)
class Script:
    """What `parallel101 run` was asked to run.

    Attributes:
        target: a file, or with `as_module` the name of a module, as after `python -m`.
        arguments: what the script finds in sys.argv[1:].
        port: of MASTER_PORT, free when the run started. None: the environment has it already.
    """

    target: str
    arguments: tuple[str, ...] = ()
    as_module: bool = False
    port: int | None = None

    @property
    def name(self) -> str:
        return self.target if self.as_module else os.path.basename(self.target)

    def check(self) -> None:
        """Raise FileNotFoundError, ImportError or SyntaxError, before any rank is started, if the script can't be run."""
        if self.as_module:
            with _first_on_path(os.getcwd()):
                _module_code(self.target)
        else:
            _file_code(self.target)


def run_script(script: Script) -> None:
    """Run a script on this rank, inside a launch. Time in which it is blocked in a call of torch.distributed is recorded as a wait."""
    if (target := recorder()) is not None:
        target.record_waits = True  # type: ignore[attr-defined]
    if script.port is not None:
        os.environ["MASTER_PORT"] = str(script.port)
    _tell_other_backends()
    torch.set_default_device(None)  # launch's default on NCCL is the rank's GPU; a script for torchrun does not expect that
    main = ModuleType("__main__")
    main.__dict__["__builtins__"] = builtins
    sys.path.insert(0, os.getcwd() if script.as_module else os.path.dirname(os.path.abspath(script.target)))
    if script.as_module:
        code, spec = _module_code(script.target)
        main.__spec__, main.__loader__, main.__file__ = spec, spec.loader, spec.origin
        main.__package__ = spec.parent
    else:
        code = _file_code(script.target)
        main.__file__, main.__package__ = script.target, None
    sys.modules["__main__"] = main
    sys.argv = [main.__file__ or script.target, *script.arguments]
    with span(script.name, host=socket.gethostname()), _end_of_process():
        try:
            exec(code, main.__dict__)
        except SystemExit as stopped:
            if stopped.code not in (None, 0):
                raise
    main.__dict__.clear()  # as Python does at its end: files are written and workers stopped
    gc.collect()


def free_port() -> int:
    """A port on loopback that is free now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def _file_code(path: str) -> CodeType:
    return compile(Path(path).read_bytes(), path, "exec", dont_inherit=True)


def _module_code(name: str) -> tuple[CodeType, Any]:
    """The code and the spec of a module, or of a package's `__main__`."""
    spec = importlib.util.find_spec(name)
    if spec is not None and spec.submodule_search_locations is not None:
        spec = importlib.util.find_spec(f"{name}.__main__")
    code = None if spec is None else spec.loader.get_code(spec.name)  # type: ignore[union-attr]
    if code is None:
        raise ImportError(f"there is no module {name!r} that can be run")
    return code, spec


@contextlib.contextmanager
def _first_on_path(directory: str) -> Iterator[None]:
    sys.path.insert(0, directory)
    try:
        yield
    finally:
        sys.path.remove(directory)


@contextlib.contextmanager
def _end_of_process() -> Iterator[None]:
    """Do after the script what Python does before a process ends: wait for threads, and call what was registered with atexit."""
    if dist.get_backend().startswith("sim"):
        yield
        return
    before = set(threading.enumerate())
    atexit._clear()  # what was registered before belongs to the launch; a rank's process ends without it
    yield
    for thread in set(threading.enumerate()) - before:
        if not thread.daemon:
            thread.join()
    atexit._run_exitfuncs()


def _tell_other_backends() -> None:
    """Let init_process_group say on rank 0, once, that the run's backend replaces the one that the script names."""
    accepted = dist.init_process_group
    if hasattr(accepted, "told"):
        return  # on sim, another rank was here

    @functools.wraps(accepted)
    def init_process_group(backend: str | None = None, *args: Any, **kwargs: Any) -> None:
        actual = dist.get_backend()
        if backend is not None and dist.get_rank() == 0 and actual not in str(backend).replace(":", ",").split(","):
            note = f"parallel101 run: the script asks for the backend {str(backend)!r}; this run uses {actual!r} instead (--backend)"
            print(note, file=sys.stderr, flush=True)
        accepted(backend, *args, **kwargs)

    init_process_group.told = True  # type: ignore[attr-defined]
    dist.init_process_group = init_process_group
