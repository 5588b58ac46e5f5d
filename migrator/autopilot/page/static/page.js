"use strict";
// The autopilot's page. Everything from the server is put into the document as text (textContent), never as HTML;
// the Content-Security-Policy of the page makes the browser refuse anything else.

const LINES = 300; // records that stay in the document while new ones arrive, unless more were asked for
const REFRESH_MS = 500; // between two requests for the state
const KEY = "autopilot-token";
const find = (id) => document.getElementById(id);

let state = { nodes: [], moves: [], alerts: [], spares: [], orders: [], counts: {} };
let selected = "";
let oldest = 0;
let newest = 0;
let kept = LINES;
const tiles = new Map(); // by the name of the node: its <li>, and what it shows

// ---------------------------------------------------------------- small pieces

function make(tag, text = "", name = "") {
  const element = document.createElement(tag);
  if (text !== "") element.textContent = text;
  if (name) element.className = name;
  return element;
}

function fill(parent, children, empty) {
  parent.replaceChildren(...(children.length ? children : [make("li", empty)]));
}

const plural = (count, word) => `${count} ${word}${count === 1 ? "" : "s"}`;
const clock = (unix_s) => new Date(unix_s * 1000).toLocaleString();
const gigabytes = (bytes) => `${(bytes / 1e9).toFixed(bytes < 1e10 ? 2 : 1)} GB`;

function say(text) {
  find("message").textContent = text;
}

// ---------------------------------------------------------------- state

function shownState(node) {
  return node.answers ? node.state : `${node.state}, silent`;
}

function tileText(node) {
  const ranks = node.ranks.length ? plural(node.ranks.length, "rank") : node.spare ? "spare" : "no rank";
  return [node.name, shownState(node), ranks, node.gpus];
}

function drawTile(node) {
  const texts = tileText(node);
  const shape = JSON.stringify([texts, node.state, selected === node.name]);
  let known = tiles.get(node.name);
  if (!known) {
    const item = make("li");
    const button = make("button");
    button.type = "button";
    button.tabIndex = -1;
    button.addEventListener("click", () => select(node.name));
    button.append(make("span"), make("span", "", "state"), make("span"), make("span", "", "gpus"));
    item.append(button);
    known = { item, button, shape: "" };
    tiles.set(node.name, known);
  }
  if (known.shape !== shape) {
    known.shape = shape;
    known.button.className = node.state;
    known.button.setAttribute("aria-pressed", String(selected === node.name));
    [...known.button.children].forEach((span, index) => { span.textContent = texts[index]; });
  }
  return known.item;
}

function matches(node, wanted) {
  if (!wanted) return true;
  const texts = [node.name, shownState(node), node.spare ? "spare" : "", ...node.ranks.map((rank) => rank.job)];
  return texts.some((text) => text.toLowerCase().includes(wanted));
}

function drawMap() {
  const wanted = find("filter").value.trim().toLowerCase();
  const shown = state.nodes.filter((node) => matches(node, wanted));
  const items = shown.map(drawTile);
  const map = find("map");
  if (items.length !== map.children.length || items.some((item, index) => map.children[index] !== item)) {
    const focused = document.activeElement;
    map.replaceChildren(...items);
    if (focused && map.contains(focused)) focused.focus();
  }
  const buttons = [...map.querySelectorAll("button")];
  if (buttons.length && !buttons.some((button) => button.tabIndex === 0)) buttons[0].tabIndex = 0;
  const text = wanted ? `${shown.length} of ${plural(state.nodes.length, "node")}` : plural(state.nodes.length, "node");
  if (find("shown").textContent !== text) find("shown").textContent = text;
}

function reportFacts(report) {
  if (!report) return [];
  const so_far = report.complete ? "" : ", so far";
  return [[`interruptions resolved without lost progress, ${report.days} days${so_far}`,
    report.all ? `${report.resolved} of ${report.all} (${report.percent} %)` : "none happened"],
  [`GPU-hours saved${so_far}`, report.saved_gpu_hours]];
}

function drawTiles() {
  const usable = state.spares.filter((spare) => !spare.unusable).length;
  const facts = [["nodes", state.nodes.length], ...Object.entries(state.counts), ["silent", state.silent || 0],
    ["ranks", state.ranks || 0], ["running moves", state.moves.length], ["usable spares", usable], ...reportFacts(state.report)];
  find("tiles").replaceChildren(...facts.map(([name, value]) => {
    const tile = make("div");
    tile.append(make("dt", name), make("dd", String(value)));
    return tile;
  }));
}

