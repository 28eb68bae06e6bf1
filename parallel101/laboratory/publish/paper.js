// Paper: a printed page shows its answers and its code. A handout leaves the answers out and leaves
// room to write. The button prints one, and so does the page's address with ?handout.
(() => {
  const page = document.documentElement, button = document.querySelector("button.handout");
  const asked = new URLSearchParams(location.search).has("handout");
  page.classList.toggle("handout", asked);
  addEventListener("beforeprint", () => {
    const folded = document.querySelectorAll("details.answer, details.code");
    for (const part of folded) part.open = true;
  });
  if (!button) return;
  button.hidden = false;
  button.onclick = () => {
    page.classList.add("handout");
    addEventListener("afterprint", () => page.classList.toggle("handout", asked), { once: true });
    print();
  };
})();
