"""What this machine offers to keep a learner's code from what it must not reach, and uses of it.

    grader (root): cases, seed, results
    rank 0: user 20064, rank 1: user 20065, …     each with a scratch folder of its own

`protection` says which of two things there are, and a rank uses both. A graded rank calls `isolate`
before it loads the exercise, and `close` before it runs a line of the learner's. `clean_up` is for
the grader, when ranks have ended.

    users    if the grader is root, each rank becomes a user of its own, who must be able to read
             torch and parallel101. If only root can reach Python's standard library (as with pyenv
             in /root), a rank opens its folder before.
    files    with Linux's Landlock (since 5.13, for every user) a rank gives up rights for itself
             and for all that it starts, and can't get them back
             (docs.kernel.org/userspace-api/landlock.html). It can read Python's library, installed
             packages, /usr, /etc and its own /proc/self; it can write to its scratch folder, which
             is removed.

What is and is not defended against is said here, and nowhere else:

    Landlock    as any user: other learners' files and the seed, the list of processes, other
                processes' memory, signals to them; files in /tmp and shared memory, which the next
                submission could read
    as root     what a rank can read, and signals to other processes: the system's rules for users
                hold. Without Landlock, the submissions must be in a folder that only root can read
                (chmod 700), and the next submission could read what a rank leaves in /tmp
    otherwise   accidents only: a rank is this user's process, could read this user's files, or
                leave a process in a session of its own
    never       - a rank that lies about its own memory or its own spans, which are measured inside
                  it
                - code that hides from the rank that torch's own DistributedDataParallel or the like
                  makes its calls
                - code that reads parallel101's files without Python, where it is an installed
                  package: everybody has them
                - bytes without meaning: data that goes around torch.distributed earns nothing
                  without the bytes that the result takes, but meaningless bytes could be sent along
                - two learners who hand in the same code
                - without Landlock, a clone with the solutions (tests/homework) that every user can
                  read: grade from one without them, or in a folder that only root can read

The rank that does all this is rank.py.
"""

from __future__ import annotations

import ctypes
import os
import site
import socket
import struct
import sys
import sysconfig
import tempfile
import threading
from collections.abc import Iterable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch

from parallel101.laboratory import PACKAGE
from parallel101.laboratory.record import torch_private

OWN_FILES = os.path.realpath(PACKAGE)
NO_PARALLEL101 = (
    "the homework is written with torch.distributed alone: parallel101 can't be imported in it"
)
NO_THREADS = (
    "no thread can be started here, because its calls wouldn't be relayed: isend and irecv let "
    "messages travel at the same time"
)
MOST_MEMORY = 2 << 30  # bytes that a rank may allocate
MOST_WRITTEN = 1 << 24  # bytes of a file
FIRST_USER = 20_000
RANKS = 64  # users of one grader
GRADERS = 500  # at the same time


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
    for number in range(GRADERS):
        name = socket.socket(socket.AF_UNIX)
        with suppress(OSError):
            name.bind(f"\0parallel101 grader {number}")
            name.detach()  # it stays open, and the name taken, until the process ends
            return number
        name.close()
    return process % GRADERS


def clean_up(ranks: Iterable[int]) -> None:
    """End whatever runs as these ranks' users, however it was started."""
    users = {user for rank in ranks if (user := user_of(rank)) is not None}
    for process in psutil.process_iter(["uids"]) if users else ():
        uids = process.info["uids"]
        if uids is not None and uids.real in users:
            with suppress(psutil.Error):
                process.kill()


def readable_by_all(path: Path) -> bool:
    """Return whether every user of this machine can read a file or folder, and reach it."""
    path = path.resolve()
    needed = 0o005 if path.is_dir() else 0o004
    return path.stat().st_mode & needed == needed and others_reach(path.parent)


def others_reach(folder: Path) -> bool:
    """Return whether every user can use what is in a folder, if it may be read."""
    return all(part.stat().st_mode & 0o001 for part in (folder, *folder.parents))


def isolate(job: dict[str, Any]) -> str:
    """Limit this process, and as root make it a user of its own.

    That user can read neither the cases nor other ranks. Returns the folder of Python's library.
    """
    torch.set_num_threads(1)
    torch_private.fill_new_tensors()
    library = sysconfig.get_path("stdlib") if job["user"] is None else open_library()
    with suppress(OSError):
        os.chdir(job["scratch"])
    for name in ("OLDPWD", "PWD", "SUDO_COMMAND", "_"):  # they may name the submissions' folder
        os.environ.pop(name, None)
    os.environ.update(HOME=job["scratch"], TMPDIR=job["scratch"])
    tempfile.tempdir = None
    with suppress(ImportError, OSError, ValueError, psutil.Error):
        import resource

        most = psutil.Process().memory_info().vms + MOST_MEMORY
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_FSIZE, (MOST_WRITTEN, MOST_WRITTEN))
    if job["user"] is not None:
        with suppress(OSError, AttributeError):  # shared memory of its own, which ends with it
            ctypes.CDLL(None).unshare(NEW_IPC)
        os.setgroups([])
        os.setgid(job["user"])
        os.setuid(job["user"])
        with suppress(OSError, AttributeError):
            # PR_SET_DUMPABLE: no process of another rank can read this one's memory
            ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)
    return library


