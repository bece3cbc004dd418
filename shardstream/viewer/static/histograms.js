// Histograms of the columns of all samples, or of a sample of them.
import { choose } from "./address.js";
import { ask, byId, count, element, emit } from "./common.js";

export async function showHistograms() {
  const section = byId("histograms");
  section.replaceChildren(element("p", { class: "quiet" }, "counting …"));
  let found;
  try {
    found = await ask("/api/histograms");
  } catch (error) {
    section.replaceChildren();
    return emit("error", error);
  }
  const said = found.exact
    ? `Exact: all ${count(found.total)} samples.`
    : `A sample of ${count(found.of)} of ${count(found.total)}, spread over the data.`;
  const chosen = found.histograms.some((one) => one.bars.some((bar) => bar.where));
  section.replaceChildren(
    element(
      "p",
      {},
      element("b", {}, said),
      " ",
      element(
        "span",
        { class: "quiet" },
        chosen ? "Click a bar to see its samples." : found.reason,
      ),
    ),
    element("div", { class: "panels" }, found.histograms.map(panel)),
  );
}

function panel(one) {
  const most = Math.max(...one.bars.map((bar) => bar.count), 1);
  const rest = [];
  if (one.nulls) rest.push(`${count(one.nulls)} without a value`);
  if (one.others) rest.push(`${count(one.others)} of other values`);
  return element(
    "div",
    { class: "panel", "data-column": one.name },
    element(
      "h3",
      {},
      one.name,
      " ",
      element("span", { class: "quiet" }, `${count(one.distinct)} distinct`),
    ),
    one.bars.map((bar) => barOf(bar, most)),
    rest.length ? element("div", { class: "quiet" }, rest.join(", ")) : null,
  );
}

function barOf(bar, most) {
  const fill = element("span", { class: "fill" });
  fill.style.width = `${(100 * bar.count) / most}%`;
  const inside = [
    element("span", { class: "what", title: bar.label }, bar.label || "(empty)"),
    element("span", { class: "track" }, bar.count ? fill : null),
    element("span", { class: "count" }, count(bar.count)),
  ];
  if (!bar.where) return element("div", { class: "hbar" }, inside);
  return element(
    "button",
    { class: "hbar", title: bar.where, onclick: () => choose(bar.where) },
    inside,
  );
}
