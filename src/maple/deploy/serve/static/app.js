// The page: images come in, go to the service, and become cards and markers; the level decides about all of them.

import { Busy, Failed, KeyNeeded, Refused, fetchModel, hasKey } from "./api.js";
import { Card, Observer } from "./cards.js";
import { find, html } from "./dom.js";
import { droppedFiles, named, pastedFiles } from "./files.js";
import { csv, figure, plural } from "./format.js";
import { askForKey } from "./key.js";
import { Level } from "./level.js";
import { ClusterMap } from "./map.js";
import { Queue } from "./queue.js";

const STEPS = 400; // of the slider
const QUIET = 400; // milliseconds without a change before it is read out
const PACE = 100; // milliseconds between two drawings while answers come

class Page {
  images = []; // in the order added
  selected = null;
  nPasted = 0;
  observer = new Observer();
  refreshing = null; // a timer
  saying = null; // a timer
  cards = find("cards");

  constructor(model) {
    this.model = model;
    this.level = new Level(model.decision);
    this.map = new ClusterMap(find("map"), model, (image) => this.select(image, true));
    this.queue = this.#newQueue();
    this.#describeModel();
    this.#prepareLevel();
    this.#listen();
    this.refresh();
    find("choose").disabled = false;
  }

  // --- images in and out -------------------------------------------------------------------------------------------

  /** Take files in, as ``{file, name}``. */
  add(files) {
    const images = files.map(({ file, name }, i) => ({
      file, name, number: this.images.length + i + 1, url: URL.createObjectURL(file), model: this.model,
      prediction: null, rival: null, isRefused: false,
    }));
    for (const image of images) {
      image.card = new Card(image, {
        onSelect: () => this.select(image, false),
        onTryAgain: () => this.#tryAgain(image),
      });
    }
    this.images.push(...images);
    this.cards.append(...images.map(({ card }) => card.node));
    this.queue.add(images);
    this.refresh();
  }

  clear() {
    this.queue.stop();
    this.queue = this.#newQueue();
    for (const { url } of this.images) URL.revokeObjectURL(url);
    this.images = [];
    this.selected = null;
    this.observer.clear();
    this.map.clear();
    this.cards.replaceChildren();
    this.#note("");
    this.refresh();
    find("choose").focus();
  }

  /** The class beside that of the nearest cluster: the most probable one if it is another, else the runner-up. */
  #rivalOf({ class: name, probability, md_class: nearest, runner_up: second, position }) {
    const rival = name === nearest ? { words: "Runner-up", ...second } : { words: "Most probable", class: name, probability };
    return rival.class ? { ...rival, cluster: this.#nearestOnMap(rival.class, position) } : null;
  }

