// The level of false alarms: on a logarithmic track, as a promise in words, and as a verdict on an image.

import { percent } from "./format.js";

export const HIGHEST = 0.5;
const TICKS = [0.05, 0.01, 0.1, 0.001, 0.0001, 0.00001, 0.2, 0.02, 0.005, 0.002]; // the first that find room are shown
const TICK_ROOM = 0.16; // of the track
const FIRST_ROOM = 0.24; // of the first, which may have many digits and begins at the end of the track

/** What the page decides with: the model's own level at first, whatever the user asks for later. */
export class Level {
  constructor(decision) {
    this.decision = decision;
    this.isCalibrated = decision.n_calibration > 0;
    this.lowest = roundUp(1 / (decision.n_calibration + 1)); // the smallest p-value there is
    this.reset();
  }

  reset() {
    this.value = this.decision.false_alarm;
    this.isOwn = true; // the run's own thresholds decide
  }

  set(value) {
    this.value = value;
    this.isOwn = false;
  }

  /** Whether an image is out of distribution; null where nothing was calibrated. */
  isOut(prediction) {
    if (!this.isCalibrated || prediction.p_value === null) return null;
    return this.isOwn ? prediction.is_ood : prediction.p_value <= this.value;
  }

  /** Where a level or p-value lies on the track, from 0 to 1. */
  toTrack(value) {
    if (this.lowest === HIGHEST) return value < HIGHEST ? 0 : 1; // one calibration image: the track has no length
    const place = Math.log(value / this.lowest) / Math.log(HIGHEST / this.lowest);
    return Math.min(Math.max(place, 0), 1);
  }

  /** The level at a place on the track, in three digits: what is shown is what decides. */
  fromTrack(place) {
    if (place <= 0) return this.lowest;
    if (place >= 1) return HIGHEST;
    return Math.max(this.lowest, Number((this.lowest * (HIGHEST / this.lowest) ** place).toPrecision(3)));
  }

  /** Levels to name below the track: both ends, and whatever fits between. */
  get ticks() {
    const ticks = [...new Set([this.lowest, HIGHEST])];
    for (const tick of TICKS) {
      const room = (other) => (other === this.lowest ? FIRST_ROOM : TICK_ROOM);
      const isFree = ticks.every((other) => Math.abs(this.toTrack(tick) - this.toTrack(other)) > room(other));
      if (tick > this.lowest && isFree) ticks.push(tick);
    }
    return ticks;
  }

  /** What the level promises, in sentences. */
  get promise() {
    const { decision } = this;
    if (!this.isCalibrated) {
      return (
        "The model is not calibrated: there are no p-values and no verdicts. Calibrate it with images like " +
        "those it will see: maple update RUN --calibrate IMAGES, then serve it again."
      );
    }
    const ownRule = decision.confidence !== null || decision.per_class;
    if (this.isOwn) {
      const own = `${decision.sentence[0].toUpperCase()}${decision.sentence.slice(1)}.`;
      if (!ownRule) return own;
      return `${own} Verdicts follow these thresholds of the run until the level is moved; then p-values decide.`;
    }
    if (this.value < 1 / (decision.n_calibration + 1)) {
      return `Flags nothing: with ${count(decision)} no p-value is as small as this.`;
    }
    const of = decision.n_own_thresholds
      ? "in-distribution images of each predicted class that has its own threshold"
      : "in-distribution images";
    const promise =
      `An image is flagged if its p-value is at most ${this.value}: this flags at most ${percent(this.value)} of ${of}, ` +
      `on average over calibration sets (${count(decision)}).`;
    if (decision.confidence === null) return promise;
    return `${promise} The ${percent(decision.confidence)} confidence of the run’s own threshold is not kept.`;
  }
}

const count = ({ n_calibration: n }) => `${n.toLocaleString("en-GB")} calibration image${n === 1 ? "" : "s"}`;

/** Up to three significant digits. */
function roundUp(value) {
  const digits = Number(value.toPrecision(3));
  return digits >= value ? digits : Number((digits + 10 ** (Math.floor(Math.log10(value)) - 2)).toPrecision(3));
}
