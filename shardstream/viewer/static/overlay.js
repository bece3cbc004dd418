// Masks and boxes over a picture, in the details and on cards.
import { element } from "./common.js";

const SVG = "http://www.w3.org/2000/svg";
const FORMS = { xywh: "x y width height", xyxy: "x1 y1 x2 y2", cxcywh: "centre, width, height" };
let form = ""; // how the numbers of all boxes are read; "" is as named
const redraw = new WeakMap(); // layer of boxes -> function that draws it

export function boxLayer(boxes, picture) {
  const layer = element("div", { class: "overlay boxes" });
  redraw.set(layer, () => layer.replaceChildren(...drawn(boxes, picture)));
  redraw.get(layer)();
  return layer;
}

export function formChoice() {
  const choice = element(
    "select",
    { "aria-label": "numbers of a box" },
    Object.entries({ "": "as named", ...FORMS }).map(([value, text]) =>
      element("option", { value, selected: form === value }, text),
    ),
  );
  choice.addEventListener("change", () => {
    form = choice.value;
    for (const layer of document.querySelectorAll(".boxes")) redraw.get(layer)();
  });
  return choice;
}

function drawn(boxes, picture) {
  const svg = shape("svg", { viewBox: `0 0 ${picture.width} ${picture.height}` });
  svg.setAttribute("preserveAspectRatio", "none");
  const labels = [];
  for (const one of boxes) {
    const [x, y, width, height] = corners(one, picture);
    svg.append(shape("rect", { x, y, width: Math.max(0, width), height: Math.max(0, height) }));
    if (!one.label) continue;
    const label = element("span", { class: "box-label" }, one.label);
    label.style.left = `${(100 * x) / picture.width}%`;
    label.style.top = `${(100 * y) / picture.height}%`;
    labels.push(label);
  }
  return [svg, ...labels];
}

function corners(one, picture) {
  let [a, b, c, d] = one.box;
  if ([a, b, c, d].every((value) => value >= 0 && value <= 1)) {
    a *= picture.width;
    c *= picture.width;
    b *= picture.height;
    d *= picture.height;
  }
  const read = form || one.form;
  if (read === "xyxy") return [a, b, c - a, d - b];
  if (read === "cxcywh") return [a - c / 2, b - d / 2, c, d];
  return [a, b, c, d];
}

export function shape(tag, attributes) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return made;
}
