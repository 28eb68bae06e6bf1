"""What a rank's program does, seen from another thread of its process."""

from __future__ import annotations

import queue
import sys
import threading

from parallel101.laboratory.ranks.rank_stack import StackReader, stack_lines
from parallel101.laboratory.record.recorder import RankRecorder
from tests.ranks.failing import line_of


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


def test_of_a_deep_stack_the_innermost_calls_are_shown():
    def deep(n):
        return stack_lines(sys._getframe()) if n == 0 else deep(n - 1)

    lines = deep(50)
    assert lines[0].endswith("outer calls") and len(lines) < 70
    assert "stack_lines(sys._getframe())" in "".join(lines)
