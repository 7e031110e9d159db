"""The page: well-formed, self-contained, safe to open, and loud about digits."""

import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from virtualgrad.lab.report.page import page
from virtualgrad.lab.report.sections import gather

VOID = {"meta", "br", "link", "img"}


class Checker(HTMLParser):
    """Follow the tags: every one that opens must close, in order; ids must be unique."""

    def __init__(self, html):
        super().__init__()
        self.open, self.seen, self.ids, self.references = [], [], [], []
        self.feed(html)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.handle_startendtag(tag, attrs)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.seen.append(tag)
        for name, value in attrs:
            if name == "id":
                self.ids.append(value)
            elif name in ("href", "src", "xlink:href"):
                self.references.append(value)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


@pytest.fixture(scope="module")
def html(paper_runs):
    return page(gather(paper_runs))


def test_tags_are_balanced_and_ids_unique(html):
    checker = Checker(html)
    assert len(checker.ids) == len(set(checker.ids))
    assert checker.seen.count("svg") == 3 * 6
    assert checker.seen.count("table") == 3 * 3 + 1


def test_nothing_is_fetched(html):
    checker = Checker(html)
    assert checker.references
    assert all(reference.startswith("#") for reference in checker.references)
    assert {reference[1:] for reference in checker.references} <= set(checker.ids)
    assert not re.search(r"https?://|//[a-z]|@import|url\((?!#)", html)
    assert not {"script", "link", "img", "iframe"} & set(checker.seen)


def test_drawings_follow_the_theme(html):
    drawings = re.findall(r"<svg.*?</svg>", html, flags=re.DOTALL)
    for drawing in drawings:
        assert not re.search(r"(fill|stroke): #(?!ffffff)", drawing)
        assert "font-family" not in drawing and "<style" not in drawing
    assert "prefers-color-scheme: dark" in html


def test_tables_verdicts_and_settings_are_there(html):
    assert '<td class="best">8.62 <span class="sd">± 0.14</span></td>' in html
    assert '<li class="met">SVGD is 2.07 points better than SGD' in html
    assert "None: every optimizer has a finished run for every seed." in html
    assert '<th scope="row">batch_size</th><td>32</td>' in html
    assert '<th scope="row">date</th><td>2026-01-01 to 2026-01-02</td>' in html
    assert 'role="alert"' not in html


def test_digits_are_announced_before_anything_else(make, digits):
    html = page(gather([make(data=digits)]))
    body = html.split("<body>")[1].strip()
    assert body.startswith('<p class="banner" role="alert">These results are on the small embedded')


def test_open_runs_and_absent_recipes_are_listed(make):
    html = page(gather([make(seed=0), make(seed=1, finished=False)]))
    assert "<li>SVGD, seed 1: unfinished, at step 6,000</li>" in html
    assert "<li>SGD, seeds 0, 1: missing</li>" in html
    assert "No finished run in this folder: VGG on CIFAR-10, ResNet-20 on CIFAR-10." in html


def test_names_from_records_cannot_become_tags(make):
    record = replace(make(), optimizer="<script>alert(1)</script>", environment={})
    record.settings["note"] = "<b>&"
    html = page(gather([record]))
    assert "<script" not in html and "<b>" not in html
    Checker(html)
