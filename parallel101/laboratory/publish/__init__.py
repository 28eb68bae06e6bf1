"""Runs the lessons and writes them as web pages that work offline.

    lessons/*.ipynb ── execute.py: run in a fresh kernel ──▶ outputs
                    ── page.py ──▶ site/*.html
    tools/          ── pages of JavaScript, fed with what Python computes ──▶ site/*.html
    docs/teaching.md, errors.md, CITATION.cff ── course_pages.py ──▶ site/*.html
    docstrings      ── reference.py ──▶ site/reference/
    all of them     ── search_index.py ──▶ site/search_index.js
    routes.json     ── index.py ─▶ site/index.html
    course.toml     ── syllabus.py: a teacher's course, in place of routes.json

`parallel101 lessons` and `make lessons` call `publish`, which is in write_site.py. The page of a
run (run_page.py) and the frame of all pages (offline_page.py) need no packages of notebooks.
"""
