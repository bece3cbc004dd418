// The epoch view: what each rank reads at a step, for one training or two side by side.
import { jump } from "./address.js";
import { ask, byId, copyable, count, definitions, element, emit, plural, table } from "./common.js";

const FIELDS = ["epoch", "seed", "ranks", "workers", "batch_size"];
const MORE = ["microbatch", "lanes", "window", "block", "nodes", "exchange", "consumed", "balance"];
const ELSEWHERE =
  "Samples of this step are in shards that this page does not show: start it with the URLs of all datasets.";
const trainings = [];
const results = [null, null];
const RANKS_SHOWN = 64,
  NUMBERS_SHOWN = 512;

export function openEpoch() {
  const section = byId("epoch");
  const compare = element("button", {}, "Compare with another topology");
  const area = element("div", { class: "trainings" });
  const verdict = element("p", { id: "verdict" });
  section.replaceChildren(
    element(
      "p",
      { class: "quiet" },
      "The order of an epoch is computed from sizes, seed and epoch: nothing is read. Give the numbers of your ShardDataset and ShardLoader.",
    ),
    element("div", { class: "bar" }, compare),
    verdict,
    area,
  );
  trainings.splice(0, 2, training(0), training(1));
  area.append(trainings[0].root);
  compare.addEventListener("click", () => {
    const isTwo = area.classList.toggle("two");
    compare.textContent = isTwo ? "Close the comparison" : "Compare with another topology";
    if (isTwo) {
      trainings[1].copy(trainings[0]);
      area.append(trainings[1].root);
      trainings[1].show();
    } else {
      trainings[1].root.remove();
      results[1] = null;
    }
    trainings[0].show(); // its path has another width
  });
  trainings[0].show();
}