  /** Of the clusters of a class, the one nearest to a place on the map; null where there is none. */
  #nearestOnMap(name, [x, y]) {
    const distance = ({ position }) => Math.hypot(position[0] - x, position[1] - y);
    const own = this.model.clusters.filter((each) => each.class === name);
    return own.toSorted((a, b) => distance(a) - distance(b))[0]?.cluster ?? null;
  }

  #newQueue() {
    return new Queue(this.model.limits, {
      sent: (images) => images.forEach((image) => image.card.showSent()),
      said: (image, prediction) => {
        image.prediction = prediction;
        image.rival = this.#rivalOf(prediction);
        image.card.showSaid(this.level, this.observer);
        this.map.add(image);
        this.#show(image);
        this.refreshSoon();
      },
      refused: (image, sentence, canTryAgain) => {
        image.isRefused = true;
        image.card.showRefused(sentence, canTryAgain);
        this.refreshSoon();
      },
      busy: (seconds) => this.#note(`The service is busy: trying again in ${Math.ceil(seconds)} s.`),
      answered: () => this.#note(""),
      needsKey: askForKey,
    });
  }

  #tryAgain(image) {
    image.isRefused = false;
    image.card.button.focus(); // the button that was pressed goes away
    this.queue.add([image]);
    this.refresh();
  }

  #note(text) {
    find("note").textContent = text;
    find("note").hidden = !text;
  }

  // --- verdicts, order, selection ----------------------------------------------------------------------------------

  isOut = (prediction) => this.level.isOut(prediction);

  /** Draw what follows from the images, the level and the choices of the toolbar. */
  refresh() {
    this.#sort();
    this.decide();
  }

  /** Draw what follows from the level; the order of the images stays. */
  decide() {
    this.images.forEach((image) => this.#show(image));
    this.#drawRug();
    this.#summarise();
    if (find("map-table").open) this.#drawTable();
  }

  #show(image) {
    const isOut = image.prediction && this.isOut(image.prediction); // null also where there is no answer yet
    const isHidden = find("only-out").checked && !isOut;
    image.card.node.hidden = isHidden;
    if (!image.prediction) return;
    image.card.showVerdict(isOut);
    image.card.showLevel(this.level.toTrack(this.level.value));
    this.map.show(image, isOut, isHidden);
  }

  /** Now and then is enough, however many answers come. */
  refreshSoon() {
    this.refreshing ??= setTimeout(() => {
      this.refreshing = null;
      this.refresh();
    }, PACE);
  }

  #sort() {
    const by = ORDERS[find("sort").value];
    const sorted = this.images.toSorted((a, b) => by(a, b) || a.number - b.number).map(({ card }) => card.node);
    if (sorted.every((node, i) => node === this.cards.children[i])) return;
    const focused = document.activeElement;
    this.cards.append(...sorted);
    if (this.cards.contains(focused)) focused.focus({ preventScroll: true }); // moving a node takes its focus away
  }

  select(image, fromMap) {
    this.selected?.card.select(false);
    this.selected = image === this.selected && !fromMap ? null : image;
    this.selected?.card.select(true);
    this.map.select(this.selected);
    if (this.selected && fromMap) image.card.node.scrollIntoView({ block: "nearest", behavior: scrolling() });
  }

  #summarise() {
    const n = this.images.length;
    const predictions = this.images.map((image) => image.prediction).filter(Boolean);
    const nSaid = predictions.length;
    const nOut = predictions.filter(this.isOut).length;
    const nRefused = this.images.filter((image) => image.isRefused).length;
    const parts = [];
    if (nSaid + nRefused < n) parts.push(`${nSaid + nRefused} of ${plural(n, "image")} answered`);
    else parts.push(plural(n, "image"));
    if (nSaid && this.level.isCalibrated) parts.push(`${nOut} unknown at level ${this.level.value}`);
    if (nRefused) parts.push(`${nRefused} without a prediction`);
    this.#say(n ? `${parts.join(", ")}.` : "None yet.");
    find("results").hidden = n === 0;
    document.body.classList.toggle("filled", n > 0);
    find("clear").disabled = n === 0;
    find("download").disabled = nSaid === 0;
    find("only-out").disabled = n === 0 || !this.level.isCalibrated;
  }

  /** Into the live region once things are quiet, so that a screen reader is not interrupted at every step. */
  #say(text) {
    clearTimeout(this.saying);
    this.saying = setTimeout(() => {
      if (find("summary").textContent !== text) find("summary").textContent = text;
    }, QUIET);
  }

  // --- the level ---------------------------------------------------------------------------------------------------

  #prepareLevel() {
    const { level } = this;
    for (const id of ["level", "level-field"]) find(id).disabled = !level.isCalibrated;
    const ticks = level.ticks.map((tick) => {
      const node = html("span", {}, figure(tick));
      node.style.setProperty("--at", String(level.toTrack(tick)));
      return node;
    });
    find("ticks").replaceChildren(...(level.isCalibrated ? ticks : []));
    this.#drawLevel();
    find("level").addEventListener("input", () => {
      level.set(level.fromTrack(find("level").valueAsNumber / STEPS));
      this.#drawLevel();
      this.decide();
    });
    find("level-field").addEventListener("input", () => {
      const value = find("level-field").valueAsNumber;
      const isLevel = value > 0 && value < 1;
      find("level-field").setCustomValidity(isLevel ? "" : "Give a share between 0 and 1, such as 0.05.");
      if (!isLevel) return;
      level.set(value);
      this.#drawLevel(false);
      this.decide();
    });
    find("level-field").addEventListener("change", () => {
      if (!find("level-field").reportValidity()) this.#drawLevel();
    });
    find("level-reset").addEventListener("click", () => {
      level.reset();
      this.#drawLevel();
      this.decide();
    });
  }

  #drawLevel(andField = true) {
    const { level } = this;
    const slider = find("level");
    const place = level.isCalibrated ? level.toTrack(level.value) : 0;
    slider.value = String(Math.round(STEPS * place));
    slider.setAttribute("aria-valuetext", `${level.value}`);
    slider.style.setProperty("--level", String(place));
    find("promise").textContent = level.promise;
    find("level-reset").disabled = level.isOwn;
    if (!andField) return;
    find("level-field").value = level.isCalibrated ? String(level.value) : "";
    find("level-field").setCustomValidity("");
  }

  #drawRug() {
    const lines = { true: [], false: [] };
    for (const { prediction } of this.images) {
      if (prediction && prediction.p_value !== null) {
        lines[this.isOut(prediction)].push(`M${(1000 * this.level.toTrack(prediction.p_value)).toFixed(1)} 0v10`);
      }
    }
    find("rug").querySelector(".out").setAttribute("d", lines[true].join(""));
    find("rug").querySelector(".in").setAttribute("d", lines[false].join(""));
  }

  // --- the rest ----------------------------------------------------------------------------------------------------

  #describeModel() {
    const { model } = this;
    const classes = model.classes.length;
    find("about").textContent = [
      model.name,
      `${classes} classes in ${plural(model.clusters.length, "cluster")}`,
      `${model.size} × ${model.size} pixels`,
      `score ${model.score}`,
      model.runtime,
      `version ${model.version}`,
    ].join(" · ");
    const shapes =
      model.map_radius === null
        ? "Dots are the centres of the clusters"
        : "Circles are two standard deviations around the centres of the clusters";
    find("map-note").textContent =
      `${shapes}, in the plane in which they lie furthest apart; what lies off this plane does not show. ` +
      "A marker with an arrow lies further out.";
  }

  #drawTable() {
    find("map-table").querySelector(".scroll").replaceChildren(...this.map.table(this.images, this.isOut));
  }

  download() {
    const rows = this.images
      .filter((image) => image.prediction)
      .map(({ name, prediction }) => ({
        ...prediction, file: name, is_ood: this.isOut(prediction) ?? false, false_alarm: this.level.value,
      }));
    const url = URL.createObjectURL(new Blob([csv(rows)], { type: "text/csv" }));
    html("a", { href: url, download: `predictions-at-${this.level.value}.csv` }).click();
    setTimeout(() => URL.revokeObjectURL(url), 60_000); // the browser may still be writing
  }

  #listen() {
    find("choose").addEventListener("click", () => find("files").click());
    find("files").addEventListener("change", () => {
      this.add([...find("files").files].map(named));
      find("files").value = ""; // so that the same files can be chosen again
    });
    addEventListener("paste", (event) => {
      const files = pastedFiles(event.clipboardData, this.nPasted);
      if (!files.length) return;
      event.preventDefault();
      this.nPasted += files.length;
      this.add(files);
    });
    this.#listenToDrops();
    find("sort").addEventListener("change", () => this.refresh());
    find("only-out").addEventListener("change", () => this.decide());
    find("download").addEventListener("click", () => this.download());
    find("clear").addEventListener("click", () => this.clear());
    find("map-table").addEventListener("toggle", () => find("map-table").open && this.#drawTable());
  }

  #listenToDrops() {
    addEventListener("dragover", (event) => {
      if (hasFiles(event)) find("veil").hidden = false;
    });
    addEventListener("dragleave", (event) => {
      if (event.relatedTarget === null) find("veil").hidden = true; // left the window, not an element
    });
    addEventListener("drop", async (event) => {
      find("veil").hidden = true;
      if (!hasFiles(event)) return;
      try {
        this.add(await droppedFiles(event.dataTransfer));
      } catch {
        this.#note("A dropped item cannot be read: choose the images instead.");
      }
    });
  }
}

