"""Wrong solutions of homework 8. A comment above each says what must be named."""


# ---- 24b to 24d ----


# named: same answer for every run
def find_hang__constant(record):
    return 1, 24, "missing call"


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


# named: victim named
def find_hang__stuck_in_a_receive(record):
    """The rank that has got least far, and where it waits."""
    _, _, cause = right_hang(record)
    least = min(range(len(record)), key=lambda rank: len(record[rank]))
    rank = next(
        (r for r, own in enumerate(record) if own[-1]["end"] is None and own[-1]["call"] == "recv"),
        least,
    )
    return rank, record[rank][-1]["line"], cause


# named: line of the wait
def find_hang__where_it_is_now(record):
    """The culprit's last call."""
    rank, _, cause = right_hang(record)
    return rank, record[rank][-1]["line"], cause


# named: one cause for every run
def find_hang__always_missing(record):
    return *right_hang(record)[:2], "missing call"


# named: same answer for every run
def find_slow__constant(record):
    return 2, 40, "slow compute"


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


# named: slow once
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


# named: victim named
def find_slow__waits_most(record):
    """The rank with the most time in calls."""
    _, line, cause = right_slow(record)
    times = [sum(seconds(row) for row in own if is_call(row)) for own in record]
    return times.index(max(times)), line, cause


def is_call(row):
    return row["call"] not in ("load", "forward")


# named: waiting taken for work
def find_slow__longest_call(record):
    """Of the right rank, the longest call."""
    rank, _, cause = right_slow(record)
    return rank, max((row for row in record[rank] if is_call(row)), key=seconds)["line"], cause


# named: one cause for every run
def find_slow__always_compute(record):
    return *right_slow(record)[:2], "slow compute"


# named: same answer for every run
def find_wrong__constant(record):
    return 0, 48, "not summed"


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


# named: rank 0 taken for right
def find_wrong__with_rank_zero(record):
    """The first rank that differs from rank 0."""
    _, _, cause = right_wrong(record)
    for rows in zip(*record):
        for rank, row in enumerate(rows):
            if row["name"] != "local gradient" and row["value"] != rows[0]["value"]:
                return rank, row["line"], cause


# named: compares what may differ
def find_wrong__first_difference(record):
    """The first value that differs at all."""
    _, _, cause = right_wrong(record)
    for rows in zip(*record):
        for rank, row in enumerate(rows):
            if row["value"] != rows[0]["value"]:
                return rank, row["line"], cause


# named: later difference
def find_wrong__last(record):
    """The last difference that the culprit shows."""
    rank, _, cause = right_wrong(record)
    other = (rank + 1) % len(record)
    for mine, theirs in reversed(list(zip(record[rank], record[other]))):
        if mine["name"] != "local gradient" and mine["value"] != theirs["value"]:
            return rank, mine["line"], cause


# named: one cause for every run
def find_wrong__always_own(record):
    return *right_wrong(record)[:2], "not summed"
