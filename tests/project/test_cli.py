"""The command line answers wrong questions at once, and doctor tells what it found."""

from __future__ import annotations

import errno
import io
import json
import os
import socket
import sys
import webbrowser

import pytest

from parallel101 import cli, doctor


def asked_wrongly(capsys, *argv: str) -> str:
    with pytest.raises(SystemExit) as stopped:
        cli.main(argv)
    assert stopped.value.code == 2
    return capsys.readouterr().err


def test_wrong_questions_are_told_with_what_was_expected(capsys, tmp_path):
    assert "invalid choice: 'train' (choose from" in asked_wrongly(capsys, "train")
    assert "doctor | lab | lessons | bench" in asked_wrongly(capsys)
    assert "unrecognized arguments: --fast" in asked_wrongly(capsys, "lessons", "--fast")
    assert "nowhere is not a folder" in asked_wrongly(capsys, "lessons", "--lessons", "nowhere")
    assert "no notebook" in asked_wrongly(capsys, "lessons", "--lessons", str(tmp_path))
    for seconds in ("0", "-1", "nan", "inf", "soon"):
        told = f"argument --timeout: {seconds} is not a time; give a finite number of seconds, more than 0"
        assert told in asked_wrongly(capsys, "lessons", f"--timeout={seconds}")
    (tmp_path / "00_ranks.ipynb").touch()
    for out in (tmp_path / "00_ranks.ipynb", tmp_path / "00_ranks.ipynb" / "site", "/dev/null/site"):
        told = asked_wrongly(capsys, "lessons", "--lessons", str(tmp_path), "--out", str(out)).splitlines()[-1]
        assert f"pages can't be written to {out} (" in told and told.endswith("give a folder, e.g. --out site")
    assert "'07' is not a lesson; there are: 00_ranks" in asked_wrongly(capsys, "lessons", "07", "--lessons", str(tmp_path))


def test_help_and_version_are_there(capsys):
    for argv, expected in ((["--help"], "doctor"), (["lessons", "--help"], "--timeout"), (["--version"], "parallel101 ")):
        with pytest.raises(SystemExit) as stopped:
            cli.main(argv)
        assert stopped.value.code == 0
        assert expected in capsys.readouterr().out


def test_a_failed_lesson_is_told_and_makes_the_exit_status_1(capsys, tmp_path):
    (tmp_path / "00_torn.ipynb").write_text("no notebook")
    assert cli.main(["lessons", "--lessons", str(tmp_path), "--out", str(tmp_path / "site")]) == 1
    told = capsys.readouterr()
    assert "lesson 00_torn" in told.err
    assert str(tmp_path / "site" / "index.html") in told.out


def test_doctor_finds_that_the_lessons_run_here(capsys):
    assert cli.main(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] is True
    rows = {row["name"]: row for row in report["checks"]}
    assert set(rows) == set(doctor.CHECKS)
    for needed in ("Python", "torch", "gloo", "loopback", "launch, gloo", "launch, sim", "Jupyter"):
        assert rows[needed]["state"] == "works", rows[needed]


def test_doctor_prints_a_row_for_each_check_and_what_to_do(capsys, monkeypatch):
    def broken() -> doctor.Row:
        raise RuntimeError("a check\nthat breaks")

    missing = doctor.Row("fails", "not there", "install it")
    monkeypatch.setattr(doctor, "CHECKS", {"one": lambda: doctor.Row("works", "fine"), "two": lambda: missing, "three": broken})
    assert doctor.main() == 1
    printed = capsys.readouterr().out
    assert "✓ one" in printed
    assert "✗ two" in printed
    assert "→ install it" in printed
    assert "✗ three         RuntimeError: a check that breaks" in printed
    assert "Not working: two, three." in printed


def test_an_output_of_few_characters_gets_the_others_spelled_out(monkeypatch):
    monkeypatch.setattr(doctor, "CHECKS", {"one": lambda: doctor.Row("works", "fine")})
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", None)
    assert cli.main(["doctor"]) == 0
    out.flush()
    assert rb"\u2713 one" in out.buffer.getvalue()


@pytest.mark.parametrize(
    ("wrong", "status", "told"), [(errno.EPIPE, 141, ""), (errno.ENOSPC, 1, "the output can't be written: No space left")]
)
def test_an_output_that_takes_no_more_ends_a_command_without_a_traceback(monkeypatch, capfd, wrong, status, told):
    class Full(io.StringIO):
        def flush(self):
            raise OSError(wrong, os.strerror(wrong))

    monkeypatch.setattr(doctor, "CHECKS", {"one": lambda: doctor.Row("works", "fine")})
    monkeypatch.setattr(sys, "stdout", Full())
    assert cli.main(["doctor"]) == status
    said = capfd.readouterr().err
    assert told in said and len(said.splitlines()) == bool(told)


def test_doctor_tells_a_closed_loopback_and_a_missing_browser(monkeypatch):
    def refused(*args, **kwargs):
        raise OSError("Network is unreachable")

    monkeypatch.setattr(socket, "create_server", refused)
    row = doctor.check_loopback()
    assert (row.state, "unreachable" in row.found, "ip link set lo up" in row.advice) == ("fails", True, True)

    def none() -> None:
        raise webbrowser.Error

    monkeypatch.setattr(doctor, "find_chromium", lambda: None)
    monkeypatch.setattr(webbrowser, "get", none)
    assert doctor.check_browser().state == "absent"


def test_doctor_tells_an_old_torch_and_a_wrong_sum(monkeypatch):
    import torch

    import parallel101

    monkeypatch.setattr(torch, "__version__", "2.10.0+cpu")
    monkeypatch.setattr(doctor, "version", lambda package: "2.10.0+cpu")
    row = doctor.check_torch()
    assert (row.state, "2.10.0" in row.found, doctor.TESTED_TORCH in row.advice) == ("fails", True, True)

    class Wrong:
        results = [1.0, 0.0]  # noqa: RUF012

    monkeypatch.setattr(parallel101, "launch", lambda *args, **kwargs: Wrong, raising=False)
    assert doctor.check_launch("gloo").state == "fails"


@pytest.mark.parametrize(("count", "told"), [(1, "With one GPU"), (4, "up to 4 ranks on nccl")])
def test_doctor_tells_what_the_gpus_can_do(monkeypatch, count, told):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda i: "a GPU")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda i: (0, 16 * 2**30))
    row = doctor.check_gpus()
    assert row.state == "works"
    assert "a GPU (16 GiB)" in row.found
    assert told in row.found + row.advice
