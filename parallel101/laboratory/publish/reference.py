"""The reference of the public API, made by pdoc from docstrings, signatures and sources.

    parallel101.__all__      ──▶ reference/parallel101.html, in the groups below
    cost, layers, models, …  ──▶ reference/parallel101/cost.html, …
    all names                ──▶ reference/index.html, and the search

Only public names appear, and only documented ones. The pages have the site's frame; the templates
are in templates/.
"""

from __future__ import annotations

import inspect
import os
import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import suppress
from html import unescape
from importlib import import_module
from importlib.resources import as_file, files

import pdoc.doc
import pdoc.render
from markupsafe import Markup
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import PythonLexer

from parallel101.laboratory.publish.index import REFERENCE
from parallel101.laboratory.publish.offline_page import offline_html
from parallel101.laboratory.publish.search_index import SearchEntry
from parallel101.laboratory.publish.templates import render

ADDRESS, TITLE = REFERENCE.address, REFERENCE.title
PACKAGE = "parallel101"
MODULES = ("cost", "layers", "models", "sharding", "keras")
GROUPS = {  # of the package's own names, by the module that defines them
    "Run a program": ("ranks", "sim", "viz.watch", "spans"),
    "Collectives": ("autograd", "collectives", "mesh"),
    "Trainers": ("trainers",),
    "Pipeline schedules": ("trainers.schedules", "trainers.weight_gradients"),
    "Plan": ("planner",),
    "What was recorded": ("record", "analysis"),
    "Pictures": ("viz",),
    "Explorers": ("viz.explore", "publish.tools"),
    "Homework": ("grade",),
}
ERRORS = "Errors"


def make_reference() -> tuple[dict[str, str], list[SearchEntry]]:
    """Return the pages of the reference by their address, and all names for the search.

    Keras's part is left out where Keras is missing.
    """
    modules = {module.modulename: module for module in _modules()}
    for module in modules.values():
        _describe_constants(module)
    groups = {name: _groups(module) for name, module in modules.items()}
    pages = {}
    with (
        as_file(files("parallel101.laboratory.publish") / "templates") as templates,
        warnings.catch_warnings(),
    ):
        # an annotation whose import runs for type checkers only is shown as it is written
        warnings.simplefilter("ignore", UserWarning)
        pdoc.render.configure(
            docformat="google",
            include_undocumented=False,
            search=False,
            template_directory=templates,
        )
        used = shown_members, linked_members, is_documented
        pdoc.render.env.globals |= {"groups": groups} | {one.__name__: one for one in used}
        filters = {"highlight": _source, "format_signature": _signature}
        pdoc.render.env.filters |= filters | {"with_columns": with_columns}
        pdoc.render_helpers.markdown_extensions["fenced-code-blocks"] = {"cssclass": "highlight"}
        for name, module in modules.items():
            body = pdoc.render.html_module(module, modules)
            pages[_page(name)] = _framed(name, body, _page(name))
    names = [one for name in modules for one in _names(modules[name], groups[name])]
    by_address = {one.address: one for one in names}
    parts = [
        (modules[name], title, [by_address[f"{_page(name)}#{member}"] for member in members])
        for name in modules
        for title, members in groups[name]
    ]
    body = render("reference_index", title=TITLE, parts=parts, first_sentence=first_sentence)
    pages[ADDRESS] = _framed(TITLE, body, ADDRESS)
    return pages, names


def _modules() -> Iterator[pdoc.doc.Module]:
    package = import_module(PACKAGE)
    for name in package.__all__:  # each is imported when it is first used, and pdoc reads __dict__
        getattr(package, name)
    yield pdoc.doc.Module(package)
    os.environ["KERAS_BACKEND"] = "torch"
    for name in MODULES:
        with suppress(ImportError):  # Keras is an extra
            yield pdoc.doc.Module(import_module(f"{PACKAGE}.{name}"))


def _describe_constants(module: pdoc.doc.Module) -> None:
    """Say what a constant is: the names in a mapping, or the class of another value."""
    for member in module.members.values():
        if isinstance(member, pdoc.doc.Variable) and not member.docstring:
            value = member.default_value
            keys = ", ".join(f"`{key}`" for key in value) if isinstance(value, Mapping) else ""
            member.docstring = f"By name: {keys}." if keys else f"A `{type(value).__name__}`."


def _groups(module: pdoc.doc.Module) -> list[tuple[str, list[str]]]:
    """Return the names of a module, in groups with a title; only the package has several."""
    if module.modulename != PACKAGE:
        return [("", sorted(module.members, key=str.lower))]
    groups: dict[str, list[str]] = {title: [] for title in (*GROUPS, ERRORS)}
    for name in sorted(module.members, key=str.lower):
        groups[_group(module.members[name])].append(name)
    return list(groups.items())


