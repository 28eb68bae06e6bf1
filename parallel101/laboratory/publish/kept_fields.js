// Keeps in this browser what a reader writes into a field: the dates of a term on the index, and
// predictions, for which each question gets a box. The address of the page is a part of the key,
// because pages opened from disk share one storage.
{
  const keep = (field, name) => {
    const key = `parallel101 ${location.pathname} ${name}`;
    try {
      field.value = localStorage.getItem(key) ?? "";
      field.addEventListener("input", () => localStorage.setItem(key, field.value));
    } catch {
      // The browser allows no storage: the fields can still be written in and printed.
    }
  };
  for (const field of document.querySelectorAll("input.date")) keep(field, field.ariaLabel);
  document.querySelectorAll("blockquote.predict").forEach((question, i) => {
    const box = document.createElement("textarea");
    box.className = "guess";
    box.rows = 2;
    box.ariaLabel = box.placeholder = "Your prediction";
    keep(box, question.closest(".cell")?.id || i);
    question.append(box);
  });
}
