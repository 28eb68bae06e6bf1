// The table of contents of a long page, which stays in sight: folded at the edge of the window, or
// open where the window has room beside the text. It marks the section that is read.
(() => {
  const list = document.querySelector("nav.contents ol");
  if (!list) return;
  const folded = document.createElement("details"), name = document.createElement("summary");
  folded.className = "toc";
  name.textContent = "Contents";
  folded.append(name, list.cloneNode(true));
  document.body.append(folded);
  const links = [...folded.querySelectorAll("a")], room = matchMedia("(min-width: 1540px)");
  const headings = links.map(link => document.getElementById(decodeURIComponent(link.hash.slice(1))));
  const mark = () => {
    const read = headings.findLastIndex(heading => heading?.getBoundingClientRect().top < 120);
    links.forEach((link, k) => link.toggleAttribute("aria-current", k === read));
  };
  const fold = () => { folded.open = room.matches; };
  folded.addEventListener("click", ({ target }) => { if (target.closest("a")) fold(); });
  folded.addEventListener("keydown", ({ key }) => { if (key === "Escape") fold(); });
  document.addEventListener("pointerdown", ({ target }) => { if (!folded.contains(target)) fold(); });
  room.addEventListener("change", fold);
  addEventListener("scroll", mark, { passive: true });
  fold();
  mark();
})();
