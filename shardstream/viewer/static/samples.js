// The grid: pages of cards, filters, and jumps.
import { correct, go, state } from "./address.js";
import { ask, askLines, byId, bytes, count, element, emit, plural } from "./common.js";
import { closeDetails, showDetails } from "./details.js";
import { boxLayer } from "./overlay.js";

const page = { options: "", first: null, total: 0, numbers: [] }; // that the grid shows
let request = 0;
let loading = new AbortController(); // of the pictures

const choice = () => ({
  where: state.where,
  key: state.key,
  sort: state.sort,
  descending: state.descending,
});
const options = () => JSON.stringify([choice(), state.count, state.plain]);
const openNumber = () => (/^\d+$/.test(state.sample) ? Number(state.sample) : null);
const following = () => state.sample && "first"; // open details show a sample of the new page

// Shows the page and the sample of the address; a page that is there is not asked for again.
export async function showSamples(isReplaced = false) {
  const number = openNumber();
  const isThere = number === null ? state.first === page.first : page.numbers.includes(number);
  if (isReplaced || options() !== page.options) writeForms();
  else if (isThere) return showSample();
  if (await showPage(number)) await showSample();
}

function writeForms() {
  for (const name of ["where", "key", "sort", "count"]) byId(name).value = state[name];
  byId("class").value = ""; // the condition has it
  byId("descending").textContent = state.descending ? "↓" : "↑";
  byId("layers").checked = !state.plain;
}

async function showPage(at) {
  const mine = ++request;
  loading.abort();
  byId("grid").setAttribute("aria-busy", "true");
  let found;
  try {
    found = await ask("/api/page", { first: state.first, count: state.count, ...choice(), at });
  } catch (error) {
    if (mine !== request) return false;
    emit("error", error);
    correct({ sample: "" });
    if (at !== null && error.kind === "OptionError") return showPage(null);
    byId("grid").setAttribute("aria-busy", "false");
    return false;
  }
  if (mine !== request) return false; // a later page was asked for
  const numbers = found.samples.map((one) => one.number);
  correct({ first: found.first, count: found.count }); // the server limits both
  Object.assign(page, { options: options(), first: found.first, total: found.total, numbers });
  const show = new Map(); // number -> function that shows its picture
  byId("grid").replaceChildren(...found.samples.map((one) => card(one, found.has_decode, show)));
  loadPictures(show);
  if (!numbers.length) byId("grid").append(element("div", { class: "empty" }, empty()));
  byId("grid").setAttribute("aria-busy", "false");
  writePager(found);
  return true;
}

function writePager(found) {
  const end = found.first + page.numbers.length;
  byId("range").textContent = found.total
    ? `${count(found.first)} to ${count(end - 1)} of ${count(found.total)}`
    : "no samples";
  const isFiltered = Boolean(state.where || state.key);
  byId("note").textContent = [found.note, isFiltered ? "filtered" : ""].filter(Boolean).join(" · ");
  byId("clear").hidden = !isFiltered;
  const isWhole = found.total && !found.note;
  byId("save").hidden = !(isWhole && (isFiltered || state.sort));
  byId("save").textContent = `Save ${plural(found.total, "number")} as subset.npy`;
  byId("save").href = `/subset.npy?${new URLSearchParams(choice())}`;
  for (const id of ["first", "previous"]) byId(id).disabled = found.first === 0;
  for (const id of ["next", "last"]) byId(id).disabled = end >= found.total;
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
  const values = { numbers: [...show.keys()].join(), plain: state.plain };
  try {
    for await (const [number, found] of askLines("/api/thumbnails", values, signal))
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
      onclick: () => go({ sample: String(one.number) }),
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
  // Pictures are in the line: addresses of their own would take the browser twice the time.
  const picture = (one, attributes) =>
    element("img", {
      decoding: "async",
      src: `data:${one.type};base64,${one.data}`,
      ...attributes,
    });
  if (found.data) {
    const frame = element("div", { class: "frame" }, picture(found, { alt: field ?? "" }));
    for (const mask of found.masks ?? [])
      frame.append(picture(mask, { class: "overlay", alt: mask.name }));
    if (found.boxes?.length) frame.append(boxLayer(found.boxes, found));
    view.append(frame);
  } else write(view, found.text ?? "no picture");
  for (const text of [found.error, ...(found.problems ?? [])]) if (text) problem(text);
}

function write(view, text) {
  view.classList.add("text");
  view.textContent = text;
}

async function showSample() {
  if (/^(first|last)$/.test(state.sample))
    correct({ sample: String(page.numbers.at(state.sample === "first" ? 0 : -1) ?? "") });
  const number = openNumber();
  for (const one of byId("grid").children)
    one.classList.toggle("selected", number !== null && Number(one.dataset.number) === number);
  if (number === null) return closeDetails();
  await showDetails(number, { previous: () => step(-1), next: () => step(1), close });
}

const close = () => go({ sample: "" });

// Goes to a neighbour; not a step of the history, which would fill with them.
async function step(by) {
  const number = page.numbers[page.numbers.indexOf(openNumber()) + by];
  const first = page.first + by * state.count;
  if (number !== undefined) correct({ sample: String(number) });
  else if (first < 0 || first >= page.total) return;
  else correct({ first, sample: by > 0 ? "first" : "last" });
  await showSamples();
}

export function openSamples() {
  byId("filters").addEventListener("submit", (event) => {
    event.preventDefault();
    const key = byId("key").value.trim();
    go({ where: chosenWhere(), key, first: 0, sample: following() });
  });
  byId("clear").addEventListener("click", () =>
    go({ where: "", key: "", first: 0, sample: following() }),
  );
  byId("jump").addEventListener("submit", (event) => {
    event.preventDefault();
    const text = byId("number").value.replaceAll(/[\s,_]/g, "");
    if (!/^\d+$/.test(text))
      return emit("error", new Error("Give the number of a sample, from 0."));
    byId("number").blur(); // the arrow keys then go from sample to sample
    go({ sample: String(Number(text)) });
  });
  const turn = (id, first) =>
    byId(id).addEventListener("click", () =>
      go({ first: Math.max(0, first()), sample: following() }),
    );
  turn("first", () => 0);
  turn("previous", () => state.first - state.count);
  turn("next", () => state.first + state.count);
  turn("last", () => page.total - 1);
  byId("count").addEventListener("change", () => go({ count: Number(byId("count").value) }));
  byId("layers").addEventListener("change", () => go({ plain: state.plain ? "" : "1" }));
  const sort = (changes) => go({ ...changes, first: 0, sample: following() });
  byId("sort").addEventListener("change", () => sort({ sort: byId("sort").value }));
  byId("descending").addEventListener("click", () =>
    sort({ descending: state.descending ? "" : "1" }),
  );
  document.addEventListener("keydown", (event) => {
    const isTyping = /^(INPUT|TEXTAREA|SELECT|AUDIO|VIDEO)$/.test(event.target.tagName);
    if (openNumber() === null || isTyping || state.view !== "samples") return;
    if (event.key === "ArrowRight") step(1);
    else if (event.key === "ArrowLeft") step(-1);
    else if (event.key === "Escape") close();
  });
}

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
