// Only in the page of `mtrain report --serve`: ask for news, and change what has changed.
const EVERY = 2000;  // ms between an answer and the next question
let known = "";
const lost = document.createElement("p");
lost.className = "remark lost";
lost.hidden = true;
document.body.append(lost);
const parsed = (html) =>
  Array.from(new DOMParser().parseFromString(html, "text/html").body.children);
// What a reader has opened, scrolled, chosen or zoomed stays: an element changes in place, plotly
// draws figures, and setUp fills their lists.
function change(old, fresh) {
  if (old.isEqualNode(fresh)) return;
  if (old.nodeName !== fresh.nodeName || !old.tagName) {
    old.replaceWith(fresh);
    return;
  }
  if (old.classList.contains("figure") || old.classList.contains("selectors")) return;
  for (const {name} of Array.from(old.attributes)) {
    if (name !== "open" && !fresh.hasAttribute(name)) old.removeAttribute(name);
  }
  for (const {name, value} of fresh.attributes) old.setAttribute(name, value);
  const next = Array.from(fresh.childNodes);
  const kept = Array.from(old.childNodes);
  kept.forEach((node, at) => at < next.length ? change(node, next[at]) : node.remove());
  old.append(...next.slice(kept.length));
}
// Sections have their headings as names, so that a new one may come between two others.
function renew(parts) {
  const main = document.querySelector("main");
  const name = (part) => {
    const heading = part.querySelector("h2");
    return heading ? heading.textContent : part.nodeName;
  };
  const fresh = new Map(parts.map((part) => [name(part), part]));
  const old = new Map();
  for (const part of Array.from(main.children)) {
    if (fresh.has(name(part))) old.set(name(part), part);
    else part.remove();
  }
  let next = main.firstElementChild;
  fresh.forEach((part, title) => {
    const own = old.get(title);
    if (own) change(own, part);
    if (own && own === next) next = own.nextElementSibling;
    else main.insertBefore(own || part, next);
  });
}
function redraw(figures) {
  const names = new Set(figures.map((figure) => figure.name));
  for (const name of Array.from(redraws.keys())) if (!names.has(name)) redraws.delete(name);
  for (const figure of figures) {
    const again = redraws.get(figure.name);
    if (again && !figure.together) again(figure.views);
    else redraws.set(figure.name, setUp(figure));
  }
}
async function ask() {
  try {
    const answer = await fetch("live?known=" + known);
    if (!answer.ok) throw new Error(answer.status + " " + answer.statusText);
    const news = await answer.json();
    document.title = news.title;
    if (news.body) {
      renew(parsed(news.body));
      redraw(news.figures);
    }
    change(document.getElementById("news"), parsed(news.news)[0]);
    known = news.known;
    lost.hidden = true;
  } catch (error) {
    if (lost.hidden) {
      lost.textContent = "No answer from mtrain report since " + new Date().toLocaleTimeString()
        + " (" + error.message + "). The page continues when it answers again.";
    }
    lost.hidden = false;
  }
}
async function watch() {
  if (!document.hidden) await ask();
  setTimeout(watch, EVERY);
}
begun.then(watch);
