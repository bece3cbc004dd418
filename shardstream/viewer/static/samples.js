// The grid: pages of cards, filters, and jumps.
import { ask, askLines, byId, bytes, count, element, emit, events, hush } from "./common.js";
import { closeDetails, showDetails } from "./details.js";

const state = { first: 0, count: 50, where: "", key: "", total: 0, shown: [], selected: null };
let request = 0;
let loading = new AbortController(); // of the pictures

function chosenWhere() {
  const where = byId("where").value.trim();
  const klass = byId("class").value.trim();
  if (!klass) return where;
  const number = /^-?\d+/.exec(klass)?.[0] ?? numberOfClass(klass);
  const condition = `cls = ${number}`;
  return where ? `(${where}) AND ${condition}` : condition;
}

function numberOfClass(name) {
  const found = [...byId("class-names").children].find(
    (option) => option.value.replace(/^\d+ /, "") === name,
  );
  return found ? /^\d+/.exec(found.value)[0] : `'${name.replaceAll("'", "''")}'`;
}

export async function showPage(at = null) {
  const mine = ++request;
  loading.abort();
  byId("grid").setAttribute("aria-busy", "true");
  const values = { first: state.first, count: state.count, where: state.where, key: state.key, at };
  let page;
  try {
    page = await ask("/api/page", values);
  } catch (error) {
    if (mine === request) byId("grid").setAttribute("aria-busy", "false");
    emit("error", error);
    return false;
  }
  if (mine !== request) return false; // a later page was asked for
  hush();
  Object.assign(state, {
    first: page.first,
    total: page.total,
    shown: page.samples.map((one) => one.number),
  });
  const show = new Map(); // number -> function that shows its picture
  byId("grid").replaceChildren(...page.samples.map((one) => card(one, page.has_decode, show)));
  loadPictures(show);
  if (!page.samples.length) byId("grid").append(element("div", { class: "empty" }, empty()));
  byId("grid").setAttribute("aria-busy", "false");
  byId("range").textContent = page.total
    ? `${count(page.first)} to ${count(page.first + page.samples.length - 1)} of ${count(page.total)}`
    : "no samples";
  byId("note").textContent = [page.note, state.where || state.key ? "filtered" : ""]
    .filter(Boolean)
    .join(" · ");
  byId("clear").hidden = !(state.where || state.key);
  const atEnd = page.first + page.samples.length >= page.total;
  for (const id of ["first", "previous"]) byId(id).disabled = page.first === 0;
  for (const id of ["next", "last"]) byId(id).disabled = atEnd;
  mark();
  return true;
}

function empty() {
  return state.where || state.key
    ? "No sample fulfils the condition."
    : "This dataset has no samples.";
}

async function loadPictures(show) {
  loading = new AbortController();
  const { signal } = loading;
  if (!show.size) return;
  try {
    for await (const [number, found] of askLines(
      "/api/thumbnails",
      { numbers: [...show.keys()].join() },
      signal,
    ))
      show.get(number)(found);
  } catch (error) {
    if (!signal.aborted) emit("error", error);
  }
}

function card(one, hasDecode, show) {
  const view = element("div", { class: "view" });
  const label = element("div", { class: "label" });
  const made = element(
    "button",
    {
      class: one.error ? "card broken" : "card",
      "data-number": one.number,
      onclick: () => select(one.number),
    },
    view,
    label,
  );
  const problem = (text) => {
    made.classList.add("broken");
    label.append(element("div", { class: "problem", title: text }, text));
  };
  label.append(
    element(
      "div",
      { class: "line" },
      element("span", { class: "key", title: one.key ?? "" }, one.key ?? "unreadable"),
      element("span", { class: "quiet" }, count(one.number)),
    ),
    element(
      "div",
      { class: "line" },
      one.class
        ? element("span", { class: "tag" }, one.class.name ?? `class ${one.class.number}`)
        : element("span"),
      element("span", { class: "quiet" }, bytes(one.size)),
    ),
  );
  if (one.error) problem(one.error);
  for (const text of one.reported) problem(`in the report: ${text}`);
  const field = one.thumbnail?.field ?? null;
  if (hasDecode ? one.fields.length : field !== null)
    show.set(one.number, (found) => fill(view, field, found, problem));
  else write(view, one.text ?? one.fields.join(", "));
  if (one.text && field !== null) label.append(element("div", { class: "excerpt" }, one.text));
  return made;
}

