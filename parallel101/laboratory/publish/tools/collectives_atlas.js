/* The atlas of collectives. GIVEN has the facts of all runs, from Python. The pictures of an
   algorithm are in a script, which is added when it is chosen; `mount` (player.js) plays them. */
"use strict";
const { operations, networks, names, what, facts, start, sizes, css } = GIVEN;
const MENUS = ["operation", "algorithm", "beside", "ranks", "network"];
const state = { ...start };
let turn = 0;  // of the last choice: an older one that has loaded late isn't shown
let mounted = new AbortController();  // ends when other pictures take the place

const capital = (words) => words[0].toUpperCase() + words.slice(1);
const steps = (count) => `${count} step${count === 1 ? "" : "s"}`;

/* ---- the choice ---- */

const key = ({ ranks, network } = state) => `${ranks},${network}`;
const factsOf = (algorithm, choice = state) =>
  facts[choice.operation]?.[algorithm]?.[key(choice)];
const shown = () => [state.algorithm, state.beside].filter(Boolean);
const anyRun = (ranks, network) =>
  Object.values(facts[state.operation]).some((runs) => runs[`${ranks},${network}`]);

/* After a change: the nearest choice that has been recorded, and words if something else moved. */
function settle() {
  const words = [];
  if (!anyRun(state.ranks, state.network)) {
    words.push(`${networks[state.network]} isn't recorded with ${state.ranks} ranks, so the ` +
      "network is now a switch.");
    state.network = "switch";
  }
  const all = Object.keys(facts[state.operation]).filter((name) => factsOf(name));
  if (!all.includes(state.algorithm)) {
    const gone = facts[state.operation][state.algorithm] && capital(names[state.algorithm]);
    state.algorithm = all.find((name) => name !== state.beside) ?? all[0];
    if (gone) words.push(`${gone} needs a grid of two axes, which ${state.ranks} ranks don't ` +
      `have. ${capital(names[state.algorithm])} is shown instead.`);
  }
  if (!all.includes(state.beside)) {
    if (state.beside && facts[state.operation][state.beside])
      words.push(`${capital(names[state.beside])} needs a grid of two axes, so it isn't shown.`);
    state.beside = "";
  }
  if (state.beside === state.algorithm) state.beside = "";
  return words.join(" ");
}

function option(value, label, disabled = false) {
  const made = make("option", { value }, label);
  made.disabled = disabled;
  return made;
}

function fillMenus() {
  const all = Object.keys(facts[state.operation]).map((name) =>
    option(name, names[name] + (factsOf(name) ? "" : " (needs a grid)"), !factsOf(name)));
  const others = all.filter(({ value }) => value !== state.algorithm);
  at("algorithm").replaceChildren(...all);
  at("beside").replaceChildren(option("", "nothing"), ...others.map((o) => o.cloneNode(true)));
  for (const one of at("ranks").options)
    one.textContent = one.value + (anyRun(one.value, state.network) ? "" : " (on a switch)");
  for (const one of at("network").options) one.disabled = !anyRun(state.ranks, one.value);
  for (const name of MENUS) at(name).value = state[name];
}

function address(choice = state) {
  return "#" + MENUS.map((name) => `${name}=${choice[name]}`).join("&");
}

/* Take the choice of the address; what it lacks stays. Words if it can't be used. */
function readAddress() {
  const given = new URLSearchParams(location.hash.slice(1)), wanted = { ...state };
  for (const name of MENUS) if (given.has(name)) wanted[name] = given.get(name);
  if (given.has("algorithm") && !given.has("beside")) wanted.beside = "";
  const known = facts[wanted.operation]?.[wanted.algorithm] && networks[wanted.network]
    && [...at("ranks").options].some(({ value }) => value === String(wanted.ranks));
  if (!known) return "The address has a choice that this page doesn't know.";
  Object.assign(state, wanted, { ranks: Number(wanted.ranks) });
  return settle();
}

/* ---- the pictures of an algorithm ---- */

const packed = {}, loading = {};
function atlasRecord(name, text) { packed[name] = text; }

function load(name) {
  return loading[name] ??= new Promise((done, failed) => {
    const script = make("script", { src: `atlas/${name}.js` });
    script.onload = () => unpack(packed[name]).then(done, failed);
    script.onerror = () => {
      delete loading[name];
      failed(new Error(`This page needs the file atlas/${name}.js beside it, which is missing.`));
    };
    document.head.append(script);
  });
}

async function unpack(text) {
  const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return JSON.parse(await new Response(stream).text());
}

function figureOf({ elements, runs }) {
  const { svg, alt, setup } = runs[key()];
  const bytes = new TextEncoder().encode(svg.map((number) => elements[number]).join(""));
  const letters = Array.from(bytes, (byte) => String.fromCharCode(byte)).join("");
  const image = make("img", { src: `data:image/svg+xml;base64,${btoa(letters)}`, alt });
  const figure = make("figure", { class: "p101", "aria-label": alt },
    make("picture", {}, image));
  return [figure, { ...setup, css }];
}

