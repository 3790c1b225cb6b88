"""Pages in two languages: docs/zh/X is the Chinese of docs/X, and each links to the other.

On Chinese pages the theme's own words and the sidebar are Chinese, too.
"""

import re

CHINESE = "zh/"
NAMES = {"en": "English", "zh-CN": "中文"}
AFTER_THEME = 900  # the priority of a handler that runs when the theme has made its sidebar

THEME = {
    "Edit this page": "编辑本页",
    "Home": "首页",
    "Index": "索引",
    "Next": "下一页",
    "On this page": "本页内容",
    "Previous": "上一页",
    "Search": "搜索",
    "View this page": "查看源文件",
}
# Captions and titles in the sidebar; what is not here, such as a module's name, stays
SIDEBAR = {
    "Use": "使用",
    "Install": "安装",
    "Quick start": "快速上手",
    "From another attention": "从别的注意力迁移",
    "Supported features": "支持的功能",
    "Serving": "推理服务",
    "One sequence over several processes": "一条序列分布到多个进程",
    "transformers, class by class": "transformers 逐类对照",
    "Figures": "实测数据",
    "Tuning": "调优",
    "Troubleshooting": "故障排查",
    "Understand": "理解",
    "The tour": "教程（英文）",
    "Watch it work": "动手看一看（英文）",
    "Design": "设计",
    "Adding a kernel": "添加内核",
    "Glossary": "术语表",
}


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


def translate_theme(app, pagename, templatename, context, doctree) -> None:
    """The theme's own words and the sidebar's titles, on Chinese pages."""
    if language_of(pagename) == "en":
        return
    context["_"] = lambda text: THEME.get(text, text)
    if tree := context.get("furo_navigation_tree"):
        context["furo_navigation_tree"] = in_chinese(tree)


def in_chinese(tree: str) -> str:
    """The sidebar's HTML with its captions and titles in Chinese."""
    return re.sub(r">([^<>]+)</(a|span)>", _translated, tree)


def _translated(found: re.Match[str]) -> str:
    return f">{SIDEBAR.get(found[1], found[1])}</{found[2]}>"


def setup(app) -> dict:
    """Called by Sphinx."""
    app.connect("html-page-context", tell_template)
    app.connect("html-page-context", translate_theme, priority=AFTER_THEME)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
