"""Makes each graded rank a user of its own if the grader is root.

Such a user can read neither the grader's files nor another rank's.

    grader (root): cases, seed, results
    rank 0: user 20064, rank 1: user 20065, …     each with a scratch folder of its own

Such a user must be able to read torch and parallel101. If only root can reach Python's standard
library (as with pyenv in /root), a rank opens its folder before it changes the user. On Linux with
Landlock, a rank also gives up all files but Python's and those of its scratch folder: see
file_access.py. What is and is not defended against is said here, and nowhere else:

    Landlock    as any user: other learners' files and the seed, the list of processes, other
                processes' memory, signals to them; files in /tmp and shared memory, which the next
                submission could read
    as root     what a rank can read, and signals to other processes: the system's rules for users
                hold. Without Landlock, what a rank leaves in the folders below is removed, and the
                submissions must be in a folder that only root can read (chmod 700)
    otherwise   accidents only: a rank is this user's process, could read this user's files, or
                leave a process in a session of its own
    never       - a rank that lies about its own memory or its own spans, which are measured inside
                  it
                - code that hides from the rank that torch's own DistributedDataParallel or the like
                  makes its calls
                - bytes without meaning: data that goes around torch.distributed earns nothing
                  without the bytes that the result takes, but meaningless bytes could be sent along
                - two learners who hand in the same code
                - without Landlock, a clone with the solutions (tests/homework) that every user can
                  read: grade from one without them, or in a folder that only root can read
"""

from __future__ import annotations

import os
import shutil
import socket
import sys
import sysconfig
import tempfile
from collections.abc import Collection
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import NamedTuple

import psutil
import torch

from parallel101.laboratory.grade.file_access import landlock_version

SHARED_FOLDERS = ("/tmp", "/var/tmp", "/dev/shm", "/dev/mqueue")  # every user can write to them
FIRST_USER = 20_000
RANKS = 64  # users of one grader
GRADERS = 500  # at the same time


def user_of(rank: int) -> int | None:
    """Return the user that a rank of this process becomes, or None for this user.

    Graders that run at the same time use different users.
    """
    return FIRST_USER + claimed(os.getpid()) * RANKS + rank if protection().users else None


@cache
def claimed(process: int) -> int:
    """Return a number that no other grader on this machine has while this process lives.

    Two graders with the same users would end each other's ranks. The number is part of a
    kernel-level name that no two sockets can share. Where the kernel has no such names, as on
    macOS, it is the process's number.
    """
    for number in (*range(process % GRADERS, GRADERS), *range(process % GRADERS)):
        name = socket.socket(socket.AF_UNIX)
        try:
            name.bind(f"\0parallel101 grader {number}")
        except OSError:
            name.close()
        else:
            name.detach()  # it stays open, and the name taken, until the process ends
            return number
    return process % GRADERS


class Protection(NamedTuple):
    """The protection that this machine offers against a rank that reads or ends other things.

    Attributes:
        users: each rank can become a user of its own: this process is root, and other users can
            read torch and parallel101.
        files: with Landlock, a rank can give up all files but Python's and its own.
    """

    users: bool
    files: bool


@cache
def protection() -> Protection:
    """Return the protection that this machine offers."""
    root = hasattr(os, "geteuid") and os.geteuid() == 0
    readable = all(readable_by_all(Path(file).parent) for file in (torch.__file__, __file__))
    python = readable_by_all(Path(sysconfig.get_path("stdlib"))) or sys.platform == "linux"
    return Protection(root and readable and python, bool(landlock_version()))


def end_processes_of(users: Collection[int]) -> None:
    """Kill whatever runs as these users: what a rank has started, however it was started."""
    for process in psutil.process_iter(["uids"]) if users else ():
        uids = process.info["uids"]
        if uids is not None and uids.real in users:
            with suppress(psutil.Error):
                process.kill()


def remove_files_of(users: Collection[int]) -> None:
    """Remove what these users have left in the folders that all users share."""
    for folder in {*SHARED_FOLDERS, tempfile.gettempdir()} if users else ():
        with suppress(OSError):
            for entry in os.scandir(folder):
                with suppress(OSError):
                    if entry.stat(follow_symlinks=False).st_uid not in users:
                        continue
                    if entry.is_dir(follow_symlinks=False):
                        shutil.rmtree(entry.path, ignore_errors=True)
                    else:
                        os.unlink(entry.path)


def open_library() -> str:
    """Return a path of Python's standard library that works for every user; a rank calls this.

    Where only root can reach the library, it is an open folder, and what is imported from now on is
    read through it.
    """
    library = sysconfig.get_path("stdlib")
    if readable_by_all(Path(library)):
        return library
    opened = f"/proc/self/fd/{os.open(library, os.O_PATH | os.O_DIRECTORY)}"
    # Its packages are chosen by name: a look at each of 3,000 modules would make 3,000 pages of
    # memory this process's own, in 10 ms.
    packages = [
        sys.modules[name]
        for name in list(sys.modules)
        if name.partition(".")[0] in sys.stdlib_module_names
    ]
    paths = (getattr(package, "__path__", None) for package in packages)
    for path in (sys.path, *(path for path in paths if isinstance(path, list))):
        path[:] = [
            entry.replace(library, opened, 1)
            if entry.startswith(library) and "site-packages" not in entry
            else entry
            for entry in path
        ]
    return opened


def readable_by_all(path: Path) -> bool:
    """Return whether every user of this machine can read a file or folder, and reach it."""
    path = path.resolve()
    needed = 0o005 if path.is_dir() else 0o004
    return path.stat().st_mode & needed == needed and others_reach(path.parent)


def others_reach(folder: Path) -> bool:
    """Return whether every user can use what is in a folder, if it may be read."""
    return all(part.stat().st_mode & 0o001 for part in (folder, *folder.parents))
