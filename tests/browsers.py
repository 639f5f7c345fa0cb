"""Fixtures of tests in a real browser; without Chromium these are skipped."""

import shutil

import pytest


@pytest.fixture(scope="session")
def browser():
    api = pytest.importorskip("playwright.sync_api")
    path = shutil.which("chromium") or shutil.which("google-chrome")
    if path is None:
        pytest.skip("there is no Chromium, with which the page is tested")
    with api.sync_playwright() as driver:
        opened = driver.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture
def opened(browser):
    """Opens the page of a run in a browser; what goes wrong there fails the test."""
    errors, tabs = [], []

    def open_page(page, **settings):
        tab = browser.new_page(**settings)
        tab.on("console", lambda message: errors.append(message.text))
        tab.on("pageerror", lambda error: errors.append(str(error)))
        tab.goto(page.link)
        tabs.append(tab)
        return tab

    yield open_page
    for tab in tabs:
        tab.close()
    assert [text for text in errors if "ERR_" not in text] == []
