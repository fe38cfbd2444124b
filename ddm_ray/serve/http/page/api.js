/** The API as this page asks it: OpenAI's routes, their events and their errors. */

const TOKEN = "ddm-token";

/** A refusal or a failure: OpenAI's message, field (`param`) and code, and the seconds after which to ask again. */
export class ApiError extends Error {
  constructor(status, error, retryAfter = null) {
    super(error.message);
    Object.assign(this, { status, param: error.param ?? null, code: error.code ?? null, retryAfter });
  }
}

/** Keep a token for as long as this tab is open. */
export function useToken(token) {
  sessionStorage.setItem(TOKEN, token);
}

/** What is served here: the run, its classes, its experts and its defaults of sampling. */
export async function model() {
  const answer = await (await ask("v1/models", {})).json();
  return answer.data[0];
}

/** Ask for one image; call `onPartial` with each event on its way. Returns the event of its end. */
export async function paint(request, signal, onPartial) {
  const response = await ask("v1/images/generations", {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify({ ...request, stream: true, routing: true }),
    signal,
  });
  for await (const event of events(response)) {
    if (event.error) throw new ApiError(response.status, event.error);
    if (event.type === "image_generation.completed") return event;
    onPartial(event);
  }
  throw new ApiError(response.status, { message: "the answer ended before the image" });
}

async function ask(path, options) {
  const token = sessionStorage.getItem(TOKEN);
  const headers = { ...options.headers, ...(token && { Authorization: `Bearer ${token}` }) };
  let response;
  try {
    response = await fetch(path, { ...options, headers });
  } catch (error) {
    if (options.signal?.aborted) throw error;
    throw new ApiError(0, { message: `the server could not be asked: ${error.message}` });
  }
  if (response.ok) return response;
  const wait = Number(response.headers.get("Retry-After")) || null;
  const body = await response.json().catch(() => null);
  throw new ApiError(response.status, body?.error ?? { message: `the server answered ${response.status}` }, wait);
}

/** The data of server-sent events, one after the other. */
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (text + value).split("\n\n");
    text = parts.pop();
    for (const part of parts) {
      const data = part.split("\n").find((line) => line.startsWith("data: "));
      if (data) yield JSON.parse(data.slice(6));
    }
  }
}