def _group(member: pdoc.doc.Doc) -> str:
    if isinstance(member.obj, type) and issubclass(member.obj, BaseException):
        return ERRORS
    inside = member.taken_from[0].removeprefix(f"{PACKAGE}.").removeprefix("laboratory.")
    titles = {prefix: title for title, prefixes in GROUPS.items() for prefix in prefixes}
    fitting = [prefix for prefix in titles if f"{inside}.".startswith(f"{prefix}.")]
    return titles[max(fitting, key=len)]


def shown_members(member: pdoc.doc.Class, module: pdoc.doc.Module) -> list[pdoc.doc.Doc]:
    """Return the members of a class's section: its own, and those of bases without a section."""
    linked = [part for _, parts in linked_members(member, module) for part in parts]
    return [part for part in _documented(member) if part not in linked]


def linked_members(
    member: pdoc.doc.Class, module: pdoc.doc.Module
) -> list[tuple[str, list[pdoc.doc.Doc]]]:
    """Return the members that a class has from public bases, by the base's name."""
    inherited = [part for part in _documented(member) if part not in member.own_members]
    found = []
    for base in member.obj.__mro__[1:]:
        if getattr(module.obj, base.__name__, None) is base and base.__name__ in module.members:
            parts = [part for part in inherited if hasattr(base, part.name)]
            inherited = [part for part in inherited if part not in parts]
            found += [(base.__name__, parts)] if parts else []
    return found


def is_documented(doc: pdoc.doc.Doc) -> bool:
    """Return whether a name has a docstring of its own.

    The docstring of torch's forward, or of any field, doesn't count.
    """
    inherited = isinstance(doc, pdoc.doc.Function) and not doc.obj.__doc__
    of_field = doc.docstring.startswith("Alias for field number")  # of a NamedTuple
    return bool(doc.docstring) and not inherited and not of_field


def _documented(member: pdoc.doc.Class) -> list[pdoc.doc.Doc]:
    own = member.own_members  # in the order of the source; what is inherited follows
    inherited = [part for part in member.members.values() if part not in own]
    ours = [part for part in inherited if part.taken_from[0].startswith(PACKAGE)]
    public = (p for p in [*own, *ours] if not p.name.startswith("_") and p.kind != "class")
    return [part for part in public if is_documented(part)]


def _names(module: pdoc.doc.Module, groups: list[tuple[str, list[str]]]) -> Iterator[SearchEntry]:
    inside = module.modulename.removeprefix(PACKAGE).lstrip(".")
    page = _page(module.modulename)
    for name in (name for _, names in groups for name in names):
        member = module.members[name]
        parts = shown_members(member, module) if isinstance(member, pdoc.doc.Class) else []
        for doc in [member, *parts]:
            if doc.docstring:
                shown = f"{inside}.{doc.qualname}".lstrip(".")
                address = f"{page}#{doc.qualname}"
                yield SearchEntry(TITLE, shown, address, first_sentence(doc.docstring))


def first_sentence(docstring: str) -> str:
    paragraph = " ".join(docstring.strip().partition("\n\n")[0].split())
    return re.split(r"(?<=[.!?])\s(?=[A-Z`])", paragraph, maxsplit=1)[0].rstrip(":")


def _signature(signature: inspect.Signature, colon: bool) -> str:
    """Return a signature with Module in place of its private torch.nn.modules.module.Module."""
    dot = r'<span class="o">\.</span>'
    shown: str = pdoc.render_helpers.format_signature(signature, colon)
    # the types of a NamedTuple's fields are not evaluated
    unresolved = r'<span class="n">ForwardRef</span>.*?<span class="s1">(.*?)</span>.*?\)</span>'
    shown = re.sub(unresolved, lambda found: unescape(found[1]).strip("'"), shown)
    name = rf'<span class="n">(?:typing|torch(?:</span>{dot}<span class="n">\w+)+)</span>{dot}'
    return re.sub(rf'{name}(?=<span class="n">[A-Z])', "", shown)


def with_columns(docstring: str) -> str:
    """Indent paragraphs that are tables of aligned columns, so that Markdown keeps their lines."""
    paragraphs = docstring.split("\n\n")
    for at, paragraph in enumerate(paragraphs):
        lines = paragraph.splitlines()
        if sum(bool(re.search(r"^\S.*\S   *\S", line)) for line in lines) > len(lines) / 3:
            head = "\n\n" if lines[0].endswith(":") else ""
            body = lines[bool(head) :]
            paragraphs[at] = lines[0] * bool(head) + head + "\n".join(f"    {e}" for e in body)
    return "\n\n".join(paragraphs)


def _source(doc: pdoc.doc.Doc) -> str:
    return highlight(doc.source, PythonLexer(), HtmlFormatter(cssclass="highlight"))


def _page(module: str) -> str:
    return f"reference/{module.replace('.', '/')}.html"


def _framed(title: str, body: str, page: str) -> str:
    root = "../" * page.count("/")
    index = "" if page == ADDRESS else ADDRESS
    html = render("reference", root=root, index=index, title=TITLE, body=Markup(body))
    whole = f"{title}: parallel101" if title == TITLE else title
    return offline_html(whole, html, scripts_beside=True)
