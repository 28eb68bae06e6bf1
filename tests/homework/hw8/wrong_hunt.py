"""Wrong solutions of homework 8. EXPECTED: the misconception that the grader must name for each."""

EXPECTED = {
    "find_hang__constant": "same answer for every run",
    "find_hang__example": "same answer for every run",
    "find_hang__stuck_in_a_receive": "victim named",
    "find_hang__first_that_waits": "victim named",
    "find_hang__where_it_is_now": "line of the wait",
    "find_hang__where_most_wait": "line of the wait",
    "find_hang__always_missing": "one cause for every run",
    "find_hang__always_peer": "one cause for every run",
    "find_slow__constant": "same answer for every run",
    "find_slow__example": "same answer for every run",
    "find_slow__slowest_step": "slow once",
    "find_slow__any_step": "slow once",
    "find_slow__waits_most": "victim named",
    "find_slow__longest_all_reduce": "victim named",
    "find_slow__longest_call": "waiting taken for work",
    "find_slow__longest_receive": "waiting taken for work",
    "find_slow__always_compute": "one cause for every run",
    "find_slow__always_late": "one cause for every run",
    "find_wrong__constant": "same answer for every run",
    "find_wrong__example": "same answer for every run",
    "find_wrong__with_rank_zero": "rank 0 taken for right",
    "find_wrong__with_the_one_before": "rank 0 taken for right",
    "find_wrong__first_difference": "compares what may differ",
    "find_wrong__most_differences": "compares what may differ",
    "find_wrong__last": "later difference",
    "find_wrong__weights_only": "later difference",
    "find_wrong__always_own": "one cause for every run",
    "find_wrong__always_stale": "one cause for every run",
}


# ---- 24b to 24d ----


def find_hang__constant(record):
    return 1, 24, "missing call"


def find_hang__example(record):
    """The answer to the example, whatever the record is."""
    causes = ["missing call", "different order", "wrong peer"]
    return 3, 40, causes[len(record) % 3]


def odd_one(record):
    """The right rank, the k-th calls of all ranks, and k."""
    n = len(record)

    def what(rank, k):
        row = record[rank][k]
        return row["line"], row["group"], row["peer"] is None or (row["peer"] - rank) % n

    for k in range(max(map(len, record))):
        found = {rank: what(rank, k) for rank in range(n) if k < len(record[rank])}
        usual = max(found.values(), key=list(found.values()).count)
        for rank in range(n):
            if rank not in found and record[rank][-1]["end"] is not None:
                return rank, None, usual, k
            if rank in found and found[rank] != usual:
                return rank, found[rank], usual, k
    raise AssertionError("no fault found")


def right_hang(record):
    rank, found, usual, _ = odd_one(record)
    if found is None or found[0] != usual[0]:
        return rank, usual[0], "missing call"
    return rank, found[0], "wrong peer" if found[1] == usual[1] else "different order"


def find_hang__stuck_in_a_receive(record):
    """The rank that has got least far, and where it waits."""
    _, _, cause = right_hang(record)
    least = min(range(len(record)), key=lambda rank: len(record[rank]))
    rank = next(
        (r for r, own in enumerate(record) if own[-1]["end"] is None and own[-1]["call"] == "recv"),
        least,
    )
    return rank, record[rank][-1]["line"], cause


def find_hang__first_that_waits(record):
    """The first rank that has not ended a call, with the line of that call."""
    culprit = right_hang(record)
    for rank, own in enumerate(record):
        if own[-1]["end"] is None and rank != culprit[0]:
            return rank, own[-1]["line"], culprit[2]


def find_hang__where_it_is_now(record):
    """The culprit's last call."""
    rank, _, cause = right_hang(record)
    return rank, record[rank][-1]["line"], cause


def find_hang__where_most_wait(record):
    """The line at which most ranks wait."""
    rank, _, cause = right_hang(record)
    waiting = [own[-1]["line"] for own in record if own[-1]["end"] is None]
    return rank, max(waiting, key=waiting.count), cause


def find_hang__always_missing(record):
    return *right_hang(record)[:2], "missing call"


def find_hang__always_peer(record):
    rank, line, _ = right_hang(record)
    return rank, line, "wrong peer"


def find_slow__constant(record):
    return 2, 40, "slow compute"


def find_slow__example(record):
    return 0, 31, ["late send", "large message"][len(record) % 2]


def seconds(row):
    return row["end"] - row["posted"]


