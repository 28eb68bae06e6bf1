/* The page that says whether a model fits: the settings, their address and the Python code. Bytes
   and changes come from memoryRules and memoryChanges, and memory_answer.js shows them. GIVEN
   holds Python's models, GPUs, defaults and choices. */
"use strict";
const LAYOUT = Object.keys(GIVEN.layout), SHAPE = Object.keys(GIVEN.shape);
const NEEDED = ["width", "layers", "heads", "vocabulary", "time"];  // they have no default
const KIND = Object.keys(GIVEN.kinds.GPT);  // what differs between a GPT and a Llama
const state = { model: "", gpu: "", shape: {}, layout: {} };
let changed = false;  // whether the address must follow

function start() {
  const { model, gpu, layout } = GIVEN.start;
  Object.assign(state, { model, gpu, shape: { ...GIVEN.models[model] }, layout: { ...layout } });
}

/* ---- settings ---- */

/* What follows from other settings: options of an axis that has one rank, and of no experts. */
function settle({ shape, layout }) {
  if (!shape.experts) layout.ep = 1;
  if (layout.chunks > 1) layout.schedule = "interleaved";
  Object.assign(layout, memoryChanges.alone(layout));
  if (layout.cp === 1) layout.context = GIVEN.layout.context;
  if (!layout.precision.endsWith("mixed")) layout.gradient_dtype = null;
}

/* The value of a field, of the type that Python has: null for an empty one. */
function valueOf({ type, checked, value }) {
  if (type === "checkbox") return checked;
  return value === "" ? null : value === "True" || value === "False" ? value === "True"
    : Number.isNaN(Number(value)) ? value : Number(value);
}

function onSetting({ target }) {
  const { id, min, max } = target, value = valueOf(target);
  if (!target.checkValidity() || (value === null && target.required))
    return verdict(`${target.parentElement.textContent.trim()}: expected a whole number from `
      + `${min} to ${count(Number(max))}.`, true);
  changed = true;
  if (id === "model" && value !== "own")
    Object.assign(state, { model: value, shape: { ...GIVEN.models[value] } });
  else if (id === "model") {
    state.model = value;
    at("numbers").open = true;
  }
  else if (id === "gpu") state.gpu = value;
  else if (id === "kind") Object.assign(state.shape, GIVEN.kinds[value]);
  else if (id === "schedule") {
    state.layout.schedule = value;
    state.layout.chunks = value === "interleaved" ? 2 : 1;
  }
  else if (LAYOUT.includes(id)) state.layout[id] = value;
  else if (SHAPE.includes(id)) state.shape[id] = value;
  if (["kind", ...SHAPE].includes(id) && !["time", "attention"].includes(id)) state.model = "own";
  if (state.model === "own") state.shape.name = "";
  show();
}

/* All fields as the state has them. */
function fill() {
  settle(state);
  const { shape, layout } = state;
  const like = Object.keys(GIVEN.kinds).find((name) =>
    KIND.every((key) => GIVEN.kinds[name][key] === shape[key]));
  const values = { model: state.model, gpu: state.gpu, kind: like, ...shape, ...layout };
  for (const field of document.querySelectorAll(".fits .settings :is(input, select)")) {
    const value = values[field.id];
    if (field.type === "checkbox") field.checked = value;
    else if (document.activeElement !== field || valueOf(field) !== value)
      field.value = value === null ? "" : String(value);
  }
  for (const [id, useless] of Object.entries({ sequence_parallel: layout.tp === 1,
    gradient_dtype: !layout.precision.endsWith("mixed"), schedule: layout.pp === 1,
    context: layout.cp === 1, chunks: layout.schedule !== "interleaved", ep: !shape.experts,
    top_k: !shape.experts }))
    at(id).disabled = useless;
}

function show() {
  fill();
  answer();
  document.querySelector(".python").textContent = python();
  if (changed) history.replaceState(null, "", address());
}

