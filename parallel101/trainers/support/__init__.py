"""What a trainer needs besides its step: arguments, optimizer, fit and history, checkpoints,
and who holds what.
"""
