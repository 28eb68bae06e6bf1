"""The command line refuses wrong arguments with a useful message, and doctor reports what it
found.
"""

from __future__ import annotations

import errno
import io
import json
import os
import socket
import sys
import webbrowser
from unittest.mock import Mock

import pytest

from parallel101 import cli
from parallel101.laboratory import doctor


def test_wrong_arguments_get_a_message_with_what_was_expected(capsys, tmp_path):
    notebook = tmp_path / "00_ranks.ipynb"
    wrong = [  # arguments, and what the message says
        (["train"], "invalid choice: 'train' (choose from"),
        (["--fast"], "unrecognized arguments: --fast"),
        (["lessons", "--fast"], "unrecognized arguments: --fast"),
        (["lessons", "--lessons", "nowhere"], "nowhere is not a folder"),
        (["lessons", "--lessons", str(tmp_path / "..")], "no notebook"),
        (["lessons", "07", "--lessons", str(tmp_path)], "'07' is not a lesson; the lessons are"),
        (["run", "--page", str(tmp_path), "train.py"], "is a folder"),
        (["run", "--page", "/dev/null/a.html", "train.py"], "can't write"),
        (["grade", "--jobs", "0"], "argument --jobs: 0 is not a whole number"),
        (["grade", "--submission", "mine"], "name the homework set"),
        (["release", "homework"], "the following arguments are required: --out"),
        (["run", "--rules", "mpi", "train.py"], "invalid choice: 'mpi' (choose from"),
    ]
    for seconds in ("0", "-1", "nan", "inf", "soon"):
        said = f"argument --timeout: {seconds} is not a valid time limit; expected a finite number"
        wrong.append((["lessons", f"--timeout={seconds}"], said))
    for out in (notebook, notebook / "site", "/dev/null/site"):
        command = ["lessons", "--lessons", str(tmp_path), "--out", str(out)]
        wrong.append((command, f"cannot write pages to {out} ("))
        wrong.append((command, "give a writable folder, e.g. --out site"))
    notebook.touch()
    for argv, said in wrong:
        with pytest.raises(SystemExit) as stopped:
            cli.main(argv)
        message = " ".join(capsys.readouterr().err.split())
        assert stopped.value.code == 2 and said in message, argv


def test_without_a_command_it_greets_with_an_example_of_each(capsys):
    assert cli.main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    examples = [line.split()[1:] for line in lines if line.startswith("  parallel101 ")]
    assert {"doctor", "lab", "run", "grade", "plan"} <= {name for name, *_ in examples}
    for example in examples:
        cli._parsed(example)  # exits for what isn't a command


def test_help_and_version(capsys):
    helps = {"--help": "doctor", "lessons --help": "--timeout", "--version": "parallel101 "}
    for argv, expected in helps.items():
        with pytest.raises(SystemExit, match=r"^0$"):
            cli.main(argv.split())
        assert expected in capsys.readouterr().out


def test_a_failed_lesson_is_reported_and_the_exit_status_is_1(capsys, tmp_path):
    (tmp_path / "00_torn.ipynb").write_text("no notebook")
    assert cli.main(["lessons", "--lessons", str(tmp_path), "--out", str(tmp_path / "site")]) == 1
    output = capsys.readouterr()
    assert "lesson 00_torn" in output.err
    assert str(tmp_path / "site" / "index.html") in output.out


def test_doctor_finds_that_the_lessons_run_here(capsys):
    assert cli.main(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] is True
    rows = {row["name"]: row for row in report["checks"]}
    assert set(rows) == set(doctor.CHECKS)
    for needed in ("Python", "torch", "gloo", "loopback", "launch, gloo", "launch, sim", "Jupyter"):
        assert rows[needed]["state"] == "works" and not rows[needed]["advice"], rows[needed]


def test_doctor_prints_a_row_for_each_check_with_its_advice(capsys, monkeypatch):
    def broken():
        raise RuntimeError("a check\nthat breaks")

    def absent():
        raise doctor.Absent("not there")

    checks = {
        "one": (lambda: "fine", "be glad"),
        "two": (broken, "install it"),
        "three": (absent, ""),
    }
    monkeypatch.setattr(doctor, "CHECKS", checks)
    assert doctor.main() == 1
    printed = capsys.readouterr().out
    rows = ("✓ one", "✗ two           RuntimeError: a check that breaks", "→ install it", "– three")
    assert [row for row in (*rows, "Not working: two.") if row not in printed] == []
    assert "be glad" not in printed


def test_what_the_output_cannot_encode_is_escaped_and_a_full_disk_ends_it_without_a_traceback(
    monkeypatch, capfd
):
    class Full(io.StringIO):
        number = 0

        def flush(self):
            raise OSError(self.number, os.strerror(self.number))

    monkeypatch.setattr(doctor, "CHECKS", {"one": (lambda: "fine", "")})
    monkeypatch.setattr(sys, "stdout", Full())
    full_disk = "cannot write the output: No space left"
    for Full.number, status, message in ((errno.EPIPE, 141, ""), (errno.ENOSPC, 1, full_disk)):
        assert cli.main(["doctor"]) == status
        printed = capfd.readouterr().err
        assert message in printed and len(printed.splitlines()) == bool(message)
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", None)
    assert cli.main(["doctor"]) == 0
    out.flush()
    assert rb"\u2713 one" in out.buffer.getvalue()


def test_what_doctor_says_of_other_machines(monkeypatch):
    """What is replaced, with what, the check, and what its row says."""
    import torch

    import parallel101

    def raising(error):
        return Mock(side_effect=error)

    unreachable, two_ranks = raising(OSError("unreachable")), Mock(results=[1.0, 0.0])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda i: "a GPU")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda i: (0, 16 * 2**30))
    monkeypatch.setattr(doctor, "find_chromium", lambda: None)
    for place, name, value, check, state, said in (
        (socket, "create_server", unreachable, "loopback", "fails", "unreachable"),
        (socket, "create_server", unreachable, "loopback", "fails", "ip link set lo up"),
        (webbrowser, "get", raising(webbrowser.Error), "browser", "absent", "--no-browser"),
        (torch, "__version__", "2.10.0+cpu", "torch", "fails", "2.10.0"),
        (torch, "__version__", "2.10.0+cpu", "torch", "fails", doctor.TESTED_TORCH),
        (torch, "__version__", doctor.TESTED_TORCH, "torch", "works", "build)"),
        (torch, "__version__", doctor.TRIED_TORCH[-1], "torch", "works", "tests have passed"),
        (torch, "__version__", "99.0", "torch", "works", "not with this version"),
        (sys, "version_info", (3, 9), "Python", "fails", "needs Python 3.10 or newer"),
        (parallel101, "launch", lambda *_, **__: two_ranks, "launch, gloo", "fails", "[1.0, 0.0]"),
        (torch.cuda, "device_count", lambda: 1, "GPUs", "works", "a GPU (16 GiB). With one GPU"),
        (torch.cuda, "device_count", lambda: 4, "GPUs", "works", "up to 4 ranks on nccl"),
        (doctor, "missing_packages", lambda _: ["numpy"], "NumPy", "absent", "not installed"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(place, name, value, raising=False)
            patch.setattr(doctor, "CHECKS", {check: doctor.CHECKS[check]})
            (row,) = doctor.run_checks()
        assert row["state"] == state and said in row["found"] + row["advice"], row
