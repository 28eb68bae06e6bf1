"""Reads the dumps of torch's flight recorder, which a job writes that ran without parallel101.

    DIR/nccl_trace_rank_0 ──┐
    DIR/nccl_trace_rank_1 ──┴─▶ read_flight_dumps(DIR): FlightJob ──▶ analysis/flight_findings.py

The recorder is a ring buffer of the last calls of each rank. torch keeps it if
TORCH_FR_BUFFER_SIZE is set (TORCH_NCCL_TRACE_BUFFER_SIZE before torch 2.8), and writes it to
TORCH_FR_DUMP_TEMP_FILE (TORCH_NCCL_DEBUG_INFO_TEMP_FILE) followed by the rank when NCCL's watchdog
finds a timeout. `torch._C._distributed_c10d._dump_fr_trace()` returns the same bytes, and
`_dump_fr_trace_json()` returns JSON, which has no stacks.

A dump is a pickle of dicts, lists, tuples, numbers and text. A pickle can also call any function,
and torch's own reader (`torch.distributed.flight_recorder`) runs it. Here, a pickle that names a
function or a class is refused.

The fields are described in torch/csrc/distributed/c10d/FlightRecorderDetail.hpp.
"""

from __future__ import annotations

import io
import json
import pickle
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from parallel101.laboratory.record.events import P2P

FORMAT_MAJOR = 2  # of a dump's version: torch raises it if it changes the meaning of a field
RANK_OF = re.compile(r"(\d+)(\.json|\.pickle|\.pkl)?$")  # at the end of a dump's name
MAIN_GROUP = "default_pg"  # how torch describes the group of all ranks


class StackFrame(NamedTuple):
    """A line of a call's stack."""

    filename: str
    line: int
    name: str  # of the function


class FlightGroup(NamedTuple):
    """A process group as a dump describes it.

    `ranks` is empty if the dump does not say them: gloo's does not.
    """

    name: str
    desc: str
    ranks: tuple[int, ...]

    @property
    def label(self) -> str:
        said = "" if self.desc in ("", "undefined") else f" ({self.desc})"
        return f"group {self.name}{said}"


class FlightCall(NamedTuple):
    """A call of one rank."""

    rank: int
    group: FlightGroup
    operation: str  # "all_reduce", "send", …
    seq: int  # counts the collectives of a group; a message has that of the last collective
    peer: int | None  # of a send or a receive: the other rank, numbered in the group
    message: bool  # whether it is a send, a receive, or the end of a batch of them
    input_sizes: list[list[int]]
    output_sizes: list[list[int]]
    dtypes: list[str]  # of the inputs
    finished: bool
    created: int  # nanoseconds since 1970, on the rank's machine
    frames: list[StackFrame]  # the innermost first; empty if the dump has no stacks


class FlightDump(NamedTuple):
    """What one rank wrote.

    `wrapped`: it made more calls than its buffer holds, and the first are lost.
    """

    rank: int
    groups: list[FlightGroup]
    calls: list[FlightCall]
    wrapped: bool


class FlightJob(NamedTuple):
    """The dumps of a job's ranks.

    `unreadable` says for other ranks what is wrong with their files.
    """

    dumps: dict[int, FlightDump]
    unreadable: dict[int, str]

    @property
    def world_size(self) -> int:
        """The number of ranks, as far as the dumps tell."""
        known = {rank for dump in self.dumps.values() for g in dump.groups for rank in g.ranks}
        return max([*known, *self.dumps, *self.unreadable]) + 1

    @property
    def missing(self) -> list[int]:
        """The ranks that wrote no dump."""
        there = {*self.dumps, *self.unreadable}
        return [rank for rank in range(self.world_size) if rank not in there]


def flight_dump_files(directory: Path) -> list[Path]:
    """The files in a directory that look like dumps: a pickle or JSON, with the rank at the end."""
    return [
        path
        for path in sorted(directory.iterdir())
        if path.is_file()
        and RANK_OF.search(path.name)
        and _first_byte(path) in (b"\x80", b"{", b"")
    ]


def has_flight_dumps(directory: Path) -> bool:
    """Whether a directory has dumps, and no files that `parallel101 run --record` wrote."""
    if not directory.is_dir() or any(directory.glob("rank-*.json.gz")):
        return False
    return bool(flight_dump_files(directory))


