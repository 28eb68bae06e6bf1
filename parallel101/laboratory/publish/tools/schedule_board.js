/* What schedule_builder.js has decided, as the reader sees it: the board, the buttons, the score
   and the Python code; and what the mouse, a finger and the keys do. */

/* The page for new settings: rows and buttons, empty. */
function build() {
  for (const id of ["ranks", "microbatches", "stages"]) at(id).value = state[id];
  for (const [name, value] of Object.entries(state.costs)) at(`time-${name}`).value = value;
  at("second").hidden = chunks() === 1;
  const options = [["", "choose …"], ["empty", "empty"],
    ...published().map(({ name, title }) => [name, title])];
  at("from").replaceChildren(...options.map(([value, title]) => make("option", { value }, title)));
  const lanes = state.lists.map((_, rank) => {
    const stages = `${chunks() > 1 ? "stages" : "stage"} ${stagesOf(rank).join(", ")}`;
    const strip = make("div", { class: "strip", role: "listbox", tabindex: 0, "data-rank": rank,
      "aria-label": `Rank ${rank}, ${stages}` });
    const who = make("div", { class: "who" }, make("b", {}, `rank ${rank}`),
      make("small", {}, stages), make("small", { class: "peak" }));
    return make("div", { class: "lane" }, who, make("div", {}, strip,
      make("div", { class: "held", "aria-hidden": true })));
  });
  document.querySelector(".board").replaceChildren(...lanes, make("div", { class: "axis" }));
  document.querySelector(".next").replaceChildren(...state.lists.map((_, rank) =>
    make("div", { class: "lane" }, make("b", {}, `rank ${rank}`),
      ...stagesOf(rank).flatMap((stage) => Object.keys(KINDS).map((kind) =>
        make("button", { class: `kind ${kind}`, "data-rank": rank, "data-stage": stage,
          "data-kind": kind }))))));
  draw();
}

function draw() {
  const found = times(), all = published(), done = complete();
  const longest = Math.max(found.makespan, ...all.map(({ step }) => step));
  const least = Math.min(state.costs.F, state.costs.I, state.costs.W) / chunks();
  const room = document.querySelector(".scroll").clientWidth - 104;
  const unit = Math.min(90, Math.max(room / longest, 23 / least));
  state.lists.forEach((_, rank) => drawLane(rank, found, unit, longest, all));
  drawAxis(unit, longest);
  drawNext();
  drawScore(found, all, done);
  drawPython(done);
  const action = chosenAction();
  for (const id of ["earlier", "later", "remove"]) at(id).disabled = !action;
  at("split").disabled = !action?.includes("B");
  at("undo").disabled = !undone.length;
  if (changed) history.replaceState(null, "", address());
}

function drawLane(rank, found, unit, longest, all) {
  const strip = document.querySelector(`.strip[data-rank="${rank}"]`);
  const slots = found.slots.filter((slot) => slot.rank === rank);
  const items = slots.flatMap((slot) => {
    const { parts: [{ name, stage, kind, i }], start, end, free } = slot;
    const place = (from, to) => `left:${from * unit}px;width:${(to - from) * unit - 1}px`;
    const second = stage >= state.ranks ? " second" : "";
    const box = make("div", { role: "option", id: `a${name}`, class: `kind ${kind}${second}`,
      style: place(start, end), "aria-label": `${name}, ${described(slot)}` }, `${kind}${i}`);
    if (start - free < 1e-9) return [box];
    const words = waits(slot, found.slots);
    return [make("div", { role: "option", id: `w${name}`, class: free ? "bubble" : "ahead",
      style: place(free, start), "aria-label": words }), box];
  });
  items.forEach((item) => {
    item.title = item.getAttribute("aria-label");
    item.setAttribute("aria-selected", item.id === chosen?.id);
  });
  strip.replaceChildren(...items);
  strip.style.width = `${longest * unit}px`;
  if (chosen?.rank === rank) strip.setAttribute("aria-activedescendant", chosen.id);
  else strip.removeAttribute("aria-activedescendant");
  drawHeld(strip, slots, found.peaks[rank] / chunks(), unit, longest, all);
}

