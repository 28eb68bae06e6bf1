"""Before its first step a trainer compares itself with one process: equal, or refused.

verification.py  when, and a loss's mean     compare.py         the same training on both sides
one_process.py   a trainer on one rank       tolerance.py       what is rounding
snapshot.py      all is put back             report.py          the table, NotEqualError
                                             deterministic.py   without random numbers
"""
