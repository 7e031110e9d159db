// arithmatex leaves \( ... \) and \[ ... \] in elements of this class; KaTeX is vendored beside.
document.addEventListener("DOMContentLoaded", () => {
  for (const element of document.querySelectorAll(".arithmatex")) {
    const text = element.textContent.trim();
    katex.render(text.slice(2, -2), element, {
      displayMode: text.startsWith("\\["),
      throwOnError: false,
    });
  }
});
