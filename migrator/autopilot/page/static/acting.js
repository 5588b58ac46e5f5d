// Logging in, and the actions of an operator. The token stays in this tab, and is sent only in the Authorization header. With a
// certificate, which the browser itself shows, this header only says that it is to be used.
import { find, make, plural, say } from "./dom.js";

const KEY = "autopilot-authorization";
const ACTIONS = {
  drain: "Its ranks are moved to spares, and no rank is moved there any more.",
  taint: "No rank is moved there any more. Its ranks stay.",
  untaint: "Ranks may be moved there again, without an examination.",
  undrain: "Ranks may be moved there again, without an examination. An order about the node ends.",
  return: "The node is examined, its alarms are cleared, and its ranks move back.",
};
let changed = () => {};

export const mayAct = () => sessionStorage.getItem(KEY) !== null;

async function post(path, body) {
  const headers = { Authorization: sessionStorage.getItem(KEY), "Content-Type": "application/json" };
  const answer = await fetch(path, { method: "POST", headers, body: JSON.stringify(body) });
  const reply = await answer.json();
  if (answer.status === 401) logout();
  if (!answer.ok) throw new Error(reply.remedy ? `${reply.error} (${reply.remedy})` : reply.error);
  return reply;
}

// Asks for the confirmation of what `words` say. `targets`: nodes to choose from, [name, text]; null: there is nothing to choose.
function confirm(words, text, body, targets = null) {
  const dialog = find("confirm");
  find("confirm-head").textContent = `${words}?`;
  find("confirm-text").textContent = text;
  find("confirm-yes").textContent = `Yes, ${words}`;
  find("reason").value = "";
  find("target-part").hidden = targets === null;
  find("target").replaceChildren(...(targets || []).map(([name, label]) => {
    const option = make("option", label);
    option.value = name;
    return option;
  }));
  dialog.returnValue = "";
  dialog.onclose = async () => {
    if (dialog.returnValue !== "yes") return;
    const more = targets === null ? {} : { target: find("target").value };
    try {
      say((await post("api/actions", { ...body, ...more, reason: find("reason").value })).done);
      changed();
    } catch (error) {
      say(`${words} was refused: ${error.message}`, true);
    }
  };
  dialog.showModal();
}

export const ask = (action, node) => confirm(`${action} ${node}`, ACTIONS[action], { action, node });

export function askMove(rank, spares) {
  const usable = spares.filter((spare) => !spare.unusable && spare.node !== rank.node);
  const targets = usable.map((spare) => [spare.node, `${spare.node} (${plural(spare.gpus_free, "free GPU")})`]);
  confirm(`move rank ${rank.rank} of ${rank.job}`,
    `It is on ${rank.node}. The whole job pauses while it is moved. The node stays in use.`,
    { action: "move", node: rank.node, rank: rank.uid }, [["", "a spare that the autopilot chooses"], ...targets]);
}

export function askProposal(proposal, action) {
  const text = action === "approve" ? `${proposal.why}. The autopilot does it as soon as it can.`
    : `${proposal.why}. The autopilot does not do it as long as this is so.`;
  confirm(`${action} proposal ${proposal.id}`, `${proposal.what}: ${text}`, { action, proposal: proposal.id });
}

function showOperator(name) {
  find("operator").hidden = !name;
  find("operator-name").textContent = name;
  changed();
}

function logout() {
  sessionStorage.removeItem(KEY);
  showOperator("");
}

async function login(authorization) {
  sessionStorage.setItem(KEY, authorization);
  try {
    const name = (await post("api/operator", {})).operator;
    showOperator(name);
    say(`Logged in as ${name}.`);
  } catch (error) {
    logout();
    say(`Not logged in: ${error.message}`, true);
  }
}

async function openLogin() {
  find("login-dialog").showModal();
  try {
    const { operator } = await (await fetch("api/certificate")).json();
    find("certificate-part").hidden = !operator;
    find("use-certificate").textContent = `Log in as ${operator}`;
  } catch { /* the stream says that the connection is lost */ }
}

// `onChange` is called when the operator or the cluster has changed.
export function start(onChange) {
  changed = onChange;
  find("open-login").addEventListener("click", openLogin);
  find("cancel-confirm").addEventListener("click", () => find("confirm").close(""));
  find("cancel-login").addEventListener("click", () => find("login-dialog").close());
  find("logout").addEventListener("click", logout);
  find("login").addEventListener("submit", () => { // the dialog closes itself
    const token = find("token").value.trim();
    find("token").value = "";
    login(`Bearer ${token}`);
  });
  find("use-certificate").addEventListener("click", () => {
    find("login-dialog").close();
    login("Certificate");
  });
  if (mayAct()) login(sessionStorage.getItem(KEY));
}
