// The training clusters on a plane and the new images among them. One standard deviation is as long in x as in y.

import { html, svg } from "./dom.js";
import { figure, shortNames } from "./format.js";

const WIDTH = 340;
const SHAPES = [0.8, 1]; // of height to width, at least and at most
const MARKER = 9; // radius
const BORDER = MARKER + 7; // markers keep this far from the border, so that their arrows fit
const COLOURS = 10; // classes beyond take them again
const MANY = 80; // markers with numbers; more of them are dots
const DOT = 4; // radius of a cluster that has no circle
const LONGEST = 24; // letters of a label
const LINE = 14; // height of a label

const CIRCLE = `M${-MARKER} 0a${MARKER} ${MARKER} 0 1 1 ${2 * MARKER} 0a${MARKER} ${MARKER} 0 1 1 ${-2 * MARKER} 0Z`;
const DIAMOND = `M0 ${-1.25 * MARKER}L${1.25 * MARKER} 0L0 ${1.25 * MARKER}L${-1.25 * MARKER} 0Z`;
const ARROW = `M${MARKER + 1.5} -4L${MARKER + 6.5} 0L${MARKER + 1.5} 4Z`;

export class ClusterMap {
  #markers = new Map(); // image -> its marker
  #circles = new Map(); // cluster -> its circle or dot
  #current = null; // the image whose marker has the tab stop
  #selected = null;

  /** ``onSelect`` is told the image whose marker is chosen. */
  constructor(root, model, onSelect) {
    this.root = root;
    this.model = model;
    this.onSelect = onSelect;
    this.view = new View(model);
    this.clusters = new Map(model.clusters.map((cluster) => [cluster.cluster, cluster]));
    root.setAttribute("viewBox", `0 0 ${WIDTH} ${this.view.height}`);
    this.circleLayer = svg("g", { "aria-hidden": "true" });
    this.linkLayer = svg("g", { "aria-hidden": "true" });
    this.markerLayer = svg("g", {});
    this.topLayer = svg("g", { class: "top", "aria-hidden": "true" });
    root.replaceChildren(this.circleLayer, this.linkLayer, this.markerLayer, this.topLayer);
    this.#drawClusters();
    this.markerLayer.addEventListener("keydown", (event) => this.#onKey(event));
  }

  #drawClusters() {
    const { model, view } = this;
    const classIds = new Map(model.classes.map((name, i) => [name, i]));
    const r = model.map_radius === null ? DOT : 2 * model.map_radius * view.scale;
    for (const cluster of model.clusters) {
      const [x, y] = view.at(cluster.position);
      const shape = svg(
        "circle",
        { cx: x, cy: y, r, class: `cluster c${classIds.get(cluster.class) % COLOURS}` },
        svg("title", {}, `Cluster ${cluster.cluster}: ${cluster.class}`),
      );
      shape.classList.toggle("dot", model.map_radius === null);
      this.#circles.set(cluster.cluster, shape);
      this.circleLayer.append(shape);
    }
    const names = shortNames(model.classes, LONGEST);
    const own = (name) => model.clusters.filter((cluster) => cluster.class === name);
    const at = ({ position }) => view.at(position);
    this.labels = new Labels(view, this.circleLayer, r, model.classes.map((name, i) => [names[i], own(name).map(at)]));
    this.labels.place([]);
  }

