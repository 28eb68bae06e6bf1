/* The rules of pipeline schedules in the browser: a port of parallel101/trainers/schedules/check.py
   and time.py, with the same words. tests/browser/test_schedule_builder.py compares them on
   thousands of random lists.

   An action is an object {name: "0F2", stage: 0, kind: "F", i: 2}. A rank's list has arrays of
   them: one action, or those of an overlap. `placement[stage]` is a stage's rank. */
const scheduleRules = (() => {
  const COMMUNICATION = ["SEND_F", "RECV_F", "SEND_B", "RECV_B"];
  const ACTION = /^(\d+)(SEND_F|RECV_F|SEND_B|RECV_B|F|B|I|W)(\d+)$/;
  const OVERLAP = ")OVERLAP_F_B";

  class ScheduleError extends Error {}

  const action = (stage, kind, i) => ({ name: `${stage}${kind}${i}`, stage, kind, i });
  const sends = (part) => COMMUNICATION.includes(part.kind);

  /* "2F3" → one action in an array; "(0F1;7B0)OVERLAP_F_B" → both. */
  function parse(text) {
    if (text.startsWith("(") && text.endsWith(OVERLAP)) {
      const parts = text.slice(1, -OVERLAP.length).split(";").flatMap(parse);
      const message = parts.find(sends);
      if (message)
        throw new ScheduleError(
          `action '${text}': only forwards and backwards can overlap, and ${message.name} is ` +
          "a message. List it by itself");
      return parts;
    }
    const found = ACTION.exec(text);
    if (!found)
      throw new ScheduleError(
        `action '${text}': expected a stage, one of F, B, I, W, ${COMMUNICATION.join(", ")}, ` +
        "and a microbatch: '0F3'");
    return [action(Number(found[1]), found[2], Number(found[3]))];
  }

  const parsed = (lists) => lists.map((texts) => texts.map(parse));

  /* Stage → rank: the first rank that has an action of it. */
  function placementOf(ranks) {
    const placement = [];
    ranks.forEach((parts, rank) => parts.flat().forEach(({ stage }) => {
      placement[stage] ??= rank;
    }));
    return placement;
  }

  /* Name → { rank, place } of everything in the lists. */
  function positions(ranks, placement) {
    const where = new Map();
    ranks.forEach((of, rank) => of.forEach((parts, place) => parts.forEach(({ name, stage }) => {
      if (where.has(name)) {
        const other = where.get(name).rank;
        const both = other === rank ? `rank ${rank}` : `ranks ${other} and ${rank}`;
        throw new ScheduleError(`${name} appears twice: on ${both}`);
      }
      if (placement[stage] !== rank)
        throw new ScheduleError(
          `stage ${stage} is on rank ${placement[stage]}, and rank ${rank} has ${name}`);
      where.set(name, { rank, place });
    })));
    return where;
  }

  function checkComplete(where, placement, microbatches, ranks) {
    if (!placement.length)
      throw new ScheduleError(
        "the schedule is empty: expected at least one forward and its backward");
    for (let rank = 0; rank < ranks; rank++)
      if (!placement.includes(rank))
        throw new ScheduleError(
          `rank ${rank} has no stage: expected at least one on each of the ${ranks} ranks`);
    for (let s = 0; s < placement.length; s++)
      for (let i = 0; i < microbatches; i++) {
        const has = (kind) => where.has(`${s}${kind}${i}`);
        if (!has("F"))
          throw new ScheduleError(
            `${s}F${i} is missing: ${microbatches} microbatches pass stages 0 to ` +
            `${placement.length - 1}`);
        if (has("B") && (has("I") || has("W")))
          throw new ScheduleError(
            `the backward of microbatch ${i} on stage ${s} appears twice: ${s}B${i} and ` +
            `${s}${has("I") ? "I" : "W"}${i}`);
        if (!has("B") && !(has("I") && has("W"))) {
          const lacks = has("I") ? "W" : has("W") ? "I" : "B";
          throw new ScheduleError(
            `${s}${lacks}${i} is missing: stage ${s} has the forward of microbatch ${i}`);
        }
      }
  }

  const listsMessages = (ranks) => ranks.flat(2).some(sends);

  /* The names of what must be done before this action can be. */
  function needs({ stage, kind, i }, placement, where, listed) {
    const from = (other, done, receive) =>
      listed && placement[other] !== placement[stage] ? `${stage}${receive}${i}` : done;
    const backward = (s) => where.has(`${s}B${i}`) ? `${s}B${i}` : `${s}I${i}`;
    switch (kind) {
      case "F": return stage ? [from(stage - 1, `${stage - 1}F${i}`, "RECV_F")] : [];
      case "B": case "I": {
        const last = stage + 1 === placement.length;
        const after = last ? [] : [from(stage + 1, backward(stage + 1), "RECV_B")];
        return [`${stage}F${i}`, ...after];
      }
      case "W": return [`${stage}I${i}`];
      case "SEND_F": return [`${stage}F${i}`];
      case "SEND_B": return [backward(stage)];
      default: return [];  // a receive can be posted at any time
    }
  }

  /* The other side of a message. */
  function partner({ stage, kind, i }) {
    const other = stage + (kind === "SEND_F" || kind === "RECV_B" ? 1 : -1);
    return action(other, (kind.startsWith("SEND") ? "RECV" : "SEND") + kind.slice(4), i);
  }

  /* Let all ranks go as far as they can. Throws with the cycle if that is not to the end. */
  function checkProgress(ranks, placement, where, queued) {
    const listed = listsMessages(ranks), done = new Set();
    const place = ranks.map(() => 0), posted = ranks.map(() => []);
    const missing = (part) => needs(part, placement, where, listed).find((n) => !done.has(n));
    ranks.forEach((of, rank) => of.flat().filter(sends).forEach((part) => {
      const other = partner(part).name;
      if (!where.has(other))
        throw new ScheduleError(`rank ${rank}: ${part.name} needs ${other}, which is missing`);
    }));
    for (let moved = true; moved;) {
      moved = false;
      ranks.forEach((of, rank) => {
        for (; place[rank] < of.length; place[rank]++) {
          const parts = of[place[rank]];
          if (parts.some(missing)) break;
          if (sends(parts[0])) posted[rank].push(parts[0]);
          else parts.forEach(({ name }) => done.add(name));
          moved = true;
        }
      });
      ranks.forEach((_, rank) => {
        for (const part of posted[rank].slice(0, queued ? 1 : undefined)) {
          const other = partner(part).name, there = posted[where.get(other).rank];
          const at = there.findIndex(({ name }) => name === other);
          if (at < 0 || (queued && at > 0)) continue;
          posted[rank].splice(posted[rank].indexOf(part), 1);
          there.splice(there.findIndex(({ name }) => name === other), 1);
          done.add(part.name).add(other);
          moved = true;
        }
      });
    }
    const waiting = new Map();  // rank → the rank that it waits for, and the words
    ranks.forEach((of, rank) => {
      let part = posted[rank][0], needed;
      if (part) needed = partner(part).name;
      else if (place[rank] < of.length) {
        part = of[place[rank]].find(missing);
        needed = missing(part);
      } else return;
      const on = where.get(needed).rank;
      const words = `rank ${rank}'s ${part.name} waits for ${needed} of rank ${on}`;
      waiting.set(rank, { on, words });
    });
    if (!waiting.size) return;
    const cycle = [];
    let rank = Math.min(...waiting.keys());
    for (; !cycle.includes(rank); rank = waiting.get(rank).on) cycle.push(rank);
    const words = cycle.slice(cycle.indexOf(rank)).map((r) => waiting.get(r).words).join("; ");
    const how = queued && posted.some((of) => of.length)
      ? " under NCCL's rules, where a rank's sends and receives start one by one" : "";
    throw new ScheduleError(`the ranks would wait for each other forever${how}: ${words}`);
  }

  function checkLists(lists, rules) {
    const ranks = parsed(lists), placement = placementOf(ranks);
    const microbatches = 1 + Math.max(-1, ...ranks.flat(2).map(({ i }) => i));
    const where = positions(ranks, placement), listed = listsMessages(ranks);
    checkComplete(where, placement, microbatches, ranks.length);
    ranks.forEach((of, rank) => of.forEach((parts, place) => parts.forEach((part) => {
      for (const needed of needs(part, placement, where, listed)) {
        const at = where.get(needed);
        if (!at)
          throw new ScheduleError(`rank ${rank}: ${part.name} needs ${needed}, which is missing`);
        if (at.rank === rank && at.place >= place)
          throw new ScheduleError(
            `rank ${rank}: ${part.name} comes too early: it needs ${needed}, which comes later`);
      }
    })));
    checkProgress(ranks, placement, where, rules === "nccl");
  }

  /* The words of the error that `run` throws, or "". */
  function words(run) {
    try { run(); } catch (error) {
      if (error instanceof ScheduleError) return error.message;
      throw error;
    }
    return "";
  }

  /* Why Schedule(lists).check(rules) raises, or "". */
  const check = (lists, rules = "gloo") => words(() => checkLists(lists, rules));

  /* Why a half-built schedule can't go on like this, or "". Nothing needs to be complete, but what
     an action needs must have been placed. */
  const obstacle = (lists, placement) => words(() => {
    const ranks = parsed(lists), where = positions(ranks, placement);
    ranks.forEach((of, rank) => of.forEach((parts, place) => parts.forEach((part) => {
      const { name, stage, kind, i } = part;
      const half = ["I", "W"].find((k) => kind === "B" && where.has(`${stage}${k}${i}`));
      if (half)
        throw new ScheduleError(
          `${name} and ${stage}${half}${i} would be two backwards of the same microbatch`);
      for (const needed of needs(part, placement, where, false)) {
        const at = where.get(needed);
        const either = /I/.test(needed) && kind !== "W" ? `${needed.replace("I", "B")} or ` : "";
        if (!at)
          throw new ScheduleError(`${name} needs ${either}${needed}, which isn't placed yet`);
        if (at.rank === rank && at.place >= place)
          throw new ScheduleError(`${name} needs ${needed}, which comes later`);
      }
    })));
    checkProgress(ranks, placement, where, false);
  });

  /* Schedule.time: slots, each with what it waited for, and their sum. `costs`: seconds of
     { F, I, W } on a stage, and `communication` until a result arrives at another rank. */
  function time(lists, costs, communication = 0, placement = null) {
    const ranks = parsed(lists);
    placement ??= placementOf(ranks);
    const where = positions(ranks, placement), listed = listsMessages(ranks);
    const seconds = { ...costs, B: costs.I + costs.W };
    const ready = new Map(), now = ranks.map(() => 0), place = ranks.map(() => 0), slots = [];
    const byName = new Map(ranks.flat(2).map((part) => [part.name, part]));
    for (let moved = true; moved;) {
      moved = false;
      ranks.forEach((of, rank) => {
        for (; place[rank] < of.length; place[rank]++, moved = true) {
          const parts = of[place[rank]];
          if (parts[0].kind.startsWith("RECV")) continue;  // who needs it waits for the send
          const sources = parts.flatMap((part) => needs(part, placement, where, listed))
            .map((name) => sends(byName.get(name)) ? partner(byName.get(name)).name : name);
          if (sources.some((name) => !ready.has(name))) break;
          const arrivals = sources.map((name) =>
            [ready.get(name) + (where.get(name).rank === rank ? 0 : communication), name]);
          const last = arrivals.reduce((a, b) => b[0] > a[0] ? b : a, [0, ""]);
          const start = Math.max(now[rank], last[0]);
          if (sends(parts[0])) { ready.set(parts[0].name, start); continue; }
          const end = start + parts.reduce((sum, { kind }) => sum + seconds[kind], 0);
          slots.push({ rank, parts, start, end, free: now[rank], needed: last[1] });
          parts.forEach(({ name }) => ready.set(name, end));
          now[rank] = end;
        }
      });
    }
    return { slots, ...summary(ranks.length, slots) };
  }

  function summary(ranks, slots) {
    const byRank = Array.from({ length: ranks }, (_, r) => slots.filter((s) => s.rank === r));
    const cost = Math.max(0, ...byRank.map((of) => of.length ? of.at(-1).end - of[0].start : 0));
    const work = slots.reduce((sum, { start, end }) => sum + end - start, 0) / ranks;
    const peaks = byRank.map((of) => {
      let held = 0, peak = 0;
      for (const { parts } of of) {
        const count = (...kinds) => parts.filter(({ kind }) => kinds.includes(kind)).length;
        held += count("F");
        peak = Math.max(peak, held);
        held -= count("B", "W");
      }
      return peak;
    });
    const makespan = Math.max(0, ...slots.map(({ end }) => end))
      - Math.min(...slots.map(({ start }) => start), Infinity);
    return { makespan: slots.length ? makespan : 0, idle: cost - work,
      bubbleRate: cost ? 1 - work / cost : 0, peaks };
  }

  return { parse, check, obstacle, time, needs, positions, parsed };
})();
