"""Parts of a trainer besides its step: arguments, optimizer, fit and history, checkpoints, and the
report of memory.
"""
