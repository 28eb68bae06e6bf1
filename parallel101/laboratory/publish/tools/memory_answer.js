/* The answer as the reader sees it: whether the model fits, the bars, what takes the most, the
   changes that would make it fit, and the table; and what happens when a field is changed. */

const { PARTS } = GIVEN.constants;
const MOMENTS = { loss: "at the loss", backward: "in the backward pass",
  gradients: "while the last gradients are sent", optimizer: "in the optimizer's step" };
const AVERAGES = { adamw: "AdamW's two averages", momentum: "SGD's momentum", sgd: "" };
const MOST_ROWS = 8;
const count = (number) => number.toLocaleString("en-US");
const many = (number, word, ending = "s") =>
  `${count(number)} ${word}${number === 1 ? "" : ending}`;

/* 18944000 -> "18.9 MB", as decimal_bytes in record/units.py. */
function bytes(number) {
  for (const unit of ["B", "kB", "MB", "GB"]) {
    if (number < 999.5) return `${Number(number.toPrecision(3))} ${unit}`;
    number /= 1000;
  }
  return `${Number(number.toPrecision(3))} TB`;
}

/* 8030261248 -> "8.03 billion". */
function large(number) {
  const [by, word] = number < 999.5e6 ? [1e6, "million"] : [1e9, "billion"];
  return `${Number((number / by).toPrecision(3))} ${word}`;
}

/* ---- the answer ---- */

function answer() {
  const { shape, layout } = state, gpu = GIVEN.gpus[state.gpu];
  const why = memoryRules.whyNot(shape, layout);
  for (const part of document.querySelectorAll(".fits .found")) part.hidden = Boolean(why);
  at("totals").textContent = why ? "" : totals();
  if (why) return verdict(`Not possible: ${why}.`, true);
  const stages = memoryRules.stepMemory(shape, layout), fullest = fullestOf(stages);
  const peak = stages[fullest].total, free = gpu.memory - peak;
  verdict(free >= 0
    ? `It fits. The fullest GPU needs ${bytes(peak)} of ${bytes(gpu.memory)}.`
    : `It doesn't fit. The fullest GPU needs ${bytes(peak)} and has ${bytes(gpu.memory)}: `
      + `${bytes(-free)} too much.`, free < 0);
  drawBars(stages, gpu.memory);
  drawTable(stages);
  const cheapest = free < 0 ? drawChanges(gpu) : drawMore(gpu);
  at("most").textContent = `${most(stages, fullest)}${cheapest}`;
  at("optimizer-words").textContent = optimizerWords(stages[0]);
}

function verdict(words, refused) {
  at("verdict").textContent = words;
  at("verdict").classList.toggle("refused", refused);
}

function totals() {
  const { shape, layout } = state, batch = memoryRules.batchOf(layout);
  return `${large(memoryRules.parameters(shape))} parameters on `
    + `${many(memoryRules.gpus(layout), "GPU")}. A step has ${many(batch, "sample")}, or `
    + `${count(batch * shape.time)} tokens.`;
}

const fullestOf = (stages) => stages.reduce((best, { total }, k) =>
  total > stages[best].total ? k : best, 0);
const nameOf = (position) => state.layout.pp === 1 ? "every GPU"
  : `${state.layout.chunks > 1 ? "pp rank" : "stage"} ${position}`;

/* What is in memory at the peak; together it is the total. Gradients that aren't complete yet are
   as many as there is room for. */
function atPeak(stage) {
  const inStep = stage.moment === "loss" || stage.moment === "backward";
  const found = {};
  let rest = stage.total;
  for (const name of ["weights", "optimizer", "activations", "gradients"]) {
    found[name] = name === "activations" && !inStep ? 0 : Math.min(stage[name], rest);
    rest -= found[name];
  }
  for (const name of ["logits", "gradient_copy"]) {
    found[name] = Math.min(stage[name], rest);
    rest -= found[name];
  }
  found.buffers = rest;
  return Object.fromEntries(Object.keys(PARTS).map((name) => [name, found[name]]));
}

/* ---- the bars ---- */

/* The positions along pp that are shown: all, or the first ones, the fullest and the last. */
function shown(stages) {
  if (stages.length <= MOST_ROWS) return [...stages.keys()];
  const all = [0, 1, 2, fullestOf(stages), stages.length - 2, stages.length - 1];
  return [...new Set(all)].sort((a, b) => a - b);
}

