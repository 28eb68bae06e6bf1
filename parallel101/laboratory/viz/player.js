// The player: replaces the looping SVG in the figure's <img> with the same SVG and controls: play,
// step, scrub, speed. It is in a shadow root, so that its styles and the page's do not mix. A stop
// is [start, end, label]; times are in seconds. `signal`: an AbortSignal for when the figure goes.
function mount(figure, { duration, stops, intro, narrow, css }, signal) {
  if (figure.dataset.mounted) return;
  figure.dataset.mounted = "true";
  const host = document.createElement("div");
  // in JupyterLab, the arrow keys and space go to the player while it has the focus
  host.setAttribute("data-lm-suppress-shortcuts", "true");
  const root = host.attachShadow({ mode: "open" });
  const icon = path => `<svg viewBox="0 0 16 16" aria-hidden="true"><path d="${path}"/></svg>`;
  root.innerHTML = `<style>${css}</style>
  <div class="player"><div class="stage"></div><div class="storyboard"></div>
  <p class="caption"></p>
  <div class="bar">
    <button class="main" data-do="play"></button>
    <button data-do="previous" aria-label="Previous step" title="Previous step (←)">
      ${icon("M3 2h2v12H3zM14 2v12L6 8z")}</button>
    <button data-do="next" aria-label="Next step" title="Next step (→)">
      ${icon("M11 2h2v12h-2zM2 2v12l8-6z")}</button>
    <span class="track"><input type="range" min="0" step="any" aria-label="Time"></span>
    <span class="count"></span>
    <select aria-label="Speed" title="Speed">
      <option value=".25">¼×</option><option value=".5">½×</option>
      <option value="1" selected>1×</option>
      <option value="2">2×</option><option value="4">4×</option></select>
  </div><div class="unseen" aria-live="polite"></div></div>`;
  const find = selector => root.querySelector(selector);
  const player = find(".player"), stage = find(".stage"), caption = find(".caption");
  const slider = find("input"), count = find(".count"), speed = find("select");
  const playButton = find("[data-do=play]"), announcer = find("[aria-live]");

  const image = figure.querySelector("img");
  const bytes = Uint8Array.from(atob(image.src.split(",")[1]), char => char.charCodeAt(0));
  const source = new DOMParser().parseFromString(new TextDecoder().decode(bytes), "image/svg+xml");
  const svg = document.importNode(source.documentElement, true);
  // the colours come from .player, which follows the page's theme
  svg.querySelector("style.theme").remove();
  svg.querySelector("title").remove();  // browsers show it as a tooltip over the whole picture
  svg.setAttribute("aria-label", image.alt);
  stage.append(svg);
  player.classList.toggle("still", !stops.length);

  // ---- time
  const reducedMotion = matchMedia("(prefers-reduced-motion: reduce)");
  const ends = stops.map(stop => stop[1]);
  let time = 0, playing = false, goal = duration, last = 0, shown = -1, touched = false;
  // keyTimes are rounded: seek a little later, but not past the end of the loop
  const clamp = t => Math.max(0, Math.min(t + .002, duration - .001));
  // how many stops have started; 0 before the first
  const stepAt = t => stops.filter(stop => stop[0] <= clamp(t)).length;
  const seek = t => svg.setCurrentTime(clamp(t));
  const draw = () => {
    const step = stepAt(time);
    // with reduced motion, only the end of each step is shown
    seek(reducedMotion.matches && playing && step ? ends[step - 1] : time);
    slider.value = time;
    const label = step ? stops[step - 1][2] : intro;
    if (step !== shown) {
      shown = step;
      count.textContent = `${step} / ${stops.length}`;
      caption.textContent = label;
      slider.setAttribute("aria-valuetext", label);
      announcer.textContent = label;
    }
    figure.dataset.time = time.toFixed(3);
    figure.dataset.step = step;
  };
  const setPlaying = on => {
    playing = on;
    playButton.innerHTML = icon(on ? "M3 2h4v12H3zM9 2h4v12H9z" : "M3 1.5v13L14 8z");
    playButton.setAttribute("aria-label", on ? "Pause" : "Play");
    playButton.title = `${on ? "Pause" : "Play"} (space)`;
    if (on) { touched = true; last = performance.now(); requestAnimationFrame(tick); }
  };
  const tick = now => {
    if (!playing || !figure.isConnected) return setPlaying(false);
    time += Math.max(0, Math.min(.1, (now - last) / 1000)) * speed.value;
    last = now;
    if (time >= goal) { time = goal; draw(); return setPlaying(false); }
    draw();
    requestAnimationFrame(tick);
  };
  const jump = t => { touched = true; setPlaying(false); time = t; draw(); };
  const actions = {
    play() {
      if (playing) return setPlaying(false);
      if (time >= duration - .01) time = 0;
      goal = duration;
      setPlaying(true);
    },
    next() {
      // pressed again during a step: skip to the end of that step
      if (playing && goal < duration) jump(goal);
      goal = ends.find(end => end > time + 1e-3) ?? duration;
      if (reducedMotion.matches) jump(goal); else if (time < goal) setPlaying(true);
    },
    previous() { jump(ends.filter(end => end < time - 1e-3).pop() ?? 0); },
    home() { jump(0); },
    end() { jump(duration); },
  };
  const keys = { " ": "play", ArrowRight: "next", ArrowLeft: "previous", Home: "home", End: "end" };
  if (stops.length) {
    root.querySelectorAll("[data-do]").forEach(button => {
      button.onclick = () => actions[button.dataset.do]();
    });
    slider.max = duration;
    slider.oninput = () => jump(+slider.value);
    stage.tabIndex = 0;
    stage.setAttribute("aria-label",
      "Picture. Space: play or pause. Arrow keys: previous or next step.");
    stage.onclick = () => actions.play();
    player.addEventListener("keydown", event => {
      const action = keys[event.key];
      if (!action || event.ctrlKey || event.metaKey || event.altKey) return;
      if (event.target.matches("select")) return;
      // space presses the button that has the focus
      if (event.key === " " && event.target.matches("button")) return;
      event.preventDefault();
      event.stopPropagation();
      actions[action]();
    });
    for (const end of ends) {
      const tick = document.createElement("i");
      tick.className = "tick";
      tick.style.left = `calc(8px + (100% - 16px) * ${end / duration})`;
      find(".track").prepend(tick);
    }
  }

  // ---- printing: the moment at which the reader stopped the picture, or else a storyboard of up to
  // six frames: up to five steps while their messages are under way, and the end
  const storyboard = find(".storyboard");
  const frames = () => {
    const count = Math.min(5, stops.length);
    const steps = Array.from({ length: count }, (_, k) => Math.floor(k * stops.length / count));
    // the last step may end with a rest, so half of the shortest one is inside each
    const half = Math.min(...stops.map(([start, end]) => end - start)) / 2;
    return [...steps.map(k => [stops[k][0] + half, k]), [duration, stops.length - 1]];
  };
  addEventListener("beforeprint", () => {
    setPlaying(false);
    const stopped = touched && time > 0 && time < duration - .01;
    seek(stopped ? time : duration);
    if (stopped || !stops.length) return;
    storyboard.replaceChildren(...frames().map(([t, k]) => {
      const frame = document.createElement("div"), line = document.createElement("div");
      frame.className = "frame";
      line.textContent = t < duration ? `${k + 1} / ${stops.length}` : "the end";
      frame.append(svg.cloneNode(true), line);
      frame.moment = t;
      return frame;
    }));
    for (const { firstChild: copy, moment } of storyboard.children) {
      copy.pauseAnimations();
      copy.setCurrentTime(clamp(moment));
    }
  }, { signal });
  addEventListener("afterprint", () => { storyboard.replaceChildren(); seek(time); }, { signal });

  // ---- theme: dark if the page behind the figure is dark, checked again whenever the page changes
  const prefersDark = matchMedia("(prefers-color-scheme: dark)");
  const luminance = () => {
    for (let node = figure; node; node = node.parentElement || node.getRootNode().host) {
      const rgba = getComputedStyle(node).backgroundColor.match(/[\d.]+/g);
      if (rgba && (rgba.length < 4 || +rgba[3] > .5)) {
        return .299 * rgba[0] + .587 * rgba[1] + .114 * rgba[2];
      }
    }
    const scheme = getComputedStyle(document.documentElement).colorScheme;
    const either = scheme.includes("light");
    return scheme.includes("dark") && (!either || prefersDark.matches) ? 0 : 255;
  };
  const setTheme = () => player.classList.toggle("dark", luminance() < 110);
  // a new style sheet may load late
  const updateTheme = () => {
    setTheme();
    for (const delay of [100, 800]) setTimeout(setTheme, delay);
  };
  const observer = new MutationObserver(updateTheme);
  observer.observe(document.documentElement, { attributes: true });
  observer.observe(document.body, { attributes: true });
  prefersDark.addEventListener("change", updateTheme, { signal });

  // ---- phones: the panels are stacked, and the caption is below the picture, where it can wrap
  const wide = svg.getAttribute("viewBox"), card = svg.querySelector(".card");
  player.classList.toggle("wide", !narrow);
  const fit = () => {
    const small = player.clientWidth > 0 && player.clientWidth < 560;
    player.classList.toggle("small", small);
    if (!narrow) return;
    const [width, height] = small ? narrow : wide.split(" ").slice(2).map(Number);
    for (const [name, value] of [["width", width], ["height", height]]) {
      svg.setAttribute(name, value);
      card.setAttribute(name, value - 1);
    }
    svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    for (const panel of svg.querySelectorAll("[data-narrow]")) {
      const transform = panel.dataset.narrow, leftOut = transform === "none";
      const hidden = small ? leftOut : panel.hasAttribute("data-only-narrow");
      panel.style.display = hidden ? "none" : "";
      if (small && !leftOut) panel.setAttribute("transform", transform);
      else panel.removeAttribute("transform");
    }
  };

  figure.querySelector("picture").replaceWith(host);
  svg.pauseAnimations();
  setPlaying(false);
  draw();
  updateTheme();
  fit();
  const resized = new ResizeObserver(fit);
  resized.observe(player);
  signal?.addEventListener("abort", () => [observer, resized].forEach(o => o.disconnect()));
}
