// Images on their way to the service: a few per request, a few requests at once, patient where it is busy.

import { Busy, Failed, KeyNeeded, Refused, predict } from "./api.js";
import { megabytes } from "./format.js";

const PER_REQUEST = 4;
const AT_ONCE = 3;
const ENVELOPE = 1024; // bytes that a file's headers may take in a request

export class Queue {
  #waiting = [];
  #workers = 0;
  #stopped = new AbortController();
  #pause = null; // what all workers wait for while the service is busy

  /**
   * ``limits`` are the service's; ``tell`` has a function for each thing that happens: ``sent(images)``,
   * ``said(image, prediction)``, ``refused(image, sentence, canTryAgain)``, ``busy(seconds)``, ``answered()``, and
   * ``needsKey(sentence)``, which returns a promise of a key.
   */
  constructor(limits, tell) {
    this.limits = limits;
    this.tell = tell;
  }

  add(images) {
    this.#waiting.push(...images);
    while (this.#workers < Math.min(AT_ONCE, this.#waiting.length)) this.#work();
  }

  /** Forget all images; requests under way are given up. */
  stop() {
    this.#waiting = [];
    this.#stopped.abort();
  }

  async #work() {
    this.#workers += 1;
    try {
      while (this.#waiting.length) await this.#send(this.#next());
    } finally {
      this.#workers -= 1;
    }
  }

  /** The next images that fit into one request together, at least one. */
  #next() {
    const most = Math.max(1, Math.min(PER_REQUEST, this.limits.max_images ?? PER_REQUEST));
    const room = this.limits.max_bytes ?? Infinity;
    let n = 0;
    for (let bytes = 0; n < Math.min(most, this.#waiting.length); n += 1) {
      bytes += this.#waiting[n].file.size + ENVELOPE;
      if (n > 0 && bytes > room) break;
    }
    return this.#waiting.splice(0, n);
  }

  async #send(images) {
    if (images.length === 1 && images[0].file.size > (this.limits.max_bytes ?? Infinity)) {
      const [image] = images;
      const allowed = megabytes(this.limits.max_bytes);
      const sentence = `This file has ${megabytes(image.file.size)} and the service takes ${allowed}: make it smaller.`;
      this.tell.refused(image, sentence, false);
      return;
    }
    this.tell.sent(images);
    while (!this.#stopped.signal.aborted) {
      try {
        await this.#pause;
        const predictions = await predict(images.map((image) => image.file), this.#stopped.signal);
        if (this.#stopped.signal.aborted) return;
        if (this.#pause === null) this.tell.answered(); // else others still wait, and are told so
        images.forEach((image, i) => this.tell.said(image, predictions[i]));
        return;
      } catch (error) {
        if (this.#stopped.signal.aborted) return;
        if (error instanceof Busy) this.#wait(error.seconds);
        else if (error instanceof KeyNeeded) await this.tell.needsKey(error.message);
        else return await this.#refuse(images, error);
      }
    }
  }

  /** One bad image spoils a request: ask for each alone, so that the others go on. */
  async #refuse(images, error) {
    if (!(error instanceof Refused || error instanceof Failed)) throw error;
    if (error instanceof Refused && images.length > 1) {
      for (const image of images) await this.#send([image]);
    } else {
      for (const image of images) this.tell.refused(image, error.message, error instanceof Failed);
    }
  }

  #wait(seconds) {
    this.tell.busy(seconds);
    this.#pause ??= new Promise((done) => setTimeout(done, 1000 * seconds)).then(() => {
      this.#pause = null;
    });
  }
}
