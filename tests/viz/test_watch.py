"""`watch` on functions that use torch.distributed directly, on the sim backend and on gloo."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from parallel101.laboratory.viz.watch import watch


def ring(x: torch.Tensor, again: bool = False) -> torch.Tensor:
    """A learner's ring all-reduce; with `again` it adds one chunk twice."""
    n, r = dist.get_world_size(), dist.get_rank()
    chunks = list(x.clone().tensor_split(n))
    for step in range(n - 1):
        mine, other = (r - step) % n, (r - step - 1) % n
        got = torch.empty_like(chunks[other])
        work = dist.isend(chunks[mine], (r + 1) % n)
        dist.recv(got, (r - 1) % n)
        work.wait()
        chunks[other] = chunks[other] + got * (2 if again and (r, step) == (1, 0) else 1)
    for step in range(n - 1):
        mine, other = (r + 1 - step) % n, (r - step) % n
        work = dist.isend(chunks[mine], (r + 1) % n)
        dist.recv(chunks[other], (r - 1) % n)
        work.wait()
    return torch.cat(chunks)


@pytest.mark.parametrize("backend", ["gloo", "sim"])
def test_a_learners_function(backend):
    run = watch(ring, 3, backend=backend)
    scene = run.animate()
    assert scene.title == "Ring all-reduce" and len(scene.stops) == 4
    assert scene.stops[-1].label.endswith(
        "Every rank ends with all 3 chunks, with the data of all 3 ranks in it once."
    )
    assert run.animate("My ring").title == "My ring"
    assert "receive" in run.timeline().svg()


def test_a_learners_mistake():
    scene = watch(lambda x: ring(x, again=True), 4, backend="sim").animate()
    assert scene.stops[-1].label.endswith("On every rank, chunk a has rank 0's data twice.")


@pytest.mark.parametrize(("n", "numel"), [(2, 1), (3, 2), (5, 11), (1, 4)])
def test_any_size(n, numel):
    run = watch(ring, n, numel=numel, backend="sim")
    assert all(result.numel() == numel for result in run.results)
    run.animate().svg()


def test_shape_and_dtype():
    run = watch(
        lambda x: x.double().sum() * 0 + torch.tensor(x.shape),
        2,
        shape=(2, 3),
        dtype=torch.float64,
        backend="sim",
    )
    assert [result.tolist() for result in run.results] == [[2, 3], [2, 3]]
    with pytest.raises(ValueError, match=r"shape=.* has 6 elements, but numel=5"):
        watch(ring, 2, shape=(2, 3), numel=5)
    with pytest.raises(ValueError, match="do not fit"):
        watch(ring, 16, numel=1000)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (
            {"dtype": torch.float32},
            r"dtype=torch\.float32: values that encode their origin need torch\.int64",
        ),
        ({"world_size": "4"}, "world_size='4': expected a whole number of ranks"),
        ({"world_size": 0}, "world_size=0"),
        ({"world_size": 19}, "do not fit into torch.int64, which can hold 0: take fewer ranks"),
        ({"shape": 4}, "shape=4: expected a whole number for each dim, such as"),
        ({"shape": (2, 2.5)}, r"shape=\(2, 2\.5\): expected a whole number"),
        ({"shape": [-1]}, r"shape=\[-1\]: expected"),
        ({"shape": "ab"}, "shape='ab': expected"),
    ],
)
def test_wrong_arguments_are_refused_before_any_rank_starts(wrong, message):
    with pytest.raises(ValueError, match=message):
        watch(ring, **wrong)


def test_only_a_function_can_be_watched():
    with pytest.raises(
        TypeError,
        match=r"watch\(\) takes a function of a tensor, to run on each rank; got a int: 3",
    ):
        watch(3)


def test_18_ranks_fit_into_an_int64():
    assert len(watch(ring, 18, numel=1, backend="sim").results) == 18


def test_a_function_that_returns_nothing():
    def silent(x):
        ring(x)

    assert watch(silent, 2, backend="sim").animate().title == "All-reduce on two ranks"
