// The API as a page, drawn from its OpenAPI description; nothing is loaded from elsewhere.

import { Busy, Failed, KeyNeeded, fetchDescription } from "./api.js";
import { find, html } from "./dom.js";
import { askForKey } from "./key.js";

const METHODS = ["get", "post", "put", "delete"];
const LINE = 100; // characters of an example that stay on one line

/** A section per operation, then one per schema that they refer to. */
function draw(description) {
  const { info, paths, components } = description;
  find("about").textContent = `${info.description} Version ${info.version}.`;
  const operations = Object.entries(paths).flatMap(([path, item]) =>
    METHODS.filter((method) => method in item).map((method) => drawOperation(method, path, item[method], components)),
  );
  const schemas = Object.entries(components.schemas).filter(([, schema]) => schema.properties && isOurs(schema));
  find("api").append(...operations, ...schemas.map(([name, schema]) => drawSchema(name, schema)));
}

const isOurs = (schema) => Boolean(schema.description); // FastAPI adds schemas of its own errors, which are not used

function drawOperation(method, path, operation, components) {
  const body = operation.requestBody;
  const parts = [
    html("h2", {}, html("span", { class: `method ${method}` }, method.toUpperCase()), html("code", {}, path)),
    html("p", {}, operation.description ?? operation.summary ?? ""),
  ];
  if (body?.description) parts.push(html("p", { class: "small muted" }, body.description));
  parts.push(html("h3", {}, "Request"), html("pre", {}, curlLines(method, path, operation).join("\n")));
  if (operation.parameters) parts.push(drawParameters(operation.parameters));
  parts.push(html("h3", {}, "Answers"), drawAnswers(operation.responses));
  const example = exampleAnswer(operation, components);
  if (example) parts.push(html("h3", {}, "Example of an answer"), html("pre", {}, asText(example)));
  return html("section", { "aria-label": `${method.toUpperCase()} ${path}` }, ...parts);
}

/** One line for each type of body, or one if there is none. */
function curlLines(method, path, { requestBody, security }) {
  const url = new URL(`.${path}`, location.href).href.replaceAll("%7B", "{").replaceAll("%7D", "}");
  const start = security ? "curl -H 'X-API-Key: KEY'" : "curl";
  const types = Object.entries(requestBody?.content ?? {});
  if (!types.length) return [`${start} ${url.includes("{") ? `'${url}'` : url}`];
  return types.map(([type, { schema, example }]) => {
    if (type === "multipart/form-data") return `${start} -F ${Object.keys(schema.properties)[0]}=@a.png ${url}`;
    if (type === "application/json") return `${start} -H 'Content-Type: ${type}' -d '${JSON.stringify(example)}' ${url}`;
    return `${start} --data-binary @a.png ${url}`;
  });
}

function drawParameters(parameters) {
  const rows = parameters.map(({ name, schema, description }) => [
    html("code", {}, name), typeOf(schema), description ?? schema.description ?? "",
  ]);
  return drawTable(["Parameter", "Type", "Meaning"], rows);
}

function drawAnswers(responses) {
  const rows = Object.entries(responses).map(([status, { description, content }]) => {
    const [type, { schema } = {}] = Object.entries(content ?? {})[0] ?? [""];
    const of = schema?.$ref ? typeOf(schema) : type;
    return [status, description, of];
  });
  return drawTable(["Status", "Meaning", "Body"], rows);
}

function exampleAnswer({ responses }, { schemas }) {
  const schema = responses[200]?.content?.["application/json"]?.schema;
  return schema?.$ref ? schemas[nameOf(schema.$ref)].examples?.[0] : undefined;
}

function drawSchema(name, schema) {
  const rows = Object.entries(schema.properties).map(([field, of]) => [
    html("code", {}, field), typeOf(of), of.description ?? "",
  ]);
  return html(
    "section", { id: name, "aria-label": name },
    html("h2", {}, name), html("p", {}, schema.description), drawTable(["Field", "Type", "Meaning"], rows),
  );
}

const nameOf = (reference) => reference.split("/").at(-1);

/** The type of a schema in words, with links to the schemas that it names. */
function typeOf(schema) {
  if (schema.$ref) return html("a", { href: `#${nameOf(schema.$ref)}` }, nameOf(schema.$ref));
  if (schema.anyOf) return join(schema.anyOf.map(typeOf), " or ");
  if (schema.type === "array") return join(["list of ", typeOf(schema.items ?? {})], "");
  const values = schema.enum ?? (schema.const === undefined ? null : [schema.const]);
  return (values?.map((value) => JSON.stringify(value)).join(" or ") ?? schema.type ?? "any") + bounds(schema);
}

function bounds({ minimum, maximum }) {
  if (minimum !== undefined && maximum !== undefined) return ` from ${minimum} to ${maximum}`;
  return minimum === undefined ? "" : ` of at least ${minimum}`;
}

const join = (parts, between) =>
  html("span", {}, ...parts.flatMap((part, i) => (i && between ? [between, part] : [part])));

function drawTable(names, rows) {
  const head = html("thead", {}, html("tr", {}, ...names.map((name) => html("th", { scope: "col" }, name))));
  const body = rows.map((cells) => html("tr", {}, ...cells.map((cell) => html("td", {}, cell))));
  return html("div", { class: "wide" }, html("table", {}, head, html("tbody", {}, ...body)));
}

/** JSON with short objects and lists on one line. */
function asText(value, indent = "") {
  const short = JSON.stringify(value, null, 1).replaceAll(/\n\s*/g, " ");
  if (short.length + indent.length <= LINE || typeof value !== "object") return short;
  const inner = `${indent}  `;
  const parts = Object.entries(value).map(([key, each]) =>
    Array.isArray(value) ? inner + asText(each, inner) : `${inner}${JSON.stringify(key)}: ${asText(each, inner)}`,
  );
  const [open, close] = Array.isArray(value) ? "[]" : "{}";
  return `${open}\n${parts.join(",\n")}\n${indent}${close}`;
}

async function start() {
  for (;;) {
    try {
      return draw(await fetchDescription());
    } catch (error) {
      if (error instanceof KeyNeeded) {
        await askForKey(error.message);
        continue;
      }
      if (!(error instanceof Busy || error instanceof Failed)) throw error;
      find("about").textContent = error.message;
      await new Promise((done) => setTimeout(done, error instanceof Busy ? 1000 * error.seconds : 3000));
    }
  }
}

start();
