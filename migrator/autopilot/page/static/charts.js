// Charts as SVG, drawn in the pixels of the place that they have, so that their text keeps its size.
const SPACE = document.querySelector("svg").namespaceURI;
const LEFT = 40;
const BOTTOM = 20;
const TOP = 8;

function shape(tag, name, attributes, text = "") {
  const element = document.createElementNS(SPACE, tag);
  if (name) element.setAttribute("class", name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  if (text !== "") element.textContent = text;
  return element;
}

// A round number that is not less, and the steps up to it.
function scale(most, rounds = [1, 2, 2.5, 5, 10]) {
  const power = 10 ** Math.floor(Math.log10(most || 1));
  const top = rounds.map((one) => one * power).find((one) => one >= most) || 1;
  return { top, steps: [0, top / 2, top] };
}

export const number = (value) => Number(value.toPrecision(3)).toLocaleString([], { maximumFractionDigits: 2 });
const minute = (unix_s) => new Date(unix_s * 1000).toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", hour12: false });

function frame(place, height, label) {
  const width = Math.max(place.clientWidth, 200);
  const svg = shape("svg", "chart", { viewBox: `0 0 ${width} ${height}`, width, height, role: "img", "aria-label": label });
  return { svg, width, inner: { x: LEFT, y: TOP, w: width - LEFT - 6, h: height - TOP - BOTTOM } };
}

function grid(svg, inner, { top, steps }) {
  for (const step of steps) {
    const y = inner.y + inner.h * (1 - step / top);
    svg.append(shape("line", "grid", { x1: inner.x, x2: inner.x + inner.w, y1: y, y2: y }),
      shape("text", "tick", { x: inner.x - 6, y: y + 4, "text-anchor": "end" }, number(step)));
  }
}

// Points [unix_s, value]; a line is interrupted where points are missing. `marks` are moments with a text.
export function drawLine(place, points, pointS, marks, label) {
  const { svg, inner } = frame(place, 190, label);
  const span = 600;
  const last = points.length ? points.at(-1)[0] + pointS : Date.now() / 1000;
  const x = (unix_s) => inner.x + inner.w * Math.max(0, 1 - (last - unix_s) / span);
  const axis = scale(Math.max(...points.map(([, value]) => value), 0));
  const y = (value) => inner.y + inner.h * (1 - value / axis.top);
  grid(svg, inner, axis);
  const parts = [];
  for (const [unix_s, value] of points) {
    const part = parts.at(-1);
    if (part && unix_s - part.at(-1)[0] < 1.5 * pointS) part.push([unix_s, value]);
    else parts.push([[unix_s, value]]);
  }
  const base = inner.y + inner.h;
  for (const part of parts) {
    // Each point stands for the time until the next one.
    const ends = [...part, [part.at(-1)[0] + pointS, part.at(-1)[1]]];
    const path = ends.map(([unix_s, value]) => `${x(unix_s).toFixed(1)},${y(value).toFixed(1)}`).join(" L");
    svg.append(shape("path", "area", { d: `M${x(ends[0][0]).toFixed(1)},${base} L${path} L${x(ends.at(-1)[0]).toFixed(1)},${base} Z` }),
      shape("path", "curve", { d: `M${path}`, "data-points": part.length }));
  }
  for (const mark of marks.filter((one) => one.unix_s > last - span && one.unix_s <= last)) {
    const at = x(mark.unix_s);
    const group = shape("g", "mark", {});
    group.append(shape("title", "", {}, mark.text), shape("line", "", { x1: at, x2: at, y1: inner.y, y2: base }),
      shape("circle", "", { cx: at, cy: inner.y + 3, r: 3 }));
    svg.append(group);
  }
  for (const part of [0, 0.5, 1]) {
    const anchor = part === 0 ? "start" : part === 1 ? "end" : "middle";
    svg.append(shape("text", "tick", { x: inner.x + inner.w * part, y: base + 15, "text-anchor": anchor }, minute(last - span * (1 - part))));
  }
  place.replaceChildren(svg);
}

// Days as bars of two parts, the last one being today.
export function drawDays(place, days, today, label) {
  const { svg, inner } = frame(place, 130, label);
  const axis = scale(Math.max(2, ...days.map(([good, bad]) => good + bad)), [2, 4, 6, 8, 10]); // half of it is a whole number
  grid(svg, inner, axis);
  const step = inner.w / days.length;
  const base = inner.y + inner.h;
  const dayOf = (at) => new Date((today - days.length + 1 + at) * 86400000)
    .toLocaleDateString([], { day: "numeric", month: "short", timeZone: "UTC" });
  days.forEach(([good, bad], at) => {
    const group = shape("g", "day", {});
    group.append(shape("title", "", {}, `${dayOf(at)}: ${good} resolved, ${bad} not`));
    const width = Math.max(step - 3, 2);
    const x = inner.x + at * step + (step - width) / 2;
    const height = (count) => inner.h * count / axis.top;
    group.append(shape("rect", "whole", { x, y: inner.y, width, height: inner.h }));
    if (good) group.append(shape("rect", "good", { x, y: base - height(good), width, height: height(good), rx: 1.5 }));
    if (bad) group.append(shape("rect", "bad", { x, y: base - height(good) - height(bad), width, height: height(bad), rx: 1.5 }));
    svg.append(group);
  });
  for (const at of [0, days.length - 1]) {
    const anchor = at ? "end" : "start";
    svg.append(shape("text", "tick", { x: at ? inner.x + inner.w : inner.x, y: base + 15, "text-anchor": anchor }, at ? "today" : dayOf(at)));
  }
  place.replaceChildren(svg);
}
