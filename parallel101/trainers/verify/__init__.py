"""Before its first step a trainer compares itself with one process: equal, or refused.

first_step.py    when it is made                          compare.py       the comparison, on all ranks
rounding.py      how much may differ                      one_process.py   what one process makes of the same samples
report.py        its table, and NotEqualError             causes.py        why they differ, in words
no_trace.py      all is put back afterwards               perturb.py       the weights of the second comparison
"""
