"""The German translation: complete, up to date, compiled from what is read here, and right about one and many."""

import ast
import gettext
import re
from pathlib import Path

import pytest
from django.utils.translation.template import templatize

import django_pgqueue
from django_pgqueue.models import Job

from .admin_pages import LIST, act, actions_of, make_attempt, make_job, make_jobs, page_of, said, text_of

ROOT = Path(django_pgqueue.__file__).parent
DIRECTORY = ROOT / "locale/de/LC_MESSAGES"
# The functions that mark texts for translation, with their arguments: c a context, s a text, p its plural.
MARKERS = {
    "_": "s",
    "gettext": "s",
    "gettext_lazy": "s",
    "ngettext": "sp",
    "ngettext_lazy": "sp",
    "pgettext": "cs",
    "pgettext_lazy": "cs",
    "npgettext": "csp",
}


def test_every_text_of_ours_is_translated_and_nothing_else():
    assert set(marked_in_code()) | set(marked_in_templates()) == set(po_file())


def test_no_translation_is_empty_or_a_guess():
    empty = [text for text, translations in po_file().items() if not all(translations)]

    assert empty == []
    assert "fuzzy" not in (DIRECTORY / "django.po").read_text()


def test_a_text_and_its_translation_have_the_same_placeholders():
    def placeholders(text):
        return sorted(re.findall(r"%\(\w+\)[sd]", text))

    wrong = [
        (msgid, translated)
        for (_context, msgid), translations in po_file().items()
        for translated in translations
        if placeholders(translated) != placeholders(msgid)
    ]

    assert wrong == []


def test_the_compiled_translation_is_that_of_its_source():
    with (DIRECTORY / "django.mo").open("rb") as file:
        compiled = gettext.GNUTranslations(file)._catalog

    expected = {}
    for (context, msgid), translations in po_file().items():
        key = f"{context}\x04{msgid}" if context else msgid
        many = {(key, number): text for number, text in enumerate(translations)}
        expected |= many if len(translations) > 1 else {key: translations[0]}
    assert {key: text for key, text in compiled.items() if key} == expected


@pytest.mark.django_db
class TestPages:
    @pytest.fixture(autouse=True)
    def _in_german(self, settings):
        settings.LANGUAGE_CODE = "de"

    def test_pages_speak_german(self, admin):
        job = make_job("failed", attempts=1)
        make_attempt(job)

        jobs, page, causes = [text_of(admin.get(address)) for address in (LIST, page_of(job), f"{LIST}dead-letters/")]

        assert "fehlgeschlagen" in jobs and "Nach Warteschlange" in jobs and "Hintergrundaufträge" in jobs
        assert "1 von 5" in page and "Versuche, der neueste zuerst" in page
        assert "Es gibt 1 fehlgeschlagenen Auftrag." in causes

    def test_actions_speak_german(self, admin):
        make_job()

        assert actions_of(admin) == {
            "requeue": "Ausgewählte Aufträge erneut einreihen",
            "hold": "Ausgewählte Aufträge zurückhalten",
            "unhold": "Ausgewählte Aufträge freigeben",
            "cancel": "Ausgewählte Aufträge abbrechen",
        }

    @pytest.mark.parametrize(
        ("count", "sentence"),
        [(1, "1 Auftrag wurde erneut eingereiht."), (2, "2 Aufträge wurden erneut eingereiht.")],
    )
    def test_one_and_many_differ(self, admin, count, sentence):
        make_jobs(count, "failed")

        response = act(admin, "requeue", Job(pk=0), select_across="1", confirmed="yes")

        assert said(response) == [("success", sentence)]

    def test_numbers_are_written_as_germans_write_them(self, admin):
        job = make_job("done", args=["a" * 30_000])

        assert "die ersten 20.000 von 30.00" in text_of(admin.get(page_of(job)))


def po_file():
    """The translations of each text, by its context and itself."""
    entries = {}
    for block in (DIRECTORY / "django.po").read_text().split("\n\n"):
        fields, name = {}, None
        for line in block.splitlines():
            if line.startswith("#"):
                continue
            if not line.startswith('"'):
                name, line = line.split(" ", 1)
            fields[name] = fields.get(name, "") + ast.literal_eval(line)
        if fields.get("msgid"):
            translations = [text for name, text in fields.items() if name.startswith("msgstr")]
            entries[fields.get("msgctxt", ""), fields["msgid"]] = translations
    return entries


def marked_in_code():
    for path in ROOT.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in MARKERS:
                yield _text(MARKERS[node.func.id], [ast.literal_eval(argument) for argument in _literals(node.args)])


def marked_in_templates():
    for path in ROOT.rglob("*.html"):
        for marker, arguments in re.findall(r"\b(_|n?p?gettext)\((.*?)\) ", templatize(path.read_text())):
            yield _text(MARKERS[marker], _strings(arguments))


def _literals(arguments):
    return [argument for argument in arguments if isinstance(argument, ast.Constant)]


def _strings(arguments):
    """The string literals at the beginning of *arguments*."""
    [call] = ast.parse(f"f({arguments})").body
    return [literal.value for literal in _literals(call.value.args)]


def _text(order, arguments):
    found = dict(zip(order, arguments, strict=False))
    return found.get("c", ""), found["s"]