function drawBars(stages, have) {
  const scale = Math.max(have, ...stages.map(({ total }) => total));
  const percent = (number) => `${(100 * number) / scale}%`;
  const limit = () => make("i", { class: "limit", style: `left:${percent(have)}` });
  const rows = shown(stages).flatMap((position, k, all) => {
    const stage = stages[position], parts = Object.entries(atPeak(stage));
    const words = parts.filter(([, number]) => number)
      .map(([name, number]) => `${PARTS[name]} ${bytes(number)}`).join(", ");
    const bar = make("div", { class: "bar", role: "img",
      "aria-label": `${nameOf(position)}: ${bytes(stage.total)} at its peak: ${words}` },
    ...parts.map(([name, number]) => make("span", { class: `part ${name}`,
      style: `width:${percent(number)}`, title: `${PARTS[name]}: ${bytes(number)}`,
      "data-bytes": bytes(number) })), limit());
    const row = make("div", { class: stage.total > have ? "row over" : "row" },
      make("span", { class: "who" }, nameOf(position)), bar, make("b", {}, bytes(stage.total)));
    const before = all[k - 1] ?? -1;
    return position === before + 1 ? [row] : [make("p", { class: "between" },
      between(stages, before + 1, position - 1)), row];
  });
  const side = have > 0.4 * scale ? `right:${percent(scale - have)}` : `left:${percent(have)}`;
  const head = make("div", { class: "row" }, make("span"), make("div", { class: "capacity" },
    make("span", { style: side },
      `${bytes(have)}, ${/^[AH]/.test(state.gpu) ? "an" : "a"} ${state.gpu}`)), make("span"));
  document.querySelector(".bars").replaceChildren(head, ...rows);
  document.querySelectorAll(".bars .part").forEach(label);
}

/* The bytes of a part inside of it, if there is room beside the line of the GPU's memory. */
function label(part) {
  const box = part.getBoundingClientRect();
  const line = part.parentElement.lastChild.getBoundingClientRect().x;
  const before = Math.min(box.right, line) - box.x, after = box.right - Math.max(box.x, line);
  const crossed = before > 0 && after > 0;
  if ((crossed ? Math.max(before, after) : box.width) < 7 * part.dataset.bytes.length + 8) return;
  part.textContent = part.dataset.bytes;
  if (crossed) part.style[before > after ? "paddingRight" : "paddingLeft"] =
    `${before > after ? after : before}px`;
}

function between(stages, from, to) {
  const all = stages.slice(from, to + 1).map(({ total }) => total);
  const [low, high] = [bytes(Math.min(...all)), bytes(Math.max(...all))];
  const where = from === to ? nameOf(from) : nameOf(from).replace(/ /, "s ") + ` to ${to}`;
  return `${where}: ${low === high ? low : `${low} to ${high}`}`;
}

/* ---- words ---- */

function most(stages, fullest) {
  const stage = stages[fullest], parts = Object.entries(atPeak(stage));
  const [name, number] = parts.reduce((a, b) => b[1] > a[1] ? b : a);
  const share = Math.round((100 * number) / stage.total);
  const where = state.layout.pp === 1 ? "" : ` on ${nameOf(fullest)}, where the peak is highest`;
  const verb = /s$/.test(PARTS[name]) ? "take" : "takes", title = PARTS[name];
  return `${title[0].toUpperCase()}${title.slice(1)} ${verb} the most${where}: ${bytes(number)}, `
    + `${share} % of the peak, which comes ${MOMENTS[stage.moment]}. ${because(name, stage)}`;
}

function optimizerWords({ optimizer, owned }) {
  return `${optimizer / owned} bytes a parameter`;
}

