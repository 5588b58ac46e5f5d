// Logging in, and the actions of an operator. The token stays in this tab, and is sent only in the Authorization header.
import { find, say } from "./dom.js";

const KEY = "autopilot-token";
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
  const headers = { Authorization: `Bearer ${sessionStorage.getItem(KEY)}`, "Content-Type": "application/json" };
  const answer = await fetch(path, { method: "POST", headers, body: JSON.stringify(body) });
  const reply = await answer.json();
  if (answer.status === 401) logout();
  if (!answer.ok) throw new Error(reply.remedy ? `${reply.error} (${reply.remedy})` : reply.error);
  return reply;
}

export function ask(action, node) {
  const dialog = find("confirm");
  find("confirm-head").textContent = `${action} ${node}?`;
  find("confirm-text").textContent = ACTIONS[action];
  find("confirm-yes").textContent = `Yes, ${action} ${node}`;
  find("reason").value = "";
  dialog.returnValue = "";
  dialog.onclose = async () => {
    if (dialog.returnValue !== "yes") return;
    try {
      say((await post("api/actions", { action, node, reason: find("reason").value })).done);
      changed();
    } catch (error) {
      say(`${action} ${node} was refused: ${error.message}`, true);
    }
  };
  dialog.showModal();
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

async function login() {
  try {
    const name = (await post("api/operator", {})).operator;
    showOperator(name);
    say(`Logged in as ${name}.`);
  } catch (error) {
    logout();
    say(`Not logged in: ${error.message}`, true);
  }
}

// `onChange` is called when the operator or the cluster has changed.
export function start(onChange) {
  changed = onChange;
  find("open-login").addEventListener("click", () => find("login-dialog").showModal());
  find("cancel-confirm").addEventListener("click", () => find("confirm").close(""));
  find("cancel-login").addEventListener("click", () => find("login-dialog").close());
  find("logout").addEventListener("click", logout);
  find("login").addEventListener("submit", () => { // the dialog closes itself
    sessionStorage.setItem(KEY, find("token").value.trim());
    find("token").value = "";
    login();
  });
  if (mayAct()) login();
}