function fill(view, field, found, problem) {
  // The picture is in the line: addresses of their own would take the browser twice the time.
  if (found.data)
    view.append(
      element("img", {
        alt: field ?? "",
        decoding: "async",
        src: `data:${found.type};base64,${found.data}`,
      }),
    );
  else write(view, found.text ?? "no picture");
  if (found.error) problem(found.error);
}

function write(view, text) {
  view.classList.add("text");
  view.textContent = text;
}

async function select(number) {
  state.selected = number;
  mark();
  await showDetails(number, {
    previous: () => step(-1),
    next: () => step(1),
    close: () => {
      state.selected = null;
      closeDetails();
      mark();
    },
  });
}

async function step(by) {
  const place = state.shown.indexOf(state.selected) + by;
  if (place >= 0 && place < state.shown.length) return select(state.shown[place]);
  const first = state.first + by * state.count;
  if (first < 0 || first >= state.total) return;
  state.first = first;
  if (await showPage()) await select(by > 0 ? state.shown[0] : state.shown.at(-1));
}

function mark() {
  for (const one of byId("grid").children)
    one.classList.toggle(
      "selected",
      Number(one.dataset.number) === state.selected && state.selected !== null,
    );
}

export async function jump(number) {
  if (!state.shown.includes(number) && !(await showPage(number))) return;
  if (state.shown.includes(number)) await select(number);
}

function filter(where, key) {
  Object.assign(state, { first: 0, where, key });
  return showPage();
}

export function openSamples() {
  byId("filters").addEventListener("submit", (event) => {
    event.preventDefault();
    filter(chosenWhere(), byId("key").value.trim());
  });
  byId("clear").addEventListener("click", () => {
    for (const id of ["where", "key", "class"]) byId(id).value = "";
    filter("", "");
  });
  byId("jump").addEventListener("submit", (event) => {
    event.preventDefault();
    const text = byId("number").value.replaceAll(/[\s,_]/g, "");
    if (!/^\d+$/.test(text))
      return emit("error", new Error("Give the number of a sample, from 0."));
    byId("number").blur(); // the arrow keys then go from sample to sample
    jump(Number(text));
  });
  const go = (first) => () => {
    state.first = Math.max(0, first());
    showPage();
  };
  byId("first").addEventListener(
    "click",
    go(() => 0),
  );
  byId("previous").addEventListener(
    "click",
    go(() => state.first - state.count),
  );
  byId("next").addEventListener(
    "click",
    go(() => state.first + state.count),
  );
  byId("last").addEventListener(
    "click",
    go(() => state.total - 1),
  );
  byId("count").addEventListener("change", () => {
    state.count = Number(byId("count").value);
    showPage();
  });
  document.addEventListener("keydown", (event) => {
    if (
      state.selected === null ||
      /^(INPUT|TEXTAREA|SELECT|AUDIO|VIDEO)$/.test(event.target.tagName)
    )
      return;
    if (event.key === "ArrowRight") step(1);
    else if (event.key === "ArrowLeft") step(-1);
    else if (event.key === "Escape") {
      state.selected = null;
      closeDetails();
      mark();
    }
  });
  events.addEventListener("jump", (event) => {
    emit("view", "samples");
    state.where = state.key = "";
    jump(event.detail);
  });
  events.addEventListener("filter", (event) => {
    emit("view", "samples");
    byId("where").value = event.detail;
    byId("class").value = "";
    filter(event.detail, "");
  });
}
