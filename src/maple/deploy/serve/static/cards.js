// One card per image: the picture, what is said of it, and the training images it was compared with.

import { fetchExemplars } from "./api.js";
import { breakable, html, svg } from "./dom.js";
import { figure, share } from "./format.js";

const VERDICTS = {
  true: ["out", "Unknown"],
  false: ["in", "Known"],
  null: ["none", "Not calibrated: no verdict"],
};
const TICK = "M2 6.5L5 9.5L10 3";
const CROSS = "M3 3L9 9M9 3L3 9";

export class Card {
  /** ``onSelect`` and ``onTryAgain`` are told the image. */
  constructor(image, { onSelect, onTryAgain }) {
    this.image = image;
    this.onTryAgain = onTryAgain;
    this.button = html("button", { type: "button", class: "number", "aria-pressed": "false" }, String(image.number));
    this.button.setAttribute("aria-label", `Image ${image.number}: show on the map`);
    this.picture = html("img", {
      class: "picture", src: image.url, alt: `Image ${image.number}`, loading: "lazy", decoding: "async",
    });
    this.picture.addEventListener("error", () => {
      this.picture.replaceWith(html("div", { class: "picture none" }, "No preview"));
    });
    this.title = html("h3", {}, "Waiting …");
    this.verdict = html("p", { class: "verdict" });
    this.body = html("div", { class: "body" });
    this.node = html(
      "li",
      { class: "card", "data-state": "waiting" },
      html(
        "div",
        { class: "head" },
        html("div", { class: "frame" }, this.picture, this.button),
        html(
          "div",
          { class: "said" },
          this.title,
          html("p", { class: "file", title: image.name }, ...breakable(image.name)),
          this.verdict,
        ),
      ),
      this.body,
    );
    this.node.addEventListener("click", (event) => {
      const control = event.target.closest("button, summary, a");
      if (control === null || control === this.button) onSelect(image);
    });
  }

  select(isSelected) {
    this.node.classList.toggle("selected", isSelected);
    this.button.setAttribute("aria-pressed", String(isSelected));
  }

  showSent() {
    this.#state("sent", "Predicting …");
  }

  showRefused(sentence, canTryAgain) {
    this.#state("refused", "No prediction");
    this.body.replaceChildren(html("p", { class: "error" }, sentence));
    if (!canTryAgain) return;
    const again = html("button", { type: "button" }, "Try again");
    again.addEventListener("click", () => this.onTryAgain(this.image));
    this.body.append(again);
  }

  showSaid(level, observer) {
    const { prediction } = this.image;
    this.#state("said", prediction.class);
    this.body.replaceChildren(
      html(
        "dl",
        { class: "measures" },
        ...measure("Probability", "bar", prediction.probability, share(prediction.probability)),
        ...(prediction.p_value === null
          ? []
          : measure("p-value", "p", prediction.p_value, figure(prediction.p_value), level.toTrack(prediction.p_value))),
      ),
    );
    this.#addExemplars(observer);
    this.body.append(this.#more());
  }

  /** Where the level lies beside the p-value. Set here and not for all cards at once: that would restyle them all. */
  showLevel(place) {
    this.body.querySelector(".meter.p")?.style.setProperty("--level", String(place));
  }

  /** In or out at a level: the words, the colour, and an attribute for those who look for it. */
  showVerdict(isOut) {
    const [kind, words] = VERDICTS[isOut];
    if (this.node.dataset.verdict === kind) return;
    this.node.dataset.verdict = kind;
    this.verdict.replaceChildren(words);
    if (isOut === null) return;
    this.verdict.prepend(
      svg("svg", { viewBox: "0 0 12 12", "aria-hidden": "true" }, svg("path", { d: isOut ? CROSS : TICK })),
    );
  }

  /** The nearest cluster and its rival, with training images of both: fetched once the card comes into view. */
  #addExemplars(observer) {
    const { prediction, rival, model } = this.image;
    const { cluster: nearest, md_class: nearestClass } = prediction;
    const shown = [compared("Nearest", nearestClass, `cluster ${nearest}`, nearest, model)];
    if (rival) shown.push(compared(rival.words, rival.class, share(rival.probability), rival.cluster, model));
    this.body.append(html("div", { class: "exemplars" }, ...shown.map(({ node }) => node)));
    observer.watch(this.node, () => shown.forEach(showStrip));
  }

  #more() {
    const { prediction } = this.image;
    const facts = [
      ["Score", figure(prediction.score)],
      ["Typicality (chi-square tail)", share(prediction.typicality)],
      ["Uncertainty (1 − typicality)", share(prediction.uncertainty)],
      ["Nearest cluster", [`${prediction.cluster}, `, ...breakable(prediction.md_class)]],
      ["Softmax class", breakable(prediction.softmax_class)],
      ["On the map", prediction.position.map(figure).join(", ")],
      ...prediction.probabilities.map((one) => [`p(${one.class})`, share(one.probability)]),
    ];
    const rows = facts.flatMap(([name, value]) => [html("dt", {}, ...breakable(name)), html("dd", {}, ...[value].flat())]);
    return html("details", {}, html("summary", {}, "More"), html("dl", { class: "facts" }, ...rows));
  }

  #state(state, title) {
    this.node.dataset.state = state;
    this.title.replaceChildren(...breakable(title));
    this.title.title = title;
  }
}

/** A name, a meter and its number; ``place`` is where the meter stands, from 0 to 1. */
function measure(name, kind, value, text, place = value) {
  const fill = html("span", { class: "fill" });
  fill.style.setProperty("--at", String(place));
  const meter = html(
    "span",
    {
      class: `meter ${kind}`, role: "meter", "aria-label": name, "aria-valuemin": "0", "aria-valuemax": "1",
      "aria-valuenow": value, "aria-valuetext": text,
    },
    fill,
  );
  return [html("dt", {}, name), html("dd", {}, meter, html("span", { class: "figure" }, text))];
}

/** What an image was compared with: a class, a cluster of it, and a strip of its exemplars where there are any. */
function compared(words, name, detail, cluster, model) {
  const known = model.clusters.find((other) => other.cluster === cluster);
  const title = html("span", { title: name }, `${words} `, html("strong", {}, ...breakable(name)));
  const node = html("figure", {}, html("figcaption", {}, title, html("span", {}, detail)));
  if (!known?.n_exemplars) return { node, cluster, strip: null };
  const alt = `Training images of cluster ${cluster}, ${name}, those nearest to its centre first`;
  const strip = html("img", { alt, hidden: true });
  node.append(html("div", { class: "strip" }, strip));
  return { node, cluster, strip };
}

async function showStrip({ cluster, strip }) {
  const url = strip && (await fetchExemplars(cluster));
  if (!url) return;
  strip.src = url;
  strip.hidden = false;
}

/** Calls back once for each node that comes near the window. */
export class Observer {
  #callbacks = new Map();
  #observer = new IntersectionObserver((entries) => this.#onChange(entries), { rootMargin: "300px" });

  watch(node, callback) {
    this.#callbacks.set(node, callback);
    this.#observer.observe(node);
  }

  clear() {
    this.#observer.disconnect();
    this.#callbacks.clear();
  }

  #onChange(entries) {
    for (const { target, isIntersecting } of entries) {
      if (!isIntersecting) continue;
      this.#observer.unobserve(target);
      this.#callbacks.get(target)?.();
      this.#callbacks.delete(target);
    }
  }
}
