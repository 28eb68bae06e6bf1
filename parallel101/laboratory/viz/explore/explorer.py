"""Parts of an explorer: controls, a prediction, and the result of the last run beside it.

[all_reduce ▾] [ring ▾]  ranks ──●──              each change runs again
all_reduce has no root.                           why a control is off
I predict [steps ▾] [8          ] [ Run ]         while a prediction is written, changes wait
         this run   your prediction               for "Run"
steps    6          8 ✗ too high
┌──────────────────────────────────┐
└──────────────────────────────────┘

An exported page, which has no kernel, keeps the table and the picture.

A prediction is right within 1 % of the exact result, or if it is what the screen shows: "252" µs of
a time of 252.4 µs, or "1.344 KB" if the screen shows 1.3 KiB. A count must be exact.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from html import escape
from typing import Any, NamedTuple

import ipywidgets

from parallel101.laboratory.record.errors import DeadlockError
from parallel101.laboratory.viz.scene import Scene

LOOK: dict[str, Any] = {
    "layout": {"width": "300px", "max_width": "100%"},
    "style": {"description_width": "110px"},
}
BYTES = {"b": 1.0, "byte": 1.0, "bytes": 1.0}
for k, prefix in enumerate("kmgt", 1):
    BYTES |= {f"{prefix}b": 1000.0**k, f"{prefix}ib": 1024.0**k}
SECONDS = {"s": 1.0, "second": 1.0, "seconds": 1.0, "ms": 1e-3, "µs": 1e-6, "us": 1e-6, "μs": 1e-6}
TOLERANCE = 0.01
MARKS = {"right": "✓ ", "too low": "✗ ", "too high": "✗ ", "": ""}
# for screen readers only
HIDDEN = "position:absolute;width:1px;height:1px;overflow:hidden;clip-path:inset(50%)"

# ipywidgets can't set attributes from Python. Without the first, JupyterLab's shortcuts take the
# keys of sliders, menus and buttons. The others name the parts of sliders and the field, and let
# screen readers say what a run has shown.
ATTRIBUTES = """<script>
setTimeout(() => document.querySelectorAll(".p101-explorer").forEach(explorer => {
  explorer.setAttribute("data-lm-suppress-shortcuts", "true");
  explorer.querySelector(".p101-status")?.setAttribute("aria-live", "polite");
  explorer.querySelector(".p101-prediction input")?.setAttribute("aria-label", "my prediction");
  for (const slider of explorer.querySelectorAll(".widget-slider"))
    for (const part of slider.querySelectorAll("[role=slider], .widget-readout"))
      part.setAttribute("aria-label", slider.querySelector("label").textContent);
}))</script>"""


class ExplorerResult(NamedTuple):
    """The result of a run, as the explorer shows it."""

    picture: Scene | None
    # what, and a value for each column; predictions are about the first
    rows: Sequence[Sequence[str]]
    columns: Sequence[str] = ("this run",)
    note: str = ""  # a sentence below the table
    # what → the number of its first column, not rounded: a count, bytes or seconds
    exact: Mapping[str, float] = {}


class Explorer(ipywidgets.VBox):
    """Controls with the result of a run below them. Display it as the last expression of a cell.

    Args:
        controls: widgets with a value, by the name of the argument that `run` takes.
        run: the values of the controls → the ExplorerResult. If it raises a ValueError,
            RuntimeError or TimeoutError, the explorer shows the error's text instead, and a
            deadlock as a picture of who waits for whom.
        adjust: called with the controls after each change, and the name of the one that changed (""
            at first), to set what else can be chosen. It returns sentences that say why.
        quantities: rows of the result that can be predicted, each with the unit of a prediction
            that names none: "B", or "" for counts.
        predict: one of them, for which the reader is asked before the first run is shown; None: it
            is shown at once.

    Attributes:
        controls: as given.
        quantity, prediction: what the reader predicts.
        run_button: runs again.
        html: the last result.

    Raises:
        ValueError: `predict` is not one of the quantities.
    """

    def __init__(
        self,
        controls: Mapping[str, Any],
        run: Callable[..., ExplorerResult],
        adjust: Callable[[Mapping[str, Any], str], str] = lambda *_: "",
        *,
        quantities: Mapping[str, str],
        predict: str | None = None,
    ):
        self.controls, self.run, self.adjust = controls, run, adjust
        self.quantities = quantities
        first = next(iter(quantities)) if predict is None else predict
        self.quantity = menu("I predict", quantities, first, argument="predict")
        self.prediction = ipywidgets.Text(layout={"width": "220px", "max_width": "100%"})
        self.prediction.add_class("p101-prediction")
        tip = "Run, and show the prediction beside the result"
        self.run_button = ipywidgets.Button(description="Run", tooltip=tip)
        self.hint, self.status = ipywidgets.HTML(), ipywidgets.HTML()
        self.output = ipywidgets.Output()
        self.status.add_class("p101-status")
        self.html = ""
        self._adjusting = False
        row = {"flex_flow": "row wrap", "max_width": "960px"}
        asked = [self.quantity, self.prediction, self.run_button, self.status]
        boxes = [ipywidgets.HBox(of, layout=row) for of in (list(controls.values()), asked)]
        super().__init__([boxes[0], self.hint, boxes[1], self.output])
        self.add_class("p101-explorer")
        for control in controls.values():
            control.observe(self._changed, "value")
        self.quantity.observe(self._ask_for_unit, "value")
        self._ask_for_unit()
        self.run_button.on_click(lambda _: self._pressed())
        # the Enter key
        self.prediction.on_msg(
            lambda _, message, __: self._pressed() if message.get("event") == "submit" else None
        )
        self._asked = False
        self._changed(None)
        self._asked = predict is not None
        if self._asked:  # the page without a kernel has the run already
            self.status.value = f"First predict the {escape(str(predict))}, then press Run."
            self._display("", "")

    def _changed(self, change: Any) -> None:
        """Adjust the other controls, then run once.

        If there is a prediction, or one is asked for, wait for the button.
        """
        if self._adjusting:
            return
        changed = [name for name, of in self.controls.items() if change and of is change["owner"]]
        self._adjusting = True
        try:
            why = self.adjust(self.controls, "".join(changed))
        finally:
            self._adjusting = False
        self.hint.value = f"<small>{escape(why)}</small>" if why else ""
        if self.prediction.value.strip():
            self.status.value = "Press Run to see whether it holds."
        elif not self._asked:
            self._show()

    def _ask_for_unit(self, _: Any = None) -> None:
        """Say in the empty field what to write."""
        unit = self.quantities[self.quantity.value]
        self.prediction.placeholder = f"in {unit}, or with a unit" if unit else "a number, or words"

    def _pressed(self) -> None:
        """Show the result; without the prediction that was asked for, remind the reader once."""
        if not self._asked or self.prediction.value.strip():
            return self._show()
        self._asked, first = False, "Write down a prediction first"
        self.status.value = f"{first}, or press Run again to see the result without one."

    def _show(self) -> None:
        """Run, and show the result with the prediction."""
        quantity = self.quantity.value
        unit = self.quantities[quantity]
        prediction = self.prediction.value.strip()
        if unit and prediction[-1:].isdigit():  # "96" is "96 B"
            prediction = f"{prediction} {unit}"
        try:
            result = self.run(**{name: control.value for name, control in self.controls.items()})
            picture = result.picture.html() if result.picture is not None else ""
            shown = next((row[1] for row in result.rows if row[0] == quantity), "")
            said = verdict(prediction, unit, shown, result.exact.get(quantity))
            self.html = _table(result, quantity, prediction, said) + picture
            plain = spoken = "; ".join(f"{what}: {', '.join(of)}" for what, *of in result.rows)
            if prediction:
                it_is = ": ".join(filter(None, [shown, said]))
                spoken = f"{quantity}: you predicted {prediction}, it is {it_is}."
        except (RuntimeError, ValueError, TimeoutError) as error:
            text = f'<pre style="white-space:pre-wrap;word-break:normal">{escape(str(error))}</pre>'
            waits = error.picture().html() if isinstance(error, DeadlockError) else ""
            spoken = "This hangs." if waits else "This can't run."
            self.html, plain = f"<p><strong>{spoken}</strong></p>{text}{waits}", str(error)
        except KeyboardInterrupt:
            last = "The result below is that of the last run that ended."
            self.status.value = f"Interrupted. {last} Press Run to try again."
            raise
        self._asked, self.prediction.value = False, ""
        spoken = escape(spoken)
        self.status.value = spoken if prediction else f'<span style="{HIDDEN}">{spoken}</span>'
        self._display(self.html + ATTRIBUTES, plain)

    def _display(self, html: str, plain: str) -> None:
        data = {"text/html": html or ATTRIBUTES, "text/plain": plain}
        self.output.outputs = ({"output_type": "display_data", "data": data, "metadata": {}},)

    def _repr_mimebundle_(self, **kwargs: Any) -> Any:
        """Return the live controls, and HTML for a page without a kernel.

        The HTML has the last result and how the controls were set, and says what the page needs.
        """
        bundle = super()._repr_mimebundle_(**kwargs)
        data, metadata = bundle if isinstance(bundle, tuple) else (bundle, {})
        given = (c for c in self.controls.values() if not c.disabled)
        chosen = ", ".join(f"{control.description} {control.value}" for control in given)
        return {**data, "text/html": f"<p>One run, with {escape(chosen)}.</p>{self.html}"}, metadata


def menu(name: str, options: Iterable[Any], value: Any, argument: str = "") -> Any:
    """Return a menu. Raises ValueError if the value is not one of the options."""
    options = tuple(options)
    if value not in options:
        known = ", ".join(map(repr, options))
        raise ValueError(f"{argument or name}={value!r} is unknown: expected one of {known}")
    return ipywidgets.Dropdown(description=name, options=options, value=value, **LOOK)


def slider(name: str, low: int, high: int, value: int) -> Any:
    """Return a slider for whole numbers. Raises ValueError if the value is out of range."""
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise ValueError(f"{name}={value!r}: expected a whole number from {low} to {high}")
    look = {"description": name, "continuous_update": False, **LOOK}
    return ipywidgets.IntSlider(value, min=low, max=high, **look)


def _table(result: ExplorerResult, quantity: str, prediction: str, said: str) -> str:
    """Return the rows as an HTML table, with the prediction of one of them in a last column."""
    columns = (*result.columns, *["your prediction"] * bool(prediction))
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in columns)
    rows = ""
    for what, *values in result.rows:
        cells = [escape(value) for value in values]
        if prediction:
            verdict_ = f"<strong>{escape(prediction)}</strong> {MARKS[said]}{said}"
            cells.append(verdict_ if what == quantity else "")
        data = "".join(f"<td>{cell}</td>" for cell in cells)
        rows += f'<tr><th scope="row">{escape(what)}</th>{data}</tr>'
    note = f"<p>{escape(result.note)}</p>" if result.note else ""
    table = f"<table><thead><tr><td></td>{head}</tr></thead><tbody>{rows}</tbody></table>"
    return f'<div style="overflow-x:auto;margin-bottom:12px">{table}{note}</div>'


def readings(text: str, unit: str) -> list[float]:
    """Return every reading of a text as a number, in bytes, seconds or as a count.

    Empty if it can't be read: "many", "8-9 B", or "41 s" of a quantity in bytes.

    "1,024" is 1024 or 1.024. Of "2 · 7 = 14", the 14 counts.

    Args:
        unit: of a number without one. If it is "", the quantity is a count, and any word may
            follow: "6 steps".
    """
    written = text.rpartition("=")[2].replace("−", "-").strip("[]() ").lower()
    parts = re.fullmatch(r"(.*?[\d.])\s*([a-zµμ ]*)", written)
    known = next((kind for kind in (BYTES, SECONDS) if unit.lower() in kind), {})
    scale = known.get((parts[2] or unit).lower()) if parts and unit else 1.0
    found = []
    for number in (re.sub("[, ]", "", parts[1]), parts[1].replace(",", ".")) if parts else ():
        with suppress(ValueError):
            found += [float(number) * scale] if scale else []
    return found


def verdict(prediction: str, unit: str, shown: str, exact: float | None) -> str:
    """Return "right", "too low" or "too high"; "" if the prediction isn't a number.

    Args:
        unit: of a prediction without one.
        shown: the result on the screen, with its unit.
        exact: the same number, not rounded, in bytes, seconds or as a count; None: there is none.
    """
    guesses = readings(prediction, unit)
    if not guesses or exact is None:
        return ""
    tolerance, on_screen = TOLERANCE if unit else 1e-9, readings(shown, unit)
    if any(math.isclose(n, exact, rel_tol=tolerance) or n in on_screen for n in guesses):
        return "right"
    return "too low" if min(guesses, key=lambda n: abs(n - exact)) < exact else "too high"
