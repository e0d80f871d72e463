// Talking to the server: one request, its events as they come, and both APIs' log-probabilities in one form.

/** A token as the page knows it: {token, p, alternatives: [{token, p}, ...]}, probabilities in [0, 1]. */

export class ServerError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

function headers(token) {
  const all = { "content-type": "application/json" };
  if (token) all.authorization = `Bearer ${token}`;
  return all;
}

async function fail(response) {
  let message = `${response.status} ${response.statusText}`;
  try {
    message = (await response.json()).error.message;
  } catch {
    // not our JSON: the status has to do
  }
  throw new ServerError(response.status, message);
}

export async function fetchModel(token) {
  const response = await fetch("/v1/models", { headers: headers(token) });
  if (!response.ok) await fail(response);
  return (await response.json()).data[0];
}

/** Yield {text, entries, finish} for each event of a stream; an abort of `signal` ends it with an AbortError. */
export async function* generate(path, body, token, signal) {
  const request = { method: "POST", headers: headers(token), body: JSON.stringify({ ...body, stream: true }), signal };
  const response = await fetch(path, request);
  if (!response.ok) await fail(response);
  for await (const data of dataLines(response.body)) {
    if (data === "[DONE]") return;
    const event = JSON.parse(data);
    if (event.error) throw new ServerError(500, event.error.message);
    for (const choice of event.choices) yield read(choice);
  }
  throw new ServerError(0, "the connection ended before the answer did");
}

/** The data of server-sent events; comments and blank lines are dropped. */
async function* dataLines(stream) {
  const decoder = new TextDecoder();
  const reader = stream.getReader();
  let buffer = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    buffer += decoder.decode(value, { stream: true });
    const lines = buffer.split("\n");
    buffer = lines.pop();
    for (const line of lines) if (line.startsWith("data: ")) yield line.slice(6);
  }
}

function read(choice) {
  const text = choice.delta ? (choice.delta.content ?? "") : choice.text;
  const entries = choice.logprobs ? (choice.logprobs.content ?? completionEntries(choice.logprobs)) : [];
  return { text, entries: entries.map(probabilities), finish: choice.finish_reason };
}

/** /v1/completions reports parallel lists and one object a token: make them the entries of a chat. */
function completionEntries(logprobs) {
  return logprobs.tokens.map((token, i) => ({
    token,
    logprob: logprobs.token_logprobs[i],
    top_logprobs: Object.entries(logprobs.top_logprobs?.[i] ?? {}).map(([name, logprob]) => ({ token: name, logprob })),
  }));
}

function probabilities(entry) {
  const alternatives = entry.top_logprobs.map((one) => ({ token: one.token, p: Math.exp(one.logprob) }));
  // Not in the order of the object's keys: JavaScript moves keys that look like numbers to the front.
  alternatives.sort((a, b) => b.p - a.p);
  return { token: entry.token, p: Math.exp(entry.logprob), alternatives };
}
