/* What the scripts of the pages that play have in common, and that of a long run's page. */

const at = (id) => document.getElementById(id);

function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

/* Copies words, and says so in the page's element #copied. */
async function copy(words, what) {
  try {
    await navigator.clipboard.writeText(words);
  } catch {  // not allowed here
    const field = document.body.appendChild(make("textarea"));
    field.value = words;
    field.select();
    document.execCommand("copy");
    field.remove();
  }
  at("copied").textContent = `Copied ${what}.`;
}

/* ---- numbers as text, as parallel101/laboratory/record/units.py writes them ---- */

function humanBytes(count) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  for (; count >= 1024 && unit < 4; unit++) count /= 1024;
  return `${count.toFixed(count >= 100 || Number.isInteger(count) ? 0 : 1)} ${units[unit]}`;
}

function humanSeconds(seconds) {
  const [unit, scale] = [["s", 1], ["ms", 1e3]].find(([, scale]) => seconds * scale >= 1)
    ?? ["µs", 1e6];
  const value = seconds * scale;
  return `${value.toFixed(value >= 100 || Number.isInteger(value) ? 0 : value >= 10 ? 1 : 2)} ` +
    unit;
}
