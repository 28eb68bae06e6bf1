"""Limits the files that a learner's code can reach to Python's own and its scratch folder.

    read     Python's library, installed packages but parallel101, /usr, /etc, its own /proc/self
    write    its scratch folder, which is removed
    nothing  other learners' files, the list of processes, /tmp, shared memory, the teacher's seed

Linux's Landlock does that since 5.13, for every user: a process gives up rights for itself and for
all that it starts, and can't get them back (docs.kernel.org/userspace-api/landlock.html). Where
there is none, `protection` in users.py says so, and its docstring says what is left.
"""

from __future__ import annotations

import ctypes
import os
import struct
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import cache

import torch

# system calls, the same on all processors that Linux added them to together
CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446
ABI_VERSION, PATH_BENEATH = 1, 1
NO_NEW_PRIVILEGES = 38  # of prctl
# rights, as bits of linux/landlock.h; files can be executed as they can without it
WRITE_FILE, READ_FILE, READ_DIR, TRUNCATE = 1 << 1, 1 << 2, 1 << 3, 1 << 14
REMOVE_AND_MAKE = sum(1 << bit for bit in range(4, 13))
REFER = 1 << 13  # to link or rename a file into another folder
OF_FILES = WRITE_FILE | READ_FILE | TRUNCATE
ALL = OF_FILES | READ_DIR | REMOVE_AND_MAKE | REFER
SINCE = {REFER: 2, TRUNCATE: 3}  # the version in which a right came
SCOPES, SCOPES_SINCE = 0b11, 6  # abstract sockets and signals, to processes outside
SYSTEM = ("/usr", "/lib", "/lib32", "/lib64", "/bin", "/etc", "/sys", "/nix/store", "/proc/self")
SYSTEM_FILES = ("/proc/cpuinfo", "/proc/meminfo", "/proc/stat", "/dev/urandom", "/dev/random")
WRITTEN = ("/dev/null", "/dev/zero")
NEW_IPC = 0x08000000  # of unshare


@cache
def landlock_version() -> int:
    """Return the version of Landlock on this machine, or 0."""
    if sys.platform != "linux":
        return 0
    with suppress(OSError, AttributeError):
        return max(0, _call(CREATE_RULESET, None, 0, ABI_VERSION))
    return 0


def only_own_files(scratch: str, package: str) -> None:
    """Limit this process to the files above, and to none of `package`'s.

    Does nothing where there is no Landlock.
    """
    version = landlock_version()
    if not version:
        return
    rights = ALL & ~sum(right for right, since in SINCE.items() if version < since)
    handled = struct.pack("QQQ", rights, 0, SCOPES if version >= SCOPES_SINCE else 0)
    handled = handled if version >= SCOPES_SINCE else handled[:8]
    rules = _call(CREATE_RULESET, handled, len(handled), 0)
    try:
        for path in (*SYSTEM, *SYSTEM_FILES, *_beside(filter(os.path.isabs, _folders()), package)):
            _allow(rules, path, (READ_FILE | READ_DIR) & rights)
        for folder in filter(
            os.path.isabs, _folders()
        ):  # to find a package, Python lists the folder
            _allow(rules, folder, READ_DIR)
        for path in (scratch, *WRITTEN):
            _allow(rules, path, rights)
        ctypes.CDLL(None).prctl(NO_NEW_PRIVILEGES, 1, 0, 0, 0)
        _call(RESTRICT_SELF, rules, 0)
    finally:
        os.close(rules)


def own_shared_memory() -> None:
    """Give this process its own System V shared memory, which ends with it (as root)."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).unshare(NEW_IPC)


def refuse_package_files(package: str, why: str) -> None:
    """Let Python in this process open no file of `package`. It can't be undone."""
    inside = os.path.join(package, "")

    def refuse(event: str, arguments: tuple) -> None:
        if event == "open" and isinstance(path := arguments[0], str | bytes):
            path = os.fsdecode(path)
            if "parallel101" in path and os.path.realpath(path).startswith(inside):
                raise PermissionError(why)

    sys.addaudithook(refuse)


def _folders() -> Iterator[str]:
    """Yield the folders of Python's modules, and of the libraries that they load."""
    yield from sys.path
    yield from (sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib"))
    yield os.path.dirname(torch.__file__)
    yield from (os.path.join(prefix, "lib") for prefix in {sys.prefix, sys.base_prefix})
    yield from os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep)


def _beside(folders: Iterable[str], package: str) -> Iterator[str]:
    """Yield these folders, but replace one that contains `package` by what is beside `package`."""
    for folder in dict.fromkeys(folders):
        if package != folder and not package.startswith(os.path.join(folder, "")):
            yield folder
        elif package != folder:
            with suppress(OSError):
                yield from _beside((entry.path for entry in os.scandir(folder)), package)


def _allow(rules: int, path: str, rights: int) -> None:
    try:
        fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:  # it isn't there, or this user can't reach it
        return
    try:
        allowed = rights if os.path.isdir(path) else rights & OF_FILES
        beneath = struct.pack("=Qi", allowed, fd)
        _call(ADD_RULE, rules, PATH_BENEATH, beneath, 0)
    finally:
        os.close(fd)


def _call(number: int, *arguments: object) -> int:
    library = ctypes.CDLL(None, use_errno=True)
    # all of them as wide as a register, as variadic arguments must be
    wide = [
        ctypes.c_size_t(argument) if isinstance(argument, int) else argument
        for argument in arguments
    ]
    result = library.syscall(ctypes.c_long(number), *wide)
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    return result