function drawMoves() {
  fill(find("moves"), state.moves.map((move) => {
    const item = make("li");
    item.append(make("strong", `rank ${move.rank} of ${move.job}: ${move.source} → ${move.target} `));
    item.append(make("span", move.phase ? `phase ${move.phase} ` : "waiting for its first phase "));
    if (move.bytes) {
      const bar = make("progress");
      bar.max = Math.max(move.bytes_expected, move.bytes, 1);
      bar.value = move.bytes;
      bar.setAttribute("aria-label", `bytes of ${move.phase}`);
      item.append(bar, ` ${gigabytes(move.bytes)}, ${(move.bytes_per_s / 1e9).toFixed(2)} GB/s`);
    }
    item.append(make("div", move.reason));
    return item;
  }), "No rank is being moved.");
}

function drawRest() {
  find("alerts-section").hidden = !state.alerts.length;
  const alerts = JSON.stringify(state.alerts);
  if (find("alerts").dataset.shown !== alerts) { // a screen reader would read an unchanged list again
    find("alerts").dataset.shown = alerts;
    find("alerts").replaceChildren(...state.alerts.map((alert) => make("li", `${alert.about}: ${alert.text}`)));
  }
  fill(find("spares"), state.spares.map((spare) => make("li", `${spare.node}: ${plural(spare.gpus_free, "free GPU")}, `
    + (spare.unusable ? `cannot be used: it ${spare.unusable}` : "usable"))), "No node is a spare.");
}

function draw() {
  drawTiles();
  drawMoves();
  drawMap();
  drawRest();
  drawNode();
}

// ---------------------------------------------------------------- one node

const ACTIONS = {
  drain: "Its ranks are moved to spares, and no rank is moved there any more.",
  taint: "No rank is moved there any more. Its ranks stay.",
  untaint: "Ranks may be moved there again, without an examination.",
  undrain: "Ranks may be moved there again, without an examination. An order about the node ends.",
  return: "The node is examined, its alarms are cleared, and its ranks move back.",
};

function actionsFor(node) {
  switch (node.state) {
    case "healthy": case "suspect": case "returned": return ["drain", "taint"];
    case "tainted": return ["drain", "untaint", "return"];
    case "drained": case "repairing": return ["return", "undrain"];
    default: return ["undrain"]; // draining, validating
  }
}

function select(name) {
  selected = name;
  draw();
  say(`${name} is selected. Its details follow the map.`);
}

function drawNode() {
  const panel = find("node");
  const node = state.nodes.find((one) => one.name === selected);
  if (!node) return;
  const shape = JSON.stringify([node, sessionStorage.getItem(KEY) !== null]);
  if (panel.dataset.shown === shape) return; // keeps the focus on a button
  panel.dataset.shown = shape;
  const parts = [make("h3", node.name)];
  const since = node.since_unix_s ? ` since ${clock(node.since_unix_s)}` : "";
  parts.push(make("p", `${shownState(node)}${since}${node.reason ? `: ${node.reason}` : ""}`));
  const list = (head, lines, empty) => {
    const items = make("ul");
    fill(items, lines.map((text) => make("li", text)), empty);
    parts.push(make("h3", head), items);
  };
  list("Alarms", node.alarms.map((one) => `${one.severity}: ${one.check} on ${one.subject}: ${one.text}`), "none");
  list("Ranks", node.ranks.map((one) => `rank ${one.rank} of ${one.job} (user ${one.user_id})`
    + (one.gpus.length ? `, GPU ${one.gpus.join(", ")}` : "") + (one.moving ? ", being moved" : "")), "none");
  if (sessionStorage.getItem(KEY) === null) {
    parts.push(make("p", "Log in with an operator's token to act."));
  } else {
    const row = make("p");
    for (const action of actionsFor(node)) {
      const button = make("button", `${action} ${node.name}`);
      button.type = "button";
      button.addEventListener("click", () => ask(action, node.name));
      row.append(button);
    }
    parts.push(make("h3", "Actions"), row);
  }
  panel.replaceChildren(...parts);
}

// ---------------------------------------------------------------- timeline

function line(record) {
  const item = make("li");
  const time = make("time", clock(record.unix_s));
  time.dateTime = new Date(record.unix_s * 1000).toISOString();
  item.append(time, make("span", record.kind, "kind"), make("span", record.node),
    make("span", record.text, record.kind === "alert" ? "alert" : ""));
  return item;
}