def _first_byte(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(1)


def read_flight_dumps(directory: Path) -> FlightJob:
    """The dumps in a directory.

    A file that is cut short, or is something else, is left out and named in `unreadable`.

    Raises ValueError if no dump can be read, or if two files are of the same rank.
    """
    files: dict[int, Path] = {}
    for path in flight_dump_files(directory):
        rank = int(RANK_OF.search(path.name)[1])  # type: ignore[index]
        if rank in files:
            raise ValueError(
                f"{files[rank].name} and {path.name} are both of rank {rank}: keep the files of "
                f"one job in {directory}, one for each rank"
            )
        files[rank] = path
    dumps, unreadable = {}, {}
    for rank, path in sorted(files.items()):
        try:
            dumps[rank] = _dump(rank, load_flight_dump(path.read_bytes()))
        except ValueError as error:
            unreadable[rank] = f"{path.name} {error}"
    if not dumps:
        reasons = "; ".join(unreadable.values()) or "it has no files named after ranks"
        raise ValueError(
            f"{directory} has no dump of a flight recorder that can be read: {reasons}"
        )
    return FlightJob(dumps, unreadable)


# ── One file


class NamesNothing(pickle.Unpickler):
    """Reads a pickle of plain data, and refuses one that names a function or a class."""

    def find_class(self, module: str, name: str) -> Any:
        raise ValueError(
            f"is refused: it is a pickle that asks for {module}.{name}, and a flight recorder's "
            "dump holds only dicts, lists, numbers and text. Nothing of it was run"
        )


def load_flight_dump(data: bytes) -> dict[str, Any]:
    """The content of a dump, a pickle or JSON.

    Raises ValueError, whose text goes on from the file's name, if it is neither, if it was cut
    short, if its version is unknown, or if it asks for code.
    """
    if not data:
        raise ValueError("is empty: its rank ended before it had written its dump")
    try:
        content = json.loads(data) if data[:1] == b"{" else NamesNothing(io.BytesIO(data)).load()
    except ValueError as error:
        if str(error).startswith("is refused"):
            raise
        raise ValueError(f"is not a whole dump: {error}") from error
    except Exception as error:  # a broken pickle may raise any
        raise ValueError(f"is not a whole dump: {error or type(error).__name__}") from error
    if not isinstance(content, dict) or not {"version", "entries"} <= content.keys():
        raise ValueError("is not a flight recorder's dump: it has no 'version' and no 'entries'")
    version = str(content["version"])
    if version.partition(".")[0] != str(FORMAT_MAJOR):
        raise ValueError(
            f"has the format {version[:20]}, and {FORMAT_MAJOR}.x was expected. parallel101 must "
            "learn it first: read it with the torch that wrote it (torchfrtrace)"
        )
    return content


def _dump(rank: int, content: Mapping[str, Any]) -> FlightDump:
    """The checked content of a dump. Raises ValueError for a field that is missing or odd."""
    try:
        groups = {
            str(name): FlightGroup(str(name), str(said["desc"]), _ranks(said["ranks"]))
            for name, said in content.get("pg_config", {}).items()
            if str(name)  # gloo's has no name, and the ranks of the group that was made last
        }
        entries = list(content["entries"])
        calls: list[FlightCall] = []
        for entry in entries:
            calls.append(_call(rank, entry, groups, calls[-1] if calls else None))
        wrapped = bool(entries) and int(entries[0]["record_id"]) > 0
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        what = f"it lacks {error}" if isinstance(error, KeyError) else str(error)
        raise ValueError(f"is not a dump as torch writes it: {what}") from error
    return FlightDump(rank, list(groups.values()), calls, wrapped)


def _ranks(text: Any) -> tuple[int, ...]:
    """[0, 2], "[0, 2]" or "0,2" as numbers."""
    return tuple(sorted(int(number) for number in re.findall(r"\d+", str(text))))


def _call(
    rank: int,
    entry: Mapping[str, Any],
    groups: Mapping[str, FlightGroup],
    before: FlightCall | None,
) -> FlightCall:
    name, desc = map(str, entry["process_group"])
    backend, _, operation = str(entry["profiling_name"]).partition(":")
    operation, _, between = operation.partition(" ")
    peer = None
    if operation in P2P:  # "send 0->1" or "recv 1<-0"
        peer = int(re.split(r"->|<-", between)[1])
    ends_batch = operation == "coalesced" and before is not None and before.message
    # gloo's calls stay "scheduled" and are retired when they end; on NCCL, a call that is retired
    # and not completed has run into its timeout
    finished = entry["state"] == "completed" or (backend == "gloo" and bool(entry.get("retired")))
    frames = [
        StackFrame(str(frame["filename"]), int(frame["line"]), str(frame["name"]))
        for frame in entry.get("frames", [])
    ]
    return FlightCall(
        rank,
        groups.get(name, FlightGroup(name, desc, ()))._replace(desc=desc),
        operation,
        int(entry["collective_seq_id"]),
        peer,
        peer is not None or ends_batch or bool(entry.get("is_p2p")),
        [list(map(int, sizes)) for sizes in entry["input_sizes"]],
        [list(map(int, sizes)) for sizes in entry["output_sizes"]],
        [str(dtype) for dtype in entry.get("input_dtypes", [])],
        finished,
        int(entry.get("time_created_ns") or 0),
        frames,
    )
