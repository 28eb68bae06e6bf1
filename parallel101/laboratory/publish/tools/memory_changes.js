/* What would make a model fit: all changes of one setting, then of two, then leaner layouts on more
   GPUs, and how long a step takes with each of them, roughly. The batch stays the same. */
"use strict";
const memoryChanges = (() => {
  const { stepMemory, fits, whyNot, gpus, batchOf, hardwareFlops, itemsize, stageLayers, kvWidth } =
    memoryRules;
  const AXES = ["dp", "tp", "pp", "cp", "ep"];
  const MOST = 2 ** 16;  // ranks along an axis
  const TIMES = [2, 4, 8, 16, 32, 64, 128, 256, 512];
  const peakOf = (shape, layout) => Math.max(...stepMemory(shape, layout).map((s) => s.total));

  /* ---- the step, roughly ---- */

  /* Seconds of a step: arithmetic at the peak, the bubble, messages at full bandwidth, and what the
     optimizer reads and writes. Messages along dp are hidden behind arithmetic if the layout
     overlaps them. It ranks changes nearly as cost/step_time.py does, which has far more detail. */
  function stepSeconds(shape, layout, gpu) {
    const { dp, tp, pp, cp, ep, chunks, microbatch, microbatches: many, zero_stage: zero } = layout;
    const e = itemsize(layout), g = layout.gradient_dtype === "fp32" ? 4 : e;
    const computing = hardwareFlops(shape, batchOf(layout), layout.recompute) / gpus(layout)
      / gpu.flops;
    const waits = layout.schedule.startsWith("zb") ? 1 / 3 : 1;
    const bubble = ((computing / many) * (pp - 1) * waits) / chunks;

    const tokens = (microbatch * shape.time) / cp, h = shape.width;
    const layers = (shape.layers / pp) * many, size = e * h * tokens;  // of activations
    const passes = layout.recompute === "full" ? 3 : 2;  // through a layer
    const link = (stride, ranks) => stride * ranks <= gpu.node ? gpu.inside : gpu.network;
    // each rank sends a block to each other rank: over NVLink inside its node, else by its card
    const exchange = (ranks, bytes, stride) => {
      const inside = Math.max(1, Math.min(ranks, Math.floor(gpu.node / stride)));
      return (bytes / ranks) * Math.max((ranks - inside) / gpu.network, (inside - 1) / gpu.inside);
    };
    const tensor = layers * passes * 2 * exchange(tp, 2 * size, 1);  // two sums in each pass
    const context = layers * (passes + 1)  // gradients of keys and values go round, too
      * exchange(cp, (2 * e * kvWidth(shape) * tokens * cp) / tp, tp);
    const expert = layers * passes * 2 * exchange(ep, size * shape.top_k, tp * cp);
    const pipe = pp > 1 ? (2 * (pp - 1 + (chunks - 1) * pp) * size)
      / (layout.sequence_parallel ? tp : 1) / link(tp * cp * ep * dp, pp) : 0;

    const { parameters, owned } = stepMemory(shape, layout)[0];
    const sends = zero >= 2 ? many : 1, gathers = zero === 3 ? 2 * many : 1;
    const data = exchange(dp * cp * ep, parameters * (g * sends + e * gathers), tp);
    const hides = zero === 3 ? computing : (computing * (2 / 3) * sends) / many;
    const waiting = Math.max(0, data - (layout.overlap ? hides : 0));
    const { OPTIMIZER_BYTES, AVERAGES } = GIVEN.constants;
    const spared = 8 * (2 - AVERAGES[layout.optimizer]);  // AdamW has two averages
    const update = (owned * (OPTIMIZER_BYTES - spared)) / gpu.bandwidth;
    return computing + bubble + tensor + context + expert + pipe + waiting + update;
  }

  /* ---- changes ---- */

  /* The same batch with other ranks or another microbatch; null if it can't be shared so. */
  function withBatch(layout, batch) {
    const microbatches = batch / (layout.microbatch * layout.dp * layout.ep);
    return Number.isInteger(microbatches) ? { ...layout, microbatches } : null;
  }

  /* All layouts that differ in one setting, with the settings that follow it, as [shape, layout]:
     fused attention is a change, too. */
  function neighbours(shape, layout, gpu) {
    const found = [], batch = batchOf(layout), sharing = layout.dp * layout.cp * layout.ep;
    const add = (change) => {
      const changed = withBatch({ ...layout, ...change }, batch);
      if (changed) found.push(changed);
    };
    if (sharing > 1)
      for (let zero = layout.zero_stage + 1; zero <= 3; zero++) add({ zero_stage: zero });
    for (const recompute of shape.attention === "fused" ? ["full"] : ["selective", "full"])
      if (recompute !== layout.recompute && layout.recompute !== "full") add({ recompute });
    if (layout.tp > 1 && !layout.sequence_parallel) add({ sequence_parallel: true });
    if (layout.gradient_dtype) add({ gradient_dtype: null });
    for (const size of smaller(layout.microbatch)) add({ microbatch: size });
    if (layout.pp > 1 && layout.schedule !== "1f1b") add({ schedule: "1f1b", chunks: 1 });
    for (const times of TIMES) {
      for (const axis of ["dp", "tp", "pp"]) {  // the trainer's attention along cp is slow
        const more = { [axis]: layout[axis] * times };
        if (more[axis] > (axis === "tp" ? gpu.node : MOST)) continue;  // tp stays inside a node
        add(more);  // on more GPUs
        for (const other of AXES)  // or in place of others
          if (other !== axis && layout[other] % times === 0)
            add(alone({ ...layout, ...more, [other]: layout[other] / times }));
      }
    }
    const others = found.map((other) => [shape, other]);
    if (shape.attention === "unfused") others.push([{ ...shape, attention: "fused" }, layout]);
    return others.filter((other) => !whyNot(...other));
  }

  /* All numbers below a small one, and the halves of a large one. */
  function smaller(number) {
    const all = Array.from({ length: Math.min(number - 1, 16) }, (_, k) => k + 1);
    for (let half = number / 2; half > 16; half = Math.floor(half / 2)) all.push(Math.floor(half));
    return all;
  }

  /* The settings that need an axis, without it. */
  function alone(layout) {
    const found = { ...layout };
    if (layout.pp === 1) Object.assign(found, { schedule: "1f1b", chunks: 1 });
    if (layout.tp === 1) found.sequence_parallel = false;
    return found;
  }

  /* Layouts that need little: many parts, full recomputation, one sample at a time. */
  function* leanLayouts(shape, layout, gpu) {
    const batch = batchOf(layout), lean = { ...shape, attention: "fused" };
    for (let pp = 1; pp <= shape.layers + 2; pp++)
      if (stageLayers(shape.layers, pp))
        for (let tp = 1; tp <= gpu.node; tp *= 2)
          for (let dp = 1; dp <= Math.min(batch, MOST); dp = dp < 64 ? dp + 1 : 2 * dp)
            for (const zero_stage of dp > 1 ? [1, 3] : [0]) {
              const other = withBatch({ ...layout, dp, tp, pp, zero_stage, microbatch: 1, chunks: 1,
                schedule: "1f1b", recompute: "full", gradient_dtype: null,
                sequence_parallel: tp > 1 && !shape.experts }, batch);
              if (other && !whyNot(lean, other)) yield [lean, other];
            }
  }

  /* What fits, the cheapest first: on the fewest GPUs, in whole nodes, then with the shortest step.
     One setting is changed, or two if that isn't enough on these GPUs, or else as many as a lean
     layout needs: `several` is 1, 2 or 3. */
  function fitting(shape, layout, gpu) {
    const have = gpus(layout), seen = new Set([JSON.stringify([shape, layout])]);
    const found = [], enough = () => found.some((other) => other.gpus <= have);
    const judge = (several, all) => {
      for (const other of all) {
        const text = JSON.stringify(other), [ofShape, ofLayout] = other;
        const many = gpus(ofLayout);
        const whole = many <= Math.max(have, gpu.node) || many % gpu.node === 0;
        if (seen.has(text) || !whole || !fits(...other, gpu.memory)) continue;
        seen.add(text);
        found.push({ shape: ofShape, layout: ofLayout, several, peak: peakOf(...other),
          gpus: many, seconds: stepSeconds(...other, gpu) });
      }
    };
    const one = neighbours(shape, layout, gpu);
    judge(1, one);
    if (!enough()) for (const first of one) judge(2, neighbours(...first, gpu));
    if (!enough()) judge(3, leanLayouts(shape, layout, gpu));
    return found.sort((a, b) => Math.max(a.gpus, have) - Math.max(b.gpus, have)
      || a.seconds - b.seconds || a.several - b.several || a.peak - b.peak);
  }

  return { stepSeconds, fitting, peakOf, alone };
})();