function training(number) {
  const inputs = {};
  const input = (name) => {
    const placeholder = "default";
    inputs[name] = element("input", { name, inputmode: "numeric", size: 6, placeholder });
    if (name === "balance") {
      inputs[name].placeholder = "column of costs";
      inputs[name].inputMode = "text";
      inputs[name].size = 12;
    }
    return element("label", {}, name, inputs[name]);
  };
  const check = (name, on) => {
    inputs[name] = element("input", { type: "checkbox", name, checked: on });
    return element("label", { class: "check" }, inputs[name], name);
  };
  inputs.remainder = element(
    "select",
    { name: "remainder" },
    ["pad", "drop", "keep"].map((one) => element("option", {}, one)),
  );
  inputs.where = element("input", {
    name: "where",
    placeholder: "all samples",
    spellcheck: "false",
  });
  const state = element("textarea", {
    rows: 3,
    placeholder: '{"version": 2, "kind": "plan", "fingerprint": …',
    "aria-label": "saved state",
    spellcheck: "false",
  });
  const resume = element("button", { type: "button" }, "Continue from this state");
  const form = element(
    "form",
    {},
    FIELDS.map(input),
    check("shuffle", true),
    check("drop_last", false),
    element("label", {}, "remainder", inputs.remainder),
    element(
      "details",
      { class: "span" },
      element(
        "summary",
        {},
        "microbatch, lanes, window, block, nodes, exchange, consumed, balance, where",
      ),
      element(
        "div",
        { class: "fields" },
        MORE.map(input),
        element("label", { class: "where" }, "where", inputs.where),
      ),
    ),
    element(
      "details",
      { class: "span" },
      element("summary", {}, "continue from a saved state: paste json.dumps(loader.state_dict())"),
      state,
      resume,
    ),
    element("button", { type: "submit" }, "Show"),
  );
  const step = element("input", {
    type: "text",
    inputmode: "numeric",
    size: 7,
    value: 0,
    "aria-label": "step",
  });
  const slider = element("input", {
    type: "range",
    min: 0,
    max: 0,
    value: 0,
    "aria-label": "step",
  });
  const rank = element("input", {
    type: "text",
    inputmode: "numeric",
    size: 4,
    value: 0,
    "aria-label": "rank",
  });
  const move = (by) => () => {
    step.value = Math.max(0, Number(step.value) + by);
    show();
  };
  const steps = element(
    "div",
    { class: "steps" },
    element("span", {}, "step"),
    element("button", { onclick: move(-1) }, "◀"),
    step,
    element("button", { onclick: move(1) }, "▶"),
    slider,
    element("span", { class: "quiet" }),
    element("span", {}, "path of rank"),
    rank,
  );
  const result = element("div", { class: "result" });
  const root = element(
    "div",
    { class: "training", "data-training": number },
    element("div", { class: "panel" }, form),
    steps,
    result,
  );
  inputs.ranks.value = 4;
  inputs.workers.value = 2;
  let pasted = "",
    request = 0,
    isFilled = false; // else the server says what the dataset has

  function values() {
    const found = {};
    for (const [name, one] of Object.entries(inputs)) {
      const value = one.type === "checkbox" ? String(one.checked) : one.value.trim();
      const isTyped = value && [...FIELDS, ...MORE].includes(name);
      if (name !== "where" && (isFilled || isTyped)) found[name] = value;
    }
    return { ...found, step: step.value.trim() || "0", rank: rank.value.trim() || "0" };
  }
  async function show() {
    const mine = ++request;
    let found;
    try {
      const where = inputs.where.value.trim();
      found = pasted
        ? await ask("/api/state", {}, { state: pasted, values: values(), where })
        : await ask("/api/epoch", { ...values(), where });
    } catch (error) {
      if (mine === request) emit("error", error);
      return;
    }
    if (mine !== request) return;
    byId("banner").hidden = true;
    slider.max = found.steps - 1;
    slider.value = step.value = found.step;
    steps.children[5].textContent = `of 0 to ${count(found.steps - 1)}`;
    if (pasted || !isFilled) fill(found.training);
    root.querySelector(".where").hidden = found.is_given;
    inputs.balance.parentElement.hidden = found.is_given;
    draw(result, found, Boolean(pasted));
    results[number] = found;
    tellDifference();
  }
  function fill(values) {
    isFilled = true;
    for (const [name, one] of Object.entries(inputs)) {
      if (one.type === "checkbox") one.checked = values[name];
      else if (name !== "where") one.value = values[name] ?? "";
    }
  }
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    pasted = "";
    show();
  });
  resume.addEventListener("click", () => {
    pasted = state.value.trim();
    step.value = 0;
    if (pasted) show();
    else emit("error", new Error("Paste a state first: json.dumps(loader.state_dict())"));
  });
  slider.addEventListener("change", () => {
    step.value = slider.value;
    show();
  });
  for (const one of [step, rank]) one.addEventListener("change", show);
  function copy(other) {
    fill(other.values());
    for (const name of ["shuffle", "drop_last"]) inputs[name].checked = other.inputs[name].checked;
    inputs.where.value = other.inputs.where.value;
    inputs.ranks.value = Number(inputs.ranks.value) * 2 || 2;
  }
  return { root, show, inputs, values, copy };
}

function tellDifference() {
  const [one, two] = results;
  const verdict = byId("verdict");
  if (!one || !two) {
    verdict.textContent = "";
    return;
  }
  const first = one.ranks.flatMap((rank) => rank.numbers),
    second = new Set(two.ranks.flatMap((rank) => rank.numbers));
  if ([...first, ...second].some((number) => number < 0)) {
    verdict.textContent = ELSEWHERE;
    return;
  }
  const common = new Set(first.filter((number) => second.has(number))).size;
  const isSame = common === new Set(first).size && common === second.size;
  verdict.replaceChildren(
    isSame
      ? element(
          "span",
          { class: "same" },
          `The same ${count(common)} samples at this step, over all ranks.`,
        )
      : element(
          "span",
          {},
          `${count(common)} samples in common at this step: ${count(first.length)} left, ${count(second.size)} right. The same numbers of lanes and microbatch give the same global batches on every topology.`,
        ),
  );
}

