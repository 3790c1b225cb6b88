"""Pages in two languages: docs/zh/X is the Chinese of docs/X, and each links to the other."""

CHINESE = "zh/"
NAMES = {"en": "English", "zh-CN": "中文"}


def language_of(page: str) -> str:
    """The language of a page, as HTML names it."""
    return "zh-CN" if page.startswith(CHINESE) else "en"


def twin_of(page: str) -> str:
    """The same page in the other language, if there is one."""
    return page.removeprefix(CHINESE) if page.startswith(CHINESE) else CHINESE + page


def tell_template(app, pagename, templatename, context, doctree) -> None:
    """What the page's templates ask for."""
    context["language"] = language_of(pagename)
    twin = twin_of(pagename)
    if twin in app.env.found_docs:
        other = language_of(twin)
        context["twin"] = {"page": twin, "language": other, "name": NAMES[other]}


def setup(app) -> dict:
    """Called by Sphinx."""
    app.connect("html-page-context", tell_template)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
