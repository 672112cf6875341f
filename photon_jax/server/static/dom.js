// Small helpers that make elements; texts are always set as text, never parsed as HTML.

/** Returns an element: `props` are properties, `on...` listeners, or attributes with a dash in their name. */
export function el(tag, props = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "class") node.className = value;
    else if (name.includes("-") || name === "role") node.setAttribute(name, value);
    else node[name] = value;
  }
  node.append(...children.filter((child) => child !== null));
  return node;
}

const SVG = "http://www.w3.org/2000/svg";

export function icon(name) {
  const svg = document.createElementNS(SVG, "svg");
  svg.setAttribute("class", "icon");
  svg.setAttribute("aria-hidden", "true");
  const use = document.createElementNS(SVG, "use");
  use.setAttribute("href", `static/icons.svg#${name}`);
  svg.append(use);
  return svg;
}

/** Returns a button that shows an icon and is called `label`. */
export function iconButton(name, label, onclick) {
  return el("button", { type: "button", class: "icon-button", title: label, "aria-label": label, onclick }, icon(name));
}

export function byId(id) {
  return document.getElementById(id);
}

/** Calls `draw` at most once a frame, however often the returned function is called. */
export function oncePerFrame(draw) {
  let isAsked = false;
  return () => {
    if (isAsked) return;
    isAsked = true;
    requestAnimationFrame(() => {
      isAsked = false;
      draw();
    });
  };
}

/** Lets a text area be as high as its text; the style sheet says where it ends. */
export function fitHeight(area) {
  area.style.height = "auto";
  area.style.height = `${area.scrollHeight + 2}px`;
}
