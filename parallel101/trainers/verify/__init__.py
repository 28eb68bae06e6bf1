"""Before its first step a trainer compares itself with one process: equal, or refused.

first_step.py    when                        compare.py       the comparison, on all ranks
rounding.py      how much may differ         one_process.py   one process, the same samples
report.py        the table, NotEqualError    causes.py        why they differ, in words
no_trace.py      all is put back             perturb.py       the weights of the second time
"""
