// The service: what it knows, what it says of images, and how it says no.

const KEY = "maple-key";
const LONGEST_WAIT = 60; // seconds

/** The request was wrong; the message is the service's own sentence. */
export class Refused extends Error {}

/** The service wants a key, or another one. */
export class KeyNeeded extends Error {}

/** The service has too much to do: ask again after so many seconds. */
export class Busy extends Error {
  constructor(message, seconds) {
    super(message);
    this.seconds = seconds;
  }
}

/** Nobody answered, or nothing that can be used. */
export class Failed extends Error {}

let key = readKey();

function readKey() {
  try {
    return sessionStorage.getItem(KEY) ?? "";
  } catch {
    return ""; // storage may be forbidden: the key then lasts as long as the page
  }
}

export function setKey(value) {
  key = value;
  try {
    sessionStorage.setItem(KEY, value);
  } catch {
    /* as above */
  }
}

export const hasKey = () => key !== "";

export async function fetchModel() {
  return (await call("v1/model")).json();
}

/** The description of the API, in OpenAPI. */
export async function fetchDescription() {
  return (await call("openapi.json")).json();
}

/** What the service says of each file, in their order. */
export async function predict(files, signal) {
  const body = new FormData();
  for (const file of files) body.append("files", file, file.name);
  const answer = await (await call("v1/predict", { method: "POST", body, signal })).json();
  if (answer.predictions?.length !== files.length) {
    throw new Failed("The service answered for another number of images: try again.");
  }
  return answer.predictions;
}

const strips = new Map(); // cluster -> promise of a blob URL, for as long as the page lives

/** A picture of a cluster's exemplars side by side, as a URL; null where it cannot be had. */
export function fetchExemplars(cluster) {
  if (!strips.has(cluster)) {
    const strip = call(`v1/clusters/${cluster}/exemplars.png`)
      .then((answer) => answer.blob())
      .then((blob) => URL.createObjectURL(blob))
      .catch(() => {
        strips.delete(cluster); // another card may have more luck
        return null;
      });
    strips.set(cluster, strip);
  }
  return strips.get(cluster);
}

async function call(path, options = {}) {
  let answer;
  try {
    answer = await fetch(path, { ...options, headers: key ? { "X-API-Key": key } : {} });
  } catch {
    throw new Failed("The service cannot be reached: check that it runs, then try again.");
  }
  if (answer.ok) return answer;
  const sentence = await errorSentence(answer);
  if (answer.status === 503) throw new Busy(sentence, secondsToWait(answer));
  if (answer.status === 401 || answer.status === 403) throw new KeyNeeded(sentence);
  if (answer.status < 500) throw new Refused(sentence);
  throw new Failed(sentence);
}

async function errorSentence(answer) {
  try {
    const { error } = await answer.json();
    if (typeof error === "string" && error) return asSentence(error);
  } catch {
    /* not JSON: somebody between the page and the service answered */
  }
  return `The service answered with status ${answer.status}: try again, or report it to the operator.`;
}

const asSentence = (text) => text[0].toUpperCase() + text.slice(1) + (/[.!?]$/.test(text) ? "" : ".");

function secondsToWait(answer) {
  const seconds = Number(answer.headers.get("Retry-After") ?? 1);
  return Number.isFinite(seconds) ? Math.min(Math.max(seconds, 0.2), LONGEST_WAIT) : 1;
}
