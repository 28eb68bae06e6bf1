"""Under torchrun this process is a rank already: `launch` joins the job it belongs to.
"""
import os


def in_a_job(): return "RANK" in os.environ and "WORLD_SIZE" in os.environ and "PARALLEL101_RANK" not in os.environ
def join(*a, **k): raise NotImplementedError