function draw(result, found, isResumed) {
  const order = Object.entries(found.order)
    .map(([name, value]) => `${name} ${count(value)}`)
    .join(" · ");
  const total = found.ranks.reduce((sum, rank) => sum + rank.numbers.length, 0);
  const facts = [
    [
      "step",
      `${count(found.step)} (0 to ${count(found.steps - 1)})${isResumed || found.training.consumed ? ", counted from the state" : ""}`,
    ],
    [
      "samples",
      `${count(total)} at this step; after it all ranks together have received ${count(found.consumed_after)} of ${count(found.samples)}`,
    ],
    ["order", order],
    ["shards", `${count(found.shards.count)} of ${count(found.shards.of)} are read at this step`],
  ];
  result.replaceChildren(
    ...found.notes.map((note) => element("div", { class: "hint" }, note)),
    element("div", { class: "panel" }, definitions(facts)),
    ...(found.command ? [copyable(found.command)] : []),
    ...(found.costs ? [costsPanel(found)] : []),
    ranksPanel(found),
    pathPanel(found),
    classesPanel(found),
  );
}

function ranksPanel(found) {
  const rows = found.ranks.slice(0, RANKS_SHOWN).map((one) =>
    element(
      "tr",
      { "data-rank": one.rank },
      element("td", { class: "short" }, `${one.rank}`),
      element("td", { class: "short" }, one.worker === null ? "main" : `${one.worker}`),
      element(
        "td",
        {
          class: "short",
          title: Object.entries(one.shards)
            .map(([shard, samples]) => `shard ${shard}: ${plural(samples, "sample")}`)
            .join("\n"),
        },
        plural(Object.keys(one.shards).length, "shard"),
      ),
      element(
        "td",
        { class: "numbers" },
        one.numbers
          .slice(0, NUMBERS_SHOWN)
          .map((number) =>
            number < 0
              ? element("span", { class: "quiet", title: ELSEWHERE }, "elsewhere ")
              : element("button", { onclick: () => jump(number) }, `${number}`),
          ),
        one.numbers.length > NUMBERS_SHOWN ? "…" : one.numbers.length ? "" : "none",
      ),
    ),
  );
  const more =
    found.ranks.length > RANKS_SHOWN
      ? `The first ${RANKS_SHOWN} of ${count(found.ranks.length)} ranks.`
      : "";
  return element(
    "div",
    { class: "panel" },
    element("h3", {}, "What each rank reads at this step"),
    element("div", { class: "scroll" }, table(["rank", "worker", "shards", "samples"], rows)),
    element("div", { class: "quiet" }, more),
  );
}

function costsPanel(found) {
  const { first, before, after } = found.costs;
  const made = element(
    "div",
    { class: "panel" },
    element("h3", {}, "Cost of each rank at these steps, without and with balance"),
  );
  if (!after.costs.length) {
    made.append(element("div", { class: "quiet" }, "The last step is not balanced."));
    return made;
  }
  const most = Math.max(...before.costs.flat(), ...after.costs.flat());
  for (const [name, one] of [
    ["without", before],
    ["with balance", after],
  ]) {
    const share = (100 * one.busy.reduce((sum, part) => sum + part, 0)) / one.busy.length;
    const here = one.busy[found.step - first];
    const canvas = element("canvas", {
      role: "img",
      "aria-label": `costs of the ranks over the steps, ${name}`,
    });
    made.append(
      element(
        "div",
        { class: "quiet" },
        `${name}: a rank works ${share.toFixed(0)} % of the time in the mean${here === undefined ? "" : `, ${(100 * here).toFixed(0)} % at this step`}`,
      ),
      canvas,
    );
    requestAnimationFrame(() => plotCosts(canvas, one.costs, most, found.step - first));
  }
  made.append(
    element(
      "div",
      { class: "quiet" },
      `Across: steps ${count(first)} to ${count(first + after.costs.length - 1)}. Up: cost of a batch, 0 to ${most.toFixed(1)} times the mean, a dot for each rank${found.ranks.length > RANKS_SHOWN ? ` (the first ${RANKS_SHOWN})` : ""}. The line is this step.`,
    ),
  );
  return made;
}