/* Memory in flight, as steps over the same time, with a dashed line at the most that 1F1B holds. */
function drawHeld(strip, slots, peak, unit, longest, all) {
  const events = slots.flatMap(({ parts: [{ kind }], start, end }) =>
    kind === "F" ? [[start, 1]] : kind === "I" ? [] : [[end, -1]])
    .sort((a, b) => a[0] - b[0] || a[1] - b[1]);
  const limit = all.find(({ name }) => name === "1f1b").held;
  const tall = 34, most = Math.max(limit, ...times().peaks.map((p) => p / chunks())) + 0.3;
  const y = (held) => tall - (tall * held) / most;
  let held = 0, path = `M0 ${tall}`;
  for (const [when, by] of events) {
    held += by / chunks();
    path += `H${when * unit}V${y(held)}`;
  }
  strip.nextSibling.innerHTML =
    `<svg width="${longest * unit}" height="${tall}"><path class="area" d="${path}V${tall}Z"/>` +
    `<path class="limit" d="M0 ${y(limit)}H${longest * unit}"/></svg>`;
  strip.closest(".lane").querySelector(".peak").textContent = `${text(peak, 1)} in flight`;
}

function drawAxis(unit, longest) {
  const step = [1, 2, 5, 10, 20, 50].find((s) => s * unit >= 38);
  const ticks = Array.from({ length: Math.floor(longest / step) + 1 }, (_, k) =>
    make("span", { style: `left:${k * step * unit}px` }, String(k * step)));
  const axis = make("div", { style: `width:${longest * unit}px` }, ...ticks);
  document.querySelector(".axis").replaceChildren(make("small", { class: "who" }, "time"), axis);
}

function drawNext() {
  for (const button of document.querySelectorAll(".next button")) {
    const { rank, stage, kind } = button.dataset, name = nextOf(Number(stage), kind);
    const why = name
      ? scheduleRules.obstacle(withInserted(Number(rank), name), placement()) : "all are placed";
    button.textContent = name ? (chunks() > 1 ? name : name.replace(/^\d+/, ""))
      : chunks() > 1 ? stage + kind : kind;
    button.classList.toggle("blocked", Boolean(why));
    button.title = why || `${KINDS[kind]} of stage ${stage}`;
    const what = `${name ?? stage + kind} on rank ${rank}`;
    button.setAttribute("aria-label", why ? `${what}: ${why}` : what);
  }
}

function drawScore(found, all, done) {
  const mine = { title: "Yours", ...score(found, chunks()) };
  const cells = ({ step, idle, rate, held }) =>
    [text(step), text(idle), `${(100 * rate).toFixed(1)} %`, text(held, 1)];
  const shown = done ? cells(mine) : ["–", "–", "–", text(mine.held, 1)];
  const row = (title, values, name = "") => make("tr", { class: name }, make("td", {}, title),
    ...values.map((value) => make("td", { class: "number" }, value)));
  document.querySelector(".score tbody").replaceChildren(
    row(done ? "Yours" : `Yours, ${progress()}`, shown, "yours"),
    ...all.map((one) => row(one.title, cells(one))));
  const gpipe = all.find(({ name }) => name === "gpipe");
  const usual = all.find(({ name }) => name === "1f1b");
  const idle = done && mine.idle <= gpipe.idle + 1e-9, zero = done && mine.rate < 1e-9;
  const goals = [
    [idle, `No more idle time than GPipe: ${text(gpipe.idle)}`],
    [idle && mine.held <= usual.held + 1e-9,
      `And 1F1B's memory: at most ${text(usual.held, 1)} microbatches in flight`],
    [zero, `Zero bubble: no idle time at all${all.some(({ rate }) => rate < 1e-9) ? ""
      : ". None of the published schedules below reaches it with these settings"}`]];
  document.querySelector(".goals").replaceChildren(...goals.map(([reached, words]) =>
    make("li", { class: reached ? "reached" : "" }, words,
      ...(reached ? [make("b", {}, " ✓ reached")] : []))));
}