/* How these bytes come about. */
function because(name, stage) {
  const { layout } = state, here = layout.zero_stage === 3 ? stage.owned : stage.parameters;
  const each = (number, bytesEach) => `${large(number)} × ${bytesEach} bytes`;
  if (name === "weights")
    return `They are ${each(here, stage.weights / here)}.`;
  if (name === "optimizer")
    return `It is ${each(stage.owned, stage.optimizer / stage.owned)}: `
      + `${[AVERAGES[layout.optimizer], layout.precision.endsWith("mixed")
        ? "the fp32 master weights" : ""].filter(Boolean).join(" and ")}.`;
  if (name === "gradients") {
    const owned = layout.zero_stage >= 2 ? stage.owned : stage.parameters;
    return `They are ${each(owned, stage.gradients / owned)}.`;
  }
  if (name === "activations") {
    const { forwards } = stage, all = many(layout.microbatches, "microbatch", "es");
    return layout.chunks > 1
      ? `${count(forwards)} forwards of one of its stages wait for their backward then.`
      : layout.microbatches === 1 ? "The step has one microbatch."
        : `${count(forwards)} of ${all} ${forwards === 1 ? "waits" : "wait"} for backward then.`;
  }
  if (name === "logits")
    return "They are in 32 bits, and so are their gradients.";
  if (name === "gradient_copy")
    return stage.moment === "optimizer"
      ? "The optimizer is given them in 32 bits, beside those in 16."
      : "This trainer adds up microbatches beside the arrays in which it sends gradients.";
  return `They are ${buffersOf(stage.moment)}.`;
}

/* What is needed only for a moment, at that moment. */
function buffersOf(moment) {
  const { recompute, zero_stage: zero } = state.layout;
  if (moment === "loss") return "gradients of the output layer, and messages";
  if (moment === "gradients") return "gradients on their way to other GPUs";
  if (moment === "optimizer") return "what the update needs besides its gradients";
  return "what the backward pass of one layer needs"
    + (recompute === "none" ? "" : ", which computes activations again")
    + (zero === 3 ? ", with the gathered weights of two layers" : "");
}

/* ---- changes ---- */

const CHANGED = {
  zero_stage: (value) => `ZeRO stage ${value}`,
  recompute: (value) => value === "none" ? "no recomputation" : `${value} recomputation`,
  sequence_parallel: (value) => value ? "sequence parallel" : "no sequence parallel",
  gradient_dtype: () => "gradients in 16 bits",
  microbatch: (value) => `microbatches of ${many(value, "sample")}`,
  schedule: (value) => `schedule ${value}`,
};

/* What differs from the settings: "dp 2 instead of 8, tp 4 instead of 1". */
function difference({ shape, layout: after }) {
  const before = state.layout;
  const keys = LAYOUT.filter((key) => before[key] !== after[key]
    && !["microbatches", "chunks"].includes(key)
    && !(key === "sequence_parallel" && after.tp === 1) && !(key === "schedule" && after.pp === 1));
  const words = keys.map((key) => CHANGED[key]?.(after[key])
    ?? `${key} ${after[key]} instead of ${before[key]}`);
  if (shape.attention !== state.shape.attention) words.unshift(`${shape.attention} attention`);
  return { key: `${keys},${shape.attention}`, words: words.join(", ") };
}

/* The cheapest changes that make it fit. Returns a sentence on the first one. */
function drawChanges(gpu) {
  const { shape, layout } = state, have = memoryRules.gpus(layout);
  const all = memoryChanges.fitting(shape, layout, gpu);
  const now = memoryChanges.stepSeconds(shape, layout, gpu);
  const kinds = new Map();  // of each kind of change the cheapest
  for (const found of all) {
    const { key, words } = difference(found);
    const where = found.gpus > have ? `, on ${count(found.gpus)} GPUs` : "";
    if (!kinds.has(key)) kinds.set(key, { ...found, words: words + where });
  }
  const best = [...kinds.values()], same = best.filter((found) => found.gpus <= have);
  // on more GPUs, the best with one change, with two, and with more
  const more = best.filter((found, k) => found.gpus > have
    && best.findIndex((other) => other.gpus > have && other.several === found.several) === k);
  const peak = memoryChanges.peakOf(shape, layout);
  const others = Object.entries(GIVEN.gpus).filter(([, { memory }]) => memory >= peak).slice(0, 1);
  at("changes-title").textContent = "What would make it fit";
  document.querySelector(".changes").replaceChildren(
    ...[...same.slice(0, 4), ...more.slice(0, same.length ? 1 : 3)].map((found) =>
      entry(found, now)),
    ...others.map(([name, { memory }]) => ofGpu(name, memory)));
  at("changes-note").textContent = notes(same.length ? same : more, have, others.length);
  const [first] = [...same, ...more];
  return first ? ` The cheapest way to make it fit: ${first.words}. It brings the peak to `
    + `${bytes(first.peak)}.` : "";
}

