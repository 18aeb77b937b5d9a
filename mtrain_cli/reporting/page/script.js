"use strict";
const nonce = document.currentScript.nonce;
const redraws = new Map();
const dark = window.matchMedia("(prefers-color-scheme: dark)");
const narrow = () => window.innerWidth < 640;
async function unpack(id) {
  const base64 = document.getElementById(id).textContent;
  const bytes = Uint8Array.from(atob(base64), (letter) => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(stream).text();
}
function colours() {
  const style = getComputedStyle(document.documentElement);
  const names = ["--back", "--text", "--line", "--edge"];
  const [back, text, line, edge] = names.map((name) => style.getPropertyValue(name).trim());
  const family = "system-ui, -apple-system, 'Segoe UI', Roboto, Arial, sans-serif";
  return {
    page: {paper_bgcolor: back, plot_bgcolor: back, font: {family, size: 13, color: text},
      hoverlabel: {bgcolor: back, bordercolor: edge, font: {color: text}}},
    axis: {gridcolor: line, zerolinecolor: edge, linecolor: edge, ticks: "outside",
      tickcolor: edge},
  };
}
// Dark lines would not show on a dark page.
const LIGHTER = {"#333333": "#d0d0d0", "#5b5b5b": "#a8a8a8", "#2f6fb5": "#5b9be0",
  "#7a5c3e": "#c19a6b", "#8c6bb1": "#b394d6"};
function themed(data) {
  if (!dark.matches) return data;
  const change = (style) => style && LIGHTER[style.color]
    ? Object.assign({}, style, {color: LIGHTER[style.color]}) : style;
  return data.map((trace) => {
    const result = Object.assign({}, trace);
    for (const part of ["line", "marker"]) if (trace[part]) result[part] = change(trace[part]);
    return result;
  });
}
function merged(layout, entries) {
  const {page, axis} = colours();
  const legend = {orientation: "h", traceorder: "normal", y: 1, yanchor: "bottom", x: 0,
    xanchor: "left"};
  const base = {margin: {l: 62, r: 12, t: 76, b: 48}, autosize: true, legend};
  const margin = Object.assign({}, base.margin, layout.margin);
  const result = Object.assign({}, base, page, layout, {margin});
  if (narrow()) {
    // One legend entry per line, below the figure, which grows accordingly.
    result.legend = Object.assign({}, legend, {yref: "container", y: 0, yanchor: "bottom"});
    if (entries > 1 && layout.showlegend !== false) result.height = layout.height + 20 * entries;
    result.margin.t = Math.min(30, result.margin.t);
  }
  const more = Object.keys(layout).filter((name) => /^[xy]axis[2-9]$/.test(name));
  for (const name of ["xaxis", "yaxis", ...more]) {
    // plotly's larger default font cuts axis titles off on narrow pages.
    const title = Object.assign({font: {size: 13}}, layout[name].title);
    result[name] = Object.assign({automargin: true}, axis, layout[name], {title});
  }
  return result;
}
function draw(place, view) {
  const entries = view.data.filter((trace) => trace.showlegend !== false).length;
  // A zoom stays while the same view gets new points.
  const layout = merged(Object.assign({uirevision: view.labels.join()}, view.layout), entries);
  // When the window changes, plotly takes the height of the element for that of the figure.
  place.style.height = `${layout.height}px`;
  Plotly.react(place, themed(view.data), layout, {
    responsive: true, displaylogo: false, showTips: false, plotlyServerURL: "",
    modeBarButtonsToRemove: ["sendDataToCloud", "sendChartToCloud", "select2d", "lasso2d"]});
}
function setUp(figure) {
  const place = document.getElementById("figure-" + figure.name);
  if (figure.together) {
    const panels = Array.from(place.querySelectorAll("[data-panel]"));
    const all = () => panels.forEach((panel, at) => draw(panel, figure.views[at]));
    all();
    return all;
  }
  const selects = Array.from(document.querySelectorAll(`select[data-figure="${figure.name}"]`));
  const chosen = figure.views[0].labels.slice();
  function options(at) {
    const seen = new Set();
    for (const view of figure.views) {
      const matches = chosen.slice(0, at).every((label, i) => view.labels[i] === label);
      if (matches) seen.add(view.labels[at]);
    }
    return Array.from(seen);
  }
  function refresh(views = figure.views) {
    figure.views = views;
    selects.forEach((select, at) => {
      const names = options(at);
      if (!names.includes(chosen[at])) chosen[at] = names[0];
      if (String(Array.from(select.options, (entry) => entry.value)) !== String(names)) {
        select.replaceChildren(...names.map((name) => new Option(name)));
      }
      select.value = chosen[at];
      select.parentElement.hidden = names.length < 2;
      select.parentElement.style.display = names.length < 2 ? "none" : "";
    });
    draw(place, figure.views.find((one) => one.labels.every((label, i) => label === chosen[i])));
  }
  selects.forEach((select, at) => select.addEventListener("change", () => {
    chosen[at] = select.value;
    refresh();
  }));
  refresh();
  return refresh;
}
async function begin() {
  const [library, data] = await Promise.all(["plotly", "figures"].map(unpack));
  const script = document.createElement("script");
  script.nonce = nonce;
  script.textContent = library;
  document.head.append(script);
  for (const figure of JSON.parse(data)) redraws.set(figure.name, setUp(figure));
  dark.addEventListener("change", () => redraws.forEach((redraw) => redraw()));
}
const begun = begin().catch((error) => {
  const line = document.createElement("p");
  line.className = "remark";
  line.textContent = "The figures could not be drawn (" + error + "). "
    + "They need a browser of 2023 or later. The tables are complete.";
  document.body.prepend(line);
});
