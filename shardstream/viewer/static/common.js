// Requests, elements and messages. Text of the data becomes text nodes only: nothing here parses markup.

export function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "class") made.className = value;
    else if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value === true) made.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined)
      made.setAttribute(name, value);
  }
  for (const child of children.flat()) {
    if (child !== null && child !== undefined) made.append(child); // text is escaped by the browser
  }
  return made;
}

export class RequestError extends Error {
  constructor(message, kind) {
    super(message);
    this.kind = kind;
  }
}

async function send(path, values, options) {
  const query = new URLSearchParams(Object.entries(values).filter(([, value]) => value !== null));
  let response;
  try {
    response = await fetch(query.size ? `${path}?${query}` : path, options);
  } catch (error) {
    throw options.signal?.aborted ? error : gone();
  }
  if (response.ok) return response;
  const text = await response.text();
  let value;
  try {
    value = JSON.parse(text);
  } catch {
    throw new RequestError(text || `status ${response.status}`, "Refused");
  }
  throw new RequestError(value.error ?? `status ${response.status}`, value.kind);
}

function gone() {
  return new RequestError(
    "The server does not answer: 'shardstream view' was stopped, or the connection is lost. Start it again and open the address that it prints.",
    "Gone",
  );
}

export async function ask(path, values = {}, body = null) {
  const options =
    body === null
      ? {}
      : {
          method: "POST",
          headers: { "content-type": "application/json" },
          body: JSON.stringify(body),
        };
  return (await send(path, values, options)).json();
}

// Yields the JSON values of a response, a line each, as they come.
export async function* askLines(path, values, signal) {
  const reader = (await send(path, values, { signal })).body
    .pipeThrough(new TextDecoderStream())
    .getReader();
  for (let rest = ""; ; ) {
    let part;
    try {
      part = await reader.read();
    } catch (error) {
      throw signal.aborted ? error : gone();
    }
    if (part.done) return;
    const lines = (rest + part.value).split("\n");
    rest = lines.pop();
    for (const line of lines) yield JSON.parse(line);
  }
}

// Names and values beside each other.
export const definitions = (rows) =>
  element(
    "dl",
    {},
    rows.flatMap(([name, value]) => [element("dt", {}, name), element("dd", {}, value)]),
  );

export function table(names, rows) {
  const heads = names.map((name) => element("th", {}, name));
  const head = element("thead", {}, element("tr", {}, heads));
  return element("table", {}, head, element("tbody", {}, rows));
}

export const byId = (id) => document.getElementById(id);
export const count = (number) => number.toLocaleString("en-US");
export const plural = (number, noun) =>
  `${count(number)} ${noun}${number === 1 ? "" : /(s|x|ch)$/.test(noun) ? "es" : "s"}`;

export function bytes(size) {
  if (size === null || size === undefined) return "unknown size";
  for (const unit of ["B", "kB", "MB", "GB", "TB"]) {
    if (size < 999.95 || unit === "TB")
      return unit === "B" ? `${size} B` : `${size.toFixed(1)} ${unit}`;
    size /= 1000;
  }
}

export function tell(error, action = null) {
  byId("banner-text").textContent = error.message ?? String(error);
  const button = byId("banner-action");
  button.hidden = action === null;
  if (action) {
    button.textContent = action.name;
    button.onclick = action.run;
  }
  byId("banner").hidden = false;
}

export function hush() {
  byId("banner").hidden = true;
}

export const events = new EventTarget();
export const emit = (name, detail) => events.dispatchEvent(new CustomEvent(name, { detail }));

export function copyable(text) {
  const button = element("button", { title: "copy" }, "copy");
  button.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(text);
      button.textContent = "copied";
    } catch {
      button.textContent = "select it";
    }
  });
  return element("div", { class: "command" }, element("pre", {}, text), button);
}
