/* The page on which a schedule is built by hand. What is possible is decided by scheduleRules, and
   GIVEN holds the published schedules, both from Python. Drawing and input: schedule_board.js. */
"use strict";
const KINDS = { F: "forward", B: "backward", I: "input gradient", W: "weight gradient" };
const LAYOUTS = { one: 1, loop: 2, v: 2 };  // stages on a rank
const text = (number, digits = 2) => String(Number(number.toFixed(digits)));
const many = (count, word) => `${count} ${word}${count === 1 ? "" : "s"}`;

const state = { ranks: 3, microbatches: 6, stages: "one",
  costs: { F: 1, I: 1, W: 1, communication: 0 }, lists: [[], [], []] };
let chosen = null;  // { rank, id }: an action or a bubble
let undone = [];  // earlier states, as texts
let changed = false;  // whether the address must follow

/* ---- the schedule ---- */

const chunks = () => LAYOUTS[state.stages];
const stagesOf = (rank) => placement().flatMap((on, stage) => on === rank ? [stage] : []);
const complete = () => scheduleRules.check(state.lists) === "" && atLeastAll();

/* By stage, its rank. */
function placement() {
  const { ranks, stages } = state, all = [...Array(ranks).keys()];
  return stages === "one" ? all : all.concat(stages === "v" ? [...all].reverse() : all);
}

/* Whether the lists have all microbatches and stages that were asked for: `check` asks for those
   that the lists name. */
function atLeastAll() {
  const placed = new Set(state.lists.flat());
  return placed.has(`${placement().length - 1}F${state.microbatches - 1}`);
}

function times(lists = state.lists, on = placement(), v = chunks()) {
  const { F, I, W, communication } = state.costs;
  return scheduleRules.time(lists, { F: F / v, I: I / v, W: W / v }, communication, on);
}

const listsOf = (name, { ranks, microbatches } = state) =>
  GIVEN.lists[`${ranks},${microbatches}`][name]?.map((of) => of.split(" "));

function score(found, v) {
  return { step: found.makespan, idle: found.idle, rate: found.bubbleRate,
    held: Math.max(0, ...found.peaks) / v };
}

function published() {
  return Object.entries(GIVEN.names).flatMap(([name, title]) => {
    const lists = listsOf(name), v = GIVEN.chunks[name] ?? 1;
    return lists ? [{ name, title, lists, ...score(times(lists, null, v), v) }] : [];
  });
}

/* ---- changes: each is tried first, and refused with its reason ---- */

function remember() {
  undone = [...undone.slice(-199), JSON.stringify(state)];
  changed = true;
}

function change(lists, words, choose) {
  const why = scheduleRules.obstacle(lists, placement());
  if (why) return say(`Not possible: ${why}.`, true);
  remember();
  state.lists = lists;
  chosen = choose ?? null;
  draw();
  say(words() + progressWords());
}

/* What is new when the last action has been placed. */
function progressWords() {
  if (!complete()) return "";
  const reached = [...document.querySelectorAll(".goals li")]
    .flatMap((goal, k) => goal.matches(".reached") ? [k + 1] : []);
  return " The schedule is complete, and runs under gloo's and NCCL's rules. " +
    (reached.length ? `Goals reached: ${reached.join(", ")}.` : "No goal is reached yet.");
}

/* Where the next action of a rank goes: before what waits, if its bubble is chosen; else last. */
function insertion(rank) {
  const waits = chosen?.rank === rank && chosen.id.startsWith("w") ? chosen.id.slice(1) : null;
  return waits ? state.lists[rank].indexOf(waits) : state.lists[rank].length;
}

function withInserted(rank, name) {
  return state.lists.map((of, r) => r === rank ? of.toSpliced(insertion(rank), 0, name) : of);
}

/* The next action of a kind on a stage that isn't placed: 2F3; null if there is none. */
function nextOf(stage, kind) {
  const placed = new Set(state.lists.flat());
  const excludes = { F: "F", B: "BIW", I: "BI", W: "BW" }[kind];
  for (let i = 0; i < state.microbatches; i++)
    if (![...excludes].some((k) => placed.has(`${stage}${k}${i}`))) return `${stage}${kind}${i}`;
  return null;
}

function place(rank, stage, kind) {
  const name = nextOf(stage, kind);
  if (!name) return say(`Stage ${stage} has no ${KINDS[kind]} left to place.`, true);
  const lists = withInserted(rank, name);
  change(lists, () => `Placed ${name}: ${described(slotOf(name))}.`, { rank, id: `a${name}` });
}

/* By a key: of the rank's stages the first that can do it, or else why the first can't. */
function placeByKey(rank, kind) {
  const stages = stagesOf(rank);
  const can = stages.find((s) => nextOf(s, kind)
    && !scheduleRules.obstacle(withInserted(rank, nextOf(s, kind)), placement()));
  place(rank, can ?? stages.find((s) => nextOf(s, kind)) ?? stages[0], kind);
}

