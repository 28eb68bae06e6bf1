"""The layers of tensor parallelism against the whole model: losses, gradients of inputs and weights, messages, overlap."""

from __future__ import annotations

import pytest

import parallel101 as p101
from tests.trainers.tensor_cases import CASES, IN_TIME, cut, differences

SEQUENCE = {False: CASES, True: IN_TIME}


def all_cases(sequence_parallel):
    return {name: cut(case, sequence_parallel) for name, case in SEQUENCE[sequence_parallel].items()}


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["", "sequence parallel"])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 6])
def test_loss_and_gradients_are_the_whole_models(world_size, sequence_parallel):
    results = p101.launch(all_cases, sequence_parallel, world_size=world_size, backend="sim").results
    for name, case in SEQUENCE[sequence_parallel].items():
        assert differences(case, [result[name] for result in results]) == [], name
