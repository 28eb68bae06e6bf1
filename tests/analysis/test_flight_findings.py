"""The dumps of torch's flight recorder tell which rank is missing in which collective, who waits
for whom, and which calls don't match.
"""

from __future__ import annotations

import copy
import pickle
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch._C import _distributed_c10d

import parallel101 as p101
from parallel101 import cli
from parallel101.laboratory.analysis.flight_findings import flight_verdict
from parallel101.laboratory.publish.page import external_addresses
from parallel101.laboratory.record.flight_recorder import load_flight_dump, read_flight_dumps

SIZE, BUFFER = 3, 6


# ── Dumps that torch wrote, of ranks that wait for each other


def dump_when(finished: int) -> bytes:
    """A dump in which so many calls have finished. gloo notes it just after the call has ended."""
    while True:
        data = _distributed_c10d._dump_fr_trace()
        if sum(e["retired"] for e in load_flight_dump(data)["entries"]) == finished:
            return data


def program(path) -> list[bytes]:
    """Returns what this rank's recorder has at three moments."""
    rank, x = dist.get_rank(), torch.ones(4)

    def group(name, desc, ranks):
        store = dist.PrefixStore(name, dist.FileStore(path, SIZE))
        mine = ranks.index(rank)
        made, kind = dist.ProcessGroup(store, mine, len(ranks)), dist.ProcessGroup.BackendType.GLOO
        gloo = dist.ProcessGroupGloo(store, mine, len(ranks), timedelta(seconds=60))
        made._register_backend(torch.device("cpu"), kind, gloo)
        made._set_default_backend(kind)
        made._set_group_name(name)
        made._set_group_desc(desc)
        return made

    met = dist.FileStore(path + " met", SIZE)

    def dump(finished):
        """Add a dump, and let the ranks go on when all have theirs."""
        dumps.append(dump_when(finished))
        moment = len(dumps)
        met.set(f"{moment} {rank}", "")
        met.wait([f"{moment} {other}" for other in range(SIZE)])

    def all_reduce(of):
        return of.allreduce([x])  # the innermost line of the program

    before = len(load_flight_dump(_distributed_c10d._dump_fr_trace())["entries"])
    world, pair = group("0", "default_pg", [0, 1, 2]), None
    all_reduce(world).wait()
    dumps: list[bytes] = []
    # rank 1 does not come to the second all_reduce
    late = None if rank == 1 else all_reduce(world)
    dump(before + 1)
    (late or all_reduce(world)).wait()
    # ranks 1 and 2 wait for each other in two groups
    if rank:
        pair = group("1", "tensor", [1, 2])
    late = pair.barrier() if rank == 1 else all_reduce(world)
    dump(before + 2)
    (all_reduce(world) if rank == 1 else late).wait()
    if rank:
        (late if rank == 1 else pair.barrier()).wait()
    # more calls than the buffer holds, and rank 2 makes no more
    for _ in range(BUFFER):
        all_reduce(world).wait()
    late = None if rank == 2 else all_reduce(world)
    dump(BUFFER - (rank != 2))
    (late or all_reduce(world)).wait()
    return dumps


@pytest.fixture(scope="module")
def moments(tmp_path_factory):
    """The folders with the dumps of each moment."""
    folder = tmp_path_factory.mktemp("flight")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCH_FR_BUFFER_SIZE", str(BUFFER))
        dumps = p101.launch(program, str(folder / "store"), world_size=SIZE).results
    for k in range(3):
        (folder / f"{k}").mkdir()
        for rank in range(SIZE):
            (folder / f"{k}" / f"nccl_trace_rank_{rank}").write_bytes(dumps[rank][k])
    return folder


def test_a_rank_is_missing(moments):
    verdict = flight_verdict(read_flight_dumps(moments / "0"))
    (found,) = verdict.findings
    assert (found.kind, found.number, found.ranks) == ("missing", 2, (1,))
    assert "all_reduce number 2 of group 0 (default_pg): rank 1 is missing" in found.text
    assert "called by ranks 0 and 2, not finished" in found.text
    assert "rank 1 came as far as all_reduce number 1" in found.text
    # the line of the program, not torch's, and the lines that called it
    assert "return of.allreduce([x])  # the innermost line of the program" in found.text
    assert "stack of rank 0:" in found.text and "in program" in found.text
    assert verdict.conclusion.startswith("Ranks 0 and 2 wait for rank 1.")
    assert "torch/" not in found.text


def test_the_missing_rank_waits_in_another_group(moments):
    verdict = flight_verdict(read_flight_dumps(moments / "1"))
    assert [(found.group, found.ranks) for found in verdict.findings] == [
        ("group 0 (default_pg)", (1,))
    ]
    # gloo's dumps don't say who else is in that group
    assert "It is in barrier, at " in verdict.conclusion
    assert "has not finished, in group 1 (tensor)" in verdict.conclusion


def test_the_buffer_has_wrapped(moments):
    job = read_flight_dumps(moments / "2")
    assert all(dump.wrapped and len(dump.calls) == BUFFER for dump in job.dumps.values())
    (found,) = flight_verdict(job).findings
    assert (found.kind, found.number, found.ranks) == ("missing", 4 + BUFFER, (2,))


