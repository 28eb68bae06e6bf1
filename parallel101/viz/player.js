// The player: takes the looping SVG out of the figure's <img> and plays it by hand: play, step, scrub, speed.
// Everything stands in a shadow root, so that no style leaks either way. Steps are [start, end, label], in seconds.
function mount(figure, { duration, steps, intro, title, narrow, css }) {
  if (figure.dataset.mounted) return;
  figure.dataset.mounted = "true";
  const host = document.createElement("div");
  host.setAttribute("data-lm-suppress-shortcuts", "true");  // JupyterLab: arrows, space and letters are ours while we have the focus
  const root = host.attachShadow({ mode: "open" });
  root.innerHTML = `<style>${css}</style>
  <div class="player" role="group"><div class="stage"></div><p class="caption"></p>
  <div class="bar">
    <button class="main" data-do="play"></button>
    <button data-do="previous" aria-label="Previous step" title="Previous step (←)"><svg viewBox="0 0 16 16"><path d="M3 2h2v12H3zM14 2v12L6 8z"/></svg></button>
    <button data-do="next" aria-label="Next step" title="Next step (→)"><svg viewBox="0 0 16 16"><path d="M11 2h2v12h-2zM2 2v12l8-6z"/></svg></button>
    <span class="track"><input type="range" min="0" step="any" aria-label="Time"></span>
    <span class="count"></span>
    <select aria-label="Speed" title="Speed"><option value=".25">¼×</option><option value=".5">½×</option>
      <option value="1" selected>1×</option><option value="2">2×</option><option value="4">4×</option></select>
  </div><div class="unseen" aria-live="polite"></div></div>`;
  const find = selector => root.querySelector(selector);
  const player = find(".player"), stage = find(".stage"), slider = find("input"), count = find(".count"), speed = find("select");
  const playButton = find("[data-do=play]"), caption = find(".caption"), aloud = find("[aria-live]");

  const image = figure.querySelector("img");
  const bytes = Uint8Array.from(atob(image.src.split(",")[1]), char => char.charCodeAt(0));
  const source = new DOMParser().parseFromString(new TextDecoder().decode(bytes), "image/svg+xml");
  const svg = document.importNode(source.documentElement, true);
  svg.querySelector("style.theme").remove();  // the colours come from .player, which follows the page
  svg.querySelector("title").remove();        // it would pop up as a tooltip over the whole picture
  svg.setAttribute("aria-label", image.alt);
  stage.append(svg);
  player.setAttribute("aria-label", title);
  player.classList.toggle("still", !steps.length);

  // ---- time
  const less = matchMedia("(prefers-reduced-motion: reduce)");
  const stops = steps.map(step => step[1]);
  let time = 0, playing = false, goal = duration, last = 0, shown = -1, touched = false;
  const moment = t => Math.max(0, Math.min(t + .002, duration - .001));  // past the rounding of keyTimes, and before the loop begins anew
  const stepAt = t => steps.filter(step => step[0] <= moment(t)).length;  // how many have begun; 0 before the first
  const seek = t => svg.setCurrentTime(moment(t));
  const draw = () => {
    const step = stepAt(time);
    seek(less.matches && playing && step ? stops[step - 1] : time);  // less motion: each step's outcome, and nothing that slides
    slider.value = time;
    const label = step ? steps[step - 1][2] : intro;
    if (step !== shown) {
      shown = step;
      count.textContent = `${step} / ${steps.length}`;
      caption.textContent = label;
      slider.setAttribute("aria-valuetext", label);
      aloud.textContent = label;
    }
    figure.dataset.time = time.toFixed(3);
    figure.dataset.step = step;
  };
  const setPlaying = on => {
    playing = on;
    playButton.innerHTML = `<svg viewBox="0 0 16 16"><path d="${on ? "M3 2h4v12H3zM9 2h4v12H9z" : "M3 1.5v13L14 8z"}"/></svg>`;
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
    play() { if (playing) return setPlaying(false); if (time >= duration - .01) time = 0; goal = duration; setPlaying(true); },
    next() {
      if (playing && goal < duration) jump(goal);  // pressed again while a step plays: take it as done
      goal = stops.find(stop => stop > time + 1e-3) ?? duration;
      if (less.matches) jump(goal); else if (time < goal) setPlaying(true);
    },
    previous() { jump(stops.filter(stop => stop < time - 1e-3).pop() ?? 0); },
    home() { jump(0); },
    end() { jump(duration); },
  };
  const keys = { " ": "play", ArrowRight: "next", ArrowLeft: "previous", Home: "home", End: "end" };
  if (steps.length) {
    root.querySelectorAll("[data-do]").forEach(button => { button.onclick = () => actions[button.dataset.do](); });
    slider.max = duration;
    slider.oninput = () => jump(+slider.value);
    stage.tabIndex = 0;
    stage.setAttribute("aria-label", "Picture: space plays, arrows step");
    stage.onclick = () => actions.play();
    player.addEventListener("keydown", event => {
      const action = keys[event.key];
      if (!action || event.ctrlKey || event.metaKey || event.altKey || event.target.matches("select")) return;
      if (event.key === " " && event.target.matches("button")) return;  // a button's own key
      event.preventDefault();
      event.stopPropagation();
      actions[action]();
    });
    for (const stop of stops) {
      const tick = document.createElement("i");
      tick.className = "tick";
      tick.style.left = `calc(8px + (100% - 16px) * ${stop / duration})`;
      find(".track").prepend(tick);
    }
  }

  // ---- on paper: the outcome, where nobody has moved the slider yet
  addEventListener("beforeprint", () => { setPlaying(false); seek(touched ? time : duration); });
  addEventListener("afterprint", () => seek(time));

  // ---- theme: dark where the page behind the figure is dark, and again whenever it changes
  const luminance = () => {
    for (let node = figure; node; node = node.parentElement || node.getRootNode().host) {
      const rgba = getComputedStyle(node).backgroundColor.match(/[\d.]+/g);
      if (rgba && (rgba.length < 4 || +rgba[3] > .5)) return .299 * rgba[0] + .587 * rgba[1] + .114 * rgba[2];
    }
    const scheme = getComputedStyle(document.documentElement).colorScheme;
    return scheme.includes("dark") && (!scheme.includes("light") || matchMedia("(prefers-color-scheme: dark)").matches) ? 0 : 255;
  };
  const setTheme = () => player.classList.toggle("dark", luminance() < 110);
  const themeSoon = () => { setTheme(); setTimeout(setTheme, 100); setTimeout(setTheme, 800); };  // a page's new style sheet may arrive late
  const observer = new MutationObserver(themeSoon);
  for (const node of [document.documentElement, document.body]) observer.observe(node, { attributes: true });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", themeSoon);

  // ---- a phone: the panels stand under each other, and the words go below the picture, where they can wrap
  const wide = svg.getAttribute("viewBox"), card = svg.querySelector(".card");
  player.classList.toggle("wide", !narrow);
  const fit = () => {
    const small = player.clientWidth > 0 && player.clientWidth < 560;
    player.classList.toggle("small", small);
    if (!narrow) return;
    const [width, height] = small ? narrow : wide.split(" ").slice(2).map(Number);
    for (const [name, value] of [["width", width], ["height", height]]) { svg.setAttribute(name, value); card.setAttribute(name, value - 1); }
    svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    for (const panel of svg.querySelectorAll("[data-narrow]")) {
      panel.style.display = small && panel.dataset.narrow === "none" ? "none" : "";
      if (small && panel.dataset.narrow !== "none") panel.setAttribute("transform", panel.dataset.narrow); else panel.removeAttribute("transform");
    }
  };

  figure.querySelector("picture").replaceWith(host);
  svg.pauseAnimations();
  setPlaying(false);
  draw();
  themeSoon();
  fit();
  new ResizeObserver(fit).observe(player);
}
