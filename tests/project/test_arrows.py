"""Imports point down only, as CONTRIBUTING's table of rooms says: the subject knows nothing of
the laboratory, but for the doors listed here. There are no cycles.
"""

from __future__ import annotations

import ast
import sys
from collections import Counter
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import NamedTuple

import pytest

PACKAGE = Path(__file__).parents[2] / "parallel101"
LABORATORY = PACKAGE / "laboratory"
SUBJECT = ("mesh", "collectives", "autograd", "layers", "sharding", "models", "cost", "trainers")
# spans and extras are one module each: the names of what a program does, and what to install
SUBJECT += ("keras", "spans", "extras")

# room, or a module that differs from its room → the rooms (or the module) that it may import
# besides its room
MAY_IMPORT = {
    "mesh": set(),
    "collectives": {"mesh"},
    "autograd": {"collectives", "mesh"},
    "layers": {"autograd", "collectives", "mesh"},
    "models": set(),
    "cost": {"collectives"},
    "sharding": {"autograd", "cost", "mesh"},
    "trainers": {"autograd", "collectives", "mesh"},
    "keras": {"trainers", "autograd", "collectives", "mesh"},
    "record": set(),
    "sim": {"record"},
    "sim.virtual_gpu": {"record", "cost"},
    "sim.operation_costs": {"cost"},
    "sim.torch_collectives": {"cost.closed_forms", "record"},  # a ring's steps and bytes
    "ranks": {"sim", "record"},
    "ranks.launch": {"cost.hardware", "cost.cluster", "sim", "record"},  # the names of GPUs
    "analysis": {"record"},
    "viz": {"analysis", "record"},
    "viz.watch": {"analysis", "ranks", "sim"},  # runs a program, and draws it
    "viz.collective_run": {"collectives", "sim", "record"},  # one collective, and its links
    # the same, at each move of a slider
    "viz.explore.collective_explorer": {"analysis", "record", "autograd", "cost", "ranks", "sim"},
    "viz.node_links": {"cost", "record"},  # draws the figures of hardware.py
    "grade": {"record", "ranks", "sim"},
    "exercises": {"grade", "record", "sim"},
    "exercises.layout_choice": {"cost", "grade"},  # what a learner's layout costs
    "publish": {"viz", "analysis", "record"},
    "publish.tools.schedule_builder_page": {"trainers"},
    "publish.tools.memory_page": {"cost", "planner", "record"},
    "publish.tools.in_notebook": {"cost", "planner", "trainers"},  # settings of their tables
    # runs all collectives, and draws them
    "publish.tools.recorded_collectives": {"collectives", "sim", "viz", "analysis", "record"},
    # it plans in closed form, runs the best layouts, and draws them
    "planner": {"cost", "models", "trainers", "ranks", "sim", "viz", "record"},
    "doctor": {"viz"},  # whether there is a browser
    "run_command": {"ranks", "record"},
}
# import nothing of ours, and every room may import them
EVERYWHERE = {"extras", "spans", "option_types"}
FRONT_DOOR = {"__init__", "__main__", "cli"}
FREE = {*FRONT_DOOR, "bench"}  # may import anything; bench measures all rooms from outside

DOORS = {  # module → what it may import inside a function, when it is called
    # from the subject up to the laboratory:
    "sharding.run": {"ranks", "viz"},  # sharding.run(…) starts ranks, .picture() draws their blocks
    "trainers.schedules.schedule": {"viz"},  # schedule(…).time(…).timeline()
    # in the laboratory, up or round:
    "ranks.launch": {"viz"},  # run.animate(), run.timeline()
    "record.errors": {"viz"},  # a deadlock's picture
    "doctor": {"__init__"},
    "run_command": {"analysis", "publish", "sim", "viz", "__init__"},
    "grade.learner": {"viz"},  # draws a run
    "grade.grades": {"publish"},  # a learner's page
    "exercises.bug_hunt": {"ranks"},  # a hunt runs its program
    "exercises.layout_choice": {"planner"},  # its best layout, which no rank may import
}


