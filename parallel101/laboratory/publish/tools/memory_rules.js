/* Bytes on each rank while HybridTrainer trains a model, and which layouts it accepts: the formulas
   of cost/step_memory.py, cost/layer_activations.py and cost/parallel_layout.py and the rules of
   planner/layout_rules.py, with their names. Tests compare them with Python on thousands of
   settings. GIVEN.constants comes from Python.

   shape     the fields of ModelShape        layout     the fields of ParallelLayout */
"use strict";
const memoryRules = (() => {
  const sum = (numbers) => numbers.reduce((all, number) => all + number, 0);
  const commas = (number) => number.toLocaleString("en-US");

  /* ---- a model ---- */

  const kvOf = (shape) => shape.kv_heads ?? shape.heads;
  const insideOf = (shape) => shape.feed_forward ?? 4 * shape.width;
  const kvWidth = (shape) => kvOf(shape) * (shape.width / shape.heads);
  const normParameters = (shape) => shape.width * (shape.norm === "layer" ? 2 : 1);

  function attentionParameters(shape) {
    const h = shape.width, kv = kvWidth(shape);
    return 2 * h * h + 2 * h * kv + (shape.biases ? 2 * h + kv : 0);
  }

  /* Of one MLP, or of one expert. */
  function mlpParameters(shape) {
    const h = shape.width, inside = insideOf(shape), first = shape.gated ? 2 : 1;
    return (first + 1) * h * inside + (shape.biases ? first * inside + h : 0);
  }

  /* Of the whole model. */
  function parameters(shape) {
    const { width: h, vocabulary, time, layers, experts } = shape;
    const mlps = Math.max(1, experts) * mlpParameters(shape) + experts * h;
    const layer = attentionParameters(shape) + mlps + 2 * normParameters(shape);
    const embedding = (vocabulary + (shape.positions === "learned" ? time : 0)) * h;
    const head = normParameters(shape) + (shape.tied ? 0 : vocabulary * h);
    return embedding + layers * layer + head;
  }

  /* Operations of a step of `batch` samples, with those that are done again. */
  function hardwareFlops(shape, batch, recompute) {
    const { width: h, layers, time } = shape;
    let mlp = (shape.gated ? 3 : 2) * h * insideOf(shape);
    if (shape.experts) mlp = mlp * shape.top_k + h * shape.experts;
    const weights = 2 * h * h + 2 * h * kvWidth(shape) + mlp, core = 4 * time * h;
    const once = 6 * (layers * weights + shape.vocabulary * h) + 12 * layers * time * h;
    const again = recompute === "full" ? layers * (2 * weights + core)
      : recompute === "selective" ? layers * core : 0;
    return batch * time * (once + again);
  }

  /* ---- a layout ---- */

  const itemsize = (layout) => layout.precision === "fp32" ? 4 : 2;
  const gpus = ({ dp, tp, pp, cp, ep }) => dp * tp * pp * cp * ep;
  const batchOf = ({ microbatch, microbatches, dp, ep }) => microbatch * microbatches * dp * ep;

  /* The layers on each of the stages; null if they can't be shared evenly. */
  function stageLayers(layers, stages) {
    if (layers % stages === 0) return Array(stages).fill(layers / stages);
    const each = (layers + 2) / stages;
    if (!Number.isInteger(each) || stages < 3) return null;
    return Array.from({ length: stages }, (_, s) => each - (s === 0 || s === stages - 1));
  }

  /* Why there is no such model or layout, or HybridTrainer can't train it; "" if it can. */
  function whyNot(shape, layout) {
    return whyNotShape(shape) || whyNotNumbers(layout) || whyNotMesh(shape, layout)
      || whyNotSchedule(shape, layout) || whyNotOptions(shape, layout) || "";
  }

  function notWhole(of, names) {
    const name = names.find((key) => !(Number.isInteger(of[key]) && of[key] >= 1));
    return name && `${name}=${of[name]}: expected a whole number, 1 or more`;
  }

  function whyNotShape(shape) {
    const { width, heads, kv_heads, feed_forward, experts, top_k } = shape;
    const others = [["kv_heads", kv_heads], ["feed_forward", feed_forward]];
    const names = ["width", "layers", "heads", "vocabulary", "time",
      ...others.flatMap(([name, value]) => value === null ? [] : [name])];
    if (notWhole(shape, names)) return notWhole(shape, names);
    if (width % heads)
      return `width=${width} isn't a multiple of heads=${heads}: expected as many features for `
        + "every head";
    if (heads % kvOf(shape))
      return `heads=${heads} isn't a multiple of kv_heads=${kvOf(shape)}: expected as many heads `
        + "for each pair of key and value";
    if (!Number.isInteger(experts) || experts < 0)
      return `experts=${experts}: expected a whole number, 0 for none`;
    if (experts && !(Number.isInteger(top_k) && 1 <= top_k && top_k <= experts))
      return `top_k=${top_k}: expected 1 to experts=${experts}`;
  }

  function whyNotNumbers(layout) {
    const { pp, chunks, microbatches } = layout;
    const names = ["dp", "tp", "pp", "cp", "ep", "microbatch", "microbatches", "chunks"];
    if (notWhole(layout, names)) return notWhole(layout, names);
    if (chunks > 1 && pp === 1)
      return `chunks=${chunks} without a pipeline: expected pp of 2 or more`;
    if (chunks > 1 && microbatches % pp)
      return `microbatches=${microbatches} with chunks=${chunks}: expected a multiple of `
        + `pp=${pp}, as the interleaved schedule has groups of that many`;
  }

  function whyNotMesh(shape, { tp, pp, cp, ep, context }) {
    const kv = kvOf(shape), inside = insideOf(shape);
    if (shape.heads % tp) return `tp doesn't divide ${shape.heads} heads`;
    if (kv % tp) return `tp doesn't divide ${kv} key/value heads`;
    if (inside % tp) return `tp doesn't divide the ${commas(inside)} features inside an MLP`;
    if (!stageLayers(shape.layers, pp))
      return `${shape.layers} layers can't be shared evenly by pp stages`;
    if (cp > 1 && shape.time % (2 * cp))
      return `a sample's ${commas(shape.time)} tokens aren't a multiple of 2 · cp`;
    if (cp > 1 && context === "ulysses" && (kv / tp) % cp)
      return "context='ulysses': cp doesn't divide the key/value heads of a rank";
    if (cp > 1 && shape.attention === "unfused") return "cp needs attention='fused'";
    if (ep > 1 && !shape.experts) return "ep is of experts, and this model has none";
    if (ep > 1 && shape.experts % ep) return `ep doesn't divide ${shape.experts} experts`;
  }

  function whyNotSchedule(shape, { pp, chunks, schedule, microbatches }) {
    if (pp === 1)
      return chunks > 1 || schedule !== "1f1b"
        ? "chunks and schedule are a pipeline's, and pp is 1" : "";
    if (chunks > 1 && !["1f1b", "interleaved"].includes(schedule))
      return `chunks above 1 are interleaved, and schedule is '${schedule}'`;
    if (!stageLayers(shape.layers, pp * chunks))
      return `${shape.layers} layers can't be shared evenly by pp · chunks stages`;
    if ((chunks > 1 || schedule === "interleaved") && microbatches % pp)
      return "chunks need a multiple of pp microbatches";
  }

  function whyNotOptions(shape, { sequence_parallel, tp, cp, gradient_dtype, precision }) {
    if (sequence_parallel && tp === 1) return "sequence_parallel needs tp above 1";
    if (sequence_parallel && shape.time % (tp * cp))
      return `sequence_parallel: a sample's ${commas(shape.time)} tokens aren't a multiple of `
        + "tp · cp";
    if (sequence_parallel && shape.experts)
      return "sequence_parallel: a router of experts isn't cut along tp";
    if (gradient_dtype && !precision.endsWith("-mixed"))
      return "gradient_dtype='fp32' needs a mixed precision";
  }

  /* ---- activations ---- */

  const CORE = ["softmaxSums", "softmax", "mask", "attentionDropout"];

  /* Bytes that a rank keeps of one layer and one microbatch, without recomputation. */
  function layerKept(shape, layout) {
    const e = itemsize(layout), t = layout.tp, { heads, time } = shape;
    const n = Math.floor((layout.microbatch * time) / layout.cp);
    const outside = layout.sequence_parallel ? n / t : n;
    const h = shape.width, kv = kvWidth(shape), f = insideOf(shape);
    const found = {
      norms: 2 * e * h * outside, statistics: 2 * 2 * 4 * outside,
      attentionInput: e * h * n, query: (e * h * n) / t, keyValue: (2 * e * kv * n) / t,
      outputInput: (e * h * n) / t, mlpInput: e * h * n };
    if (shape.attention === "fused" || layout.cp > 1) found.softmaxSums = (4 * heads * n) / t;
    else {
      const square = (heads / t) * layout.microbatch * time ** 2;
      found.softmax = e * square;
      found.mask = time ** 2;
      found.keyValue = (2 * e * h * n) / t;  // repeated for the heads that share them
      if (shape.dropout) found.attentionDropout = (e + 1) * square;
    }
    if (shape.positions === "rotary") {
      const samples = layout.cp > 1 ? layout.microbatch : 1;
      found.rotations = ((4 * (h / heads) * time) / layout.cp) * samples;
    }
    if (shape.dropout) found.dropout = 2 * h * outside;
    if (layout.cp > 1 && layout.context === "ulysses") found.byHeads = (e * h * n) / t;
    found.mlp = ((shape.gated ? 4 : 2) * e * f * n) / t;
    if (shape.experts) {
      const rows = n * shape.top_k;
      found.mlp = 2 * e * f * rows;
      found.rows = 2 * e * h * rows;
      found.rowNumbers = 8 * 9 * rows;
    }
    return found;
  }

  /* ---- the peak of a rank ---- */

  /* Peak bytes of the ranks at each position along pp, in order. */
  const stepMemory = (shape, layout) => [...eachStage(shape, layout)];

  function* eachStage(shape, layout) {
    const layers = stageLayers(shape.layers, layout.pp * layout.chunks);
    const kept = layerKept(shape, layout);
    for (let position = 0; position < layout.pp; position++) {
      const mine = Array.from({ length: layout.chunks }, (_, i) =>
        layers[i * layout.pp + position]);
      yield stageMemory(shape, layout, mine, position, kept);
    }
  }

  /* Whether every rank has enough memory. */
  function fits(shape, layout, memory) {
    for (const { total } of eachStage(shape, layout)) if (total > memory) return false;
    return true;
  }

  function stageMemory(shape, layout, layers, position, kept) {
    const { tp: t, pp, chunks, microbatches, zero_stage: zero, recompute } = layout;
    const { width: h, vocabulary, time, heads } = shape;
    const { BUCKET, MASTER, MOMENT } = GIVEN.constants;
    const first = position === 0, last = position === pp - 1;
    const e = itemsize(layout), g = layout.gradient_dtype === "fp32" ? 4 : e;
    const mixed = layout.precision.endsWith("mixed");
    const n = Math.floor((layout.microbatch * time) / layout.cp);
    const outside = layout.sequence_parallel ? n / t : n;
    const sharing = layout.dp * layout.cp * layout.ep;
    const overlap = layout.overlap && layout.cp === 1 && layout.ep === 1;
    const all = sum(Object.values(kept)), core = sum(CORE.map((name) => kept[name] ?? 0));
    const message = e * h * outside;  // the activations that a stage sends
    const other = shape.experts ? 1 : t;  // over which tp cuts MLPs and the vocabulary
    const logits = (n * vocabulary) / other;

    // parameters
    const out = shape.biases ? h : 0;  // a row layer's bias is whole
    const mlp = shape.experts ? (mlpParameters(shape) * shape.experts) / layout.ep
      + h * shape.experts : (mlpParameters(shape) - out) / t + out;
    const ofLayer = (attentionParameters(shape) - out) / t + out + mlp
      + 2 * normParameters(shape);
    const table = (vocabulary * h) / other;  // the embedding of tokens, or the output layer
    const ofEmbedding = table + (shape.positions === "learned" ? time * h : 0);
    let count = sum(layers) * ofLayer;
    if (first) count += ofEmbedding;
    if (last) count += normParameters(shape) + (shape.tied && first ? 0 : table);
    const experts = (sum(layers) * mlpParameters(shape) * shape.experts) / layout.ep;
    const owned = zero === 0 ? count  // what this rank's optimizer updates
      : (count - experts) / sharing + experts / (layout.dp * layout.cp);

    // model states
    const weights = e * (zero === 3 ? owned : count);
    const averages = GIVEN.constants.AVERAGES[layout.optimizer];
    const optimizer = owned * (mixed ? averages * MOMENT + MASTER : averages * e);
    const gradients = g * (zero >= 2 ? owned : count);
    const room = zero || (sharing > 1 && overlap) ? gradients : 0;  // flat arrays
    const batch = 8 * layout.microbatch * microbatches * time;
    const fixed = weights + optimizer + room + batch;
    const bucket = zero === 3 ? Math.max(ofLayer, first || last ? ofEmbedding : 0)
      : sharing > 1 ? Math.min(BUCKET / e, count / (zero ? 4 : 2)) : 0;

    // activations that wait for backward
    const ofHead = e * h * outside + 8 * outside + e * h * n;
    const layerWaits = recompute === "full" ? message  // of the same shape as its input
      : recompute === "selective" ? all - core : all;
    const ofStages = layers.map((many) => many * layerWaits);
    if (first) {
      if (other > 1) ofStages[0] += 10 * n;
      if (layout.sequence_parallel) ofStages[0] += e * h * (n - outside);
      if (shape.dropout) ofStages[0] += h * n;
    }
    for (let i = 0; i < (last ? chunks - 1 : chunks); i++) ofStages[i] += message;
    if (last) ofStages[chunks - 1] += ofHead;
    const warmUp = forwardsBeforeBackward(layout, position);
    // pp microbatches pass the first stage of this rank, then the same ones its next stage
    const rounds = Math.floor(warmUp / (pp * chunks)), rest = warmUp % (pp * chunks);
    const waits = ofStages.map((_, stage) =>
      rounds * pp + Math.min(pp, Math.max(0, rest - stage * pp)));
    let waiting = sum(ofStages.map((nbytes, stage) => waits[stage] * nbytes));
    const losses = waits[chunks - 1];
    if (last && losses) waiting += (losses - 1) * 4 * logits;
    if (layout.schedule.startsWith("zb")) {
      const delay = position * (layout.schedule === "zb-h2" ? 2 : 1);
      const inside = (2 * h + 2 * kvWidth(shape)) / t
        + ((shape.gated ? 3 : 2) * insideOf(shape)) / other;
      let later = sum(layers) * e * n * (4 * h + inside);
      if (last) later += e * n * (h + vocabulary / other);
      waiting += Math.min(delay, microbatches) * later;
    }

    // what is needed for a moment
    const attention = attentionBackward(shape, layout, kept, n);
    const f = insideOf(shape) / other;
    let inLayer = e * (h + f) * n + (e + (g !== e ? g : 0)) * f * h;
    if (shape.gated) inLayer = Math.max(inLayer, e * h * n + 2 * e * f * n);
    let backward = Math.max(inLayer, attention) - (last ? ofHead : 0);
    if (recompute === "full") backward += all - layerWaits;
    else if (recompute === "selective") backward += core;
    if (zero === 3) backward += 2 * e * ofLayer + Math.max(0, 2 * g * ofLayer - all);
    if (pp > 1) backward += ((first || last ? 1 : 2) + (chunks > 1)) * message;

    const atLoss = other === 1 ? 12 * logits : (8 + (e < 4 ? e : 0)) * logits;
    let after = e * (logits + h * n);
    if (microbatches > 1 || e !== g) after += e * table;
    if (microbatches === 1) after += g * table;
    const loss = Math.max(atLoss, after) + (zero === 3 ? e * table : 0) + (pp > 1 ? message : 0);

    let travelling = room ? 0 : g * count;  // two buckets are on their way
    if (sharing > 1) travelling += 2 * g * bucket * ((zero >= 2 ? 2 : 1) - 1 / sharing);
    if (zero >= 2) travelling += (zero === 3 ? 1 : 2) * g * bucket;
    if (zero === 3) travelling += 2 * e * ofLayer;

    let update = room ? 0 : gradients;
    const in32Bits = mixed && g < 4 ? 4 * owned : 0;
    update += in32Bits;
    if (shape.tied && pp > 1 && (first || last)) update += (mixed ? 10 : 2.5 * g) * table;

    let earlier = 0;  // the gradients of earlier microbatches
    if (microbatches > 1)
      earlier = zero < 2 ? g * count
        : 2 * g * (zero === 2 ? bucket : first ? ofEmbedding : ofLayer);
    let atOnce = waiting + earlier;
    if (warmUp === microbatches) {  // the first backward has all of them, the second one fewer
      const fewer = waiting * (1 - 1 / microbatches) + earlier;
      atOnce = Math.max(waiting, fewer);
      if (waiting > fewer) earlier = 0;
    }
    const moments = { backward: atOnce + backward, gradients: travelling, optimizer: update };
    if (last) moments.loss = atOnce + loss;
    const moment = Object.keys(moments).reduce((a, b) => moments[b] > moments[a] ? b : a);
    const total = fixed + moments[moment], activations = waiting + (last ? 4 * logits : 0);
    const inStep = moment === "loss" || moment === "backward";
    const alive = weights + optimizer + gradients + (inStep ? activations : 0);
    const others = Math.max(0, total - alive), ofLoss = moment === "loss";
    const atPeak = ofLoss ? Math.min(others, Math.max(0, atLoss - (last ? 4 * logits : 0))) : 0;
    const copied = Math.min(others - atPeak, inStep ? Math.max(0, room + earlier - gradients)
      : moment === "optimizer" ? in32Bits : 0);
    return { weights, gradients, optimizer, activations, logits: atPeak, gradient_copy: copied,
      buffers: others - atPeak - copied, total, moment, parameters: count, owned,
      forwards: warmUp };
  }

  /* How many forwards a rank computes before its first backward, and so how many wait. */
  function forwardsBeforeBackward({ pp, chunks, schedule, microbatches }, position) {
    const after = pp - position;
    const many = chunks > 1 ? (chunks - 1) * pp + 2 * after - 1 : schedule === "gpipe"
      ? microbatches : schedule === "zb-h2" ? 2 * after - 1 : after;
    return Math.min(many, chunks * microbatches);
  }

  /* Bytes that the core of attention needs in backward, less what the MLP has freed. */
  function attentionBackward(shape, layout, kept, n) {
    const e = itemsize(layout), { cp, tp: t, context } = layout;
    const heads = (shape.heads / t) * layout.microbatch, freed = kept.mlp + kept.mlpInput;
    if (cp > 1 && context !== "ulysses") {
      const square = 4 * heads * (shape.time / cp) ** 2;
      const squares = kvOf(shape) === shape.heads ? 2 : 3;  // groups need a copy
      const [h, kv] = context === "zigzag" ? [7, 8] : [11, 10];  // in 32 bits
      return squares * square + (4 * (h * shape.width + kv * kvWidth(shape)) * n) / t - freed;
    }
    return shape.attention === "unfused" ? 2 * e * heads * shape.time ** 2 - freed : 0;
  }

  return { parameters, hardwareFlops, itemsize, gpus, batchOf, stageLayers, whyNot, stepMemory,
    fits, kvWidth };
})();
