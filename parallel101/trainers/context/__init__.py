"""What context_parallel.py needs: which rank has which part of the time, and the checks of a call.

Beside it is Ulysses, which divides the heads instead (ulysses.py).
"""
