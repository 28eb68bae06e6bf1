"""Predicted cost: steps, bytes and time, in closed form. Nothing here runs or measures a program."""
