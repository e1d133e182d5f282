"""
Settings of the example shop.

Everything has a default, so that it runs on a bare machine. From the environment come ``DATABASE_URL``
(unset: a private PostgreSQL under ``.postgres``), ``EMAIL_HOST`` and ``EMAIL_PORT`` (unset: mails are
written to files under ``.mail``), ``RECEIPT_RETRY_SECONDS`` and ``DEBUG``.
"""

import os
from pathlib import Path

import django
import environ

BASE_DIR = Path(__file__).resolve().parent
env = environ.Env()

DEBUG = env.bool("DEBUG", True)
SECRET_KEY = "an example has no secrets"
ALLOWED_HOSTS = ["localhost", "127.0.0.1", "[::1]"]

INSTALLED_APPS = [
    "django.contrib.admin",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.sessions",
    "django.contrib.messages",
    "django.contrib.staticfiles",
    "django_pgqueue",
    "shop",
]

MIDDLEWARE = [
    "django.middleware.security.SecurityMiddleware",
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.common.CommonMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
    "django.middleware.clickjacking.XFrameOptionsMiddleware",
]

if django.VERSION >= (6, 0):
    MIDDLEWARE.insert(1, "django.middleware.csp.ContentSecurityPolicyMiddleware")
    SECURE_CSP = {
        "default-src": ["'self'"],
        "img-src": ["'self'", "data:"],  # the admin's icons
        "object-src": ["'none'"],
        "base-uri": ["'none'"],
        "frame-ancestors": ["'none'"],
    }

ROOT_URLCONF = "urls"

TEMPLATES = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "APP_DIRS": True,
        "OPTIONS": {
            "context_processors": [
                "django.template.context_processors.request",
                "django.contrib.auth.context_processors.auth",
                "django.contrib.messages.context_processors.messages",
            ],
        },
    },
]

# Each process that uses the private server asks for it here, and the server stops after the last of
# them. So its URL is not put into os.environ: a child process must ask too.
database_url = os.environ.get("DATABASE_URL")
if not database_url:
    import embedded_pg

    database_url = embedded_pg.url(BASE_DIR / ".postgres")
DATABASES = {"default": env.db_url_config(database_url)}
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"

RECEIPT_RETRY_SECONDS = env.float("RECEIPT_RETRY_SECONDS", 15.0)
TASKS = {
    "default": {
        "BACKEND": "django_pgqueue.PgQueueBackend",
        "QUEUES": ["default", "email"],
        "OPTIONS": {"BACKOFF": RECEIPT_RETRY_SECONDS},
    },
}

email_host = env.str("EMAIL_HOST", "")
email_port = env.int("EMAIL_PORT", 25)
mail_directory = BASE_DIR / ".mail"
if django.VERSION >= (6, 1):
    MAILERS = {
        "default": {
            "BACKEND": "django.core.mail.backends.smtp.EmailBackend",
            "OPTIONS": {"host": email_host, "port": email_port, "timeout": 10},
        }
        if email_host
        else {
            "BACKEND": "django.core.mail.backends.filebased.EmailBackend",
            "OPTIONS": {"file_path": mail_directory},
        },
    }
else:
    EMAIL_BACKEND = f"django.core.mail.backends.{'smtp' if email_host else 'filebased'}.EmailBackend"
    EMAIL_HOST = email_host
    EMAIL_PORT = email_port
    EMAIL_TIMEOUT = 10
    EMAIL_FILE_PATH = mail_directory
RECEIPTS_GO_TO = f"the mail server at {email_host}:{email_port}" if email_host else f"files in {mail_directory}"
DEFAULT_FROM_EMAIL = "The Teapot Shop <shop@shop.example>"

STATIC_URL = "static/"
USE_TZ = True
TIME_ZONE = "UTC"
