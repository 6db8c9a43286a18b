"""A real browser, for tests of pages: ``scripts/ensure-chromium`` installs one."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--host-resolver-rules=MAP * ~NOTFOUND",
    "--virtual-time-budget=5000",
    "--window-size=500,900",
)
LISTEN = """<script>
window.heard = [];
addEventListener("error", (e) => heard.push("error: " + e.message));
addEventListener("securitypolicyviolation", (e) => heard.push("blocked: " + e.blockedURI));
console.error = (...words) => heard.push("console: " + words.join(" "));
window.alert = () => heard.push("alert");
</script>"""


def open_page(page: str, probe: str, folder: Path) -> dict[str, Any]:
    """What ``probe``, a script at the end of ``page``, notes in a browser as ``data-probe``."""
    path = folder / "probed.html"
    path.write_text(page.replace("<head>", "<head>" + LISTEN).replace("</body>", probe + "</body>"))
    names = ("chromium", "chromium-browser", "google-chrome")
    browser = next((b for b in map(shutil.which, names) if b), "chromium")
    profile = f"--user-data-dir={folder / 'profile'}"
    command = [browser, *FLAGS, profile, "--dump-dom", path.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    found = re.search(r'data-probe="([^"]*)"', done.stdout)
    assert found, f"the page's own scripts did not run:\n{done.stderr[-2000:]}"
    answer: dict[str, Any] = json.loads(html.unescape(found[1]))
    return answer
