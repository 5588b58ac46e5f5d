// The report in short: how many interruptions were resolved without lost progress, what that saved, and which nodes fail often.
import { drawDays, number } from "./charts.js";
import { duration, find, list, made, make, plural } from "./dom.js";

function share(name, part) {
  find(`${name}-percent`).textContent = part.all ? `${part.percent} %` : "none happened";
  find(`${name}-share`).textContent = part.all ? `${part.resolved} of ${part.all}` : "";
  find(`${name}-ring`).style.strokeDasharray = `${part.percent || 0} ${100 - (part.percent || 0)}`;
}

function lemon(one) {
  const times = [`fails every ${duration(one.mtbf_s)}`, one.mttr_s === null ? "not back yet" : `back after ${duration(one.mttr_s)}`];
  return made("li", "", made("div", "line", make("strong", one.node), make("span", plural(one.failures, "failure"))),
    make("div", times.join(", "), "why"));
}

function draw(report) {
  find("report-days").textContent = report.days;
  find("so-far").hidden = report.complete;
  share("all", report);
  share("hard", report.without_software);
  find("classes").replaceChildren(...Object.entries(report.classes).map(([name, part]) => {
    const bar = make("progress");
    bar.max = part.all;
    bar.value = part.resolved;
    bar.setAttribute("aria-hidden", "true");
    return made("div", "", make("dt", name), made("dd", "", bar), make("dd", `${part.resolved} of ${part.all}`));
  }));
  find("saved").textContent = number(report.saved_gpu_hours);
  find("saved-how").textContent = `compared with restarting from a checkpoint that is made every ${report.checkpoint_minutes} minutes, `
    + `which takes ${report.restart_minutes} minutes. Planned moves do not count. Moves took ${number(report.gpu_seconds / 3600)} GPU-hours.`;
  list(find("lemons"), report.lemons, lemon, "No node has failed.");
  const resolved = report.by_day.reduce((sum, [good]) => sum + good, 0);
  const others = report.by_day.reduce((sum, [, bad]) => sum + bad, 0);
  drawDays(find("days"), report.by_day, report.today, `Interruptions per day during the last ${report.days} days: `
    + `${resolved} resolved without lost progress, ${others} not`);
}

let shown = "";

export function drawReport(report) {
  const now = JSON.stringify([report, find("days").clientWidth]);
  if (now === shown) return;
  shown = now;
  draw(report);
}