def close(job: dict[str, Any], library: str) -> None:
    """Take the package from this process, for good, and other files if the machine allows it.

    `import parallel101` raises ImportError, since the learner writes what it would offer, and so
    does importing files of the grader's folders. What was handed in beside the learner's file can
    be imported from the scratch folder. No thread can be started: the calls of several would reach
    the grader in an order that changes from run to run, and so would the steps.
    """
    libraries = (*sysconfig.get_paths().values(), *site.getsitepackages(), library)
    sys.path[:] = [entry for entry in sys.path if entry.startswith(libraries)]
    for name in [name for name in sys.modules if name.partition(".")[0] == "parallel101"]:
        del sys.modules[name]
    sys.path.insert(0, job["scratch"])
    for name, source in job["files"].items():
        Path(job["scratch"], f"{name}.py").write_text(source, encoding="utf-8")
    inside = os.path.join(OWN_FILES, "")

    def refuse(event: str, arguments: tuple) -> None:
        if event == "import" and arguments[0].partition(".")[0] == "parallel101":
            raise ImportError(NO_PARALLEL101)
        if event == "open" and isinstance(path := arguments[0], str | bytes):
            path = os.fsdecode(path)
            if "parallel101" in path and os.path.realpath(path).startswith(inside):
                raise PermissionError(NO_PARALLEL101)

    def no_thread(thread: threading.Thread) -> None:
        raise RuntimeError(NO_THREADS)

    threading.Thread.start = no_thread  # type: ignore[assignment]
    sys.addaudithook(refuse)
    if job["closed"]:
        _only_own_files(job["scratch"])


# ---- Landlock ----

# system calls, the same on all processors that Linux added them to together
CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446
ABI_VERSION, PATH_BENEATH = 1, 1
NO_NEW_PRIVILEGES = 38  # of prctl
# rights, as bits of linux/landlock.h
WRITE_FILE, READ_FILE, READ_DIR, TRUNCATE = 1 << 1, 1 << 2, 1 << 3, 1 << 14
OF_FILES = WRITE_FILE | READ_FILE | TRUNCATE
SCOPES, SCOPES_SINCE = 0b11, 6  # abstract sockets and signals, to processes outside
SYSTEM = (
    *("/usr", "/lib", "/lib32", "/lib64", "/bin", "/etc", "/sys", "/nix/store", "/proc/self"),
    *("/proc/cpuinfo", "/proc/meminfo", "/proc/stat", "/dev/urandom", "/dev/random"),
)
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


def _only_own_files(scratch: str) -> None:
    """Limit this process to the files that are listed above. There must be Landlock."""
    version = landlock_version()
    # All that this version has: 12 beside the first, which is to execute files, and one more in
    # each of the next two versions. Files can be executed as they can without it.
    rights = (1 << 12 + min(version, 3)) - 2
    handled = struct.pack("QQQ", rights, 0, SCOPES)[: 24 if version >= SCOPES_SINCE else 8]
    rules = _call(CREATE_RULESET, handled, len(handled), 0)
    folders = [  # of Python's modules, and of the libraries that they load
        *(*sys.path, os.path.dirname(torch.__file__)),
        *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib")),
        *(os.path.join(prefix, "lib") for prefix in (sys.prefix, sys.base_prefix)),
        *os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep),
    ]
    read = (*SYSTEM, *filter(os.path.isabs, folders))
    allowed = dict.fromkeys(read, (READ_FILE | READ_DIR) & rights)
    for path, granted in (allowed | dict.fromkeys((scratch, *WRITTEN), rights)).items():
        try:
            fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except OSError:  # it isn't there, or this user can't reach it
            continue
        beneath = struct.pack("=Qi", granted & (rights if os.path.isdir(path) else OF_FILES), fd)
        _call(ADD_RULE, rules, PATH_BENEATH, beneath, 0)
        os.close(fd)
    ctypes.CDLL(None).prctl(NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    _call(RESTRICT_SELF, rules, 0)
    os.close(rules)


def _call(number: int, *arguments: object) -> int:
    # all of them as wide as a register, as variadic arguments must be
    wide = (ctypes.c_size_t(a) if isinstance(a, int) else a for a in arguments)
    result = ctypes.CDLL(None, use_errno=True).syscall(ctypes.c_long(number), *wide)
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result


# ---- Python's library ----


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
    own = [name for name in list(sys.modules) if name.split(".")[0] in sys.stdlib_module_names]
    paths = [path for n in own if isinstance(path := getattr(sys.modules[n], "__path__", 0), list)]
    for path in (sys.path, *paths):
        for i, entry in enumerate(path):
            if entry.startswith(library) and "site-packages" not in entry:
                path[i] = entry.replace(library, opened, 1)
    return opened
