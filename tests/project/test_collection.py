"""Every process collects the same test ids. Where two pytest-xdist workers differ, pytest-xdist runs no test at all."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

# Collects tests with a clock that runs ahead.
COLLECT = """
import sys, time, pytest
ahead, seconds, nanoseconds = float(sys.argv[1]), time.time, time.time_ns
time.time = lambda: seconds() + ahead
time.time_ns = lambda: nanoseconds() + int(ahead * 1e9)
sys.exit(pytest.main(["--collect-only", "-q", "-p", "no:cacheprovider", sys.argv[2]]))
"""


def collect_twice(folder: Path) -> list[list[str]]:
    """Collect the tests of `folder` in two processes at once, which differ in clock, time zone and hash seed. Returns both lists of ids."""
    processes = []
    for ahead, zone, seed in (("0", "UTC0", "1"), ("3723.4", "There-1:02:03", "2")):
        environment = {**os.environ, "TZ": zone, "PYTHONHASHSEED": seed}
        command = [sys.executable, "-c", COLLECT, ahead, str(folder)]
        processes.append(subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))
    printed = [process.communicate()[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], "\n".join(printed)
    return [[line for line in text.splitlines() if "::" in line] for text in printed]


def test_every_process_collects_the_same_ids():
    first, second = collect_twice(ROOT / "tests")
    assert len(first) > 1000
    assert first == second


def test_ids_made_of_the_time_or_a_hash_are_found(tmp_path):
    made_of = ["time.time()", "time.localtime().tm_sec", "gzip.compress(b'')[4:8].hex()", "hash('a')"]
    (tmp_path / "test_ids.py").write_text(
        "import gzip, time, pytest\n"
        f"@pytest.mark.parametrize('x', [{', '.join(f'str({value})' for value in made_of)}])\n"
        "def test_something(x): pass\n"
    )
    first, second = collect_twice(tmp_path)
    assert len(first) == len(made_of)
    assert not set(first) & set(second)
