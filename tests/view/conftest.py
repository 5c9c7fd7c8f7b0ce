"""A server of a run, a browser, and pages in it."""

import os
import shutil
from contextlib import ExitStack

import pytest

from tests.view.serving import serving

PATIENCE = 120_000
"""Milliseconds; the machine may be busy."""


@pytest.fixture(scope="module")
def ask(run):
    with serving(run) as ask:
        yield ask


@pytest.fixture(scope="module")
def browser():
    sync_api = pytest.importorskip("playwright.sync_api")
    names = ("chromium", "chromium-browser", "google-chrome")
    path = next(filter(None, map(shutil.which, names)), None)
    if path is None:
        pytest.skip(f"no browser ({', '.join(names)}); tools/install/browser.sh installs one")
    sync_api.expect.set_options(timeout=PATIENCE)
    # Chromium does not put root in its sandbox.
    arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=arguments)
        yield browser
        browser.close()


@pytest.fixture
def visit(browser):
    """Opens the page over these runs; at the end, no console error must have occurred and nothing been injected."""
    opened = []

    def visit(*folders, tab=None):
        server = servers.enter_context(serving(*folders))
        page = browser.new_page(viewport={"width": 1360, "height": 900})
        opened.append(page)
        page.set_default_timeout(PATIENCE)
        page.complaints, page.viewer = [], server.viewer
        page.on("console", lambda said: page.complaints.append(said.text) if said.type == "error" else None)
        page.on("pageerror", lambda error: page.complaints.append(str(error)))
        page.goto(page.viewer.url)
        page.locator("main > section:visible").wait_for()
        if tab:
            page.get_by_role("link", name=tab).click()
        return page

    with ExitStack() as servers:
        yield visit
        for page in opened:
            complaints, injected = page.complaints, page.evaluate("window.injected")
            page.close()
            assert complaints == [] and injected is None
