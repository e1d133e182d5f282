"""What a worker prints when the project has not said otherwise."""

import logging

# A task's name or an error's text could pretend to be another line, or move a terminal's cursor.
_VISIBLE = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160))}


def configure_logging(level: int) -> None:
    """Print the package's log at *level* to standard error, unless LOGGING has given it a handler."""
    logger = logging.getLogger("django_pgqueue")
    # LOGGING disables the loggers that it finds, unless told otherwise, and the child's is there before it.
    logger.disabled = False
    if logger.level == logging.NOTSET:
        logger.setLevel(level)
    if not logger.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(_Formatter("%(asctime)s %(levelname)s [%(process)d] %(message)s"))
        logger.addHandler(handler)


class _Formatter(logging.Formatter):
    def formatMessage(self, record: logging.LogRecord) -> str:
        return super().formatMessage(record).translate(_VISIBLE)
