// The autopilot's page: asks for the state, listens for news, and has everything drawn.
import * as acting from "./acting.js";
import { find } from "./dom.js";
import * as job from "./job.js";
import { drawMap, onArrow } from "./map.js";
import { drawNode, drawPanels } from "./panels.js";
import { drawReport } from "./report.js";
import * as timeline from "./timeline.js";

const REFRESH_MS = 500; // between two requests for the state
let state = null;
let selected = "";
let waiting = false;
let again = false;

function draw() {
  if (!state) return;
  drawPanels(state, acting.mayAct(), acting.askProposal);
  job.draw();
  if (find("overview").hidden) return;
  drawReport(state.report);
  drawMap(state, selected, select);
  drawNode(state.nodes.find((one) => one.name === selected), acting.mayAct(), acting.ask);
}

function select(name) {
  selected = name;
  draw();
  find("announcement").textContent = `${name} is selected. Its details are in the section "Selected node".`;
  find("details").scrollIntoView({ block: "nearest" }); // on a narrow screen it is below the map
}

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

function connected(live, text) {
  find("connection").dataset.live = live ? "yes" : "no";
  find("connection").textContent = text;
}

function listen() {
  const source = new EventSource(`api/news?after=${timeline.lastSeen()}`);
  source.addEventListener("open", () => connected(true, "live"));
  source.addEventListener("error", () => {
    connected(false, "connection lost; what is shown may be old");
    if (source.readyState === EventSource.CLOSED) setTimeout(listen, 5000);
  });
  source.addEventListener("state", () => { refresh(); job.refresh(); });
  source.addEventListener("records", (event) => timeline.arrived(JSON.parse(event.data)));
}

find("filter").addEventListener("input", draw);
find("map").addEventListener("keydown", onArrow);
find("older").addEventListener("click", timeline.older);
find("groups").addEventListener("click", timeline.choose);
window.addEventListener("resize", draw);
job.start(acting.mayAct, (rank) => acting.askMove(rank, state ? state.spares : []));
window.addEventListener("hashchange", draw); // after the one of the job: what was hidden is drawn again
acting.start(() => { draw(); refresh(); job.refresh(); });
try { await timeline.older(); } catch { /* the stream says so */ }
listen();
refresh();