// Images without a prediction come last. Far ones all have the least p-value: their scores differ.
const ORDERS = {
  added: () => 0,
  p_value: byPrediction((a, b) => a.p_value - b.p_value || b.score - a.score),
  probability: byPrediction((a, b) => a.probability - b.probability || b.score - a.score),
};

function byPrediction(compare) {
  return ({ prediction: a }, { prediction: b }) => (a && b ? compare(a, b) : Number(!a) - Number(!b));
}

const scrolling = () => (matchMedia("(prefers-reduced-motion: reduce)").matches ? "instant" : "smooth");

/** The page starts once the service says what it serves. */
async function start() {
  for (;;) {
    try {
      const model = await fetchModel();
      if (model.needs_key && !hasKey()) await askForKey("This service needs a key.");
      return new Page(model);
    } catch (error) {
      if (error instanceof KeyNeeded) {
        await askForKey(error.message);
        continue;
      }
      if (![Busy, Failed, Refused].some((kind) => error instanceof kind)) throw error;
      find("about").textContent = error.message;
      await new Promise((done) => setTimeout(done, error instanceof Busy ? 1000 * error.seconds : 3000));
    }
  }
}

const hasFiles = (event) => event.dataTransfer?.types.includes("Files");
for (const kind of ["dragover", "drop"]) {
  addEventListener(kind, (event) => hasFiles(event) && event.preventDefault()); // else the browser would open the file
}
start();
