// Elements from names and text. Text is never read as markup: file and class names may hold anything.

const SVG = "http://www.w3.org/2000/svg";

export const find = (id) => document.getElementById(id);

/** An HTML element with attributes; null, undefined and false leave one out, true sets it empty. */
export function html(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

/** The same for SVG. */
export function svg(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children);
  return node;
}
