"""What a worker prints when the project has not said otherwise."""

import logging


def configure_logging(level: int) -> None:
    """Print the package's log at *level* to standard error, unless LOGGING has given it a handler."""
    logger = logging.getLogger("django_pgqueue")
    if logger.level == logging.NOTSET:
        logger.setLevel(level)
    if not logger.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s [%(process)d] %(message)s"))
        logger.addHandler(handler)
