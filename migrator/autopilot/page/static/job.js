// One job: its ranks, its pace, stragglers, the pauses of its moves, and its part of the timeline. Its address is #job/USER/NAME.
import { drawLine, number } from "./charts.js";
import { badge, duration, find, list, made, make, moment, plural } from "./dom.js";
import { lines } from "./timeline.js";

const REFRESH_MS = 5000; // the counters of jobs are asked that often
const OUTCOMES = { moved: "moved", "rolled back": "lost", suspended: "lost", "not suspended": "undone", moving: "validating", lost: "lost", "not moved": "undone", waiting: "refused" };

let shown = ""; // the key of the job
let facts = null;
let timer = 0;
let mayMove = () => false;
let onMove = () => {};

export const address = (user, name) => `#job/${encodeURIComponent(user)}/${encodeURIComponent(name)}`;

export function link(user, name, text = name) {
  const element = make("a", text);
  element.href = address(user, name);
  return element;
}

// The key of the job that the address names; empty: none.
function named() {
  const parts = location.hash.split("/");
  if (parts[0] !== "#job" || parts.length !== 3) return "";
  try { return parts.slice(1).map(decodeURIComponent).join("/"); } catch { return ""; }
}

function rank(one) {
  const node = made("span", "", make("strong", one.node), " ");
  const state = one.answers ? one.node_state : `${one.node_state}, silent`;
  if (state !== "healthy") node.append(badge(state, one.node_state));
  const home = !one.home || one.home === one.node ? make("span", "the same", "none") : make("span", one.home);
  const cells = [make("td", String(one.rank), "number"), made("td", "", node), made("td", "", home),
    make("td", one.gpus.length ? one.gpus.join(", ") : "none", one.gpus.length ? "" : "none")];
  const last = make("td", "", "act");
  if (one.moving || one.order) last.append(badge(one.moving ? "moving" : "ordered", "validating"));
  else if (mayMove()) {
    const button = make("button", "Move");
    button.type = "button";
    button.setAttribute("aria-label", `Move rank ${one.rank} away from ${one.node}`);
    button.addEventListener("click", () => onMove({ ...one, job: facts.name }));
    last.append(button);
  }
  return made("tr", "", ...cells, last);
}

function straggler(one) {
  return made("li", "", made("div", "line", make("strong", `rank ${one.rank} on ${one.node}`),
    badge(`${Math.round(one.share * 100)} % of the time lost`, one.severity)),
  make("div", `${number(one.now_per_s)} collectives a second, ${number(one.usual_per_s)} before; ${duration(one.lost_s)} lost since `
    + `${moment(one.since_unix_s)}${one.confirmed ? "" : "; only one node says so"}`, "why"));
}

const alarm = (one) => made("li", "", made("div", "line", make("strong", `rank ${one.rank} on ${one.node}`), badge(one.check, one.severity)),
  make("div", one.text, "why"));

function move(one) {
  const where = one.target ? `${one.source} → ${one.target}` : `stays on ${one.source}`;
  const title = one.rank < 0 ? "all ranks" : `rank ${one.rank}: ${where}`; // a rollback or suspension is of the whole job
  const pause = one.pause_s === null ? "" : `, paused for ${number(one.pause_s)} s`;
  return made("li", "", made("div", "line", make("strong", title), badge(one.outcome, OUTCOMES[one.outcome])),
    make("div", `${moment(one.unix_s)}${pause}`, "why"), make("div", one.text, "why"));
}

function drawPace() {
  const { pace } = facts;
  const points = pace ? pace.points : [];
  const values = points.map(([, value]) => value);
  find("pace").hidden = !points.length;
  if (!points.length) {
    find("pace-now").textContent = "";
    find("pace-text").textContent = pace ? "The first points appear some seconds after the counters were read first."
      : "No collectives are counted for this job: it does not use NCCL, its nodes do not count them, or another autopilot leads.";
    return;
  }
  find("pace-now").textContent = pace.period_s ? `${number(pace.period_s)} s` : `${number(values.at(-1))} / s`;
  find("pace-text").textContent = pace.period_s
    ? `a step, with ${plural(pace.period_collectives, "collective")}; now ${number(values.at(-1))} collectives a second`
    : "collectives now. No period of steps is recognised in the counters.";
  const marks = facts.moves.filter((one) => one.outcome === "moved")
    .map((one) => ({ unix_s: one.unix_s, text: `rank ${one.rank} moved to ${one.target}, paused for ${one.pause_s} s` }));
  drawLine(find("pace"), points, pace.point_s, marks, `Collectives per second during the last ten minutes: now ${number(values.at(-1))}, `
    + `lowest ${number(Math.min(...values))}, highest ${number(Math.max(...values))}`);
}

