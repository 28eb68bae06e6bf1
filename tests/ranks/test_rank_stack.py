"""What a rank's program does, seen from another thread of its process."""

from __future__ import annotations

import queue
import sys
import threading

from parallel101.laboratory.ranks.rank_stack import stack_lines
from parallel101.laboratory.ranks.watcher import RankObserver
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
        observer, place = RankObserver(blocked.recorder, print), line_of(gets, "waiting.get()")
        while (stack := observer.stack()).place != place or "queue.py" not in str(stack.lines):
            pass
        assert stack.rank == 3 and "waiting.get()" in "\n".join(stack.lines)
        assert observer.stack("its start, before the program").place.startswith("its start")


def test_seconds_without_a_call_begin_again_with_each_call():
    recorder = RankRecorder(0, recording=False)
    observer = RankObserver(recorder, print)
    observer.clock.look(0)
    observer.clock.since -= 100.0
    assert 100.0 <= observer.stack().quiet < 130.0
    recorder.count_collective("world", "barrier")
    assert observer.stack().quiet < 30.0
    observer.clock.since -= 100.0
    recorder.next_seq(("send", 1, 0, "world"), "a.py:1", 4)
    assert observer.stack().quiet < 30.0


def test_of_a_deep_stack_the_innermost_calls_are_shown():
    def deep(n):
        return stack_lines(sys._getframe()) if n == 0 else deep(n - 1)

    lines = deep(50)
    assert lines[0].endswith("outer calls") and len(lines) < 70
    assert "stack_lines(sys._getframe())" in "".join(lines)
