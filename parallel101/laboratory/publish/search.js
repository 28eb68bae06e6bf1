// The search box (search_index.py). The index is a script that is loaded when the box is first
// used. A query's words may be the beginnings of words, and have one wrong letter. What has the most
// of them is shown.
(() => {
  const form = document.querySelector("form.search"), box = form.querySelector("input");
  const list = form.querySelector("[role=listbox]"), said = form.querySelector("[role=status]");
  const MOST = 12;
  const COMMON = new Set(("a an and are at be can do does for from get happens has have how i if in is it its me much my " +
    "need of on or should so that the there this to too use using was what when where which who why will with you " +
    "your").split(" "));
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

  // whether one letter less, more or other, or two that are swapped, make one word of the other
  function nearly(one, other) {
    if (Math.abs(one.length - other.length) > 1) return false;
    let at = 0;
    while (at < one.length && one[at] === other[at]) at++;
    const [a, b] = [one.slice(at), other.slice(at)];
    return a.slice(1) === b.slice(1) || a.slice(1) === b || a === b.slice(1)
      || a[0] === b[1] && a[1] === b[0] && a.slice(2) === b.slice(2);
  }

  const merged = (maps, join) => {
    const all = new Map();
    for (const map of maps)
      for (const [entry, score] of map) all.set(entry, join(all.get(entry) ?? 0, score));
    return all;
  };
  const most = maps => merged(maps, Math.max);
  const everyOne = ([first, ...others]) => new Map([...first ?? []]
    .filter(([entry]) => others.every(found => found.has(entry)))
    .map(([entry, score]) => [entry, others.reduce((sum, of) => sum + of.get(entry), score)]));

  // entry → score, for these words of the index: rare words weigh more
  function weighed(some, factor) {
    const found = most(some.map(word => {
      const pairs = SEARCH_INDEX.words[word], of = new Map();
      for (let at = 0; at < pairs.length; at += 2) of.set(pairs[at], factor(word) * pairs[at + 1]);
      return of;
    }));
    const rare = Math.log(1 + SEARCH_INDEX.entries.length / Math.max(1, found.size));
    return new Map([...found].map(([entry, score]) => [entry, score * rare]));
  }

  // entry → score, for one word of the query: as it is or as a beginning, or as two words that are
  // written together (allreduce); else with one wrong letter
  function scores(asked) {
    const known = asked in SEARCH_INDEX.words;
    const cuts = [...asked].map((_, k) => [asked.slice(0, k), asked.slice(k)])
      .filter(parts => parts.every(part => part.length > 1 && part in SEARCH_INDEX.words))
      .map(parts => everyOne(parts.map(part => weighed([part], () => known ? 0.5 : 2))));
    const found = most([weighed(words.filter(word => word.startsWith(asked)),
      word => word === asked || word === asked + "s" ? 2 : 1), ...cuts]);
    return found.size || asked.length < 4 ? found
      : weighed(words.filter(word => nearly(word, asked)), () => 1);
  }

  // the words that count: "why does my program hang" is about "program hang"
  function wanted(query) {
    const all = [...new Set(split(query))];
    const counting = all.filter(word => !COMMON.has(word) && (word.length > 1 || word <= "9"));
    return counting.length ? counting : all;
  }

  // By word of the query, its entries and their scores. Another form of a term counts as its words.
  function scoresOfEach(asked) {
    const each = new Map(asked.map(word => [word, scores(word)]));
    for (const forms of SEARCH_INDEX.synonyms.map(of => of.map(wanted)))
      for (const form of forms)
        if (` ${asked.join(" ")} `.includes(` ${form.join(" ")} `))
          for (const other of forms.filter(of => of !== form)) {
            const found = [...everyOne(other.map(scores))];
            const share = new Map(found.map(([entry, score]) => [entry, score / form.length]));
            for (const word of form) each.set(word, most([each.get(word), share]));
          }
    return [...each.values()];
  }

  // The entries that have the most words of the query, the best first, and whether they have all.
  function find(query) {
    const asked = wanted(query), each = scoresOfEach(asked), counts = new Map();
    for (const found of each)
      for (const entry of found.keys()) counts.set(entry, (counts.get(entry) ?? 0) + 1);
    const had = Math.max(0, ...counts.values());
    const others = split(query).filter(word => COMMON.has(word) && word in SEARCH_INDEX.words);
    const all = merged([...each, ...others.map(word => weighed([word], () => 0.5))],
      (sum, score) => sum + score);
    const factor = ([kind, title]) => {
      const named = (kind === "Glossary" ? asked : split(query)).join("");
      return split(title).join("") === named ? 3 : split(title.split(".").pop()).join("") === named ? 2
        : kind === "Lesson" || kind === "Tool" ? 1.3 : 1;
    };
    const found = [...all].filter(([entry]) => counts.get(entry) === had)
      .map(([entry, score]) => [entry, score * factor(SEARCH_INDEX.entries[entry])])
      .sort(([a, x], [b, y]) => y - x || a - b)
      .map(([entry]) => SEARCH_INDEX.entries[entry]);
    return { found, whole: had === asked.length };
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
    const { found, whole } = find(box.value), asked = split(box.value).length > 0;
    choose(-1);
    list.replaceChildren(...found.slice(0, MOST).map(option));
    said.textContent = !asked ? "" : found.length === 0 ? "Nothing found"
      : (whole ? "" : "Nothing has all of these words. ")
      + (found.length > MOST ? `The first ${MOST} of ${found.length} results`
        : found.length === 1 ? "1 result" : `${found.length} results`);
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
