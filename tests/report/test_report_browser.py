"""The report in a real browser."""

from __future__ import annotations

import re
from typing import Any

import pytest

from prismscale.report.html import render
from prismscale.report.sections import run_sections
from support.browser import open_page
from support.report_job import report_run

PROBE = """<script>
/* What the search holds after a drag, then after a click on each bar that the pointer finds. */
function clicks(canvas) {
  const field = document.querySelector("nav input"), width = canvas.clientWidth;
  const send = (kind, x, y) => {
    const box = canvas.getBoundingClientRect();  // a click scrolls the page
    const at = { clientX: box.left + x, clientY: box.top + y, pointerId: 1 };
    canvas.dispatchEvent(new PointerEvent(kind, at));
  };
  canvas.setPointerCapture = () => {};
  const shown = () => [...document.querySelectorAll("main table tbody tr:not([hidden])")].length;
  const found = [];
  for (let x = 5; x < width; x += 7) {
    send("pointerdown", x, 50);
    send("pointerup", x, 50);
    send("click", x, 50);
    found.push([field.value || document.querySelector("nav output").textContent, shown()]);
  }
  dispatchEvent(new CustomEvent("search-for", { detail: "stage 0" }));
  const named = [field.value, shown()];
  field.value = "";
  send("pointerdown", 300, 50);
  send("pointermove", 250, 50);
  send("pointerup", 250, 50);
  send("click", 250, 50);
  const dragged = field.value;
  field.dispatchEvent(new Event("input"));
  return { found, named, dragged };
}
addEventListener("load", () => setTimeout(() => {
  const count = (what) => document.querySelectorAll(what).length;
  const canvas = document.querySelector(".timeline canvas");
  const pixels = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
  const box = canvas.getBoundingClientRect();
  for (let x = box.left + 80; x < box.right; x += 3)
    canvas.dispatchEvent(new PointerEvent("pointermove", { clientX: x, clientY: box.top + 50 }));
  const field = document.querySelector("nav input"), tables = "main table tbody tr";
  const rows = () => [...document.querySelectorAll(tables)].filter((row) => !row.hidden).length;
  const whole = rows();
  field.value = "captured no such row";
  field.dispatchEvent(new Event("input"));
  const none = rows();
  field.value = "stage 0";
  field.dispatchEvent(new Event("input"));
  const some = rows();
  field.value = "";
  field.dispatchEvent(new Event("input"));
  const clicked = clicks(canvas);
  document.documentElement.dataset.probe = JSON.stringify({
    searched: [whole, some, none, rows()],
    clicked: clicked,
    heard: heard,
    requests: performance.getEntriesByType("resource").map((e) => e.name),
    bars: count("#plot-steps .bars .point path"),
    points: count("#plot-live .scatterlayer .point"),
    memory: count("#plot-memory .bars .point path"),
    marks: Number(canvas.dataset.marks),
    painted: pixels.some((value) => value > 0),
    tip: document.querySelector(".timeline .tip").textContent,
    overflow: document.documentElement.scrollWidth - document.documentElement.clientWidth,
    foreign: count("img, [onclick], main b:not(.tip b)"),
    text: document.querySelector("main").innerText,
  });
}, 500));
</script>"""


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The report of a pipeline with two live ranks, opened on a narrow screen."""
    result, timeline, _ = report_run()
    page = render(result, run_sections(result, timeline))
    return open_page(page, PROBE, tmp_path_factory.mktemp("browser"))


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The report of a program whose names are markup."""
    evil = "</script><img src=x onerror=alert(1)><b onclick=alert(2)>{{7*7}}"
    result, timeline, _ = report_run(command=evil, data_name=evil, pp=2)
    page = render(result, run_sections(result, timeline))
    return open_page(page, PROBE, tmp_path_factory.mktemp("hostile"))


def test_plots_are_drawn(seen: dict[str, Any]) -> None:
    """Every plot has marks: four stages, two ranks of twelve steps."""
    assert seen["bars"] >= 4 * 5
    assert seen["points"] == 2 * 12
    assert seen["memory"] == 4


def test_a_search_shows_the_rows_that_hold_its_words(seen: dict[str, Any]) -> None:
    """Of all tables; none where no row does, and all again without words."""
    whole, some, none, again = seen["searched"]
    assert whole == again > some > none == 0


def test_a_click_on_a_bar_searches_and_never_empties_the_page(seen: dict[str, Any]) -> None:
    """For its phase or group, and says so if no row names it; a drag searches for nothing."""
    clicked = seen["clicked"]
    assert "no row says “forward”" in {said for said, _ in clicked["found"]}
    assert all(rows > 0 for _, rows in clicked["found"])
    assert clicked["named"] == ["stage 0", 1]
    assert clicked["dragged"] == ""


def test_timeline_is_drawn_and_explains_itself(seen: dict[str, Any]) -> None:
    """The canvas is painted, and pointing at a bar says what it is, on which rank."""
    assert seen["marks"] > 200
    assert seen["painted"]
    assert re.search(r"s on rank \d+$", seen["tip"])


def test_nothing_fails_and_nothing_is_requested(seen: dict[str, Any]) -> None:
    """No error on the console, nothing that the page's policy had to block, no request."""
    assert seen["heard"] == []
    assert seen["requests"] == []


def test_a_narrow_screen_does_not_scroll_sideways(seen: dict[str, Any]) -> None:
    """The page is as wide as the screen."""
    assert seen["overflow"] == 0


def test_names_of_users_stay_text(hostile: dict[str, Any]) -> None:
    """Markup in a command or group name is shown, not run."""
    assert hostile["heard"] == []
    assert hostile["foreign"] == 0
    assert "<img src=x onerror=alert(1)><b onclick=alert(2)>{{7*7}}" in hostile["text"]
