// The presenter's view of a page: one section at a time, in large type. The key p, or the button,
// enters and leaves it.
//
//   PageDown, →, space        next: shows the next block of this section, opens a folded answer, or
//                             shows the next section
//   PageUp, ←, shift+space    back
//   Home, End                 first, last section
//   c                         shows or folds the code
//   Enter                     plays the picture on the screen, and gives it the focus
//   Escape                    leaves
//
// A clicker sends PageDown and PageUp. While a picture has the focus, the arrow keys and space
// belong to the picture. PageDown and PageUp take the focus away from it.
(() => {
  const page = document.documentElement;
  const sections = [...document.querySelectorAll("main > section")];
  const button = document.querySelector("button.present"), place = document.createElement("output");
  if (!button || !sections.length) return;
  // pixels above a block that has been scrolled to, and a little more: see scroll-margin-top in
  // page.css
  const MARGIN = 10;
  let at = 0, restore = 0;
  const presenting = () => page.classList.contains("presenting");
  const shown = element => element.checkVisibility();  // also false inside a folded answer
  place.className = "place";
  document.body.append(place);

  const show = (index, end = false) => {
    at = Math.max(0, Math.min(index, sections.length - 1));
    sections.forEach((section, i) => section.classList.toggle("now", i === at));
    place.textContent = `${at + 1} / ${sections.length}`;
    scrollTo(0, end ? page.scrollHeight : 0);
  };
  const codes = open => {
    for (const code of document.querySelectorAll("details.code")) code.open = open;
  };
  // the controls of the pictures become as large as the type
  const fitControls = () => page.style.setProperty("--zoom", Math.max(1, innerHeight / 720));
  const fitPictures = () => document.querySelectorAll("figure.p101").forEach(figure => {
    const svg = figure.querySelector("div")?.shadowRoot?.querySelector(".stage svg");
    const { width = 3, height = 2 } = svg?.viewBox.baseVal ?? {};
    figure.style.setProperty("--aspect", width / height);
    // a picture that would become too small to read keeps its own width, and scrolls
    const tooSmall = svg && innerHeight * width / height < .62 * width;
    figure.style.setProperty("--least", tooSmall ? `${width}px` : "0px");
  });
  const enter = () => {
    restore = scrollY;
    const begun = section => section.getBoundingClientRect().top < innerHeight / 10;
    const top = sections.findLastIndex(begun);
    page.classList.add("presenting");
    codes(false);
    fitControls();
    fitPictures();
    show(Math.max(top, 0));
  };
  const leave = () => {
    const section = sections[at];
    page.classList.remove("presenting");
    page.style.removeProperty("--zoom");
    codes(true);
    if (at) section.scrollIntoView(); else scrollTo(0, Math.min(restore, section.offsetHeight));
  };

  // The blocks of a section, in order: texts, code, outputs, and the summaries of folded answers.
  const BLOCKS = ".text_cell_render > *, details > summary, .input pre, "
    + ".output_area :is(figure, table, pre, p, div > img)";
  const blocks = () => [...sections[at].querySelectorAll(BLOCKS)].filter(shown);
  const onScreen = figure => {
    const { top, bottom } = figure.getBoundingClientRect();
    return (top + bottom) / 2 > 0 && (top + bottom) / 2 < innerHeight;
  };
  const picture = () => [...sections[at].querySelectorAll("figure.p101")]
    .filter(shown).find(onScreen)?.querySelector("div")?.shadowRoot;
  const play = () => {
    const button = picture()?.querySelector("[data-do=play]");
    button?.focus();
    button?.click();
  };
  const next = () => {
    const from = scrollY;
    const endsBelow = block => block.getBoundingClientRect().bottom > innerHeight + 2;
    const below = blocks().find(endsBelow);
    const closed = [...sections[at].querySelectorAll("details.answer:not([open])")].find(shown);
    const inSight = closed && !endsBelow(closed);
    if (inSight) {
      closed.open = true;
      fitPictures();
      const answer = closed.querySelector(".output_area");
      if (answer && answer.getBoundingClientRect().bottom > innerHeight) answer.scrollIntoView();
      return;
    }
    if (below && below.getBoundingClientRect().top > MARGIN) below.scrollIntoView();
    else if (below) scrollBy(0, innerHeight * .8);  // a block that is longer than the screen
    if (scrollY === from && at + 1 < sections.length) show(at + 1);
  };
  const back = () => {
    if (scrollY > 2) scrollBy(0, -innerHeight * .8);
    else if (at) show(at - 1, true);
  };

  const keys = {
    PageDown: next, ArrowRight: next, ArrowDown: next, PageUp: back, ArrowLeft: back, ArrowUp: back,
    Escape: leave, p: leave, Home: () => show(0), End: () => show(sections.length - 1),
    " ": event => (event.shiftKey ? back() : next()), Enter: play,
    c: () => codes(!document.querySelector("details.code")?.open),
  };
  addEventListener("keydown", event => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.target.matches("input, select, textarea, [contenteditable]")) return;
    if (!presenting()) { if (event.key === "p") enter(); return; }
    // these keys belong to the button, link or picture that has the focus
    if ((event.key === " " || event.key === "Enter") && event.target !== document.body) return;
    if (!(event.key in keys)) return;
    event.preventDefault();
    if (event.key.startsWith("Page")) document.activeElement.shadowRoot?.activeElement?.blur();
    keys[event.key](event);
  });
  addEventListener("resize", () => { if (presenting()) { fitControls(); fitPictures(); } });
  button.hidden = false;
  button.onclick = () => { button.blur(); enter(); };
  addEventListener("beforeprint", () => {
    const folded = document.querySelectorAll("details.answer, details.code");
    for (const part of folded) part.open = true;
  });
})();
