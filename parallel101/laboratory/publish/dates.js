// Keeps what a teacher writes into the fields of the index, such as the date of a lecture, in this
// browser. The address of the page is a part of the key, because pages opened from disk share one
// storage.
for (const field of document.querySelectorAll("input.date")) {
  const key = `parallel101 ${location.pathname} ${field.ariaLabel}`;
  try {
    field.value = localStorage.getItem(key) ?? "";
    field.addEventListener("input", () => localStorage.setItem(key, field.value));
  } catch {
    // The browser allows no storage: the fields still print.
  }
}
