// A box under each prediction. The browser keeps what is written there. The address of the page is
// a part of the key, because pages opened from disk share one storage.
document.querySelectorAll("blockquote.predict").forEach((question, i) => {
  const box = document.createElement("textarea");
  const name = question.closest(".cell")?.id || i;
  const key = `parallel101 ${location.pathname} ${name}`;
  box.className = "guess";
  box.rows = 2;
  box.ariaLabel = box.placeholder = "Your prediction";
  try {
    box.value = localStorage.getItem(key) ?? "";
    box.addEventListener("input", () => localStorage.setItem(key, box.value));
  } catch {
    // The browser allows no storage: the boxes can still be written in and printed.
  }
  question.append(box);
});
