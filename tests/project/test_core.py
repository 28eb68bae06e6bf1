"""The core works without the packages of the extras, and whoever needs one is told what to install.

Each program runs in processes in which these packages can't be found, as in an environment that
`pip install parallel101` has made.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib import import_module

import pytest
from packaging.requirements import Requirement

import parallel101
from parallel101.extras import EXTRAS, MissingExtra, missing_packages, needs_extra
from tests.project.test_arrows import MODULES, parsed
from tests.project.test_package import PROJECT, ROOT

# what an extra installs under another name than that of the module
OTHER_NAMES = {"beautifulsoup4": "bs4", "jupyter-client": "jupyter_client", "pyyaml": "yaml"}
# come with a package of the extra
WITH_ANOTHER = {"IPython", "PIL", "markupsafe", "numpy", "websocket"}
EXTRA_PACKAGES = set().union(*EXTRAS.values())
CORE_PACKAGES = {re.split(r"\W", name)[0] for name in PROJECT["dependencies"]}
OURS_OR_THEIRS = {"parallel101"} | CORE_PACKAGES | EXTRA_PACKAGES
# Python imports sitecustomize when it starts: in the ranks and in the fork server, too
WITHOUT_EXTRAS = f"""
from importlib.machinery import PathFinder

def without(name, *more):
    return None if name.partition(".")[0] in {EXTRA_PACKAGES} else find(name, *more)

find, PathFinder.find_spec = PathFinder.find_spec, without
"""
CORE = """
import sys
before = set(sys.modules)
import parallel101 as p101
print(*set(sys.modules) - before)
from parallel101 import cli
from parallel101.laboratory import doctor
assert "torch" not in sys.modules
import textwrap
import torch
import torch.nn.functional as F

def ring():
    return p101.all_reduce(torch.ones(4), algorithm="ring")

def train(trainer):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    trainer = trainer(model, F.mse_loss, lambda p: torch.optim.AdamW(p, lr=1e-2))
    return trainer.fit([(torch.ones(8, 4), torch.zeros(8, 4))] * 2, progress=False).losses

if __name__ == "__main__":
    train(p101.DataParallelTrainer)
    print(*(name for name in sys.modules if name.startswith("parallel101.trainers.")))
    exec(textwrap.dedent(p101.__doc__.partition("\\n")[2]))
    run = p101.launch(ring, world_size=2, trace=True)
    run.animate().save("ring.html")
    real = p101.launch(train, p101.ShardedTrainer, world_size=2).results
    assert real == p101.launch(train, p101.ShardedTrainer, world_size=2, backend="sim").results
    p101.schedule("1f1b", stages=2, microbatches=4).time().timeline().save("1f1b.svg")
    p101.cost.all_reduce, p101.LiveLoss, p101.memory_scene, p101.sweep
    assert p101.plan("llama-3-8b", gpus=8, simulate=0)
    for name in ("explore_collective", "keras"):
        try:
            getattr(p101, name)
        except ModuleNotFoundError as error:
            print(error)
    cli.main("run --world-size 2 --page run.html train.py".split())
    cli.main(["doctor"])
"""
SCRIPT = """
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
dist.all_reduce(torch.ones(4))
dist.destroy_process_group()
"""


@pytest.fixture
def core(tmp_path):
    """Run Python with these arguments in an environment without extras; it ends with `code`."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site/sitecustomize.py").write_text(WITHOUT_EXTRAS)

    def run(*arguments: str, code: int = 0) -> str:
        path = os.pathsep.join([str(tmp_path / "site"), str(ROOT)])
        # a warning is an error in the fork server and the ranks, too
        environ = {**os.environ, "PYTHONPATH": path, "PYTHONWARNINGS": "error"}
        how = {"cwd": tmp_path, "env": environ, "capture_output": True, "text": True}
        ran = subprocess.run([sys.executable, *arguments], timeout=150, **how)
        assert ran.returncode == code, ran.stderr
        assert "Failed to initialize NumPy" not in ran.stderr, "torch warns; we don't need NumPy"
        return ran.stdout or ran.stderr

    return run


def test_with_the_core_alone_programs_run_train_and_are_drawn(core, tmp_path):
    (tmp_path / "core.py").write_text(CORE)
    (tmp_path / "train.py").write_text(SCRIPT)
    printed = core("core.py")
    imported, by_data_parallel, *messages = printed.splitlines()
    assert {name for name in imported.split() if name.split(".")[0] in OURS_OR_THEIRS} == {
        "parallel101",
        "parallel101.laboratory",
        "parallel101.laboratory.record",
        "parallel101.laboratory.record.ipython",
    }, "import parallel101 takes some 10 ms beside torch's second"
    assert not re.findall(r"\S*(?:tensor|pipeline|schedules|zero)\S*", by_data_parallel)
    assert messages[:2] == [
        'An explorer needs ipywidgets: pip install "parallel101[lessons]"',
        'p101.keras needs Keras: pip install "parallel101[keras]"',
    ]
    assert "Collectives, as each rank called them" in printed
    for page in ("ring.html", "1f1b.svg", "run.html"):
        assert "<svg" in (tmp_path / page).read_text() or "svg+xml" in (tmp_path / page).read_text()
    doctor = printed[printed.index("✓ Python") :]
    assert "✗" not in doctor and "– NumPy" in doctor
    assert "– Jupyter" in doctor and 'pip install "parallel101[lessons]"' in doctor


@pytest.mark.parametrize("command", ["lab", "lessons"])
def test_a_command_without_its_extra_says_in_one_line_what_to_install(command, core):
    (line,) = core("-m", "parallel101", command, code=1).splitlines()
    assert re.fullmatch(
        rf'parallel101 {command} needs [\w ]+: pip install "parallel101\[lessons\]"', line
    )


def test_each_public_name_exists():
    names: dict[str, object] = {}
    exec("from parallel101 import *", names)
    assert set(parallel101.__all__) <= names.keys() & set(dir(parallel101))
    assert parallel101.layers.AllGather and parallel101.models.GPT
    assert parallel101.all_reduce is names["all_reduce"]


def test_what_an_extra_brings_is_what_pyproject_installs():
    for extra, brought in EXTRAS.items():
        names = {Requirement(r).name for r in PROJECT["optional-dependencies"][extra]}
        modules = {OTHER_NAMES.get(name, name) for name in names}
        assert set(brought) - WITH_ANOTHER == modules, extra
        assert missing_packages(extra) == [], "the tests run with all extras"


def test_each_module_that_is_imported_is_the_core_s_or_an_extra_s():
    known = OURS_OR_THEIRS | sys.stdlib_module_names | {"pytest"}  # in its plugin
    for path in MODULES.values():
        assert parsed(path).libraries <= known, path


def test_an_error_that_no_extra_explains_stays_as_it_is():
    with pytest.raises(ModuleNotFoundError, match="'nobody'") as raised, needs_extra("this"):
        import_module("nobody")
    assert not isinstance(raised.value, MissingExtra)
