"""The site at the width of a phone, in a real browser."""

import functools
import html
import http.server
import json
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest

pytestmark = pytest.mark.system
DOCS = Path(__file__).parents[2] / "docs"
PAGES = [
    path.relative_to(DOCS).with_suffix(".html").as_posix()
    for pattern in ("index.md", "guide/*.md", "how/*.md", "recipes/*.md", "coming-from/*.md")
    for path in sorted(DOCS.glob(pattern))
]
PHONE = 390  # CSS pixels: the most common width of a screen
# Opens each page in a frame of that width, and lists what is cut: boxes that hide a part of what
# they hold, pictures beyond the edge, and pages that are wider than the screen.
LOOK = """
<!DOCTYPE html><title>waiting</title>
<script>
const pages = %s, cut = [], seen = {pre: 0, picture: 0};
async function look() {
  for (const page of pages) {
    const frame = document.createElement("iframe");
    frame.style = "width: %dpx; height: 800px; border: 0";
    frame.src = page;
    await new Promise(done => { frame.onload = done; document.body.append(frame); });
    const view = frame.contentDocument, width = view.documentElement.clientWidth;
    if (view.documentElement.scrollWidth > width) cut.push([page, "page"]);
    for (const box of view.querySelectorAll("article pre, article .drawing, article table")) {
      seen.pre += box.matches("pre");
      const isWide = box.scrollWidth > box.clientWidth + 1;
      let holder = isWide || box.getBoundingClientRect().right > width + 1 ? box : null;
      while (holder && !["auto", "scroll"].includes(getComputedStyle(holder).overflowX)) {
        holder = holder.parentElement;
        if (!holder || holder.matches("article"))
          cut.push([page, box.tagName, box.textContent.slice(0, 60)]);
        if (holder && holder.matches("article")) holder = null;
      }
    }
    for (const picture of view.querySelectorAll("article img, article .drawing")) {
      seen.picture += 1;
      const own = picture.getBoundingClientRect();
      if (own.right > width + 1 || own.left < -1 || own.width < 200)
        cut.push([page, "picture", picture.src || picture.className]);
    }
    frame.remove();
  }
  document.title = JSON.stringify({cut, seen});
}
</script>
<body onload="look()"></body>
"""


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *args):
        pass


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The address of the site, and its folder."""
    folder = tmp_path_factory.mktemp("site")
    options = ["--quiet", "-b", "html", "-d", folder / "read"]
    subprocess.run([sys.executable, "-m", "sphinx", *options, DOCS, folder / "html"], check=True)
    handler = functools.partial(Quiet, directory=folder / "html")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", folder / "html"
        server.shutdown()


def test_no_drawing_and_no_code_is_cut(site):
    address, folder = site
    (folder / "look.html").write_text(LOOK % (json.dumps(PAGES), PHONE))
    command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom"]
    command += ["--proxy-server=127.0.0.1:9", "--virtual-time-budget=240000", "--timeout=240000"]
    done = subprocess.run(
        [*command, f"{address}/look.html"], check=True, capture_output=True, text=True, timeout=300
    )
    title = html.unescape(re.search("<title>(.*?)</title>", done.stdout, re.DOTALL)[1])
    found = json.loads(title)
    assert found["cut"] == []
    assert found["seen"]["pre"] > 100 and found["seen"]["picture"] > 5