export function draw() {
  if (!facts || !shown) return;
  const { suspended } = facts;
  const ended = suspended ? `${suspended.state === "suspended" ? "" : `${suspended.state}; `}${suspended.reason}, since ${moment(suspended.since_unix_s)}. `
    : facts.all_ranks ? "" : "No rank of this job is registered now. ";
  const away = facts.away ? `, ${facts.away} away from where they were started` : "";
  find("job-about").textContent = `${ended}${plural(facts.all_ranks, "rank")} on ${plural(facts.nodes, "node")}${away}; user ${facts.user}`;
  drawPace();
  list(find("stragglers"), facts.stragglers, straggler, "The ranks do not wait for one of them.");
  find("job-alarms-part").hidden = !facts.alarms.length;
  list(find("job-alarms"), facts.alarms, alarm, "");
  list(find("job-moves"), facts.moves, move, "No rank of it was moved.");
  const timeline = find("job-timeline");
  if (timeline.dataset.shown !== JSON.stringify(facts.records)) {
    timeline.dataset.shown = JSON.stringify(facts.records);
    timeline.replaceChildren(...(facts.records.length ? lines(facts.records) : [make("li", "Nothing is recorded about it.", "none")]));
  }
  const rows = [mayMove(), facts.ranks];
  const body = find("ranks");
  if (body.dataset.shown !== JSON.stringify(rows)) { // keeps the focus on a button
    body.dataset.shown = JSON.stringify(rows);
    body.replaceChildren(...facts.ranks.map(rank));
  }
  const hidden = facts.found_ranks - facts.ranks.length;
  find("ranks-more").textContent = hidden > 0 ? `and ${plural(hidden, "other rank")}: find them by number or node` : "";
}

export async function refresh() {
  clearTimeout(timer);
  const key = shown;
  if (!key) return;
  try {
    const wanted = find("find-rank").value.trim();
    const answer = await fetch(`api/job?job=${encodeURIComponent(key)}&find=${encodeURIComponent(wanted)}`);
    if (answer.ok && key === shown) { facts = await answer.json(); draw(); }
  } catch { /* the stream says that the connection is lost */ }
  clearTimeout(timer);
  timer = setTimeout(refresh, REFRESH_MS);
}

// Shows what the address names. `focus`: it was chosen by a person, so the heading gets the focus.
function follow(focus) {
  const key = named();
  if (key === shown) return;
  const before = shown;
  shown = key;
  facts = null;
  find("job-view").hidden = !key;
  find("overview").hidden = Boolean(key);
  document.title = key ? `${key.slice(key.indexOf("/") + 1)} – Autopilot` : "Autopilot";
  if (key) {
    find("job-head").textContent = key.slice(key.indexOf("/") + 1);
    find("job-about").textContent = "";
    find("find-rank").value = "";
    for (const id of ["ranks", "stragglers", "job-moves", "job-timeline", "pace"]) {
      find(id).replaceChildren();
      delete find(id).dataset.shown;
    }
    window.scrollTo(0, 0);
    if (focus) find("job-head").focus();
  } else if (before) {
    const [user, ...name] = before.split("/");
    const back = document.querySelector(`#jobs a[href="${address(user, name.join("/"))}"]`);
    if (back) back.focus();
  }
  refresh();
}

// `may` says whether an operator is logged in, `move` asks for the confirmation of a move.
export function start(may, move) {
  mayMove = may;
  onMove = move;
  window.addEventListener("hashchange", () => follow(true));
  window.addEventListener("resize", draw);
  find("find-rank").addEventListener("input", refresh);
  follow(false);
}
