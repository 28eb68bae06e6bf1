"""What ranks print, from Python and from C, appears line by line, with the rank before each
line, on the stream it was written to.
"""

from __future__ import annotations

import ctypes
import io
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

import parallel101 as p101
from parallel101.laboratory.ranks import output
from parallel101.laboratory.ranks.output import RankOutput, Screen


@pytest.mark.parametrize("backend", ["gloo", "sim"])
def test_lines_carry_their_rank(backend, capsys):
    def program(real):
        print("one\ntwo")
        print("to stderr", file=sys.stderr)
        with ThreadPoolExecutor(1) as thread:
            thread.submit(print, "from a thread")
        if real:  # not the virtual ranks, which are one process
            ctypes.CDLL(None).printf(b"from C\n")
            os.system("echo from a shell")
            os.write(1, b"\xff\xfe bytes\n")
            print("x" * 300_000)
            for done in range(3):
                print(f"\r{done} of 2", end="", flush=True)
            print()
        print("no end", end="")

    p101.launch(program, backend == "gloo", world_size=3, backend=backend)
    out, err = capsys.readouterr()
    assert sorted(err.splitlines()) == [f"[rank {r}] to stderr" for r in range(3)]
    # a bar is redrawn as it moves
    lines = [line.rpartition("\r")[2].partition("] ") for line in out.split("\n")[:-1]]
    more = ["from C", "from a shell", "\ufffd\ufffd bytes", "x" * 300_000, "2 of 2"]
    for rank in range(3):  # in the order they were printed
        mine = [text for who, _, text in lines if who == f"[rank {rank}"]
        assert mine == ["one", "two", "from a thread", *more * (backend == "gloo"), "no end"]
    assert len(lines) == 3 * len(mine)


def test_lines_appear_while_ranks_still_run(monkeypatch, tmp_path):
    """Rank 0 prints a line, and waits for a file that is made when the line appears.

    It would wait for ever for a line shown at the end.
    """
    seen = tmp_path / "seen"

    class Stream(io.StringIO):
        def write(self, text):
            if "[rank 0] are you there?" in text:
                seen.touch()

    def program():
        print("are you there?")
        while not seen.exists():
            pass
        return True

    monkeypatch.setattr(sys, "stdout", Stream())
    assert p101.launch(program, world_size=2, timeout=20).results == [True, True]


def test_characters_cut_in_half_or_unknown_and_line_ends_of_windows(capsys, monkeypatch):
    lines = RankOutput("> ", "stdout")
    lines.feed("caf\u00e9\r\ntw".encode())
    lines.feed(b"o\ncut \xe2\x82")
    lines.close()
    assert capsys.readouterr().out == "> caf\u00e9\n> two\n> cut \ufffd\n"
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    RankOutput("> ", "stdout").feed("\u2588 100%\n".encode())
    assert raw.getvalue() == b"> \\u2588 100%\n", "its code, on a terminal without it"


def test_progress_bars_of_several_ranks_overwrite_each_other(capsys):
    screen = Screen()
    first, second = RankOutput("[0] ", "stderr", screen), RankOutput("[1] ", "stderr", screen)
    first.feed(b"\rlong bar")
    second.feed(b"\rbar")
    first.feed(b"\r")
    second.feed(b"\ntext\n")
    bars = "\r[0] long bar" + "\r[1] bar     "
    assert capsys.readouterr().err == f"{bars}{bars}\n[1] text\n"


def test_long_output_in_a_notebook_is_folded_and_nothing_is_lost(monkeypatch, capsys):
    shown: list[str] = []
    live: list[int] = []  # lines that the cell has when there is something folded

    def update(html, display_id=True):
        shown.append(html.data)
        live.append(capsys.readouterr().out.count("\n"))
        return SimpleNamespace(update=update)

    monkeypatch.setattr("IPython.display.display", update)
    monkeypatch.setattr(output, "writes_to_a_cell", lambda: True)
    monkeypatch.setattr(output.LongOutput, "KEPT", 1000)
    screen = Screen()
    ranks = [RankOutput(f"[{r}] ", "stdout", screen) for r in range(2)]
    for rank, count in zip((0, 1, 0), (390, 30, 80)):
        rank = ranks[rank]
        rank.feed("".join(f"<{i}>\n" for i in range(count)).encode())
    assert live == [400] and shown[0].startswith("<pre>[1] &lt;10&gt;")
    screen.close()
    folded = "<details><summary>80 more lines</summary><pre>[1] &lt;10&gt;\n[1] &lt;11&gt;\n"
    assert shown[-1].startswith(folded)
    assert shown[-1].endswith("[0] &lt;79&gt;</pre>") and shown[-1].count("&lt;") == 100
    for _ in range(2):
        ranks[0].feed(b"x\n" * 1000)
    screen.close()
    # more than LongOutput.KEPT characters are not kept
    assert "<summary>2,080 more lines (the first" in shown[-1]


GLOO_ABORT = (
    "terminate called after throwing an instance of 'gloo::EnforceNotMet'\n"
    "  what():  [enforce fail at /pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:456] "
    "op.preamble.length <= op.nbytes. 8 vs 4.\n"
    "  what():  \n"
    "terminate called without an active exception\n"
    "[E1121 08:05:32.145091033 ProcessGroupGloo.cpp:67] Gloo connectFullMesh failed with "
    "[/gloo/pair.cc:553] Connection closed by peer\n"
)


@pytest.mark.parametrize("explained", [False, True])
def test_abort_messages_of_gloo_are_shown_only_if_no_error_explains_them(explained, capsys):
    own = "terminate called, said the program\nwhat(): it went on\n"
    lines = RankOutput("", "stderr")
    lines.feed((GLOO_ABORT + own).encode())
    lines.close(explained)
    assert capsys.readouterr().err == own + ("" if explained else GLOO_ABORT)


def test_a_misuse_that_aborts_a_rank_is_explained_without_gloos_messages(capsys):
    def program():
        print("about to", file=sys.stderr)
        dist.broadcast(torch.ones(9 - dist.get_rank()), 0)

    with pytest.raises(p101.RankFailed):
        p101.launch(program, world_size=2)
    told = sorted(capsys.readouterr().err.splitlines())
    assert told == ["[rank 0] about to", "[rank 1] about to"]


def gone(text):
    raise BrokenPipeError("nobody reads")


def test_ranks_may_print_where_nobody_reads_or_there_is_no_stdout(monkeypatch):
    """A closed output raises once, and leaves nothing open."""
    p101.launch(lambda: None, world_size=2)
    before = len(os.listdir("/dev/fd"))
    monkeypatch.setattr(sys, "stdout", SimpleNamespace(write=gone))
    with pytest.raises(BrokenPipeError) as raised:
        p101.launch(lambda: print("a line"), world_size=2)
    monkeypatch.setattr(sys, "stdout", None)
    assert raised.value.__context__ is None
    assert len(os.listdir("/dev/fd")) == before
    assert p101.launch(lambda: print("a line", flush=True) or 1, world_size=2).results == [1, 1]