def right_slow(record):
    for name, value, cause in (
        ("load", seconds, "slow compute"),
        ("forward", seconds, "slow compute"),
        ("send", lambda row: row["nbytes"], "large message"),
    ):
        totals = [sum(value(row) for row in own if row["call"] == name) for own in record]
        rank = totals.index(max(totals))
        if totals[rank] > 1.5 * sorted(totals)[len(totals) // 2]:
            return rank, line_of(record[rank], name), cause
    for rank, own in enumerate(record):
        if line_number(own, "recv") < line_number(own, "send"):
            return rank, line_of(own, "send"), "late send"
    raise AssertionError("no fault found")


def line_number(own, name):
    return [row["call"] for row in own].index(name)


def line_of(own, name):
    return own[line_number(own, name)]["line"]


def find_slow__slowest_step(record):
    """The longest single span of all."""
    _, _, cause = right_slow(record)
    _, rank, line = max(
        (seconds(row) / (2 if row["call"] == "forward" else 1), rank, row["line"])
        for rank, own in enumerate(record)
        for row in own
        if row["call"] in ("load", "forward")
    )
    return rank, line, cause


def find_slow__any_step(record):
    """The first rank that takes 1.5 times as long as usual, once."""
    right = right_slow(record)
    for name in ("load", "forward"):
        times = [[seconds(row) for row in own if row["call"] == name] for own in record]
        usual = sorted(t for own in times for t in own)[len(times) * len(times[0]) // 2]
        for rank, own in enumerate(times):
            if max(own) > 1.5 * usual and rank != right[0]:
                return rank, line_of(record[rank], name), right[2]
    return right


def find_slow__waits_most(record):
    """The rank with the most time in calls."""
    _, line, cause = right_slow(record)
    times = [sum(seconds(row) for row in own if is_call(row)) for own in record]
    return times.index(max(times)), line, cause


def find_slow__longest_all_reduce(record):
    """The rank whose all-reduces take longest."""
    _, line, cause = right_slow(record)
    times = [sum(seconds(row) for row in own if row["call"] == "all_reduce") for own in record]
    return times.index(max(times)), line, cause


def is_call(row):
    return row["call"] not in ("load", "forward")


def find_slow__longest_call(record):
    """Of the right rank, the longest call."""
    rank, _, cause = right_slow(record)
    return rank, max((row for row in record[rank] if is_call(row)), key=seconds)["line"], cause


def find_slow__longest_receive(record):
    rank, _, cause = right_slow(record)
    return rank, line_of(record[rank], "recv"), cause


def find_slow__always_compute(record):
    return *right_slow(record)[:2], "slow compute"


def find_slow__always_late(record):
    rank, line, _ = right_slow(record)
    return rank, line, "late send"


def find_wrong__constant(record):
    return 0, 48, "not summed"


def find_wrong__example(record):
    return 1, 50, ["not summed", "divided twice"][len(record) % 2]


def right_wrong(record):
    for k, rows in enumerate(zip(*record)):
        values = [tuple(row["value"]) for row in rows]
        usual = max(values, key=values.count)
        if values.count(usual) == 1:
            continue
        for rank, value in enumerate(values):
            if value != usual:
                return rank, rows[rank]["line"], cause_of(record, rank, k, usual)
    raise AssertionError("no fault found")


def cause_of(record, rank, k, usual):
    row = record[rank][k]
    if row["name"] == "weights":
        return "skipped update"
    if row["value"] == record[rank][k - 1]["value"]:
        return "not summed"
    return "stale gradient" if row["value"] == record[rank][k - 3]["value"] else "divided twice"


def find_wrong__with_rank_zero(record):
    """The first rank that differs from rank 0."""
    _, _, cause = right_wrong(record)
    for rows in zip(*record):
        for rank, row in enumerate(rows):
            if row["name"] != "local gradient" and row["value"] != rows[0]["value"]:
                return rank, row["line"], cause


def find_wrong__with_the_one_before(record):
    """The first rank that differs from the rank before it."""
    _, line, cause = right_wrong(record)
    for rows in zip(*record):
        for rank in range(1, len(rows)):
            if rows[rank]["name"] == "local gradient":
                continue
            if rows[rank]["value"] != rows[rank - 1]["value"]:
                return rank, line, cause


def find_wrong__first_difference(record):
    """The first value that differs at all."""
    _, _, cause = right_wrong(record)
    for rows in zip(*record):
        for rank, row in enumerate(rows):
            if row["value"] != rows[0]["value"]:
                return rank, row["line"], cause


def find_wrong__most_differences(record):
    """The line where the ranks differ most often."""
    rank, _, cause = right_wrong(record)
    lines = [
        rows[0]["line"]
        for rows in zip(*record)
        if any(r["value"] != rows[0]["value"] for r in rows)
    ]
    return rank, max(lines, key=lines.count), cause


def find_wrong__last(record):
    """The last difference that the culprit shows."""
    rank, _, cause = right_wrong(record)
    other = (rank + 1) % len(record)
    for mine, theirs in reversed(list(zip(record[rank], record[other]))):
        if mine["name"] != "local gradient" and mine["value"] != theirs["value"]:
            return rank, mine["line"], cause


def find_wrong__weights_only(record):
    """Looks at the weights, where everything ends up."""
    rank, _, cause = right_wrong(record)
    return rank, next(row["line"] for row in record[rank] if row["name"] == "weights"), cause


def find_wrong__always_own(record):
    return *right_wrong(record)[:2], "not summed"


def find_wrong__always_stale(record):
    rank, line, _ = right_wrong(record)
    return rank, line, "stale gradient"
