/** Who painted what, and when: the weights of the experts at each step, as a strip of colours and in words. */

const SVG = "http://www.w3.org/2000/svg";
// Those of the library's own plots; beyond them, hues that the golden angle keeps apart.
const HUES = ["#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#f0e442", "#332288", "#9c755f", "#bab0ac"];
const MOST_STRETCHES = 4;
const SEEN = 0.005; // the least share that is spoken of

const number = (name) => Number(name.split("-")[1]);

/** An expert's name on the server, such as expert-003, as people read it. */
export const spoken = (name) => `expert ${number(name)}`;

/** The colour of an expert: by its number, so that it stays where others join or leave. */
export function colour(name) {
  return HUES[number(name)] ?? `hsl(${Math.round(number(name) * 137.5) % 360} 45% 55%)`;
}

/** A list item that names an expert and shows its colour; `text` stands behind. */
export function swatch(name, text = "") {
  const item = document.createElement("li");
  const dot = item.appendChild(document.createElement("span"));
  dot.className = "dot";
  dot.style.backgroundColor = colour(name);
  item.append(spoken(name));
  if (text) item.appendChild(document.createElement("span")).textContent = text;
  return item;
}

/** A picture of routing weights: steps from left to right, of each the experts from top to bottom. */
export class Strip {
  constructor(steps) {
    this.steps = steps;
    this.element = document.createElementNS(SVG, "svg");
    this.element.setAttribute("class", "strip");
    this.element.setAttribute("role", "img");
    this.element.setAttribute("preserveAspectRatio", "none");
    this.later = this.element.appendChild(document.createElementNS(SVG, "rect"));
    this.later.setAttribute("class", "later");
    this.later.setAttribute("height", 1);
    this.draw([], []);
  }

  /** Draw the weights of all steps so far: an array of steps, of each an array of experts; `names` of these. */
  draw(routing, names) {
    this.steps = Math.max(this.steps, routing.length);
    this.element.setAttribute("viewBox", `0 0 ${this.steps} 1`);
    this.element.setAttribute("aria-label", `Experts over ${this.steps} steps: ${inWords(routing, names)}`);
    for (const path of this.element.querySelectorAll("path")) path.remove();
    const lower = routing.map(() => 0);
    for (let expert = 0; expert < (routing[0]?.length ?? 0); expert++) {
      const upper = routing.map((weights, step) => lower[step] + weights[expert]);
      if (upper.some((level, step) => level > lower[step])) this.#paint(expert, names[expert], lower, upper);
      upper.forEach((level, step) => (lower[step] = level));
    }
  }

  /** Shade the steps that come after this one. */
  look(step) {
    this.later.setAttribute("x", step);
    this.later.setAttribute("width", Math.max(0, this.steps - step));
  }

  #paint(expert, name, lower, upper) {
    const path = document.createElementNS(SVG, "path");
    const forth = upper.map((level, step) => `L${step} ${level}H${step + 1}`);
    const back = lower.map((level, step) => `L${step + 1} ${level}H${step}`).reverse();
    path.setAttribute("d", `M0 ${lower[0]}${forth.join("")}${back.join("")}Z`);
    path.setAttribute("fill", colour(name));
    path.dataset.expert = expert;
    this.element.insertBefore(path, this.later);
  }
}

/** The experts' shares of an image, in all its steps, the largest first. */
export function shares(routing, names) {
  const totals = (routing[0] ?? []).map((_, expert) => routing.reduce((sum, weights) => sum + weights[expert], 0));
  return totals
    .map((total, expert) => ({ name: names[expert], share: total / routing.length }))
    .filter(({ share }) => share >= SEEN)
    .sort((one, other) => other.share - one.share);
}

/** A share as people read it. */
export function percent(share) {
  return `${Math.round(100 * share)} %`;
}

/** The same as a strip, for those who listen. */
export function inWords(routing, names) {
  if (!routing.length) return "none yet";
  const parts = stretches(routing);
  const alone = routing.every((weights) => Math.max(...weights) > 1 - SEEN);
  if (alone && parts.length <= MOST_STRETCHES) {
    return parts.map(({ expert, steps }) => `${spoken(names[expert])} for ${steps} ${steps === 1 ? "step" : "steps"}`).join(", then ");
  }
  const listed = shares(routing, names).map(({ name, share }) => `${spoken(name)} ${percent(share)}`);
  const switches = parts.length - 1;
  const changes = switches === 0 ? "does not change" : `changes ${switches === 1 ? "once" : `${switches} times`}`;
  return `${listed.join(", ")}; the heaviest ${changes}`;
}

function stretches(routing) {
  const parts = [];
  for (const weights of routing) {
    const expert = weights.indexOf(Math.max(...weights));
    if (parts.at(-1)?.expert === expert) parts.at(-1).steps += 1;
    else parts.push({ expert, steps: 1 });
  }
  return parts;
}
