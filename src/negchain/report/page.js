"use strict";
window.addEventListener("error", (event) => {
  document.documentElement.dataset.error = event.message;
});

const data = JSON.parse(document.getElementById("negchain-data").textContent);

function format(value, unit) {
  if (unit === "percent") return (100 * value).toFixed(1) + " %";
  if (unit === "count" && value >= 999.95 && value < 9.995e14) {
    const rounded = +value.toPrecision(3);  // before its unit is chosen: 999,500 is 1M
    const units = [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]];
    const [size, suffix] = units.find(([s]) => rounded >= s);
    return +(rounded / size).toPrecision(3) + suffix;
  }
  return String(+value.toPrecision(4)).replace("-", "−");
}

function formatX(value, axis) {
  if (axis === "samples") return format(value, "count") + " samples";
  if (value < 120) return +value.toPrecision(3) + " s";
  return value < 7200 ? +(value / 60).toPrecision(3) + " min" : +(value / 3600).toPrecision(3) + " h";
}

function element(tag, text, colour) {
  const made = document.createElement(tag);
  made.textContent = text;
  if (colour) made.style.setProperty("--c", colour);
  return made;
}

function row(left, right, colour) {
  const made = element("p", "", colour);
  made.append(element("span", left), element("b", right));
  return made;
}

/* A point of the pointer in the units of an SVG's viewBox. */
function locate(svg, event) {
  const box = svg.getBoundingClientRect();
  const scale = svg.viewBox.baseVal.width / box.width;
  return { x: (event.clientX - box.left) * scale, y: (event.clientY - box.top) * scale };
}

function showTip(host, event, children) {
  hideTip(host);
  const tip = element("div", "");
  tip.className = "tip";
  tip.append(...children);
  host.append(tip);
  const box = host.getBoundingClientRect();
  const x = event.clientX - box.left, y = event.clientY - box.top;
  const left = x + tip.offsetWidth + 24 > box.width ? x - tip.offsetWidth - 14 : x + 14;
  tip.style.left = Math.max(4, left) + "px";
  tip.style.top = Math.max(4, y - tip.offsetHeight - 10) + "px";
}

function hideTip(host) {
  host.querySelectorAll(".tip").forEach((tip) => tip.remove());
}

function nearest(sorted, value) {
  let low = 0, high = sorted.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (sorted[middle] < value) low = middle; else high = middle;
  }
  return value - sorted[low] < sorted[high] - value ? low : high;
}

function shape(tag, attributes, parent) {
  const made = document.createElementNS(parent.namespaceURI, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  parent.append(made);
}

function followChart(svg) {
  const chart = data.charts[svg.dataset.chart];
  const host = svg.closest(".card"), cursor = svg.querySelector(".cursor");
  const [left, top, right, bottom] = chart.box;
  const toX = (v) => left + (v - chart.x[0]) / (chart.x[1] - chart.x[0]) * (right - left);
  const toY = (v) => bottom - (v - chart.y[0]) / (chart.y[1] - chart.y[0]) * (bottom - top);
  const leave = () => { cursor.replaceChildren(); hideTip(host); };
  svg.addEventListener("pointerleave", leave);
  svg.addEventListener("pointermove", (event) => {
    const at = locate(svg, event);
    leave();
    if (at.x < left - 6 || at.x > right + 6) return;
    const wanted = chart.x[0] + (at.x - left) / (right - left) * (chart.x[1] - chart.x[0]);
    const found = chart.series
      .filter((s) => !svg.querySelector(`.series.dim[data-series="${s.index}"]`))
      .map((s) => ({ s, i: nearest(s.x, wanted) }))
      .sort((a, b) => b.s.y[b.i] - a.s.y[a.i]);
    if (!found.length) return;
    const snap = found.map(({ s, i }) => s.x[i])
      .reduce((a, b) => (Math.abs(b - wanted) < Math.abs(a - wanted) ? b : a));
    shape("path", { d: `M${toX(snap)} ${top}V${bottom}` }, cursor);
    for (const { s, i } of found) {
      shape("circle", { cx: toX(s.x[i]), cy: toY(s.y[i]), r: 4, style: `--c:${s.colour}` }, cursor);
    }
    const lines = found.map(({ s, i }) => row(s.label, format(s.y[i], chart.unit)
      + (s.sd ? " ± " + format(s.sd[i], chart.unit) : ""), s.colour));
    const place = chart.places[Math.floor(snap)] ?? formatX(snap, chart.axis);
    showTip(host, event, [element("p", place), ...lines]);
  });
}

function followMap(section) {
  const map = data.maps[section.dataset.map], host = section.querySelector(".map");
  const svg = host.querySelector("svg"), cursor = svg.querySelector(".cursor");
  const leave = () => { cursor.replaceChildren(); hideTip(host); };
  svg.addEventListener("pointerleave", leave);
  svg.addEventListener("pointermove", (event) => {
    const at = locate(svg, event);
    leave();
    let best = -1, closest = 14 * 14;
    map.xy.forEach(([x, y], i) => {
      const gap = (x - at.x) ** 2 + (y - at.y) ** 2;
      if (gap < closest) { closest = gap; best = i; }
    });
    if (best < 0) return;
    const [cx, cy] = map.xy[best];
    shape("circle", { cx, cy, r: 6 }, cursor);
    const name = map.names[map.labels[best]];
    const children = name ? [element("b", name)] : [];
    if (best < map.thumbs) children.push(thumbnail(map, best));
    if (children.length) showTip(host, event, children);
  });
}

function thumbnail(map, i) {
  const side = 84, picture = element("i", "");
  const column = i % map.columns, line = Math.floor(i / map.columns);
  Object.assign(picture.style, {
    width: side + "px", height: side + "px", backgroundSize: side * map.columns + "px auto",
    backgroundPosition: `${-side * column}px ${-side * line}px`,
    imageRendering: map.thumb <= 16 ? "pixelated" : "auto",
  });
  return picture;
}

/* A legend shows one thing alone: choosing it again, or none, shows all. */
function isolate(legend, attribute, scope) {
  legend.addEventListener("click", (event) => {
    const button = event.target.closest("button");
    if (!button) return;
    const chosen = button.getAttribute("aria-pressed") === "true" ? null : button.getAttribute(attribute);
    legend.querySelectorAll("button").forEach((other) =>
      other.setAttribute("aria-pressed", String(other.getAttribute(attribute) === chosen)));
    scope.querySelectorAll(`svg [${attribute}]`).forEach((part) =>
      part.classList.toggle("dim", chosen !== null && part.getAttribute(attribute) !== chosen));
  });
}

document.querySelectorAll("svg.chart").forEach(followChart);
document.querySelectorAll("[data-map]").forEach(followMap);
document.querySelectorAll(".curves > .legend, .tuned > .legend").forEach((legend) =>
  isolate(legend, "data-series", legend.parentElement));
document.querySelectorAll(".choices > .legend").forEach((legend) =>
  isolate(legend, "data-class", legend.closest(".map")));
document.querySelectorAll(".choices > input").forEach((field) =>
  field.addEventListener("input", () => {
    const wanted = field.value.trim().toLowerCase();
    field.parentElement.querySelectorAll("button").forEach((button) => {
      button.hidden = !button.title.toLowerCase().includes(wanted);
    });
  }));
document.documentElement.dataset.ready = "true";
