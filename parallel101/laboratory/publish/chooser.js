// Draws the timeline of the steps that a reader chooses on the page of a long run. The events come
// as compressed columns of numbers (see run_page.py).
(async () => {
  const place = document.querySelector(".chooser"), [about, packed] =
    [...place.querySelectorAll("script")].map(script => script.textContent);
  const run = JSON.parse(about), { left, right, unit } = run, last = run.first + run.count - 1;
  const bytes = Uint8Array.from(atob(packed), letter => letter.charCodeAt(0));
  const unpacked = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  const data = await new Response(unpacked).arrayBuffer();
  let at = 0;
  const column = (type, count) => {
    at += count * type.BYTES_PER_ELEMENT;
    return new type(data, at - count * type.BYTES_PER_ELEMENT, count);
  };
  const begins = column(Float64Array, run.count), ends = column(Float64Array, run.count);
  const [starts, durations, texts] = [1, 2, 3].map(() => column(Uint32Array, run.events));
  const [ranks, looks] = [1, 2].map(() => column(Uint16Array, run.events));
  const lanes = column(Uint8Array, run.events);

  const roundStep = (span, most) => {
    const step = 10 ** Math.floor(Math.log10(span / most));
    return step * [1, 2, 5, 10, 20].find(k => span / (step * k) <= most);
  };
  const escaped = text => text.replace(/[&<>"]/g, c => `&#${c.charCodeAt(0)};`);
  const width = 960, name = number => `${unit} ${number.toLocaleString("en")}`;
  const svg = (height, label, body) => `<svg viewBox="0 0 ${width} ${height}" role="img" ` +
    `aria-label="${escaped(label)}"><defs>${run.hatching}</defs>${body}</svg>`;
  const words = (text, x, y, rest) => `<text x="${x}" y="${y}" ${rest}>${escaped(text)}</text>`;

  // the time of each step: of steps that share a column of pixels, the longest
  const columns = Math.min(run.count, right - left), tall = 56;
  const longest = new Float64Array(columns);
  let slowest = 0;
  for (let k = 0; k < run.count; k++) {
    const took = ends[k] - begins[k], c = Math.floor(k * columns / run.count);
    if (took > longest[c]) longest[c] = took;
    // the first step is slow in every run: caches are cold, and ranks connect
    if (k > 0 && took > ends[slowest] - begins[slowest] || slowest === 0) slowest = k;
  }
  // so it doesn't set the scale either: its bar ends at the top
  const most = ends[slowest] - begins[slowest] || 1, wide = (right - left) / columns;
  const strip = longest.reduce((path, took, c) => {
    const h = Math.max(1, tall * Math.min(1, took / most));
    return path + `M${(left + c * wide).toFixed(1)} ${(8 + tall - h).toFixed(1)}` +
      `h${Math.max(.6, wide - (wide > 3 ? 1 : 0)).toFixed(1)}v${h.toFixed(1)}H` +
      `${(left + c * wide).toFixed(1)}z`;
  }, "");
  const stepX = k => left + (right - left) * k / run.count;

  place.querySelector(".drawn").innerHTML = `
    <div class="strip"></div>
    <div class="controls">
      <label>${unit}s <input class="from" type="number" min="${run.first}" max="${last}"></label>
      <label>to <input class="to" type="number" min="${run.first}" max="${last}"></label>
      <button class="earlier" aria-label="earlier">←</button><button class="later"
        aria-label="later">→</button>
      <button class="wider">more</button><button class="narrower">fewer</button>
      <button class="slowest">slowest ${unit}</button><output></output>
    </div><div class="picture"></div>`;
  const find = selector => place.querySelector(selector);
  const from = find(".from"), to = find(".to");
  const limited = number => Math.min(last, Math.max(run.first, Math.round(number) || run.first));

  function choose(a, b) {
    [a, b] = [limited(Math.min(a, b)), limited(Math.max(a, b))];
    from.value = a;
    to.value = b;
    const [i, j] = [a - run.first, b - run.first];
    find(".strip").innerHTML = svg(tall + 34, `The time of each ${unit}`,
      words(humanSeconds(most), left - 10, 18, 'class="m e" font-size="12"') +
      `<rect class="row" x="${left}" y="8" width="${right - left}" height="${tall}"/>` +
      `<path class="f4" d="${strip}"/>` +
      `<rect class="chosen" x="${stepX(i) - 1}" y="4" width="${stepX(j + 1) - stepX(i) + 2}" ` +
      `height="${tall + 8}"/>` +
      words(name(run.first), left, tall + 28, 'class="m" font-size="12"') +
      words(name(last), right, tall + 28, 'class="m e" font-size="12"'));
    let begin = Infinity, end = -Infinity;
    for (let k = i; k <= j; k++) {
      begin = Math.min(begin, begins[k]);
      end = Math.max(end, ends[k]);
    }
    const label = a === b ? name(a) : `${unit}s ${a.toLocaleString("en")} to ` +
      b.toLocaleString("en");
    find("output").textContent = `${humanSeconds(end - begin)}, from ${humanSeconds(begin)} on`;
    find(".picture").innerHTML = timeline(begin, end, i, j, label);
  }

  function timeline(begin, end, i, j, label) {
    const n = run.ranks, depth = run.lanes;
    const high = n * Math.max(depth, 1) <= 16 ? 17 : n * Math.max(depth, 1) <= 40 ? 11 : 4;
    const thin = n <= 16 ? 10 : 6, row = depth * high + thin + (n <= 16 ? 10 : n <= 40 ? 4 : 1);
    const top = 56, span = end - begin || 1, scale = (right - left) / span;
    const x = t => left + (t - begin) * scale, parts = [];
    let legend = 28;
    for (const [text, look] of run.legend) {
      if (legend + 20 + 7 * text.length > right) break;
      parts.push(`<rect x="${legend}" y="10" width="14" height="10" rx="2" class="${look}"/>` +
        words(text, legend + 20, 19, 'class="m" font-size="12.5"'));
      legend += 38 + 7 * text.length;
    }
    for (let rank = 0; rank < n; rank++) {
      const y = top + rank * row;
      parts.push(`<rect class="row" x="${left}" y="${y}" width="${right - left}" ` +
        `height="${depth * high + thin}"/>`);
      if (rank % Math.ceil(15 / row) === 0)
        parts.push(words(`rank ${rank}`, left - 10, y + (depth * high + thin) / 2 + 4,
          'class="m e" font-size="12"'));
    }
    for (let k = i; k <= j && j - i < 40; k++) {  // where each step begins
      const at = x(begins[k]), room = 40 * (j - i + 1) < right - left;
      parts.push(`<path class="edge" d="M${at.toFixed(1)} ${top - 8}V${top + n * row}"/>` +
        (room ? words(String(run.first + k), at + 3, top - 4, 'class="m" font-size="11"') : ""));
    }
    // neighbouring bars of one look that are narrower than a pixel share one
    const open = new Map(), bars = [];
    for (let e = 0; e < run.events; e++) {
      const start = run.begin + starts[e] * run.tick, stop = start + durations[e] * run.tick;
      // times are rounded to ticks: what ends where the first step begins belongs to the one before
      if (start < begin - run.tick && stop < begin + run.tick) continue;
      if (start > end - run.tick && stop > end + run.tick) continue;
      const key = (ranks[e] * 8 + lanes[e]) * 65536 + looks[e], before = open.get(key);
      if (before && (stop - start) * scale < 1 && (start - before.stop) * scale < .5 &&
          (before.stop - before.start) * scale < 2) {
        before.stop = Math.max(before.stop, stop);
        before.count++;
      } else {
        const bar = { e, start, stop, count: 1 };
        open.set(key, bar);
        bars.push(bar);
      }
    }
    for (const { e, start, stop, count } of bars) {
      const [look, text] = run.looks[looks[e]], wait = look === "idle";
      if (wait && stop === start) continue;
      const x0 = Math.max(left, x(start)), across = Math.min(right, x(stop)) - x0;
      const message = lanes[e] === run.messages, half = look === "send" || look === "recv";
      const y = top + ranks[e] * row + (message ? depth * high + 1 + (look === "recv") *
        (thin - 2) / 2 : lanes[e] * high + .5);
      const h = message ? (thin - 2) * (half ? .5 : 1) - .4 : high - 1;
      const box = `x="${x0.toFixed(1)}" y="${y.toFixed(1)}" height="${h.toFixed(1)}" ` +
        `width="${Math.max(.8, across - .6).toFixed(1)}"`;
      const told = count > 1 ? `${count} × ${text || look}, ${humanSeconds(stop - start)}`
        : run.texts[texts[e]].replace("$", () => humanSeconds(stop - start));
      parts.push((wait ? `<rect class="card" ${box}/>` : "") +
        `<rect class="${look}" ${box}><title>${escaped(told)}</title></rect>`);
      if (high >= 11 && count === 1 && text && 6.6 * text.length + 6 < across)
        parts.push(words(text, x0 + across / 2, y + h / 2 + 3.6, 'font-size="10.5" class="' +
          (wait ? 'm c" style="stroke:var(--bg);stroke-width:3;paint-order:stroke"'
            : `c o${look.slice(1)}"`)));
    }
    const axis = top + n * row + 4, step = roundStep(span, 8);
    parts.push(`<path class="axis" d="M${left} ${axis}H${right}"/>`);
    for (let k = 0; k * step <= span * (1 + 1e-9); k++)
      parts.push(`<path class="axis" d="M${x(begin + k * step).toFixed(1)} ${axis}v5"/>` +
        words(k ? humanSeconds(k * step) : "0", x(begin + k * step).toFixed(1), axis + 19,
          'class="m c" font-size="11"'));
    return svg(axis + 30, `Timeline of ${label}`, parts.join(""));
  }

  from.onchange = to.onchange = () => choose(+from.value, +to.value);
  const move = by => choose(+from.value + by, +to.value + by);
  const size = () => to.value - from.value + 1;
  find(".earlier").onclick = () => move(-Math.min(size(), from.value - run.first));
  find(".later").onclick = () => move(Math.min(size(), last - to.value));
  find(".wider").onclick = () => choose(+from.value - Math.ceil(size() / 2), +to.value +
    Math.ceil(size() / 2));
  find(".narrower").onclick = () => size() > 1 && choose(+from.value + Math.floor(size() / 4),
    +to.value - Math.max(1, Math.floor(size() / 4)));
  find(".slowest").onclick = () => choose(run.first + slowest, run.first + slowest);
  let grabbed = null;
  const pointed = event => {
    const box = find(".strip").getBoundingClientRect();
    const x = (event.clientX - box.left) * width / box.width;
    return run.first + Math.floor((x - left) / (right - left) * run.count);
  };
  find(".strip").onpointerdown = event => choose(grabbed = pointed(event), grabbed);
  find(".strip").onpointermove = event => grabbed !== null && choose(grabbed, pointed(event));
  addEventListener("pointerup", () => { grabbed = null; });
  place.hidden = false;
  choose(last - 4, last);
  place.dataset.ready = "";
})();
