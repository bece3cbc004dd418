// The details panel: one sample with all its fields, boxes and masks over the picture.
import { ask, byId, bytes, copyable, count, definitions, element, emit, plural } from "./common.js";
import { boxLayer, formChoice, shape } from "./overlay.js";

const shown = { boxes: true, opacity: 0.5, masks: new Map() };
let request = 0;

export function closeDetails() {
  request += 1; // an answer on its way is of a sample that was closed
  byId("details").hidden = true;
  byId("details").replaceChildren();
}

export async function showDetails(number, actions) {
  const mine = ++request;
  let found;
  try {
    found = await ask(`/api/sample/${number}`);
  } catch (error) {
    return emit("error", error);
  }
  if (mine !== request) return;
  const panel = byId("details");
  panel.replaceChildren(heading(found, actions));
  if (found.error) panel.append(element("div", { class: "problem" }, found.error));
  for (const text of found.reported ?? [])
    panel.append(element("div", { class: "problem" }, `in the report: ${text}`));
  const names = found.fields.map((one) => one.name);
  const picture =
    found.fields.find((one) => one.kind === "picture" && !one.error) ??
    found.fields.find((one) => one.kind === "mask" && !one.error);
  if (picture) panel.append(stage(found, picture, names));
  for (const one of found.decoded ?? []) panel.append(decoded(found.number, one));
  panel.append(place(found), copyable(found.cat));
  for (const one of found.fields) panel.append(field(found, one, names.indexOf(one.name), picture));
  panel.hidden = false;
  panel.scrollTop = 0;
}

function heading(found, actions) {
  return element(
    "div",
    { class: "heading" },
    element("h2", {}, `${count(found.number)} · ${found.key ?? "unreadable"}`),
    element("button", { onclick: actions.previous, title: "previous sample (arrow left)" }, "◀"),
    element("button", { onclick: actions.next, title: "next sample (arrow right)" }, "▶"),
    element("button", { onclick: actions.close, title: "close (Escape)" }, "×"),
  );
}

function place(found) {
  const rows = [
    ["shard", found.shard],
    [
      "bytes",
      found.start === null
        ? "in a compressed tar"
        : `${count(found.start)} to ${count(found.end)} (${bytes(found.size)})`,
    ],
  ];
  if (found.class)
    rows.unshift([
      "class",
      found.class.name === null
        ? `${found.class.number}`
        : `${found.class.number} ${found.class.name}`,
    ]);
  return definitions(rows);
}

function stage(found, picture, names) {
  const image = element("img", {
    alt: picture.name,
    src: `/picture/${found.number}/${names.indexOf(picture.name)}`,
  });
  if (Math.max(picture.width, picture.height) <= 256) {
    image.classList.add("small");
    image.width =
      picture.width * Math.max(1, Math.floor(360 / Math.max(picture.width, picture.height)));
  }
  const frame = element("div", { class: "frame" }, image);
  const controls = element("div", { class: "controls" });
  for (const name of found.masks.filter((one) => one !== picture.name)) {
    const overlay = element("img", {
      class: "overlay",
      alt: name,
      src: `/picture/${found.number}/${names.indexOf(name)}?overlay=1`,
    });
    const set = () => {
      overlay.style.opacity = shown.masks.get(name) === false ? 0 : shown.opacity;
    };
    set();
    frame.append(overlay);
    controls.append(
      toggle(name, shown.masks.get(name) !== false, (on) => {
        shown.masks.set(name, on);
        set();
      }),
    );
    overlay.addEventListener("error", () => overlay.remove());
    controls.addEventListener("opacity", set);
  }
  if (frame.childElementCount > 1) {
    const slider = element("input", {
      type: "range",
      min: 0,
      max: 1,
      step: 0.05,
      value: shown.opacity,
      "aria-label": "opacity of masks",
    });
    slider.addEventListener("input", () => {
      shown.opacity = Number(slider.value);
      controls.dispatchEvent(new Event("opacity"));
    });
    controls.append(slider);
  }
  if (found.boxes.length) {
    const layer = boxLayer(found.boxes, picture);
    const set = (on) => {
      shown.boxes = on;
      layer.hidden = !on;
    };
    set(shown.boxes);
    frame.append(layer);
    controls.append(toggle(plural(found.boxes.length, "box"), shown.boxes, set), formChoice());
  }
  return element("div", {}, element("div", { class: "stage" }, frame), controls);
}

