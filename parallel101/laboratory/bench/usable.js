// The milliseconds from the request for a page until its players are there and one of them has
// answered a click; on the page of a long run, until one can choose steps.
(async () => {
  const figures = [...document.querySelectorAll("figure.p101")], scripts = document.scripts.length;
  const chooser = ".chooser:not([data-ready])";  // of steps, on the page of a long run
  const mounted = () => !scripts || !document.querySelector(chooser) &&
    figures.every(figure => "step" in figure.dataset);
  while (document.readyState !== "complete" || !mounted()) await new Promise(r => setTimeout(r, 2));
  const part = (figure, name) => figure.querySelector("div").shadowRoot.querySelector(name);
  const figure = scripts && figures.find(each => part(each, ".player:not(.still)"));
  if (figure) part(figure, "[data-do=next]").click();
  do await new Promise(requestAnimationFrame); while (figure && !(+figure.dataset.time > 0));
  return performance.now();
})()
