// Small pieces. Everything from the server is put into the document as text (textContent), never as HTML;
// the Content-Security-Policy of the page makes the browser refuse anything else.

export const find = (id) => document.getElementById(id);

export function make(tag, text = "", name = "") {
  const element = document.createElement(tag);
  if (text !== "") element.textContent = text;
  if (name) element.className = name;
  return element;
}

export function made(tag, name, ...children) {
  const element = make(tag, "", name);
  element.append(...children);
  return element;
}

// Replaces the items of a list only if what they show has changed: a screen reader would read them again, and the focus is kept.
export function list(parent, facts, item, empty) {
  const shown = JSON.stringify(facts);
  if (parent.dataset.shown === shown) return;
  parent.dataset.shown = shown;
  parent.replaceChildren(...(facts.length ? facts.map(item) : [make("li", empty, "none")]));
}

export const badge = (text, name) => make("span", text, `badge ${name}`);
export const plural = (count, word) => `${count} ${word}${count === 1 ? "" : "s"}`;
export const clock = (unix_s) => new Date(unix_s * 1000).toLocaleTimeString([], { hour12: false });
export const moment = (unix_s) => new Date(unix_s * 1000).toLocaleString([], { dateStyle: "medium", timeStyle: "short", hour12: false });
export const day = (unix_s) => new Date(unix_s * 1000).toLocaleDateString([], { weekday: "long", day: "numeric", month: "long", year: "numeric" });
export function duration(seconds) {
  const units = [[86400, "day"], [3600, "hour"], [60, "minute"], [1, "second"]];
  const [size, word] = units.find(([one]) => seconds >= one) || units.at(-1);
  const count = seconds / size;
  return plural(count < 10 ? Math.round(count * 10) / 10 : Math.round(count), word);
}
export const gigabytes = (bytes) => `${(bytes / 1e9).toFixed(bytes < 1e10 ? 2 : 1)} GB`;

export function say(text, failed = false) {
  find("message").className = failed ? "failed" : "";
  find("message").textContent = text;
}