/* ---- what is shown ---- */

function article(algorithm) {
  const of = factsOf(algorithm), title = capital(names[algorithm]);
  const rows = [["Steps", of[0]], [`Time, ${sizes[0]}`, humanSeconds(of[3])],
    [`Time, ${sizes[1]}`, humanSeconds(of[4])], ["Busiest rank sends", humanBytes(of[1])],
    ["All ranks send", humanBytes(of[2])]];
  return make("article", { "aria-label": title, "data-algorithm": algorithm },
    make("h2", {}, title), make("p", { class: "what" }, what[state.operation][algorithm]),
    make("dl", { class: "facts" }, ...rows.map(([name, value]) =>
      make("div", {}, make("dt", {}, name), make("dd", {}, String(value))))));
}

async function show(words = "") {
  const now = ++turn, algorithms = shown();
  fillMenus();
  fillTable();
  at("said").textContent = `${words} ${comparison()}`.trim();
  let loaded;
  try {
    loaded = await Promise.all(algorithms.map((name) => load(`${state.operation}.${name}`)));
  } catch (error) {
    if (now === turn) at("said").textContent = error.message;
    return;
  }
  if (now !== turn) return;
  const place = document.querySelector(".shown");
  const figures = loaded.map(figureOf), articles = algorithms.map(article);
  articles.forEach((one, k) => one.append(figures[k][0]));
  place.replaceChildren(...articles);
  place.classList.toggle("two", articles.length > 1);
  document.querySelector(".both").hidden = articles.length < 2;
  mounted.abort();
  mounted = new AbortController();
  for (const [figure, setup] of figures) mount(figure, setup, mounted.signal);
  place.dataset.shown = address();
}

function choiceWords() {
  return `${operations[state.operation]}, ${state.ranks} ranks, ` +
    `${networks[state.network].toLowerCase()}.`;
}

/* Which of the two takes how much longer. */
function comparison() {
  const choice = choiceWords();
  const each = shown().map((name) =>
    `${capital(names[name])}: ${steps(factsOf(name)[0])}, ${humanSeconds(factsOf(name)[3])}.`);
  if (each.length < 2) return [choice, ...each].join(" ");
  const [one, other] = shown().map((name) => factsOf(name));
  const sentences = sizes.map((size, k) => {
    const ratio = one[3 + k] / other[3 + k];
    const [slow, fast] = ratio > 1 ? shown() : [...shown()].reverse();
    const times = Math.max(ratio, 1 / ratio).toFixed(1);
    return times === "1.0" ? `With ${size}, both take the same time.`
      : `With ${size}, ${names[slow]} takes ${times} times as long as ${names[fast]}.`;
  });
  return [choice, ...sentences].join(" ");
}

function fillTable() {
  const all = Object.entries(facts[state.operation])
    .flatMap(([name, runs]) => runs[key()] ? [[name, runs[key()]]] : []);
  const longest = [3, 4].map((k) => Math.max(...all.map(([, of]) => of[k])));
  const number = (words, share) => {
    const cell = make("td", { class: "number" }, words);
    if (share) cell.style.setProperty("--share", share);
    return cell;
  };
  const named = (name) => shown().includes(name) ? names[name]
    : make("a", { href: address({ ...state, beside: name }) }, names[name]);
  document.querySelector(".algorithms tbody").replaceChildren(...all.map(([name, of]) =>
    make("tr", shown().includes(name) ? { class: "yours" } : {}, make("td", {}, named(name)),
      number(String(of[0])), number(humanSeconds(of[3]), of[3] / longest[0]),
      number(humanSeconds(of[4]), of[4] / longest[1]), number(humanBytes(of[1])),
      number(humanBytes(of[2])))));
  at("chosen").textContent = choiceWords() + (all.length > shown().length
    ? ` Choose a name to put that algorithm beside ${names[state.algorithm]}.` : "");
}

/* ---- input ---- */

const players = () => [...document.querySelectorAll(".shown figure > div")]
  .map((host) => host.shadowRoot);

for (const name of MENUS) at(name).onchange = () => {
  if (name === "algorithm" && at(name).value === state.beside) state.beside = state.algorithm;
  state[name] = name === "ranks" ? Number(at(name).value) : at(name).value;
  const words = settle();
  history.replaceState(null, "", address());
  show(words);
};
at("play-both").onclick = () => {
  document.querySelector(".shown figure").scrollIntoView();
  for (const root of players()) {
    const home = new KeyboardEvent("keydown", { key: "Home", bubbles: true });
    root.querySelector(".stage").dispatchEvent(home);
    root.querySelector("[data-do=play]").click();
  }
};
at("next-both").onclick = () => players()
  .forEach((root) => root.querySelector("[data-do=next]").click());
document.querySelector(".choice").onsubmit = (event) => event.preventDefault();
addEventListener("hashchange", () => {
  show(readAddress());
  scrollTo({ top: 0 });
  at("algorithm").focus({ preventScroll: true });
});

for (const part of document.querySelectorAll(".choice, #said, .shown")) part.hidden = false;
show(readAddress());