def test_a_rank_left_no_dump(moments, tmp_path, capsys):
    for rank in (0, 2):
        name = f"nccl_trace_rank_{rank}"
        (tmp_path / name).write_bytes((moments / "0" / name).read_bytes())
    page = tmp_path / "page.html"
    assert cli.main(["merge", str(tmp_path), "--page", str(page)]) == 0
    out = capsys.readouterr().out
    assert "flight recorder dumps of 2 of 3 ranks" in out and "rank 1 left no dump" in out
    assert "nothing is known of rank 1" in out
    assert "Ranks 0 and 2 wait for rank 1, which left no dump that can be read" in out
    assert "Last call of each rank" in out
    html = page.read_text()
    assert list(external_addresses(html)) == [] and "nothing is known of rank 1" in html


# ── The form of NCCL's dumps, made from one that torch wrote


@pytest.fixture
def nccl(moments, tmp_path):
    """Writes dumps of NCCL's form: `calls[rank]` are its entries' fields that differ."""
    torchs = load_flight_dump((moments / "0" / "nccl_trace_rank_0").read_bytes())

    def write(calls, groups):
        config = {
            name: {"name": name, "desc": "a group", "ranks": str(ranks)}
            for name, ranks in groups.items()
        }
        for rank, fields in enumerate(calls):
            entries = []
            for k, changed in enumerate(fields):
                entry = {**copy.deepcopy(torchs["entries"][-1]), "record_id": k, "retired": False}
                entry.update(process_group=("0", "a group"), state="completed")
                entry.update(profiling_name="nccl:all_reduce", collective_seq_id=k + 1)
                entries.append({**entry, **changed})
            dump = {**torchs, "pg_config": config, "entries": entries}
            (tmp_path / f"rank_{rank}").write_bytes(pickle.dumps(dump, protocol=2))
        return tmp_path

    return write


STARTED = {"state": "started"}


def test_ranks_wait_for_each_other_in_two_groups(nccl):
    other = {**STARTED, "process_group": ("1", "a group"), "collective_seq_id": 1}
    folder = nccl([[{}, STARTED], [{}, other], [{}, STARTED]], {"0": [0, 1, 2], "1": [1, 2]})
    verdict = flight_verdict(read_flight_dumps(folder))
    assert "rank 1 waits for rank 2, rank 2 waits for rank 1" in verdict.conclusion
    assert {(found.group, found.ranks) for found in verdict.findings} == {
        ("group 0 (a group)", (1,)),
        ("group 1 (a group)", (2,)),
    }


def test_different_operations_and_sizes(nccl):
    broadcast = {**STARTED, "profiling_name": "nccl:broadcast"}
    folder = nccl([[{}, STARTED], [{}, broadcast], [{}, STARTED]], {"0": [0, 1, 2]})
    found = flight_verdict(read_flight_dumps(folder)).findings[0]
    assert (found.kind, found.number, found.ranks) == ("operation", 2, (1,))
    assert "ranks 0 and 2: all_reduce" in found.text and "rank 1: broadcast" in found.text
    # the first rank is the odd one
    folder = nccl([[{**STARTED, "input_sizes": [[5]]}], [STARTED], [STARTED]], {"0": [0, 1, 2]})
    found = flight_verdict(read_flight_dumps(folder)).findings[0]
    assert (found.kind, found.ranks) == ("sizes", (0,)) and "5 × Float" in found.text
    # the same elements in another shape are no mistake
    folder = nccl([[{"input_sizes": [[2, 2]]}], [{}], [{}]], {"0": [0, 1, 2]})
    assert flight_verdict(read_flight_dumps(folder)).findings == []


def test_torchs_own_analyzer_finds_the_same_missing_rank(nccl):
    builder = pytest.importorskip("torch.distributed.flight_recorder.components.builder")
    loader = pytest.importorskip("torch.distributed.flight_recorder.components.loader")
    config = pytest.importorskip("torch.distributed.flight_recorder.components.config_manager")
    folder = nccl([[{}, STARTED], [{}], [{}, STARTED]], {"0": [0, 1, 2]})
    args = config.JobConfig().parse_args([str(folder)])
    theirs = builder.build_db(*_in_order(loader.read_dir(args), args)).collectives[-1]
    (ours,) = flight_verdict(read_flight_dumps(folder)).findings
    assert set(ours.ranks) == theirs.missing_ranks == {1}
    assert ours.number == theirs.collective_seq_id == 2


def _in_order(read, args):
    details, version = read
    return details, args, version


def test_messages_without_their_other_side(nccl):
    def message(text, **fields):
        return {"profiling_name": f"nccl:{text}", "is_p2p": True, "collective_seq_id": 0, **fields}

    end = message("coalesced", **STARTED)
    folder = nccl(
        [
            [message("send 0->1"), message("send 0->1", **STARTED), end],
            [message("recv 1<-0"), message("recv 1<-2", **STARTED), end],
            [],
        ],
        {"0": [0, 1, 2]},
    )
    verdict = flight_verdict(read_flight_dumps(folder))
    assert [(found.kind, found.ranks) for found in verdict.findings] == [
        ("message", (1,)),
        ("message", (2,)),
    ]
    assert "send to rank 1 on rank 0" in verdict.findings[0].text
    assert verdict.conclusion.startswith("Ranks 0 and 1 wait for rank 2, which has made no call")


def test_a_job_whose_calls_have_all_finished(nccl, capsys):
    assert cli.main(["merge", str(nccl([[{}], [{}], []], {"0": [0, 1]}))]) == 0
    assert "Every call in the dumps has finished" in capsys.readouterr().out
