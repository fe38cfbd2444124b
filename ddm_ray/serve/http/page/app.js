/** The page: from the form to images that form side by side. */

import { model, paint, useToken } from "./api.js";
import { Cell, made } from "./cell.js";
import { asked, at, drawSeed, FieldError, mark, offer, unmark } from "./form.js";
import { spoken, swatch } from "./strip.js";

const AT_ONCE = 4; // requests on their way; browsers allow six to a server
const STILL = matchMedia("(prefers-reduced-motion: reduce)");
let served = null;
let running = null;
let cells = [];

const tell = (text) => (at("status").textContent = text);
const warn = (text) => (at("alert").textContent = text);
const images = (count) => (count === 1 ? "1 image" : `${count} images`);

/** Learn what is served, or ask for a token; `tried`: the one that was given is of no use. */
async function load(tried = false) {
  let answer;
  try {
    answer = await model();
  } catch (error) {
    if (error.status === 401) wantToken(tried ? error.message : "");
    else warn(error.message);
    return;
  }
  at("token-form").hidden = true;
  at("request").hidden = at("buttons").hidden = false;
  if (!served) present(answer);
  if (tried) {
    tell("The token is accepted.");
    document.querySelector("#request .field:not([hidden])").querySelector("input, select").focus();
  }
}

function present(answer) {
  served = answer;
  document.title = `${served.id} · ddm-ray`;
  at("model").textContent = served.id;
  introduce();
  offer(served);
}

/** Say which experts are served. */
function introduce() {
  const { length } = served.experts;
  at("about").textContent = `${length === 1 ? "One expert" : `${length} experts that never met`}, mixed into one model. Watch who paints, and when.${served.credit ? ` Learnt from pictures of others: ${served.credit}` : ""}`;
  at("legend").replaceChildren(...served.experts.map((name) => swatch(name)));
}

/** Say who joined and who left, if an image is by other experts than were served before. */
async function follow({ routing_experts: painters }) {
  if (String(painters) === String(served.experts)) return;
  const before = served.experts;
  served = await model();
  introduce();
  const joined = served.experts.filter((name) => !before.includes(name)).map((name) => `${spoken(name)} joined`);
  const left = before.filter((name) => !served.experts.includes(name)).map((name) => `${spoken(name)} left`);
  if (joined.length + left.length) at("changed").textContent = `${[...joined, ...left].join(", ")}.`;
}

function wantToken(message) {
  at("token-form").hidden = false;
  at("token-error").textContent = message;
  if (message) at("token").setAttribute("aria-invalid", "true");
  at("token").focus();
  tell("This server wants a token.");
}

const stop = () => running?.abort();

/** Paint what the form asks for, in place of what was there. */
async function begin() {
  stop();
  unmark();
  warn("");
  let order;
  try {
    order = asked();
  } catch (error) {
    if (!(error instanceof FieldError)) throw error;
    mark(error);
    return;
  }
  const control = new AbortController();
  running = control;
  lay(order);
  at("stop").disabled = false;
  tell(`Painting ${images(cells.length)} of ${order.what}.`);
  const queue = [...cells];
  const worker = async () => {
    while (queue.length && !control.signal.aborted) await finish(queue.shift(), order, control);
  };
  await Promise.all(Array.from({ length: AT_ONCE }, worker));
  if (running === control) end(order, control.signal);
}

/** Empty figures: a row for each seed, of each a figure for each strategy. */
function lay({ strategies, seeds, what, fields }) {
  const steps = Number(fields.steps) || served.defaults.steps;
  cells = [];
  const rows = seeds.map((seed) => {
    const row = made("div", "row");
    const own = strategies.map((strategy) => new Cell({ strategy, seed, steps, what }));
    row.append(...own.map((cell) => cell.element));
    cells.push(...own);
    const section = made("section", "seed");
    section.append(made("h3", "", `Seed ${seed}`), row);
    return section;
  });
  at("seen-title").textContent = `Images of ${what}`;
  at("images").replaceChildren(...rows);
  at("images").setAttribute("aria-busy", "true");
  at("moment").disabled = true;
  at("moment-text").textContent = "";
  at("seen").hidden = false;
  if (at("seen").getBoundingClientRect().top > innerHeight / 3) at("seen").scrollIntoView();
}

