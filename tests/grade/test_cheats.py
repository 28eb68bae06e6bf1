"""Cheating earns nothing: each attempt here was written to get the points of a swap without sending
what it takes.

The grade is decided in this process, which runs no line of these programs, on inputs that only it
knows.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from textwrap import indent

import pytest

import parallel101
from parallel101.laboratory.grade import grading, isolation, remote
from parallel101.laboratory.grade.exercise import COLLECTIVES, P2P, Exercise
from parallel101.laboratory.grade.exercise_report import ExerciseVerdict, GradedRunFailed
from parallel101.laboratory.grade.grades import exercise_result
from parallel101.laboratory.grade.isolation import GRADERS, claimed, protection
from parallel101.laboratory.grade.remote import Submission
from tests.grade.test_submissions import RIGHT

HEAD = f'''
import gc, os, sys, time, struct, tempfile
import torch, torch.distributed as dist
os.umask(0)  # the other rank may be another user
def rank(): return dist.get_rank()
def side(x):
    """The other rank's tensor, by a file."""
    mine, other = ("/tmp/parallel101_side_{os.getpid()}_%d" % r for r in (rank(), 1 - rank()))
    with open(mine + ".new", "wb") as file: file.write(x.numpy().tobytes())
    os.rename(mine + ".new", mine)
    until = time.monotonic() + 4
    while not os.path.exists(other) and time.monotonic() < until: time.sleep(0.002)
    return torch.frombuffer(bytearray(open(other, "rb").read()), dtype=x.dtype)
def refused(action, *arguments):
    try: action(*arguments)
    except (PermissionError, ProcessLookupError): return True
    return False
