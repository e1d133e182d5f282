"""Tracebacks for people: the project's own frames set apart, and nothing of the text lost or believed."""

import re
import traceback

import pytest

from django_pgqueue.admin import frames

from .admin_pages import make_attempt, make_job, page_of, text_of

TRACEBACK = """\
Traceback (most recent call last):
  File "/usr/lib/python3.13/asyncio/runners.py", line 195, in run
    return runner.run(main)
  File "/srv/shop/tasks.py", line 12, in send_receipt
    charge(
    ~~~~~~^
        order,
    )
  File "/srv/shop/payments.py", line 3, in charge
    requests.post(url)
  File "/srv/shop/.venv/lib/python3.13/site-packages/requests/api.py", line 115, in post
    return request("post", url)
  [Previous line repeated 3 more times]
OSError: unplugged

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "/srv/shop/tasks.py", line 14, in send_receipt
    raise Declined
shop.Declined
"""


def own_lines(text):
    return [line.strip() for part in frames.parts(text) if part.is_own for line in part.text.splitlines()]


def test_frames_of_the_project_are_told_from_those_of_libraries():
    assert own_lines(TRACEBACK) == [
        'File "/srv/shop/tasks.py", line 12, in send_receipt',
        "charge(",
        "~~~~~~^",
        "order,",
        ")",
        'File "/srv/shop/payments.py", line 3, in charge',
        "requests.post(url)",
        'File "/srv/shop/tasks.py", line 14, in send_receipt',
        "raise Declined",
    ]


def test_frames_that_follow_each_other_make_one_part():
    assert [part.is_own for part in frames.parts(TRACEBACK)] == [False, True, False, True, False]


@pytest.mark.parametrize(
    "text",
    [TRACEBACK, "", "\n", "no traceback", TRACEBACK.replace("\n", "\r\n"), '  File "a.py", line 1', "\x85\u2028\x0c"],
)
def test_no_character_is_lost(text):
    assert "".join(part.text for part in frames.parts(text)) == text


@pytest.mark.parametrize(
    ("path", "is_own"),
    [
        ("/srv/shop/tasks.py", True),
        ("shop/tasks.py", True),
        ("C:\\shop\\tasks.py", True),
        ("/srv/library/python3/tasks.py", True),
        ("<string>", True),
        ("/usr/lib/python3/dist-packages/django/db.py", False),
        ("/srv/.venv/lib/python3.11/site-packages/x.py", False),
        ("/srv/.venv/lib64/python3.11/site-packages/x.py", False),
        ("C:\\venv\\Lib\\site-packages\\x.py", False),
        ("/root/.pyenv/versions/3.13.0/lib/python3.13/threading.py", False),
        ("/usr/lib/python313.zip/json.py", False),
        ("<frozen importlib._bootstrap>", False),
        (traceback.__file__, False),
        (frames.__file__, False),
        (__file__, True),
    ],
)
def test_a_file_is_the_projects_unless_it_belongs_to_python_to_a_package_or_to_us(path, is_own):
    assert frames.is_own_file(path) == is_own


def test_a_group_of_errors_is_read_like_any_other():
    text = (
        "  + Exception Group Traceback (most recent call last):\n"
        '  |   File "/srv/shop/tasks.py", line 5, in work\n'
        "  |     raise group\n"
        "  | ExceptionGroup: two (1 sub-exception)\n"
        "  +-+---------------- 1 ----------------\n"
        '    |   File "/usr/lib/python3.13/json/decoder.py", line 5, in raw\n'
        "    |     raise\n"
    )

    assert own_lines(text) == ['|   File "/srv/shop/tasks.py", line 5, in work', "|     raise group"]


@pytest.mark.django_db
@pytest.mark.usefixtures("in_english")
def test_the_page_marks_the_projects_frames_by_an_element_and_says_so(admin):
    job = make_job("failed", attempts=1)
    make_attempt(job, traceback=TRACEBACK)

    page = text_of(admin.get(page_of(job)))

    [shown] = re.findall(r'<pre class="pgqueue-text" tabindex="0">(Traceback.*?)</pre>', page, re.DOTALL)
    assert re.sub(r"<[^>]*>", "", shown).replace("&quot;", '"') == TRACEBACK
    assert [text.split("&quot;")[1] for text in re.findall(r"<strong[^>]*>(.*?)</strong>", shown, re.DOTALL)] == [
        "/srv/shop/tasks.py",
        "/srv/shop/tasks.py",
    ]
    assert "Bold, and marked at the margin" in page


@pytest.mark.django_db
def test_a_traceback_becomes_no_markup_in_any_frame(admin):
    evil = "</pre></strong><script>alert(1)</script>"
    job = make_job("failed", attempts=1)
    make_attempt(
        job,
        traceback=f'{evil}\n  File "/srv/{evil}.py", line 1, in {evil}\n    {evil}\n'
        f'  File "/lib/python3.13/{evil}.py", line 1, in {evil}\n    {evil}\n',
    )

    page = text_of(admin.get(page_of(job)))

    assert "<script>" not in page
    assert page.count("&lt;script&gt;alert(1)&lt;/script&gt;") == 7
