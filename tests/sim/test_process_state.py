"""A virtual rank looks like a process to the program: its modules, environment and output are
its own. (Its random numbers: test_ranks.)
"""

from __future__ import annotations

import logging
import os
import sys
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

import parallel101 as p101
from parallel101.laboratory.sim.simulate import simulate

from .programs import run

SCRIPTS = str(Path(__file__).parent / "scripts")


@pytest.fixture(scope="module", autouse=True)
def scripts():
    """The scripts can be imported, by this process and by ranks.

    This process has not imported them before, and forgets them.
    """
    before = set(sys.modules)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(SCRIPTS)
        patch.setenv("SETTING", "mine")
        patch.setenv("DELETED", "")
        yield
    for name in sys.modules.keys() - before:
        if (getattr(sys.modules[name], "__file__", None) or "").startswith(SCRIPTS):
            del sys.modules[name]


def megatron_style():
    import parallel_state

    parallel_state.initialize_model_parallel(2)
    dist.barrier()  # all ranks have set their globals
    sums = [torch.tensor([2.0 ** dist.get_rank()]) for _ in range(2)]
    dist.all_reduce(sums[0], group=parallel_state.get_tensor_model_parallel_group())
    dist.all_reduce(sums[1], group=parallel_state.get_data_parallel_group())
    parallel_state.set_tensor_model_parallel_rank(100 + dist.get_rank())
    dist.barrier()
    return sums[0].item(), sums[1].item(), parallel_state.get_tensor_model_parallel_rank()


def logs():
    """What a rank's handlers get: the one of an imported module, and those that it adds to the
    root logger, some of them on rank 0 only.
    """
    import own_logger

    rank = dist.get_rank()
    logging.basicConfig(
        level=logging.INFO if rank == 0 else logging.WARNING,
        handlers=[own_logger.Collected()],
        format=f"{rank}: %(message)s",
    )
    dist.barrier()  # all ranks have added theirs
    own_logger.log.info("step 1")
    logging.info("only rank 0 says this")
    logging.getLogger("of this function").warning("late")
    dist.barrier()
    return own_logger.lines


