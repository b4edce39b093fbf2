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

const PIECE = 18; // letters that stay on one line

/** A name as children of an element: it breaks after "_", "-", "/" and ".", and only very long words elsewhere. */
export function breakable(name) {
  const words = name.match(/[^_\-/.]*[_\-/.]+|[^_\-/.]+/g) ?? [];
  const pieces = words.flatMap((word) => word.match(new RegExp(`.{1,${PIECE}}`, "gsu")));
  return pieces.flatMap((piece, i) => (i ? [html("wbr"), piece] : [piece]));
}

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children);
  return node;
}