async function older() {
  const answer = await fetch(`api/timeline${oldest ? `?before=${oldest}` : ""}`);
  const page = await answer.json();
  find("timeline").append(...page.records.map(line));
  if (page.records.length) {
    oldest = page.records.at(-1).id;
    newest = Math.max(newest, page.records[0].id);
  }
  find("older").hidden = !page.more;
  kept = Math.max(LINES, find("timeline").children.length);
}

async function restart() {
  oldest = newest = 0;
  find("timeline").replaceChildren();
  await older();
}

function arrived(news) {
  if (news.skipped) { restart(); return; }
  const list = find("timeline");
  for (const record of news.records) {
    if (record.id <= newest) continue;
    newest = record.id;
    if (!oldest) oldest = record.id;
    list.prepend(line(record));
  }
  if (list.children.length > kept) {
    const surplus = list.children.length - kept;
    for (let count = 0; count < surplus; count += 1) list.lastElementChild.remove();
    oldest = newest - kept + 1; // the numbers have no gaps
    find("older").hidden = oldest <= 1;
  }
}

// ---------------------------------------------------------------- news

let waiting = false;
let again = false;

async function refresh() {
  if (waiting) { again = true; return; }
  waiting = true;
  try {
    const answer = await fetch("api/state");
    if (answer.ok) { state = await answer.json(); draw(); }
  } catch { /* the stream says that the connection is lost */ }
  setTimeout(() => {
    waiting = false;
    if (again) { again = false; refresh(); }
  }, REFRESH_MS);
}

function listen() {
  const source = new EventSource(`api/news?after=${newest}`);
  source.addEventListener("open", () => { find("connection").textContent = "live"; });
  source.addEventListener("error", () => {
    find("connection").textContent = "connection lost; what is shown may be old";
    if (source.readyState === EventSource.CLOSED) setTimeout(listen, 5000);
  });
  source.addEventListener("state", refresh);
  source.addEventListener("records", (event) => arrived(JSON.parse(event.data)));
}

// ---------------------------------------------------------------- actions

async function post(path, body) {
  const headers = { Authorization: `Bearer ${sessionStorage.getItem(KEY)}`, "Content-Type": "application/json" };
  const answer = await fetch(path, { method: "POST", headers, body: JSON.stringify(body) });
  const reply = await answer.json();
  if (answer.status === 401) logout();
  if (!answer.ok) throw new Error(reply.remedy ? `${reply.error} (${reply.remedy})` : reply.error);
  return reply;
}

function ask(action, node) {
  const dialog = find("confirm");
  find("confirm-head").textContent = `${action} ${node}?`;
  find("confirm-text").textContent = ACTIONS[action];
  find("confirm-yes").textContent = `Yes, ${action} ${node}`;
  find("reason").value = "";
  dialog.returnValue = "cancel";
  dialog.onclose = async () => {
    if (dialog.returnValue !== "yes") return;
    try {
      say((await post("api/actions", { action, node, reason: find("reason").value })).done);
      refresh();
    } catch (error) {
      say(`${action} ${node} was refused: ${error.message}`);
    }
  };
  dialog.showModal();
}

function showOperator(name) {
  find("login").hidden = Boolean(name);
  find("operator").hidden = !name;
  find("operator-name").textContent = name;
  drawNode();
}

function logout() {
  sessionStorage.removeItem(KEY);
  showOperator("");
}

async function login() {
  try {
    const name = (await post("api/operator", {})).operator;
    showOperator(name);
    say(`Logged in as ${name}.`);
  } catch (error) {
    logout();
    say(error.message);
  }
}

// ---------------------------------------------------------------- start

find("filter").addEventListener("input", drawMap);
find("older").addEventListener("click", older);
find("logout").addEventListener("click", logout);
find("login").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem(KEY, find("token").value.trim());
  find("token").value = "";
  login();
});
find("map").addEventListener("keydown", (event) => {
  const buttons = [...find("map").querySelectorAll("button")];
  const now = buttons.indexOf(document.activeElement);
  if (now < 0) return;
  const columns = getComputedStyle(find("map")).gridTemplateColumns.split(" ").length;
  const step = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: columns, ArrowUp: -columns, Home: -now, End: buttons.length - 1 - now }[event.key];
  if (step === undefined || !buttons[now + step]) return;
  event.preventDefault();
  buttons[now].tabIndex = -1;
  buttons[now + step].tabIndex = 0;
  buttons[now + step].focus();
});

(async () => {
  if (sessionStorage.getItem(KEY) !== null) login();
  try { await older(); } catch { /* the stream says so */ }
  listen();
  refresh();
})();
