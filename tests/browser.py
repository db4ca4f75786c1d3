"""A real Chromium without a screen, to look at pages with: what it logs, asks the network for, and draws."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

MARKS = """
return [...document.querySelectorAll("div.chart")].map(place => {
  const marks = [...place.querySelectorAll("svg g.mark-group.role-mark, svg g[class*=role-mark]")];
  const shapes = marks.flatMap(mark => [...mark.querySelectorAll("path, text, line, image")]);
  const seen = shapes.filter(shape => { const box = shape.getBBox(); return box.width + box.height > 0; });
  const svg = place.querySelector("svg");
  return {id: place.id, marks: marks.length, seen: seen.length, text: place.textContent.slice(0, 200),
          empty: marks.filter(mark => !mark.querySelector("path, text, line")).length,
          width: svg ? svg.getBoundingClientRect().width : 0, room: place.clientWidth};
});
"""


@dataclass(frozen=True)
class Look:
    """One page at one width."""

    charts: list[dict[str, Any]]
    console: list[dict[str, Any]]
    requests: list[str]  # URLs that are neither the page itself nor data in it
    title: str
    overflow: int  # pixels that the page is wider than its window
    text: str


def start() -> Any:
    """The browser, or a skip with its reason where there is none."""
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if chromium is None or driver is None:
        pytest.skip("no chromium with its chromedriver here (Debian: apt-get install chromium chromium-driver)")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for flag in (
        *("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu", "--no-first-run"),
        *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--hide-scrollbars"),
    ):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    return webdriver.Chrome(options=options, service=webdriver.ChromeService(executable_path=driver))


@contextmanager
def browser() -> Iterator[Any]:
    """The browser, and its end."""
    one = start()
    try:
        yield one
    finally:
        one.quit()


def look(
    one: Any, page: Path, *, width: int = 1280, dark: bool = False, picture: Path | None = None, script: str = ""
) -> Look:
    """Open a page, wait until it says that its charts are drawn, and say what was seen."""
    for log in ("browser", "performance"):
        one.get_log(log)  # what was there before
    one.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride",
        {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600},
    )
    scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
    one.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": scheme})
    one.get(page.resolve().as_uri())
    from selenium.webdriver.support.ui import WebDriverWait

    WebDriverWait(one, 60).until(lambda driver: driver.execute_script("return document.documentElement.dataset.drawn"))
    if script:
        one.execute_script(script)
    charts = one.execute_script(MARKS)
    overflow = one.execute_script("return document.documentElement.scrollWidth - document.documentElement.clientWidth")
    text = one.execute_script("return document.body.innerText")
    if picture is not None:
        height = one.execute_script("return document.documentElement.scrollHeight")
        clip = {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}
        shot = one.execute_cdp_cmd(
            "Page.captureScreenshot", {"format": "png", "captureBeyondViewport": True, "clip": clip}
        )
        import base64

        picture.write_bytes(base64.b64decode(shot["data"]))
    return Look(charts, one.get_log("browser"), _requests(one, page), one.title, int(overflow), text)


def _requests(one: Any, page: Path) -> list[str]:
    """What was asked for, beside the page."""
    urls = []
    for entry in one.get_log("performance"):
        message = json.loads(entry["message"])["message"]
        if message["method"] == "Network.requestWillBeSent":
            urls.append(message["params"]["request"]["url"])
    return [url for url in urls if url != page.resolve().as_uri() and not url.startswith(("data:", "blob:"))]