def modules():
    """Name below its floor → file; a package has the name of its folder."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)
        found[name.removeprefix("laboratory.")] = path
    return found


MODULES = modules()


def room(module):
    return module.partition(".")[0]


def below(module):
    """The name below its floor of a module that is imported as parallel101.…"""
    inside = module.removeprefix("parallel101").lstrip(".")
    return inside.removeprefix("laboratory.") or "__init__"


def imported(node):
    """The modules that an import statement names."""
    if isinstance(node, ast.Import):
        return {alias.name for alias in node.names}
    if not isinstance(node, ast.ImportFrom) or not node.module:
        return set()
    return {
        whole if below(whole := f"{node.module}.{a.name}") in MODULES else node.module
        for a in node.names
    }


class Parsed(NamedTuple):
    at_once: set[str]  # of ours, what is imported when the module is, also for annotations only
    when_called: set[str]  # of ours, what is imported when a function is called
    libraries: set[str]
    classes: list[str]


@cache
def parsed(path):
    tree, ours, libraries = ast.parse(path.read_text()), (set(), set()), set()
    functions = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
    called = {n for f in ast.walk(tree) if isinstance(f, functions) for n in ast.walk(f)}
    for node in ast.walk(tree):
        for name in imported(node):
            libraries.add(name.partition(".")[0])
            if name.partition(".")[0] == "parallel101":
                ours[node in called].add(below(name))
    classes = [node.name for node in tree.body if isinstance(node, ast.ClassDef)]
    return Parsed(*ours, libraries, classes)


def test_every_room_is_drawn():
    rooms = {name for name in MAY_IMPORT if "." not in name} | FREE | EVERYWHERE | {"laboratory"}
    assert {room(module) for module in MODULES} == rooms


def test_the_subject_and_the_front_door_are_one_floor_and_the_laboratory_is_the_other():
    above = {room(module) for module, path in MODULES.items() if LABORATORY in path.parents}
    assert {room(module) for module in MODULES} - above == {*SUBJECT} | FRONT_DOOR


def test_arrows_point_down():
    for module in MODULES:
        if room(module) in FREE:
            continue
        at_once, when_called, *_ = parsed(MODULES[module])
        named = MAY_IMPORT.get(module, MAY_IMPORT.get(room(module), set()))
        own = {room(module)} | ({"laboratory"} if LABORATORY in MODULES[module].parents else set())
        allowed = named | EVERYWHERE | own
        doors = allowed | DOORS.get(module, set())
        up = {name for name in at_once if not {name, room(name)} & allowed}
        assert not up, (
            f"{module} imports {', '.join(sorted(up))}; {room(module)} may import "
            f"{', '.join(sorted(allowed))}"
        )
        up = {name for name in when_called if not {name, room(name)} & doors}
        assert not up, (
            f"a function of {module} imports {', '.join(sorted(up))}: a door that is not in DOORS"
        )


def test_every_arrow_and_every_door_is_used():
    for module, allowed in MAY_IMPORT.items():
        own = [path for name, path in MODULES.items() if module in (name, room(name))]
        drawn = set().union(*(parsed(path).at_once for path in own))
        assert allowed <= drawn | {room(name) for name in drawn}, module
    for module, doors in DOORS.items():
        when_called = parsed(MODULES[module]).when_called
        assert doors <= when_called | {room(name) for name in when_called}, module


def test_no_two_modules_need_each_other():
    """There are no cycles of imports, whether at the top, for annotations or inside functions."""
    graph = {
        module: (parsed(path).at_once | parsed(path).when_called) - {module}
        for module, path in MODULES.items()
        if module != "__init__"
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" → ".join(error.args[1]))


def test_the_subject_needs_torch_and_tqdm_only():
    for module in (module for module in MODULES if room(module) in SUBJECT):
        # when plot() is called
        optional = {"matplotlib"} if module == "trainers.training_loop" else set()
        optional |= {"keras"} if room(module) == "keras" else set()
        known = {*sys.stdlib_module_names, "torch", "tqdm", "parallel101"} | optional
        assert parsed(MODULES[module]).libraries <= known, module


def test_a_file_or_class_has_a_name_of_its_own():
    names = [path.name for path in MODULES.values() if path.name != "__init__.py"]
    names += [name for path in MODULES.values() for name in parsed(path).classes]
    assert [name for name, count in Counter(names).items() if count > 1] == []