/* A backward in two halves counts once. */
function progress() {
  const weights = state.lists.flat().map((name) => /[IW]/.test(name) ? 0.5 : 1);
  const placed = weights.reduce((sum, weight) => sum + weight, 0);
  return `${text(placed, 1)} of ${2 * state.microbatches * placement().length} placed`;
}

function drawPython(done) {
  const rows = state.lists.map((of, rank) => {
    const lines = [];
    for (let k = 0; k < of.length; k += 10)
      lines.push(`        ${of.slice(k, k + 10).map((name) => `"${name}",`).join(" ")}\n`);
    return of.length ? `    [  # rank ${rank}\n${lines.join("")}    ],\n` : "    [],\n";
  });
  const v = chunks(), { F, I, W, communication } = state.costs;
  const each = (name, value) => `${name}=${text(value, 4)}${v > 1 ? ` / ${v}` : ""}`;
  const costs = [each("forward", F), each("input_grad", I), each("weight_grad", W),
    `communication=${text(communication, 4)}`].join(", ");
  const end = done
    ? `schedule.check("nccl")\ntimes = schedule.time(\n    ${costs}\n)\n` +
      "print(times.makespan, times.bubble_rate, times.peak_activations)\n"
    : `# not complete: ${scheduleRules.check(state.lists) || progress()}\n`;
  document.querySelector(".python").textContent =
    `import parallel101 as p101\n\nschedule = p101.Schedule([\n${rows.join("")}])\n${end}`;
}

/* ---- what the reader does ---- */

function choose(rank, id) {
  chosen = { rank, id };
  draw();
  const item = document.getElementById(id);
  item.scrollIntoView({ block: "nearest", inline: "nearest" });
  const hint = id.startsWith("w") ? " The next action that you place on this rank goes here." : "";
  say(item.getAttribute("aria-label") + (hint || "."));
}

function onKey(event) {
  const strip = event.target.closest(".strip"), key = event.key.toUpperCase();
  const rank = Number(strip?.dataset.rank), items = [...strip?.children ?? []];
  if (!strip || event.altKey || (event.ctrlKey && key !== "Z") || event.metaKey) return;
  if (KINDS[key]) placeByKey(rank, key);
  else if (key === "ARROWLEFT" || key === "ARROWRIGHT") {
    const by = key === "ARROWLEFT" ? -1 : 1;
    if (event.shiftKey) shift(by);
    else if (items.length) {
      const now = items.findIndex(({ id }) => id === chosen?.id);
      const to = now < 0 ? (by < 0 ? items.length - 1 : 0) : now + by;
      choose(rank, items[Math.max(0, Math.min(to, items.length - 1))].id);
    }
  }
  else if (key === "ARROWUP" || key === "ARROWDOWN") changeRank(strip, key === "ARROWUP" ? -1 : 1);
  else if (key === "DELETE" || key === "BACKSPACE") remove();
  else if (key === "S") split();
  else if (key === "U" || key === "Z") undo();
  else return;
  event.preventDefault();
}

/* The row above or below, and its item that is nearest to the chosen one. */
function changeRank(strip, by) {
  const other = document.querySelector(`.strip[data-rank="${Number(strip.dataset.rank) + by}"]`);
  if (!other) return;
  const from = document.getElementById(chosen?.id)?.offsetLeft ?? 0;
  const far = ({ offsetLeft }) => Math.abs(offsetLeft - from);
  const nearest = [...other.children].sort((a, b) => far(a) - far(b))[0];
  if (nearest) choose(Number(other.dataset.rank), nearest.id);
  other.focus({ preventScroll: true });
}

