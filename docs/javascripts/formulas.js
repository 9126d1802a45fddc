// Formulas by the KaTeX that is shipped beside this file (docs/katex, version 0.19.1, from npm).
for (const formula of document.querySelectorAll(".arithmatex")) {
  const text = formula.textContent.trim(); // \( ... \) or \[ ... \]
  katex.render(text.slice(2, -2), formula, {
    displayMode: text.startsWith("\\["),
    throwOnError: false,
  });
}
