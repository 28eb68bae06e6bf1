"""What a rank's program does, seen from another thread of its process."""

from __future__ import annotations

import faulthandler
import os
import queue
import sys
import threading
import time

import pytest

from parallel101.laboratory.ranks.rank_stack import (
    StackReader,
    native_frame,
    stack_lines,
    stack_of_dump,
)
from parallel101.laboratory.record.recorder import RankRecorder
from tests.ranks.failing import line_of

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc, which only Linux has")


class Blocked:
    """A thread with a function that blocks until `release` is called, and its recorder."""

    def __init__(self, function, release):
        self.release = release
        self.recorder = RankRecorder(3, recording=False)
        self.thread = threading.Thread(target=function)

    def __enter__(self):
        self.thread.start()
        self.recorder.thread = self.thread.ident
        return self

    def __exit__(self, *_):
        self.release()
        self.thread.join()

    def native(self, *words):
        """Its function in C, once that has these words: the thread must get there first."""
        deadline = time.monotonic() + 20
        while not all(word in (found := native_frame(self.thread.ident)) for word in words):
            assert time.monotonic() < deadline, found
        return found


def gets(waiting):
    waiting.get()


def test_the_place_is_the_programs_own_line_and_the_stack_has_the_librarys_too():
    waiting = queue.Queue()
    with Blocked(lambda: gets(waiting), lambda: waiting.put(1)) as blocked:
        reader, place = StackReader(blocked.recorder), line_of(gets, "waiting.get()")
        while (stack := reader.read()).place != place or "queue.py" not in str(stack.lines):
            pass
        assert stack.rank == 3 and "waiting.get()" in "\n".join(stack.lines)
        assert reader.read("its start, before the program").place.startswith("its start")


@LINUX
def test_the_function_in_c_and_the_file():
    ours, theirs = os.pipe()
    with Blocked(lambda: os.read(ours, 1), lambda: os.write(theirs, b"x")) as blocked:
        blocked.native("read in libc", "kernel's", f"file {os.readlink(f'/proc/self/fd/{ours}')}")
    os.close(ours)
    os.close(theirs)


@LINUX
def test_a_thread_that_computes_is_in_no_function_of_the_system():
    over = threading.Event()

    def computes():
        while not over.is_set():
            pass

    with Blocked(computes, over.set) as blocked:
        while native_frame(blocked.thread.ident):  # it may wait for Python's lock
            pass


def test_seconds_without_a_call_begin_again_with_each_call():
    recorder = RankRecorder(0, recording=False)
    reader = StackReader(recorder)
    reader.look()
    reader.clock.since -= 100.0
    assert 100.0 <= reader.read().quiet < 130.0
    recorder.count_collective("world", "barrier")
    assert reader.read().quiet < 30.0
    reader.clock.since -= 100.0
    recorder.next_seq(("send", 1, 0, "world"), "a.py:1", 4)
    assert reader.read().quiet < 30.0


def test_a_stack_that_a_signal_wrote(tmp_path):
    path = tmp_path / "dump"
    with path.open("w") as file:
        file.write('Stack (most recent call first):\n  File "old.py", line 1 in f\n')
        file.flush()
        faulthandler.dump_traceback(file, all_threads=False)
    stack = stack_of_dump(2, path.read_text(), os.getpid())
    assert stack.rank == 2 and stack.place.startswith(f"{__file__}:")
    assert stack.lines[-1].endswith("in test_a_stack_that_a_signal_wrote")
    assert "old.py" not in str(stack.lines) and "holds Python's lock" in stack.native


def test_of_a_deep_stack_the_innermost_calls_are_shown():
    def deep(n):
        return stack_lines(sys._getframe()) if n == 0 else deep(n - 1)

    lines = deep(50)
    assert lines[0].endswith("outer calls") and len(lines) < 70
    assert "stack_lines(sys._getframe())" in "".join(lines)