/* ---- the address ---- */

/* What of the model and of the layout isn't the default. */
function chosen() {
  const { model, shape, layout } = state, known = GIVEN.models[model] ?? GIVEN.shape;
  const differs = (of, from, names) => names
    .filter((key) => key !== "name")
    .filter((key) => of[key] !== from[key] || (model === "own" && NEEDED.includes(key)))
    .map((key) => [key, of[key]]);
  return { ofShape: differs(shape, known, SHAPE), ofLayout: differs(layout, GIVEN.layout, LAYOUT) };
}

function address() {
  const { ofShape, ofLayout } = chosen();
  const pairs = [["model", state.model], ["gpu", state.gpu], ...ofShape, ...ofLayout];
  return `#${new URLSearchParams(pairs)}`;
}

/* The settings of the address; words if it has one that this page doesn't know. */
function readAddress() {
  start();
  const given = new URLSearchParams(location.hash.slice(1));
  if (!given.has("model")) return "";
  const model = given.get("model"), gpu = given.get("gpu") ?? state.gpu;
  const shape = { ...(GIVEN.models[model] ?? GIVEN.shape) }, layout = { ...GIVEN.layout };
  const wrong = [...given].find(([key, text]) => {
    if (key === "model") return model !== "own" && !GIVEN.models[model];
    if (key === "gpu") return !GIVEN.gpus[gpu];
    const of = LAYOUT.includes(key) ? layout : SHAPE.includes(key) && key !== "name" ? shape : null;
    const number = Number(text), empty = text === "null" && GIVEN.shape[key] === null;
    const choices = GIVEN.choices[key] ?? (empty ? [null]
      : /^\d+$/.test(text) && number >= at(key)?.min && number <= at(key).max ? [number] : []);
    const value = choices.find((choice) => String(choice) === text);
    if (of) of[key] = value;
    return !of || value === undefined;
  });
  if (wrong)
    return `The address has ${wrong.join("=")}, which this page doesn't know. It shows its first `
      + "settings instead.";
  Object.assign(state, { model, gpu, shape, layout });
  return "";
}

/* ---- Python ---- */

const literal = (value) => value === null ? "None" : value === true ? "True"
  : value === false ? "False" : typeof value === "string" ? `"${value}"` : String(value);

/* A call with keywords, in lines of at most 100 columns. */
function call(name, first, pairs) {
  const words = [...first, ...pairs.map(([key, value]) => `${key}=${literal(value)}`)];
  const line = `${name}(${words.join(", ")})`;
  return line.length < 90 ? line : `${name}(\n${words.map((word) => `    ${word},\n`).join("")})`;
}

function python() {
  const { ofShape, ofLayout } = chosen(), { model, gpu } = state, known = model !== "own";
  const named = `shape_of_model("${model}")`;
  const shape = !known ? call("ModelShape", [], ofShape)
    : ofShape.length ? call("replace", [named], ofShape) : named;
  return [
    ...(known && ofShape.length ? ["from dataclasses import replace", ""] : []),
    `from parallel101.cost import CHIPS, ${known ? "" : "ModelShape, "}ParallelLayout, step_memory`,
    `from parallel101 import decimal_bytes${known ? ", shape_of_model" : ""}`, "",
    `shape = ${shape}`, `layout = ${call("ParallelLayout", [], ofLayout)}`,
    `have = CHIPS["${gpu}"].hbm_bytes`,
    "for position, stage in enumerate(step_memory(shape, layout)):",
    "    parts = stage.weights, stage.gradients, stage.optimizer, stage.activations",
    "    parts += stage.logits, stage.gradient_copy, stage.buffers",
    '    print(f"stage {position}:", *map(decimal_bytes, parts), sep="  ")',
    '    print(f"  at its peak {decimal_bytes(stage.total)} of {decimal_bytes(have)}")', ""]
    .join("\n");
}
