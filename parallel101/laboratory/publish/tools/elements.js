/* What the scripts of the pages that play have in common. */

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