def streams():
    """The warnings of torch's decorator `record`, which looks for the file of what is printed."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        record(lambda: None)()
    sys.stdout.reconfigure(line_buffering=True)
    return [str(warning.message) for warning in said], sys.stderr.fileno(), sys.stdout.encoding


def test_torchs_profiler_runs_on_one_rank_after_another():
    def program(rank):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            torch.ones(3).add(1)
        return [event.count for event in profile.key_averages() if event.key == "aten::add"]

    assert run(program, 3).results == [[1]] * 3


def environment():
    from os import environ

    rank = dist.get_rank()
    environ["MINE"] = str(rank)
    os.environ["SETTING"] += f" {rank}"
    if rank:
        del os.environ["DELETED"]
    dist.barrier()
    torchrun = [
        os.environ[name]
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK")
    ]
    assert os.environ["MASTER_ADDR"] and int(os.environ["MASTER_PORT"])
    return (
        torchrun,
        environ["MINE"],
        os.getenv("SETTING"),
        "DELETED" in os.environ,
        dict(os.environ)["MINE"],
    )


def program():
    return megatron_style(), logs(), streams(), environment()


def test_a_rank_is_like_a_process_on_gloo():
    """Its modules, log handlers, levels and streams, and its environment."""
    here = logging.getLogger().handlers[:], logging.getLogger().level
    gloo, sim = (p101.launch(program, backend=backend).results for backend in ("gloo", "sim"))
    assert gloo == sim
    sums = [(3.0, 5.0, 100), (3.0, 10.0, 101), (12.0, 5.0, 102), (12.0, 10.0, 103)]
    for rank, (megatron, lines, of_streams, of_environment) in enumerate(sim):
        assert megatron == sums[rank]
        only_rank_0 = ["0: only rank 0 says this"] * (rank == 0)
        assert lines == ["step 1", f"{rank}: step 1", *only_rank_0, f"{rank}: late"]
        assert of_streams == ([], 2, "utf-8")
        own = [str(rank), str(rank), "4", "4", "0"]
        assert of_environment == (own, str(rank), f"mine {rank}", rank == 0, str(rank))
    assert os.environ["SETTING"] == "mine" and "RANK" not in os.environ
    handlers = simulate(lambda rank: len(logging.getLogger().handlers), 2).results
    assert handlers == [len(here[0])] * 2
    simulate(lambda rank: logging.getLogger().addHandler(logging.StreamHandler()), 2)
    assert (logging.getLogger().handlers, logging.getLogger().level) == here


def test_classes_that_are_pickled_by_value_and_print_are_each_ranks_own(capfd):
    namespace: dict = {"dist": dist}
    exec(
        "class Registry:\n    members = []\n"
        "def program():\n"
        "    import builtins\n"
        "    Registry.members.append(dist.get_rank())\n"
        # as many programs silence other ranks
        "    if dist.get_rank() != 2:\n        builtins.print = lambda *args: None\n"
        "    dist.barrier()\n"
        "    print('a line of rank', dist.get_rank())\n"
        "    return Registry.members, Registry()\n",
        namespace,
    )
    results = p101.launch(namespace["program"], backend="sim").results
    assert [members for members, _ in results] == [[0], [1], [2], [3]]
    assert all(type(made) is namespace["Registry"] for _, made in results)
    assert capfd.readouterr().out == "[rank 2] a line of rank 2\n"


def test_results_and_exceptions_of_the_programs_own_classes_come_back(tmp_path, monkeypatch):
    (tmp_path / "own_classes_of_a_program.py").write_text("class Own(Exception):\n    pass\n")
    monkeypatch.syspath_prepend(str(tmp_path))

    def program(fail):
        from own_classes_of_a_program import Own

        dist.barrier()
        if fail and dist.get_rank() == 1:
            raise Own("it failed")
        return Own(dist.get_rank())

    import own_classes_of_a_program as here

    results = p101.launch(program, False, backend="sim").results
    assert [(type(x), x.args) for x in results] == [(here.Own, (rank,)) for rank in range(4)]
    with pytest.raises(p101.RankFailed, match="rank 1 raised Own: it failed") as failed:
        p101.launch(program, True, backend="sim")
    assert type(failed.value.__cause__) is here.Own


def test_modules_that_were_loaded_before_a_simulation_are_shared_and_libraries_too(
    tmp_path, monkeypatch
):
    for name in ("before_the_run", "during_the_run"):
        (tmp_path / f"{name}.py").write_text("import dataclasses, graphlib\nranks = []\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    import before_the_run

    def program(rank):
        import during_the_run

        for module in (before_the_run, during_the_run):
            module.ranks.append(rank)
        sys.modules["__main__"] = during_the_run
        dist.barrier()
        import during_the_run as again

        assert again is during_the_run is sys.modules["__main__"]
        return again.ranks, id(again.graphlib)

    main = sys.modules["__main__"]
    results = run(program, 3).results
    assert [ranks for ranks, _ in results] == [[0], [1], [2]] and len(
        {library for _, library in results}
    ) == 1
    assert before_the_run.ranks == [0, 1, 2]
    assert "during_the_run" not in sys.modules and sys.modules["__main__"] is main


def test_ranks_may_communicate_while_they_import_a_module(tmp_path, monkeypatch):
    (tmp_path / "a_script.py").write_text(
        "import torch, torch.distributed as dist\nx = "
        "torch.ones(1)\ndist.all_reduce(x)\nimport a_part\ny = a_part.x + x\n"
    )
    (tmp_path / "a_part.py").write_text(
        "import a_script, torch.distributed as dist\ndist.barrier()\nx = a_script.x * "
        "dist.get_rank()\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))

    def program(rank):
        import a_script

        return a_script.y.item()

    assert run(program, 3).results == [3.0, 6.0, 9.0]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_a_child_that_a_rank_forks_is_a_process_of_its_own():
    def program():
        pid = os.fork()  # as a DataLoader's worker is started
        if pid == 0:
            os._exit(7)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    assert p101.launch(program, world_size=2, backend="sim", timeout=20).results == [7, 7]
