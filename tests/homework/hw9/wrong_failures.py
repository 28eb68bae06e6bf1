"""Wrong solutions of homework 9. EXPECTED: the misconception that the grader must name for each."""

import math

EXPECTED = {
    "checkpoint_interval__one_gpu": "failures of one GPU",
    "checkpoint_interval__one_gpu_in_both": "failures of one GPU",
    "checkpoint_interval__in_hours": "hours taken for seconds",
    "checkpoint_interval__no_two": None,
    "checkpoint_interval__whole_interval": "whole interval lost",
    "checkpoint_interval__whole_in_lost": "whole interval lost",
    "checkpoint_interval__between_failures": "as many failures as writes",
    "checkpoint_interval__no_restart": "restart forgotten",
    "checkpoint_interval__balance_only": "restart forgotten",
    "checkpoint_interval__failures_only": "half of the loss forgotten",
    "checkpoint_interval__nothing_again": "half of the loss forgotten",
    "checkpoint_interval__an_hour": None,
    "checkpoint_interval__zeros": None,
    "stragglers__constants": None,
    "stragglers__added": "probabilities added",
    "stragglers__added_at_most_one": "probabilities added",
    "stragglers__all_at_once": "all GPUs slow at once",
    "stragglers__one": "one GPU's probability",
    "stragglers__none": "no GPU slow",
    "stragglers__on_top": "time added on top",
    "stragglers__mean_gpu": "mean of the GPUs",
    "stragglers__slow_steps": "only the slow steps",
    "stragglers__always_slow": "only the slow steps",
}
POINTS = {
    "checkpoint_interval__an_hour": 2.0,
    "checkpoint_interval__zeros": 0.0,
    "stragglers__constants": 0.0,
    "stragglers__mean_gpu": 1.0,
}


# ---- 25d ----


def lost_share(interval, between, write, restart):
    return write / interval + (interval / 2 + restart) / between


def checkpoint_interval__one_gpu(gpus, hours_between_failures, write, restart):
    interval = math.sqrt(2 * write * hours_between_failures * 3600)
    between = hours_between_failures * 3600 / gpus
    return {"interval": interval, "lost": lost_share(interval, between, write, restart)}


def checkpoint_interval__one_gpu_in_both(gpus, hours_between_failures, write, restart):
    between = hours_between_failures * 3600
    interval = math.sqrt(2 * write * between)
    return {"interval": interval, "lost": lost_share(interval, between, write, restart)}


def checkpoint_interval__in_hours(gpus, hours_between_failures, write, restart):
    between = hours_between_failures / gpus
    interval = math.sqrt(2 * write * between)
    return {"interval": interval, "lost": lost_share(interval, between, write, restart)}


def checkpoint_interval__no_two(gpus, hours_between_failures, write, restart):
    between = hours_between_failures * 3600 / gpus
    interval = math.sqrt(write * between)
    return {"interval": interval, "lost": lost_share(interval, between, write, restart)}


def checkpoint_interval__whole_interval(gpus, hours_between_failures, write, restart):
    between = hours_between_failures * 3600 / gpus
    interval = math.sqrt(write * between)
    return {"interval": interval, "lost": write / interval + (interval + restart) / between}


def checkpoint_interval__whole_in_lost(gpus, hours_between_failures, write, restart):
    between = hours_between_failures * 3600 / gpus
    interval = math.sqrt(2 * write * between)
    return {"interval": interval, "lost": write / interval + (interval + restart) / between}


def checkpoint_interval__between_failures(gpus, hours_between_failures, write, restart):
    """One checkpoint for each failure."""
    between = hours_between_failures * 3600 / gpus
    return {"interval": between, "lost": lost_share(between, between, write, restart)}


def checkpoint_interval__no_restart(gpus, hours_between_failures, write, restart):
    between = hours_between_failures * 3600 / gpus
    interval = math.sqrt(2 * write * between)
    return {"interval": interval, "lost": lost_share(interval, between, write, 0)}


def checkpoint_interval__balance_only(gpus, hours_between_failures, write, restart):
    """Both terms are equal at the minimum, and the restart doesn't move it."""
    between = hours_between_failures * 3600 / gpus
    return {"interval": (2 * write * between) ** 0.5, "lost": (2 * write / between) ** 0.5}


def checkpoint_interval__failures_only(gpus, hours_between_failures, write, restart):
    between = hours_between_failures * 3600 / gpus
    interval = math.sqrt(2 * write * between)
    return {"interval": interval, "lost": (interval / 2 + restart) / between}


def checkpoint_interval__nothing_again(gpus, hours_between_failures, write, restart):
    between = hours_between_failures * 3600 / gpus
    interval = math.sqrt(2 * write * between)
    return {"interval": interval, "lost": write / interval + restart / between}


def checkpoint_interval__an_hour(gpus, hours_between_failures, write, restart):
    """The same interval for every run, and what it really loses."""
    between = hours_between_failures * 3600 / gpus
    return {"interval": 3600.0, "lost": lost_share(3600.0, between, write, restart)}


# ---- 25e ----


def stragglers__constants(gpus, q, slowdown):
    return {"slow": 0.0, "step": 1.0}


def checkpoint_interval__zeros(gpus, hours_between_failures, write, restart):
    return {"interval": 0.0, "lost": 0.0}


def stragglers__added(gpus, q, slowdown):
    return {"slow": gpus * q, "step": 1 + gpus * q * (slowdown - 1)}


def stragglers__added_at_most_one(gpus, q, slowdown):
    slow = min(1.0, sum(q for _ in range(gpus)))
    return {"slow": slow, "step": slow * slowdown + 1 - slow}


def stragglers__all_at_once(gpus, q, slowdown):
    return {"slow": q**gpus, "step": 1 + q**gpus * (slowdown - 1)}


def stragglers__one(gpus, q, slowdown):
    return {"slow": q, "step": 1 + q * (slowdown - 1)}


def stragglers__none(gpus, q, slowdown):
    fast = (1 - q) ** gpus
    return {"slow": fast, "step": 1 + fast * (slowdown - 1)}


def stragglers__on_top(gpus, q, slowdown):
    slow = 1 - (1 - q) ** gpus
    return {"slow": slow, "step": 1 + slow * slowdown}


def stragglers__mean_gpu(gpus, q, slowdown):
    return {"slow": 1 - (1 - q) ** gpus, "step": (1 - q) + q * slowdown}


def stragglers__slow_steps(gpus, q, slowdown):
    slow = 1 - (1 - q) ** gpus
    return {"slow": slow, "step": slow * slowdown}


def stragglers__always_slow(gpus, q, slowdown):
    return {"slow": 1 - (1 - q) ** gpus, "step": slowdown}
