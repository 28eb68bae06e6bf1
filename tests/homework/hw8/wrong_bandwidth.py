"""Wrong solutions of homework 8. A comment above each says what must be named."""

import torch.distributed as dist

# ---- 24a ----

FACTORS = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "broadcast": lambda n: 1,
    "reduce": lambda n: 1,
    "all_gather": lambda n: (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "all_to_all": lambda n: (n - 1) / n,
}


def seconds_of_a_call(start, clock, repeats, warm=True):
    if warm:
        start().wait()
    began = clock()
    for _ in range(repeats):
        start().wait()
    return (clock() - began) / repeats


# named: clock read before the work is done
def bus_bandwidth__never_waits(kind, start, given, result, clock, repeats):
    start().wait()
    began = clock()
    for _ in range(repeats):
        start()
    seconds = (clock() - began) / repeats
    return FACTORS[kind](dist.get_world_size()) * max(given.nbytes, result.nbytes) / seconds


# named: first call counted
def bus_bandwidth__cold(kind, start, given, result, clock, repeats):
    seconds = seconds_of_a_call(start, clock, repeats, warm=False)
    return FACTORS[kind](dist.get_world_size()) * max(given.nbytes, result.nbytes) / seconds


# named: factor n too small
def bus_bandwidth__input(kind, start, given, result, clock, repeats):
    """S is the size of the input: a shard for an all-gather."""
    seconds = seconds_of_a_call(start, clock, repeats)
    return FACTORS[kind](dist.get_world_size()) * given.nbytes / seconds


# named: factor n too large
def bus_bandwidth__times_n(kind, start, given, result, clock, repeats):
    n = dist.get_world_size()
    return (
        FACTORS[kind](n) * n * max(given.nbytes, result.nbytes)
        / seconds_of_a_call(start, clock, repeats)
    )  # fmt: skip


# named: algorithm bandwidth
def bus_bandwidth__no_factor(kind, start, given, result, clock, repeats):
    return max(given.nbytes, result.nbytes) / seconds_of_a_call(start, clock, repeats)


# named: one factor for all collectives
def bus_bandwidth__as_all_reduce(kind, start, given, result, clock, repeats):
    factor = FACTORS["all_reduce"](dist.get_world_size())
    return factor * max(given.nbytes, result.nbytes) / seconds_of_a_call(start, clock, repeats)


# named: repeats not divided
def bus_bandwidth__not_divided(kind, start, given, result, clock, repeats):
    seconds = repeats * seconds_of_a_call(start, clock, repeats)
    return FACTORS[kind](dist.get_world_size()) * max(given.nbytes, result.nbytes) / seconds
