"""What a reader sees of a page in a browser: text that is cut off, too small or too pale, and what
the keyboard and a screen reader reach.

Each function that looks at something returns a list of findings in words, which is empty if all is
well.
"""

from __future__ import annotations

import json
from typing import Any

from tests.browser.browser import Browser

CONTROLS = ("button", "slider", "combobox", "checkbox", "textbox", "spinbutton", "radio", "link",
            "DisclosureTriangle", "image", "figure")  # fmt: skip
EVERYTHING = """
const inside = root => [...root.querySelectorAll('*')]
    .flatMap(e => [e, ...(e.shadowRoot ? inside(e.shadowRoot) : [])]);
const parent = e => e.parentElement ?? e.getRootNode().host;
const around = e => e ? [e, ...around(parent(e))] : [];
const laid = e => e.checkVisibility({ visibilityProperty: true }) && e.getClientRects().length;
const everything = inside(document.body).filter(e => laid(e) && !e.closest('.unseen, math'));
const letters = e => [...e.childNodes].filter(n => n.nodeType === 3).map(n => n.data.trim());
const own = e => letters(e).join(' ').trim();
const words = e => (own(e) || e.textContent.trim()).slice(0, 40);
const named = e => `${e.tagName.toLowerCase()}.${e.getAttribute('class') ?? ''} "${words(e)}"`;
"""


def find(browser: Browser, script: str) -> Any:
    return browser.js(f"(() => {{ {EVERYTHING} {script} }})()")


def cut_off(browser: Browser, scrolls: bool = True) -> list[str]:
    """Elements that reach beyond the window, or beyond an element that hides them.

    `scrolls`: the reader can scroll, which paper can't.
    """
    script = f"""
        const scrolls = {json.dumps(scrolls)};
        const hides = e => getComputedStyle(e).overflowX === 'hidden';
        const slides = e => ['auto', 'scroll'].includes(getComputedStyle(e).overflowX);
        const html = everything.filter(e => !e.ownerSVGElement && !e.closest('select'));
        const wide = html.filter(e => e.getBoundingClientRect().right > innerWidth + 1
            && !(scrolls && around(e).some(slides)));
        const hidden = html.filter(e => e.scrollWidth > e.clientWidth + 1 && e.clientWidth
            && (hides(e) || (!scrolls && slides(e))));
        const texts = everything.filter(e => e.tagName === 'text' && own(e) && (t => {{
            const box = e.getBoundingClientRect(), svg = e.ownerSVGElement.getBoundingClientRect();
            return box.right > svg.right + 1 || box.left < svg.left - 1
                || box.top < svg.top - 1 || box.bottom > svg.bottom + 1; }})());
        return [...new Set([...wide, ...hidden, ...texts])].map(named);"""
    return find(browser, script)


def scrolls_without_a_cue(browser: Browser) -> list[str]:
    """Whatever is wider than its place and doesn't show it, by a line above it or by a shadow."""
    script = """
        const slides = e => ['auto', 'scroll'].includes(getComputedStyle(e).overflowX);
        const line = e => getComputedStyle(parent(e), '::before').content.includes('sideways');
        const shadow = e => getComputedStyle(e).backgroundAttachment.includes('local');
        const html = e => !e.ownerSVGElement && !e.matches('select, textarea');
        const wide = e => html(e) && slides(e) && e.scrollWidth > e.clientWidth + 1;
        return everything.filter(e => wide(e) && !line(e) && !shadow(e)).map(named);"""
    return find(browser, script)


def too_small(browser: Browser, least: float) -> list[str]:
    """Texts in pictures whose letters are lower than `least` pixels as they appear."""
    script = f"""
        const size = e => parseFloat(getComputedStyle(e).fontSize) * e.getScreenCTM().a;
        const small = everything.filter(e => e.tagName === 'text' && own(e) && size(e) < {least});
        return small.map(e => `${{size(e).toFixed(1)}} px: ${{named(e)}}`);"""
    return find(browser, script)