/* Drag with the mouse, or with a finger once the action is chosen. */
function onPointer(event) {
  const item = event.target.closest("[id^=a][role=option]"), strip = event.target.closest(".strip");
  const drags = item && (event.pointerType === "mouse" || item.id === chosen?.id);
  if (!drags || event.button) return;
  const rank = Number(strip.dataset.rank), begin = event.clientX;
  event.preventDefault();
  strip.focus({ preventScroll: true });
  const moving = ({ clientX }) => { item.style.translate = `${clientX - begin}px`; };
  const end = ({ clientX, type }) => {
    removeEventListener("pointermove", moving);
    for (const name of ["pointerup", "pointercancel"]) removeEventListener(name, end);
    item.style.translate = "";
    choose(rank, item.id);
    if (type === "pointercancel" || Math.abs(clientX - begin) < 8) return;
    const others = [...strip.querySelectorAll("[id^=a]")].filter(({ id }) => id !== item.id);
    const middle = (box) => box.getBoundingClientRect().x + box.getBoundingClientRect().width / 2;
    move(rank, item.id.slice(1), others.filter((box) => middle(box) < clientX).length);
  };
  addEventListener("pointermove", moving);
  for (const name of ["pointerup", "pointercancel"]) addEventListener(name, end);
}

/* Other settings: what still fits stays. */
function onSetting({ target: { id, value } }) {
  if (!value) return;
  remember();
  chosen = null;
  if (id === "from") {
    if (value !== "empty") state.stages = GIVEN.chunks[value] ? "loop" : "one";
    state.lists = value === "empty" ? state.lists.map(() => []) : listsOf(value);
    say(value === "empty" ? "The board is empty." : `This is ${GIVEN.names[value]}. Change it.`);
  } else if (id === "microbatches") {
    state.microbatches = Number(value);
    const stays = (name) => Number(name.split(/[FBIW]/)[1]) < state.microbatches;
    state.lists = state.lists.map((of) => of.filter(stays));
  } else if (id.startsWith("time-")) {
    const field = at(id);
    if (field.checkValidity()) state.costs[id.slice(5)] = Number(value);
    else say(`Times are ${field.min} to ${field.max}, in steps of ${field.step}.`, true);
  } else {
    state[id] = id === "ranks" ? Number(value) : value;
    state.lists = Array.from({ length: state.ranks }, () => []);
    say("The board is empty. Undo brings the actions back.");
  }
  build();
}

function checkPasted(rules) {
  const lists = at("lists").value.trim().split("\n").map((line) =>
    line.split(",").map((cell) => cell.trim())
      .filter((cell) => cell && !/(UNSHARD|RESHARD|REDUCE_GRAD)$/.test(cell)));
  const name = rules === "nccl" ? "NCCL" : "gloo", why = scheduleRules.check(lists, rules);
  at("verdict").textContent = why ? `${why}.` : `These lists run under ${name}'s rules.`;
  at("verdict").classList.toggle("refused", Boolean(why));
}

const board = document.querySelector(".board");
board.addEventListener("pointerdown", onPointer);
board.addEventListener("click", ({ target }) => {
  const item = target.closest("[role=option]");
  if (item) choose(Number(item.closest(".strip").dataset.rank), item.id);
});
board.addEventListener("keydown", onKey);
document.querySelector(".next").addEventListener("click", ({ target: { dataset } }) => {
  if (dataset.kind) place(Number(dataset.rank), Number(dataset.stage), dataset.kind);
});
document.querySelector(".settings").addEventListener("change", onSetting);
document.querySelector(".settings").addEventListener("submit", (event) => event.preventDefault());
at("earlier").onclick = () => shift(-1);
at("later").onclick = () => shift(1);
at("split").onclick = split;
at("remove").onclick = remove;
at("undo").onclick = undo;
at("clear").onclick = () => change(state.lists.map(() => []), () => "The board is empty.");
at("copy-python").onclick = () => copy(document.querySelector(".python").textContent, "the Python");
at("copy-address").onclick = () => copy(location.href, "the address");
at("check-gloo").onclick = () => checkPasted("gloo");
at("check-nccl").onclick = () => checkPasted("nccl");
addEventListener("resize", draw);
addEventListener("hashchange", () => {
  const why = readAddress();
  build();
  if (why) say(why, true);
});

for (const part of document.querySelectorAll(".builder [hidden]")) part.hidden = false;
const refused = readAddress();
build();
say(refused || (state.lists.flat().length ? "This is the schedule of the address. Go on with it."
  : "Place the first action with the buttons below the board: F0 on rank 0."), Boolean(refused));
