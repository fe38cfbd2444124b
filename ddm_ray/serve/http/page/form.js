/** The form: what a model offers, what is asked of it, and the field that a refusal speaks of. */

import { made } from "./cell.js";

const USUAL = ["once", "top-1", "top-2", "full"];
const ANY = "";

export const at = (id) => document.getElementById(id);

/** Offer what this model knows; what has been filled in already stays. */
export function offer(model) {
  const texts = model.classes === null;
  at("prompt-field").hidden = !texts;
  at("class-field").hidden = texts;
  if (!texts) {
    const names = model.classes.map((name, label) => new Option(name, label));
    at("class").replaceChildren(...names, new Option("any", ANY));
  }
  const { steps, guidance_scale, strategy } = model.defaults;
  at("steps").value = steps;
  at("guidance").value = guidance_scale;
  const usual = USUAL.filter((name) => name !== "top-2" || model.experts.length > 1);
  const names = usual.includes(strategy) ? usual : [strategy, ...usual];
  at("strategies").replaceChildren(...names.map((name) => choice(name, name === strategy)));
}

function choice(name, checked) {
  const label = made("label", "choice");
  const box = made("input", "");
  Object.assign(box, { type: "checkbox", name: "strategy", value: name, checked });
  label.append(box, name);
  return label;
}

/** A field that says nothing that could be asked for. */
export class FieldError extends Error {
  constructor(message, param) {
    super(message);
    this.param = param;
  }
}

/** What the form asks for: `strategies`, `seeds`, the other fields of each request, and in words what of. */
export function asked() {
  const boxes = [...document.querySelectorAll("[name=strategy]:checked")].map((box) => box.value);
  const others = at("others").value.split(",").map((name) => name.trim());
  const strategies = [...new Set([...boxes, ...others])].filter(Boolean);
  if (!strategies.length) throw new FieldError("choose one strategy or more", "strategy");
  if (at("seed").value === "" && !at("seed").validity.badInput) drawSeed();
  const first = numberIn("seed", "seed");
  const count = numberIn("count", "n") ?? 1;
  if (!Number.isInteger(count) || count < 1 || count > 10) throw new FieldError("from 1 to 10 images", "n");
  const seeds = Array.from({ length: count }, (_, number) => first + number);
  const numbers = { steps: numberIn("steps", "steps"), guidance_scale: numberIn("guidance", "guidance_scale") };
  const { what, fields } = condition();
  return { strategies, seeds, what, fields: { ...fields, ...numbers } };
}

function condition() {
  if (at("class-field").hidden) {
    const prompt = at("prompt").value;
    return { what: prompt.trim() ? `“${prompt.trim()}”` : "anything", fields: { prompt } };
  }
  const { value, selectedOptions } = at("class");
  if (value === ANY) return { what: "any class", fields: { prompt: "" } };
  return { what: selectedOptions[0].text, fields: { class_label: Number(value) } };
}

/** The number in a field, null where it is empty. FieldError for what is none. */
function numberIn(id, param) {
  const { value, validity } = at(id);
  if (validity.badInput) throw new FieldError("a number, please", param);
  return value === "" ? null : Number(value);
}

/** Put a new seed into its field. */
export function drawSeed() {
  at("seed").value = crypto.getRandomValues(new Uint32Array(1))[0] % 100000;
}

/** Mark the field that an error names, and go there; false where it names none of the form's. */
export function mark({ param, message }) {
  const field = [...document.querySelectorAll("[data-param]")].find(
    (each) => !each.hidden && each.dataset.param.split(" ").includes(param),
  );
  if (!field) return false;
  field.querySelector(".error").textContent = message;
  const input = field.querySelector("[aria-describedby]");
  input.setAttribute("aria-invalid", "true");
  input.focus();
  return true;
}

/** Take all marks away. */
export function unmark() {
  for (const error of document.querySelectorAll("form .error")) error.textContent = "";
  for (const input of document.querySelectorAll("[aria-invalid]")) input.removeAttribute("aria-invalid");
}
