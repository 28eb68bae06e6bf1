"""What a release and the repository's pages are made of: workflows, issue forms, CITATION.cff."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

import parallel101
from parallel101.laboratory.grade.release import WORKFLOW
from tests.project.test_package import PROJECT, ROOT, tomllib

WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
FORMS = sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml"))
KINDS = {"markdown", "textarea", "input", "dropdown", "checkboxes"}  # of a form's elements


def jobs(path: Path) -> dict[str, Any]:
    return yaml.safe_load(path.read_text())["jobs"]


def step(name: str) -> str:
    """The shell commands of a step of the job that builds a release."""
    steps = jobs(ROOT / ".github/workflows/release.yml")["build"]["steps"]
    (found,) = (step for step in steps if name in step.get("name", ""))
    return found["run"]


def shell(commands: str, where: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run a step's commands as GitHub does, with this Python."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    how = {"cwd": where, "env": {**os.environ, "PATH": path, **environ}, "timeout": 60}
    bash = ["bash", "-eo", "pipefail", "-c", commands]
    return subprocess.run(bash, capture_output=True, text=True, **how)


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_job_runs_after_jobs_that_exist_and_its_commands_are_shell(path):
    found = jobs(path)
    for job in found.values():
        needed = job.get("needs", [])
        assert set([needed] if isinstance(needed, str) else needed) <= set(found)
        if "uses" in job:  # another workflow, which lets itself be called
            called = (ROOT / job["uses"]).read_text()
            assert "workflow_call" in yaml.safe_load(called)[True]  # YAML 1.1 reads `on` as True
            continue
        assert job["runs-on"] == "ubuntu-latest"
        for each in job["steps"]:
            assert ("uses" in each) != ("run" in each)
            checked = shell(f"set -n\n{each.get('run', '')}", ROOT)
            assert (checked.returncode, checked.stderr) == (0, "")


def test_all_workflows_use_one_version_of_an_action_and_name_no_repository():
    versions: dict[str, set[str]] = {}
    for text in (WORKFLOW, *(path.read_text() for path in WORKFLOWS)):
        for action, version in re.findall(r"uses: ([\w./-]+)@(\S+)", text):
            versions.setdefault(action, set()).add(version)
        assert "github.com/" not in text, "the repository's own address comes from where it runs"
    assert {action: found for action, found in versions.items() if len(found) > 1} == {}


def test_a_tag_that_is_not_the_version_stops_the_release():
    check = step("tag")
    right = shell(check, ROOT, GITHUB_REF_NAME=f"v{parallel101.__version__}")
    assert right.returncode == 0, right.stderr
    wrong = shell(check, ROOT, GITHUB_REF_NAME="v99")
    assert wrong.returncode == 1
    assert f"expected the tag v{parallel101.__version__}" in wrong.stderr


def test_the_release_inserts_the_address_of_its_repository(tmp_path):
    (tmp_path / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text())
    _, printf = step("address").splitlines()
    where = {"GITHUB_SERVER_URL": "https://host", "GITHUB_REPOSITORY": "me/it"}
    assert shell(printf, tmp_path, **where).returncode == 0
    project = tomllib.loads((tmp_path / "pyproject.toml").read_text())["project"]
    assert project["urls"] == {"Repository": "https://host/me/it"}
    assert "urls" not in PROJECT


def test_only_the_jobs_that_publish_may_do_more_than_read():
    for path in WORKFLOWS:
        assert yaml.safe_load(path.read_text())["permissions"] == {"contents": "read"}
        more = {name for name, job in jobs(path).items() if "permissions" in job}
        assert more <= {"publish", "deploy"}


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.stem)
def test_an_issue_form_has_what_github_s_schema_asks_for(path):
    form = yaml.safe_load(path.read_text())
    assert set(form) <= {"name", "description", "title", "labels", "body"}
    assert form["name"] and form["description"] and form["body"]
    ids = [element["id"] for element in form["body"] if element["type"] != "markdown"]
    assert len(set(ids)) == len(ids) > 0
    for element in form["body"]:
        assert element["type"] in KINDS
        assert set(element) <= {"type", "id", "attributes", "validations"}
        needed = {"markdown": "value", "dropdown": "options"}.get(element["type"], "label")
        assert element["attributes"][needed]


def test_the_citation_is_of_this_version():
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert cited["cff-version"] == "1.2.0"
    assert cited["version"] == parallel101.__version__
    assert cited["license"] == PROJECT["license"]
    assert cited["title"] and cited["message"]
    (author,) = cited["authors"]
    assert author["name"] in (ROOT / "LICENSE").read_text()
    assert cited["keywords"] == PROJECT["keywords"]
