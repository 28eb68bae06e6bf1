// The presenter's view of a page: one section at a time, in large type, without its running text.
// The key p, or the button, enters and leaves it. The list KEYS below is what the key ? shows.
//
// A clicker sends PageDown and PageUp. While a picture has the focus, the arrow keys and space
// belong to the picture. PageDown and PageUp take the focus away from it.
//
// The key n opens a second window with the section's text: its paragraphs, its answers, and the
// cells with the tag `notes`, which appear nowhere else.
(() => {
  const KEYS = [
    ["PageDown, →, space", "next: play the picture, scroll, open the answer, or the next section"],
    ["PageUp, ←, shift+space", "back"],
    ["Home, End", "first section, last section"],
    ["Enter", "play or pause the picture on the screen, and give it the focus"],
    ["c", "show or fold the code"],
    ["t", "show or hide the text of the section"],
    ["n", "notes in a window of their own, for a second screen"],
    ["r", "set the timer to 0:00"],
    ["?", "show or hide these keys"],
    ["p", "begin to present, or leave"],
    ["Escape", "leave"],
  ];
  const page = document.documentElement;
  const sections = [...document.querySelectorAll("main > section")];
  const button = document.querySelector("button.present");
  if (!button || !sections.length) return;
  const make = (tag, kind, text = "") =>
    Object.assign(document.createElement(tag), { className: kind, textContent: text });
  // pixels above a block that has been scrolled to, and a little more: see scroll-margin-top in
  // page.css
  const MARGIN = 10;
  let at = 0, restore = 0, begun = 0, notes = null;
  const presenting = () => page.classList.contains("presenting");
  const shown = element => element.checkVisibility();  // also false inside a folded answer

  const place = make("output", "place"), timer = make("time", "timer");
  const help = make("aside", "keys"), list = make("dl", "");
  help.hidden = true;
  help.setAttribute("aria-label", "Keys");
  for (const [key, does] of KEYS) list.append(make("dt", "", key), make("dd", "", does));
  help.append(list);
  document.body.append(place, timer, help);

  // a section that has a title page or something to look at does without its paragraphs, which are
  // in the notes
  const LOOK = "h1, blockquote, figure, table, img, .output_area, math[display=block], "
    + ".text_cell_render > :is(ul, ol)";
  for (const section of sections) section.classList.toggle("brief", !!section.querySelector(LOOK));

  const show = (index, end = false) => {
    at = Math.max(0, Math.min(index, sections.length - 1));
    sections.forEach((section, i) => section.classList.toggle("now", i === at));
    place.textContent = `${at + 1} / ${sections.length}`;
    scrollTo(0, end ? page.scrollHeight : 0);
    writeNotes();
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
    const above = section => section.getBoundingClientRect().top < innerHeight / 10;
    const top = sections.findLastIndex(above);
    page.classList.add("presenting");
    begun ||= Date.now();
    codes(false);
    fitControls();
    fitPictures();
    show(Math.max(top, 0));
    tick();
  };
  const leave = () => {
    if (!help.hidden) { help.hidden = true; return; }
    const section = sections[at];
    page.classList.remove("presenting", "with-text");
    page.style.removeProperty("--zoom");
    codes(true);
    if (at) section.scrollIntoView(); else scrollTo(0, Math.min(restore, section.offsetHeight));
  };

  // ---- the timer, and the notes on a second screen
  const tick = () => {
    if (!presenting()) return;
    const seconds = Math.floor((Date.now() - begun) / 1000);
    timer.textContent = `${Math.floor(seconds / 60)}:${String(seconds % 60).padStart(2, "0")}`;
    const line = notes?.document.querySelector("header");
    if (line) line.textContent = `${place.textContent} · ${timer.textContent}`;
  };
  setInterval(tick, 1000);
  const titleOf = section => section?.querySelector("h1, h2, h3")?.textContent ?? "";
  const writeNotes = () => {
    if (!notes || notes.closed) return;
    const main = make("main", ""), after = titleOf(sections[at + 1]);
    const texts = [...sections[at].querySelectorAll(".text_cell_render")];
    const own = text => text.closest(".celltag_notes");
    for (const text of [...texts.filter(own), ...texts.filter(text => !own(text))]) {
      main.append(text.cloneNode(true));
    }
    for (const folded of main.querySelectorAll("details")) folded.open = true;
    main.append(make("footer", "", after ? `Next: ${after}` : "The last section"));
    notes.document.body.replaceChildren(make("header", ""), main);
    notes.scrollTo(0, 0);
    tick();
  };
  const openNotes = () => {
    notes = open("", "parallel101-notes", "width=720,height=720");
    if (!notes) return;  // the browser allows no second window
    notes.document.title = `Notes: ${document.title}`;
    notes.document.head.replaceChildren(document.querySelector("style").cloneNode(true));
    notes.document.documentElement.className = "notes";
    notes.onkeydown = press;  // the keys work in both windows
    writeNotes();
  };

  // The blocks of a section, in order: texts, code, outputs, and the summaries of folded answers.
  const BLOCKS = ".text_cell_render > *, details > summary, .input pre, "
    + ".output_area :is(figure, table, pre, p, div > img)";
  const blocks = () => [...sections[at].querySelectorAll(BLOCKS)].filter(shown);
  const onScreen = figure => {
    const { top, bottom } = figure.getBoundingClientRect();
    return (top + bottom) / 2 > 0 && top < innerHeight - 2 * MARGIN;
  };
  const players = () => [...sections[at].querySelectorAll("figure.p101")]
    .filter(figure => shown(figure) && onScreen(figure))
    .map(figure => figure.querySelector("div")?.shadowRoot?.querySelector(".player:not(.still)"))
    .filter(Boolean);
  const play = () => {
    const button = players()[0]?.querySelector("[data-do=play]");
    button?.focus();
    button?.click();
  };
  // Whether a picture on the screen had to be played, or to end, before the page goes on.
  const playFirst = () => {
    const figureOf = player => player.getRootNode().host.parentElement;
    const left = player => player.querySelector("input").max - figureOf(player).dataset.time;
    const player = players().find(player => left(player) > .01);
    if (!player) return false;
    const from = scrollY, figure = figureOf(player);
    if (figure.getBoundingClientRect().bottom > innerHeight + 2) figure.scrollIntoView();
    if (scrollY !== from) return true;  // first all of it must be in sight
    const slider = player.querySelector("input");
    const button = player.querySelector("[data-do=play]");
    if (button.ariaLabel === "Pause") {
      slider.value = slider.max;
      slider.dispatchEvent(new Event("input"));
    } else button.click();
    return true;
  };
  const next = () => {
    if (playFirst()) return;
    const from = scrollY;
    const below = blocks().find(block => block.getBoundingClientRect().bottom > innerHeight + 2);
    if (below && below.getBoundingClientRect().top > MARGIN) below.scrollIntoView();
    else if (below) scrollBy(0, innerHeight * .8);  // a block that is longer than the screen
    if (scrollY !== from) return;
    const closed = [...sections[at].querySelectorAll("details.answer:not([open])")].find(shown);
    if (!closed) { if (at + 1 < sections.length) show(at + 1); return; }
    closed.open = true;
    fitPictures();
    const answer = closed.querySelector(".output_area");
    if (answer && answer.getBoundingClientRect().bottom > innerHeight) answer.scrollIntoView();
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
    t: () => page.classList.toggle("with-text"),
    n: openNotes,
    r: () => { begun = Date.now(); tick(); },
  };
  const press = event => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.target.matches("input, select, textarea, [contenteditable]")) return;
    if (event.key === "?") { help.hidden = !help.hidden; return; }
    if (!presenting()) {
      if (event.key === "p") enter();
      if (event.key === "Escape") help.hidden = true;
      return;
    }
    // these keys belong to the button, link or picture that has the focus
    const free = event.target === event.target.ownerDocument.body;
    if ((event.key === " " || event.key === "Enter") && !free) return;
    if (!(event.key in keys)) return;
    event.preventDefault();
    if (event.key.startsWith("Page")) document.activeElement.shadowRoot?.activeElement?.blur();
    keys[event.key](event);
  };
  addEventListener("keydown", press);
  addEventListener("resize", () => { if (presenting()) { fitControls(); fitPictures(); } });
  button.hidden = false;
  button.onclick = () => { button.blur(); enter(); };
})();