function notes(best, have, others) {
  if (!best.length)
    return others ? "No other layout that this page tries makes it fit on these GPUs."
      : "Nothing that this page tries makes it fit: choose a smaller model, shorter samples or a "
        + "larger batch.";
  const few = best[0].gpus > have, several = Math.min(...best.map((found) => found.several));
  const words = few ? `${many(have, "GPU")} ${have === 1 ? "is" : "are"} too few. `
    : ["", "No single change is enough. ", "No two changes are enough. "][several - 1];
  return `${words}The batch stays the same. The cheapest change is first: it needs `
    + "the fewest GPUs, and of those changes its step is the shortest. Times are estimates from "
    + "the arithmetic, the messages and the optimizer's update, all at the GPU's peak rates.";
}

function entry(found, now) {
  const percent = Math.round(100 * (found.seconds / now - 1));
  const time = percent === 0 ? "as long as now" : percent > 0 ? `about ${percent} % longer`
    : `about ${-percent} % less time`;
  const button = make("button", { type: "button" }, found.words);
  button.onclick = () => apply(() => {
    Object.assign(state, { shape: { ...found.shape }, layout: { ...found.layout } });
  });
  return make("li", {}, button, ` ${bytes(found.peak)}; the step takes ${time}`);
}

function ofGpu(name, memory) {
  const button = make("button", { type: "button" }, `${name} instead of ${state.gpu}`);
  button.onclick = () => apply(() => { state.gpu = name; });
  return make("li", {}, button, ` ${bytes(memory)} on each GPU`);
}

/* A change of the list; the browser's Back takes it back. */
function apply(change) {
  history.pushState(null, "", location.href);
  change();
  changed = true;
  show();
  at("verdict").tabIndex = -1;  // the button is gone, so the focus goes to what it has changed
  at("verdict").focus();
  at("verdict").onblur = () => at("verdict").removeAttribute("tabindex");
}

/* The largest number that fits when it is doubled again and again. */
function mostThatFits(value, fits) {
  let found = value;
  while (found < 2 ** 24 && fits(2 * found)) found *= 2;
  return found;
}

function drawMore({ memory }) {
  const { shape, layout } = state, words = [];
  const microbatch = mostThatFits(layout.microbatch, (value) =>
    memoryRules.fits(shape, { ...layout, microbatch: value }, memory));
  const time = mostThatFits(shape.time, (value) =>
    memoryRules.fits({ ...shape, time: value }, layout, memory));
  if (microbatch > layout.microbatch) words.push(`microbatches of ${count(microbatch)} samples`);
  if (time > shape.time) words.push(`samples of ${count(time)} tokens`);
  at("changes-title").textContent = "How much more would fit";
  document.querySelector(".changes").replaceChildren();
  at("changes-note").textContent = words.length
    ? `With the other settings as they are: ${words.join(", or ")}.`
    : "Neither microbatches twice as large nor samples twice as long would fit.";
  return "";
}

/* ---- the table ---- */

function drawTable(stages) {
  const rows = shown(stages).map((position) => make("tr", {},
    make("th", { scope: "row" }, nameOf(position)),
    ...[...Object.keys(PARTS), "total"].map((name) =>
      make("td", { class: "number" }, bytes(stages[position][name])))));
  document.querySelector(".stages tbody").replaceChildren(...rows);
}

/* ---- what the reader does ---- */

const form = document.querySelector(".fits .settings");
form.addEventListener("change", onSetting);
form.addEventListener("submit", (event) => event.preventDefault());
at("copy-python").onclick = () => copy(python(), "the Python");
at("copy-address").onclick = () => {
  history.replaceState(null, "", address());
  copy(location.href, "the address");
};
addEventListener("resize", answer);
addEventListener("hashchange", openAddress);

function openAddress() {
  const why = readAddress();
  show();
  if (why) verdict(why, true);
}

for (const part of document.querySelectorAll(".fits [hidden]")) part.hidden = false;
openAddress();
