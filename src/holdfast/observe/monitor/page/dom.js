// Building and updating elements. Text of a run reaches the page only through textContent, so that it stays text.

export const byId = (id) => document.getElementById(id);

/** Make an element; `text` becomes its text, every other property an attribute. */
export function make(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name === "text") element.textContent = value;
    else if (value !== null && value !== undefined && value !== false) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children);
  return element;
}

/** Set the text of an element, if it differs: an unchanged text costs no layout and is not read out again. */
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

export function setAttribute(element, name, value) {
  const wanted = String(value);
  if (element.getAttribute(name) !== wanted) element.setAttribute(name, wanted);
}

export function show(element, visible) {
  if (element.hidden === visible) element.hidden = !visible;
}

/**
 * Make the children of `parent` those of `rows`, in this order; a row keeps its element from one call to the next.
 * @param {Element} parent
 * @param {Array<{id: *}>} rows
 * @param {(row) => Element} build - makes the element of a new row
 * @param {(element, row) => void} fill - puts the values of a row into its element; called if the row is another object
 */
export function keyed(parent, rows, build, fill) {
  const before = (parent.keyedElements ??= new Map());
  const after = new Map();
  let place = parent.firstChild;
  for (const row of rows) {
    const entry = before.get(row.id) ?? { element: build(row), row: null };
    if (entry.row !== row) fill(entry.element, row);
    entry.row = row;
    after.set(row.id, entry);
    before.delete(row.id);
    if (entry.element === place) place = place.nextSibling;
    else parent.insertBefore(entry.element, place);
  }
  for (const { element } of before.values()) element.remove();
  parent.keyedElements = after;
}

/**
 * Fill a table, one row a record.
 * @param {HTMLTableElement} table
 * @param {Array<{name: string, text: (row) => string, right?: boolean, mark?: (row) => string, cause?: (row) => string}>} columns -
 *   `mark` and `cause` give the cell an attribute for the style sheet
 * @param {Array<{id: *}>} rows
 */
export function fillTable(table, columns, rows) {
  const names = columns.map(({ name }) => name).join("\n");
  if (table.dataset.columns !== names) {
    table.dataset.columns = names;
    const heads = columns.map(({ name, right }) => make("th", { text: name, scope: "col", class: right ? "r" : null }));
    table.replaceChildren(make("thead", {}, make("tr", {}, ...heads)), make("tbody"));
  }
  const build = () => make("tr", {}, ...columns.map(({ right }) => make("td", { class: right ? "r" : null })));
  keyed(table.tBodies[0], rows, build, (element, row) => {
    columns.forEach(({ text, mark, cause }, i) => {
      setText(element.cells[i], text(row));
      if (mark) setAttribute(element.cells[i], "data-mark", mark(row));
      if (cause) setAttribute(element.cells[i], "data-cause", cause(row));
    });
  });
}

/** Fill a list of terms and values; pairs without a value are left out. */
export function fillFacts(list, pairs) {
  const rows = pairs.filter(([, value]) => value !== "" && value !== null && value !== undefined);
  keyed(
    list,
    rows.map(([id, value]) => ({ id, value: String(value) })),
    ({ id }) => make("div", {}, make("dt", { text: id }), make("dd")),
    (element, { value }) => setText(element.lastChild, value),
  );
}

/** Fit a canvas to its size on the page; return its context, in CSS pixels, cleared. */
export function fitCanvas(canvas, width, height) {
  const scale = window.devicePixelRatio || 1;
  const [wide, high] = [Math.round(width * scale), Math.round(height * scale)];
  if (canvas.width !== wide || canvas.height !== high) [canvas.width, canvas.height] = [wide, high];
  const context = canvas.getContext("2d");
  context.setTransform(scale, 0, 0, scale, 0, 0);
  context.clearRect(0, 0, width, height);
  return context;
}
