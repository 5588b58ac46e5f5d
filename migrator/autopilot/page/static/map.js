// The map of nodes: a button for each, which is drawn again only if what it shows has changed.
import { find, make, made, plural } from "./dom.js";

const MANY = 150; // nodes from which on the tiles are small
const GPUS = { "#": "used", "-": "free", "!": "alarm" };
const WORDS = { used: "in use", free: "free", alarm: "with an alarm" };
const tiles = new Map(); // by the name of the node: its <li>, its button, and what it shows

export const shownState = (node) => (node.answers ? node.state : `${node.state}, silent`);

function about(node) {
  const ranks = node.ranks.length ? plural(node.ranks.length, "rank") : node.spare ? "" : "no ranks";
  return [node.spare ? "spare" : "", ranks].filter(Boolean).join(", ");
}

function spoken(node) {
  const counts = Object.values(GPUS).map((kind) => [[...node.gpus].filter((gpu) => GPUS[gpu] === kind).length, WORDS[kind]]);
  const gpus = counts.filter(([count]) => count).map(([count, words]) => `${plural(count, "GPU")} ${words}`);
  const alarms = node.alarms.length ? [plural(node.alarms.length, "alarm")] : [];
  return [node.name, shownState(node), about(node), ...alarms, ...gpus].filter(Boolean).join(", ");
}

function tile(node, selected, onSelect) {
  let known = tiles.get(node.name);
  if (!known) {
    const button = make("button");
    button.type = "button";
    button.tabIndex = -1;
    button.addEventListener("click", () => onSelect(node.name));
    known = { item: made("li", "", button), button, shape: "" };
    tiles.set(node.name, known);
  }
  const shape = JSON.stringify([spoken(node), node.gpus, selected]);
  if (known.shape !== shape) {
    known.shape = shape;
    const { button } = known;
    const calm = node.state === "healthy" && node.answers;
    button.className = node.state;
    button.setAttribute("aria-pressed", String(selected));
    button.setAttribute("aria-label", spoken(node));
    const state = make("span", calm ? about(node) : shownState(node), calm ? "about" : "about trouble");
    button.replaceChildren(make("span", node.name, "name"), state,
      made("span", "gpus", ...[...node.gpus].map((gpu) => make("span", "", `gpu ${GPUS[gpu]}`))));
    button.title = spoken(node);
  }
  return known.item;
}

function matches(node, wanted) {
  if (!wanted) return true;
  const texts = [node.name, shownState(node), node.spare ? "spare" : "", ...node.ranks.map((rank) => rank.job)];
  return texts.some((text) => text.toLowerCase().includes(wanted));
}

export function drawMap(state, selected, onSelect) {
  const wanted = find("filter").value.trim().toLowerCase();
  const shown = state.nodes.filter((node) => matches(node, wanted));
  const items = shown.map((node) => tile(node, node.name === selected, onSelect));
  const map = find("map");
  map.className = state.nodes.length > MANY ? "many" : "";
  if (items.length !== map.children.length || items.some((item, index) => map.children[index] !== item)) {
    const focused = document.activeElement;
    map.replaceChildren(...items);
    if (focused && map.contains(focused)) focused.focus();
  }
  const buttons = [...map.querySelectorAll("button")];
  if (buttons.length && !buttons.some((button) => button.tabIndex === 0)) buttons[0].tabIndex = 0;
  const all = plural(state.nodes.length, "node");
  const text = wanted ? `${shown.length} of ${all}` : Object.entries(state.counts).map(([name, count]) => `${count} ${name}`).join(", ");
  if (find("shown").textContent !== text) find("shown").textContent = text;
  find("states").replaceChildren(...Object.entries(state.counts).map(([name, count]) => {
    const part = make("span", "", name);
    part.style.flexGrow = count;
    return part;
  }));
}

export function onArrow(event) {
  const buttons = [...find("map").querySelectorAll("button")];
  const now = buttons.indexOf(document.activeElement);
  if (now < 0) return;
  const columns = getComputedStyle(find("map")).gridTemplateColumns.split(" ").length;
  const steps = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: columns, ArrowUp: -columns, Home: -now, End: buttons.length - 1 - now };
  const next = buttons[now + steps[event.key]];
  if (!next) return;
  event.preventDefault();
  buttons[now].tabIndex = -1;
  next.tabIndex = 0;
  next.focus();
}
