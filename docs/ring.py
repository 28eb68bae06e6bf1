"""Draws the animation in the README, by running the Python lines of the README (make picture):
as SVG, and for slides as GIF and PNG.
"""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]

if __name__ == "__main__":
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    program = next(re.finditer(r"```python\n(.*?)```", readme, re.DOTALL))
    # so that the record names the README's own lines
    above = "\n" * readme[: program.start(1)].count("\n")
    names = {"__name__": "__main__"}
    exec(compile(above + program[1], "README.md", "exec"), names)
    scene = names["run"].animate()
    for kind in ("svg", "gif", "png"):
        print("Wrote", scene.save(ROOT / "docs" / f"ring.{kind}"))
