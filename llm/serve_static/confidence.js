// The confidence view: a span for each released piece of text, shaded by its probability, and a card with the
// alternatives. A model's output is untrusted: it reaches the page through textContent only.

const CONTROL = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u200e\u200f\u202a-\u202e\u2066-\u2069]/g;

/** Text fit to be shown: control and direction-changing characters become visible. */
export function printable(text) {
  return text.replace(CONTROL, (char) => (char < "\u0020" ? String.fromCharCode(0x2400 + char.charCodeAt(0)) : "\ufffd"));
}

/** A token's name in a card: its spaces and line breaks are shown as signs. */
function tokenName(token) {
  return printable(token).replaceAll(" ", "\u00b7").replaceAll("\n", "\u23ce").replaceAll("\t", "\u21e5") || "\u2205";
}

function percent(p) {
  if (p > 0 && p < 0.001) return "<0.1%";
  return `${(100 * p).toFixed(p > 0.0995 && p < 0.9995 ? 0 : 1)}%`;
}

function element(tag, className, text) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}

/** One answer's tokens: spans go into `box`, what is known of each stays here. */
export class TokenText {
  constructor(box, tip) {
    this.box = box;
    this.tip = tip;
    this.pending = []; // entries whose text is not released yet
    this.entries = new Map(); // span -> its entries
    this.picked = null;
    box.addEventListener("pointerover", (event) => this.pick(event.target.closest(".token")));
    box.addEventListener("pointerleave", () => this.pick(null));
    box.addEventListener("click", (event) => this.pick(event.target.closest(".token")));
    box.addEventListener("keydown", (event) => this.move(event));
    box.addEventListener("blur", () => this.pick(null));
  }

  /** Add one event: its text appears now, together with the entries that waited for it. */
  add({ text, entries, finish }) {
    this.pending.push(...entries);
    if (text) this.append(element("span", "token", printable(text)));
    else if (finish && this.pending.length) {
      const ended = finish === "stop";
      if (ended) this.append(element("span", "token end", "end"));
    }
  }

  append(span) {
    // Several tokens may make up one piece (a character cut in two): its probability is their product.
    const p = this.pending.reduce((product, entry) => product * entry.p, 1);
    span.style.setProperty("--p", p.toFixed(4));
    this.entries.set(span, this.pending);
    this.pending = [];
    this.box.append(span);
  }

  move(event) {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (event.key === "Escape") this.pick(null);
    if (!step) return;
    event.preventDefault();
    const spans = [...this.entries.keys()];
    const at = this.picked ? spans.indexOf(this.picked) + step : step > 0 ? 0 : spans.length - 1;
    this.pick(spans[Math.min(Math.max(at, 0), spans.length - 1)]);
  }

  pick(span) {
    if (span === this.picked) return;
    this.picked?.classList.remove("picked");
    this.picked = span ?? null;
    this.tip.hidden = true;
    const entries = this.entries.get(this.picked);
    if (!entries?.length) return;
    this.picked.classList.add("picked");
    this.tip.replaceChildren(...entries.flatMap(card));
    place(this.tip, this.picked);
  }
}

/** The lines of one token: itself, then its alternatives, best first. */
function card(entry) {
  const known = entry.alternatives.some((one) => one.token === entry.token);
  const rows = entry.alternatives.map((one) => row(one, one.token === entry.token));
  if (!known) rows.push(row(entry, true));
  return [element("div", "head", `${tokenName(entry.token)} ${percent(entry.p)}`), ...rows];
}

function row({ token, p }, chosen) {
  const line = element("div", chosen ? "row chosen" : "row");
  const gauge = element("span", "gauge");
  const bar = element("i");
  bar.style.width = `${100 * p}%`;
  gauge.append(bar);
  line.append(element("span", "name", tokenName(token)), gauge, element("span", "share", percent(p)));
  return line;
}

/** Put the card below the token, above it where there is no room, and never beyond the window. */
function place(tip, span) {
  tip.hidden = false;
  const token = span.getClientRects()[0];
  const { width, height } = tip.getBoundingClientRect();
  const below = token.bottom + 6 + height < window.innerHeight;
  tip.style.left = `${Math.max(8, Math.min(token.left, window.innerWidth - width - 8))}px`;
  tip.style.top = `${below ? token.bottom + 6 : Math.max(8, token.top - height - 6)}px`;
}
