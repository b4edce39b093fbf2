// The dialogue for the key of the service, on every page that has one.

import { setKey } from "./api.js";
import { find } from "./dom.js";

let asking = null; // one dialogue at a time

/** Ask for the service's key; a promise that it was given. */
export function askForKey(sentence) {
  find("key-note").textContent = sentence;
  asking ??= new Promise((done) => {
    const form = find("key-form");
    form.hidden = false;
    find("key").focus();
    form.addEventListener(
      "submit",
      (event) => {
        event.preventDefault();
        setKey(find("key").value);
        form.reset();
        form.hidden = true;
        asking = null;
        done();
      },
      { once: true },
    );
  });
  return asking;
}
