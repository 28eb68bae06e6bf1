// The search box (search_index.py). The index is a script that is loaded when the box is first
// used. A query's words may be the beginnings of words; an entry must have all of them.
(() => {
  const form = document.querySelector("form.search"), box = form.querySelector("input");
  const list = form.querySelector("[role=listbox]"), said = form.querySelector("[role=status]");
  const MOST = 12;
  let words = null, chosen = -1;

  function load() {
    if (form.dataset.asked) return;
    form.dataset.asked = "yes";
    const script = document.createElement("script");
    script.src = form.dataset.index;
    script.onload = () => {
      words = Object.keys(SEARCH_INDEX.words);
      form.dataset.asked = "loaded";
      show();
    };
    script.onerror = () => { said.textContent = `${form.dataset.index} is missing beside this page.`; };
    document.head.append(script);
  }

  const split = text => text.normalize("NFKD").replace(/[\u0300-\u036f]/g, "").toLowerCase()
    .match(/[a-z0-9]+/g) ?? [];

  // entry → score, for one word of the query: rare words weigh more, and whole words twice as much
  function scores(asked) {
    const found = new Map();
    let low = 0, high = words.length;
    while (low < high) {  // the first word that doesn't come before `asked`
      const middle = (low + high) >> 1;
      if (words[middle] < asked) low = middle + 1; else high = middle;
    }
    for (; low < words.length && words[low].startsWith(asked); low++) {
      const pairs = SEARCH_INDEX.words[words[low]], whole = words[low] === asked ? 2 : 1;
      for (let at = 0; at < pairs.length; at += 2)
        found.set(pairs[at], Math.max(found.get(pairs[at]) ?? 0, whole * pairs[at + 1]));
    }
    const rare = Math.log(1 + SEARCH_INDEX.entries.length / Math.max(1, found.size));
    for (const [entry, score] of found) found.set(entry, score * rare);
    return found;
  }

  function find(query) {
    const asked = split(query).filter((word, _, all) => word.length > 1 || all.length === 1);
    const [first, ...others] = [...new Set(asked)].map(scores);
    const title = split(query).join(" ");
    return [...first ?? []]
      .filter(([entry]) => others.every(found => found.has(entry)))
      .map(([entry, score]) => {
        const all = others.reduce((sum, found) => sum + found.get(entry), score);
        return [entry, split(SEARCH_INDEX.entries[entry][1]).join(" ") === title ? 3 * all : all];
      })
      .sort(([a, x], [b, y]) => y - x || a - b)
      .map(([entry]) => SEARCH_INDEX.entries[entry]);
  }

  const make = (name, text) => Object.assign(document.createElement(name), { textContent: text });

  function option([kind, title, place, address, text], number) {
    const link = make("a", "");
    link.append(make("b", title), ` ${[kind, place].filter(Boolean).join(" · ")} `,
      make("br", ""), make("small", text));
    link.href = form.dataset.root + address;
    link.id = `found-${number}`;
    link.tabIndex = -1;
    link.role = "option";
    link.ariaSelected = "false";
    return link;
  }

  function open(shown) {
    list.hidden = !shown;
    box.ariaExpanded = String(shown);
    if (!shown) choose(-1);
  }

  function choose(number) {
    list.children[chosen]?.setAttribute("aria-selected", "false");
    chosen = number;
    list.children[chosen]?.setAttribute("aria-selected", "true");
    list.children[chosen]?.scrollIntoView({ block: "nearest" });
    if (chosen < 0) box.removeAttribute("aria-activedescendant");
    else box.setAttribute("aria-activedescendant", `found-${chosen}`);
  }

  function show() {
    if (!words) return load();
    const found = find(box.value), asked = split(box.value).length > 0;
    choose(-1);
    list.replaceChildren(...found.slice(0, MOST).map(option));
    said.textContent = !asked ? "" : found.length === 0 ? "Nothing found"
      : found.length > MOST ? `The first ${MOST} of ${found.length} results`
      : found.length === 1 ? "1 result" : `${found.length} results`;
    open(found.length > 0);
  }

  box.addEventListener("focus", load);
  box.addEventListener("input", show);
  box.addEventListener("keydown", event => {
    const count = list.hidden ? 0 : list.children.length;
    if (event.key === "ArrowDown" && !count) show();
    else if (event.key === "ArrowDown") choose((chosen + 1) % count);
    else if (event.key === "ArrowUp" && count) choose((Math.max(chosen, 0) + count - 1) % count);
    else if (event.key === "Escape" && count) open(false);
    else return;
    event.preventDefault();
  });
  form.addEventListener("submit", event => {
    event.preventDefault();
    if (!list.hidden) list.children[Math.max(chosen, 0)].click();
  });
  form.addEventListener("focusout", event => {
    if (!form.contains(event.relatedTarget)) open(false);
  });
  form.hidden = false;
})();
