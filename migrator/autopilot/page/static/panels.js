// Everything beside the map and the timeline: numbers, alerts, proposals, moves, spares, jobs, and the selected node.
import { badge, find, gigabytes, list, made, make, moment, plural } from "./dom.js";
import { link } from "./job.js";
import { shownState } from "./map.js";

const SHOWN_JOBS = 50;
const ANSWERS = { open: "suspect", approved: "healthy", rejected: "tainted" };

function drawTiles(state) {
  const usable = state.spares.filter((spare) => !spare.unusable).length;
  const { report } = state;
  const facts = [
    ["Healthy nodes", state.counts.healthy || 0, `of ${state.nodes.length}`, false],
    ["Silent nodes", state.silent, "", state.silent > 0],
    ["Ranks", state.ranks, "", false],
    ["Moves in progress", state.moves.length, "", false],
    ["Usable spares", usable, `of ${state.spares.length}`, usable === 0],
    ["Interruptions resolved", report.all ? `${report.percent} %` : "none", report.all ? `${report.resolved} of ${report.all}` : "happened", false],
  ];
  const tiles = find("tiles");
  if (tiles.dataset.shown === JSON.stringify(facts)) return;
  tiles.dataset.shown = JSON.stringify(facts);
  tiles.replaceChildren(...facts.map(([name, value, more, bad]) => {
    const number = make("dd", value.toLocaleString());
    if (more) number.append(" ", make("small", more));
    return made("div", bad ? "bad" : "", make("dt", name), number);
  }));
}

const heading = (move) => make("strong", `rank ${move.rank} of ${move.job}`);
const way = (move) => make("span", `${move.source} → ${move.target}`);

function running(move) {
  const phase = move.phase ? `phase ${move.phase}` : "waiting for its first phase";
  const item = made("li", "", made("div", "line", heading(move), way(move)));
  if (move.bytes) {
    const bar = make("progress");
    bar.max = Math.max(move.bytes_expected, move.bytes, 1);
    bar.value = move.bytes;
    bar.setAttribute("aria-label", `bytes of ${move.phase}`);
    const rate = `${gigabytes(move.bytes)}, ${(move.bytes_per_s / 1e9).toFixed(2)} GB/s`;
    item.append(bar, made("div", "line", make("span", phase), make("span", rate)));
  } else {
    item.append(make("div", phase));
  }
  item.append(make("div", move.reason, "why"));
  return item;
}

function ended(move) {
  const pause = move.state === "moved" ? `, paused for ${move.pause_s} s` : "";
  const item = made("li", "", made("div", "line", heading(move), way(move)), make("div", move.reason, "why"));
  if (move.result) item.append(make("div", move.result, "why"));
  item.append(made("div", "line", badge(move.state, move.state.split(" ")[0]),
    make("span", `${moment(move.ended_unix_s)}${pause}`, "why")));
  return item;
}

function spare(one) {
  const word = one.unusable ? badge("not usable", "tainted") : badge("usable", "healthy");
  const item = made("li", "", made("div", "line", make("strong", one.node), word));
  const gpus = one.gpus_free || one.unusable ? plural(one.gpus_free, "free GPU") : "for ranks without GPUs";
  item.append(make("div", gpus + (one.unusable ? `; it ${one.unusable}` : ""), "why"));
  return item;
}

const started = (name, user) => ({ name, user, ranks: 0, nodes: 0, moving: 0, troubled: 0, last: "", suspended: null });

// A job is named by its user and its name.
// The ranks of a suspended job are on no node.
function jobs(nodes, suspended) {
  const found = new Map();
  for (const one of suspended) found.set(`${one.user_id}/${one.job}`, { ...started(one.job, one.user_id), suspended: one });
  for (const node of nodes) {
    for (const rank of node.ranks) {
      const key = `${rank.user_id}/${rank.job}`;
      const job = found.get(key) || started(rank.job, rank.user_id);
      job.ranks += 1;
      job.moving += rank.moving ? 1 : 0;
      job.troubled += node.state === "healthy" && node.answers ? 0 : 1;
      if (job.last !== node.name) job.nodes += 1; // the ranks of a node follow each other
      job.last = node.name;
      found.set(key, job);
    }
  }
  return [...found.values()].sort((one, other) => Boolean(other.suspended) - Boolean(one.suspended)
    || other.troubled - one.troubled || other.ranks - one.ranks);
}

function suspension({ name, user, suspended }) {
  return made("li", "", made("div", "line", made("strong", "", link(user, name)), badge(suspended.state, "suspect")),
    make("div", `${plural(suspended.ranks, "rank")}, user ${user}, since ${moment(suspended.since_unix_s)}`, "why"),
    make("div", suspended.result ? `${suspended.reason}; it could not be resumed: ${suspended.result}` : suspended.reason, "why"));
}

