"""Arranges the cells of a lesson's page: sections, folded code, folded answers, shortened output.

    # Title                a table of contents after the first cell
    ## Waiting             <section id="Waiting">; the presenter's view shows one section at a time
    > Predict. …           the question stays visible
    code                   …so does the code, with the number by which errors cite its cell
    output, text, …        <details> Show what happened, folded until the reader opens it;
                           always open on paper
    > Takeaway. …          a box; part of the answer that it follows
    80,000 lines           20 lines, <details> the rest, 20 lines

This file moves elements of the page. How they look is in page.css, and the presenter's view is in
presenter.js.
"""

from __future__ import annotations

from html import escape

from bs4 import BeautifulSoup, Tag

SHOWN_LINES = 20  # at the beginning and at the end of a long output
LONGEST = 3 * SHOWN_LINES
HEADINGS = ("h1", "h2", "h3")  # each begins a section
BOXES = {"Takeaway": "takeaway", "Predict": "predict", "Write it": "write"}


def arrange(body: BeautifulSoup) -> None:
    """Arrange the cells in `body`, in place."""
    for text in body.select(".output_text pre"):
        shorten(body, text)
    for quote in body.find_all("blockquote"):
        for begin, kind in BOXES.items():
            if quote.get_text().strip().startswith(begin):
                quote["class"] = kind
    cells = body.find_all("div", class_="cell", recursive=False)
    number_cells(body, cells)
    for cell in cells:
        if source := cell.find("div", class_="input"):
            _fold(body, [source], "code", "Code", open="")
    contents = name_headings(body)
    fold_answers(body, cells)
    make_sections(body)
    if contents and cells:
        cells[0].insert_after(contents)


def number_cells(body: BeautifulSoup, cells: list[Tag]) -> None:
    """Show at each code cell its number, which is a link to the cell.

    The lesson ran from top to bottom, so the numbers are those of the notebook, as in "cell [5]".
    """
    sources = [(cell, source) for cell in cells for source in cell.select(".input_area")]
    for number, (cell, source) in enumerate(sources, start=1):
        label = body.new_tag("a", attrs={"class": "number", "href": f"#{cell['id']}"})
        label.string = f"[{number}]"
        source.insert_before(label)


def name_headings(body: BeautifulSoup) -> Tag | None:
    """Give each heading a name for links to it, as JupyterLab does: its text with hyphens.

    Return the table of contents, or None if there are fewer than two sections.
    """
    listed, taken = list[str](), set[str]()
    for heading in body.select(".text_cell_render > :is(h1, h2, h3)"):
        title = heading.get_text().strip()
        name = title.replace(" ", "-")
        while name in taken:
            name += "-again"
        taken.add(name)
        heading["id"] = name
        if heading.name == "h1":
            continue
        if not heading.find("a"):  # the heading is a link to itself
            link = body.new_tag("a", attrs={"class": "anchor", "href": f"#{name}"})
            link.extend(list(heading.contents))
            heading.append(link)
        to = f'<a href="#{escape(name)}">{escape(title)}</a>'
        listed.append(f'<li class="{heading.name}">{to}</li>')
    if len(listed) < 2:
        return None
    html = f'<nav aria-label="Contents" class="contents"><ol>{"".join(listed)}</ol></nav>'
    return BeautifulSoup(html, "html.parser").nav


def fold_answers(body: BeautifulSoup, cells: list[Tag]) -> None:
    """Fold what follows a prediction.

    That is everything from the first output to the next heading, prediction or homework.
    """
    asked, answer = False, list[Tag]()
    for cell in [*cells, None]:
        if cell is None or begins_anew(cell):
            if answer:
                _fold(body, answer, "answer", "Show what happened")
            bold = cell.select("blockquote strong") if cell is not None else []
            asked, answer = any(b.get_text().startswith("Predict") for b in bold), []
        elif answer:
            answer.append(cell)
        elif asked and (output := cell.find("div", class_="output_wrapper")):
            output = output.extract()  # the code stays visible
            cell.insert_after(output)
            answer.append(output)


def make_sections(body: BeautifulSoup) -> None:
    """Put each heading of the first three levels and all that follows it into a section."""
    section = body.new_tag("section")
    for element in list(body.contents):
        heading = isinstance(element, Tag) and is_text(element) and element.find(HEADINGS)
        if heading and section.contents:
            section = body.new_tag("section")
        if section.parent is None:
            element.insert_before(section)
        section.append(element.extract())


def shorten(body: BeautifulSoup, text: Tag) -> None:
    """Show the first and the last lines of a long text, and fold the lines between them."""
    if text.find(True):  # coloured text: a colour may begin in one line and end in another
        if (count := text.get_text().count("\n")) > LONGEST:
            _fold(body, [text], "lines", f"{count:,} lines")
        return
    lines = text.get_text().splitlines(keepends=True)
    if len(lines) <= LONGEST:
        return
    middle, last = body.new_tag("pre"), body.new_tag("pre")
    text.string = "".join(lines[:SHOWN_LINES])
    middle.string = "".join(lines[SHOWN_LINES:-SHOWN_LINES])
    last.string = "".join(lines[-SHOWN_LINES:])
    text.insert_after(middle, last)
    _fold(body, [middle], "lines", f"{len(lines) - 2 * SHOWN_LINES:,} more lines")


def is_text(cell: Tag) -> bool:
    return "text_cell" in cell.get_attribute_list("class")


def begins_anew(cell: Tag) -> bool:
    """Return whether an answer before this cell ends.

    This cell begins a section, asks something, sets homework, or sums up in a table. A takeaway
    belongs to the answer, because it tells what happened.
    """
    marks = "h1, h2, h3, h4, blockquote:not(.takeaway) > p > strong"
    table = ".text_cell_render > table:first-child"
    return is_text(cell) and cell.select_one(f"{marks}, {table}") is not None


def _fold(body: BeautifulSoup, elements: list[Tag], kind: str, summary: str, **more: str) -> None:
    """Put the elements into a <details>, which takes the place of the first."""
    details, label = body.new_tag("details", attrs={"class": kind, **more}), body.new_tag("summary")
    label.string = summary
    elements[0].insert_before(details)
    details.extend([label, *elements])
