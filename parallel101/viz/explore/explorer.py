"""What all explorers are: controls, a field for a prediction, and the result of the last run with the prediction beside it.

[all_reduce ▾] [ring ▾]  ranks ──●──        each change runs again
I predict [6 steps        ] [ Run ]         while a prediction is written, changes wait for "Run"
         your prediction   this run
steps    6 steps           6                an exported page, which has no kernel, keeps this table and the picture
┌──────────────────────────────────┐
└──────────────────────────────────┘
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from typing import Any, NamedTuple

import ipywidgets

from parallel101.viz.scene import Scene

WIDE = {"width": "300px"}
STYLE = {"description_width": "110px"}

# ipywidgets can't set attributes from Python. Without the first, JupyterLab's shortcuts take the keys of sliders, menus and buttons. The
# others name the parts of sliders, and let screen readers say that a prediction waits.
ATTRIBUTES = """<script>setTimeout(() => document.querySelectorAll(".p101-explorer").forEach(explorer => {
  explorer.setAttribute("data-lm-suppress-shortcuts", "true");
  explorer.querySelector(".p101-status")?.setAttribute("aria-live", "polite");
  for (const slider of explorer.querySelectorAll(".widget-slider"))
    for (const part of slider.querySelectorAll("[role=slider], .widget-readout"))
      part.setAttribute("aria-label", slider.querySelector("label").textContent);
}))</script>"""


class Result(NamedTuple):
    """What a run shows."""

    picture: Scene | None
    rows: Sequence[Sequence[str]]  # what, and a value for each column
    columns: Sequence[str] = ("this run",)
    note: str = ""  # a sentence below the table


class Explorer(ipywidgets.VBox):
    """Controls with the result of a run below them. Display it as the last expression of a cell.

    Args:
        controls: widgets with a value, by the name of the argument that `run` takes.
        run: the values of the controls → the Result. A ValueError, RuntimeError or TimeoutError is shown in words in place of it.
        adjust: called with the controls after each change, to set what else can be chosen.

    Attributes:
        controls: as given. prediction: the reader's text. run_button: runs again. html: the last result.
    """

    def __init__(self, controls: Mapping[str, Any], run: Callable[..., Result], adjust: Callable[[Mapping[str, Any]], None] | None = None):
        self.controls, self.run, self.adjust = controls, run, adjust
        self.prediction = ipywidgets.Text(description="I predict", placeholder="write it before you change or run", style=STYLE)
        self.prediction.layout.width = "450px"
        self.run_button = ipywidgets.Button(description="Run", tooltip="Run, and show the prediction beside the result")
        self.status = ipywidgets.HTML()
        self.status.add_class("p101-status")
        self.output = ipywidgets.Output()
        self.html = ""
        self._adjusting = False
        row = {"flex_flow": "row wrap", "max_width": "960px"}
        predict = ipywidgets.HBox([self.prediction, self.run_button, self.status], layout=row)
        super().__init__([ipywidgets.HBox(list(controls.values()), layout=row), predict, self.output])
        self.add_class("p101-explorer")
        for control in controls.values():
            control.observe(self._changed, "value")
        self.run_button.on_click(lambda _: self._show())
        self._changed(None)

    def _changed(self, change: Any) -> None:
        """Adjust the other controls, then run once; if there is a prediction, wait for the button."""
        if self._adjusting:
            return
        self._adjusting = True
        try:
            if self.adjust is not None:
                self.adjust(self.controls)
        finally:
            self._adjusting = False
        if self.prediction.value.strip():
            self.status.value = "Press Run to see whether it holds."
        else:
            self._show()

    def _show(self) -> None:
        try:
            result = self.run(**{name: control.value for name, control in self.controls.items()})
            picture = result.picture.html() if result.picture is not None else ""
            self.html, plain = _table(result, self.prediction.value.strip()) + picture, _plain(result)
        except (RuntimeError, ValueError, TimeoutError) as error:
            self.html, plain = f"<p><strong>This can't run.</strong></p><pre>{escape(str(error))}</pre>", str(error)
        self.prediction.value = self.status.value = ""
        data = {"text/html": self.html + ATTRIBUTES, "text/plain": plain}
        self.output.outputs = ({"output_type": "display_data", "data": data, "metadata": {}},)

    def _repr_mimebundle_(self, **kwargs: Any) -> Any:
        """The live controls, and the last result as HTML for a page without a kernel."""
        bundle = super()._repr_mimebundle_(**kwargs)
        data, metadata = bundle if isinstance(bundle, tuple) else (bundle, {})
        return {**data, "text/html": self.html}, metadata


def menu(name: str, options: Iterable[Any], value: Any) -> Any:
    """A menu. Raises ValueError if the value is not one of the options."""
    options = tuple(options)
    if value not in options:
        raise ValueError(f"{name}={value!r} is unknown: expected one of {', '.join(map(repr, options))}")
    return ipywidgets.Dropdown(description=name, options=options, value=value, layout=WIDE, style=STYLE)


def slider(name: str, low: float, high: float, value: float, step: float = 1) -> Any:
    """A slider for whole numbers, or for others if `step` is not 1. Raises ValueError if the value is out of range."""
    whole = step == 1
    if not isinstance(value, int if whole else (int, float)) or isinstance(value, bool) or not low <= value <= high:
        raise ValueError(f"{name}={value!r}: expected a {'whole ' if whole else ''}number from {low} to {high}")
    kind = ipywidgets.IntSlider if whole else ipywidgets.FloatSlider
    return kind(value, description=name, min=low, max=high, step=step, continuous_update=False, layout=WIDE, style=STYLE)


def _table(result: Result, prediction: str) -> str:
    """The rows; if there is a prediction, with a column over all of them for it."""
    guess = f'<td rowspan="{len(result.rows)}">{escape(prediction)}</td>' if prediction else ""
    columns = (*(["your prediction"] if prediction else []), *result.columns)
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in columns)
    rows = [
        f'<tr><th scope="row">{escape(what)}</th>{"" if i else guess}{"".join(f"<td>{escape(value)}</td>" for value in values)}</tr>'
        for i, (what, *values) in enumerate(result.rows)
    ]
    note = f"<p>{escape(result.note)}</p>" if result.note else ""
    table = f"<table><thead><tr><td></td>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
    return f'<div style="overflow-x:auto;margin-bottom:12px">{table}{note}</div>'


def _plain(result: Result) -> str:
    """ "steps: 6, 6; …"."""
    return "; ".join(f"{what}: {', '.join(values)}" for what, *values in result.rows)
