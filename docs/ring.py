"""Draws the animation in the README, by running the README's program (make picture).

As SVG, and for slides as GIF and PNG. Each run has other times, so the files go to build/picture,
which git ignores. To change the README's picture, copy ring.svg to docs.
"""

import os
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "build" / "picture"

if __name__ == "__main__":
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    program = next(re.finditer(r"```python\n(.*?)```", readme, re.DOTALL))
    # so that the record names the README's own lines
    above = "\n" * readme[: program.start(1)].count("\n")
    names = {"__name__": "__main__"}
    FOLDER.mkdir(parents=True, exist_ok=True)
    os.chdir(FOLDER)  # the program saves a page
    exec(compile(above + program[1], "README.md", "exec"), names)
    scene = names["run"].animate()
    for kind in ("svg", "gif", "png"):
        print("Wrote", scene.save(FOLDER / f"ring.{kind}"))
