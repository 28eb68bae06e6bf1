"""docs/index_readme.py makes the README legible on a package index."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "docs" / "index_readme.py"
for_an_index = runpy.run_path(str(SCRIPT))["for_an_index"]
README = (ROOT / "README.md").read_text(encoding="utf-8")
GITHUB = "https://github.com/owner/name"
RAW = "https://raw.githubusercontent.com/owner/name"

CASES = {  # Markdown, with a repository, without one
    "a file": ("[a](b.md)", f"[a]({GITHUB}/blob/v1/b.md)", "a"),
    "a heading": ("[a](b.md#c)", f"[a]({GITHUB}/blob/v1/b.md#c)", "a"),
    "a heading of the README": ("[a](#c)", f"[a]({GITHUB}/blob/v1/README.md#c)", "a"),
    "a folder": ("[a](docs)", f"[a]({GITHUB}/tree/v1/docs)", "a"),
    "a file in code letters": ("[`a`](b.md)", f"[`a`]({GITHUB}/blob/v1/b.md)", "`a`"),
    "an address": ("[a](https://b.org/c)",) * 3,
    "an image": ("x ![a](b.svg)", f"x ![a]({RAW}/v1/b.svg)", "x "),
    "an image with an address": ("![a](https://b.org/c.svg)",) * 3,
    "a picture with a caption": (
        '<p align="center">\n<img src="b.svg" alt="a"><br>\n<em>c</em>\n</p>\n\n[x](y)',
        f'<p align="center">\n<img src="{RAW}/v1/b.svg" alt="a"><br>\n<em>c</em>\n</p>\n\n'
        f"[x]({GITHUB}/blob/v1/y)",
        "x",
    ),
    "code": ("`f[a](b)` [c](`d`",) * 3,
    "lines of code": ("```\n[a](b)\n`\n```\n[c](https://d.org)",) * 3,
}


def test_links_and_pictures_become_addresses_or_are_left_out():
    for name, (text, there, without) in CASES.items():
        assert for_an_index(text, ROOT, f"{GITHUB}.git", "v1") == there, name
        assert for_an_index(text, ROOT) == without, name
    # elsewhere than on GitHub a picture comes from the repository itself
    text = for_an_index("![a](b.svg)", ROOT, "https://git.example.org/me/mine/")
    assert text == "![a](https://git.example.org/me/mine/raw/HEAD/b.svg)"
    for wrong in ("owner/name", "https://github.com", "/"):
        with pytest.raises(ValueError, match=r"--repository .*expected the address"):
            for_an_index("", ROOT, wrong)


def test_every_address_in_the_rewritten_readme_names_a_file_of_the_repository():
    text = for_an_index(README, ROOT, GITHUB, "v1")
    targets = re.findall(r'(?:src="|\]\()([^")\s]+)', text)
    ours = [target for target in targets if "/owner/name/" in target]
    assert len(ours) > 5 and all(target.startswith("https://") for target in targets)
    for target in ours:
        path = re.sub(r"^.*?/v1/|#.*", "", target)
        assert (ROOT / path).exists(), target
    assert text.count("```") == README.count("```")


def test_without_a_repository_the_readme_has_no_picture_and_no_relative_link(tmp_path):
    file = tmp_path / "README.md"
    file.write_text(README, encoding="utf-8")
    subprocess.run([sys.executable, SCRIPT, file], check=True)
    text = file.read_text(encoding="utf-8")
    assert "<img" not in text and "ring.svg" not in text
    assert all(target.startswith("https://") for target in re.findall(r"\]\(([^)]+)\)", text))
    programs = r"```\w*\n.*?```"
    assert re.findall(programs, text, re.DOTALL) == re.findall(programs, README, re.DOTALL)
