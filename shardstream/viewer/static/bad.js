// The reports of bad samples.
import { jump } from "./address.js";
import { ask, byId, count, element, emit, table } from "./common.js";

export async function showBad() {
  const section = byId("bad");
  let found;
  try {
    found = await ask("/api/bad");
  } catch (error) {
    return emit("error", error);
  }
  if (!found.total) {
    section.replaceChildren(
      element(
        "p",
        { class: "quiet" },
        'No report was given. A loader writes one with on_error=SkipBudget(report="bad.jsonl"); start with --bad bad.jsonl to see it here.',
      ),
    );
    return;
  }
  const names = ["number", "key", "field", "error", "message", "shard", "offset", "found by"];
  section.replaceChildren(
    element(
      "p",
      {},
      element("b", {}, `${count(found.total)} bad samples in the report`),
      found.total > found.rows.length ? `, the first ${count(found.rows.length)} are listed` : "",
    ),
    element("div", { class: "panel" }, table(names, found.rows.map(row))),
  );
}

function row(one) {
  const number =
    one.number === null
      ? element(
          "span",
          { class: "quiet", title: "the shard of this entry is not in this dataset" },
          "elsewhere",
        )
      : element(
          "span",
          { class: "numbers" },
          element("button", { onclick: () => jump(one.number) }, count(one.number)),
        );
  const finder = [
    one.epoch === null ? null : `epoch ${one.epoch}`,
    one.rank === null ? null : `rank ${one.rank}`,
    one.worker === null ? null : `worker ${one.worker}`,
  ];
  const cells = [
    number,
    one.key ?? "",
    one.field ?? "",
    one.error,
    element("span", { class: "problem" }, one.message),
    one.shard ?? "",
    one.offset === null ? "" : count(one.offset),
    finder.filter(Boolean).join(", "),
  ];
  return element(
    "tr",
    {},
    cells.map((cell, at) => element("td", { class: [4, 5].includes(at) ? "" : "short" }, cell)),
  );
}