/* An action to a place in its rank's list, counted without it. */
function move(rank, name, to) {
  const rest = state.lists[rank].filter((other) => other !== name);
  const moved = rest.toSpliced(Math.max(0, Math.min(to, rest.length)), 0, name);
  if (moved.join() === state.lists[rank].join()) return;
  change(state.lists.map((of, r) => r === rank ? moved : of),
    () => `Moved ${name}: ${described(slotOf(name))}.`, { rank, id: `a${name}` });
}

function shift(by) {
  const name = chosenAction();
  if (name) move(chosen.rank, name, state.lists[chosen.rank].indexOf(name) + by);
}

/* The chosen action, and what needs it. */
function remove() {
  const name = chosenAction();
  if (!name) return;
  let lists = state.lists.map((of) => of.filter((other) => other !== name));
  for (let before = -1; before !== lists.flat().length;) {
    before = lists.flat().length;
    const ranks = scheduleRules.parsed(lists), on = placement();
    const where = scheduleRules.positions(ranks, on);
    const needed = (part) => scheduleRules.needs(part, on, where, false);
    const stays = ([part]) => needed(part).every((name) => where.has(name));
    lists = ranks.map((of) => of.filter(stays).map(([part]) => part.name));
  }
  const others = state.lists.flat().length - lists.flat().length - 1;
  const them = `${many(others, "action")} that ${others > 1 ? "need" : "needs"} it`;
  const also = others ? ` and ${them}` : "";
  change(lists, () => `Removed ${name}${also}.`);
}

function split() {
  const name = chosenAction();
  if (!name?.includes("B")) return say("Choose a backward B to split it into I and W.", true);
  const halves = [name.replace("B", "I"), name.replace("B", "W")];
  change(state.lists.map((of) => of.flatMap((other) => other === name ? halves : [other])),
    () => `Split ${name} into ${halves.join(" and ")}.`,
    { rank: chosen.rank, id: `a${halves[1]}` });
}

const chosenAction = () => chosen?.id.startsWith("a") ? chosen.id.slice(1) : null;

function undo() {
  if (!undone.length) return say("There is nothing to undo.");
  Object.assign(state, JSON.parse(undone.pop()));
  chosen = null;
  build();
  say("Undone.");
}

/* ---- words ---- */

function say(words, refused = false) {
  at("said").textContent = words;
  at("said").classList.toggle("refused", refused);
}

const slotOf = (name) => times().slots.find(({ parts }) => parts[0].name === name);

function described({ parts: [{ stage, kind, i }], rank, start, end }) {
  return `${KINDS[kind]} of microbatch ${i} on stage ${stage}, on rank ${rank} from ` +
    `${text(start)} to ${text(end)}`;
}

/* Why a rank waits before a slot. */
function waits({ rank, free, start, needed }, slots) {
  const source = slots.find(({ parts }) => parts[0].name === needed);
  const late = start > source.end ? ` and arrives at ${text(start)}` : "";
  return `Rank ${rank} ${free ? "waits" : "can't start yet: it waits"} from ${text(free)} to ` +
    `${text(start)} for ${needed} on rank ${source.rank}, which ends at ` +
    `${text(source.end)}${late}.`;
}

/* ---- the address ---- */

function address() {
  const { ranks, microbatches, stages, costs, lists } = state;
  return `#ranks=${ranks}&microbatches=${microbatches}&stages=${stages}` +
    `&times=${Object.values(costs).join()}&lists=${lists.map((of) => of.join(".")).join("_")}`;
}

/* The schedule of the address; words if it has one that can't be used. */
function readAddress() {
  const given = new URLSearchParams(location.hash.slice(1));
  if (!given.has("lists")) return "";
  const ranks = Number(given.get("ranks")), microbatches = Number(given.get("microbatches"));
  const stages = given.get("stages"), times = given.get("times")?.split(",").map(Number) ?? [];
  const [F, I, W, communication] = times;
  const lists = given.get("lists").split("_").map((of) => of ? of.split(".") : []);
  const fits = GIVEN.lists[`${ranks},${microbatches}`] && LAYOUTS[stages]
    && lists.length === ranks && [F, I, W].every((cost) => cost >= 0.25) && communication >= 0
    && times.every((cost) => cost <= 8);
  if (!fits) return "The address has settings that this page doesn't know. The board is empty.";
  const before = JSON.stringify(state);
  Object.assign(state, { ranks, microbatches, stages, lists, costs: { F, I, W, communication } });
  const beyond = lists.flat().find((name) => !/^\d+[FBIW]\d+$/.test(name)
    || Number(name.split(/[FBIW]/)[1]) >= microbatches);
  const why = beyond ? `it has ${beyond}` : scheduleRules.obstacle(lists, placement());
  if (!why) return "";
  Object.assign(state, JSON.parse(before));
  return `The schedule of the address can't be used: ${why}.`;
}
