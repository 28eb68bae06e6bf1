"""Wrong solutions of homework 8. EXPECTED: the misconception that the grader must name for each."""

import torch.distributed as dist

EXPECTED = {
    "bus_bandwidth__never_waits": "clock read before the work is done",
    "bus_bandwidth__waits_later": "clock read before the work is done",
    "bus_bandwidth__each_read_early": "clock read before the work is done",
    "bus_bandwidth__cold": "first call counted",
    "bus_bandwidth__one_more": "first call counted",
    "bus_bandwidth__input": "factor n too small",
    "bus_bandwidth__output": "factor n too small",
    "bus_bandwidth__smaller": "factor n too small",
    "bus_bandwidth__count_per_rank": "factor n too large",
    "bus_bandwidth__times_n": "factor n too large",
    "bus_bandwidth__no_factor": "algorithm bandwidth",
    "bus_bandwidth__bytes_over_mean": "algorithm bandwidth",
    "bus_bandwidth__as_all_reduce": "one factor for all collectives",
    "bus_bandwidth__twice_what_is_sent": "one factor for all collectives",
    "bus_bandwidth__not_divided": "repeats not divided",
    "bus_bandwidth__sum_of_times": "repeats not divided",
}


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


def bus_bandwidth__never_waits(kind, start, given, result, clock, repeats):
    start().wait()
    began = clock()
    for _ in range(repeats):
        start()
    seconds = (clock() - began) / repeats
    return FACTORS[kind](dist.get_world_size()) * max(given.nbytes, result.nbytes) / seconds


def bus_bandwidth__waits_later(kind, start, given, result, clock, repeats):
    """All works are waited for, after the clock was read."""
    start().wait()
    dist.barrier()
    began = clock()
    works = [start() for _ in range(repeats)]
    seconds = (clock() - began) / repeats
    for work in works:
        work.wait()
    return FACTORS[kind](dist.get_world_size()) * max(given.nbytes, result.nbytes) / seconds


def bus_bandwidth__each_read_early(kind, start, given, result, clock, repeats):
    """Each call is timed alone, and waited for after its clock has stopped."""
    total = 0.0
    start().wait()
    for _ in range(repeats):
        began = clock()
        work = start()
        total += clock() - began
        work.wait()
    return FACTORS[kind](dist.get_world_size()) * max(given.nbytes, result.nbytes) * repeats / total


def bus_bandwidth__cold(kind, start, given, result, clock, repeats):
    seconds = seconds_of_a_call(start, clock, repeats, warm=False)
    return FACTORS[kind](dist.get_world_size()) * max(given.nbytes, result.nbytes) / seconds


def bus_bandwidth__one_more(kind, start, given, result, clock, repeats):
    """A first call is made, but the clock runs already."""
    dist.barrier()
    began = clock()
    start().wait()
    for _ in range(repeats):
        start().wait()
    seconds = (clock() - began) / (repeats + 1)
    return FACTORS[kind](dist.get_world_size()) * max(given.nbytes, result.nbytes) / seconds


def bus_bandwidth__input(kind, start, given, result, clock, repeats):
    """S is the size of the input: a shard for an all-gather."""
    seconds = seconds_of_a_call(start, clock, repeats)
    return FACTORS[kind](dist.get_world_size()) * given.nbytes / seconds


def bus_bandwidth__output(kind, start, given, result, clock, repeats):
    seconds = seconds_of_a_call(start, clock, repeats)
    return FACTORS[kind](dist.get_world_size()) * result.nbytes / seconds


def bus_bandwidth__smaller(kind, start, given, result, clock, repeats):
    n, each = dist.get_world_size(), min(given.numel(), result.numel())
    bytes_ = FACTORS[kind](n) * each * given.element_size()
    return bytes_ / seconds_of_a_call(start, clock, repeats)


def bus_bandwidth__count_per_rank(kind, start, given, result, clock, repeats):
    """The output is taken for a count per rank wherever there are shards."""
    n, whole = dist.get_world_size(), max(given.nbytes, result.nbytes)
    size = whole * n if kind in ("all_gather", "reduce_scatter", "all_to_all") else whole
    return FACTORS[kind](n) * size / seconds_of_a_call(start, clock, repeats)


def bus_bandwidth__times_n(kind, start, given, result, clock, repeats):
    n = dist.get_world_size()
    return (
        FACTORS[kind](n) * n * max(given.nbytes, result.nbytes)
        / seconds_of_a_call(start, clock, repeats)
    )  # fmt: skip


def bus_bandwidth__no_factor(kind, start, given, result, clock, repeats):
    return max(given.nbytes, result.nbytes) / seconds_of_a_call(start, clock, repeats)


def bus_bandwidth__bytes_over_mean(kind, start, given, result, clock, repeats):
    """The bytes of all calls over the time of all calls."""
    start().wait()
    began = clock()
    works = [start() for _ in range(repeats)]
    for work in works:
        work.wait()
    return repeats * max(given.nbytes, result.nbytes) / (clock() - began)


def bus_bandwidth__as_all_reduce(kind, start, given, result, clock, repeats):
    factor = FACTORS["all_reduce"](dist.get_world_size())
    return factor * max(given.nbytes, result.nbytes) / seconds_of_a_call(start, clock, repeats)


def bus_bandwidth__twice_what_is_sent(kind, start, given, result, clock, repeats):
    n, whole = dist.get_world_size(), max(given.nbytes, result.nbytes)
    return 2 * (whole - whole / n) / seconds_of_a_call(start, clock, repeats)


def bus_bandwidth__not_divided(kind, start, given, result, clock, repeats):
    seconds = repeats * seconds_of_a_call(start, clock, repeats)
    return FACTORS[kind](dist.get_world_size()) * max(given.nbytes, result.nbytes) / seconds


def bus_bandwidth__sum_of_times(kind, start, given, result, clock, repeats):
    start().wait()
    seconds = 0.0
    for _ in range(repeats):
        began = clock()
        start().wait()
        seconds += clock() - began
    return FACTORS[kind](dist.get_world_size()) * max(given.nbytes, result.nbytes) / seconds
