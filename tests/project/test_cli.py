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

import pytest

from parallel101 import cli
from parallel101.laboratory import doctor


def usage_error(capsys, *argv: str) -> str:
    """Run a command that must exit with status 2, and return its message."""
    with pytest.raises(SystemExit) as stopped:
        cli.main(argv)
    assert stopped.value.code == 2
    return capsys.readouterr().err


def test_wrong_arguments_get_a_message_with_what_was_expected(capsys, tmp_path):
    assert "invalid choice: 'train' (choose from" in usage_error(capsys, "train")
    assert "unrecognized arguments: --fast" in usage_error(capsys, "--fast")
    assert "unrecognized arguments: --fast" in usage_error(capsys, "lessons", "--fast")
    assert "nowhere is not a folder" in usage_error(capsys, "lessons", "--lessons", "nowhere")
    assert "no notebook" in usage_error(capsys, "lessons", "--lessons", str(tmp_path))
    assert "is a folder" in usage_error(capsys, "run", "--page", str(tmp_path), "train.py")
    assert "can't write" in usage_error(capsys, "run", "--page", "/dev/null/a.html", "train.py")
    for seconds in ("0", "-1", "nan", "inf", "soon"):
        message = (
            f"argument --timeout: {seconds} is not a valid time limit; expected a finite "
            "number of seconds greater than 0"
        )
        assert message in usage_error(capsys, "lessons", f"--timeout={seconds}")
    (tmp_path / "00_ranks.ipynb").touch()
    for out in (
        tmp_path / "00_ranks.ipynb",
        tmp_path / "00_ranks.ipynb" / "site",
        "/dev/null/site",
    ):
        message = usage_error(
            capsys, "lessons", "--lessons", str(tmp_path), "--out", str(out)
        ).splitlines()[-1]
        assert f"cannot write pages to {out} (" in message and message.endswith(
            "give a writable folder, e.g. --out site"
        )
    assert "'07' is not a lesson; the lessons are: 00_ranks" in usage_error(
        capsys, "lessons", "07", "--lessons", str(tmp_path)
    )


def test_without_a_command_it_greets_with_an_example_of_each(capsys):
    assert cli.main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    examples = [line.split()[1:] for line in lines if line.startswith("  parallel101 ")]
    assert {"doctor", "lab", "run", "grade", "plan"} <= {name for name, *_ in examples}
    for example in examples:
        args, extra = cli._parser().parse_known_args(example)  # exits for what isn't a command
        assert args.takes_extra or not extra


def test_help_and_version(capsys):
    for argv, expected in (
        (["--help"], "doctor"),
        (["lessons", "--help"], "--timeout"),
        (["--version"], "parallel101 "),
    ):
        with pytest.raises(SystemExit) as stopped:
            cli.main(argv)
        assert stopped.value.code == 0
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
        assert rows[needed]["state"] == "works", rows[needed]


def test_doctor_prints_a_row_for_each_check_with_its_advice(capsys, monkeypatch):
    def broken() -> doctor.CheckResult:
        raise RuntimeError("a check\nthat breaks")

    missing = doctor.CheckResult("fails", "not there", "install it")
    monkeypatch.setattr(
        doctor,
        "CHECKS",
        {
            "one": lambda: doctor.CheckResult("works", "fine"),
            "two": lambda: missing,
            "three": broken,
        },
    )
    assert doctor.main() == 1
    printed = capsys.readouterr().out
    assert "✓ one" in printed
    assert "✗ two" in printed
    assert "→ install it" in printed
    assert "✗ three         RuntimeError: a check that breaks" in printed
    assert "Not working: two, three." in printed


def test_characters_that_the_output_cannot_encode_are_escaped(monkeypatch):
    monkeypatch.setattr(doctor, "CHECKS", {"one": lambda: doctor.CheckResult("works", "fine")})
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", None)
    assert cli.main(["doctor"]) == 0
    out.flush()
    assert rb"\u2713 one" in out.buffer.getvalue()


@pytest.mark.parametrize(
    ("number", "status", "message"),
    [(errno.EPIPE, 141, ""), (errno.ENOSPC, 1, "cannot write the output: No space left")],
    ids=["closed pipe", "full disk"],
)
def test_a_closed_pipe_and_a_full_disk_end_a_command_without_a_traceback(
    monkeypatch, capfd, number, status, message
):
    class Full(io.StringIO):
        def flush(self):
            raise OSError(number, os.strerror(number))

    monkeypatch.setattr(doctor, "CHECKS", {"one": lambda: doctor.CheckResult("works", "fine")})
    monkeypatch.setattr(sys, "stdout", Full())
    assert cli.main(["doctor"]) == status
    printed = capfd.readouterr().err
    assert message in printed and len(printed.splitlines()) == bool(message)


def test_doctor_reports_a_closed_loopback_and_a_missing_browser(monkeypatch):
    def refused(*args, **kwargs):
        raise OSError("Network is unreachable")

    monkeypatch.setattr(socket, "create_server", refused)
    row = doctor.check_loopback()
    assert (row.state, "unreachable" in row.found, "ip link set lo up" in row.advice) == (
        "fails",
        True,
        True,
    )

    def none() -> None:
        raise webbrowser.Error

    monkeypatch.setattr(doctor, "find_chromium", lambda: None)
    monkeypatch.setattr(webbrowser, "get", none)
    assert doctor.check_browser().state == "absent"


def test_doctor_reports_an_old_torch_and_a_wrong_sum(monkeypatch):
    import torch

    import parallel101

    monkeypatch.setattr(torch, "__version__", "2.10.0+cpu")
    monkeypatch.setattr(doctor, "version", lambda package: "2.10.0+cpu")
    row = doctor.check_torch()
    assert (row.state, "2.10.0" in row.found, doctor.TESTED_TORCH in row.advice) == (
        "fails",
        True,
        True,
    )
    for found, note in (
        (doctor.TESTED_TORCH, "build)"),
        (doctor.TRIED_TORCH[-1], "all tests have passed with it"),
        ("99.0", "not with this version"),
    ):
        monkeypatch.setattr(torch, "__version__", found)
        assert doctor.check_torch().state == "works" and note in doctor.check_torch().found

    class Wrong:
        results = [1.0, 0.0]  # noqa: RUF012

    monkeypatch.setattr(parallel101, "launch", lambda *args, **kwargs: Wrong, raising=False)
    assert doctor.check_launch("gloo").state == "fails"


@pytest.mark.parametrize(("count", "message"), [(1, "With one GPU"), (4, "up to 4 ranks on nccl")])
def test_doctor_says_what_the_gpus_can_do(monkeypatch, count, message):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda i: "a GPU")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda i: (0, 16 * 2**30))
    row = doctor.check_gpus()
    assert row.state == "works"
    assert "a GPU (16 GiB)" in row.found
    assert message in row.found + row.advice