def too_pale(browser: Browser, least: float = 4.5) -> list[str]:
    """Texts whose contrast with what lies under them is below WCAG's 4.5 (3 for large text).

    The whole page must be in the window.
    """
    script = f"""
        const rgba = colour => {{
            const [r, g, b, a = 1] = (colour.match(/[\\d.]+/g) ?? [0, 0, 0, 0]).map(Number);
            return [r, g, b, a]; }};
        const over = ([r, g, b, a], below) => [r, g, b].map((c, i) => c * a + below[i] * (1 - a));
        const linear = c => c <= .04045 ? c / 12.92 : ((c + .055) / 1.055) ** 2.4;
        const light = rgb => rgb.map(c => linear(c / 255))
            .reduce((sum, c, i) => sum + c * [.2126, .7152, .0722][i], 0);
        const opacity = e => around(e).reduce((all, a) => all * getComputedStyle(a).opacity, 1);
        const paint = e => {{
            const style = getComputedStyle(e), drawn = e.ownerSVGElement;
            const fill = /^rgb/.test(style.fill) ? rgba(style.fill) : [0, 0, 0, 0];
            const [r, g, b, a] = drawn ? fill : rgba(style.backgroundColor);
            return [r, g, b, a * opacity(e) * (drawn ? style.fillOpacity : 1)]; }};
        const ratio = (a, b) => (Math.max(a, b) + .05) / (Math.min(a, b) + .05);
        const media = query => matchMedia(query).matches;
        const dark = media('(prefers-color-scheme: dark)') && !media('print');
        const page = dark ? [0, 0, 0] : [255, 255, 255];
        const unseen = ['OPTION', 'STYLE', 'SCRIPT', 'title', 'desc', 'style'];
        return everything.filter(own).flatMap(e => {{
            const style = getComputedStyle(e), range = document.createRange();
            if (unseen.includes(e.tagName) || e.disabled) return [];
            const text = n => n.nodeType === 3 && n.data.trim();
            range.selectNodeContents([...e.childNodes].find(text));
            const box = range.getClientRects()[0] ?? e.getBoundingClientRect();
            const [x, y] = [box.x + box.width / 2, box.y + box.height / 2];
            const under = e.getRootNode().elementsFromPoint(x, y), at = under.indexOf(e);
            if (at < 0) return [];  // scrolled out of sight
            const host = around(e.getRootNode().host);
            const below = under.slice(e.ownerSVGElement ? at + 1 : at).concat(host);
            const painted = below.filter(b => !['text', 'tspan'].includes(b.tagName)).reverse();
            const seen = painted.reduce((rgb, b) => over(paint(b), rgb), page);
            if (style.stroke !== 'none') return [];  // a halo
            const [r, g, b, a] = rgba(e.ownerSVGElement ? style.fill : style.color);
            const contrast = ratio(light(over([r, g, b, a * opacity(e)], seen)), light(seen));
            const large = parseFloat(style.fontSize) >= (style.fontWeight >= 700 ? 18.66 : 24);
            const wanted = large ? Math.min(3, {least}) : {least};
            const pale = `${{contrast.toFixed(2)}}: ${{named(e)}}`;
            return contrast < wanted - .005 ? [pale] : []; }});"""
    return find(browser, script)


def without_a_name(browser: Browser) -> list[str]:
    """Controls and pictures for which a screen reader has no words."""
    nodes = [n for n in browser.call("Accessibility.getFullAXTree")["nodes"] if not n["ignored"]]
    roles = [(n["role"]["value"], n.get("name", {}).get("value", "").strip()) for n in nodes]
    return [role for role, name in roles if role in CONTROLS and not name]


def out_of_reach(browser: Browser) -> list[str]:
    """Controls that the tab key does not reach."""
    script = """const controls = 'a[href], button, input, select, summary, [tabindex]';
        globalThis.unreached = new Set(everything.filter(e => e.matches(controls) && !e.disabled));
        document.activeElement.blur(), scrollTo(0, 0);
        return unreached.size;"""
    count = find(browser, script)
    deepest = """(e => { while (e.shadowRoot?.activeElement) e = e.shadowRoot.activeElement;
        return e; })(document.activeElement)"""
    for _ in range(2 * count + 5):  # places that scroll take a key press, too
        browser.key("Tab")
        if browser.js(f"(unreached.delete({deepest}), unreached.size === 0)"):
            break
    return find(browser, "return [...unreached].map(named);")


def unfold(browser: Browser) -> None:
    """Open all that is folded, except thousands of lines, and make the window as high as the
    page.
    """
    browser.js("document.querySelectorAll('details:not(.lines)').forEach(e => { e.open = true; })")
    browser.picture()  # draws a frame, in which pictures take their size
    browser.resize(browser.js("innerWidth"), browser.js("document.documentElement.scrollHeight"))
