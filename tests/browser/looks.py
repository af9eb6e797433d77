"""What a test asks a page about its looks: overflow, texts that overlap, contrast, names of what takes the focus."""

# Visible rectangles of all texts, cut by the boxes that scroll.
_RECTANGLES = """
const clip = (rect, element) => {
  let [l, t, r, b] = [rect.left, rect.top, rect.right, rect.bottom];
  for (let box = element; box; box = box.parentElement) {
    const style = getComputedStyle(box);
    if (style.overflowX === "visible" && style.overflowY === "visible") continue;
    const cut = box.getBoundingClientRect();
    [l, t, r, b] = [Math.max(l, cut.left), Math.max(t, cut.top), Math.min(r, cut.right), Math.min(b, cut.bottom)];
  }
  return [l, t, r, b];
};
const texts = [];
const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
while (walker.nextNode()) {
  const node = walker.currentNode;
  const parent = node.parentElement;
  if (!node.textContent.trim() || parent.closest(".unseen, .skip, script, noscript, option, svg, [hidden]")) continue;
  if (!parent.checkVisibility({ visibilityProperty: true, contentVisibilityAuto: true })) continue;
  const range = document.createRange();
  range.selectNodeContents(node);
  for (const rect of range.getClientRects()) {
    const [l, t, r, b] = clip(rect, parent);
    if (r - l > 1 && b - t > 1) texts.push({ l, t, r, b, text: node.textContent.trim().slice(0, 40), element: parent, fixed: Boolean(parent.closest(".top, th")) });
  }
}
"""

OVERLAPS = (
    "() => {"
    + _RECTANGLES
    + """
  const found = [];
  texts.forEach((a, i) => texts.slice(i + 1).forEach((b) => {
    if (a.element === b.element || a.fixed !== b.fixed) return;
    const wide = Math.min(a.r, b.r) - Math.max(a.l, b.l), high = Math.min(a.b, b.b) - Math.max(a.t, b.t);
    if (wide > 1 && high > 4) found.push(`${a.text} | ${b.text}`);
  }));
  return found.slice(0, 10);
}"""
)

CONTRASTS = (
    "() => {"
    + _RECTANGLES
    + """
  const numbers = (colour) => {
    const [r, g, b, a = 1] = colour.match(/[\\d.]+/g).map(Number);
    return colour.startsWith("color(") ? [255 * r, 255 * g, 255 * b, a] : [r, g, b, a];
  };
  const light = (c) => c.slice(0, 3).map((v) => v / 255).map((v) => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const back = (element) => {
    for (let box = element; box; box = box.parentElement) {
      const colour = numbers(getComputedStyle(box).backgroundColor);
      if (colour[3] === 1) return colour;
    }
    return [255, 255, 255, 1];
  };
  const found = new Set();
  for (const { element, text } of texts) {
    if (element.closest(":disabled, fieldset:disabled")) continue;
    const [a, b] = [light(numbers(getComputedStyle(element).color)), light(back(element))];
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (ratio < 4.5) found.add(`${ratio.toFixed(1)}: ${text}`);
  }
  return [...found];
}"""
)

OVERFLOW = "() => document.documentElement.scrollWidth - document.documentElement.clientWidth"

FOCUSED = """() => {
  const at = document.activeElement;
  return at === document.body ? "" : at.id || at.getAttribute("href") || at.textContent.trim().slice(0, 30);
}"""


def plain(text):
    """Return text with spaces where the page keeps a number and its unit on one line."""
    return text.replace("\u00a0", " ")


def wait_for_text(page, name, text):
    """Wait until an element has this text in it."""
    page.locator(f"#{name}", has_text=text).wait_for(state="attached")


def unnamed(page):
    """Return what takes the focus, or is a picture, and has no accessible name."""
    session = page.context.new_cdp_session(page)
    nodes = session.send("Accessibility.getFullAXTree")["nodes"]
    found = []
    for node in nodes:
        role = node.get("role", {}).get("value")
        focusable = any(p["name"] == "focusable" and p["value"].get("value") for p in node.get("properties", ()))
        if node.get("ignored") or role in ("RootWebArea", "MenuListPopup") or not (focusable or role == "image"):
            continue
        if not node.get("name", {}).get("value", "").strip() and role not in ("generic", "main"):
            found.append(role)
    return found
