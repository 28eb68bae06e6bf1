"""Before its first step a trainer compares itself with one process: equal, or refused.

verification.py  when                        compare.py         three steps, on all ranks
one_process.py   the same in one process     snapshot.py        all is put back
halves.py        is it a mean over samples?  deterministic.py   without random numbers
report.py        the table, NotEqualError
"""
