/** One image on its way and at its end, with its strip: a figure. */

import { percent, shares, Strip, swatch } from "./strip.js";

const TINY = 128; // pixels along a side, up to which each is shown as a square
const MOST_SHARES = 4;

/** A figure of one image: its strategy, its seed, what it looked like step by step, and who painted it. */
export class Cell {
  #frames = [];

  /** `what`: the class or the prompt in words. */
  constructor({ strategy, seed, steps, what }) {
    Object.assign(this, { strategy, seed, what, done: false });
    this.element = made("figure", "cell");
    this.frame = made("div", "frame");
    this.image = made("img", "");
    this.image.hidden = true;
    this.frame.append(this.image);
    this.strip = new Strip(steps);
    this.ends = made("div", "ends");
    this.ends.setAttribute("aria-hidden", "true");
    this.ends.append(made("span", "", "noise"), made("span", "", "image"));
    this.shares = made("ul", "shares");
    this.shares.setAttribute("aria-hidden", "true"); // the strip's own words say it
    this.note = made("p", "note");
    this.element.append(made("h4", "", strategy), this.frame, this.strip.element, this.ends, this.shares, this.note);
    this.look(Infinity);
  }

  /** Steps whose weights are known. */
  get steps() {
    return this.#frames.at(-1)?.step ?? 0;
  }

  /** Show an event of the stream: an image on its way, or the one at the end. */
  show(event) {
    this.done = event.type === "image_generation.completed";
    this.note.textContent = "";
    this.#frames.push({ step: event.routing.length, source: `data:image/png;base64,${event.b64_json}` });
    this.image.classList.toggle("tiny", Number(event.size.split("x")[0]) <= TINY);
    this.strip.draw(event.routing, event.routing_experts);
    const parts = shares(event.routing, event.routing_experts);
    const listed = parts.slice(0, MOST_SHARES).map(({ name, share }) => swatch(name, percent(share)));
    const others = parts.length - listed.length;
    this.shares.replaceChildren(...listed, ...(others ? [made("li", "", `and ${others} more`)] : []));
    this.look(Infinity);
  }

  /** Show how it was after so many steps. */
  look(step) {
    const seen = this.#frames.findLast((frame) => frame.step <= step) ?? this.#frames[0];
    this.strip.look(Math.min(step, this.strip.steps));
    if (!seen) return;
    const last = this.done && seen === this.#frames.at(-1);
    this.image.src = seen.source;
    this.image.alt = `${this.what}, ${this.strategy}, seed ${this.seed}${last ? "" : `, after ${seen.step} steps`}`;
    this.image.hidden = false;
  }

  /** Say something below the image; `kind`: waiting, away or error. */
  say(kind, text) {
    this.note.className = `note ${kind}`;
    this.note.textContent = text;
  }
}

/** An element of a class, with a text. */
export function made(tag, className, text = "") {
  const element = document.createElement(tag);
  element.className = className;
  element.textContent = text;
  return element;
}
