"""A network written as text is the one that Python would make, and a mistake in it is named
with what was expected.
"""

import pytest

from parallel101.laboratory.sim.network import Network
from parallel101.laboratory.sim.network_text import parse_network

GOOD = {
    "latency=1e-6,bandwidth=1e9": Network(1e-6, 1e9),
    "bandwidth=inf, eager=4096": Network(bandwidth=float("inf"), eager=4096),
    "ring": Network.ring(),
    "torus=4x2,bidirectional=no": Network.torus((4, 2), bidirectional=False),
    "ring,wraparound=no": Network.ring(wraparound=False),
    "torus=2x2,latency_overlaps=yes": Network.torus((2, 2), latency_overlaps=True),
    "two_level=8,inside_bandwidth=1e12": Network.two_level(8, inside_bandwidth=1e12),
    "two_level=8,rails=4,bandwidth=400e9": Network.two_level(8, rails=4, bandwidth=400e9),
}
BAD = {
    "fast": (
        "has 'fast', which is neither a topology in front nor name=value; expected, for "
        "example, latency=1e-6"
    ),
    "speed=1": "has no 'speed'; a switch takes latency, bandwidth, eager",
    "latency=quick": "has latency=quick; expected a number, such as latency=1e-6",
    "latency=-1": "latency must be a finite number of seconds, 0 or more; got -1.0",
    "ring=4": "ring needs no value",
    "torus": "torus needs a value: whole numbers, as in torus=4x4",
    "torus=4xa": "has torus=4xa; expected whole numbers, as in torus=4x4",
    "two_level=2x2": "expected the number of ranks on a node",
    "ring,bidirectional=maybe": "expected yes or no",
    "ring,wraparound=0": "has wraparound=0; expected yes or no",
    "two_level=8,rails=2.5": "has rails=2.5; expected a number, such as rails=8",
    "two_level=2,rails=4": "rails must be an int from 1 to 2",
    "ring,rails=8": "has no 'rails'; a ring takes bidirectional, wraparound, latency",
    "latency=1,ring": "has 'ring', which is neither a topology in front nor name=value",
}


@pytest.mark.parametrize("text", GOOD)
def test_text_gives_the_network(text):
    assert parse_network(text) == GOOD[text]


@pytest.mark.parametrize("text", BAD)
def test_a_mistake_is_named(text):
    with pytest.raises(ValueError) as error:
        parse_network(text)
    assert BAD[text] in str(error.value)
