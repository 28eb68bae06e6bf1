"""ZeRO: flat arrays cut into a block a rank, stages 1 and 2, and stage 3.

Each stage is a GradientSync (see trainers/gradients.py).
"""
