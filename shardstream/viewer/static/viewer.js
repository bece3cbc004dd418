// The page as a whole: the dataset, the tabs, and the messages that concern all of it.

import { go, state } from "./address.js";
import { showBad } from "./bad.js";
import { ask, byId, bytes, count, element, events, hush, plural, tell } from "./common.js";
import { openEpoch } from "./epoch.js";
import { showHistograms } from "./histograms.js";
import { openSamples, showSamples } from "./samples.js";

const views = { samples: null, histograms: showHistograms, epoch: openEpoch, bad: showBad };
const opened = new Set();

async function show(isReplaced = false) {
  const view = Object.hasOwn(views, state.view) ? state.view : "samples";
  for (const name of Object.keys(views)) byId(name).hidden = name !== view;
  for (const tab of document.querySelectorAll("[data-view]"))
    tab.setAttribute("aria-selected", tab.dataset.view === view);
  if (view === "samples") await showSamples(isReplaced);
  else if (!opened.has(view)) {
    opened.add(view);
    views[view]();
  }
}

function showDataset(dataset) {
  byId("name").textContent = dataset.urls.join(", ");
  document.title = `${dataset.urls[0]} - shardstream view`;
  const parts = [
    plural(dataset.samples, "sample") + (dataset.is_indexed ? "" : " read"),
    plural(dataset.shards, "shard"),
  ];
  if (dataset.bytes !== null) parts.push(bytes(dataset.bytes));
  if (dataset.num_classes) parts.push(plural(dataset.num_classes, "class"));
  byId("counts").textContent = parts.join(" · ");
  byId("hint").hidden = !dataset.hint;
  byId("hint").textContent = dataset.hint;
  byId("class-label").hidden = !dataset.is_indexed;
  byId("class-names").replaceChildren(
    ...dataset.classes.map((name, number) => element("option", { value: `${number} ${name}` })),
  );
  byId("sort-label").hidden = !dataset.columns.length;
  byId("sort").replaceChildren(
    element("option", { value: "" }, "number"),
    ...dataset.columns.map((name) => element("option", { value: name }, name)),
  );
  byId("sort").value = state.sort;
  const tab = document.querySelector('[data-view="bad"]');
  tab.textContent = dataset.bad ? `Bad samples (${count(dataset.bad)})` : "Bad samples";
}

async function reload() {
  try {
    hush();
    showDataset(await ask("/api/reload", {}, {}));
    for (const view of ["histograms", "bad"]) {
      opened.delete(view);
      byId(view).replaceChildren();
    }
    await show(true);
  } catch (error) {
    complain(error);
  }
}

function complain(error) {
  const actions = {
    ChangedError: "Reload the dataset",
    IndexMismatchError: "Reload the dataset",
    StorageError: "Try again",
    NotFoundError: "Try again",
    AccessDeniedError: "Try again",
  };
  if (error.kind === "Gone") tell(error, { name: "Try again", run: () => location.reload() });
  else if (actions[error.kind]) tell(error, { name: actions[error.kind], run: reload });
  else tell(error);
}

events.addEventListener("error", (event) => complain(event.detail));
events.addEventListener("address", () => show());
byId("banner-close").addEventListener("click", hush);
for (const tab of document.querySelectorAll("[data-view]"))
  tab.addEventListener("click", () => go({ view: tab.dataset.view }));

async function start() {
  openSamples();
  const shown = show();
  try {
    showDataset(await ask("/api/dataset"));
  } catch (error) {
    complain(error);
  }
  await shown;
}

start();