'''
CHEATS = {
    "dist.all_gather, and its error caught": """
def swap(x):
    parts = [torch.empty_like(x) for _ in range(2)]
    try: dist.all_gather(parts, x)
    except BaseException: pass
    return parts[1 - rank()]""",
    "functional collectives": """
def swap(x):
    from torch.distributed._functional_collectives import all_gather_tensor
    return all_gather_tensor(x, 0, dist.group.WORLD).view(2, 3)[1 - rank()].clone()""",
    "a file": "def swap(x): return side(x)",
    "comparisons and the grader's modules patched": """
torch.equal = torch.allclose = torch.testing.assert_close = lambda *a, **k: True
torch.Tensor.__eq__ = torch.Tensor.equal = lambda *a: True
for module in [m for m in gc.get_objects() if type(m) is type(sys)]:
    if "grade" in getattr(module, "__name__", ""):
        for name in ("close", "difference", "same", "judge", "grade"):
            setattr(module, name, lambda *a, **k: None)
sys.modules["pytest"] = sys
def swap(x): return x.clone()""",
    "frames of one's own to the grader": """
def swap(x):
    connection = dist.group.WORLD.connection
    recv = {"call": 90, "group": "0", "method": "recv", "given": [[x], 1 - rank(), 0]}
    for _ in range(4): connection.send("call", by="recv", **recv)
    connection.send("result", result="passed", points=10, changed=[], shared=[])
    return x.clone()""",
    "the grader is detected, and its cases are drawn": """
def swap(x):
    import hashlib
    digest = hashlib.sha256(b"parallel101:swap").digest()
    draw = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
    xs = [torch.randn((3,), generator=draw, dtype=torch.float64).float() for _ in range(2)]
    return xs[1 - rank()]""",
}
WITH_THE_PACKAGE = {
    "the package's own": f"""
sys.meta_path[:] = [f for f in sys.meta_path if "parallel101" not in type(f).__module__]
sys.path.insert(0, {str(Path(parallel101.__file__).parents[1])!r})
from parallel101.collectives.all_gather import all_gather as swap""",
    "the package's own, from memory": """
gc.unfreeze()
functions = [f for f in gc.get_objects() if type(f) is type(rank)]
name = "parallel101.collectives.all_gather", "all_gather"
theirs = [f for f in functions if (f.__module__, f.__name__) == name][0]
def swap(x): return theirs(x)""",
}
CHEATS |= WITH_THE_PACKAGE
AROUND = {"the package's own", "a file"}


def limited(exercise: Exercise, seconds: float) -> Exercise:
    return replace(
        exercise, cases=lambda draw: [replace(c, seconds=seconds) for c in exercise.cases(draw)]
    )


@pytest.fixture
def exercise(homework) -> Exercise:
    """Its limit is not reached on a busy machine."""
    return limited(homework.exercises[0], 30.0)


def graded(exercise: Exercise, code: str) -> ExerciseVerdict:
    return grading.grade(exercise, Submission(Path("hw9.py"), HEAD + code), "a secret")


def printed(exercise: Exercise, body: str) -> list[str]:
    """What each rank prints in a function with this body."""
    code = f"def swap(x):\n{indent(body, '    ')}\n    return x\n"
    return graded(exercise, code).shown.printed


@pytest.fixture(autouse=True)
def no_side_channel_is_left():
    yield
    for path in Path("/tmp").glob(f"parallel101_side_{os.getpid()}_*"):
        path.unlink()


def open_files(monkeypatch):
    """As on a machine without Landlock."""
    offered = protection()._replace(files=False)
    monkeypatch.setattr(isolation, "protection", lambda: offered)


@pytest.mark.parametrize("name", CHEATS)
def test_no_points(exercise, name, monkeypatch):
    if name in AROUND:  # where the files of others are closed, not even the values are right
        open_files(monkeypatch)
    verdict = graded(exercise, CHEATS[name])
    assert verdict.points == 0, verdict
    if name in WITH_THE_PACKAGE:
        assert "parallel101" in verdict.problem, verdict
    elif name in AROUND:  # the values are right, and earn nothing
        assert "received 0 bytes in messages" in verdict.findings[0].message, verdict


@pytest.mark.parametrize("code", [RIGHT, CHEATS["functional collectives"]])
def test_what_is_allowed_gets_all_points(exercise, code):
    assert graded(replace(exercise, allowed=P2P | COLLECTIVES), code).points == 4


def test_a_case_for_which_no_time_is_left_fails(exercise, monkeypatch):
    monkeypatch.setattr(grading, "EXERCISE_SECONDS", 0.0)
    verdict = graded(exercise, RIGHT)
    assert verdict.points == 0 and "was over before" in verdict.problem


def test_a_process_that_does_not_start_is_the_machines_fault(exercise, monkeypatch):
    def fails(rank):
        raise GradedRunFailed("time", rank=rank.number)

    monkeypatch.setattr(remote.RemoteRank, "receive", fails)
    verdict = graded(exercise, RIGHT)
    assert "rank 0's process did not start" in verdict.problem and verdict.reason == "time"


RECEIVE = "c.send('call', call=9, group='0', by='recv', method='recv', given=[[%s], 1 - rank(), 0])"
BROADCAST = (
    "c.send('call', call=9, group='0', by='broadcast', method='broadcast', given=[], "
    "options={'rootRank': float('inf')})"
)
FAILED = "c.send('failed', where=%r, type='E', message='', calls=[], not_written=False)"
RAW = "t = b'%s'; c.sock.sendall(struct.pack('<IQ', len(t), 0) + t)"
BYTE_BY_BYTE = "[(c.sock.send(b' '), time.sleep(0.2)) for _ in range(99)]"
OVERFLOWS = '["x", {"x": {"tensor": "int8", "shape": [268435456, 268435456, 0], "order": []}}]'
HOSTILE = {
    "a shape that overflows": (RAW % OVERFLOWS, "ended without a result"),
    "a shape below zero": (RAW % '["x", {"tensor": "int8", "shape": [-1], "order": [0]}]', "read"),
    "no frame": (RAW % '["call"]', "can't be read"),
    "no call": ("c.send('wait', call=9)", "can't repeat"),
    "a root that is no number": (BROADCAST, "called broadcast"),
    "too many bytes": (
        f"[{RECEIVE % 'torch.empty(1 << 18, dtype=torch.int8)'} for _ in range(6)]",
        "more than 1 MiB",
    ),
    "a line of a file that only the grader may read": (
        FAILED % f"{__file__}:1",
        "rank 0 raised E, with 2 ranks\n",
    ),
    "half a character": ("raise ValueError(chr(0xD800))", "ValueError: ?"),
    "a frame that comes byte by byte": (
        f"c.sock.send(struct.pack('<IQ', 99, 0)); {BYTE_BY_BYTE}",
        "still running",
    ),
}


@pytest.mark.parametrize(("code", "problem"), HOSTILE.values(), ids=HOSTILE)
def test_the_grader_survives(exercise, code, problem, monkeypatch):
    monkeypatch.setattr(remote, "MOST_MOVED", 1 << 20)
    code = f"def swap(x):\n    c = dist.group.WORLD.connection\n    {code}\n    return x"
    verdict = graded(limited(exercise, 1.5) if "running" in problem else exercise, code)
    json.dumps(exercise_result(verdict), ensure_ascii=False).encode()
    assert verdict.points == 0 and problem in verdict.problem


READY_MADE = {
    "DDP": "torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))",
    "pipelining": "from torch.distributed.pipelining import PipelineStage, ScheduleGPipe as G; s = "
    "PipelineStage(torch.nn.Linear(2, 2), rank(), 2, torch.device('cpu'), input_args=(x[:2],)); "
    "G(s, 1).step(*[x[:2]] * (rank() == 0))",
}


@pytest.mark.parametrize("code", READY_MADE.values(), ids=READY_MADE)
def test_what_torch_has_ready_made_may_send_nothing(exercise, code):
    imports_it = replace(exercise, allowed=P2P | COLLECTIVES)
    verdict = graded(imports_it, RIGHT.replace("(x):", f"(x):\n    {code}", 1))
    assert verdict.points == 0 and "rank 0 called torch." in verdict.problem, verdict.problem


@pytest.mark.skipif(sys.platform != "linux", reason="needs names of sockets that are not files")
def test_two_graders_whose_process_numbers_are_alike_have_different_users():
    assert claimed(os.getpid()) != claimed(os.getpid() + GRADERS)


@pytest.mark.skipif(
    not protection().users, reason="needs root, and a torch that other users can read"
)
def test_as_root_a_rank_is_a_user_that_reads_and_ends_nothing_of_others(
    exercise, tmp_path, monkeypatch
):
    open_files(monkeypatch)
    secret = tmp_path / "seed.txt"
    secret.write_text("secret")
    secret.chmod(0o600)
    body = f"""
y, pid = torch.empty(1), torch.tensor([float(os.getpid())])
works = [dist.isend(pid, 1 - rank()), dist.irecv(y, 1 - rank())]
[work.wait() for work in works]
other, parent = int(y), os.getppid()
checks = [refused(open, {str(secret)!r}), os.getuid() != 0]
checks += [refused(open, f"/proc/{{o}}/mem", "rb") for o in (other, parent)]
print(checks + [refused(os.kill, pid, 0) for pid in (other, {os.getpid()}, parent)])
"""
    assert printed(exercise, body) == [f"{[True] * 7}\n"] * 2


@pytest.mark.skipif(not protection().files, reason="needs Landlock")
def test_a_rank_reaches_python_and_its_own_folder_and_nothing_else(exercise):
    with tempfile.TemporaryDirectory(prefix="parallel101_open_") as folder:
        Path(folder).chmod(0o755)  # every user can read it, as submissions often are
        (Path(folder) / "classmate.py").write_text("def swap(x): return x")
        body = f"""
import wave, markupsafe, torch.distributed.nn  # of Python, and of its packages
with tempfile.NamedTemporaryFile() as file: file.write(b"my own")
open("notes.txt", "w").write(open(torch.__file__).read())
assert os.path.expanduser("~") == os.getcwd() and open("/proc/self/stat").read()
parent, left = os.getppid(), "left_{os.getpid()}"
checks = [refused(open, "{folder}/classmate.py"), refused(os.listdir, "{folder}")]
checks += [refused(os.listdir, "/proc"), refused(open, "/proc/%d/cmdline" % parent)]
checks += [refused(open, f"{{f}}/{{left}}", "w") for f in ("/tmp", "/dev/shm")]
checks += [refused(open, {str(Path(__file__).parents[1] / "homework/hw1/reference.py")!r})]
checks += [refused(os.kill, parent, 0), refused(os.kill, {os.getpid()}, 0)]
print(checks, [name for name in ("PWD", "OLDPWD", "SUDO_COMMAND") if name in os.environ])
"""
        assert printed(exercise, body) == [f"{[True] * 9} []\n"] * 2


def test_no_file_of_the_package_can_be_opened(exercise, monkeypatch):
    open_files(monkeypatch)
    package = Path(parallel101.__file__).parent
    inside = "__init__.py", "collectives/all_gather.py", "laboratory/grade/exercise.py"
    body = f"print([refused(open, path) for path in {[str(package / name) for name in inside]}])"
    assert printed(exercise, body) == [f"{[True] * 3}\n"] * 2


@pytest.mark.skipif(not protection().users, reason="needs root")
def test_no_shared_memory_is_left_for_the_next_submission(exercise):
    find = f"import ctypes; print(ctypes.CDLL(None).shmget({os.getpid()}, 100, %s))"
    assert "-1\n" not in printed(exercise, find % 0o1666)
    assert printed(exercise, find % 0) == ["-1\n"] * 2