  /** Move the labels off the markers; of many that come at once, after the last. */
  #moveLabels() {
    cancelAnimationFrame(this.frame);
    this.frame = requestAnimationFrame(() => {
      const places = this.#visible().map((image) => this.view.clamp(image.prediction.position));
      this.labels.place(places.length > MANY ? [] : places);
    });
  }

  /** Place an image, drawn by ``show``. */
  add(image) {
    const { x, y, angle } = this.view.clamp(image.prediction.position);
    const marker = svg(
      "g",
      { class: "marker", role: "button", tabindex: "-1", "aria-pressed": "false", transform: `translate(${x} ${y})` },
      svg("path", { class: "shape" }),
      svg("text", { dy: "0.35em" }, String(image.number)),
    );
    if (angle !== null) marker.prepend(svg("path", { class: "arrow", d: ARROW, transform: `rotate(${angle})` }));
    marker.addEventListener("click", () => this.#choose(image));
    this.#markers.set(image, marker);
    this.markerLayer.append(marker);
    if (this.#current === null) this.#stopAt(image);
    this.root.classList.toggle("many", this.#markers.size > MANY);
  }

  clear() {
    this.#markers.clear();
    this.#current = null;
    this.select(null);
    this.markerLayer.replaceChildren();
    this.root.classList.remove("many");
    this.#moveLabels();
  }

  /** Draw an image as in or out of distribution (null where nothing was calibrated), or hide it. */
  show(image, isOut, isHidden) {
    const marker = this.#markers.get(image);
    if (marker.shown === isOut && marker.isHidden === isHidden) return; // of many markers, few change at a time
    if (marker.isHidden !== isHidden) this.#moveLabels();
    Object.assign(marker, { shown: isOut, isHidden });
    marker.classList.toggle("out", isOut === true);
    marker.classList.toggle("in", isOut === false);
    marker.classList.toggle("away", isHidden);
    marker.querySelector(".shape").setAttribute("d", isOut ? DIAMOND : CIRCLE);
    marker.setAttribute("aria-label", this.#describe(image, isOut));
    if (image === this.#selected) this.#drawSelection();
    if (image === this.#current && isHidden) this.#stopAt(this.#visible()[0] ?? null);
    else if (this.#current === null && !isHidden) this.#stopAt(image);
  }

  /** Bring one image to the front, with lines to its nearest cluster and to that of its rival; null for none. */
  select(image) {
    this.#markers.get(this.#selected)?.setAttribute("aria-pressed", "false");
    this.#selected = this.#markers.has(image) ? image : null;
    this.#markers.get(this.#selected)?.setAttribute("aria-pressed", "true");
    if (this.#selected) this.#stopAt(this.#selected);
    this.#drawSelection();
  }

  #drawSelection() {
    for (const circle of this.#circles.values()) circle.classList.remove("nearest");
    this.linkLayer.replaceChildren();
    this.topLayer.replaceChildren();
    const image = this.#selected;
    const marker = this.#markers.get(image);
    if (!marker || marker.isHidden) return;
    const { x, y } = this.view.clamp(image.prediction.position);
    for (const [kind, cluster] of [["runner-up", image.rival?.cluster], ["nearest", image.prediction.cluster]]) {
      if (!this.clusters.has(cluster)) continue;
      const [cx, cy] = this.view.at(this.clusters.get(cluster).position);
      this.linkLayer.append(svg("line", { class: `link ${kind}`, x1: x, y1: y, x2: cx, y2: cy }));
    }
    this.#circles.get(image.prediction.cluster)?.classList.add("nearest");
    const copy = marker.cloneNode(true);
    for (const name of ["role", "tabindex", "aria-label", "aria-pressed"]) copy.removeAttribute(name);
    copy.classList.add("selected");
    copy.append(svg("circle", { class: "ring", r: 1.7 * MARKER }));
    this.topLayer.append(copy);
  }

  #describe(image, isOut) {
    const { prediction } = image;
    const verdict = isOut === null ? "" : isOut ? ", unknown" : ", known";
    const far = this.view.clamp(prediction.position).angle === null ? "" : ", outside the map";
    return `Image ${image.number}, ${image.name}: ${prediction.class}${verdict}${far}`;
  }

  #visible() {
    return [...this.#markers].filter(([, marker]) => !marker.isHidden).map(([image]) => image);
  }

  #stopAt(image) {
    this.#markers.get(this.#current)?.setAttribute("tabindex", "-1");
    this.#markers.get(image)?.setAttribute("tabindex", "0");
    this.#current = image;
  }

  #choose(image) {
    this.#stopAt(image);
    this.onSelect(image);
  }

  /** One tab stop for all markers; arrows go from image to image, Enter and Space choose. */
  #onKey(event) {
    const images = this.#visible();
    const at = images.indexOf(this.#current);
    const steps = { ArrowRight: at + 1, ArrowDown: at + 1, ArrowLeft: at - 1, ArrowUp: at - 1, Home: 0, End: -1 };
    if (event.key === "Enter" || event.key === " ") this.#choose(this.#current);
    else if (event.key in steps) {
      this.#stopAt(images.at(steps[event.key] % images.length));
      this.#markers.get(this.#current).focus();
    } else return;
    event.preventDefault();
  }

  /** The same for those who do not see it: a table of the images, and one of the clusters. */
  table(images, isOut) {
    const verdict = { true: "unknown", false: "known", null: "–" };
    const placed = images.filter((image) => image.prediction);
    return [
      grid(
        "Images",
        ["Image", "Name", "Class", "Verdict", "Nearest cluster", "x", "y"],
        placed.map((image) => [
          image.number,
          image.name,
          image.prediction.class,
          verdict[isOut(image.prediction)],
          image.prediction.cluster,
          ...image.prediction.position.map(figure),
        ]),
      ),
      grid(
        "Clusters",
        ["Cluster", "Class", "x", "y"],
        this.model.clusters.map((cluster) => [cluster.cluster, cluster.class, ...cluster.position.map(figure)]),
      ),
    ];
  }
}

function grid(caption, headings, rows) {
  return html(
    "table",
    {},
    html("caption", {}, caption),
    html("thead", {}, html("tr", {}, ...headings.map((heading) => html("th", { scope: "col" }, heading)))),
    html("tbody", {}, ...rows.map((row) => html("tr", {}, ...row.map((value) => html("td", {}, String(value)))))),
  );
}

/** From the plane of the clusters to the drawing. */
class View {
  constructor({ clusters, map_radius: radius }) {
    const xs = clusters.map(({ position }) => position[0]);
    const ys = clusters.map(({ position }) => position[1]);
    const [left, right, bottom, top] = [least(xs), most(xs), least(ys), most(ys)];
    const around = radius === null ? 0.15 * Math.max(right - left, top - bottom) || 1 : 2.6 * radius;
    const [width, height] = [right - left + 2 * around, top - bottom + 2 * around];
    const shape = Math.min(Math.max(height / width, SHAPES[0]), SHAPES[1]);
    this.height = Math.round(WIDTH * shape);
    this.scale = Math.min(WIDTH / width, this.height / height);
    this.centre = [(left + right) / 2, (bottom + top) / 2];
  }

  at([x, y]) {
    const [cx, cy] = this.centre;
    return [WIDTH / 2 + this.scale * (x - cx), this.height / 2 - this.scale * (y - cy)];
  }

  /** Where a marker goes: outside the map it moves along the line to the centre, up to the border, with an angle. */
  clamp(position) {
    const [x, y] = this.at(position);
    const [dx, dy] = [x - WIDTH / 2, y - this.height / 2];
    const over = Math.max(Math.abs(dx) / (WIDTH / 2 - BORDER), Math.abs(dy) / (this.height / 2 - BORDER));
    if (over <= 1) return { x, y, angle: null };
    return {
      x: WIDTH / 2 + dx / over,
      y: this.height / 2 + dy / over,
      angle: (180 / Math.PI) * Math.atan2(dy, dx),
    };
  }
}

/** Names of classes that do not cover each other; one that finds no room is left to the titles of its clusters. */
class Labels {
  /** ``named``: of each class, its name and where its clusters are. The layer is in the page, or widths are unknown. */
  constructor(view, layer, r, named) {
    this.view = view;
    this.layer = layer;
    this.labels = named.filter(([, points]) => points.length).map(([name, points]) => {
      const text = svg("text", { class: "label", dy: "0.35em" }, name);
      layer.append(text);
      const half = text.getComputedTextLength() / 2;
      return { text, half, places: half + 2 > WIDTH / 2 ? [] : [...this.#places(points, half, r)] };
    });
  }

  /** Above and below the clusters of a class, the most central first, where few markers are; within them; further off. */
  *#places(points, half, r) {
    const mean = [0, 1].map((axis) => points.reduce((sum, point) => sum + point[axis], 0) / points.length);
    const toMean = ([x, y]) => Math.hypot(x - mean[0], y - mean[1]);
    const near = points.toSorted((a, b) => toMean(a) - toMean(b));
    const outside = [1 / 3, 4 / 3].flatMap((lines) => [-r - lines * LINE, r + lines * LINE]);
    const within = Array.from({ length: Math.max(Math.floor(r / LINE), 1) }, (_, i) => [-(i + 1) * LINE, (i + 1) * LINE]);
    for (const lift of [...outside.slice(0, 2), 0, ...within.flat(), ...outside.slice(2)]) {
      for (const [x, y] of near) {
        for (const side of [0, -half, half]) {
          const cx = Math.min(Math.max(x + side, half + 2), WIDTH - half - 2);
          const box = [cx - half, y + lift - LINE / 2, cx + half, y + lift + LINE / 2];
          if (box[1] >= 0 && box[3] <= this.view.height) yield { x: cx, y: y + lift, box };
        }
      }
    }
  }

  /** Put each label where it covers no other, and where the fewest of ``markers`` cover it. */
  place(markers) {
    const boxes = [];
    const around = markers.map(({ x, y }) => [x - MARKER, y - MARKER, x + MARKER, y + MARKER]);
    for (const { text, places } of this.labels) {
      const open = places.filter(({ box }) => !boxes.some((other) => overlap(box, other)));
      const covered = open.map(({ box }) => around.filter((other) => overlap(box, other)).length);
      const found = open[covered.indexOf(least(covered))];
      if (!found) {
        text.remove();
        continue;
      }
      if (!text.isConnected) this.layer.append(text);
      boxes.push(found.box);
      text.setAttribute("x", found.x);
      text.setAttribute("y", found.y);
    }
  }
}

const overlap = (a, b) => a[0] < b[2] && b[0] < a[2] && a[1] < b[3] && b[1] < a[3];
const least = (values) => values.reduce((a, b) => Math.min(a, b), Infinity);
const most = (values) => values.reduce((a, b) => Math.max(a, b), -Infinity);
