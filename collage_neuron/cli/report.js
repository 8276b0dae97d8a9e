// Draws the charts of a report with plotly.js, in the colours of report.css, and again when these change.
const figures = JSON.parse(document.getElementById("figures").textContent);
const dark = window.matchMedia("(prefers-color-scheme: dark)");
const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

function coloured(trace) {
  if (trace.meta === undefined) return trace;
  const color = colour(`--of-${trace.meta}`);
  return { ...trace, line: { ...trace.line, color }, marker: { ...trace.marker, color } };
}

function layout(own, isMap) {
  const narrow = window.innerWidth < 600;
  const axis = { gridcolor: colour("--edge"), zerolinecolor: colour("--edge"), linecolor: colour("--edge"),
    automargin: true, exponentformat: "e" };
  return {
    height: 320, margin: { l: 10, r: 12, t: 12, b: 10 }, paper_bgcolor: colour("--card"),
    plot_bgcolor: colour(isMap ? "--unmeasured" : "--card"),
    font: { family: "system-ui, sans-serif", size: narrow ? 11 : 12, color: colour("--ink") },
    legend: { orientation: "h", x: 0, y: 1.02, yanchor: "bottom" },
    hoverlabel: { bgcolor: colour("--card"), bordercolor: colour("--edge"), font: { color: colour("--ink") } },
    ...own, xaxis: { ...axis, ...own.xaxis, ...(isMap ? { showgrid: false } : {}) }, yaxis: { ...axis, ...own.yaxis },
  };
}

function draw() {
  for (const [id, figure] of Object.entries(figures)) {
    const isMap = figure.data[0].type === "heatmap";
    Plotly.react(id, figure.data.map(coloured), layout(figure.layout, isMap),
      { displaylogo: false, modeBarButtons: [["toImage"]], toImageButtonOptions: { format: "svg" } });
  }
}

dark.addEventListener("change", draw);
draw();
const resized = new ResizeObserver((found) => found.forEach(({ target }) => Plotly.Plots.resize(target)));
document.querySelectorAll(".chart").forEach((chart) => resized.observe(chart));
