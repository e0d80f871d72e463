// The page: a conversation or a text to continue, the settings beside it, and a stop button. State lives here only.

import { ServerError, fetchModel, generate } from "./api.js";
import { TokenText, printable } from "./confidence.js";

const NUM_ALTERNATIVES = 8;
const get = (id) => document.getElementById(id);
const log = get("log"), input = get("input"), tip = get("tip"), alertBox = get("alert");
const state = { messages: [], running: null, mode: "chat", model: null };

const HINTS = {
  chat: "Ask something. Each token of the answer is shaded by how likely the model found it.",
  continue: "Write the beginning of a text; the model goes on from there.",
};
const REASONS = { stop: "end of text", length: "length limit", stopped: "stopped by you" };

function number(id) {
  const value = get(id).value;
  return value === "" ? undefined : Number(value);
}

function samplingSettings() {
  const names = ["temperature", "top_p", "min_p", "top_k", "repetition_penalty", "max_tokens", "seed"];
  return Object.fromEntries(names.map((name) => [name, number(name)]).filter(([, value]) => value !== undefined));
}

function showError(message) {
  alertBox.textContent = message ?? "";
  alertBox.hidden = !message;
}

function setMode(mode) {
  state.mode = mode;
  document.querySelector(`input[name="mode"][value="${mode}"]`).checked = true;
  get("system-section").hidden = mode !== "chat";
  input.placeholder = mode === "chat" ? "Message" : "Beginning of a text";
  get("send").textContent = mode === "chat" ? "Send" : "Continue";
  clear();
}

function clear() {
  state.running?.abort();
  state.messages = [];
  const hint = document.createElement("div");
  hint.className = "hint";
  hint.textContent = HINTS[state.mode];
  log.replaceChildren(hint);
  tip.hidden = true;
  showError(null);
}

/** A new card in the conversation, with its text and its line below. */
function addTurn(kind) {
  log.querySelector(".hint")?.remove();
  const turn = document.createElement("article");
  turn.className = `turn ${kind}`;
  const text = document.createElement("p");
  text.className = "text";
  const foot = document.createElement("div");
  foot.className = "foot";
  turn.append(text);
  if (kind !== "user") turn.append(foot);
  log.append(turn);
  return { turn, text, foot, tokens: new TokenText(text, tip) };
}

function addUserTurn(content) {
  addTurn("user").text.textContent = printable(content);
}

function keepInView() {
  const page = document.documentElement;
  // Only for a reader who is at the end already: whoever scrolled back wants to stay there.
  if (page.scrollHeight - page.scrollTop - page.clientHeight < 160) page.scrollTop = page.scrollHeight;
}

/** Run one request into `card`; returns the text that came and why it ended. */
async function answer(card, path, body) {
  const controller = new AbortController();
  state.running = controller;
  setBusy(card, true);
  const result = { text: "", finish: null, count: 0, started: performance.now(), first: null };
  try {
    for await (const event of generate(path, body, get("token").value, controller.signal)) {
      result.count += event.entries.length;
      if (event.entries.length) result.first ??= performance.now();
      result.text += event.text;
      card.tokens.add(event);
      result.finish = event.finish ?? result.finish;
      keepInView();
    }
  } catch (error) {
    if (controller.signal.aborted) result.finish = "stopped";
    else fail(error);
  } finally {
    if (state.running === controller) state.running = null;
    setBusy(card, false);
    card.foot.textContent = summary(result);
  }
  return result;
}

function fail(error) {
  showError(error instanceof ServerError ? error.message : `no answer from the server (${error.message})`);
  if (error.status === 401) {
    get("settings").open = true;
    get("token").focus();
  }
}

function summary(result) {
  if (!result.count) return result.finish === "stopped" ? REASONS.stopped : "";
  const now = performance.now();
  const rate = result.count > 1 ? ((1000 * (result.count - 1)) / (now - result.first)).toFixed(1) : null;
  const parts = [
    `${result.count} tokens`,
    `first after ${((result.first - result.started) / 1000).toFixed(2)} s`,
    rate && `${rate} tokens/s`,
    REASONS[result.finish] ?? result.finish,
  ];
  return parts.filter(Boolean).join(" \u00b7 ");
}

function setBusy(card, busy) {
  card.turn.classList.toggle("busy", busy);
  card.text.tabIndex = 0;
  get("stop").hidden = !busy;
  get("send").disabled = busy;
}

async function sendChat(content) {
  state.messages.push({ role: "user", content });
  addUserTurn(content);
  const system = get("system").value.trim();
  const messages = system ? [{ role: "system", content: system }, ...state.messages] : [...state.messages];
  const card = addTurn("assistant");
  const body = { messages, logprobs: true, top_logprobs: NUM_ALTERNATIVES, ...samplingSettings() };
  const mine = state.messages;
  const result = await answer(card, "/v1/chat/completions", body);
  if (result.text) mine.push({ role: "assistant", content: result.text });
  else {
    mine.pop(); // a question without an answer would break the turns
    card.turn.remove();
  }
}

async function sendContinue(prompt, card) {
  if (!card) {
    card = addTurn("continue");
    const beginning = document.createElement("span");
    beginning.className = "prompt";
    beginning.textContent = printable(prompt);
    card.text.append(beginning);
  }
  const result = await answer(card, "/v1/completions", { prompt, logprobs: NUM_ALTERNATIVES, ...samplingSettings() });
  if (!result.text || result.finish === "stop") return;
  const more = document.createElement("button");
  more.type = "button";
  more.textContent = "Go on";
  more.addEventListener("click", () => {
    if (state.running) return;
    more.remove();
    run(() => sendContinue(prompt + result.text, card));
  });
  card.foot.append(more);
}

function run(work) {
  showError(null);
  work().catch(fail);
}

function submit() {
  const content = input.value;
  if (state.running || !content.trim()) return;
  input.value = "";
  run(() => (state.mode === "chat" ? sendChat(content) : sendContinue(content)));
}

async function connect() {
  try {
    const model = await fetchModel(get("token").value);
    const form = model.chat_template ? "its own chat template" : "a base model, chats in a plain form";
    get("model").textContent = `${model.id} \u00b7 context ${model.max_model_len} tokens \u00b7 ${form}`;
    showError(null);
    if (!state.model) setMode(model.chat_template ? "chat" : "continue");
    state.model = model;
  } catch (error) {
    get("model").textContent = "not connected";
    fail(error);
  }
}

function showValues() {
  for (const output of document.querySelectorAll("output")) output.value = get(output.htmlFor.value).value;
  log.classList.toggle("shaded", get("shade").checked);
}

get("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  submit();
});
input.addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  submit();
});
get("stop").addEventListener("click", () => state.running?.abort());
get("clear").addEventListener("click", clear);
get("settings").addEventListener("input", showValues);
get("token").addEventListener("change", connect);
window.addEventListener("scroll", () => (tip.hidden = true), { passive: true });
for (const radio of document.querySelectorAll('input[name="mode"]'))
  radio.addEventListener("change", () => setMode(radio.value));
get("settings").open = window.matchMedia("(min-width: 861px)").matches;
showValues();
setMode("chat");
connect();
