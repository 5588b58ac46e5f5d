// The timeline: records of the event log, the newest first. Their numbers have no gaps.
import { clock, day, find, made, make } from "./dom.js";

const LINES = 300; // records that stay in the document while new ones arrive, unless more were asked for
// What a kind of record is called, where it belongs, and how it is coloured. Other kinds are shown by their own name.
const KINDS = {
  signal: ["Signal", "nodes", ""],
  state: ["Node state", "nodes", ""],
  intent: ["Move begins", "moves", "begin"],
  result: ["Move ended", "moves", "good"],
  rollback: ["Rolled back", "moves", "bad"],
  suspension: ["Suspension", "moves", "bad"],
  order: ["Order", "nodes", "order"],
  "order-ended": ["Order ended", "nodes", "order"],
  alert: ["Needs a person", "alerts", "alert"],
  "alert-over": ["Resolved", "alerts", "good"],
  start: ["Autopilot", "", ""],
  stop: ["Autopilot", "", ""],
  page: ["Page", "", ""],
  proposal: ["Proposal", "alerts", "order"],
  "proposal-answered": ["Answer", "alerts", "order"],
  "proposal-ended": ["Proposal ended", "alerts", ""],
};

let oldest = 0;
let newest = 0;
let kept = LINES;

export const lastSeen = () => newest;
const records = () => find("timeline").querySelectorAll(".record");

function line(record) {
  const [word, group, colour] = KINDS[record.kind] || [record.kind, "", ""];
  const time = make("time", clock(record.unix_s));
  time.dateTime = new Date(record.unix_s * 1000).toISOString();
  const failed = record.kind === "result" && record.failed;
  const text = make("span");
  if (record.node) text.append(make("span", record.node, "on"));
  text.append(record.text);
  const item = made("li", "record", time, make("span", word, `kind ${failed ? "bad" : colour}`), text);
  item.dataset.group = group;
  item.dataset.day = day(record.unix_s);
  return item;
}

// A heading before the first record of each day.
function withDays(items) {
  let last = "";
  return items.flatMap((item) => {
    const heading = item.dataset.day === last ? [] : [make("li", item.dataset.day, "day")];
    last = item.dataset.day;
    return [...heading, item];
  });
}

export const lines = (some) => withDays(some.map(line));

function drawDays() {
  for (const heading of find("timeline").querySelectorAll(".day")) heading.remove();
  find("timeline").replaceChildren(...withDays([...records()]));
}

export async function older() {
  const answer = await fetch(`api/timeline${oldest ? `?before=${oldest}` : ""}`);
  const page = await answer.json();
  find("timeline").append(...page.records.map(line));
  if (page.records.length) {
    oldest = page.records.at(-1).id;
    newest = Math.max(newest, page.records[0].id);
  }
  find("older").hidden = !page.more;
  kept = Math.max(LINES, records().length);
  drawDays();
}

async function restart() {
  oldest = newest = 0;
  find("timeline").replaceChildren();
  await older();
}

export function arrived(news) {
  if (news.skipped) { restart(); return; }
  const list = find("timeline");
  for (const record of news.records) {
    if (record.id <= newest) continue;
    newest = record.id;
    if (!oldest) oldest = record.id;
    list.prepend(line(record));
  }
  const surplus = [...records()].slice(kept);
  if (surplus.length) {
    for (const item of surplus) item.remove();
    oldest = newest - kept + 1;
    find("older").hidden = oldest <= 1;
  }
  drawDays();
}

export function choose(event) {
  const button = event.target.closest("button");
  if (!button) return;
  for (const one of find("groups").children) one.setAttribute("aria-pressed", String(one === button));
  find("timeline").dataset.group = button.dataset.group;
}