/** Paint one image to its end. */
async function finish(cell, { fields }, control) {
  const { signal } = control;
  const request = { ...fields, strategy: cell.strategy, seed: cell.seed, partial_images: frames(cell.strip.steps) };
  while (!signal.aborted) {
    try {
      const event = await paint(request, signal, (partial) => cell.show(partial));
      cell.show(event);
      follow(event).catch(() => {}); // the image is there, and the next one asks again
      const { degraded, truncated } = event;
      if (truncated) cell.say("away", `only the first ${truncated.kept} of the prompt's ${truncated.tokens} tokens count`);
      if (degraded) cell.say("away", `without ${degraded.map(spoken).join(" and ")}, which cannot be reached now`);
      tell(`${cells.filter(({ done }) => done).length} of ${images(cells.length)} done.`);
      return;
    } catch (error) {
      if (signal.aborted) return;
      if (error.status === 429) await pause(cell, error, signal);
      else if (error.status === 401 || error.param) return refused(error, control);
      else return cell.say("error", error.message);
    }
  }
}

/** Images on their way that are worth asking for: few where they are large, or where nothing should flicker. */
function frames(steps) {
  const side = Number(served.size.split("x")[0]);
  const most = STILL.matches || side > 512 ? 3 : side > 128 ? 8 : 24;
  return Math.min(most, Math.max(0, Math.ceil(steps) - 1));
}

/** Wait as long as the server wants, and count. */
async function pause(cell, { message, retryAfter }, signal) {
  const seconds = retryAfter ?? 5;
  tell(`The server takes no more just now. The next try is in ${seconds} s.`);
  for (let left = seconds; left > 0 && !signal.aborted; left--) {
    cell.say("waiting", `${message}; next try in ${left} s`);
    await new Promise((resolve) => {
      setTimeout(resolve, 1000);
      signal.addEventListener("abort", resolve, { once: true });
    });
  }
}

/** End all requests: what one was refused for, all are. */
function refused(error, control) {
  control.abort("refused");
  for (const cell of cells.filter(({ done }) => !done)) cell.element.remove();
  at("seen").hidden = !cells.some(({ done }) => done);
  if (error.status === 401) return wantToken(error.message);
  tell("The request was refused.");
  if (!mark(error)) warn(error.message);
}

function end({ what }, { aborted, reason }) {
  running = null;
  const done = cells.filter((cell) => cell.done);
  if (document.activeElement === at("stop")) at("paint").focus();
  at("stop").disabled = true;
  at("images").setAttribute("aria-busy", "false");
  const steps = Math.max(...cells.map((cell) => cell.steps));
  at("moment").disabled = !steps;
  at("moment").max = steps || 1;
  at("moment").value = steps;
  look();
  if (reason === "refused") return;
  const missing = cells.length - done.length;
  if (aborted) {
    for (const cell of cells.filter((each) => !each.done)) cell.say("", "stopped");
    tell(`Stopped: ${done.length} of ${images(cells.length)} done.`);
  } else {
    tell(`Done: ${images(done.length)} of ${what}${missing ? `; ${missing} failed` : ""}.`);
  }
}

/** Show all images as they were at the step of the slider. */
function look() {
  const { value, max, disabled } = at("moment");
  if (disabled) return;
  at("moment-text").textContent = `${value} of ${max}`;
  at("moment").setAttribute("aria-valuetext", `step ${value} of ${max}`);
  for (const cell of cells) cell.look(value === max ? Infinity : Number(value));
}

at("request").addEventListener("submit", (event) => {
  event.preventDefault();
  begin();
});
at("token-form").addEventListener("submit", (event) => {
  event.preventDefault();
  unmark();
  useToken(at("token").value.trim());
  load(true);
});
at("stop").addEventListener("click", stop);
document.addEventListener("keydown", ({ key }) => key === "Escape" && stop());
at("new-seed").addEventListener("click", drawSeed);
at("moment").addEventListener("input", look);
load();