function job(one) {
  const words = [];
  if (one.suspended) return suspension(one);
  if (one.moving) words.push(badge(`${one.moving} moving`, "validating"));
  if (one.troubled) words.push(badge(`${plural(one.troubled, "rank")} on nodes in trouble`, "tainted"));
  return made("li", "", made("div", "line", made("strong", "", link(one.user, one.name)), ...words),
    make("div", `${plural(one.ranks, "rank")} on ${plural(one.nodes, "node")}, user ${one.user}`, "why"));
}

function drawJobs(nodes, suspended) {
  const found = jobs(nodes, suspended);
  const shown = found.slice(0, SHOWN_JOBS);
  const more = found.length - shown.length;
  list(find("jobs"), more ? [...shown, { more }] : shown, (one) => (one.more
    ? make("li", `and ${plural(one.more, "other job")}`, "none") : job(one)), "No rank is registered.");
}

// Buttons only for an operator, and only for the answer that was not given.
function proposal(one, mayAct, onAnswer) {
  const item = made("li", "", made("div", "line", make("strong", one.what), badge(one.state, ANSWERS[one.state])),
    make("div", one.why, "why"));
  if (one.by) item.append(make("div", `${one.state} by ${one.by}${one.reason ? `: ${one.reason}` : ""}`, "why"));
  const answers = [["approve", "approved"], ["reject", "rejected"]].filter(([, state]) => state !== one.state);
  if (mayAct) {
    item.append(made("div", "actions", ...answers.map(([action]) => {
      const button = make("button", action === "approve" ? "Approve" : "Reject", action === "approve" ? "main" : "");
      button.type = "button";
      button.setAttribute("aria-label", `${action} proposal ${one.id}: ${one.what}`);
      button.addEventListener("click", () => onAnswer(one, action));
      return button;
    })));
  }
  return item;
}

function drawProposals(proposals, mayAct, onAnswer) {
  find("proposals-section").hidden = !proposals.length;
  const waits = proposals.some((one) => one.state === "open");
  find("proposals-head").textContent = waits ? "Waits for an operator’s answer" : "Answered proposals";
  const parent = find("proposals");
  list(parent, proposals.map((one) => ({ ...one, mayAct })), (one) => proposal(one, mayAct, onAnswer), "");
  find("proposals-login").hidden = mayAct;
}

export function drawPanels(state, mayAct, onAnswer) {
  drawTiles(state);
  drawProposals(state.proposals || [], mayAct, onAnswer);
  find("alerts-section").hidden = !state.alerts.length;
  list(find("alerts"), state.alerts, (alert) => made("li", "", make("strong", alert.about), `: ${alert.text}`), "");
  list(find("moves"), state.moves, running, "No rank is being moved.");
  list(find("recent"), state.recent, ended, "No move has ended lately.");
  list(find("spares"), state.spares, spare, "No node is a spare.");
  drawJobs(state.nodes, state.suspended);
}

// ---------------------------------------------------------------- one node

function actionsFor(node) {
  switch (node.state) {
    case "healthy": case "suspect": case "returned": return ["drain", "taint"];
    case "tainted": return ["drain", "untaint", "return"];
    case "drained": case "repairing": return ["return", "undrain"];
    default: return ["undrain"]; // draining, validating
  }
}

function section(head, facts, item, name) {
  const items = make("ul", "", name);
  list(items, facts, item, "none");
  return [make("h3", head), items];
}

function actions(node, mayAct, onAction) {
  if (!mayAct) return [make("p", "Log in to drain, taint or return this node.", "none")];
  return [made("div", "actions", ...actionsFor(node).map((action) => {
    const button = make("button", `${action} ${node.name}`);
    button.type = "button";
    button.addEventListener("click", () => onAction(action, node.name));
    return button;
  }))];
}

export function drawNode(node, mayAct, onAction) {
  const panel = find("node");
  const shown = JSON.stringify([node, mayAct]);
  if (!node || panel.dataset.shown === shown) return; // keeps the focus on a button
  panel.dataset.shown = shown;
  const since = node.since_unix_s ? `since ${moment(node.since_unix_s)}` : "";
  const why = [since, node.reason].filter(Boolean).join(": ");
  panel.replaceChildren(
    made("p", "name", make("span", node.name), badge(shownState(node), node.state)),
    ...(why ? [make("p", why, "since")] : []),
    ...section("Alarms", node.alarms, (one) => made("li", "", badge(one.severity, one.severity),
      ` ${one.check} on ${one.subject}: ${one.text}`), ""),
    ...section("Ranks", node.ranks, (one) => made("li", "", `rank ${one.rank} of `, link(one.user_id, one.job), `, user ${one.user_id}`
      + (one.gpus.length ? `, GPU ${one.gpus.join(", ")}` : "") + (one.moving ? ", being moved" : "")), "ranks"),
    make("h3", "Actions"), ...actions(node, mayAct, onAction));
}
