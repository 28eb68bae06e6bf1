"""What the README and the pages in docs/ say: commands exist, links lead somewhere, programs print
what is shown, and the README's picture is that of its program.
"""

from __future__ import annotations

import re
import runpy
import shlex
from pathlib import Path

import pytest

from parallel101.cli import _parsed

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
IDS = [page.name for page in PAGES]
README = (ROOT / "README.md").read_text(encoding="utf-8")
CODE = re.compile(r"^ *```(\w*)\n(.*?)^ *```", re.DOTALL | re.MULTILINE)


def programs(page: Path) -> list[str]:
    return [code for kind, code in CODE.findall(page.read_text("utf-8")) if kind == "python"]


@pytest.fixture
def printed_by(tmp_path, monkeypatch, capsys):
    """What a program prints that runs as a script in an empty folder."""
    monkeypatch.chdir(tmp_path)

    def run(program: str) -> str:
        exec(compile(program, "program.py", "exec"), {"__name__": "__main__"})
        return capsys.readouterr().out

    return run


def test_each_make_command_exists_and_runs_the_set_up():
    makefile = (ROOT / "Makefile").read_text()
    prose = "".join(page.read_text() for page in [*PAGES, ROOT / "CONTRIBUTING.md"])
    named = set(re.findall(r"(?:^|`|/cpu )make ([a-z]+)", prose, re.MULTILINE))
    assert {"lessons", "test", "lab", "homework"} <= named
    for target in named - {"clean", "constraints"}:
        assert re.search(rf"^{target}: \$\(READY\)$", makefile, re.MULTILINE), (
            f"the Makefile has no target `{target}: $(READY)`"
        )
    assert "make test" in (ROOT / ".ci/run").read_text()


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_each_parallel101_command_has_options_that_exist(page):
    text = page.read_text(encoding="utf-8")
    code = "\n".join([code for _, code in CODE.findall(text)] + re.findall("`([^`\n]+)`", text))
    for line in re.findall(r"(?:^|-m )parallel101 (\w+ .*)", code, re.MULTILINE):
        if not line.endswith("--help"):
            _parsed(shlex.split(line, comments=True))  # exits for what isn't an option


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CONTRIBUTING.md"], ids=[*IDS, "CONTRIBUTING.md"])
def test_the_files_and_headings_that_a_page_links_to_exist(page):
    text = CODE.sub("", page.read_text(encoding="utf-8"))
    for target in re.findall(r'(?:src="|\]\()([^")\s]+)[")]', text):
        if not target.startswith("https://"):
            path, _, heading = target.partition("#")
            linked = page.parent / path if path else page
            assert linked.exists(), f"{page.name} links to {path}, which is missing"
            if heading:
                titles = re.findall(r"^#+ (.*)", linked.read_text("utf-8"), re.MULTILINE)
                anchors = {re.sub(r"[^\w -]", "", t.lower()).replace(" ", "-") for t in titles}
                assert heading in anchors, f"{page.name} links to {target}: no such heading"


def test_every_page_can_be_reached_from_the_readme():
    linked = set(re.findall(r"\]\((docs/\w+\.md)", README))
    assert linked == {f"docs/{page.name}" for page in PAGES[1:]}


def test_the_readme_can_be_read_in_a_minute():
    """Its top: two sentences, the picture, two commands, ten lines and what they print."""
    assert README.count("\n") <= 180
    parts = ["docs/ring.svg", "make lessons ", "make test ", "```python", "\n| "]
    places = [README.index(part) for part in parts]
    assert places == sorted(places)
    (program,) = programs(ROOT / "README.md")
    assert len([line for line in program.splitlines() if line]) == 10


def test_the_readmes_program_prints_what_the_readme_shows(printed_by):
    (program,) = programs(ROOT / "README.md")
    printed = printed_by(program)
    shown = README[README.index(program) :].split("```")[2].strip()
    assert printed.strip() == shown
    assert Path("ring.html").exists()
    assert "[6, 6, 6, 6] [96, 96, 96, 96]" in printed, (
        "in a ring of four, each rank sends 2 (4 - 1) messages of a quarter of 64 bytes"
    )


def test_the_programs_of_the_library_pages_and_the_readmes_table_run(printed_by):
    pages = (ROOT / "docs" / f"{name}.md" for name in ("library", "mesh_layers"))
    program = "\n".join(code for page in pages for code in programs(page))
    rows = re.findall(r"^\|[^|]*\| `(p101\..*?)` \|", README, re.MULTILINE)
    assert len(rows) >= 5
    program += "\nfn = lambda: None\nmodel, loss_fn = torch.nn.Linear(2, 1), None\n"
    on_ranks = [row for row in rows if "mesh" in row and "run(" not in row]
    program += "".join(f"{row}\n" for row in rows if row not in on_ranks and "keras" not in row)
    program += "def layers():\n    mesh = DeviceMesh('cpu', [[0, 1]])\n"
    program += "".join(f"    {row}\n" for row in on_ranks)
    printed = printed_by(program + "p101.launch(layers, world_size=2)")
    assert "rank 3 of 4\n0.03" in printed and "[0, 0, 0, 1, 1, 1]" in printed
    assert "(0, 1) (6, 12)" in printed and "3 (2, 1) [4.0]" in printed


def words_of(svg: str) -> set[str]:
    """What a picture says, without the times, which differ between runs."""
    return {text for text in re.findall(r">([^<>]+)<", svg) if not re.search(r"\d ([mµ]?s)$", text)}


def test_make_picture_draws_the_readmes_picture_and_changes_no_tracked_file(
    monkeypatch, tmp_path, capfd
):
    written = {}

    def save(scene, path):
        written[Path(path)] = scene
        return path

    monkeypatch.setattr("parallel101.laboratory.viz.scene.Scene.save", save)
    monkeypatch.chdir(tmp_path)  # the script changes the folder; this restores it
    runpy.run_path(str(ROOT / "docs" / "ring.py"), run_name="__main__")
    page, *pictures = written
    assert not page.is_absolute() and Path.cwd() == ROOT / "build" / "picture"
    assert [path.suffix for path in pictures] == [".svg", ".gif", ".png"]
    ignored = (ROOT / ".gitignore").read_text().split()
    for path in pictures:
        assert f"{path.relative_to(ROOT).parts[0]}/" in ignored, f"git would see {path}"
    drawn = written[pictures[0]].svg(smil=True, still=True)
    shown = (ROOT / "docs" / "ring.svg").read_text(encoding="utf-8")
    assert words_of(drawn) == words_of(shown), "run `make picture`, and copy ring.svg to docs"


def test_the_readmes_picture_needs_nothing_else():
    shown = (ROOT / "docs" / "ring.svg").read_text(encoding="utf-8")
    assert "<script" not in shown and "href" not in shown and str(ROOT) not in shown
    assert shown.replace("http://www.w3.org/2000/svg", "").count("://") == 0