function plotCosts(canvas, costs, most, step) {
  const { context, style, width, height } = frame(canvas);
  const x = (place) => 4 + ((width - 8) * (place + 0.5)) / costs.length;
  mark(context, style, x(step), height);
  context.fillStyle = style.getPropertyValue("--bar");
  costs.forEach((ranks, place) => {
    for (const cost of ranks)
      context.fillRect(x(place) - 1.5, height - 5.5 - ((height - 8) * cost) / most, 3, 3);
  });
}

function frame(canvas) {
  const style = getComputedStyle(document.documentElement);
  const ratio = window.devicePixelRatio || 1,
    width = canvas.clientWidth,
    height = canvas.clientHeight;
  canvas.width = width * ratio;
  canvas.height = height * ratio;
  const context = canvas.getContext("2d");
  context.scale(ratio, ratio);
  context.strokeStyle = style.getPropertyValue("--line");
  context.strokeRect(0.5, 0.5, width - 1, height - 1);
  return { context, style, width, height };
}

function mark(context, style, x, height) {
  context.strokeStyle = style.getPropertyValue("--ideal");
  context.beginPath();
  context.moveTo(x, 0);
  context.lineTo(x, height);
  context.stroke();
}

function pathPanel(found) {
  const canvas = element("canvas", {
    role: "img",
    "aria-label": "samples of a rank over the steps",
  });
  const made = element(
    "div",
    { class: "panel" },
    element("h3", {}, `Place in the stored data over the steps, rank ${found.training.rank}`),
    canvas,
    element(
      "div",
      { class: "quiet" },
      `Across: steps 0 to ${count(found.path.of_steps - 1)}. Up: number of the sample, 0 to ${count(found.of_samples - 1)}. The line is this step.`,
    ),
  );
  requestAnimationFrame(() => plot(canvas, found));
  return made;
}

function plot(canvas, found) {
  const { context, style, width, height } = frame(canvas);
  const x = (step) => 4 + ((width - 8) * step) / Math.max(1, found.path.of_steps - 1);
  mark(context, style, x(found.step), height);
  context.fillStyle = style.getPropertyValue("--bar");
  found.path.steps.forEach((step, place) => {
    for (const number of found.path.numbers[place].filter((one) => one >= 0))
      context.fillRect(
        x(step) - 1,
        height - 4 - ((height - 8) * number) / Math.max(1, found.of_samples - 1),
        2,
        2,
      );
  });
}

function classesPanel(found) {
  if (!found.classes) return element("div", { class: "panel quiet" }, found.hint);
  const made = element(
    "div",
    { class: "panel" },
    element("h3", {}, "Classes at this step, all ranks, against their share of the data (mark)"),
  );
  const most = Math.max(...found.classes.rows.map((row) => Math.max(row.count, row.expected)), 1);
  for (const row of found.classes.rows) {
    const fill = element("span", { class: "fill" }),
      ideal = element("span", { class: "mark-ideal" });
    fill.style.width = `${(100 * row.count) / most}%`;
    ideal.style.left = `${(100 * row.expected) / most}%`;
    made.append(
      element(
        "div",
        { class: "hbar" },
        element(
          "span",
          { class: "what" },
          row.name === null ? `class ${row.number}` : `${row.number} ${row.name}`,
        ),
        element("span", { class: "track" }, row.count ? fill : null, ideal),
        element("span", { class: "count" }, `${row.count} / ${row.expected.toFixed(1)}`),
      ),
    );
  }
  const mean =
    found.classes.distances.reduce((sum, one) => sum + one, 0) /
    Math.max(1, found.classes.distances.length);
  made.append(
    element(
      "div",
      { class: "quiet" },
      `${plural(found.classes.classes, "class")}. Distance of a rank's batch from the shares of the data: ${mean.toFixed(3)} in the mean, largest ${Math.max(...found.classes.distances, 0).toFixed(3)}; independent draws have about ${found.classes.ideal.toFixed(3)}. 0 is equal, 1 nothing in common.`,
    ),
  );
  return made;
}
