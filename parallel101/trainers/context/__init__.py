"""Parts of context_parallel.py: each rank's part of the time, and the checks of a call.

Beside it is Ulysses, which divides the heads instead (ulysses.py).
"""