function toggle(text, on, change) {
  const box = element("input", { type: "checkbox", checked: on });
  box.addEventListener("change", () => change(box.checked));
  return element("label", {}, box, " ", text);
}

function field(found, one, number, main) {
  const facts = [one.kind, bytes(one.size), `at byte ${count(one.offset)}`];
  if (one.width) facts.splice(1, 0, `${one.format} ${one.width} × ${one.height} ${one.mode}`);
  const source = `${found.number}/${number}`;
  const download = element("a", { href: `/raw/${source}`, download: true }, "download");
  const made = named(one.name, facts.join(" · "), download);
  if (one.error) {
    made.append(element("div", { class: "problem" }, one.error));
    return made;
  }
  if (one.note) made.append(element("div", { class: "quiet" }, one.note));
  if (one.kind === "sound" || one.kind === "video") made.append(...media(one, source));
  if (one.kind === "picture" && one !== main) made.append(inline(`/picture/${source}`, one.name));
  if (one.kind === "mask" && one !== main) made.append(inline(`/thumb/${source}`, one.name));
  if (one.array) made.append(inline(`/thumb/${source}`, one.name), statistics(one.array));
  for (const [name, array] of Object.entries(one.arrays ?? {}))
    made.append(element("b", {}, name), statistics(array));
  if (one.text !== undefined) made.append(element("pre", {}, one.text + (one.cut ? "…" : "")));
  return made;
}

function named(name, facts, link = null) {
  const quiet = element("span", { class: "quiet" }, facts);
  const line = element("div", { class: "name" }, element("b", {}, name), quiet, link);
  return element("div", { class: "field" }, line);
}

function media(one, source) {
  const made = [inline(`/thumb/${source}`, one.name)];
  if (!one.media_type)
    made.push(element("div", { class: "quiet" }, "browsers do not play this type: download it"));
  else
    made.push(
      element(one.kind === "sound" ? "audio" : "video", {
        controls: true,
        preload: "none",
        src: `/media/${source}`,
      }),
    );
  return made;
}

function inline(source, name) {
  const image = element("img", { class: "inline", alt: name, src: source });
  image.addEventListener("error", async () => {
    const response = await fetch(source).catch(() => null);
    const value =
      response === null
        ? { error: "the server does not answer" }
        : await response.json().catch(() => ({ error: "no picture" }));
    image.replaceWith(element("div", { class: "problem" }, value.error ?? "no picture"));
  });
  return image;
}

function statistics(array) {
  const rows = [["shape", `${array.shape.join(" × ") || "scalar"}  ${array.dtype}`]];
  const short = (value) => Number(value.toPrecision(6)).toString();
  if (array.min !== undefined)
    rows.push(
      ["range", `${short(array.min)} to ${short(array.max)}`],
      ["mean", `${short(array.mean)} ± ${short(array.std)}`],
      ["zeros", count(array.zeros)],
    );
  if (array.not_finite) rows.push(["not finite", count(array.not_finite)]);
  if (array.values) rows.push(["values", array.values.join(", ")]);
  const made = definitions(rows);
  if (array.histogram)
    made.append(element("dt", {}, "spread"), element("dd", {}, sparks(array.histogram)));
  return made;
}

function sparks(counts) {
  const most = Math.max(...counts, 1);
  const width = counts.length * 6;
  const svg = shape("svg", { viewBox: `0 0 ${width} 24`, width, height: 24 });
  counts.forEach((value, at) => {
    const height = value ? Math.max(1, (24 * value) / most) : 0;
    const bar = shape("rect", { x: at * 6, y: 24 - height, width: 5, height });
    bar.style.fill = "var(--bar)";
    svg.append(bar);
  });
  return svg;
}

function decoded(number, one) {
  const made = named(one.name, "by --decode");
  if (one.error) made.append(element("div", { class: "problem" }, one.error));
  if (one.is_picture)
    made.append(inline(`/decoded/${number}?name=${encodeURIComponent(one.name)}`, one.name));
  if (one.array) made.append(statistics(one.array));
  if (one.text !== undefined && !one.is_picture) made.append(element("pre", {}, one.text));
  return made;
}
