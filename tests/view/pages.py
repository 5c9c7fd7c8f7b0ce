"""Parts of the page in a browser."""

from playwright.sync_api import Page, expect


def turn_to(page: Page, name: str) -> None:
    page.get_by_role("link", name=name).click()


def panel(page):
    return page.locator("main > section:visible")


def tooltip(page):
    """The tooltip: its title, and its values by name."""
    tooltip = page.locator("#tooltip")
    expect(tooltip).to_be_visible()
    names, values = tooltip.locator("dt").all_inner_texts(), tooltip.locator("dd").all_inner_texts()
    return tooltip.locator("strong").inner_text(), dict(zip(names, values, strict=True))
