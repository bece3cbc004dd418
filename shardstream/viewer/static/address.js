// The address holds what the page shows: the view, the filter, the page and the open sample. All of
// it is drawn from here, so that links, reloads and the back button work. After "#" nothing is sent.
import { emit, hush } from "./common.js";

const START = {
  view: "samples",
  where: "",
  key: "",
  sort: "", // name of a column
  descending: "", // "1" for yes
  plain: "", // "1" leaves masks and boxes out of the cards
  count: 50,
  first: 0,
  sample: "", // the number of the open one; "first" or "last" of the page; "" for none
};

export const state = {};

export function read() {
  const given = new URLSearchParams(location.hash.slice(1));
  for (const [name, start] of Object.entries(START)) {
    const text = given.get(name) ?? "";
    if (typeof start === "string") state[name] = text || start;
    else state[name] = /^\d{1,15}$/.test(text) ? Number(text) : start;
  }
}

function address() {
  const differ = Object.entries(state).filter(([name, value]) => value !== START[name]);
  return `#${new URLSearchParams(differ)}`;
}

// Shows something else, as a step that the back button takes back.
export function go(changes) {
  Object.assign(state, changes);
  if (address() !== (location.hash || "#")) history.pushState(null, "", address());
  hush(); // what the banner says concerns what is left
  emit("address");
}

// Writes into the address what turned out to be shown.
export function correct(changes) {
  Object.assign(state, changes);
  history.replaceState(null, "", address());
}

window.addEventListener("popstate", () => {
  read();
  hush();
  emit("address");
});
read();

export const jump = (number) =>
  go({ view: "samples", where: "", key: "", sort: "", descending: "", sample: String(number) });

export const choose = (where) =>
  go({ view: "samples", where, key: "", first: 0, sample: state.sample && "first" });
