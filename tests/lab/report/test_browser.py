"""The page in a real browser, on a wide and on a narrow screen."""

import json
import re
import shutil
import subprocess
from html import escape, unescape

import pytest

from virtualgrad.lab.report.page import page
from virtualgrad.lab.report.sections import gather

BROWSER = next(filter(None, map(shutil.which, ("chromium", "google-chrome"))), None)
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-sync",
    "--disable-background-networking",
    "--disable-component-update",
    "--virtual-time-budget=5000",
]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(BROWSER is None, reason="needs the program chromium or google-chrome"),
]

# The frame gives the page the width under test, and lets the wrapper measure from outside.
WRAPPER = """<!DOCTYPE html><body>
<iframe srcdoc="{page}" style="width:{width}px;height:900px;border:0">
</iframe><script>
addEventListener("load", () => {{
  const inner = document.querySelector("iframe").contentDocument;
  for (const details of inner.querySelectorAll("details")) details.open = true;
  const count = selector => inner.querySelectorAll(selector).length;
  const beyond = [...inner.querySelectorAll("svg")].flatMap(svg => {{
    const frame = svg.getBoundingClientRect();
    return [...svg.querySelectorAll("text")].filter(text => {{
      const box = text.getBoundingClientRect();
      return box.left < frame.left - 2 || box.right > frame.right + 2;
    }}).map(text => text.textContent);
  }});
  const found = {{
    scrollWidth: inner.documentElement.scrollWidth,
    tables: count("table"), drawings: count("svg"), curves: count("svg path"),
    letters: Math.min(...[...inner.querySelectorAll("svg text")].map(
      text => text.getBoundingClientRect().height)),
    beyond,
  }};
  document.body.dataset.found = JSON.stringify(found);
}});
</script></body>"""


def look(html, width, folder):
    """Open the page in a frame of a width, and return what the browser made of it."""
    wrapper = folder / "wrapper.html"
    wrapper.write_text(WRAPPER.format(page=escape(html), width=width), encoding="utf-8")
    done = subprocess.run(
        [
            BROWSER,
            *FLAGS,
            f"--user-data-dir={folder / 'profile'}",
            f"--window-size={width + 100},1000",
            "--dump-dom",
            wrapper.as_uri(),
        ],
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=300,
        check=True,
    )
    found = re.search(r'<body data-found="([^"]*)"', done.stdout)
    assert found, done.stderr[-2000:]
    return json.loads(unescape(found[1]))


@pytest.mark.parametrize("width", [1280, 400])
def test_fits_the_screen_and_shows_everything(paper_runs, tmp_path, width):
    found = look(page(gather(paper_runs)), width, tmp_path)
    assert found["scrollWidth"] <= width
    assert (found["tables"], found["drawings"]) == (10, 18)
    assert found["curves"] > 100
    assert found["beyond"] == []
    assert found["letters"] >= 8
